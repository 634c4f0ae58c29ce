"""Stores and listeners for tests of the failure channel."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import HashStore

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import FailureChannel


class Listens:
    """As a link does."""

    def __init__(self) -> None:
        self.known: Mapping[int, int] = {}
        self.heard: list[Failure] = []

    def hear(self, failure: Failure) -> None:
        self.heard.append(failure)

    def place(self) -> str | None:
        return None


class CountingStore:
    """A store that notes what it is asked, and can be held up or broken."""

    def __init__(self) -> None:
        self.inner = HashStore()
        self.asked: list[tuple[str, str]] = []
        self.open = threading.Event()
        self.open.set()
        self.held = threading.Event()
        self.error: Exception | None = None

    def _ask(self, request: str, key: str) -> None:
        self.asked.append((request, key))
        if not self.open.is_set():
            self.held.set()
            assert self.open.wait(20)
        if self.error is not None:
            raise self.error

    def set(self, key: str, value: str) -> None:
        self._ask("set", key)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._ask("get", key)
        return self.inner.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        self._ask("check", keys[0])
        return self.inner.check(list(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._ask("multi_get", keys[0])
        return [self.inner.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        self._ask("delete_key", key)
        return self.inner.delete_key(key)

    def set_timeout(self, timeout: object) -> None:
        pass

    def has_extended_api(self) -> bool:
        return True

    def keys_set(self) -> list[str]:
        """What was written."""
        return [key.partition("/")[0] for request, key in self.asked if request == "set"]


def channel_over(store: object, rank: int = 0, *, fresh: bool = True) -> FailureChannel:
    """A channel of a group of two."""
    anything: Any = store
    return FailureChannel(anything, [0, 1], rank, fresh=fresh)
