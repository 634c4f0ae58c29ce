"""How fast each replica computes, from the records of steps.

Note [What a chunk costs]
~~~~~~~~~~~~~~~~~~~~~~~~~
Of each step and replica there is a number of samples and the seconds in which it computed: forward,
the criterion where the replica runs it, and backward where each replica's is known by itself. Where
one call of autograd runs the backward of all replicas, only its whole length is known, and it is
common to them. Medians over a window of steps do not follow outliers. The time that a chunk takes
however small it is comes from the slope between sizes that differ enough (Theil and Sen's median of
slopes); as long as there are none, time is taken to be proportional to samples. Dividing by that
brings sizes closer to the best ones, and so there are other sizes to learn from.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from dataparallel.extras.balancing.chunk_shares import Cost
from dataparallel.monitor.record import ReplicaStep, StepRecord

# Sizes that differ less than that, as a fraction, tell noise rather than a slope.
_DISTINCT = 0.1
# At least this fraction of the time is taken to grow with the samples.
_LEAST_SLOPE = 0.25
# Backwards of replicas that are that close are one call; nanoseconds are rounded as floats.
_SAME = 1e-6
# Of a normal distribution, the standard deviation as a multiple of the median deviation, and the
# standard error of a median as a multiple of that of a mean.
_DEVIATION = 1.4826
_OF_MEDIAN = 1.2533


class Measurement(NamedTuple):
    """What one step tells.

    Attributes:
        samples: Per replica.
        seconds: Per replica, what it computed by itself.
        common: Seconds in which nobody knows which replica computed.
    """

    samples: tuple[int, ...]
    seconds: tuple[float, ...]
    common: float

    def divided(self, calls: int) -> Measurement:
        """The same for one of so many equal forwards."""
        samples = tuple(max(1, n // calls) for n in self.samples)
        seconds = tuple(t / calls for t in self.seconds)
        return Measurement(samples, seconds, self.common / calls)


class Estimate(NamedTuple):
    """What a window of steps tells.

    Attributes:
        costs: Per replica.
        common: Seconds that a step takes besides.
        samples: Samples of a step.
        noise: Standard error of the costs, as a fraction.
    """

    costs: tuple[Cost, ...]
    common: float
    samples: int
    noise: float


def measure(record: StepRecord) -> Measurement | None:
    """What a record tells of the replicas' speed; None if a replica took no part.

    Args:
        record: One step.
    """
    own = [_own_seconds(replica) for replica in record.replicas]
    backward = [_length_of_backward(replica) for replica in record.replicas]
    samples = tuple(replica.samples for replica in record.replicas)
    if not all(samples) or min(own) <= 0:
        return None
    if max(backward) - min(backward) <= _SAME:
        return Measurement(samples, tuple(own), max(backward))
    exclusive = [replica.seconds.get("backward", 0.0) for replica in record.replicas]
    return Measurement(samples, tuple(map(sum, zip(own, exclusive, strict=True))), 0.0)


def _own_seconds(replica: ReplicaStep) -> float:
    """Forward, and the criterion where it follows without the outputs being gathered first."""
    total = 0.0
    before = None
    for segment in replica.segments:
        if segment.phase == "forward" or (segment.phase == "loss" and before == "forward"):
            total += segment.end - segment.begin
        before = segment.phase
    return total


def _length_of_backward(replica: ReplicaStep) -> float:
    segments = [segment for segment in replica.segments if segment.phase == "backward"]
    return segments[-1].end - segments[0].begin if segments else 0.0


class SpeedEstimator:
    """Keeps the last steps and estimates costs. See Note [What a chunk costs].

    Example::

        speeds = SpeedEstimator(window=30)
        speeds.add(measure(record))
        speeds.estimate().costs

    Args:
        window: How many steps are kept.
    """

    def __init__(self, window: int) -> None:
        self._steps: deque[Measurement] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Measurement) -> None:
        """Keep what one more step tells."""
        self._steps.append(step)

    def keep_last(self, count: int) -> None:
        """Forget older steps than the last ``count``."""
        while len(self._steps) > count:
            self._steps.popleft()

    def estimate(self) -> Estimate:
        """What the steps that are kept tell; there must be at least one."""
        steps = list(self._steps)
        samples = int(median(sum(step.samples) for step in steps))
        costs = []
        errors = []
        for replica in range(len(steps[0].samples)):
            pairs = [(step.samples[replica], step.seconds[replica]) for step in steps]
            cost = _fit(pairs)
            deviations = [abs(t / cost.seconds(n) - 1) for n, t in pairs]
            spread = _DEVIATION * median(deviations)
            errors.append(_OF_MEDIAN * spread / math.sqrt(len(pairs)))
            costs.append(cost)
        common = median(step.common for step in steps)
        return Estimate(tuple(costs), common, samples, max(errors))

    def slowest(self, count: int) -> float:
        """Median seconds per sample of the slowest replica over the last ``count`` steps."""
        last = itertools.islice(reversed(self._steps), count)
        return median(max(step.seconds) / sum(step.samples) for step in last)


def _fit(pairs: Sequence[tuple[int, float]]) -> Cost:
    whole = median(t / n for n, t in pairs)
    slopes = list(_slopes(pairs))
    slope = median(slopes) if slopes else whole
    slope = max(slope, _LEAST_SLOPE * whole)
    fixed = median(t - slope * n for n, t in pairs)
    if fixed <= 0:
        return Cost(0.0, whole)
    return Cost(fixed, slope)


def _slopes(pairs: Sequence[tuple[int, float]]) -> Iterator[float]:
    by_size: dict[int, list[float]] = {}
    for n, t in pairs:
        by_size.setdefault(n, []).append(t)
    # One step alone may be an outlier.
    known = [(n, median(times)) for n, times in by_size.items() if len(times) > 1]
    for (n, t), (other, u) in itertools.combinations(known, 2):
        if abs(n - other) >= _DISTINCT * max(n, other):
            yield (t - u) / (n - other)
