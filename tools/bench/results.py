"""Conclusions from the rounds of contestants that train: ratios, memory, agreement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataparallel.tools.bench.harness import Outcome, Spread, ratios, spread

#: Largest relative difference of losses and gradient norms that counts as rounding.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class ResultRow:
    """One contestant in one case.

    ``rounds`` are, by phase, seconds of one repetition, of each round the median; ``seconds`` are
    the same over all rounds. ``over_bare`` is the time over that of the bare module, if it takes
    part. Bytes are peaks beyond the level before the model, summed over the processes. A contestant
    agrees if losses and gradient norms are those of the bare module, or else of ours, to rounding.
    """

    contestant: str
    title: str
    replicas: int
    rounds: dict[str, tuple[float, ...]]
    seconds: dict[str, Spread]
    over_bare: Spread | None
    host_bytes: int
    device_bytes: int
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    agrees: bool
    counts: dict[str, Any]


def summarize(outcomes: Sequence[Outcome], case: str, phase: str) -> list[ResultRow]:
    """Compare the contestants in a case by their times of a phase."""
    named = {each.contestant.name: each for each in outcomes}
    return [_row(each, named, case, f"{case} {phase}") for each in outcomes]


def _row(outcome: Outcome, named: Mapping[str, Outcome], case: str, phase: str) -> ResultRow:
    bare, ours = named.get("bare"), named.get("ours")
    said, reference = outcome.checked[0][case], (bare or ours or outcome).checked[0][case]
    rounds = {
        name.removeprefix(f"{case} "): times
        for name, times in outcome.seconds.items()
        if name.startswith(f"{case} ")
    }
    times = outcome.seconds[phase]
    return ResultRow(
        contestant=outcome.contestant.name,
        title=outcome.contestant.title,
        replicas=outcome.contestant.tasks[0].replicas,
        rounds=rounds,
        seconds={name: spread(each) for name, each in rounds.items()},
        over_bare=ratios(times, bare.seconds[phase]) if bare else None,
        host_bytes=sum(each["host_bytes"] for each in outcome.finished),
        device_bytes=sum(each["device_bytes"] for each in outcome.finished),
        losses=tuple(said["losses"]),
        gradient_norms=tuple(said["gradient_norms"]),
        agrees=agree(said, reference),
        counts=outcome.finished[0].get("counts", {}).get(case, {}),
    )


def agree(these: Mapping[str, Any], those: Mapping[str, Any]) -> bool:
    """True if two contestants trained alike, to rounding. NaN is like nothing."""
    return all(
        math.isclose(a, b, rel_tol=TOLERANCE)
        for what in ("losses", "gradient_norms")
        for a, b in zip(these[what], those[what], strict=True)
    )
