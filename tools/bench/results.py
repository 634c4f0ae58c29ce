"""What `bench train` concludes from the rounds, and how it shows it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.harness import Outcome, Spread, geometric_mean, ratios, spread
from dataparallel.tools.bench.output import agreement, new_table, span, three_digits

#: Largest relative difference of losses and gradient norms that counts as rounding.
TOLERANCE = 1e-4


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
        agrees: Whether losses and gradient norms are the reference's, to rounding.
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
    agrees: bool


def summarize(outcomes: Sequence[Outcome]) -> list[Row]:
    """Compare the contestants of a case, ours first; the reference is the bare module, or ours."""
    ours = outcomes[0]
    bare = next((each for each in outcomes if each.contestant.name == "bare"), None)
    return [_row(each, ours, bare) for each in outcomes]


def _row(outcome: Outcome, ours: Outcome, bare: Outcome | None) -> Row:
    rounds, said = outcome.seconds["step"], outcome.checked[0]
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
        agrees=agree(said, (bare or ours).checked[0]),
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


@dataclass(frozen=True)
class Comparison:
    """Ours over one peer, over all cases.

    Attributes:
        title: The peer, as it is shown.
        time_mean: Geometric mean of the ratios of times.
        time_worst: The largest of them.
        worst: The case that has it.
        memory_mean: Geometric mean of the ratios of memory; None where it is not known of all.
    """

    title: str
    time_mean: Spread
    time_worst: float
    worst: str
    memory_mean: float | None


def compare(results: Mapping[str, Sequence[Row]], peer: str) -> Comparison:
    """Ours beside one peer, which takes part in every case."""
    rows = {case: next(r for r in own if r.contestant == peer) for case, own in results.items()}
    worst = max(rows, key=lambda case: rows[case].ours_over_this.median)
    memory = [row.memory_ratio for row in rows.values()]
    known = [ratio for ratio in memory if ratio is not None]
    return Comparison(
        rows[worst].title,
        geometric_mean(row.ours_over_this for row in rows.values()),
        rows[worst].ours_over_this.median,
        worst,
        statistics.geometric_mean(known) if len(known) == len(memory) else None,
    )


def describe(comparison: Comparison) -> str:
    """A comparison in a line."""
    mean = comparison.time_mean
    memory = comparison.memory_mean
    return (
        f"ours / {comparison.title}: time {mean.median:.3f} ({span(mean)}), worst "
        f"{comparison.time_worst:.3f} ({comparison.worst})"
        + (f"; memory {memory:.3f}" if memory is not None else "")
    )


def build_table(results: Mapping[str, Sequence[Row]], title: str) -> Table:
    """One section per case, whose heading is the key, one line per contestant."""
    on_devices = any(row.device_bytes for rows in results.values() for row in rows)
    memory = ["host\nMiB", "device\nMiB"][: 1 + on_devices]
    table = new_table(title, "ms", "min..max", "speed-\nup", "ours\n/this", *memory, "loss")
    for case, rows in results.items():
        table.add_section()
        table.add_row(Text(case, style="bold"))
        for row in rows:
            sizes = (row.host_bytes, row.device_bytes)[: len(memory)]
            table.add_row(
                Text(f"  {row.title}", style="cyan" if row.contestant == "ours" else ""),
                three_digits(row.seconds.median * 1e3),
                f"{three_digits(row.seconds.low * 1e3)}..{three_digits(row.seconds.high * 1e3)}",
                _ratio(row.speedup if row.contestant != "bare" else None),
                _ratio(row.ours_over_this if row.contestant != "ours" else None),
                *(f"{size / 2**20:.0f}" for size in sizes),
                agreement(f"{row.losses[-1]:.4f}", row.agrees),
            )
    return table


def _ratio(value: Spread | None) -> str:
    return "" if value is None else f"{value.median:.2f}"
