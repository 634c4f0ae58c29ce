"""What is concluded from the rounds of a measurement. Pure functions over plain records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.tools.bench.rounds import Outcome

#: Largest relative error of a parameter's update that counts as rounding.
PARAMETER_TOLERANCE = 1e-2


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
        parameter_error: Of the update of a parameter after the measurement, relative to that of
            the bare module; the largest over parameters and processes.
        host_bytes: Peak host memory beyond the level before the model was made.
        device_bytes: The same on accelerators.
    """

    name: str
    title: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    parameter_error: float
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
        host_bytes: Peak host memory, summed over the processes.
        device_bytes: Peak accelerator memory, summed over the processes.
        memory_ratio: Memory of ours over this contestant's: of accelerators where they are used,
            else of the host; None where one of them took none.
        loss: Loss after the first steps.
        parameter_error: See :class:`Measured`.
        agrees: Whether losses and gradient norms of the first steps are the reference's, and
            the parameters those of a bare module, to rounding.
    """

    contestant: str
    title: str
    seconds: Spread
    speedup: Spread | None
    ours_over_this: Spread
    host_bytes: int
    device_bytes: int
    memory_ratio: float | None
    loss: float
    parameter_error: float
    agrees: bool


def measured_from(outcome: Outcome) -> Measured:
    """Put together what the processes of one contestant have said."""
    errors = [answer["parameter_error"] for answer in outcome.finished]
    return Measured(
        name=outcome.contestant.name,
        title=outcome.contestant.title,
        seconds=outcome.seconds["step"],
        losses=tuple(outcome.checked[0]["losses"]),
        gradient_norms=tuple(outcome.checked[0]["gradient_norms"]),
        parameter_error=largest(errors),
        host_bytes=sum(answer["host_bytes"] for answer in outcome.finished),
        device_bytes=sum(answer["device_bytes"] for answer in outcome.finished),
    )


def largest(errors: Sequence[float]) -> float:
    """The largest of some errors; NaN if one of them is."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


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


def summarize(measured: Sequence[Measured], tolerance: float = 1e-4) -> list[Row]:
    """Compare the contestants of one case.

    Args:
        measured: Ours first. The reference is ``"bare"`` where it takes part, else
            ours.
        tolerance: Relative difference of losses and norms that counts as rounding.

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
            memory_ratio=_memory_ratio(measured[0], each),
            loss=each.losses[-1],
            parameter_error=each.parameter_error,
            agrees=agree(each, reference, tolerance)
            and each.parameter_error <= PARAMETER_TOLERANCE,
        )
        for each in measured
    ]


def _memory_ratio(ours: Measured, other: Measured) -> float | None:
    on_devices = ours.device_bytes or other.device_bytes
    sizes = [each.device_bytes if on_devices else each.host_bytes for each in (ours, other)]
    return sizes[0] / sizes[1] if all(sizes) else None
