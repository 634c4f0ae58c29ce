"""The ranks of a job beside each other: what each is called, and which one the others wait for.

Note [Which rank is slow]
~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that reduce gradients together take the same time for a step, for the fast ones wait. So a
rank is judged by its own time: that of a step without the waiting for other processes. It is put
beside the median of the other ranks, as a whole and phase by phase; the phase in which a slow rank
takes longest beyond the others is the one that is named. Where no phase accounts for half of the
difference, ranks are late by chance, now one and now another, and none is named.

Where no rank tells how long it waits (in modules that reduce within their backward) the waiting is
part of the backward, so that this phase says nothing of a rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.run import RunState
from dataparallel.monitor.summary import Summary, duration
from dataparallel.threads.timeline import PHASES, Phase

#: A rank is slow if its own time is so much longer than that of the others, and if a step would
#: become so much shorter without that.
_NOTABLE = 0.1
_WORTHWHILE = 0.03
_MUCH = 0.15
_WAITING: Phase = "reduce across processes"

_REMEDIES: dict[Phase, str] = {
    "input": "Its batches come late: give it no more data than the others, and as many workers of "
    "its DataLoader and processors.",
    "optimizer": "Look at what else runs on its device and on its processors.",
}
_REMEDY = (
    "Look at its devices and at what else runs there, and whether it gets larger or longer samples "
    "than the others."
)


# --- names -----------------------------------------------------------------------------------


def run_name(state: RunState, states: Sequence[RunState]) -> str:
    """What tells a run from the others, in words; empty for the only one."""
    return ", ".join(filter(None, (process_name(state, states), model_name(state, states))))


def process_name(state: RunState, states: Sequence[RunState]) -> str:
    """What tells the process of a run from the others, in words; empty for the only one."""
    if len({(one.host, one.pid) for one in states}) == 1:
        return ""
    if len({one.job for one in states}) == 1:
        return f"rank {state.rank}"
    is_alone = state.info.world_size == 1
    return f"process {state.pid}" if is_alone else f"rank {state.rank} of {state.job}"


def model_name(state: RunState, states: Sequence[RunState]) -> str:
    """What tells a run from the others of its process, in words; empty for the only one."""
    beside = [one for one in states if (one.host, one.pid) == (state.host, state.pid)]
    if len(beside) == 1:
        return ""
    alike = sorted(one.number for one in beside if one.info.model == state.info.model)
    place = f" {alike.index(state.number) + 1}" if len(alike) > 1 else ""
    return f"{state.info.model}{place}"


# --- which rank is slow ----------------------------------------------------------------------


def find_in_job(
    runs: Sequence[tuple[RunState, Summary]], states: Sequence[RunState]
) -> list[Finding]:
    """All that is worth a change in a job, the largest gain first; what ranks share is told once.

    Args:
        runs: The job's runs, and what the steps of each come to.
        states: Also those of other jobs, from which they are told.
    """
    models: dict[str, dict[int, Summary]] = {}
    told: dict[object, list[tuple[str, Finding]]] = {}
    for state, summary in runs:
        models.setdefault(model_name(state, states), {})[state.rank] = summary
    slow = [one for one in map(find_slow_rank, models.values()) if one is not None]
    late = {one.numbers["rank"] for one in slow}
    for state, summary in runs:
        for one in summary.findings:
            # The others wait for a slow rank, not for what is sent.
            if one.kind != "communication hook" or not late or state.rank in late:
                same = one.kind, one.numbers.get("replica")
                told.setdefault(same, []).append((run_name(state, states), one))
    found = list(slow)
    for each in told.values():
        largest = max((one for _, one in each), key=lambda one: one.gain)
        who = "all ranks" if len(each) == len(runs) > 1 else "; ".join(name for name, _ in each)
        text = f"{who[0].upper()}{who[1:]}: {largest.text}" if who else largest.text
        found.append(replace(largest, text=text))
    chosen = [one for one in found if one.gain] or found[:1]
    return sorted(chosen, key=lambda one: -one.gain)


def find_slow_rank(ranks: Mapping[int, Summary]) -> Finding | None:
    """The rank for which the others wait; None where they are even. See Note [Which rank is slow].

    Args:
        ranks: What the steps of each rank come to, while they trained together.
    """
    ranks = {rank: one for rank, one in ranks.items() if one.num_steps}
    if len(ranks) < 2:
        return None
    phases = {rank: _phases(one) for rank, one in ranks.items()}
    waits = {rank: each.pop(_WAITING, 0.0) for rank, each in phases.items()}
    own = {rank: one.step_seconds - waits[rank] for rank, one in ranks.items()}
    if not any(waits.values()):
        own = {
            rank: sum(each.values()) - each.pop("backward", 0.0) for rank, each in phases.items()
        }
    slowest = max(own, key=lambda rank: own[rank])
    others = [rank for rank in own if rank != slowest]
    usual = statistics.median(own[rank] for rank in others)
    excess = own[slowest] - usual
    gain = excess / ranks[slowest].step_seconds
    if excess < _NOTABLE * usual or gain < _WORTHWHILE:
        return None
    beyond = {
        phase: seconds - statistics.median(phases[rank].get(phase, 0.0) for rank in others)
        for phase, seconds in phases[slowest].items()
    }
    phase = max(beyond, key=lambda phase: beyond[phase], default=_WAITING)
    if beyond.get(phase, 0.0) < excess / 2:
        return None
    who = "the other rank waits" if len(others) == 1 else f"the other {len(others)} ranks wait"
    text = (
        f"Rank {slowest} is slow in '{phase}': its own work takes {duration(own[slowest])} of each "
        f"step, that of the others {duration(usual)}, and {who} {duration(excess)} for it. "
        f"{_REMEDIES.get(phase, _REMEDY)}"
    )
    return Finding(
        "slow rank",
        text,
        "warning" if gain >= _MUCH else "info",
        min(0.99, gain),
        {"rank": slowest, "excess_seconds": excess},
    )


def _phases(summary: Summary) -> dict[Phase, float]:
    """Seconds per step: of the waiting the mean over the replicas, of the others' the longest."""
    each: dict[Phase, float] = {}
    for phase in PHASES:
        seconds = [one.seconds.get(phase, 0.0) for one in summary.replicas]
        if phase != "idle" and any(seconds):
            each[phase] = sum(seconds) / len(seconds) if phase == _WAITING else max(seconds)
    return each
