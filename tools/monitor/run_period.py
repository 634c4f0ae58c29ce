"""The stretches of a recording in which one run was watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dataparallel.monitor.outliers import OUTLIER, are_rare
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.totals import ReplicaTotals, RunTotals, make_totals
from dataparallel.threads.timeline import Phase
from dataparallel.tools.monitor.reading import Sample

#: So many steps are enough for percentiles and scores.
_MAX_STEPS = 1000
#: With so many more steps those with which a run began are left out: they warm up.
_ENOUGH = 3


@dataclass(frozen=True)
class RunPeriod:
    """States of one run, whose counters only grow.

    Attributes:
        places: For each state, which sample it is in.
        states: The oldest first; at least one.
        is_whole: Whether the run began within the recording, so that all of it is known.
    """

    places: tuple[int, ...]
    states: tuple[RunState, ...]
    is_whole: bool

    @property
    def info(self) -> RunInfo:
        """What does not change."""
        return self.states[-1].info

    @property
    def since_start(self) -> bool:
        """Whether :meth:`totals` are those since the run began, not since it was seen first."""
        return self.is_whole or self.states[-1].num_steps == self.states[0].num_steps

    def totals(self) -> RunTotals:
        """What the steps of the period add up to."""
        return self._without(())

    def steady(self) -> RunTotals:
        """The same without what says nothing of the other steps.

        That is the time in which a run warms up, does not train though it does at other times, or
        takes a multiple of its usual time per step; as far as the states show.
        """
        kept = self._stretches
        if kept and kept[0].begins_run:
            others = _num_steps(kept[1:])
            if others >= _ENOUGH and 10 * others >= kept[0].num_steps:
                kept = kept[1:]
        if any(one.kind == "train" for one in kept):
            kept = [one for one in kept if one.kind != "inference"]
        if kept:
            limit = OUTLIER * _median(kept)
            usual = [one for one in kept if one.seconds / one.num_steps <= limit]
            if are_rare(_num_steps(kept) - _num_steps(usual), _num_steps(kept)):
                kept = usual
        ends = {id(one.end) for one in kept or self._stretches}
        return self._without([one for one in self._stretches if id(one.end) not in ends])

    def steps(self) -> list[StepRecord]:
        """Those steps that are known one by one: the last one at each sample, or at some."""
        first = 0 if self.since_start else self.states[0].num_steps
        lasts = [state.last for state in self.states]
        # Of others only the kind is kept.
        known = {one.number: one for one in lasts if one is not None and one.replicas}
        numbers = sorted(number for number in known if number > first)
        stride = max(1, -(-len(numbers) // _MAX_STEPS))
        # From the end, so that the newest one is among them.
        steps = [known[number] for number in reversed(numbers[::-stride])]
        training = [step for step in steps if step.kind == "train"]
        return training or steps

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        """Where steps were added: from one state to the next."""
        before = None if self.since_start else self.states[0]
        found = []
        for state in self.states:
            if state.num_steps > (0 if before is None else before.num_steps):
                found.append(_Stretch(before, state))
                before = state
        return found

    def _without(self, left_out: Sequence[_Stretch]) -> RunTotals:
        whole = _Stretch(None if self.since_start else self.states[0], self.states[-1])
        seconds = whole.phases
        for stretch in left_out:
            seconds = [difference(*pair) for pair in zip(seconds, stretch.phases, strict=True)]
        samples = whole.num_samples - sum(stretch.num_samples for stretch in left_out)
        chunks = self._chunks(left_out)
        replicas = [
            ReplicaTotals(i, device, samples * chunks[i] / sum(chunks), seconds[i])
            for i, device in enumerate(self.info.devices)
        ]
        return make_totals(
            whole.num_steps - _num_steps(left_out),
            max((sum(one.values()) for one in seconds), default=0.0),
            samples,
            replicas,
            self.info,
        )

    def _chunks(self, left_out: Sequence[_Stretch]) -> list[float]:
        """Per replica about how many samples it got: each step that is seen stands for others."""
        found = [0.0] * len(self.info.devices)
        ends = {id(stretch.end) for stretch in left_out}
        for stretch in self._stretches:
            last = stretch.end.last
            if last is None or not last.samples or id(stretch.end) in ends:
                continue
            for replica in last.replicas:
                found[replica.index] += stretch.num_samples * replica.samples / last.samples
        return found if any(found) else [1.0] * len(found)


class _Stretch:
    """The steps between two states of a run.

    Args:
        begin: The state before; None if it is the run's beginning.
        end: The state after.
    """

    def __init__(self, begin: RunState | None, end: RunState) -> None:
        self.begin, self.end = begin, end
        self.num_steps = end.num_steps - (0 if begin is None else begin.num_steps)
        self.num_samples = end.num_samples - (0 if begin is None else begin.num_samples)
        self.phases = [
            difference(now, {} if begin is None else begin.totals[i])
            for i, now in enumerate(end.totals)
        ]
        self.seconds = max((sum(one.values()) for one in self.phases), default=0.0)

    @property
    def begins_run(self) -> bool:
        """Whether the run's first step is in it."""
        return self.begin is None or self.begin.num_steps == 0

    @property
    def kind(self) -> str | None:
        """Of which kind its last step is; None if that is unknown."""
        return None if self.end.last is None else self.end.last.kind


def _num_steps(stretches: Sequence[_Stretch]) -> int:
    return sum(one.num_steps for one in stretches)


def _median(stretches: Sequence[_Stretch]) -> float:
    """Seconds per step; each step counts, not each stretch."""
    each = sorted((one.seconds / one.num_steps, one.num_steps) for one in stretches)
    half, passed = sum(number for _, number in each) / 2, 0
    for seconds, number in each:
        passed += number
        if passed >= half:
            return seconds
    return 0.0


def find_periods(samples: Sequence[Sample]) -> list[RunPeriod]:
    """Cut a recording where another run begins, or the same one anew.

    Args:
        samples: The oldest first.
    """
    found: list[list[tuple[int, RunState]]] = []
    for place, sample in enumerate(samples):
        if sample.run is None:
            continue
        if not found or not continues(found[-1][-1][1], sample.run):
            found.append([])
        found[-1].append((place, sample.run))
    return [
        RunPeriod(
            tuple(place for place, _ in period),
            tuple(state for _, state in period),
            is_whole=period[0][1].started >= samples[0].time,
        )
        for period in found
    ]


def group_periods(periods: Sequence[RunPeriod]) -> list[list[RunPeriod]]:
    """Put together what belongs together: a run that was started again, and what it was before.

    Args:
        periods: The oldest first.
    """
    groups: dict[object, list[RunPeriod]] = {}
    for period in periods:
        info = period.info
        same = (info.model, info.wrapper, info.devices, info.num_parameters)
        groups.setdefault(same, []).append(period)
    return list(groups.values())


def continues(before: RunState, now: RunState) -> bool:
    """Whether two states are of one run, whose counters have only grown.

    Args:
        before: The older one.
        now: The newer one.
    """
    return (
        (before.pid, before.started) == (now.pid, now.started)
        and before.num_steps <= now.num_steps
        and before.num_samples <= now.num_samples
        and before.info.devices == now.info.devices
        and len(before.totals) == len(now.totals) == len(now.info.devices)
    )


def difference(now: Mapping[Phase, float], before: Mapping[Phase, float]) -> dict[Phase, float]:
    """The seconds of each phase that have been added.

    Args:
        now: Seconds of each phase.
        before: Likewise, earlier.
    """
    return {phase: max(0.0, value - before.get(phase, 0.0)) for phase, value in now.items()}
