"""What has a thread that asks the store of a process group: one of a kind for each group."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store


class Stoppable(Protocol):
    """What has a thread."""

    def stop(self) -> None:
        """End the thread."""


T = TypeVar("T", bound=Stoppable)


class GroupThreads(Generic[T]):
    """One of a kind for each process group, stopped when the interpreter ends."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._stop)
        if hasattr(os, "register_at_fork"):
            # A forked child has neither the threads nor a part in the groups.
            os.register_at_fork(after_in_child=self._forget)

    def of(self, group: dist.ProcessGroup, make: Callable[[], T]) -> T:
        """That of a group, made at the first call."""
        with self._making:
            found = self._made.get(group)
            if found is None:
                found = self._made[group] = make()
            return found

    def all(self) -> list[T]:
        """All that there are."""
        with self._making:
            return list(self._made.values())

    def _stop(self) -> None:
        for each in self.all():
            each.stop()

    def _forget(self) -> None:
        self._made: weakref.WeakKeyDictionary[dist.ProcessGroup, T] = weakref.WeakKeyDictionary()
        self._making = threading.Lock()


def own_connection(store: Store) -> Store:
    """The same store with a connection of its own, so that nobody waits for another's request."""
    clone = store.clone() if hasattr(store, "clone") else store
    with suppress(RuntimeError):
        clone.set_timeout(timedelta(seconds=30))
    return clone


def get_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """What is at several places of a store, in one request where that is possible."""
    # A method without a type.
    extended: Any = getattr(store, "has_extended_api", bool)
    if extended():
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
