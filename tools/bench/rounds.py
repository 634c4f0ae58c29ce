"""The order of a measurement: all contestants in turn, round by round."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataparallel.tools.bench.contestants import Contestant
from dataparallel.tools.bench.processes import Team

#: Training steps whose losses are compared.
CHECK_STEPS = 3
#: Seconds that a contestant's turn should last where the number of steps is not given.
_TURN = 0.5


class Runner(Protocol):
    """What is asked of the workers of a contestant; a ``Team`` in earnest."""

    def start(self) -> None: ...
    def check(self, steps: int) -> list[dict[str, Any]]: ...
    def run(self, steps: int) -> dict[str, list[float]]: ...
    def finish(self) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What came back from one contestant.

    Attributes:
        contestant: Who.
        checked: What each process said of the first steps.
        seconds: By phase, per round the median of its repetitions.
        finished: What each process concluded.
    """

    contestant: Contestant
    checked: Sequence[Mapping[str, Any]]
    seconds: Mapping[str, tuple[float, ...]]
    finished: Sequence[Mapping[str, Any]]


def measure(
    contestants: Sequence[Contestant],
    rounds: int,
    steps: int | None,
    on_turn: Callable[[str], None] = lambda what: None,
    team: Callable[[Contestant], Runner] = Team,
) -> tuple[list[Outcome], int]:
    """Measure contestants interleaved: A B C A B C ..., only one busy at a time.

    Args:
        contestants: Who takes part.
        rounds: Number of turns of each.
        steps: Repetitions per turn. Default: as many as take about half a second.
        on_turn: Told what happens next, for a progress display.
        team: Makes the workers of a contestant.

    Returns:
        What was measured, in the order of ``contestants``, and the repetitions per turn.

    Raises:
        WorkerError: A worker died or did not answer in time.
    """
    with contextlib.ExitStack() as stack:
        teams: list[Runner] = []
        for contestant in contestants:
            teams.append(team(contestant))
            stack.callback(teams[-1].close)
        checked = []
        for contestant, runner in zip(contestants, teams, strict=True):
            on_turn(f"starting {contestant.title}")
            runner.start()
            checked.append(runner.check(CHECK_STEPS))
        # The first repetitions fill caches and allocators, and tell how long one takes.
        warm_up = [runner.run(5) for runner in teams]
        steps = steps or _steps_per_turn(max(map(_seconds_of_one, warm_up)))
        turns: list[list[dict[str, float]]] = [[] for _ in teams]
        for number in range(rounds):
            for index, runner in enumerate(teams):
                on_turn(f"round {number + 1} of {rounds}, {contestants[index].title}")
                turns[index].append(_medians(runner.run(steps)))
        on_turn("checking")
        finished = [runner.finish() for runner in teams]
    outcomes = [
        Outcome(who, first, {phase: tuple(turn[phase] for turn in own) for phase in own[0]}, last)
        for who, first, own, last in zip(contestants, checked, turns, finished, strict=True)
    ]
    return outcomes, steps


def _medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {phase: statistics.median(each) for phase, each in seconds.items()}


def _seconds_of_one(seconds: Mapping[str, Sequence[float]]) -> float:
    return sum(_medians(seconds).values())


def _steps_per_turn(slowest: float) -> int:
    return min(200, max(3, math.ceil(_TURN / slowest)))
