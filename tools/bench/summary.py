"""What is concluded from the rounds of a measurement. Pure functions over plain records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median with its range over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """What came back from one contestant.

    Attributes:
        name: Key of the contestant.
        title: What is shown.
        seconds: Per round, the median of its repetitions.
        losses: Loss of the whole batch at each of the first steps.
        gradient_norms: Norm of the whole gradient at each of the first steps.
        host_bytes: Peak host memory beyond the level before the model was made.
        device_bytes: The same on accelerators.
    """

    name: str
    title: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Row:
    """One contestant's line in the results.

    Attributes:
        contestant: Key of the contestant.
        title: What is shown.
        seconds: Of one repetition.
        speedup: Time of the bare module over this contestant's, round by round; None without it.
        ours_over_this: Time of ours over this contestant's, round by round.
        host_bytes: Peak host memory.
        device_bytes: Peak accelerator memory.
        loss: Loss after the first steps.
        agrees: Whether losses and gradient norms of the first steps are the reference's, to
            rounding.
    """

    contestant: str
    title: str
    seconds: Spread
    speedup: Spread | None
    ours_over_this: Spread
    host_bytes: int
    device_bytes: int
    loss: float
    agrees: bool


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of ``values``."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratio within each round, so that what slows a whole round cancels.

    Example::

        ratios([2.0, 4.0], [1.0, 2.0])   # Spread(median=2.0, low=2.0, high=2.0)
    """
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def agree(measured: Measured, reference: Measured, tolerance: float) -> bool:
    """Whether two contestants trained alike, within a relative tolerance. NaN is like nothing."""
    these = (*measured.losses, *measured.gradient_norms)
    those = (*reference.losses, *reference.gradient_norms)
    return len(these) == len(those) and all(
        math.isclose(a, b, rel_tol=tolerance) for a, b in zip(these, those, strict=True)
    )


def summarise(measured: Sequence[Measured], tolerance: float = 1e-4) -> list[Row]:
    """Compare the contestants of one case.

    Args:
        measured: Ours first. The reference is ``"bare"`` where it takes part, else
            ours.
        tolerance: Relative difference that counts as rounding.

    Returns:
        One row per contestant, in the order given.
    """
    by_name: Mapping[str, Measured] = {each.name: each for each in measured}
    bare = by_name.get("bare")
    reference = bare or measured[0]
    return [
        Row(
            contestant=each.name,
            title=each.title,
            seconds=spread(each.seconds),
            speedup=ratios(bare.seconds, each.seconds) if bare else None,
            ours_over_this=ratios(measured[0].seconds, each.seconds),
            host_bytes=each.host_bytes,
            device_bytes=each.device_bytes,
            loss=each.losses[-1],
            agrees=agree(each, reference, tolerance),
        )
        for each in measured
    ]
