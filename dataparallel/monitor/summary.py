"""What the steps of a run come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dataparallel.monitor.advice import Advice, advise
from dataparallel.monitor.outliers import without_outliers
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.scores import (
    ReplicaScore,
    Straggler,
    find_straggler,
    imbalance,
    score_replicas,
)
from dataparallel.monitor.summary_html import as_html
from dataparallel.monitor.summary_text import describe
from dataparallel.monitor.totals import RunTotals, total_steps
from dataparallel.threads.timeline import Phase

#: Moving data between devices and processes, as far as no computing hides it.
_COMMUNICATION: tuple[Phase, ...] = (
    "scatter",
    "gather",
    "reduce local",
    "reduce across processes",
)
#: With so many more steps, the first one is left out: it warms up.
_ENOUGH = 3
#: Where less than this share of the steps is known one by one, long ones are more likely among them
#: than short ones: whoever looks at a moment meets a long step.
_MOST = 0.5


@dataclass(frozen=True)
class StepTimes:
    """How long steps take, in seconds.

    Attributes:
        median: Half of them take at most so long.
        p90: Nine of ten take at most so long.
        longest: The longest one.
        spread: The difference between the 90th and the 10th percentile over the median.
    """

    median: float
    p90: float
    longest: float
    spread: float

    @staticmethod
    def of(seconds: Sequence[float]) -> StepTimes | None:
        """Of the times of single steps; None without any."""
        if not seconds:
            return None
        values = sorted(seconds)
        low, median, high = (percentile(values, share) for share in (0.1, 0.5, 0.9))
        return StepTimes(median, high, values[-1], (high - low) / median if median else 0.0)


@dataclass(frozen=True)
class Summary:
    """What the steps of a run come to; ``str`` makes a text of it.

    Attributes:
        num_steps: How many steps it is about.
        kind: Of which kind they are; ``"all"`` where evaluations may be among training steps.
        num_left_out: Steps of the other kind, and the first one, which warms up.
        num_seen: How many of the steps are known one by one.
        num_not_advised: How many of them the straggler and the advice leave out: those that take
            more than 5 times the median, and in a recording those that warm up.
        step_seconds: How long one takes on average.
        times: Percentiles; None where most single steps are unknown.
        steps_per_second: Of this process.
        samples_per_second: Likewise.
        replicas: What each replica did, and how fast.
        imbalance: Computing time of the slowest replica over the mean, on average over the steps,
            or in their sum where most single steps are unknown; None for one replica.
        straggler: The replica that holds up the others; None if none does.
        exposed_communication: Share of the step in which data moves between devices or processes
            and no computing hides it.
        advice: The one thing to change first.
    """

    num_steps: int
    kind: Literal["train", "inference", "all"]
    num_left_out: int
    num_seen: int
    num_not_advised: int
    step_seconds: float
    times: StepTimes | None
    steps_per_second: float
    samples_per_second: float
    replicas: tuple[ReplicaScore, ...]
    imbalance: float | None
    straggler: Straggler | None
    exposed_communication: float
    advice: Advice

    def as_metrics(self) -> dict[str, float]:
        """The numbers under flat names, for loggers; what is unknown is left out.

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
                f"{name}/score_individual": one.individual,
            }
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        return describe(self)

    def __repr__(self) -> str:
        # The numbers of each replica would fill a screen.
        return f"<Summary: {self.num_steps} steps, {self.step_seconds:.3g} s each>"

    def _repr_html_(self) -> str:
        # What a notebook shows of the last value of a cell.
        return as_html(self)


def summarize(steps: Sequence[StepRecord], info: RunInfo) -> Summary:
    """Sum up steps.

    Where there are training steps, it is about them.

    Example::

        print(summarize(list(monitor.steps), info))

    Args:
        steps: The records, the oldest first; there may be none.
        info: The run whose steps they are.
    """
    kind: Literal["train", "inference"]
    kind = "train" if any(step.kind == "train" for step in steps) or not steps else "inference"
    chosen = [step for step in steps if step.kind == kind]
    if len(chosen) > _ENOUGH and chosen[0].number == 1:
        chosen = chosen[1:]
    return summarize_totals(
        total_steps(chosen, info),
        info,
        chosen,
        kind=kind,
        num_left_out=len(steps) - len(chosen),
        steady=total_steps(without_outliers(chosen), info),
    )


def summarize_totals(
    totals: RunTotals,
    info: RunInfo,
    steps: Sequence[StepRecord] = (),
    *,
    kind: Literal["train", "inference", "all"] = "train",
    num_left_out: int = 0,
    steady: RunTotals | None = None,
    slowed: Mapping[str, str] | None = None,
) -> Summary:
    """Sum up steps that have been added up already.

    Args:
        totals: What they add up to.
        info: The run whose steps they are.
        steps: Those of them that are known one by one, the oldest first. Default: none.
        kind: Of which kind they are.
        num_left_out: How many others there are.
        steady: What those of them add up to that are like the others; the straggler and the advice
            rest on these. Default: all.
        slowed: By the name of a device, why it is slowed down. Default: none is.
    """
    steady = totals if steady is None else steady
    later = [step for step in steps if step.number > 1] if len(steps) > _ENOUGH else steps
    straggler = find_straggler(steady, without_outliers(later))
    seen = steps if len(steps) >= _MOST * totals.num_steps else ()
    mean = totals.step_seconds
    frequency = 1 / totals.seconds if totals.seconds else 0.0
    communication = sum(totals.mean(phase) for phase in _COMMUNICATION)
    return Summary(
        totals.num_steps,
        kind,
        num_left_out,
        len(steps),
        totals.num_steps - steady.num_steps,
        mean,
        StepTimes.of([step.seconds for step in seen]),
        totals.num_steps * frequency,
        totals.samples * frequency,
        score_replicas(totals, steps),
        imbalance(totals, seen),
        straggler,
        communication / mean if mean else 0.0,
        advise(steady, info, straggler=straggler, slowed=slowed),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that a share of the values do not exceed, between two of them if need be.

    Args:
        ordered: At least one value, the smallest first.
        share: From 0 to 1.
    """
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
