"""The stretches of a recording in which one run was watched, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.monitor.findings import ReplicaTotals, StepWindow
from dataparallel.monitor.record import StepRecord, StepTotals
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.summary import Summary, summarize

#: A run stands still if it makes no step for so many seconds, and for so many times the usual time.
_LONG = 10.0
_MANY_STEPS = 5.0
#: The first step compiles and connects, and may take so long.
_FIRST = 60.0


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

    def windows(self) -> list[StepWindow]:
        """Return the steps from one state to the next, or since the run began if there are none."""
        stands = self.states[-1].num_steps == self.states[0].num_steps
        before = None if self.is_whole or stands else self.states[0]
        seen = None
        found: list[StepWindow] = []
        for state in self.states:
            if state.last is not None and state.last.replicas:
                seen = state.last
            if state.num_steps > (0 if before is None else before.num_steps):
                found += windows_between(before, state, seen)
                before = state
        return found


def windows_between(
    before: RunState | None, now: RunState, seen: StepRecord | None = None
) -> list[StepWindow]:
    """Return the steps between two states of a run, or from its beginning to a state, by kind.

    The division of samples is that of the step that was ``seen``, if one was.
    """
    found = []
    for kind, totals in now.kinds.items():
        count = len(totals.seconds)
        old = (before.kinds.get(kind) if before else None) or StepTotals.none(count)
        if totals.steps == old.steps:
            continue
        phases = [
            {phase: max(0.0, seconds - had.get(phase, 0.0)) for phase, seconds in total.items()}
            for had, total in zip(old.seconds, totals.seconds, strict=True)
        ]
        samples = totals.samples - old.samples
        each = [samples / count] * count
        if seen is not None and seen.samples and len(seen.replicas) == count:
            each = [samples * replica.samples / seen.samples for replica in seen.replicas]
        bound = [end - had for had, end in zip(old.host_bound, totals.host_bound, strict=True)]
        last = now.last
        knows_last = last is not None and last.kind == kind and last.replicas
        window = StepWindow(
            totals.steps - old.steps,
            max(sum(one.values()) for one in phases),
            samples,
            list(map(ReplicaTotals, each, phases, bound)),
            kind,
            before is None or not before.num_steps,
            totals.pauses - old.pauses,
            StepWindow.of(last) if last is not None and knows_last else None,
        )
        found.append(window)
    return found


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
        and all(
            kind in now.kinds
            and one.steps <= now.kinds[kind].steps
            and one.samples <= now.kinds[kind].samples
            for kind, one in before.kinds.items()
        )
        and before.info.devices == now.info.devices
    )


def seconds_still(times: Sequence[float], states: Sequence[RunState], usual: float) -> float:
    """Return how long a run has made no step; 0 unless that is long, also beside the usual step."""
    last = states[-1]
    since = next(t for t, one in zip(times, states, strict=True) if one.num_steps == last.num_steps)
    # It may have stood still before anybody looked.
    seconds = max(times[-1] - since, min((each for _, each in last.now), default=0.0))
    return seconds if seconds > max(_LONG, _MANY_STEPS * (usual or _FIRST)) else 0.0


def summarize_periods(
    periods: Sequence[RunPeriod], slowed: Mapping[str, str] | None = None
) -> Summary:
    """Sum up what a run did while it was watched, for the live view and for the report."""
    windows = [window for period in periods for window in period.windows()]
    return summarize(windows, periods[-1].info, slowed, periods[-1].states[-1])
