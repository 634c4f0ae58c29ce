"""The summary of the steps of a run: numbers, and text."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataparallel.monitor.findings import (
    Finding,
    ReplicaScore,
    StepWindow,
    Straggler,
    add_up,
    counted,
    duration,
    find_changes,
    find_straggler,
    imbalance,
    percent,
)
from dataparallel.monitor.record import Kind
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.threads import PHASES

#: With so many other steps, those with which a run began are left out: they warm up.
_ENOUGH = 3
#: A step that takes more than so many times the median is an outlier: a compilation, a checkpoint.
_OUTLIER = 5.0
#: Smaller shares of the time are not told.
_TOLD = 0.005
#: If more than this share of the steps takes so long, it is the way of the run.
_RARE = 0.1

_WIDTH = 100
_NAMES: Mapping[Kind, str] = {"train": "training", "inference": "inference"}
_NO_STEP = (
    "No step has ended yet. A step ends when the next forward begins, or when the StepMonitor is "
    "left; look again then."
)


@dataclass(frozen=True)
class StepTimes:
    """The times of steps, in seconds.

    Attributes:
        median: Half of them take at most so long.
        p90: Nine of ten take at most so long.
        longest: The longest one.
    """

    median: float
    p90: float
    longest: float


@dataclass(frozen=True)
class Summary:
    """The summary of the steps of a run; ``str`` makes a text of it.

    Attributes:
        num_steps: How many steps it is about.
        kind: The kind of the steps.
        num_left_out: Steps of the other kind, and those with which the run began, which warm up.
        num_not_advised: How many of them the replicas' times and the findings leave out: those that
            take more than 5 times the median, long pauses aside.
        step_seconds: How long one of the others takes on average.
        times: Percentiles; None if the times of single steps are unknown, or there is one step.
        steps_per_second: The steps per second of this process, in the time of these steps.
        samples_per_second: Likewise.
        time_shares: The shares of the time that go into training, into evaluation between the steps
            that train, into long pauses, and into steps that take long.
        replicas: The phases and the speed of each replica.
        imbalance: Computing time of the slowest replica over the mean, on average over the steps,
            or in their sum if single steps are unknown; None for one replica.
        straggler: The replica that holds up the others; None if none does.
        exposed_communication: Share of the step in which data moves between devices or processes
            and no computing hides it; None if that is a part of other phases, as with torch's
            wrappers in several processes.
        findings: The changes to make, the largest gain first; at least one, see
            :class:`~dataparallel.monitor.findings.Finding`.
        monitor_share: The share of a processor that watching took; None if that is unknown.
    """

    num_steps: int
    kind: Kind
    num_left_out: int
    num_not_advised: int
    step_seconds: float
    times: StepTimes | None
    steps_per_second: float
    samples_per_second: float
    time_shares: Mapping[str, float]
    replicas: tuple[ReplicaScore, ...]
    imbalance: float | None
    straggler: Straggler | None
    exposed_communication: float | None
    findings: tuple[Finding, ...]
    monitor_share: float | None = None

    @property
    def advice(self) -> Finding:
        """The one thing to change first."""
        return self.findings[0]

    def as_metrics(self) -> dict[str, float]:
        """Return the numbers under flat names, for loggers; unknown ones are left out.

        Example::

            logger.log_metrics(monitor.summary().as_metrics(), step=step)
        """
        if not self.num_steps:
            return {"num_steps": 0.0}
        scores = [one.relative for one in self.replicas if one.relative is not None]
        found: dict[str, float | None] = {
            "num_steps": float(self.num_steps),
            "step_seconds": self.step_seconds,
            "steps_per_second": self.steps_per_second,
            "samples_per_second": self.samples_per_second,
            "exposed_communication_share": self.exposed_communication,
            "imbalance": self.imbalance,
            "straggler_score": min(scores, default=None),
            "advice_gain": self.advice.gain,
            "monitor_share": self.monitor_share,
        }
        if self.times is not None:
            found |= {"step_seconds_median": self.times.median, "step_seconds_p90": self.times.p90}
        for one in self.replicas:
            name = f"replica{one.index}"
            for phase, share in one.shares.items():
                found[f"{name}/{phase.replace(' ', '_')}_share"] = share
            found |= {
                f"{name}/compute_seconds": one.compute,
                f"{name}/score": one.relative,
                f"{name}/score_per_sample": one.per_sample,
            }
        return {name: value for name, value in found.items() if value is not None}

    def headlines(self) -> list[str]:
        """Return the numbers of all replicas together, as lines."""
        lines = [
            f"{counted(self.num_steps, _NAMES[self.kind] + ' step')} of "
            f"{duration(self.step_seconds)}: "
            f"{self.steps_per_second:.3g} steps/s, {self.samples_per_second:.4g} samples/s"
        ]
        if self.num_left_out:
            lines[0] += f" ({counted(self.num_left_out, 'other')} left out)"
        shares = {what: share for what, share in self.time_shares.items() if share >= _TOLD}
        if len(shares) > 1:
            told = ", ".join(f"{what} {percent(share)}" for what, share in shares.items())
            lines.append(f"time: {told}")
        if self.times is not None:
            lines.append(
                f"step time: median {duration(self.times.median)}, 90th percentile "
                f"{duration(self.times.p90)}, longest {duration(self.times.longest)}"
            )
        if self.num_not_advised:
            lines.append(
                f"left out of what follows: {self.num_not_advised} of {self.num_steps} steps, "
                "which took over 5 times the median"
            )
        notes = []
        if self.imbalance is not None:
            notes.append(f"imbalance {self.imbalance:.2f} (slowest over mean)")
        # One replica in one process moves nothing.
        if self.exposed_communication or (
            self.exposed_communication is not None and len(self.replicas) > 1
        ):
            notes.append(f"exposed communication {percent(self.exposed_communication)} of the step")
        if self.monitor_share is not None:
            notes.append(f"watching took {100 * self.monitor_share:.2g} % of a processor")
        return [*lines, ", ".join(notes)] if notes else lines

    def table(self, width: int = _WIDTH) -> list[str]:
        """Return the lines of tables with one column per replica, as wide as fits, or below."""
        columns = [
            [
                cell.rjust(max(map(len, column))) if i else cell.ljust(max(map(len, column)))
                for cell in column
            ]
            for i, column in enumerate(self._columns())
        ]
        titles, *replicas = columns
        widest = max(len(column[0]) for column in replicas)
        number = max(1, (width - len(titles[0])) // (2 + widest))
        lines: list[str] = []
        for first in range(0, len(replicas), number):
            rows = zip(titles, *replicas[first : first + number], strict=True)
            lines += ([""] if lines else []) + ["  ".join(row) for row in rows]
        return lines

    def _columns(self) -> list[list[str]]:
        """Return the cells of a table: its titles, and beside them those of each replica."""
        phases = [phase for phase in PHASES if any(one.shares.get(phase) for one in self.replicas)]
        # One replica is the fastest.
        scores = ("score", "score per sample") if len(self.replicas) > 1 else ()
        found = [["replica", "device", "samples per step", *phases, "computing", *scores]]
        for one in self.replicas:
            times = [
                f"{duration(one.seconds[phase])} {percent(one.shares[phase]):>5}"
                if one.seconds.get(phase)
                else percent(0.0)
                for phase in phases
            ]
            values = ["-" if v is None else f"{v:.2f}" for v in (one.relative, one.per_sample)]
            place = [str(one.index), one.device, f"{one.samples:.4g}"]
            found.append([*place, *times, duration(one.compute), *values[: len(scores)]])
        return found

    def __str__(self) -> str:
        if not self.num_steps:
            return _NO_STEP
        advice = textwrap.wrap(f"Change first: {self.advice}", _WIDTH)
        return "\n".join([*advice, "", *self.headlines(), "", *self.table()])

    def __repr__(self) -> str:
        # The numbers of each replica would fill a screen.
        return f"<Summary: {self.num_steps} steps, {self.step_seconds:.3g} s each>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # IPython and notebooks show this for the last value of a cell.
        printer.text(str(self))


# --- how it is made ------------------------------------------------------------------------------


def summarize(
    windows: Sequence[StepWindow],
    info: RunInfo,
    slowed: Mapping[str, str] | None = None,
    state: RunState | None = None,
) -> Summary:
    """Sum up steps, in any windows; those that train, if any does.

    ``slowed`` tells, by the name of a device, why it is slowed down, in words; ``state`` of the run
    tells of memory, and what watching took.
    """
    chosen = _without_others(windows)
    usual = _without_outliers(chosen)
    totals, steady = add_up(chosen, info), add_up(usual, info)
    lasts = [one if one.num_steps == 1 else one.last for one in usual]
    straggler = find_straggler(steady, _without_outliers([one for one in lasts if one is not None]))
    # Whoever looks at a moment meets a long step: those that are seen tell nothing of the others.
    singles = chosen if len(chosen) == totals.num_steps else []
    times = None
    if len(singles) > 1:
        each = [one.seconds for one in singles]
        deciles = statistics.quantiles(each, n=10, method="inclusive")
        times = StepTimes(deciles[4], deciles[8], max(each))
    moves = steady.mean("scatter", "gather", "reduce local", "reduce across processes")
    return Summary(
        totals.num_steps,
        chosen[0].kind if chosen else "train",
        _num_steps(windows) - totals.num_steps,
        totals.num_steps - steady.num_steps,
        steady.step_seconds,
        times,
        _over(totals.num_steps, totals.seconds),
        _over(totals.samples, totals.seconds),
        _time_shares(windows, chosen, usual),
        steady.replicas,
        imbalance(steady, usual if singles else ()),
        straggler,
        None if info.hides_waiting else _over(moves, steady.step_seconds),
        tuple(find_changes(steady, info, straggler, slowed, state)),
        None if state is None else state.monitor_share,
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _time_shares(
    windows: Sequence[StepWindow], chosen: Sequence[StepWindow], usual: Sequence[StepWindow]
) -> dict[str, float]:
    """Return the shares of what the time goes into; beginnings, which warm up, are left out."""
    kind = chosen[0].kind if chosen else "train"
    others = [one for one in windows if one.kind != kind and not one.begins_run]
    working = [sum(one.seconds - one.pause for one in some) for some in (usual, others, chosen)]
    pauses = sum(one.pause for one in (*chosen, *others))
    found = {
        _NAMES[kind]: working[0],
        "evaluation": working[1],
        "pauses": pauses,
        "long steps": working[2] - working[0],
    }
    whole = working[1] + working[2] + pauses
    return {what: seconds / whole for what, seconds in found.items() if whole and seconds}


def _without_others(windows: Sequence[StepWindow]) -> list[StepWindow]:
    """Return the windows that train, if any does, without those with which a run began."""
    train = [one for one in windows if one.kind != "inference"] or list(windows)
    warm = [one for one in train if not one.begins_run]
    enough = max(_ENOUGH, 0.1 * (_num_steps(train) - _num_steps(warm)))
    return warm if _num_steps(warm) >= enough else train


def _without_outliers(windows: Sequence[StepWindow]) -> list[StepWindow]:
    """Return the windows of at most 5 times the median step; all if others are not rare."""
    each = [(one.seconds - one.pause) / one.num_steps for one in windows]
    limit = _OUTLIER * statistics.median(each) if each else 0.0
    usual = [one for one, seconds in zip(windows, each, strict=True) if seconds <= limit]
    rare = max(1.0, _RARE * _num_steps(windows))
    return usual if _num_steps(windows) - _num_steps(usual) <= rare else list(windows)


def _num_steps(windows: Sequence[StepWindow]) -> int:
    return sum(one.num_steps for one in windows)
