"""Signs of life in a store: written for this process, read from the others."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dataparallel.comm.group_threads import get_all, own_connection
from dataparallel.comm.peer import Peer, Sign, Told
from dataparallel.comm.process_identity import ProcessIdentity, ticks

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

# Seconds between two signs of life of a process whose place does not change. A store that is a file
# keeps all of them.
_PERIOD = 1.0
# Seconds before a lost connection is made anew: at first, and at most.
_SHORTEST_PAUSE = 0.25
_LONGEST_PAUSE = 4.0
# Seconds to find out whether somebody listens at the address of the store.
_PROBE = 1.0


class Signs:
    """What a channel writes and reads, through a connection of its own. Used by one thread.

    Args:
        store: The store of the group, under a prefix of this package.
        rank: This process in the group.
        identity: This process.

    Attributes:
        channel: See :class:`~dataparallel.comm.peer.Sign`.
    """

    def __init__(self, store: Store, rank: int, identity: ProcessIdentity) -> None:
        self.channel = uuid.uuid4().hex
        self._since = ticks()
        self._original = store
        self._rank = rank
        self._identity = identity
        self._store: Store | None = None
        self._was_lost = False
        self._pause = _SHORTEST_PAUSE
        self._next_attempt = 0.0
        self._is_introduced = False
        self._told = self._beat = 0
        self._sign: Sign | None = None
        self._written_at = 0.0
        self._present: set[int] = set()

    @property
    def rests(self) -> bool:
        """Whether it is too early to look for a store that was lost."""
        return self._store is None and time.monotonic() < self._next_attempt

    def connect(self) -> None:
        """Connect to the store, if there is no connection.

        Raises:
            Exception: The store can't be reached.
        """
        if self._store is None:
            if self._was_lost:
                _probe(self._original)
            self._store = own_connection(self._original)

    def drop(self) -> None:
        """Forget a connection that has failed; the next one is made after a pause."""
        self._store, self._was_lost = None, True
        self._next_attempt = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def release(self) -> Store | None:
        """Keep the connection no longer; who gets it gives it back."""
        store, self._store = self._store, None
        return store

    def write(self, doing: str, told: Told | None, count: int, *, away: bool) -> None:
        """Write what has changed, and from time to time that this process is alive.

        Args:
            doing: Where this process waits.
            told: What it told last.
            count: How often it has told something.
            away: Whether no further sign will come for now.
        """
        store = self._connected
        if not self._is_introduced:
            store.set(f"process/{self.channel}", json.dumps(asdict(self._identity)))
            self._is_introduced = True
        if told is not None and count != self._told:
            store.set(f"told/{self.channel}", json.dumps(told.to_json()))
            self._told = count
        same = Sign(self.channel, self._since, self._beat, doing, self._told, away)
        if same != self._sign or time.monotonic() - self._written_at >= _PERIOD:
            self._beat += 1
            sign = Sign(self.channel, self._since, self._beat, doing, self._told, away)
            store.set(f"alive/{self._rank}", json.dumps(asdict(sign)))
            self._sign, self._written_at = sign, time.monotonic()

    def read(self, peers: Mapping[int, Peer], awake: float) -> None:
        """Let every peer hear what it has written.

        Args:
            peers: By their rank in the group.
            awake: See :meth:`Peer.hear <dataparallel.comm.peer.Peer.hear>`.
        """
        store = self._connected
        absent = [rank for rank in peers if rank not in self._present]
        if absent and store.check([_key(rank) for rank in absent]):
            self._present.update(absent)
        else:
            self._present.update(rank for rank in absent if store.check([_key(rank)]))
        present = sorted(self._present)
        values = get_all(store, [_key(rank) for rank in present]) if present else []
        found = dict(zip(present, values, strict=True))
        for rank, peer in peers.items():
            # What is no sign of life is not believed, and does not keep the others.
            with contextlib.suppress(ValueError, RecursionError):
                peer.hear(found.get(rank), awake, self._get)
        self._pause, self._was_lost = _SHORTEST_PAUSE, False

    @property
    def _connected(self) -> Store:
        assert self._store is not None
        return self._store

    def _get(self, key: str) -> bytes | None:
        # To get what is not there would be to wait for it.
        return self._connected.get(key) if self._connected.check([key]) else None


def _key(rank: int) -> str:
    return f"alive/{rank}"


def _probe(store: Any) -> None:
    """Raise an OSError if nobody listens; a store would say so on the standard error each time."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host") and hasattr(store, "port"):
        socket.create_connection((store.host, store.port), _PROBE).close()
