"""When the chunks of replicas change for speed, and to what.

Note [When chunks change]
~~~~~~~~~~~~~~~~~~~~~~~~~
A change has to be worth more than a threshold, and more than three times the standard error of what
was measured; otherwise noise would move the chunks back and forth. The balancer judges a change by
the steps after it: if they got longer, it takes the change back, and waits twice as long before the
next one. It measures all the time what a chunk costs each replica, so a device that is throttled
later gets less then, and more again when it has recovered. See Note [What a chunk costs].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dataparallel.extras.balancing.chunk_shares import Cost, divide, slowest
from dataparallel.extras.balancing.replica_speeds import Estimate, SpeedEstimator, measure
from dataparallel.monitor.record import StepRecord

# Steps after a change that are not measured: kernels are chosen, graphs compiled, caches filled.
_SETTLING = 2
# How many standard errors a gain must be above.
_CERTAIN = 3.0


class Decision(NamedTuple):
    """How batches are divided from now on.

    Attributes:
        reason: See :class:`dataparallel.extras.balancing.change.Change`.
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
        every: See :func:`dataparallel.extras.balancing.balancer.balance`.
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
