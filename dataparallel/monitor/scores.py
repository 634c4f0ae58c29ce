"""How fast each replica is: beside the others, and beside its own past.

Note [Straggler scores]
~~~~~~~~~~~~~~~~~~~~~~~
As in NVIDIA's resiliency extension, a score goes from 0 to 1, and 0.5 stands for twice as slow:

    relative     seconds of the fastest replica / seconds of this one, as such (this one holds up
                 the step) and per sample (its device is slower, not its chunk larger)
    individual   seconds per sample in its own best time / seconds per sample now

Only phases in which a replica goes at its own speed count. A replica that waits is not slow, nor
is the first one because it has the optimizer to step, or the loss of all to compute, meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.monitor.record import ReplicaStep, StepRecord
from dataparallel.monitor.totals import RunTotals, in_order
from dataparallel.threads.timeline import Phase

#: So many steps in a row are one point of a replica's history.
WINDOW = 10
#: The slowest replica is a straggler if it takes so much longer than the mean.
_NOTABLE = 0.1
#: Of several replicas on one device one is slower for a reason of its own only if it is so nearly
#: always: otherwise they take turns on the processors.
_NEARLY_ALWAYS = 0.75


@dataclass(frozen=True)
class ReplicaScore:
    """One replica. See Note [Straggler scores].

    Attributes:
        index: Index of the replica within the process.
        device: Name of its device.
        samples: Samples per step.
        seconds: Per phase, seconds per step.
        shares: Per phase, its share of the replica's time.
        compute: Seconds per step in which it computes at its own speed.
        relative: Score among the replicas; None if it does not compute.
        per_sample: The same per sample.
        individual: Score beside its own past; None where too few steps are known.
    """

    index: int
    device: str
    samples: float
    seconds: Mapping[Phase, float]
    shares: Mapping[Phase, float]
    compute: float
    relative: float | None
    per_sample: float | None
    individual: float | None

    @property
    def idle_share(self) -> float:
        """Share of its time in which it waits for the others."""
        return self.shares.get("idle", 0.0)


@dataclass(frozen=True)
class Straggler:
    """The replica for which the others wait most often.

    Attributes:
        index: Index of the replica.
        device: Name of its device.
        share: Share of the steps in which it was the slowest; None where single steps are unknown.
        moves: Whether it is another replica from step to step: then it is not the device that is
            slow, but what it is given, or the host.
        excess: By how much longer than the mean the slowest replica computes, as a ratio.
        waste: Seconds per step by which the slowest replica computes longer than the mean.
    """

    index: int
    device: str
    share: float | None
    moves: bool
    excess: float
    waste: float


def score_replicas(totals: RunTotals, steps: Sequence[StepRecord] = ()) -> tuple[ReplicaScore, ...]:
    """Score each replica.

    Args:
        totals: What the steps add up to.
        steps: Single steps, for the individual scores, the oldest first. Default: none are known.
    """
    number = max(1, totals.num_steps)
    computes = [totals.compute(i) for i in range(len(totals.replicas))]
    each = [
        compute * number / replica.samples if replica.samples else 0.0
        for compute, replica in zip(computes, totals.replicas, strict=True)
    ]
    found = []
    for i, replica in enumerate(totals.replicas):
        seconds = in_order({p: s / number for p, s in replica.seconds.items()})
        whole = sum(seconds.values())
        shares = {phase: value / whole if whole else 0.0 for phase, value in seconds.items()}
        found.append(
            ReplicaScore(
                replica.index,
                replica.device,
                replica.samples / number,
                seconds,
                shares,
                computes[i],
                _relative(computes, i),
                _relative(each, i),
                individual_score([_per_sample(step, i, totals) for step in steps]),
            )
        )
    return tuple(found)


def individual_score(values: Sequence[float | None], window: int = WINDOW) -> float | None:
    """How close a replica comes to its own best time.

    Args:
        values: Per step its seconds per sample, the oldest first; None where it had no sample.
        window: So many steps are one point of its history.

    Returns:
        A score from 0 to 1; None for less than two points.
    """
    known = [value for value in values if value]
    # From the end, so that the last point is the newest.
    ends = range(len(known), window - 1, -window)
    points = [statistics.median(known[end - window : end]) for end in ends]
    return min(points) / points[0] if len(points) > 1 else None


def imbalance(totals: RunTotals, steps: Sequence[StepRecord] = ()) -> float | None:
    """Computing time of the slowest replica over the mean, on average over the steps.

    Args:
        totals: What the steps add up to.
        steps: Single steps. Default: none are known, and the totals tell.

    Returns:
        1 if all take the same time; None if less than two replicas compute.
    """
    rows = _rows(totals, steps)
    slowest, mean = sum(map(max, rows)), sum(sum(row) / len(row) for row in rows)
    return slowest / mean if mean else None


def find_straggler(totals: RunTotals, steps: Sequence[StepRecord] = ()) -> Straggler | None:
    """The replica that holds up the others, and whether it is always the same.

    Args:
        totals: What the steps add up to.
        steps: Single steps, by which one that moves is seen. Default: none are known.

    Returns:
        None if the replicas take about the same time.
    """
    computes = [totals.compute(i) for i in range(len(totals.replicas))]
    taking_part = [i for i, value in enumerate(computes) if value > 0]
    if len(taking_part) < 2:
        return None
    mean = sum(computes[i] for i in taking_part) / len(taking_part)
    slowest = max(taking_part, key=computes.__getitem__)
    always = computes[slowest] / mean - 1
    rows = _rows(totals, steps)
    means = sum(sum(row) / len(row) for row in rows)
    # As ratios, for the steps that are known one by one may be longer than the others.
    excess = max(always, sum(map(max, rows)) / means - 1 if means else 0.0)
    if excess < _NOTABLE:
        return None
    times = [[_compute(replica, totals) for replica in step.replicas] for step in steps]
    firsts = [row.index(max(row)) == slowest for row in times if any(row)]
    share = sum(firsts) / len(firsts) if firsts else None
    # What takes turns evens out in the totals.
    moves = share is not None and always < excess / 2
    if share is not None and len({totals.replicas[i].device for i in taking_part}) == 1:
        moves = moves or share < _NEARLY_ALWAYS
    device = totals.replicas[slowest].device
    return Straggler(slowest, device, share, moves, excess, waste=excess * mean)


def _relative(values: Sequence[float], i: int) -> float | None:
    return min(value for value in values if value > 0) / values[i] if values[i] > 0 else None


def _rows(totals: RunTotals, steps: Sequence[StepRecord]) -> list[list[float]]:
    """Per step, the computing seconds of the replicas that took part, where there are several."""
    rows = [[_compute(replica, totals) for replica in step.replicas] for step in steps]
    if not steps:
        rows = [[totals.compute(i) for i in range(len(totals.replicas))]]
    positive = [[value for value in row if value > 0] for row in rows]
    return [row for row in positive if len(row) > 1]


def _compute(replica: ReplicaStep, totals: RunTotals) -> float:
    seconds = replica.seconds
    return sum(seconds.get(phase, 0.0) for phase in totals.own_phases)


def _per_sample(step: StepRecord, i: int, totals: RunTotals) -> float | None:
    if i >= len(step.replicas) or not step.replicas[i].samples:
        return None
    return _compute(step.replicas[i], totals) / step.replicas[i].samples
