"""The order of a measurement: all contestants in turn, round by round."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from dataparallel.tools.bench.contestants import Contestant
from dataparallel.tools.bench.processes import Team
from dataparallel.tools.bench.summary import Measured

#: Training steps whose losses are compared.
CHECK_STEPS = 3
#: Seconds that a contestant's turn should last where the number of steps is not given.
_TURN = 0.5


class Runner(Protocol):
    """What is asked of the workers of a contestant; a ``Team`` in earnest."""

    def start(self) -> None: ...
    def check(self, steps: int) -> tuple[list[float], list[float]]: ...
    def run(self, steps: int) -> list[float]: ...
    def finish(self) -> tuple[int, int]: ...
    def close(self) -> None: ...


def measure(
    contestants: Sequence[Contestant],
    rounds: int,
    steps: int | None,
    on_turn: Callable[[str], None] = lambda what: None,
    team: Callable[[Contestant], Runner] = Team,
) -> tuple[list[Measured], int]:
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
        steps = steps or _steps_per_turn(max(statistics.median(times) for times in warm_up))
        seconds: list[list[float]] = [[] for _ in teams]
        for number in range(rounds):
            for index, runner in enumerate(teams):
                on_turn(f"round {number + 1} of {rounds}, {contestants[index].title}")
                seconds[index].append(statistics.median(runner.run(steps)))
        memory = [runner.finish() for runner in teams]
    measured = [
        Measured(who.name, who.title, tuple(times), tuple(losses), tuple(norms), host, device)
        for who, times, (losses, norms), (host, device) in zip(
            contestants, seconds, checked, memory, strict=True
        )
    ]
    return measured, steps


def _steps_per_turn(slowest: float) -> int:
    return min(200, max(3, math.ceil(_TURN / slowest)))
