"""A view of a run from inside: the phase of each replica, and advice.

And the devices, for whoever asks: :func:`devices`, :func:`processes` and :class:`Collector`.
"""

import importlib as _importlib
import typing as _typing

from dataparallel.errors import needs_extra as _needs_extra
from dataparallel.monitor.record import ReplicaStep as ReplicaStep
from dataparallel.monitor.record import Segment as Segment
from dataparallel.monitor.record import StepRecord as StepRecord
from dataparallel.monitor.step_monitor import StepMonitor as StepMonitor

if _typing.TYPE_CHECKING:
    from dataparallel.monitor.readings.collector import Collector as Collector
    from dataparallel.monitor.readings.machine import devices as devices
    from dataparallel.monitor.readings.machine import processes as processes
    from dataparallel.monitor.readings.reading import DeviceReading as DeviceReading
    from dataparallel.monitor.readings.reading import ProcessReading as ProcessReading

#: The names that need the extra; each is imported when somebody asks for it.
_PLACES = {
    "Collector": "collector",
    "DeviceReading": "reading",
    "ProcessReading": "reading",
    "devices": "machine",
    "processes": "machine",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _needs_extra("monitor"):
        module = _importlib.import_module(f"dataparallel.monitor.readings.{_PLACES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


__all__ = [
    "Collector",
    "DeviceReading",
    "ProcessReading",
    "ReplicaStep",
    "Segment",
    "StepMonitor",
    "StepRecord",
    "devices",
    "processes",
]
