"""The curves of a plot: what was read from each device, and from each replica, over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataparallel.monitor.findings import add_up, imbalance
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import Phase
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.recorded_time import longest_step
from dataparallel.tools.monitor.run_period import RunPeriod, part_between

#: More points than that are not to be told apart in a picture.
MAX_POINTS = 800
MAX_INTERVALS = 300


@dataclass(frozen=True)
class Curve:
    """A quantity over time.

    Attributes:
        times: Seconds.
        values: NaN where nothing is known, so that there is a gap.
    """

    times: list[float]
    values: list[float]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known at any time."""
        return all(map(math.isnan, self.values))


def device_curves(
    samples: Sequence[Sample],
    times: Sequence[float],
    value: Callable[[DeviceReading], float | None],
) -> dict[str, Curve]:
    """A quantity of each device: the mean of the samples that fall on one point.

    Args:
        samples: The oldest first.
        times: When each was taken, in seconds.
        value: What is drawn of a reading; None where it is not available.

    Returns:
        By the name of a device, in the order in which they come.
    """
    places, centers = _points(times)
    sums: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    for place, sample in zip(places, samples, strict=True):
        for reading in sample.devices:
            if reading.device not in sums:
                sums[reading.device] = [0.0] * len(centers)
                counts[reading.device] = [0] * len(centers)
            known = None if reading.error is not None else value(reading)
            if known is not None:
                sums[reading.device][place] += known
                counts[reading.device][place] += 1
    return {
        device: Curve(
            centers,
            [
                total / count if count else math.nan
                for total, count in zip(sums[device], counts[device], strict=True)
            ],
        )
        for device in sums
    }


def _points(times: Sequence[float]) -> tuple[list[int], list[float]]:
    """To which point each sample belongs, and where the points are. In each gap is an empty one."""
    limit = longest_step(times)
    width = times[-1] / MAX_POINTS if len(times) > MAX_POINTS else 0.0
    places: list[int] = []
    centers: list[float] = []
    begin = -math.inf
    for i, time in enumerate(times):
        is_gap = i > 0 and time - times[i - 1] > limit
        if is_gap:
            centers.append((time + times[i - 1]) / 2)
        if is_gap or time - begin >= width:
            begin = time
            centers.append(time)
        places.append(len(centers) - 1)
    return places, centers


@dataclass(frozen=True)
class Interval:
    """What the replicas did between two samples.

    Attributes:
        begin: Seconds.
        end: Likewise.
        shares: Per replica and phase, its share of the time.
        imbalance: Computing time of the slowest over the mean; None for one replica.
    """

    begin: float
    end: float
    shares: tuple[dict[Phase, float], ...]
    imbalance: float | None


def intervals(periods: Sequence[RunPeriod], times: Sequence[float]) -> list[list[Interval]]:
    """What the replicas did over time, as stretches without a gap.

    Args:
        periods: Of one run, or of what it was started again as.
        times: When each sample was taken, in seconds.
    """
    width = times[-1] / MAX_INTERVALS
    limit = longest_step(times)
    found: list[list[Interval]] = []
    for period in periods:
        stretch: list[Interval] = []
        first = 0
        for i in range(1, len(period.states)):
            now = times[period.places[i]]
            if now - times[period.places[i - 1]] > limit:
                found.append(stretch)
                stretch, first = [], i
                continue
            begin = times[period.places[first]]
            steps = period.states[i].num_steps - period.states[first].num_steps
            if steps and (now - begin >= width or i == len(period.states) - 1):
                stretch.append(_interval(begin, now, period.states[first], period.states[i]))
                first = i
        found.append(stretch)
    return [stretch for stretch in found if stretch]


def _interval(begin: float, end: float, before: RunState, now: RunState) -> Interval:
    totals = add_up([part_between(before, now, None)], now.info)
    shares = tuple(dict(one.shares) for one in totals.replicas)
    return Interval(begin, end, shares, imbalance(totals))
