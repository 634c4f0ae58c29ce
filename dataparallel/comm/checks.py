"""Whether all processes are about to run the same collective, asked before it is launched.

Note [Checked collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backend matches collectives by their order alone. Others of the same shape give wrong numbers,
other dtypes too, and other shapes end a process (gloo). So each rank writes into the store what it
is about to launch, reads what the others write, and launches it when that goes together; if not,
all of them raise the same error and nothing was launched. That costs as much as a small collective,
so by default it is done for the first three collectives, or steps where somebody says when they
begin, and for three after a difference.

The ranks may come at different times. One that has waited for a moment launches, so that a program
that waits for something else between a launch and its wait runs on. Those that come later compare,
and report a difference as a failure, which ends the wait of the first.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from dataparallel.comm.failures import Failures
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
        dtype: Of what this process gives, or its name; None if that is no tensor.
        shape: Of what this process gives; empty where members may have others.
        what: What it is about, the same in all members up to the first parenthesis.
        gives: For each member, how much this one sends there; empty where nobody chooses.
        gets: For each member, how much this one expects from there.
    """

    operation: str
    option: str
    dtype: torch.dtype | str | None
    shape: Sequence[int]
    what: str = ""
    gives: Sequence[int] = ()
    gets: Sequence[int] = ()


_COMPARED = {
    "operation": "operations",
    "option": "options",
    "dtype": "dtypes",
    "shape": "shapes",
    "what": "orders",
}


def _difference(calls: Sequence[Call]) -> str | None:
    """In what the calls of the ranks differ: ``"shapes"``; None if they go together."""
    for field, title in _COMPARED.items():
        values = [str(getattr(call, field)) for call in calls]
        if field == "what":
            values = [value.partition(" (")[0] for value in values]
        if len(set(values)) > 1:
            return title
    for i, one in enumerate(calls):
        for j, size in enumerate(one.gives):
            if j < len(calls) and calls[j].gets[i : i + 1] != [size]:
                return "sizes"
    return None


def _describe(call: Call) -> str:
    """``all_reduce (sum) of bucket 0 (a .. b), float32 (4, 3)``."""
    text = call.operation
    if call.option:
        text += f" ({call.option})"
    if call.what:
        text += f" of {call.what}"
    if call.dtype:
        text += f", {str(call.dtype).removeprefix('torch.')} {tuple(call.shape)}"
    if call.gives or call.gets:
        text += f", sends {_sizes(call.gives)} and expects {_sizes(call.gets)}"
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
        self._doing = f"compares its collectives for {purpose_of(name)!r}"
        self._step = 0
        self._counts_steps = False
        self._until = FIRST_STEPS
        self._number = 0
        self._lock = threading.RLock()

    def begin_step(self, plan: str | None = None) -> None:
        """A step begins in all members; from the first time on, these are counted."""
        if not self._counts_steps:
            self._counts_steps, self._step = True, 0
        self._step += 1
        if plan is not None:
            self.before(Call("a step", plan, None, ()))

    def before(self, call: Call) -> None:
        """Count a collective that is about to be launched, and check it, if that is due.

        Raises:
            CollectiveMismatch: Another process comes with another one.
        """
        with self._lock:
            self.sequence += 1
            if self.mode == "off" or len(self._failures.ranks) == 1:
                return
            self._step += not self._counts_steps
            if self.mode == "always" or self._step <= self._until:
                self._check(call)

    def _check(self, call: Call) -> None:
        self._number += 1
        self._write(call, left=False)
        deadline, pause = time.monotonic() + _PATIENCE, _SHORTEST_PAUSE
        while not self._all_go_together():
            if time.monotonic() > deadline:
                self._write(call, left=True)
                # Who has come meanwhile may not have seen that.
                self._all_go_together()
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/check/{number}/{rank}"

    def _write(self, call: Call, *, left: bool) -> None:
        text = json.dumps(
            [self.sequence, call._replace(dtype=call.dtype and str(call.dtype)), left]
        )
        number, rank = self._number, self._failures.rank
        self._failures.ask(lambda store: store.set(self._key(number, rank), text), self._doing)
        if number > _KEPT:
            old = self._key(number - _KEPT, rank)
            self._failures.ask(lambda store: store.delete_key(old), self._doing)

    def _all_go_together(self) -> bool:
        """Whether all have come, and with the same collective."""
        ranks = self._failures.ranks
        keys = [self._key(self._number, i) for i in range(len(ranks))]
        texts = self._failures.ask(
            lambda store: [store.get(key) for key in keys] if store.check(keys) else None,
            self._doing,
        )
        if texts is None:
            return False
        said = [(number, Call(*call), left) for number, call, left in map(json.loads, texts)]
        kind = _difference([call for _, call, _ in said])
        if kind is None:
            return True
        self._until = self._step + FIRST_STEPS
        usable = not any(left for _, _, left in said)
        by_text: dict[str, list[int]] = {}
        for (_, call, _), rank in zip(said, ranks, strict=True):
            by_text.setdefault(_describe(call), []).append(rank)
        lines = "".join(f"\n  {name_ranks(who)}: {text}" for text, who in by_text.items())
        error = CollectiveMismatch(
            f"the processes came with different {kind} to collective {said[0][0]} for "
            f"{purpose_of(self._name)!r}, which was not launched:{lines}\n"
            f"{_USABLE if usable else _UNUSABLE}",
            usable=usable,
        )
        if not usable:
            self._failures.report(error, "a comparison of collectives")
        raise error
