"""The speed of each replica, and the division of batches by it.

Each step and replica has a number of samples and the seconds in which it computed. These are of
forward, of the criterion if the replica runs it, and of backward if each replica's is known by
itself. If one call of autograd runs the backward of all replicas, its length is common to them.
Medians over a window of steps do not follow outliers. The time that a chunk takes however small it
is comes from the slope between sizes that differ enough (Theil and Sen's median of slopes). Without
such sizes time counts as proportional to samples; dividing by that brings other sizes.

Note [When chunks change]
~~~~~~~~~~~~~~~~~~~~~~~~~
A change has to be worth more than a threshold, and more than three times the standard error of the
measurement. Otherwise noise would move the chunks back and forth. If the steps after it got longer,
the balancer takes it back, and waits twice as long before the next one. It goes on measuring, so a
device that is throttled later gets less then, and more again when it has recovered.
"""

from __future__ import annotations

import itertools
import math
import operator
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
# Factors of a normal distribution: its standard deviation over its median deviation, and the
# standard error of a median over that of a mean.
_DEVIATION = 1.4826
_OF_MEDIAN = 1.2533
# Steps after a change that are not measured: kernels are chosen, graphs compiled, caches filled.
_SETTLING = 2
# A gain must exceed this many standard errors.
_CERTAIN = 3.0


# --- how a batch is divided ---------------------------------------------------------------------


class Cost(NamedTuple):
    """The cost of a chunk on one replica: ``fixed + per_sample * samples`` seconds."""

    fixed: float
    per_sample: float

    def seconds(self, samples: int) -> float:
        """Return the time of a chunk of this many samples."""
        return self.fixed + self.per_sample * samples


def slowest(costs: Sequence[Cost], sizes: Sequence[int]) -> float:
    """Seconds until the last replica is done."""
    return max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=False))


def fits(batch_size: int, limits: Sequence[int | None]) -> bool:
    """True if the replicas together may take a batch; a limit is None if none is known."""
    known = [limit for limit in limits if limit is not None]
    return len(known) < len(limits) or sum(known) >= batch_size


def divide(
    batch_size: int, costs: Sequence[Cost] | None, limits: Sequence[int | None]
) -> tuple[int, ...]:
    """Return the chunk sizes with which the slowest replica is done soonest.

    Each replica gets at least one sample. A batch with fewer samples than there are replicas goes
    to the first ones. A batch that is too large for the limits is divided in proportion to them.
    Without costs it is divided as ``torch.chunk`` does if limits allow it.
    """
    count = len(limits)
    even = chunk_lengths(batch_size, count)
    most = [batch_size if limit is None else limit for limit in limits]
    if batch_size < count or (costs is None and not any(map(operator.gt, even, most))):
        return even
    costs = costs or [Cost(0.0, 1.0)] * count
    if sum(most) < batch_size:
        costs = [Cost(0.0, 1 / limit) for limit in most]
        most = [batch_size] * count
    sizes = _done_within(_common_end(batch_size, costs, most), costs, most)
    while sum(sizes) < batch_size:
        free = [i for i in range(count) if sizes[i] < most[i]]
        sizes[min(free, key=lambda i: costs[i].seconds(sizes[i] + 1))] += 1
    return tuple(sizes)


def _done_within(seconds: float, costs: Sequence[Cost], most: Sequence[int]) -> list[int]:
    """Return the number of samples that each replica can take in this time, but at least one."""
    return [
        max(1, min(limit, int((seconds - cost.fixed) / cost.per_sample)))
        for cost, limit in zip(costs, most, strict=True)
    ]


def _common_end(batch_size: int, costs: Sequence[Cost], most: Sequence[int]) -> float:
    """Return the greatest time in which the replicas together take no more than the batch."""
    low, high = 0.0, max(cost.seconds(batch_size) for cost in costs)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_done_within(middle, costs, most)) <= batch_size:
            low = middle
        else:
            high = middle
    return low


# --- what a chunk costs --------------------------------------------------------------------------


class ForwardTimes(NamedTuple):
    """Times of one forward: the samples and own seconds of each replica, and the common seconds."""

    samples: tuple[int, ...]
    seconds: tuple[float, ...]
    common: float


class Estimate(NamedTuple):
    """Costs from a window of steps; ``noise`` is their standard error, as a fraction."""

    costs: tuple[Cost, ...]
    common: float
    samples: int
    noise: float


def measure(record: StepRecord) -> ForwardTimes | None:
    """Measure the replicas' speed from a record; return None if a replica took no part."""
    own = [_own_seconds(replica) for replica in record.replicas]
    backward = [_length_of_backward(replica) for replica in record.replicas]
    samples = [replica.samples for replica in record.replicas]
    if not all(samples) or min(own) <= 0:
        return None
    common = max(backward)
    if common - min(backward) > _SAME:
        common = 0.0
        for i, replica in enumerate(record.replicas):
            own[i] += replica.seconds.get("backward", 0.0)
    calls = max(1, record.calls)
    each = tuple(max(1, n // calls) for n in samples)
    return ForwardTimes(each, tuple(t / calls for t in own), common / calls)


def _own_seconds(replica: ReplicaStep) -> float:
    """Forward, and the criterion if it follows without the outputs being gathered first."""
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


def estimate(steps: Sequence[ForwardTimes]) -> Estimate:
    """Estimate costs from some steps; there must be at least one."""
    costs, errors = [], []
    for replica in range(len(steps[0].samples)):
        pairs = [(step.samples[replica], step.seconds[replica]) for step in steps]
        cost = _fit(pairs)
        spread = _DEVIATION * median(abs(t / cost.seconds(n) - 1) for n, t in pairs)
        errors.append(_OF_MEDIAN * spread / math.sqrt(len(pairs)))
        costs.append(cost)
    samples = int(median(sum(step.samples) for step in steps))
    return Estimate(tuple(costs), median(step.common for step in steps), samples, max(errors))


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


class Change(NamedTuple):
    """One change of the chunks, with its reason.

    Attributes:
        reason: ``"speed"``: the measurements promise shorter steps. ``"worse"``: steps became
            longer, and the Balancer takes a change back. ``"memory"``: a replica ran out of memory.
        before: Samples per replica before the change, for a batch of the last size.
        after: Samples per replica after the change.
        gain: Predicted part of a step's time that the change saves, 0 to 1; None for the other two
            reasons.
        why: The reason in words.
        step: Number of the step before the change, from 1; 0 if no step has ended.
    """

    reason: Literal["speed", "worse", "memory"]
    before: tuple[int, ...]
    after: tuple[int, ...]
    gain: float | None
    why: str
    step: int = 0

    def __str__(self) -> str:
        return (
            f"after step {self.step}: a batch of {sum(self.after)} is divided into {self.after} "
            f"instead of {self.before}, since {self.why}"
        )


class SplitDecisions:
    """The decisions from the records of steps. See Note [When chunks change].

    Attributes:
        costs: By what batches are divided; None for evenly.
        latest: The last measurement; None before that.
    """

    def __init__(self, *, every: int, threshold: float, warmup: int, window: int) -> None:
        self._every, self._threshold, self._skip = every, threshold, warmup
        self._steps: deque[ForwardTimes] = deque(maxlen=window)
        self._waited = 0
        self._patience = 1
        # Before the last change: the costs, and the time per sample.
        self._before: tuple[tuple[Cost, ...] | None, float] | None = None
        self._trains = False
        self.costs: tuple[Cost, ...] | None = None
        self.latest: Estimate | None = None

    def observe(self, record: StepRecord, limits: Sequence[int | None]) -> Change | None:
        """Take in one step; returns what changes, mostly nothing."""
        if record.kind == "train" and not self._trains:
            self._trains = True
            self._steps.clear()
        step = measure(record)
        if step is None or (self._trains and record.kind != "train"):
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._steps.append(step)
        self._waited += 1
        if self._waited < self._every * self._patience:
            return None
        self._waited = 0
        self.latest = estimate(self._steps)
        return self._decide(self.latest, limits)

    def use_costs(self, costs: tuple[Cost, ...] | None) -> None:
        """Divide batches by these from now on."""
        self.costs = costs

    def disturb(self, count: int) -> None:
        """Skip the next ``count`` steps, which may be unlike others; compare with none before."""
        self._skip = max(self._skip, count)
        self._before = None

    def _decide(self, found: Estimate, limits: Sequence[int | None]) -> Change | None:
        least = max(self._threshold, _CERTAIN * found.noise)
        now = divide(found.samples, self.costs, limits)
        took = self._time_per_sample()
        before, self._before = self._before, None
        if before is not None and took > before[1] * (1 + least):
            self._patience *= 2
            self._settle(before[0])
            after = divide(found.samples, self.costs, limits)
            why = f"with these, steps have become {took / before[1] - 1:.0%} longer"
            return Change("worse", now, after, None, why)
        if before is not None:
            self._patience = 1
        after = divide(found.samples, found.costs, limits)
        longest = slowest(found.costs, now)
        saved = longest - slowest(found.costs, after)
        gain = saved / (longest + found.common)
        if gain <= least or len(now) < len(limits):
            return None
        self._before = (self.costs, took)
        self._settle(found.costs)
        return Change("speed", now, after, gain, _why(found, now, gain))

    def _settle(self, costs: tuple[Cost, ...] | None) -> None:
        self.costs = costs
        while len(self._steps) > self._every:
            self._steps.popleft()
        self._skip = _SETTLING

    def _time_per_sample(self) -> float:
        """Median seconds per sample of the slowest replica over the last steps."""
        last = itertools.islice(reversed(self._steps), self._every)
        return median(max(step.seconds) / sum(step.samples) for step in last)


def _why(found: Estimate, sizes: Sequence[int], gain: float) -> str:
    per_sample = [cost.seconds(n) / n for cost, n in zip(found.costs, sizes, strict=True)]
    worst = max(range(len(per_sample)), key=per_sample.__getitem__)
    ratio = per_sample[worst] / min(per_sample)
    return (
        f"a sample takes replica {worst} {ratio:.2f} times as long as the fastest; a step is "
        f"predicted to take {gain:.0%} less time"
    )
