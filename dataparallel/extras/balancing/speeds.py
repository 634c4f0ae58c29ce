"""How fast each replica computes, and how batches are divided by that.

Note [What a chunk costs]
~~~~~~~~~~~~~~~~~~~~~~~~~
Of each step and replica there is a number of samples and the seconds in which it computed: forward,
the criterion where the replica runs it, and backward where each replica's is known by itself. Where
one call of autograd runs the backward of all replicas, only its whole length is known, and it is
common to them. Medians over a window of steps do not follow outliers. The time that a chunk takes
however small it is comes from the slope between sizes that differ enough (Theil and Sen's median of
slopes); as long as there are none, time is taken to be proportional to samples. Dividing by that
brings sizes closer to the best ones, and so there are other sizes to learn from.

Note [When chunks change]
~~~~~~~~~~~~~~~~~~~~~~~~~
A change has to be worth more than a threshold, and more than three times the standard error of what
was measured; otherwise noise would move the chunks back and forth. The balancer judges a change by
the steps after it: if they got longer, it takes the change back, and waits twice as long before the
next one. It measures all the time what a chunk costs each replica, so a device that is throttled
later gets less then, and more again when it has recovered. See Note [What a chunk costs].
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple

from dataparallel.comm.local import chunk_lengths
from dataparallel.monitor.record import ReplicaStep, StepRecord

# Halvings after which a time is as exact as a double can be.
_HALVINGS = 100
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
# Steps after a change that are not measured: kernels are chosen, graphs compiled, caches filled.
_SETTLING = 2
# How many standard errors a gain must be above.
_CERTAIN = 3.0


# --- how a batch is divided ---------------------------------------------------------------------


class Cost(NamedTuple):
    """What a chunk costs one replica: ``fixed + per_sample * samples`` seconds.

    Attributes:
        fixed: Seconds that a chunk takes however small it is, at least 0.
        per_sample: Seconds that each sample takes, more than 0.
    """

    fixed: float
    per_sample: float

    def seconds(self, samples: int) -> float:
        """What a chunk of so many samples takes."""
        return self.fixed + self.per_sample * samples


def slowest(costs: Sequence[Cost], sizes: Sequence[int]) -> float:
    """Seconds until the last replica is done."""
    return max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=False))


def fits(batch_size: int, limits: Sequence[int | None]) -> bool:
    """Whether the replicas together may take a batch.

    Args:
        batch_size: Number of samples.
        limits: How many each replica may take, at least 1; None where nothing is known.
    """
    known = [limit for limit in limits if limit is not None]
    return len(known) < len(limits) or sum(known) >= batch_size


def divide(
    batch_size: int, costs: Sequence[Cost] | None, limits: Sequence[int | None]
) -> tuple[int, ...]:
    """The chunk sizes with which the slowest replica is done soonest.

    Example::

        divide(30, [Cost(0, 1), Cost(0, 2)], [None, None])    # (20, 10)
        divide(30, [Cost(0, 1), Cost(0, 2)], [16, None])      # (16, 14)

    Each replica gets at least one sample. A batch with fewer samples than there are replicas goes
    to the first ones. A batch that is too large for the limits is divided in proportion to them.

    Args:
        batch_size: Number of samples.
        costs: What a chunk costs each replica; None to divide as ``torch.chunk`` does where limits
            allow it.
        limits: At most so many samples per replica, at least 1; None is no limit.

    Returns:
        One size per replica that takes part.
    """
    count = len(limits)
    even = chunk_lengths(batch_size, count)
    if batch_size < count or (costs is None and _is_within(even, limits)):
        return even
    costs = [Cost(0.0, 1.0)] * count if costs is None else costs
    most = [batch_size if limit is None else limit for limit in limits]
    if sum(most) < batch_size:
        costs = [Cost(0.0, 1 / limit) for limit in most]
        most = [batch_size] * count
    sizes = _done_within(_common_end(batch_size, costs, most), costs, most)
    while sum(sizes) < batch_size:
        free = [i for i in range(count) if sizes[i] < most[i]]
        sizes[min(free, key=lambda i: costs[i].seconds(sizes[i] + 1))] += 1
    return tuple(sizes)


def _is_within(sizes: Sequence[int], limits: Sequence[int | None]) -> bool:
    pairs = zip(sizes, limits, strict=False)
    return all(limit is None or size <= limit for size, limit in pairs)


def _done_within(seconds: float, costs: Sequence[Cost], most: Sequence[int]) -> list[int]:
    """How many samples each replica can take in so much time, but at least one."""
    return [
        max(1, min(limit, int((seconds - cost.fixed) / cost.per_sample)))
        for cost, limit in zip(costs, most, strict=True)
    ]


def _common_end(batch_size: int, costs: Sequence[Cost], most: Sequence[int]) -> float:
    """The greatest time in which the replicas together take no more than the batch."""
    low, high = 0.0, max(cost.seconds(batch_size) for cost in costs)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_done_within(middle, costs, most)) <= batch_size:
            low = middle
        else:
            high = middle
    return low


# --- what a chunk costs --------------------------------------------------------------------------


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


# --- when chunks change --------------------------------------------------------------------------


class Decision(NamedTuple):
    """How batches are divided from now on.

    Attributes:
        reason: See :class:`dataparallel.extras.balancing.Change`.
        before: Samples per replica until now, of the batch that was measured.
        after: Likewise, from now on.
        gain: Predicted part of a step's time that is saved; None where a change is taken back.
        why: The same in words.
    """

    reason: Literal["speed", "worse"]
    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float | None
    why: str


class SplitDecisions:
    """Decides from the records of steps. See Note [When chunks change].

    Args:
        every: See :func:`dataparallel.balance`.
        threshold: Likewise.
        warmup: Likewise.
        window: Likewise.

    Attributes:
        costs: By what batches are divided; None for evenly.
        latest: What was measured last; None before that.
    """

    def __init__(self, *, every: int, threshold: float, warmup: int, window: int) -> None:
        self._every = every
        self._threshold = threshold
        self._skip = warmup
        self._speeds = SpeedEstimator(window)
        self._waited = 0
        self._patience = 1
        # Before the last change: the costs, and the time per sample.
        self._before: tuple[tuple[Cost, ...] | None, float] | None = None
        self._trains = False
        self.costs: tuple[Cost, ...] | None = None
        self.latest: Estimate | None = None

    def observe(
        self, record: StepRecord, limits: Sequence[int | None], *, act: bool = True
    ) -> Decision | None:
        """Take in one step.

        Args:
            record: The step.
            limits: How many samples each replica may get; None is no limit.
            act: Whether the division may change.

        Returns:
            What changes, mostly nothing.
        """
        if record.kind == "train" and not self._trains:
            self._trains = True
            self._speeds.keep_last(0)
        step = measure(record)
        if step is None or (self._trains and record.kind != "train"):
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._speeds.add(step.divided(max(1, record.calls)))
        self._waited += 1
        if self._waited < self._every * self._patience:
            return None
        self._waited = 0
        self.latest = self._speeds.estimate()
        return self._decide(self.latest, limits) if act else None

    def use_costs(self, costs: tuple[Cost, ...] | None) -> None:
        """Divide batches by these from now on."""
        self.costs = costs

    def disturb(self, count: int = 1) -> None:
        """A step is not like the others, and what it would be compared with was not either.

        Args:
            count: Among so many that come next. Default: 1.
        """
        self._skip = max(self._skip, count)
        self._before = None

    def _decide(self, estimate: Estimate, limits: Sequence[int | None]) -> Decision | None:
        least = max(self._threshold, _CERTAIN * estimate.noise)
        now = divide(estimate.samples, self.costs, limits)
        took = self._speeds.slowest(self._every)
        before, self._before = self._before, None
        if before is not None and took > before[1] * (1 + least):
            self._patience *= 2
            self._settle(before[0])
            after = divide(estimate.samples, self.costs, limits)
            why = f"with these, steps have become {took / before[1] - 1:.0%} longer"
            return Decision("worse", now, after, None, why)
        if before is not None:
            self._patience = 1
        after = divide(estimate.samples, estimate.costs, limits)
        longest = slowest(estimate.costs, now)
        saved = longest - slowest(estimate.costs, after)
        gain = saved / (longest + estimate.common)
        if gain <= least or len(now) < len(limits):
            return None
        self._before = (self.costs, took)
        self._settle(estimate.costs)
        return Decision("speed", now, after, gain, _why(estimate, now, gain))

    def _settle(self, costs: tuple[Cost, ...] | None) -> None:
        self.costs = costs
        self._speeds.keep_last(self._every)
        self._skip = _SETTLING


def _why(estimate: Estimate, sizes: Sequence[int], gain: float) -> str:
    per_sample = [cost.seconds(n) / n for cost, n in zip(estimate.costs, sizes, strict=True)]
    worst = max(range(len(per_sample)), key=per_sample.__getitem__)
    ratio = per_sample[worst] / min(per_sample)
    return (
        f"a sample takes replica {worst} {ratio:.2f} times as long as the fastest; a step is "
        f"predicted to take {gain:.0%} less time"
    )
