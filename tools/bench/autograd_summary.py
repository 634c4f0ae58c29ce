"""What is concluded from measured calls between workers. Pure functions over plain records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.tools.bench.autograd_tasks import FORMS, Case, Form, Part, phase
from dataparallel.tools.bench.rounds import Outcome
from dataparallel.tools.bench.summary import Spread, largest, ratios, spread
from dataparallel.tools.bench.verdict import Verdict


@dataclass(frozen=True)
class AutogradRow:
    """One case with one number of workers: ours beside torch's.

    Attributes:
        workers: How many there are.
        case: Its name.
        calls: Of the chain.
        size: Bytes of the tensor.
        ours: Seconds of a backward.
        torch: The same of torch's.
        ratio: Ours / torch's, round by round.
        ours_rate: Bytes of gradients that a backward carries per second.
        torch_rate: The same of torch's.
        ours_call: Seconds of one call of the forward.
        torch_call: The same of torch's.
        call_ratio: Ours / torch's, round by round.
        error: The largest of any element of any gradient, of both. The numbers are exact.
    """

    workers: int
    case: str
    calls: int
    size: int
    ours: Spread
    torch: Spread
    ratio: Spread
    ours_rate: Spread
    torch_rate: Spread
    ours_call: Spread
    torch_call: Spread
    call_ratio: Spread
    error: float

    @property
    def agrees(self) -> bool:
        """Whether all gradients were right."""
        return self.error == 0.0


def summarize(cases: Sequence[Case], outcome: Outcome) -> list[AutogradRow]:
    """Ours beside torch's, case by case.

    Args:
        cases: What was measured.
        outcome: Of the workers.
    """
    return [_summarize_case(case, outcome) for case in cases]


def _summarize_case(case: Case, outcome: Outcome) -> AutogradRow:
    ours, torch = (_seconds(outcome, form, "backward", case) for form in FORMS)
    ours_forward, torch_forward = (_seconds(outcome, form, "forward", case) for form in FORMS)
    errors = [
        said["errors"].get(phase(form, "backward", case.name))
        for said in (*outcome.checked, *outcome.finished)
        for form in FORMS
    ]
    return AutogradRow(
        workers=len(outcome.contestant.tasks),
        case=case.name,
        calls=case.calls,
        size=case.size,
        ours=spread(ours),
        torch=spread(torch),
        ratio=ratios(ours, torch),
        ours_rate=spread([case.carried / each for each in ours]),
        torch_rate=spread([case.carried / each for each in torch]),
        ours_call=spread([each / case.calls for each in ours_forward]),
        torch_call=spread([each / case.calls for each in torch_forward]),
        call_ratio=ratios(ours_forward, torch_forward),
        # Workers that serve have no gradients of the root's.
        error=largest([error for error in errors if error is not None]),
    )


def _seconds(outcome: Outcome, form: Form, part: Part, case: Case) -> tuple[float, ...]:
    return outcome.seconds[phase(form, part, case.name)]


def judge_mean(rows: Sequence[AutogradRow], bar: float | None) -> Verdict:
    """The geometric mean of the backward's ratios over the cases.

    Args:
        rows: Of one number of workers.
        bar: Its upper limit; None without one.

    Returns:
        The mean, whose range is that of a run in which every case has its best, or its worst,
        round.
    """
    median, low, high = (
        statistics.geometric_mean([getattr(row.ratio, part) for row in rows])
        for part in ("median", "low", "high")
    )
    return Verdict("", median, low, high, bar)


def judge_worst(rows: Sequence[AutogradRow], bar: float | None) -> Verdict:
    """The case with the largest ratio of the backward.

    Args:
        rows: Of one number of workers.
        bar: Its upper limit; None without one.
    """
    worst = max(rows, key=lambda row: row.ratio.median)
    return Verdict(worst.case, worst.ratio.median, worst.ratio.low, worst.ratio.high, bar)


def count_calls(outcome: Outcome) -> dict[Form, tuple[int, int]]:
    """By form, the calls that were asked for, and those that the workers have served.

    Args:
        outcome: Of the workers.
    """
    return {form: (_sum(outcome, "made", form), _sum(outcome, "served", form)) for form in FORMS}


def _sum(outcome: Outcome, what: str, form: Form) -> int:
    answers: Sequence[Mapping[str, Mapping[str, int]]] = outcome.finished
    return sum(each[what][form] for each in answers)


def all_called(calls: Mapping[Form, tuple[int, int]]) -> bool:
    """Whether every call was served by a worker, and both forms have made as many."""
    return len({number for both in calls.values() for number in both}) == 1
