"""Collectives of the user's process groups: counted, and compared before they are launched.

See Note [Checked collectives] in ``comm/checks.py``.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from dataparallel.collectives.group_lookup import group_of
from dataparallel.collectives.groups import Group, resolve
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.comm.checks import (
    Call,
    CheckMode,
    CollectiveChecks,
    CollectiveMismatch,
    checked_mode,
    set_default_mode,
)
from dataparallel.comm.failures import failures_of
from dataparallel.comm.process_errors import CollectiveError, name_ranks

_name: contextvars.ContextVar[str] = contextvars.ContextVar("collectives_name", default="")


class GroupChecks:
    """The collectives of one process group, as this process counts and compares them.

    Args:
        group: The group.
        mode: When they are compared. Default: as :func:`set_checks` says for all groups.
    """

    def __init__(self, group: dist.ProcessGroup, mode: CheckMode | None = None) -> None:
        #: What is known of failures of the other processes.
        self.failures = failures_of(group)
        self._broken: str | None = None
        self._lock = threading.RLock()
        # A group that is made after another one of its name finds what that one has written.
        key = f"checks/made/{group.group_name}/{group.rank()}"
        purpose = f"makes its first collective over {name_ranks(self.failures.ranks)}"
        number = self.failures.ask(lambda store: store.add(key, 1), purpose)
        name = f"process group {group.group_name}/{number}"
        self._checks = CollectiveChecks(self.failures, name, mode)

    @property
    def number(self) -> int:
        """That of the last collective."""
        return self._checks.sequence

    def before(self, call: Call) -> None:
        """Count a collective that comes next, and compare it with those of the other processes.

        Raises:
            CollectiveMismatch: The processes come with different collectives.
            CollectiveError: They did so before, and some were launched.
        """
        with self._lock:
            if self._broken is not None:
                raise CollectiveError(
                    "the processes of this group are at different collectives; make a new group in "
                    f"every process, or start them again. What happened: {self._broken}"
                )
            if name := _name.get():
                call = call._replace(what=name)
            try:
                self._checks.before(call)
            except CollectiveMismatch as error:
                if not error.usable:
                    self.give_up(error)
                raise

    def give_up(self, error: Exception) -> None:
        """Use the group no more, since a collective is still under way here."""
        self._broken = str(error)


_all: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupChecks] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def checks_of(group: dist.ProcessGroup) -> GroupChecks:
    """The checks of a process group, made at the first call."""
    found = _all.get(group)
    if found is None:
        with _making:
            found = _all.get(group)
            if found is None:
                found = _all[group] = GroupChecks(group)
    return found


def set_checks(mode: CheckMode, group: Group = None) -> None:
    """Choose when processes compare their collectives before they launch them.

    Without a check, different operations or dtypes give wrong numbers, and with gloo different
    shapes end a process. With a check, all processes raise a :class:`CollectiveMismatch` that shows
    the collective of each. Call this in all processes at the same point.

    Example::

        set_checks("always")        # while looking for a mistake

    Args:
        mode: ``"sampled"`` (the default): the first three collectives of a group, or steps of a
            wrapper, and three after a mismatch. ``"always"``: all. ``"off"``: none.
        group: The process group, as in the collectives themselves. Default: all groups and
            wrappers that are used from now on.

    Raises:
        ValueError: ``mode`` is none of the three; or ``group`` is a group of replicas, which
            always compare their collectives.
    """
    mode = checked_mode(mode)
    if group is None:
        set_default_mode(mode)
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
        name: The same in all processes, up to the first parenthesis.
    """
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)
