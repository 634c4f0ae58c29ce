"""A sample: the readings of devices, of processes and of the host, and the states of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataparallel.monitor.from_json import record_of
from dataparallel.monitor.readings.reading import DeviceReading, HostReading, ProcessReading
from dataparallel.monitor.run import RunState

#: Seconds since 1970 in the year 5138, up to which all systems tell dates.
_LAST_TIME = 1e11


@dataclass(frozen=True)
class Sample:
    """Everything that was read at one moment.

    Attributes:
        time: Seconds since 1970.
        elapsed: Seconds since the first sample, by a clock that never goes backwards.
        cost: Seconds that reading took.
        devices: One reading per device.
        processes: The processes on the devices.
        host: The host; None if it could not be read.
        runs: The runs that are watched, by job and rank.
        notes: Notes for the user, in words: the missing parts, and how to get them.
        versions: The versions of the drivers of devices: ``{"driver": "570.1", "CUDA": "12.8"}``.
    """

    time: float
    elapsed: float
    cost: float
    devices: tuple[DeviceReading, ...]
    processes: tuple[ProcessReading, ...] = ()
    host: HostReading | None = None
    runs: tuple[RunState, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the sample as values for ``json``; see :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Sample:
        """Return the sample that :meth:`to_json` has described."""
        found = record_of(Sample, data, "sample")
        if not 0 <= found.time < _LAST_TIME:
            raise ValueError(f"this is no sample: its time is {found.time:g}")
        for run in found.runs:
            run.check()
        return found


def json_text(data: Any) -> str:
    """Short JSON, with null for numbers that JSON does not have."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
