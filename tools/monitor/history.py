"""The last samples: since when something holds, and what happened lately in the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from dataparallel.monitor.findings import Finding, ReplicaScore
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.readings.visible_devices import bare
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.summary import Summary
from dataparallel.tools.monitor.ranks import find_in_job
from dataparallel.tools.monitor.run_period import (
    RunPeriod,
    continues,
    seconds_still,
    summarize_periods,
)

#: So many states of a run are kept at most, and so many samples of a device.
_MAX_STATES = 1000
_MAX_SAMPLES = 600
#: So many seconds count as lately, or the last step if it is older.
_WINDOW = 10.0

#: The time of each sample, and the load of a device and the share of its memory in use then.
Course: TypeAlias = Sequence[tuple[float, float | None, float | None]]


class RunHistory:
    """The last states of a run that is watched.

    Attributes:
        gone_for: Seconds since the run was seen last; None while it is there.
    """

    def __init__(self, state: RunState, elapsed: float, slowed: Mapping[str, str]) -> None:
        # With the samples' own clock: that of the host may be set while a run is watched.
        self._states: deque[tuple[float, RunState]] = deque(maxlen=_MAX_STATES)
        self._summary: Summary | None = None
        self._seen = elapsed
        self.gone_for: float | None = None
        self.add(state, elapsed, slowed)

    @property
    def state(self) -> RunState:
        """The newest state; it stays when the run is gone."""
        return self._states[-1][1]

    def add(self, state: RunState | None, elapsed: float, slowed: Mapping[str, str]) -> None:
        """Take the state of the next sample, None if the run is gone.

        ``slowed`` tells, by the name of a device, why it is slowed down.
        """
        self._slowed = slowed
        self._summary = None
        if state is None:
            self.gone_for = elapsed - self._seen
            return
        self._seen, self.gone_for = elapsed, None
        if self._states and not continues(self._states[-1][1], state):
            self._states.clear()
        if len(self._states) >= 2 and self._states[-2][1].num_steps == state.num_steps:
            # While nothing happens the states in between tell nothing.
            self._states.pop()
        self._states.append((elapsed, state))
        while (
            len(self._states) > 2
            and self._states[1][0] <= elapsed - _WINDOW
            and self._states[1][1].num_steps < state.num_steps
        ):
            self._states.popleft()

    @property
    def seconds(self) -> float:
        """Seconds that lately comprises; 0 with less than two states."""
        return self._states[-1][0] - self._states[0][0]

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second lately, as in the summary; 0 where nothing moves, None if unknown."""
        return self._rate(self.summary.steps_per_second)

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second lately, in this process; likewise."""
        return self._rate(self.summary.samples_per_second)

    def _rate(self, lately: float) -> float | None:
        rate = 0.0 if self.still_for or self.gone_for is not None else lately
        return rate if self.seconds else None

    @property
    def still_for(self) -> float:
        """Seconds without a step, if they are many; else 0."""
        times, states = zip(*self._states, strict=True)
        return seconds_still(times, states, self.summary.step_seconds)

    @property
    def summary(self) -> Summary:
        """Return the summary in a report of the same samples."""
        if self._summary is None:
            states = tuple(state for _, state in self._states)
            period = RunPeriod(tuple(range(len(states))), states, is_whole=False)
            self._summary = summarize_periods([period], self._slowed)
        return self._summary

    @property
    def scores(self) -> Sequence[ReplicaScore]:
        """Return each replica's phases and speed of late; empty without steps."""
        return self.summary.replicas if self.state.num_steps else ()


class Since:
    """The times since which several things have held without a break."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}

    def seconds(self, name: str, holds: bool, now: float) -> float:
        """For how many seconds something has held; asked once per sample."""
        if not holds:
            self._begun.pop(name, None)
            return 0.0
        return now - self._begun.setdefault(name, now)


class History:
    """The last samples.

    Attributes:
        sample: The newest sample; None before the first one.
        changes: By job that is there, all that is worth a change, the largest gain first.
        since: Durations of what alerts look at.
    """

    def __init__(self) -> None:
        self.sample: Sample | None = None
        self.changes: dict[str, list[Finding]] = {}
        self._runs: dict[tuple[str, int, int], RunHistory] = {}
        self._courses: dict[str, deque[tuple[float, float | None, float | None]]] = {}
        self.since = Since()

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        if self.sample is not None and sample.elapsed < self.sample.elapsed:
            # A recording that was begun anew: durations count from here.
            self.since = Since()
            self._runs.clear()
            self._courses.clear()
        self.sample = sample
        self._add_runs(sample)
        self.changes = self._find_changes()
        now = {one.identity: (one.load, one.memory_share) for one in sample.devices}
        for name in dict.fromkeys([*self._courses, *now]):
            course = self._courses.setdefault(name, deque(maxlen=_MAX_SAMPLES))
            course.append((sample.elapsed, *now.get(name, (None, None))))

    def _add_runs(self, sample: Sample) -> None:
        states = {state.identity: state for state in sample.runs}
        ranks = {(state.job, state.rank) for state in sample.runs}
        jobs = {job for job, _ in ranks}
        for identity, run in list(self._runs.items()):
            state = states.pop(identity, None)
            run.add(state, sample.elapsed, slowed_devices(sample, run.state.info))
            job, rank = run.state.job, run.state.rank
            # A run that is gone stays if its job goes on without it, or if there is nothing else.
            if run.gone_for and jobs and ((job, rank) in ranks or job not in jobs):
                del self._runs[identity]
        for identity, state in states.items():
            slowed = slowed_devices(sample, state.info)
            self._runs[identity] = RunHistory(state, sample.elapsed, slowed)

    def _find_changes(self) -> dict[str, list[Finding]]:
        states = [run.state for run in self.runs]
        there: dict[str, list[RunHistory]] = {}
        for run in self.runs:
            if run.gone_for is None:
                there.setdefault(run.state.job, []).append(run)
        return {
            job: find_in_job(
                [(run.state, run.summary) for run in runs], states, [run.still_for for run in runs]
            )
            for job, runs in there.items()
        }

    @property
    def advice(self) -> Finding | None:
        """Return the first change to make in the jobs that are there, also if it is no warning."""
        found = [each[0] for each in self.changes.values() if each[0].gain]
        return max(found, key=lambda one: one.gain, default=None)

    @property
    def runs(self) -> list[RunHistory]:
        """Return the late history of each run that is watched, by job and rank."""
        return sorted(self._runs.values(), key=lambda run: run.state.order)

    def course(self, device: DeviceReading) -> Course:
        """Return the last samples of a device, the newest last."""
        return tuple(self._courses.get(device.identity, ()))


def slowed_devices(sample: Sample, info: RunInfo) -> dict[str, str]:
    """By the name that a run gives a device, why it is slowed down."""
    return {
        name: ", ".join(device.throttle)
        for device in sample.devices
        for name in {info.devices[i] for i in replicas_on(device.device, device.uuid, info)}
        if device.throttle
    }


def replicas_on(device: str, uuid: str | None, info: RunInfo) -> list[int]:
    """Return the replicas of a run on a device, which may have another name in the run."""
    return [
        i
        for i, (name, known) in enumerate(zip(info.devices, info.uuids, strict=True))
        if _is_same(device, uuid, name, known)
    ]


def users_of(device: DeviceReading, runs: Sequence[RunHistory]) -> str:
    """Return the replicas on a device, in words; with their ranks if there are several runs."""
    found: dict[str, None] = {}
    for run in runs:
        own = replicas_on(device.device, device.uuid, run.state.info)
        if own and run.gone_for is None:
            # Modules of one process have the same devices.
            rank = f"rank {run.state.rank} " if len(runs) > 1 else ""
            found[f"{rank}replica {', '.join(map(str, own))}"] = None
    return "; ".join(found)


def reading_of(sample: Sample, name: str, uuid: str | None) -> DeviceReading | None:
    """Return the reading of a device of a run, which may have another name where it was read."""
    for reading in sample.devices:
        if _is_same(reading.device, reading.uuid, name, uuid):
            return reading
    return None


def _is_same(device: str, uuid: str | None, name: str, known: str | None) -> bool:
    return device == name if uuid is None or known is None else bare(uuid) == bare(known)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of those values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
