"""Whether all processes are about to run the same collective, asked before it is launched.

Note [Checked collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backend matches collectives by their order alone. Others of the same shape give wrong numbers,
other dtypes too, and other shapes end a process (gloo). So each rank writes into the store what it
is about to launch, reads what the others write, and launches it when that goes together; if not,
all of them raise the same error and nothing was launched. That costs as much as a small collective,
so by default it is done for the first three collectives, or steps where somebody says when they
begin, and for three after a difference.

The ranks may come at different times. One that has waited for a moment says so and launches, so
that a program that waits for something else between a launch and its wait runs on. It then hears of
a difference in its wait, the others before they launch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from dataparallel.comm.failures import Failures, texts_at
from dataparallel.comm.process_errors import CollectiveError, name_ranks, purpose_of
from dataparallel.errors import chosen

#: When collectives are compared: never; in the first three steps, and in three after a difference;
#: or always.
CheckMode: TypeAlias = Literal["off", "sampled", "always"]

FIRST_STEPS = 3
# Seconds that a rank waits for the others before it launches without an answer.
_PATIENCE = 0.5
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.02
# How many checks are kept in the store for those that come late.
_KEPT = 64
# Longer lists of sizes are cut in messages.
_MOST_SIZES = 16

_USABLE = (
    "Nothing else was launched, so all processes can go on with the next collective once they "
    "run the same ones in the same order"
)
_UNUSABLE = (
    "Some were launched already, so the processes are at different collectives; close what they "
    "belong to and make it anew in every process, and run the same collectives in the same order"
)

_default: CheckMode = "sampled"


class CollectiveMismatch(CollectiveError):
    """Processes were about to run different collectives; the message shows those of each rank.

    Args:
        message: The text.
        usable: Whether the same processes can go on: nothing was launched.
    """

    def __init__(self, message: str = "", *, usable: bool = True) -> None:
        super().__init__(message)
        self.usable = usable


class Call(NamedTuple):
    """One collective, as one process calls it.

    Attributes:
        operation: Its name.
        option: With what it reduces, or from which member it comes; empty if it has neither.
        dtype: Of what this process gives; None if that is no tensor.
        shape: Of what this process gives; empty where members may have others.
        what: What it is about, the same in all members up to the first parenthesis.
        gives: For each member, how much this one sends there; empty where nobody chooses.
        gets: For each member, how much this one expects from there.
    """

    operation: str
    option: str
    dtype: torch.dtype | None
    shape: Sequence[int]
    what: str = ""
    gives: Sequence[int] = ()
    gets: Sequence[int] = ()

    def fields(self) -> dict[str, Any]:
        """As JSON can hold it."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        lists = {name: list(getattr(self, name)) for name in ("shape", "gives", "gets")}
        return {**self._asdict(), "dtype": dtype, **lists}


_COMPARED = {
    "operation": "operations",
    "option": "options",
    "dtype": "dtypes",
    "shape": "shapes",
    "what": "orders",
}


def difference(calls: Sequence[dict[str, Any]]) -> str | None:
    """In what the calls of the ranks differ: ``"shapes"``; None if they go together."""
    for field, title in _COMPARED.items():
        values = [str(call[field]) for call in calls]
        if field == "what":
            values = [value.partition(" (")[0] for value in values]
        if len(set(values)) > 1:
            return title
    for i, one in enumerate(calls):
        for j, size in enumerate(one["gives"]):
            if j < len(calls) and calls[j]["gets"][i : i + 1] != [size]:
                return "sizes"
    return None


def describe(call: dict[str, Any]) -> str:
    """``all_reduce (sum) of bucket 0 (a .. b), float32 (4, 3)``."""
    text: str = call["operation"]
    if call["option"]:
        text += f" ({call['option']})"
    if call["what"]:
        text += f" of {call['what']}"
    if call["dtype"]:
        text += f", {call['dtype']} {tuple(call['shape'])}"
    if call["gives"] or call["gets"]:
        text += f", sends {_sizes(call['gives'])} and expects {_sizes(call['gets'])}"
    return text


def _sizes(sizes: Sequence[int]) -> str:
    more = ", ..." if len(sizes) > _MOST_SIZES else ""
    return f"[{', '.join(map(str, sizes[:_MOST_SIZES]))}{more}]"


def checked_mode(mode: str) -> CheckMode:
    """The mode, if it is one; a ValueError if not."""
    found: CheckMode = chosen("checks", mode, get_args(CheckMode))
    return found


def set_default_mode(mode: str) -> None:
    """Change the mode of links and groups that have none of their own and are used from now on."""
    global _default
    _default = checked_mode(mode)


class CollectiveChecks:
    """The checks of one link or process group. See Note [Checked collectives]."""

    def __init__(self, failures: Failures, name: str, mode: str | None) -> None:
        self.mode: CheckMode = _default if mode is None else checked_mode(mode)
        self.sequence = 0
        self._failures = failures
        self._name = name
        self._step = 0
        self._counts_steps = False
        self._until = FIRST_STEPS
        self._number = 0
        # Numbers of checks to which not all had come when this rank launched.
        self._unanswered: list[int] = []
        self._lock = threading.RLock()

    def begin_step(self, plan: str | None = None) -> None:
        """A step begins in all members; from the first time on, these are counted."""
        if not self._counts_steps:
            self._counts_steps, self._step = True, 0
        self._step += 1
        if plan is not None:
            self.before(Call("a step", plan, None, ()))

    def before(self, call: Call, alive: Callable[[], object] = lambda: None) -> None:
        """Count a collective that is about to be launched, and check it, if that is due."""
        with self._lock:
            self.sequence += 1
            if self.mode == "off" or len(self._failures.ranks) == 1:
                return
            self._step += not self._counts_steps
            if self.mode == "always" or self._step <= self._until:
                self.hear()
                self._check(call, alive)

    def _check(self, call: Call, alive: Callable[[], object]) -> None:
        self._number += 1
        self._write(call, left=False)
        # Where an answer is late already, this one is not waited for.
        deadline = time.monotonic() + (0 if self._unanswered else _PATIENCE)
        pause = _SHORTEST_PAUSE
        while not self._compare(self._number):
            if time.monotonic() > deadline:
                self._write(call, left=True)
                if not self._compare(self._number):
                    self._unanswered.append(self._number)
                return
            alive()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def hear(self, seconds: float = 0.0) -> None:
        """Compare what came late; nothing happens where all had come."""
        if not self._unanswered:
            return
        deadline = time.monotonic() + seconds
        with self._lock:
            while self._unanswered:
                if self._compare(self._unanswered[0]):
                    self._unanswered.pop(0)
                elif time.monotonic() >= deadline:
                    return
                else:
                    time.sleep(_LONGEST_PAUSE)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/check/{number}/{rank}"

    def _write(self, call: Call, *, left: bool) -> None:
        text = json.dumps([self.sequence, call.fields(), left])
        number, rank = self._number, self._failures.rank
        doing = f"compares its collectives for {purpose_of(self._name)!r}"
        self._failures.ask(lambda store: store.set(self._key(number, rank), text), doing)
        if number > _KEPT:
            old = self._key(number - _KEPT, rank)
            self._failures.ask(lambda store: store.delete_key(old), doing)

    def _compare(self, number: int) -> bool:
        """Whether all have come to a check, and with the same collective."""
        ranks = self._failures.ranks
        keys = [self._key(number, i) for i in range(len(ranks))]
        doing = f"compares its collectives for {purpose_of(self._name)!r}"
        texts = self._failures.ask(lambda store: texts_at(store, keys), doing)
        if texts is None:
            return False
        said = [json.loads(text) for text in texts]
        kind = difference([call for _, call, _ in said])
        if kind is None:
            return True
        self._until = self._step + FIRST_STEPS
        self._unanswered.clear()
        usable = not any(left for _, _, left in said)
        by_text: dict[str, list[int]] = {}
        for (_, call, _), rank in zip(said, ranks, strict=True):
            by_text.setdefault(describe(call), []).append(rank)
        lines = "".join(f"\n  {name_ranks(who)}: {text}" for text, who in by_text.items())
        raise CollectiveMismatch(
            f"the processes came with different {kind} to collective {said[0][0]} for "
            f"{purpose_of(self._name)!r}, which was not launched:{lines}\n"
            f"{_USABLE if usable else _UNUSABLE}",
            usable=usable,
        )
