"""Watch a run from inside: which replica is in which phase, and what to do about it."""

from dataparallel.monitor.record import ReplicaStep as ReplicaStep
from dataparallel.monitor.record import Segment as Segment
from dataparallel.monitor.record import StepRecord as StepRecord
from dataparallel.monitor.step_monitor import StepMonitor as StepMonitor

__all__ = ["ReplicaStep", "Segment", "StepMonitor", "StepRecord"]
