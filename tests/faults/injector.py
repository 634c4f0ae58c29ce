"""Faults at chosen places: which rank, at which step, of which kind.

What has happened is written to a file before it happens, so that it survives the process, a
restarted one does not do it again, and a test can compare it with what was planned.
"""

from __future__ import annotations

import collections
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal[
    "raise",
    "oom",
    "interrupt",
    "exit",
    "kill",
    "stop",
    "partition",
    "delay",
    "loopback",
    "nan",
    "mismatch",
]

#: What :meth:`Injector.at` leaves to its caller.
ENACTED_BY_CALLER: tuple[Kind, ...] = ("loopback", "nan", "mismatch")


class InjectedError(RuntimeError):
    """The exception of the fault "raise"."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        rank: In which process, or which replica.
        step: When.
        kind: "raise": an :class:`InjectedError`; "oom": a ``torch.OutOfMemoryError``; "interrupt":
            a KeyboardInterrupt; "exit": the process ends with the exit code 1; "kill": it gets
            SIGKILL; "stop": it gets SIGSTOP; "partition": its network is cut, see
            :mod:`tests.faults.partition`; "delay": it sleeps; "loopback", "nan", "mismatch": what
            the caller of :meth:`Injector.at` makes of it.
        seconds: How long a stop, a partition or a delay lasts. Default: for good.
    """

    rank: int
    step: int
    kind: Kind
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} {self.step}"


class Injector:
    """Lets planned faults happen, each of them once.

    Example::

        plan = [Fault(rank=1, step=3, kind="kill")]
        injector = Injector(plan, tmp_path / "happened")
        for step in range(10):                      # in every process
            injector.at(rank, step)
            ...
        injector.check()                            # in the test

    Args:
        plan: What shall happen.
        log: A file that all processes share; it is made if there is none.
    """

    def __init__(self, plan: Sequence[Fault], log: pathlib.Path) -> None:
        doubled = [str(fault) for fault, n in collections.Counter(plan).items() if n > 1]
        if doubled:
            raise ValueError(f"a fault happens once, but planned more often are {doubled}")
        self.plan = tuple(plan)
        self._log = log

    def at(self, rank: int, step: int) -> list[Fault]:
        """Do what is planned for this rank and step; call this once a step.

        Returns:
            The faults that the caller has to enact: those of :data:`ENACTED_BY_CALLER`.
        """
        done = self.happened()
        due = [f for f in self.plan if (f.rank, f.step) == (rank, step) and str(f) not in done]
        for fault in due:
            self._note(fault)
            _enact(fault)
        return [fault for fault in due if fault.kind in ENACTED_BY_CALLER]

    def happened(self) -> list[str]:
        """What has happened so far, in all processes: "kind rank step"."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def check(self) -> None:
        """Raise an AssertionError unless exactly what was planned has happened."""
        happened, planned = sorted(self.happened()), sorted(map(str, self.plan))
        assert happened == planned, f"{happened} happened, but planned was {planned}"

    def _note(self, fault: Fault) -> None:
        with open(self._log, "ab", buffering=0) as file:
            file.write(f"{fault}\n".encode())


def random_plan(
    kinds: Sequence[Kind], ranks: Sequence[int], steps: range, *, seed: int
) -> list[Fault]:
    """One fault of every kind named (a kind may be named repeatedly), at random places."""
    generator = random.Random(seed)
    places = generator.sample([(r, s) for r in ranks for s in steps], len(kinds))
    return [Fault(rank, step, kind) for kind, (rank, step) in zip(kinds, places, strict=True)]


def _enact(fault: Fault) -> None:
    if fault.kind == "raise":
        raise InjectedError(f"injected in rank {fault.rank} at step {fault.step}")
    if fault.kind == "oom":
        raise torch.OutOfMemoryError(f"injected in rank {fault.rank} at step {fault.step}")
    if fault.kind == "interrupt":
        raise KeyboardInterrupt
    if fault.kind == "exit":
        os._exit(1)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        if fault.seconds is not None:
            _later(fault.seconds, f"kill -CONT {os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "partition":
        from tests.faults import partition

        partition.cut(fault.rank, fault.seconds)
    if fault.kind == "delay":
        time.sleep(fault.seconds or 0.0)


def _later(seconds: float, command: str) -> None:
    """Run a command of the shell some time later, even if this process is gone or stopped."""
    subprocess.Popen(
        ["setsid", "--fork", "sh", "-c", f"sleep {seconds}; {command}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ).wait()
