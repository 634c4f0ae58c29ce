"""Ours beside one peer over all cases, and whether bars that the user set are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.tools.bench.summary import Row, Spread


@dataclass(frozen=True)
class Bars:
    """Upper limits of ratios ours / peer; None where the user set none.

    Attributes:
        time: Geometric mean of the times over the cases.
        time_worst: Time of every case.
        memory: Geometric mean of the memory over the cases.
        memory_worst: Memory of every case.
    """

    time: float | None = None
    time_worst: float | None = None
    memory: float | None = None
    memory_worst: float | None = None

    def any(self) -> bool:
        """Whether there is one."""
        limits = (self.time, self.time_worst, self.memory, self.memory_worst)
        return any(limit is not None for limit in limits)


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
    """Ours beside one peer.

    Attributes:
        peer: Key of the peer.
        title: What is shown.
        times: Ratio of the times by case.
        memory: Ratio of the memory by case; None where one of the two took none.
        time_mean: Geometric mean of the times over the cases. Its range is that of a run in which
            every case has its best, or its worst, round.
        time_worst: The case with the largest median.
        memory_mean: Geometric mean of the memory.
        memory_worst: The case with the largest ratio.
    """

    peer: str
    title: str
    times: Mapping[str, Spread]
    memory: Mapping[str, float | None]
    time_mean: Verdict
    time_worst: Verdict
    memory_mean: Verdict
    memory_worst: Verdict

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """All figures that may have a bar."""
        return (self.time_mean, self.time_worst, self.memory_mean, self.memory_worst)


def compare(results: Mapping[str, Sequence[Row]], peer: str, bars: Bars) -> Comparison:
    """Ours beside one peer over all cases.

    Args:
        results: The rows of each case, by its name.
        peer: Key of the peer, which takes part in every case.
        bars: What the ratios should not exceed.

    Returns:
        Ratios, their geometric means and the worst cases.
    """
    rows = {case: next(r for r in own if r.contestant == peer) for case, own in results.items()}
    times = {case: row.ours_over_this for case, row in rows.items()}
    memory = {case: row.memory_ratio for case, row in rows.items()}
    means = [
        statistics.geometric_mean([getattr(each, part) for each in times.values()])
        for part in ("median", "low", "high")
    ]
    slowest = max(times, key=lambda case: times[case].median)
    worst = times[slowest]
    known = {case: ratio for case, ratio in memory.items() if ratio is not None}
    complete = len(known) == len(memory)
    memory_mean = statistics.geometric_mean(known.values()) if complete else None
    biggest = max(known, key=lambda case: known[case]) if complete else ""
    memory_worst = known.get(biggest)
    return Comparison(
        peer=peer,
        title=next(iter(rows.values())).title,
        times=times,
        memory=memory,
        time_mean=Verdict("", means[0], means[1], means[2], bars.time),
        time_worst=Verdict(slowest, worst.median, worst.low, worst.high, bars.time_worst),
        memory_mean=Verdict("", memory_mean, None, None, bars.memory),
        memory_worst=Verdict(biggest, memory_worst, None, None, bars.memory_worst),
    )
