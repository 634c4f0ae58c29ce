"""What the last samples were, and since when something holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.run_history import RunHistory

#: Metrics whose course is kept.
KEPT = ("utilization",)


class History:
    """What the last samples were.

    Example::

        history = History()
        for sample in sampler.samples():
            history.add(sample)
            print(history.course("cpu", "utilization"))

    Args:
        length: How many samples are kept. Default: 600.

    Attributes:
        sample: The newest sample; None before the first one.
        run: What happened lately in the run that is watched.
    """

    def __init__(self, length: int = 600) -> None:
        self.sample: Sample | None = None
        self.run = RunHistory()
        self._length = length
        self._courses: dict[tuple[str, str], deque[float | None]] = {}
        self._since: dict[str, float] = {}

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        if self.sample is not None and sample.elapsed < self.sample.elapsed:
            # A recording that was begun anew: durations count from here.
            self._since.clear()
        self.sample = sample
        self.run.add(sample.run, sample.elapsed)
        present = {device.device: device for device in sample.devices}
        known = dict.fromkeys([*(name for name, _ in self._courses), *present])
        for name in known:
            device = present.get(name)
            for metric in KEPT:
                course = self._courses.setdefault((name, metric), deque(maxlen=self._length))
                course.append(None if device is None else device.value(metric))

    def course(self, device: str, metric: str) -> Sequence[float | None]:
        """The last values of a metric of a device, the newest last; one per sample."""
        return tuple(self._courses.get((device, metric), ()))

    def held(self, name: str, holds: bool) -> float:
        """For how many seconds something has held without a break, as far as samples tell.

        Args:
            name: What it is; asked once per sample.
            holds: Whether it holds now.
        """
        if not holds or self.sample is None:
            self._since.pop(name, None)
            return 0.0
        return self.sample.elapsed - self._since.setdefault(name, self.sample.elapsed)


def in_order(devices: Sequence[DeviceReading]) -> list[DeviceReading]:
    """Devices as they came, the parts of each right behind it."""
    names = {device.device for device in devices}
    wholes = [one for one in devices if one.parent is None or one.parent not in names]
    return [
        one
        for whole in wholes
        for one in (whole, *(d for d in devices if d.parent == whole.device and d is not whole))
    ]
