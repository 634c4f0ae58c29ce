"""The ranks of a job beside each other: what each is called, and which one the others wait for.

Note [Which rank is slow]
~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks that reduce gradients together take the same time for a step, for the fast ones wait. So a
rank is judged by its own time: that of a step without the waiting for other processes. It is put
beside the median of the other ranks, as a whole and phase by phase. The named phase is the one in
which a slow rank takes longest beyond the others. If the phases do not account for half of the
difference, ranks are late by chance, and none is named.

If no rank tells how long it waits (in modules that reduce within their backward) the waiting is
part of the backward. Then this phase says nothing of a rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dataparallel.monitor.findings import NOTABLE, Finding, change, duration
from dataparallel.monitor.run import RunState
from dataparallel.monitor.summary import Summary
from dataparallel.threads import PHASES, Phase
from dataparallel.tools.monitor.units import seconds_text

#: A slow rank is named if a step would become so much shorter without that.
_WORTHWHILE = 0.05
_WAITING: Phase = "reduce across processes"

_REMEDIES: dict[Phase, str] = {
    "input": "Its batches come late: give it no more data than the others, and as many workers of "
    "its DataLoader and processors.",
    "pause": "It saves, evaluates or prints while the others wait: let it do that less often, or "
    "save in the background.",
    "optimizer": "Look at what else runs on its device and on its processors.",
}
_REMEDY = (
    "Look at its devices and at what else runs there, and whether it gets larger or longer samples "
    "than the others."
)


# --- names -----------------------------------------------------------------------------------


def run_name(state: RunState, states: Sequence[RunState]) -> str:
    """Return the words that tell a run from the others; empty for the only one."""
    return ", ".join(filter(None, (process_name(state, states), model_name(state, states))))


def process_name(state: RunState, states: Sequence[RunState]) -> str:
    """Return the words that tell the process of a run from the others; empty for the only one."""
    if len({(one.host, one.pid) for one in states}) == 1:
        return ""
    if len({one.job for one in states}) == 1:
        return f"rank {state.rank}"
    is_alone = state.info.world_size == 1
    return f"process {state.pid}" if is_alone else f"rank {state.rank} of {state.job}"


def model_name(state: RunState, states: Sequence[RunState]) -> str:
    """Return the words that tell a run from the others of its process; empty for the only one."""
    beside = [one for one in states if (one.host, one.pid) == (state.host, state.pid)]
    if len(beside) == 1:
        return ""
    alike = sorted(one.number for one in beside if one.info.model == state.info.model)
    place = f" {alike.index(state.number) + 1}" if len(alike) > 1 else ""
    return f"{state.info.model}{place}"


# --- how fast a job is ---------------------------------------------------------------------------


def speed_of_ranks(speeds: Iterable[tuple[int, float | None]]) -> float | None:
    """Samples per second of ranks together, from the rank and the speed of each run.

    Modules of one rank are given the same samples.
    """
    found: dict[int, float] = {}
    for rank, speed in speeds:
        if speed is not None:
            found[rank] = max(speed, found.get(rank, 0.0))
    return sum(found.values()) if found else None


# --- which rank is slow ----------------------------------------------------------------------


def find_in_job(
    runs: Sequence[tuple[RunState, Summary]],
    states: Sequence[RunState],
    still: Sequence[float] = (),
) -> list[Finding]:
    """Return all changes worth making in a job, the largest gain first; shared ones once.

    ``states`` also has those of other jobs, which tell the job's apart. ``still`` has the seconds
    in which each run made no step, 0 if it goes on. In a job that hangs nothing else counts.
    """
    hang = _find_hang([(state, s) for (state, _), s in zip(runs, still, strict=False) if s], states)
    if hang is not None and hang.severity == "error":
        return [hang]
    models: dict[str, dict[int, Summary]] = {}
    for state, summary in runs:
        models.setdefault(model_name(state, states), {})[state.rank] = summary
    job = f" of {runs[0][0].job}" if len({one.job for one in states}) > 1 else ""
    each_model = (find_slow_rank(ranks, job) for ranks in models.values())
    slow = {one.numbers["rank"]: one for one in each_model if one is not None}
    found = list(slow.values())
    for told in _by_cause(runs):
        is_of_all, most = len(told) == len(runs) > 1, 1.0
        if slow and not is_of_all:
            # The others wait for it, and would with less to do of their own.
            told = [
                (state, one)
                for state, one in told
                # The same illness is told once.
                if state.rank in slow and f"{one.kind}_excess" not in slow[state.rank].numbers
            ]
            most = max(one.gain for one in slow.values())
        if told:
            who = "; ".join(run_name(state, states) for state, _ in told)
            if is_of_all:
                several = len({state.rank for state, _ in runs}) > 1
                who = "all ranks" if several else process_name(told[0][0], states)
            # All of them share the least gain.
            least = min((one for _, one in told), key=lambda one: one.gain)
            text = f"{who[0].upper()}{who[1:]}: {least.text}" if who else least.text
            found.append(replace(least, text=text, gain=min(least.gain, most)))
    chosen = [one for one in found if one.gain] or found[:1]
    nothing = Finding("nothing", "Nothing stands out.")
    chosen = sorted(chosen, key=lambda one: -one.gain) or [nothing]
    return chosen if hang is None else [*chosen, hang]


def _find_hang(
    still: Sequence[tuple[RunState, float]], states: Sequence[RunState]
) -> Finding | None:
    """Return why runs stand still, if some do; those that wait for others are not the cause."""
    causes = [one for one in still if not one[0].answers]
    causes = causes or [one for one in still if _WAITING not in dict(one[0].now)] or list(still)
    if not causes:
        return None
    state, seconds = causes[0]
    phase, since = max(state.now, key=lambda each: each[1])
    does = f"has been in '{phase}' for {seconds_text(since)}"
    if not state.answers:
        does = f"does not answer, and was in '{phase}' last"
    who = run_name(state, states) or "the run"
    more = f", like {len(causes) - 1} more" if len(causes) > 1 else ""
    text = (
        f"{who[0].upper()}{who[1:]} has made no step for {seconds_text(seconds)}{more}: it {does}. "
        f"`py-spy dump --pid {state.pid}` shows where it is."
    )
    if phase == _WAITING:
        text += " Another process is late or gone: look at what that one does."
    if state.answers and phase in ("input", "idle"):
        return Finding("stands still", f"{text} It may load data, evaluate or save.", "warning")
    return Finding("hang", text, "error")


def _by_cause(runs: Sequence[tuple[RunState, Summary]]) -> list[list[tuple[RunState, Finding]]]:
    """Return the findings of runs; the same finding in several of them stands together."""
    found: dict[object, list[tuple[RunState, Finding]]] = {}
    for state, summary in runs:
        beside = [one for other, one in runs if other.identity[:2] == state.identity[:2]]
        for one in summary.findings:
            if one.kind != "input" or not _others_compute(summary, beside):
                found.setdefault((one.kind, one.numbers.get("replica")), []).append((state, one))
    return list(found.values())


def _others_compute(summary: Summary, beside: Sequence[Summary]) -> bool:
    """True if other modules of the process are what takes the time between a module's steps."""
    busy = sum(
        one.step_seconds - phase_seconds(one).get("input", 0.0)
        for one in beside
        if one is not summary
    )
    return busy > phase_seconds(summary).get("input", 0.0) / 2


def find_slow_rank(ranks: Mapping[int, Summary], job: str = "") -> Finding | None:
    """Return the rank for which others wait; None if they are even. See Note [Which rank is slow].

    The summaries are about the time in which they trained together.
    """
    ranks = {rank: one for rank, one in ranks.items() if one.num_steps}
    if len(ranks) < 2:
        return None
    phases = {rank: phase_seconds(one) for rank, one in ranks.items()}
    waits = {rank: each.pop(_WAITING, 0.0) for rank, each in phases.items()}
    own = {rank: one.step_seconds - waits[rank] for rank, one in ranks.items()}
    if not any(waits.values()):
        own = {rank: own_seconds(each) for rank, each in phases.items()}
        for each in phases.values():
            each.pop("backward", None)
    slowest = max(own, key=lambda rank: own[rank])
    others = [rank for rank in own if rank != slowest]
    usual = statistics.median(own[rank] for rank in others)
    excess = own[slowest] - usual
    gain = excess / ranks[slowest].step_seconds
    if excess < NOTABLE * usual or gain < _WORTHWHILE:
        return None
    beyond = {
        phase: seconds - statistics.median(phases[rank].get(phase, 0.0) for rank in others)
        for phase, seconds in phases[slowest].items()
    }
    if sum(max(0.0, seconds) for seconds in beyond.values()) < excess / 2:
        return None
    phase = max(beyond, key=lambda phase: beyond[phase])
    who = "the other rank waits" if len(others) == 1 else f"the other {len(others)} ranks wait"
    text = (
        f"Rank {slowest}{job} is slow in '{phase}': its own work takes {duration(own[slowest])} of "
        f"each step, that of the others {duration(usual)}, and {who} {duration(excess)} for it. "
        f"{_REMEDIES.get(phase, _REMEDY)}"
    )
    numbers = {"rank": slowest, "excess_seconds": excess, f"{phase}_excess": beyond[phase]}
    return change("slow rank", gain, text, **numbers)


def own_seconds(phases: Mapping[Phase, float]) -> float:
    """Return the time in phases in which a rank waits for nobody, though waiting is hidden."""
    return sum(s for phase, s in phases.items() if phase not in ("backward", "idle", _WAITING))


def phase_seconds(summary: Summary) -> dict[Phase, float]:
    """Seconds per step: of the waiting the mean over the replicas, of the others' the longest."""
    each: dict[Phase, float] = {}
    for phase in PHASES:
        seconds = [one.seconds.get(phase, 0.0) for one in summary.replicas]
        if phase != "idle" and any(seconds):
            each[phase] = sum(seconds) / len(seconds) if phase == _WAITING else max(seconds)
    return each
