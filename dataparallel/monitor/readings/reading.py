"""The parts of a sample: readings of devices, of processes and of the host."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataparallel.monitor.readings.metrics import BY_NAME
from dataparallel.monitor.run import RunState


@dataclass(frozen=True)
class DeviceReading:
    """One device at one moment.

    Attributes:
        device: The name under which torch knows it (``"cuda:0"``, ``"virtual:1"``, ``"cpu"``), or
            ``"nvml:3"`` if torch does not see it.
        name: The vendor's name for it.
        source: The source that has read it: ``"nvml"``, ``"cpu"``, ``"virtual"``.
        uuid: Its identity; None if it has none.
        values: Metric by name, see :mod:`dataparallel.monitor.readings.metrics`; what is left out,
            or None, is not available.
        throttle: The reasons why it is slowed down, in words; empty if it is not.
        parent: For a MIG instance, the device of which it is a part.
        error: The reason why nothing could be read; None if all is well.
        index: Its number for ``nvidia-smi``, ``"0:1"`` for the second instance of device 0; None
            where it has none.
    """

    device: str
    name: str
    source: str
    uuid: str | None = None
    values: Mapping[str, float | None] = field(default_factory=dict)
    throttle: tuple[str, ...] = ()
    parent: str | None = None
    error: str | None = None
    index: str | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.values if name not in BY_NAME]
        assert not unknown, unknown

    def value(self, metric: str) -> float | None:
        """Return the value of a metric; None if it is not available."""
        assert metric in BY_NAME, metric
        return self.values.get(metric)


@dataclass(frozen=True)
class ProcessReading:
    """One process that uses a device.

    Attributes:
        device: The device, as in :class:`DeviceReading`.
        pid: Its number, as the driver tells it; inside of a container that is the host's.
        name: Its name; None if it cannot be seen from here.
        user: The user that runs it; likewise.
        memory: Memory of the device that it holds, in bytes; None if that is not told.
        utilization: Its share of the device's time; likewise.
        cpu: Processors of the host that it keeps busy (2.0 is two of them); likewise.
        host_memory: Memory of the host that it holds, in bytes; likewise.
        command: The whole command line; likewise.
        parent: Number of the process that has started it; likewise.
        started: When it was started, in seconds since 1970; likewise.
    """

    device: str
    pid: int
    name: str | None = None
    user: str | None = None
    memory: float | None = None
    utilization: float | None = None
    cpu: float | None = None
    host_memory: float | None = None
    command: str | None = None
    parent: int | None = None
    started: float | None = None


@dataclass(frozen=True)
class HostReading:
    """The host at one moment.

    Attributes:
        utilization: Share of these processors that is busy, from 0 to 1; None if that is not
            available.
        num_cpus: How many processors can be used: those of the host, or what a container is allowed
            to (1.5 is one and a half).
        memory_used: Bytes.
        memory_total: Bytes.
        threads: For the run that is watched, each thread's name and its load of one processor, from
            0 to 1.
        load: How many processes ran or waited for a processor or a disk, on average over 1, 5 and
            15 minutes: of the whole host, also in a container. None if it is not available.
        swap_used: Bytes; likewise.
        swap_total: Bytes; 0 if there is none.
    """

    utilization: float | None
    num_cpus: float
    memory_used: float
    memory_total: float
    threads: Mapping[str, float] = field(default_factory=dict)
    load: tuple[float, float, float] | None = None
    swap_used: float | None = None
    swap_total: float | None = None


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
    def from_json(data: Mapping[str, Any]) -> Sample:
        """Return the sample that :meth:`to_json` has described. Unknown metrics are left out."""
        try:
            return Sample(
                time=float(data["time"]),
                elapsed=float(data["elapsed"]),
                cost=float(data["cost"]),
                devices=tuple(_device(one) for one in data["devices"]),
                processes=tuple(ProcessReading(**one) for one in data["processes"]),
                host=None if data["host"] is None else _host(data["host"]),
                runs=tuple(RunState.from_json(one) for one in data["runs"]),
                notes=tuple(data["notes"]),
                versions=dict(data["versions"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no sample: {error!r} in {data!r:.200}") from error


def _device(data: Mapping[str, Any]) -> DeviceReading:
    # The names are those of the table, so that all samples share them.
    values = {name: data["values"][name] for name in BY_NAME if name in data["values"]}
    return DeviceReading(**{**data, "values": values, "throttle": tuple(data["throttle"])})


def _host(data: Mapping[str, Any]) -> HostReading:
    load = data["load"]
    return HostReading(**{**data, "load": None if load is None else tuple(load)})


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
