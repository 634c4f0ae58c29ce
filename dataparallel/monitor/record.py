"""The record of one training step: the time of each replica in each phase."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dataparallel.monitor.from_json import record_of
from dataparallel.threads import PHASES, Phase


@dataclass(frozen=True)
class Segment:
    """A stretch of a step in which one replica is in one phase.

    Attributes:
        phase: One of :data:`dataparallel.threads.PHASES`.
        begin: Seconds since the step began.
        end: Likewise.
    """

    phase: Phase
    begin: float
    end: float


@dataclass(frozen=True)
class ReplicaStep:
    """One replica in one step.

    Attributes:
        index: Index of the replica within the process.
        device: Name of its device.
        samples: How many samples it got.
        segments: The phases from the beginning of the step to its end, without gaps.
        host_bound: Seconds of its backward (of its forward, where there is none) in which its
            device waited for the host to issue work; 0 on the CPU.
    """

    index: int
    device: str
    samples: int
    segments: tuple[Segment, ...]
    host_bound: float = 0.0

    @property
    def seconds(self) -> dict[Phase, float]:
        """Per phase that occurs, its seconds; together they are the length of the step."""
        total: dict[Phase, float] = {}
        for segment in self.segments:
            length = segment.end - segment.begin
            total[segment.phase] = total.get(segment.phase, 0.0) + length
        return {phase: total[phase] for phase in PHASES if phase in total}


@dataclass(frozen=True)
class StepRecord:
    """One step, from the end of the one before to its own end.

    Attributes:
        number: Number of the step, from 1.
        kind: ``"train"``, or ``"inference"`` for a forward without gradients.
        time: When it began, in seconds since 1970.
        seconds: How long it took.
        samples: How many samples it had in this process.
        replicas: The record of each replica.
        calls: How many forwards it had.
    """

    number: int
    kind: Literal["train", "inference"]
    time: float
    seconds: float
    samples: int
    replicas: tuple[ReplicaStep, ...]
    calls: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the record as values for ``json``; see :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> StepRecord:
        """Return the record that :meth:`to_json` has described; a ValueError if it is none."""
        return record_of(StepRecord, data, "record of a step")
