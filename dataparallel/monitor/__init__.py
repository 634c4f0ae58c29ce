"""A view of a run from inside: the phase of each replica, and advice.

And the devices, for whoever asks: :func:`devices` and :func:`processes`.
"""

import importlib as _importlib
import typing as _typing

from dataparallel.errors import needs_extra as _needs_extra

if _typing.TYPE_CHECKING:
    from dataparallel.monitor.machine import devices as devices
    from dataparallel.monitor.machine import processes as processes
    from dataparallel.monitor.readings.reading import DeviceReading as DeviceReading
    from dataparallel.monitor.readings.reading import ProcessReading as ProcessReading
    from dataparallel.monitor.record import ReplicaStep as ReplicaStep
    from dataparallel.monitor.record import Segment as Segment
    from dataparallel.monitor.record import StepRecord as StepRecord
    from dataparallel.monitor.step_monitor import StepMonitor as StepMonitor

#: The module of each name, which is imported when somebody asks for it; some need the extra.
_PLACES = {
    "DeviceReading": "readings.reading",
    "ProcessReading": "readings.reading",
    "ReplicaStep": "record",
    "Segment": "record",
    "StepMonitor": "step_monitor",
    "StepRecord": "record",
    "devices": "machine",
    "load_ipython_extension": "unmodified",
    "processes": "machine",
    "unload_ipython_extension": "unmodified",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _needs_extra("monitor"):
        module = _importlib.import_module(f"dataparallel.monitor.{_PLACES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


__all__ = [
    "DeviceReading",
    "ProcessReading",
    "ReplicaStep",
    "Segment",
    "StepMonitor",
    "StepRecord",
    "devices",
    "processes",
]
