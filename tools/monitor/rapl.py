"""Energy of the processors, as Linux counts it (RAPL, "running average power limit")."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dataparallel.tools.monitor.sampler import SHORTEST_SPAN

#: The counter of each package; those of its parts have a second number, and DRAM has another name.
_PACKAGES = "sys/class/powercap/intel-rapl:[0-9]*"


class ProcessorEnergy:
    """Counts the energy of all processors, on from what the system has counted, and their power.

    Most systems let only the superuser read the counters, and virtual machines have none; then
    there is nothing to tell.

    Example::

        energy = ProcessorEnergy()
        energy.read()       # (9120.5, 85.0): joules so far, watts since the last time

    Args:
        root: Where ``sys`` is. Default: ``/``.
        clock: Tells the time in seconds. Default: ``time.monotonic``.
    """

    def __init__(
        self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._before: dict[Path, int] = {}
        for package in sorted(root.glob(_PACKAGES)):
            # "intel-rapl:0:1" is a part of "intel-rapl:0"; "psys" counts the processors again.
            if package.name.count(":") == 1 and _text(package / "name").startswith("package"):
                now = _number(package / "energy_uj")
                if now is not None:
                    self._before[package] = now
        self._joules = self._joules_before = sum(self._before.values()) / 1e6
        self._since = clock()
        self._watts: float | None = None

    def read(self) -> tuple[float | None, float | None]:
        """The joules so far and the watts since the last time; None for what is not told."""
        if not self._before:
            return None, None
        for package, before in self._before.items():
            now = _number(package / "energy_uj")
            if now is None:
                return None, None
            if now < before:
                # The counter has begun again.
                before -= _number(package / "max_energy_range_uj") or before
            self._before[package] = now
            self._joules += (now - before) / 1e6
        span = self._clock() - self._since
        if span >= SHORTEST_SPAN:
            self._watts = (self._joules - self._joules_before) / span
            self._since += span
            self._joules_before = self._joules
        return self._joules, self._watts


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
