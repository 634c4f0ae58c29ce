"""The text of a summary."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataparallel.threads.timeline import PHASES

if TYPE_CHECKING:
    from dataparallel.monitor.scores import ReplicaScore, Straggler
    from dataparallel.monitor.summary import Summary
    from dataparallel.monitor.totals import RunTotals

_WIDTH = 100
#: See Note [Straggler scores].
_SCORES = ("score", "score per sample", "score to own best")
NO_STEP = (
    "No step has ended yet. A step ends when the next forward begins, or when the StepMonitor is "
    "left; look again then."
)
_NAMES = {"train": "training ", "inference": "inference ", "all": ""}


def describe(summary: Summary) -> str:
    """What a summary says, for people: plain text of several lines."""
    if not summary.num_steps:
        return NO_STEP
    parts = [*headlines(summary), "", *table(summary.replicas), ""]
    told = straggler_line(summary)
    if told:
        parts += [*textwrap.wrap(told, _WIDTH)]
    parts += textwrap.wrap(f"Change first: {summary.advice}", _WIDTH)
    return "\n".join(parts)


def headlines(summary: Summary) -> list[str]:
    """The numbers of all replicas together, as lines."""
    steps = "step" if summary.num_steps == 1 else "steps"
    lines = [
        f"{summary.num_steps} {_NAMES[summary.kind]}{steps} of "
        f"{duration(summary.step_seconds)}: "
        f"{summary.steps_per_second:.3g} steps/s, {summary.samples_per_second:.4g} samples/s"
    ]
    if summary.num_left_out:
        others = "other" if summary.num_left_out == 1 else "others"
        lines[0] += f" ({summary.num_left_out} {others} left out)"
    if summary.times is not None:
        times = summary.times
        lines.append(
            f"step time: median {duration(times.median)}, 90th percentile {duration(times.p90)}, "
            f"longest {duration(times.longest)}, spread {percent(times.spread)}"
        )
    elif 0 < summary.num_seen < summary.num_steps:
        lines.append(
            f"{summary.num_seen} of {summary.num_steps} steps seen one by one: too few for "
            "percentiles"
        )
    if summary.num_not_advised:
        lines.append(
            f"left out of the advice: {summary.num_not_advised} of {summary.num_steps} steps, "
            "which warm up, do not train, or took over 5 times the median"
        )
    communication = f"exposed communication {percent(summary.exposed_communication)} of the step"
    if summary.imbalance is not None:
        lines.append(f"imbalance {summary.imbalance:.2f} (slowest over mean), {communication}")
    else:
        lines.append(communication)
    return lines


def table(replicas: Sequence[ReplicaScore], width: int = _WIDTH) -> list[str]:
    """The lines of a table with one column per replica.

    Args:
        replicas: What is shown.
        width: So many characters are in a line at most, if possible: where seconds and shares do
            not fit there are only shares, and then the replicas are in several tables.
    """
    whole = columns(replicas, with_seconds=True)
    if _width(whole) > width:
        whole = columns(replicas, with_seconds=False)
    titles, *rest = whole
    lines: list[str] = []
    while rest:
        number = len(rest)
        while number > 1 and _width([titles, *rest[:number]]) > width:
            number -= 1
        lines += ([""] if lines else []) + _lines([titles, *rest[:number]])
        rest = rest[number:]
    return lines


def columns(replicas: Sequence[ReplicaScore], *, with_seconds: bool) -> list[list[str]]:
    """The cells of a table: its titles, and what stands beside them for each replica.

    Args:
        replicas: What is shown.
        with_seconds: Whether phases have seconds and shares, or shares alone.
    """
    phases = [phase for phase in PHASES if any(one.shares.get(phase) for one in replicas)]
    found = [["replica", "device", "samples per step", *phases, "computing", *_SCORES]]
    for one in replicas:
        times = [
            f"{duration(one.seconds[phase])} {percent(one.shares[phase]):>5}"
            if with_seconds and one.seconds.get(phase)
            else percent(one.shares.get(phase, 0.0))
            for phase in phases
        ]
        scores = (one.relative, one.per_sample, one.individual)
        place = [str(one.index), one.device, f"{one.samples:.4g}"]
        found.append([*place, *times, duration(one.compute), *map(_score, scores)])
    return found


def _width(table: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in table) + 2 * (len(table) - 1)


def _lines(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in table]
    titles, *rest = [
        [cell.rjust(width) if i else cell.ljust(width) for cell in column]
        for i, (column, width) in enumerate(zip(table, widths, strict=True))
    ]
    return ["  ".join(row) for row in zip(titles, *rest, strict=True)]


def straggler_line(summary: Summary) -> str:
    """What is to be said about the slowest replica; empty if nothing."""
    straggler = summary.straggler
    if straggler is None:
        return ""
    if straggler.moves:
        return (
            f"The slowest replica computes {percent(straggler.excess)} longer than the mean, but "
            "it is another one from step to step: data or the host, no device."
        )
    often = ""
    if straggler.share is not None:
        number = f"{summary.num_seen} " if summary.num_seen < summary.num_steps else ""
        seen = " seen" if number else ""
        often = f", in {percent(straggler.share)} of the {number}steps{seen}"
    return (
        f"Replica {straggler.index} on {straggler.device} is the slowest{often}; it computes "
        f"{percent(straggler.excess)} longer than the mean."
    )


def nothing_text(totals: RunTotals, straggler: Straggler | None) -> str:
    """What is to be said where no change is worth it: where the time goes, and how evenly.

    Args:
        totals: At least one step.
        straggler: The replica that holds up the others, which costs little; None if none does.
    """

    def share(seconds: float) -> str:
        return percent(seconds / totals.step_seconds)

    backward = totals.mean("backward")
    busy = totals.mean("forward") + totals.mean("loss") + backward
    parts = [
        "Nothing stands out: none of the changes known here would make steps much shorter. "
        f"{share(busy)} of each step is forward, loss and backward."
    ]
    own = [totals.compute(i) for i in range(len(totals.replicas))]
    own = [seconds for seconds in own if seconds > 0]
    if len(totals.replicas) > 1 and backward and "backward" not in totals.own_phases:
        parts.append(
            f"The backward ({share(backward)}) is one for all replicas, so it does not tell which "
            "is slow."
        )
    if straggler is not None:
        parts.append(
            f"The slowest replica computes {percent(straggler.excess)} longer than the mean, but "
            f"that is {share(straggler.waste)} of the step."
        )
    elif len(own) > 1:
        ends = dict.fromkeys((duration(min(own)), duration(max(own))))
        parts.append(f"By itself each replica computes for {' to '.join(ends)}.")
    return " ".join(parts)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(share: float) -> str:
    """A share from 0 to 1, for example ``28 %``."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds with a unit that fits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
