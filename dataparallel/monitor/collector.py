"""The readings of devices during parts of a training loop, as numbers for a logger."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from dataparallel.monitor.machine import devices
from dataparallel.monitor.readings.metrics import METRICS
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.selection import Selection


class Collector:
    """A sum of the readings while parts of a program run, each under a tag of its own.

    Within a tag, a thread reads the devices every ``interval`` seconds; outside of all tags nothing
    happens. It works with any training loop, with and without a :class:`StepMonitor`.

    Example::

        with Collector() as collector:
            for epoch in range(10):
                with collector.tag("train"):
                    train(model)
                for name, value in collector.collect("train").items():
                    writer.add_scalar(name, value, epoch)       # train/cuda:0/power_watts/mean
                # wandb.log(collector.collect("train")) takes them, too.

    Args:
        interval: Seconds between two readings. Default: 1.
        only: The devices to read, as for ``--only`` of the commands: ``["cuda:0"]``, or
            ``"cuda:0"``. Default: those that this process can use, and the CPU.

    Raises:
        ImportError: The extra ``monitor`` is not installed.
        ValueError: ``interval`` is not positive, or there is no such device.
    """

    def __init__(self, interval: float = 1.0, *, only: Iterable[str | int] = ()) -> None:
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise ValueError(f"interval must be a number of seconds above 0, but got {interval!r}")
        self._interval = interval
        chosen = (only,) if isinstance(only, str) else tuple(only)
        self._selection = Selection(chosen, only_visible=not chosen)
        if chosen:
            self._selection.check(devices())
        self._lock = threading.Lock()
        self._found: dict[str, _Statistics] = {}
        self._running: list[str] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def tag(self, name: str) -> Iterator[None]:
        """Collect under this name within the ``with`` block. Tags can be nested.

        Example::

            with collector.tag("epoch"), collector.tag("validate"):
                validate(model)

        Args:
            name: The first part of all names that :meth:`collect` gives.
        """
        readings = self._read()
        with self._lock:
            if name not in self._running:
                self._found.setdefault(name, _Statistics()).begin(readings)
            self._running.append(name)
            if self._thread is None:
                self._stopped.clear()
                self._thread = threading.Thread(
                    target=self._run, name="dataparallel-collector", daemon=True
                )
                self._thread.start()
        try:
            yield
        finally:
            self._add(self._read())
            with self._lock:
                self._running.remove(name)

    def collect(self, tag: str) -> dict[str, float]:
        """Return the readings under a tag since they were collected the last time.

        Within the tag, that goes up to now. Afterwards it begins anew.

        Args:
            tag: A name that was given to :meth:`tag`.

        Returns:
            The mean, the minimum and the maximum of each metric of each device, under names such as
            ``train/cuda:0/memory_used_bytes/max``. Metrics that only grow, such as energy and
            errors, have the ``increase``. Nothing if nothing was read since.

        Raises:
            ValueError: There was no such tag.
        """
        if tag in self._running:
            self._add(self._read())
        with self._lock:
            if tag not in self._found:
                known = ", ".join(map(repr, self._found)) or "none yet"
                raise ValueError(f"there is no tag {tag!r}; there are: {known}")
            return self._found[tag].take(tag)

    def close(self) -> None:
        """End the thread. A second call does nothing; a new tag starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopped.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            if self._running:
                self._add(self._read())

    def _read(self) -> list[DeviceReading]:
        return self._selection.devices(devices())

    def _add(self, readings: Sequence[DeviceReading]) -> None:
        with self._lock:
            for name in set(self._running):
                self._found[name].add(readings)


@dataclass
class _Range:
    """Values that were read."""

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.number += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)


class _Statistics:
    """The readings under one tag."""

    def __init__(self) -> None:
        self._ranges: dict[str, _Range] = {}
        self._counters: dict[str, float] = {}
        self._grown: dict[str, float] = {}

    def begin(self, readings: Sequence[DeviceReading]) -> None:
        """Count from here on; the rates of this reading are those of the time before."""
        for name, value, is_counter in _values(readings):
            if is_counter:
                self._counters[name] = value

    def add(self, readings: Sequence[DeviceReading]) -> None:
        for name, value, is_counter in _values(readings):
            if is_counter:
                grown = value - self._counters.get(name, value)
                self._grown[name] = self._grown.get(name, 0.0) + max(0.0, grown)
                self._counters[name] = value
            else:
                self._ranges.setdefault(name, _Range()).add(value)

    def take(self, tag: str) -> dict[str, float]:
        """Return all that there is, which is then forgotten."""
        found = {f"{tag}/{name}/increase": value for name, value in self._grown.items()}
        for name, one in self._ranges.items():
            told = {"mean": one.total / one.number, "min": one.least, "max": one.most}
            found |= {f"{tag}/{name}/{kind}": value for kind, value in told.items()}
        self._ranges, self._grown = {}, {}
        return found


def _values(readings: Sequence[DeviceReading]) -> Iterator[tuple[str, float, bool]]:
    """Names, values, and whether they only grow."""
    for device in readings:
        for metric in METRICS:
            value = device.value(metric.name)
            if value is not None:
                name = f"{device.device}/{metric.name_with_unit.removesuffix('_total')}"
                yield name, value, metric.is_counter
