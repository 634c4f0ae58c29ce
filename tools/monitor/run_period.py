"""The stretches of a recording in which one run was watched, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.monitor.findings import ReplicaTotals, StepWindow
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.summary import Summary, summarize


@dataclass(frozen=True)
class RunPeriod:
    """States of one run, whose counters only grow.

    Attributes:
        places: For each state, which sample it is in.
        states: The oldest first; at least one.
        is_whole: True if the run began within the recording, so that all of it is known.
    """

    places: tuple[int, ...]
    states: tuple[RunState, ...]
    is_whole: bool

    @property
    def info(self) -> RunInfo:
        """Return the facts that do not change."""
        return self.states[-1].info

    @property
    def since_start(self) -> bool:
        """True if :meth:`windows` are those since the run began, not since it was seen first."""
        return self.is_whole or self.states[-1].num_steps == self.states[0].num_steps

    def windows(self) -> list[StepWindow]:
        """Return the steps from one state to the next."""
        before = None if self.since_start else self.states[0]
        seen = None
        found = []
        for state in self.states:
            if state.last is not None and state.last.replicas:
                seen = state.last
            if state.num_steps > (0 if before is None else before.num_steps):
                found.append(window_between(before, state, seen))
                before = state
        return found


def window_between(before: RunState | None, now: RunState, seen: StepRecord | None) -> StepWindow:
    """Return the steps between two states of a run, or from its beginning to a state.

    The division of samples is that of the step that was ``seen``, if one was.
    """
    phases = [
        {
            phase: max(0.0, seconds - (before.totals[i].get(phase, 0.0) if before else 0.0))
            for phase, seconds in total.items()
        }
        for i, total in enumerate(now.totals)
    ]
    bound = [
        seconds - (before.host_bound[i] if before else 0.0)
        for i, seconds in enumerate(now.host_bound)
    ]
    samples = now.num_samples - (before.num_samples if before else 0)
    each = [1 / len(phases)] * len(phases)
    if seen is not None and seen.samples and len(seen.replicas) == len(phases):
        each = [replica.samples / seen.samples for replica in seen.replicas]
    return StepWindow(
        now.num_steps - (before.num_steps if before else 0),
        max(sum(one.values()) for one in phases),
        samples,
        [ReplicaTotals(samples * s, one, b) for s, one, b in zip(each, phases, bound, strict=True)],
        None if now.last is None else now.last.kind,
        before is None or before.num_steps == 0,
        StepWindow.of(now.last) if now.last is not None and now.last.replicas else None,
    )


def find_runs(samples: Sequence[Sample]) -> list[list[RunPeriod]]:
    """Return the runs of a recording, each with its periods and those of its restarts."""
    groups: list[tuple[object, list[RunPeriod]]] = []
    for period in _periods(samples):
        info, rank = period.info, period.states[-1].rank
        same = (rank, info.model, info.wrapper, info.devices, info.num_parameters)
        for known, group in groups:
            # A run that goes on at the same time is another run.
            if known == same and group[-1].places[-1] < period.places[0]:
                group.append(period)
                break
        else:
            groups.append((same, [period]))
    return [group for _, group in groups]


def _periods(samples: Sequence[Sample]) -> list[RunPeriod]:
    """Cut what a recording tells of each run where it begins anew."""
    found: list[list[tuple[int, RunState]]] = []
    latest: dict[object, list[tuple[int, RunState]]] = {}
    for place, sample in enumerate(samples):
        for state in sample.runs:
            period = latest.get(state.identity)
            if period is None or not continues(period[-1][1], state):
                period = latest[state.identity] = []
                found.append(period)
            period.append((place, state))
    return [
        RunPeriod(
            tuple(place for place, _ in period),
            tuple(state for _, state in period),
            is_whole=period[0][1].started >= samples[0].time,
        )
        for period in found
    ]


def continues(before: RunState, now: RunState) -> bool:
    """True if two states are of one run, whose counters have only grown."""
    return (
        (before.pid, before.started) == (now.pid, now.started)
        and before.num_steps <= now.num_steps
        and before.num_samples <= now.num_samples
        and before.info.devices == now.info.devices
        and len(before.totals) == len(now.totals) == len(now.info.devices)
    )


def summarize_periods(
    periods: Sequence[RunPeriod], slowed: Mapping[str, str] | None = None
) -> Summary:
    """Sum up what a run did while it was watched, for the live view and for the report."""
    windows = [window for period in periods for window in period.windows()]
    return summarize(windows, periods[-1].info, slowed, periods[-1].states[-1])
