"""The parts of a sample: readings of devices, of processes and of the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataparallel.monitor.readings.metrics import BY_NAME

#: A device at full load is mostly at its power limit: a state, of which nobody need be told.
POWER_LIMIT = "power limit"


@dataclass(frozen=True)
class DeviceReading:
    """One device at one moment.

    Attributes:
        device: The name under which torch knows it (``"cuda:0"``, ``"cpu"``), or
            ``"nvml:3"`` if torch does not see it.
        name: The vendor's name for it.
        source: The source that has read it: ``"nvml"``, ``"cpu"``.
        uuid: Its identity; None if it has none.
        values: Metric by name, see :mod:`dataparallel.monitor.readings.metrics`; what is left out,
            or None, is not available.
        throttle: The reasons for a lower clock, in words, see :attr:`slowdowns`; empty if none.
        parent: For a MIG instance, the device of which it is a part.
        error: The reason why nothing could be read; None if all is well.
        index: Its number for ``nvidia-smi``, ``"0:1"`` for the second instance of device 0; None
            where it has none.
        bus: Its address on the PCI bus, as ``"00000000:0F:00.0"``; likewise.
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
    bus: str | None = None

    @property
    def identity(self) -> str:
        """A name that stays when the device gets another one, as by CUDA_VISIBLE_DEVICES."""
        return self.uuid or self.device

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """The reasons why it is slower than at full load."""
        return tuple(reason for reason in self.throttle if reason != POWER_LIMIT)

    @property
    def load(self) -> float | None:
        """The share of time in which it works; of a MIG instance, of its processors that do."""
        told = self.value("utilization")
        return self.value("sm_active") if told is None else told

    @property
    def memory_share(self) -> float | None:
        """The share of its memory that is in use."""
        used, total = self.value("memory_used"), self.value("memory_total")
        return used / total if used is not None and total else None

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
        running: For how many seconds it has run; likewise.
        labels: The ``container``, ``pod_uid`` and ``slurm_job`` that it is in.
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
    running: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


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
