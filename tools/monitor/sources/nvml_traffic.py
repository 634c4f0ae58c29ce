"""What is read from a device in one batch of numbered fields: traffic, and the memory's heat.

Traffic is told by counters that only grow; it is how much they have grown since they were read
before. The function that tells it directly measures for 20 ms while the caller waits, twice per
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataparallel.tools.monitor.sources.nvml_errors import LASTING, LOST, DeviceLost
from dataparallel.tools.monitor.sources.nvml_query import Handle, Query, number

#: The scope that asks for the sum over all links.
_ALL_LINKS = 0xFFFFFFFF
_LINK_COUNT = 91
_MAX_LINKS = 72

#: What a value's type is called in the union that holds it.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_UNSIGNED_INT = 1


@dataclass(frozen=True)
class _Entry:
    metric: str
    number: int
    scope: int = 0
    scale: float = 1.0
    is_counter: bool = True


_ENTRIES = (
    _Entry("memory_temperature", 82, is_counter=False),
    _Entry("pcie_sent", 197),
    _Entry("pcie_received", 198),
    # In KiB.
    _Entry("nvlink_sent", 138, _ALL_LINKS, 1024),
    _Entry("nvlink_received", 139, _ALL_LINKS, 1024),
    _Entry("", _LINK_COUNT, is_counter=False),
)


class Rates:
    """From counters that only grow to how fast they do."""

    def __init__(self) -> None:
        self._before: dict[Any, tuple[float, float]] = {}

    def rate(self, name: Any, value: float, now: float) -> float | None:
        """How fast a counter has grown since it was last told here.

        Args:
            name: Which counter.
            value: What it shows.
            now: The time in seconds.

        Returns:
            Growth per second; None the first time, and where the counter or the time has gone
            backwards.
        """
        before = self._before.get(name)
        self._before[name] = (value, now)
        if before is None:
            return None
        growth, seconds = value - before[0], now - before[1]
        return growth / seconds if growth >= 0 and seconds > 0 else None


class Traffic:
    """Reads the numbered fields of a device, those that it has, with one call."""

    def __init__(self, query: Query, handle: Handle) -> None:
        self._query = query
        self._handle = handle
        self._entries = list(_ENTRIES)
        self._rates = Rates()

    def read(self, now: float) -> dict[str, float]:
        """The values that are available.

        Args:
            now: The time in seconds, by a clock for differences.
        """
        if not self._entries:
            return {}
        wanted = [(entry.number, entry.scope) for entry in self._entries]
        found = self._query("nvmlDeviceGetFieldValues", self._handle, wanted)
        if found is None:
            return {}
        sums: dict[str, list[float | None]] = {}
        absent: set[_Entry] = set()
        links = 0
        for entry, one in zip(self._entries, found, strict=True):
            if one.nvmlReturn in LOST:
                raise DeviceLost(one.nvmlReturn)
            if one.nvmlReturn:
                absent |= {entry} if one.nvmlReturn in LASTING else set()
                continue
            value = _value(one)
            if entry.number == _LINK_COUNT:
                links = int(value or 0)
            elif _is_too_narrow(entry, one):
                absent.add(entry)
            elif value is not None and entry.is_counter:
                rate = self._rates.rate((entry.number, entry.scope), value * entry.scale, now)
                sums.setdefault(entry.metric, []).append(rate)
            elif value is not None:
                sums[entry.metric] = [value]
        self._choose(absent, links)
        return {
            metric: sum(part for part in parts if part is not None)
            for metric, parts in sums.items()
            if None not in parts
        }

    def _choose(self, absent: set[_Entry], links: int) -> None:
        """Ask no more for what is absent; for the sum over links, ask for each link."""
        each = [
            _Entry(entry.metric, entry.number, link, entry.scale)
            for entry in absent
            if entry.scope == _ALL_LINKS
            for link in range(min(links, _MAX_LINKS))
        ]
        kept = [e for e in self._entries if e not in absent and e.number != _LINK_COUNT]
        self._entries = [*kept, *each]


def _value(one: Any) -> float | None:
    if not 0 <= one.valueType < len(_MEMBERS):
        return None
    return number(getattr(one.value, _MEMBERS[one.valueType]))


def _is_too_narrow(entry: _Entry, one: Any) -> bool:
    """Whether a counter of bytes has 32 bits: those overflow several times a second."""
    return entry.is_counter and entry.scale == 1 and one.valueType == _UNSIGNED_INT
