"""How a batch is divided so that replicas of different speed are done at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dataparallel.comm.local import chunk_lengths

# Halvings after which a time is as exact as a double can be.
_HALVINGS = 100


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
