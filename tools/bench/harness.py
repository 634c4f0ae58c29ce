"""The common base of all benchmarks: contestants in worker processes take turns, round by round.

Figures are medians over the rounds, with the smallest and the largest. Ratios are taken within each
round, so that what slows a whole round cancels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

from dataparallel.tools.doctor.check import usable_cores

Kind = Literal["ours", "watched", "bare", "ddp"]

#: Told what happens next, and how many turns of the whole measurement begin with it.
Tell = Callable[[str, int], None]

#: Steps whose results are compared before anything is measured.
CHECK_STEPS = 3
#: Seconds that a worker may take to import torch and make its model, and for each turn.
_TIMEOUT = 300.0
#: Workers are started anew: what this process has loaded must not count as theirs.
_context: Any = multiprocessing.get_context("spawn")
#: Seconds that a contestant's turn should last where the number of steps is not given.
_TURN = 0.5
#: Python's variable: 1 turns the interpreter's lock on, and 0 off.
_LOCK = "PYTHON_GIL"


# --- who takes part ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One worker process's place in its contestant; a plain record that travels to the process.

    Attributes:
        kind: ``"ours"``: our wrapper over this process's devices; ``"watched"``: the same within a
            ``StepMonitor``; ``"bare"``: the module alone, whole batch, on the first device;
            ``"ddp"``: one of torch's processes.
        devices: This process's own, one per replica.
        replicas: Into how many parts the whole batch is divided, over all processes.
        threads: Intra-op threads per replica.
        wrapper: The wrapper of ours that takes part.
        locked: True to turn the interpreter's lock on, where a free-threaded Python has it off.
        rank: Index of the process within the contestant.
        world_size: Number of processes of the contestant.
        meeting_point: File through which the processes of one contestant find each other; the
            harness names it.
    """

    kind: Kind
    devices: tuple[str, ...]
    replicas: int = 1
    threads: int = 1
    wrapper: Literal["dp", "ddp", "captured"] = "ddp"
    locked: bool = False
    rank: int = 0
    world_size: int = 1
    meeting_point: str = ""

    @property
    def joins(self) -> bool:
        """True if the process is member of a process group."""
        return self.kind == "ddp" or self.world_size > 1

    def begin(self) -> Measurement:
        """Make the object that measures, in the worker process."""
        raise NotImplementedError


@dataclass(frozen=True)
class Contestant:
    """Worker processes, a task each, that are measured as one, under a key and a title."""

    name: str
    title: str
    tasks: tuple[Task, ...]


def team_of(
    task: Task, kind: Kind, devices: Sequence[Sequence[str]], name: str, title: str
) -> Contestant:
    """Return a contestant with a process for each entry of ``devices``, each in its own place."""
    places = [
        dataclasses.replace(task, kind=kind, devices=tuple(own), rank=rank, world_size=len(devices))
        for rank, own in enumerate(devices)
    ]
    return Contestant(name, title, tuple(places))


def plan_contestants(
    task: Task, devices: Sequence[Sequence[str]], peers: Sequence[str]
) -> tuple[Contestant, ...]:
    """Ours, then the peers, ``"bare"``, ``"cores"``, ``"ddp"``, ``"watched"`` and ``"locked"``.

    Each of our processes has equally many devices, one per replica. torch DDP gets as many
    processes as there are replicas, each with the device of one. ``"cores"`` is the bare module
    with all usable cores as intra-op threads; ``"locked"`` is ours with the interpreter's lock.
    """
    of_replicas = [device for each in devices for device in each]
    task = dataclasses.replace(task, replicas=len(of_replicas))
    names = {"ddp": "our DDP", "captured": "our DDP, graphs", "dp": "DataParallel"}
    name = names[task.wrapper]
    title = f"{name} {len(devices)}x{len(devices[0])}"
    alone = [[device] for device in of_replicas]
    whole = dataclasses.replace(task, threads=usable_cores())
    locked = dataclasses.replace(task, locked=True)
    known = {
        "locked": team_of(locked, "ours", devices, "locked", f"{title}, locked"),
        "watched": team_of(task, "watched", devices, "watched", f"{title}, watched"),
        "bare": team_of(task, "bare", alone[:1], "bare", "bare module"),
        "cores": team_of(whole, "bare", alone[:1], "cores", f"bare, {whole.threads} threads"),
        "ddp": team_of(task, "ddp", alone, "ddp", f"torch DDP {len(alone)}x1"),
    }
    ours = team_of(task, "ours", devices, "ours", title)
    return (ours, *(known[peer] for peer in peers))


# --- worker processes --------------------------------------------------------------------------


class ContestantError(RuntimeError):
    """A worker process died or did not answer in time."""


class Measurement(Protocol):
    """A measurement that a task begins."""

    def check(self, steps: int) -> dict[str, Any]:
        """Do some steps, and tell what shows that the results are right."""
        ...

    def run(self, steps: int) -> dict[str, list[float]]:
        """Repeat; by phase, the seconds of each repetition."""
        ...

    def finish(self) -> dict[str, Any]:
        """Conclude, and leave the contestant."""
        ...


def _work(requests: Connection, task: Task) -> None:
    """Measure in a worker process when it is told to, until ``finish``."""
    # The output of libraries must not mix with results on the standard output.
    os.dup2(2, 1)
    try:
        measurement = task.begin()
        do = ""
        while do != "finish":
            do, details = requests.recv()
            requests.send(getattr(measurement, do)(**details))
    except BaseException:
        requests.send(traceback.format_exc())


@contextlib.contextmanager
def _environment(task: Task) -> Iterator[None]:
    """Within it, a process starts as the task wants its interpreter."""
    before = os.environ.get(_LOCK)
    try:
        if task.locked:
            os.environ[_LOCK] = "1"
        yield
    finally:
        os.environ.pop(_LOCK, None)
        if before is not None:
            os.environ[_LOCK] = before


class Team:
    """The worker processes of one contestant, directed as one."""

    def __init__(self, contestant: Contestant, folder: str) -> None:
        self._name = contestant.name
        self._workers: list[tuple[Any, Connection]] = []
        # Contestants are there at the same time, and must not meet each other.
        meeting_point = str(pathlib.Path(folder) / contestant.name)
        for task in contestant.tasks:
            task = dataclasses.replace(task, meeting_point=meeting_point)
            requests, end = _context.Pipe()
            process = _context.Process(target=_work, args=(end, task), daemon=True)
            with _environment(task):
                process.start()
            # If the process has no more of it, this side sees the end.
            end.close()
            self._workers.append((process, requests))

    def ask(self, do: str, **details: Any) -> list[dict[str, Any]]:
        """Return the answer of each process; the first one comes when the process has begun."""
        for _, requests in self._workers:
            # One that has ended is found out by waiting for its answer.
            with contextlib.suppress(BrokenPipeError):
                requests.send((do, details))
        return [self._answer(rank, *each) for rank, each in enumerate(self._workers)]

    def _answer(self, rank: int, process: Any, requests: Connection) -> dict[str, Any]:
        who = f"worker {rank} of {self._name}"
        if not requests.poll(_TIMEOUT):
            raise ContestantError(f"{who} did not answer within {_TIMEOUT:.0f} s")
        try:
            answer = requests.recv()
        except (EOFError, ConnectionResetError) as error:
            process.join(_TIMEOUT)
            raise ContestantError(f"{who} ended with status {process.exitcode}") from error
        if isinstance(answer, str):
            raise ContestantError(f"{who} has failed:\n{answer}")
        found: dict[str, Any] = answer
        return found

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process, requests in self._workers:
            process.kill()
            process.join()
            requests.close()


# --- rounds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The results from the processes of one contestant: of the first steps, and at the end.

    ``seconds`` are, by phase and for each round, the median of its repetitions, ``steps`` of them.
    """

    contestant: Contestant
    checked: Sequence[Mapping[str, Any]]
    seconds: Mapping[str, tuple[float, ...]]
    finished: Sequence[Mapping[str, Any]]
    steps: int = 1


def measure(
    name: str,
    contestants: Sequence[Contestant],
    rounds: int,
    steps: int | None,
    tell: Tell = lambda what, begun: None,
) -> list[Outcome]:
    """Measure contestants interleaved: A B C A B C ..., only one busy at a time.

    ``steps`` are the repetitions per turn; by default as many as take about half a second.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        teams: list[Team] = []
        for contestant in contestants:
            teams.append(Team(contestant, folder))
            stack.callback(teams[-1].close)
        checked = []
        for contestant, team in zip(contestants, teams, strict=True):
            tell(f"{name}: starting {contestant.title}", 0)
            checked.append(team.ask("check", steps=CHECK_STEPS))
        # The first repetitions fill caches and allocators, and tell how long one takes.
        took = []
        for team in teams:
            begin = time.perf_counter()
            team.ask("run", steps=5)
            took.append((time.perf_counter() - begin) / 5)
        steps = steps or min(200, max(3, math.ceil(_TURN / max(took))))
        turns: list[list[dict[str, float]]] = [[] for _ in teams]
        for number in range(rounds):
            for contestant, team, own in zip(contestants, teams, turns, strict=True):
                tell(f"{name}: round {number + 1} of {rounds}, {contestant.title}", 1)
                own.append(_turn(team.ask("run", steps=steps)))
        tell(f"{name}: checking", 0)
        finished = [team.ask("finish") for team in teams]
    phases = [{phase: tuple(turn[phase] for turn in own) for phase in own[0]} for own in turns]
    return [
        Outcome(*each, steps) for each in zip(contestants, checked, phases, finished, strict=True)
    ]


def _turn(answers: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """By phase, the median of the repetitions, each of which is as slow as its slowest process."""
    return {
        phase: statistics.median(
            max(each)
            for each in zip(*(said[phase] for said in answers if phase in said), strict=True)
        )
        for phase in answers[0]
    }


# --- figures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A median with its range over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of ``values``."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Ratio within each round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def geometric_mean(spreads: Iterable[Spread]) -> Spread:
    """Over cases; the range is that of a run in which each has its best, or its worst, round."""
    parts = zip(*map(dataclasses.astuple, spreads), strict=True)
    return Spread(*map(statistics.geometric_mean, parts))


def largest(errors: Sequence[float]) -> float:
    """Return the largest of some errors; NaN if one of them is."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)
