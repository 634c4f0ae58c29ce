"""The interface of a source of readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading

#: Over less time than this, in seconds, the system's counters are too coarse to say anything.
SHORTEST_SPAN = 0.1


@dataclass(frozen=True)
class SourceReading:
    """The readings of one source at one moment; a :class:`Sample` says more of each part."""

    devices: tuple[DeviceReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


class Source(Protocol):
    """Something that reads devices.

    Reading never raises for what can happen to a machine: a missing or old driver, a lost device, a
    denied permission. An unavailable value is None, and ``DeviceReading.error`` or the notes tell
    the reason.
    """

    #: A short name: "nvml", "cpu", "replay".
    name: str

    def read(self) -> SourceReading:
        """Read all devices now."""

    def close(self) -> None:
        """Give back what is held. A second call does nothing."""
