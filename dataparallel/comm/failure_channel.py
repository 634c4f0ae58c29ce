"""How processes know of each other's failures: a thread beside the process group's store.

Note [Signs of life]
~~~~~~~~~~~~~~~~~~~~
Every process writes into the store of its group, twice a second, that it is alive and where it
waits, and reads what the others wrote. So each knows within a second that another one has raised
an error (it says so), has ended (on the same machine: the system says so), or does not get on any
more: it is stopped, or cut off, and gives no sign of life. Only time in which this process itself
was awake counts as silence, so that a debugger or Ctrl-Z that stops all of them accuses nobody.

Who has failed is told to all that listen: links and waits, which then end at once. A rank that
gives up because of another one says so, with the first cause, so all survivors name the same rank.

Note [Old failures]
~~~~~~~~~~~~~~~~~~~
What a rank told stays in the store. It has a number, and links that are made later, when all have
met again, begin with the numbers that the ranks had when they came to meet; what has no higher
number is forgotten.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from dataparallel.comm.failure import Failure, describe_error
from dataparallel.comm.group_threads import GroupThreads, own_connection
from dataparallel.comm.peer import Peer
from dataparallel.comm.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Seconds between two looks at the others.
PERIOD = 0.25
# Seconds that telling the others may take before this process goes on.
_TELLING = 2.0
# On an exception: which channels have told of it.
_TOLD_BY = "_dataparallel_told_by"


class Listener(Protocol):
    """Who wants to know of failures."""

    #: Seconds without a sign of life after which a rank counts as lost.
    patience: float
    #: Per rank of the group, the number of what it told that is forgotten.
    known: Mapping[int, int]

    def hear(self, failure: Failure) -> None:
        """A rank has failed; called in the thread of the channel, perhaps again and again."""

    def place(self) -> str | None:
        """Where this process waits at the moment; None if it does not."""


def patience(timeout: float) -> float:
    """Seconds of silence after which a rank counts as lost, for a time limit of collectives.

    Example::

        assert patience(60.0) == 15.0
    """
    return max(5.0, timeout / 4)


class FailureChannel:
    """Tells the other processes of a group what happens here, and hears it from them.

    See Note [Signs of life]. Its thread runs while somebody listens.

    Args:
        store: The store of the group, under a prefix of this package.
        ranks: The number that each process of the group has in the default group.
        rank: This process, as an index of ``ranks``.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        self._original = store
        self._ranks = list(ranks)
        self._rank = rank
        self._identity = ProcessIdentity.of_this_process()
        self._peers = {i: Peer(number) for i, number in enumerate(ranks) if i != rank}
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._beat = 0
        self._number = 0
        self._told: dict[str, Any] | None = None
        self._wake = threading.Event()
        self._written = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        #: Since when the store has not answered, while it was asked.
        self._asking_since: float | None = None
        self._unreachable = 0.0
        self._reason = ""

    # --- who listens -----------------------------------------------------------------------------

    def add(self, listener: Listener) -> None:
        """Let somebody hear of failures, as long as it lives."""
        with self._lock:
            self._listeners.add(listener)
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(
                    target=self._run, name="dataparallel-failures", daemon=True
                )
                self._thread.start()

    def discard(self, listener: Listener) -> None:
        """Let somebody hear of nothing any more."""
        with self._lock:
            self._listeners.discard(listener)
            if not self._listeners:
                self._wake.set()

    def stop(self) -> None:
        """End the thread; called when the interpreter ends."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    # --- telling ---------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """How often this process has told of a failure."""
        return self._number

    def tell(self, error: BaseException | Failure, doing: str = "", *, ends: bool = True) -> None:
        """Tell the others that this process has failed. Returns within seconds in any case.

        Args:
            error: What was raised here; or the failure of another rank because of which this one
                gives up.
            doing: What it was raised in.
            ends: Whether whoever waits for this process is to give up. False: only who asks
                :meth:`told` gets to know.
        """
        if not isinstance(error, Failure) and ends:
            # It may come by again, on its way out of the program.
            told_by = error.__dict__.setdefault(_TOLD_BY, set())
            if id(self) in told_by:
                return
            told_by.add(id(self))
        failure = error if isinstance(error, Failure) else self._failure_here(error, doing)
        with self._lock:
            self._number += ends
            self._told = {"number": self._number, "ends": ends, "failure": failure.to_json()}
            self._written.clear()
            running = self._thread is not None
        if ends:
            for listener in list(self._listeners):
                listener.hear(failure)
        if running:
            self._wake.set()
            if threading.current_thread() is not self._thread:
                self._written.wait(_TELLING)

    def _failure_here(self, error: BaseException, doing: str) -> Failure:
        message, trace = describe_error(error)
        host, pid = self._identity.host, self._identity.pid
        return Failure(self._ranks[self._rank], host, pid, "raised", doing, message, trace)

    # --- what is known of the others -------------------------------------------------------------

    def failure_of(self, rank: int, known: int = 0) -> Failure | None:
        """Why a rank can be expected no more; None if nothing speaks against it.

        Args:
            rank: An index of ``ranks``.
            known: The number of what it told that is forgotten.
        """
        peer = self._peers.get(rank)
        return None if peer is None else peer.failure(known)

    def told_number(self, rank: int) -> int:
        """The number of the last failure that a rank told."""
        peer = self._peers.get(rank)
        return 0 if peer is None else peer.told_number

    def forgiven(self, rank: int) -> int:
        """The number of what a rank told before it made the links that there are now."""
        return max((one.known.get(rank, 0) for one in list(self._listeners)), default=0)

    def told(self, rank: int) -> Failure | None:
        """What a rank told last, of whatever consequence."""
        peer = self._peers.get(rank)
        return None if peer is None else peer.last_told()

    def look(self, seconds: float) -> None:
        """Wait until the others were looked at once more, for at most so many seconds."""
        if self._thread is not None and self._thread is not threading.current_thread():
            with self._lock:
                self._written.clear()
            self._wake.set()
            self._written.wait(seconds)

    def describe(self, rank: int) -> str:
        """Where a rank that has not failed is, or for how long it is silent.

        Args:
            rank: An index of ``ranks``.
        """
        return self._peers[rank].describe() if rank in self._peers else ""

    def check(self, listener: Listener) -> None:
        """Called by who waits: this process itself may be cut off from the store."""
        since = self._asking_since
        blocked = 0.0 if since is None else time.monotonic() - since
        lost = max(blocked, self._unreachable)
        if lost > listener.patience:
            reason = f" ({self._reason})" if self._reason else ""
            host, pid = self._identity.host, self._identity.pid
            text = (
                f"the store of the process group has not answered for {lost:.1f} s{reason}; the "
                "network is down, or the process that holds the store, mostly that of rank 0 or "
                "torchrun's agent, has ended or is stopped"
            )
            listener.hear(Failure(self._ranks[self._rank], host, pid, "cut off", "", text))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        store: Store | None = None
        before = time.monotonic()
        rounds = 0
        while not self._is_over():
            self._wake.clear()
            awake = min(time.monotonic() - before, 2 * PERIOD)
            before = time.monotonic()
            self._asking_since = before
            try:
                if store is None:
                    store = own_connection(self._original)
                self._round(store, awake, writes=rounds % 2 == 0)
                self._unreachable = 0.0
            except Exception as error:
                # A store that is gone is what the listeners are told of.
                self._reason = str(error).strip().partition("\n")[0][:200]
                self._unreachable += awake
            finally:
                self._asking_since = None
            self._accuse()
            self._written.set()
            rounds += 1
            self._wake.wait(PERIOD)

    def _is_over(self) -> bool:
        with self._lock:
            if self._stopping or not self._listeners:
                self._thread = None
                return True
            return False

    def _round(self, store: Store, awake: float, *, writes: bool) -> None:
        with self._lock:
            told, news = self._told, not self._written.is_set()
        if writes or news:
            self._beat += 1
            places = [place for one in list(self._listeners) if (place := one.place())]
            value = {"beat": self._beat, "process": asdict(self._identity), "told": told}
            store.set(f"alive/{self._rank}", json.dumps({**value, "doing": "; ".join(places)}))
        for i, peer in self._peers.items():
            key = f"alive/{i}"
            peer.hear(store.get(key) if store.check([key]) else None, awake)

    def _accuse(self) -> None:
        for listener in list(self._listeners):
            for i, peer in self._peers.items():
                failure = peer.failure(listener.known.get(i, 0), listener.patience)
                if failure is not None:
                    listener.hear(failure)


# --- which there are -----------------------------------------------------------------------------

_channels: GroupThreads[FailureChannel] = GroupThreads()


def channel_of(group: dist.ProcessGroup, store: Store) -> FailureChannel:
    """The channel of a process group, made at the first call.

    Args:
        group: The group; not one of this package's own.
        store: Its store, under a prefix of this package.
    """
    return _channels.of(
        group,
        lambda: FailureChannel(store, dist.get_process_group_ranks(group), group.rank()),
    )


def all_channels() -> list[FailureChannel]:
    """All channels of this process."""
    return _channels.all()
