"""What is concluded from measured rounds of reduction. Pure functions over plain records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dataparallel.tools.bench.rounds import Outcome
from dataparallel.tools.bench.summary import Spread, largest, ratios, spread

#: Largest relative error of a gradient's element that counts as rounding.
GRADIENT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class ReducerRow:
    """Rounds of one set of gradients with one layout.

    Attributes:
        gradients: Name of the set.
        layout: Processes x replicas of ours.
        ours: Seconds of a backward.
        ddp: The same of torch DDP with one process per replica; None where it took no part.
        bare: The same without any reduction, in one process with one replica.
        ours_over_ddp: Round by round.
        gradient_error: The largest relative error of an element, of all contestants.
        agrees: Whether all gradients were those known beforehand, to rounding.
    """

    gradients: str
    layout: str
    ours: Spread
    ddp: Spread | None
    bare: Spread | None
    ours_over_ddp: Spread | None
    gradient_error: float
    agrees: bool


@dataclass(frozen=True)
class OverlapRow:
    """What one contestant's own timers say of a backward, as means over processes and steps.

    Attributes:
        case: Name of the model.
        contestant: Key of the contestant.
        title: What is shown.
        communication: Seconds from the launch of the first bucket to the end of the last.
        computation: Seconds of the backward's own computation.
        hidden: Seconds of communication during computation.
        exposed: Share of the communication that computation does not hide; None without any.
    """

    case: str
    contestant: str
    title: str
    communication: Spread
    computation: Spread
    hidden: Spread
    exposed: Spread | None


def summarize_reduction(gradients: str, layout: str, outcomes: Sequence[Outcome]) -> ReducerRow:
    """Compare the contestants of one layout on one set of gradients.

    Args:
        gradients: Name of the set.
        layout: Processes x replicas of ours.
        outcomes: Ours first, then the peers in any order.
    """
    seconds = {each.contestant.name: each.seconds[gradients] for each in outcomes}
    ddp, bare = seconds.get("ddp"), seconds.get("bare")
    errors = [
        said["gradient_errors"][gradients]
        for each in outcomes
        for said in (*each.checked, *each.finished)
    ]
    return ReducerRow(
        gradients=gradients,
        layout=layout,
        ours=spread(seconds["ours"]),
        ddp=spread(ddp) if ddp else None,
        bare=spread(bare) if bare else None,
        ours_over_ddp=ratios(seconds["ours"], ddp) if ddp else None,
        gradient_error=largest(errors),
        agrees=largest(errors) <= GRADIENT_TOLERANCE,
    )


def summarize_overlap(case: str, outcome: Outcome) -> OverlapRow:
    """What the timers of one contestant say.

    Args:
        case: Name of the model.
        outcome: Of a contestant that collected statistics.
    """
    # Per round, what each process says.
    rounds = list(zip(*(each["statistics"] for each in outcome.finished), strict=True))
    communication, computation, hidden = (
        [statistics.mean(each[name] for each in answers) for answers in rounds]
        for name in ("communication", "computation", "hidden")
    )
    return OverlapRow(
        case=case,
        contestant=outcome.contestant.name,
        title=outcome.contestant.title,
        communication=spread(communication),
        computation=spread(computation),
        hidden=spread(hidden),
        exposed=_exposed(communication, hidden) if min(communication) > 0.0 else None,
    )


def _exposed(communication: Sequence[float], hidden: Sequence[float]) -> Spread:
    # Differences of rounded times can exceed each other by next to nothing.
    pairs = zip(communication, hidden, strict=True)
    return spread([max(0.0, 1.0 - part / whole) for whole, part in pairs])
