"""Collectives of the user's process groups: counted, and compared before they are launched.

Note [Checked collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backend matches collectives by their order alone. Others of the same shape give wrong numbers,
other dtypes too, and other shapes end a process (gloo). So each rank writes into the store what it
is about to launch, reads what the others write, and launches it when that goes together; if not,
all of them raise the same error and nothing was launched. That costs as much as a small collective,
so by default it is done for the first three collectives of a group, and for three after a
difference. The package's own links need no checks: all that goes over one of them follows from what
the processes compared when they made it.

The ranks may come at different times. One that has waited for a moment launches, so that a program
that waits for something else between a launch and its wait runs on. Those that come later compare,
and report a difference as a failure, which ends the wait of the first.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch.distributed as dist
from torch import Tensor

from dataparallel.collectives.groups import Group, group_of, resolve
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.operations import AllToAll, Collective
from dataparallel.comm.failures import CollectiveError, failures_of, name_ranks
from dataparallel.errors import chosen

#: When collectives are compared: never; the first three, and three after a difference; or always.
CheckMode: TypeAlias = Literal["off", "sampled", "always"]

_FIRST = 3
# Seconds that a rank waits for the others before it launches without an answer.
_PATIENCE = 0.5
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.02
# How many checks are kept in the store for those that come late.
_KEPT = 64

_GO_ON = (
    "Nothing else was launched, so all processes can go on with the next collective once they "
    "run the same ones in the same order"
)
_GIVE_UP = (
    "Some were launched already, so the processes are at different collectives; close what they "
    "belong to and make it anew in every process, and run the same collectives in the same order"
)


class CollectiveMismatch(CollectiveError):
    """Processes were about to run different collectives; the message shows those of each rank."""


_default_mode: CheckMode = "sampled"
_name: contextvars.ContextVar[str] = contextvars.ContextVar("collectives_name", default="")


class GroupChecks:
    """The collectives of one process group, as this process counts and compares them."""

    def __init__(self, group: dist.ProcessGroup, mode: CheckMode) -> None:
        #: What is known of failures of the other processes.
        self.failures = failures_of(group)
        #: That of the last collective.
        self.number = 0
        self._mode = mode
        self._until = _FIRST
        self._checked = 0
        self._broken: str | None = None
        self._lock = threading.RLock()
        self._purpose = f"process group {group.group_name}"
        # A group that is made after another one of its name finds what that one has written.
        key = f"checks/made/{group.group_name}/{group.rank()}"
        made = self.failures.ask(lambda store: store.add(key, 1))
        self._name = f"{self._purpose}/{made}"

    def before(self, collective: Collective, tensor: Tensor) -> None:
        """Count a collective that comes next, and compare it with those of the other processes."""
        with self._lock:
            if self._broken is not None:
                raise CollectiveError(
                    "the processes of this group are at different collectives; make a new group in "
                    f"every process, or start them again. What happened: {self._broken}"
                )
            self.number += 1
            if self._mode == "off" or len(self.failures.ranks) == 1:
                return
            if self._mode == "always" or self.number <= self._until:
                name, text = _name.get(), collective.signature(tensor)
                text = f"{name}: {text}" if name else text
                splits = collective if isinstance(collective, AllToAll) else AllToAll((), ())
                self._check([self.number, text, splits.output_splits, splits.input_splits])

    def give_up(self, error: Exception) -> None:
        """Use the group no more, since a collective is still under way here."""
        self._broken = str(error)

    def _check(self, call: list[Any]) -> None:
        self._checked += 1
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

    def _write(self, call: list[Any], *, left: bool) -> None:
        text = json.dumps([*call, left])
        number, rank = self._checked, self.failures.rank
        self.failures.ask(lambda store: store.set(self._key(number, rank), text))
        if number > _KEPT:
            old = self._key(number - _KEPT, rank)
            self.failures.ask(lambda store: store.delete_key(old))

    def _all_go_together(self) -> bool:
        """Whether all have come, and with the same collective."""
        ranks = self.failures.ranks
        keys = [self._key(self._checked, i) for i in range(len(ranks))]
        found = self.failures.ask(
            lambda store: [store.get(key) for key in keys] if store.check(keys) else None
        )
        if found is None:
            return False
        numbers, texts, gets, gives, left = zip(*map(json.loads, found), strict=True)
        by_text: dict[str, list[int]] = {}
        for text, rank in zip(texts, ranks, strict=True):
            by_text.setdefault(text, []).append(rank)
        differ = "".join(f"\n  {name_ranks(who)}: {text}" for text, who in by_text.items())
        if len(by_text) == 1:
            try:
                AllToAll((), ()).agree([AllToAll(*pair) for pair in zip(gets, gives, strict=True)])
                return True
            except ValueError as disagreement:
                differ = f"\n  {disagreement}"
        self._until = self.number + _FIRST
        error = CollectiveMismatch(
            f"the processes came with different collectives as number {numbers[0]} of "
            f"{self._purpose!r}, which was not launched:{differ}\n"
            f"{_GIVE_UP if any(left) else _GO_ON}"
        )
        if any(left):
            self.give_up(error)
            self.failures.report(error, "a comparison of collectives")
        raise error


_all: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupChecks] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def checks_of(group: dist.ProcessGroup) -> GroupChecks:
    """The checks of a process group, made at the first call."""
    found = _all.get(group)
    if found is None:
        with _making:
            found = _all.get(group)
            if found is None:
                found = _all[group] = GroupChecks(group, _default_mode)
    return found


def set_checks(mode: CheckMode, group: Group = None) -> None:
    """Choose when processes compare their collectives before they launch them.

    Without a check, different operations or dtypes give wrong numbers, and with gloo different
    shapes end a process. With a check, all processes raise a :class:`CollectiveMismatch` that shows
    the collective of each. Call this in all processes at the same point.

    Example::

        set_checks("always")        # while looking for a mistake

    Args:
        mode: ``"sampled"`` (the default): the first three collectives of a group, and three after
            a mismatch. ``"always"``: all. ``"off"``: none.
        group: The process group, as in the collectives themselves. Default: all groups that are
            used from now on.

    Raises:
        ValueError: ``mode`` is none of the three; or ``group`` is a group of replicas, which
            always compare their collectives.
    """
    global _default_mode
    mode = chosen("checks", mode, get_args(CheckMode))
    if group is None:
        _default_mode = mode
        return
    name = resolve(group)
    if isinstance(name, LocalGroup):
        raise ValueError(
            "group is a process group, but got one of replicas; these always compare what they do"
        )
    found = group_of(name)
    with _making:
        _all[found] = GroupChecks(found, mode)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Name the collectives over processes in a ``with`` block.

    If processes call two collectives of the same kind and shape in a different order, the checks
    can tell only by the names. Messages show the name, too.

    Example::

        with named("number of tokens"):
            count = all_reduce(count, "sum", group)

    Args:
        name: The same in all processes.
    """
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)
