"""What `bench train` concludes from the rounds. Pure functions over plain records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataparallel.tools.bench.harness import (
    Outcome,
    Spread,
    geometric_mean,
    largest,
    ratios,
    spread,
)

#: Largest relative difference of losses and gradient norms that counts as rounding.
TOLERANCE = 1e-4
#: The same of a parameter's update.
PARAMETER_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Row:
    """One contestant's line in the results.

    Attributes:
        contestant: Key of the contestant.
        title: What is shown.
        rounds: Seconds of one repetition, by round the median.
        seconds: The same over all rounds.
        speedup: Time of the bare module over this contestant's, round by round; None without it.
        ours_over_this: Time of ours over this contestant's, round by round.
        host_bytes: Peak host memory beyond the level before the model, summed over the processes.
        device_bytes: The same on accelerators.
        memory_ratio: Memory of ours over this contestant's: of accelerators where they are used,
            else of the host; None where one of them took none.
        losses: Loss of the whole batch at each of the first steps.
        gradient_norms: Norm of the whole gradient at each of the first steps.
        parameter_error: Of the update of a parameter after the measurement, relative to that of
            the bare module; the largest over parameters and processes.
        agrees: Whether losses and gradient norms are the reference's, and the parameters those of a
            bare module, to rounding.
    """

    contestant: str
    title: str
    rounds: tuple[float, ...]
    seconds: Spread
    speedup: Spread | None
    ours_over_this: Spread
    host_bytes: int
    device_bytes: int
    memory_ratio: float | None
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    parameter_error: float
    agrees: bool


def summarize(outcomes: Sequence[Outcome]) -> list[Row]:
    """Compare the contestants of a case, ours first; the reference is the bare module, or ours."""
    ours = outcomes[0]
    bare = next((each for each in outcomes if each.contestant.name == "bare"), None)
    return [_row(each, ours, bare) for each in outcomes]


def _row(outcome: Outcome, ours: Outcome, bare: Outcome | None) -> Row:
    rounds, said = outcome.seconds["step"], outcome.checked[0]
    error = largest([each["parameter_error"] for each in outcome.finished])
    return Row(
        contestant=outcome.contestant.name,
        title=outcome.contestant.title,
        rounds=rounds,
        seconds=spread(rounds),
        speedup=ratios(bare.seconds["step"], rounds) if bare else None,
        ours_over_this=ratios(ours.seconds["step"], rounds),
        host_bytes=_memory(outcome, "host_bytes"),
        device_bytes=_memory(outcome, "device_bytes"),
        memory_ratio=_memory_ratio(ours, outcome),
        losses=tuple(said["losses"]),
        gradient_norms=tuple(said["gradient_norms"]),
        parameter_error=error,
        agrees=agree(said, (bare or ours).checked[0]) and error <= PARAMETER_TOLERANCE,
    )


def agree(these: Mapping[str, Any], those: Mapping[str, Any]) -> bool:
    """Whether two contestants trained alike, to rounding. NaN is like nothing."""
    return all(
        math.isclose(a, b, rel_tol=TOLERANCE)
        for what in ("losses", "gradient_norms")
        for a, b in zip(these[what], those[what], strict=True)
    )


def _memory(outcome: Outcome, where: str) -> int:
    return sum(answer[where] for answer in outcome.finished)


def _memory_ratio(ours: Outcome, other: Outcome) -> float | None:
    both = (ours, other)
    on_devices = any(_memory(each, "device_bytes") for each in both)
    sizes = [_memory(each, "device_bytes" if on_devices else "host_bytes") for each in both]
    return sizes[0] / sizes[1] if all(sizes) else None


# --- bars --------------------------------------------------------------------------------------

#: The figures that may have a bar: of times and memory, the geometric mean and the worst case.
BARS = ("time_mean", "time_worst", "memory_mean", "memory_worst")


@dataclass(frozen=True)
class Verdict:
    """One figure beside its bar.

    Attributes:
        case: The worst case, where the figure is that of one.
        value: The ratio, a median over the rounds; None where it could not be measured.
        low: The smallest over the rounds.
        high: The largest over the rounds.
        bar: The limit; None without one.
    """

    case: str
    value: float | None
    low: float | None
    high: float | None
    bar: float | None

    @property
    def met(self) -> bool | None:
        """Whether the value is within the bar; None without one."""
        if self.bar is None:
            return None
        return self.value is not None and self.value <= self.bar


@dataclass(frozen=True)
class Comparison:
    """Ours beside one peer over all cases.

    Attributes:
        peer: Key of the peer.
        title: What is shown.
        times: Ratio of the times by case.
        memory: Ratio of the memory by case; None where one of the two took none.
        verdicts: The figures named in ``BARS``.
    """

    peer: str
    title: str
    times: Mapping[str, Spread]
    memory: Mapping[str, float | None]
    verdicts: Mapping[str, Verdict]


def compare(
    results: Mapping[str, Sequence[Row]], peer: str, bars: Mapping[str, float | None]
) -> Comparison:
    """Ours beside one peer, which takes part in every case; ``bars`` may name each of ``BARS``."""
    rows = {case: next(r for r in own if r.contestant == peer) for case, own in results.items()}
    times = {case: row.ours_over_this for case, row in rows.items()}
    memory = {case: row.memory_ratio for case, row in rows.items()}
    mean = geometric_mean(times.values())
    slowest = max(times, key=lambda case: times[case].median)
    worst = times[slowest]
    known = {case: ratio for case, ratio in memory.items() if ratio is not None}
    complete = len(known) == len(memory)
    biggest = max(known, key=lambda case: known[case]) if complete else ""
    figures = (
        ("", mean.median, mean.low, mean.high),
        (slowest, worst.median, worst.low, worst.high),
        ("", statistics.geometric_mean(known.values()) if complete else None, None, None),
        (biggest, known.get(biggest), None, None),
    )
    verdicts = {
        name: Verdict(*figure, bars.get(name)) for name, figure in zip(BARS, figures, strict=True)
    }
    return Comparison(peer, next(iter(rows.values())).title, times, memory, verdicts)
