"""How processes know of each other's failures: a thread beside the process group's store.

Note [Signs of life]
~~~~~~~~~~~~~~~~~~~~
Every process writes into the store of its group, about once a second, that it is alive and where it
waits, and reads what the others wrote. So each knows within a second that another one has raised
an error (it says so), or has ended (on the same machine: the system says so). For how long another
one has given no sign of life stands in the error of a wait whose time is over, and ends no wait
before that, see Note [Silence]. Only time in which this process itself was awake counts.

Who has failed is told to all that listen: links and waits, which then end at once. A rank that
gives up because of another one says so, with the first cause, so all survivors name the same rank.

Note [Old failures]
~~~~~~~~~~~~~~~~~~~
What a rank told stays in the store. It has a number, and links that are made later, when all have
met again, begin with the numbers that the ranks had when they came to meet; what has no higher
number is forgotten. Where processes destroy their group and make it again, the store may still have
the signs of before: every channel has a name that nobody else has, which the processes tell each
other when they meet. Before that, what is in the store counts if something new is written there, or
if the part of the store is known to be new.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.comm.awake_clock import AwakeClock
from dataparallel.comm.failure import Failure, FailureKind, cut_off, describe_error
from dataparallel.comm.group_threads import GroupThreads
from dataparallel.comm.listener import Listener
from dataparallel.comm.peer import Peer, Told
from dataparallel.comm.process_identity import ProcessIdentity
from dataparallel.comm.signs import Signs

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

#: Seconds between two looks at the others.
PERIOD = 0.25
# Seconds that telling the others may take.
_TELLING = 2.0
#: Seconds without an answer after which nobody waits for the store; mostly it takes milliseconds.
UNREACHABLE = 1.0
_BRIEFLY = 0.2
# Seconds for which a store has to refuse connections until its process counts as ended.
_REFUSING = 5.0
# On an exception: which channels have told of it, and how often they had met then.
_TOLD_BY = "_dataparallel_told_by"

_logger = logging.getLogger(__name__)


class FailureChannel:
    """Tells the other processes of a group what happens here, and hears it from them.

    See Note [Signs of life]. Its thread runs while somebody listens.

    Args:
        store: The store of the group, under a prefix of this package.
        ranks: The number that each process of the group has in the default group.
        rank: This process, as an index of ``ranks``.
        fresh: Whether no group before this one has used the same part of the store.
        exists: Whether the group is still there.

    Attributes:
        meetings: How often this process has come to make links. See Note [Old failures].
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        rank: int,
        *,
        fresh: bool = False,
        exists: Callable[[], bool] = lambda: True,
    ) -> None:
        self.meetings = 0
        self._ranks = list(ranks)
        self._rank = rank
        self._exists = exists
        self._identity = ProcessIdentity.of_this_process()
        self._signs = Signs(store, rank, self._identity)
        others = [(i, number) for i, number in enumerate(ranks) if i != rank]
        self._peers = {i: Peer(number, self._identity, fresh=fresh) for i, number in others}
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._number = 0
        self._count = 0
        self._told: Told | None = None
        # Who wants the others to be looked at takes a ticket; the round after that serves it.
        self._ticket = self._served = 0
        self._wake = threading.Event()
        self._stopping = self._stays = False
        self._thread: threading.Thread | None = None
        self._clock = AwakeClock(2 * PERIOD)
        self._lost_since: float | None = None
        # What the system says where nobody listens; a network that is down, or a store whose
        # process is stopped, only does not answer.
        self._refusal = ""

    # --- who listens -----------------------------------------------------------------------------

    def add(self, listener: Listener) -> None:
        """Let somebody hear of failures, as long as it lives."""
        with self._changed:
            self._listeners.add(listener)
            self._start()

    def discard(self, listener: Listener) -> None:
        """Let somebody hear of nothing any more."""
        with self._changed:
            self._listeners.discard(listener)
            if not self._listeners:
                self._wake.set()

    def introduce(self) -> None:
        """Let the others see from now on whether this process is still there."""
        with self._changed:
            self._start()
            self._await_round(_TELLING)

    def stop(self) -> None:
        """End the thread; called when the interpreter ends. What was told is written before."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    # --- telling ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What tells this channel from all others of this process, before and after it."""
        return self._signs.channel

    @property
    def number(self) -> int:
        """How often this process has told of a failure."""
        return self._number

    @property
    def identity(self) -> ProcessIdentity:
        """This process."""
        return self._identity

    def tell(
        self,
        error: BaseException | Failure,
        doing: str = "",
        *,
        ends: bool = True,
        kind: FailureKind = "raised",
    ) -> None:
        """Tell the others that this process has failed. Returns within seconds in any case.

        Args:
            error: What was raised here; or the failure of another rank because of which this one
                gives up.
            doing: What it was raised in.
            ends: Whether whoever waits for this process is to give up. False: only who asks
                :meth:`told` gets to know.
            kind: What an exception comes to.
        """
        if not isinstance(error, Failure) and ends:
            # It may come by again, on its way out of the program; after a meeting it is a new one.
            told_by = error.__dict__.setdefault(_TOLD_BY, {})
            if told_by.get(self.name) == self.meetings:
                return
            told_by[self.name] = self.meetings
        failure = error if isinstance(error, Failure) else self._failure_here(error, doing, kind)
        with self._changed:
            self._number += ends
            self._count += 1
            self._told = Told(self._number, ends, failure)
        if ends:
            for listener in self._listening():
                listener.hear(failure)
        with self._changed:
            if self._thread is None:
                # Those that ask later, or know nothing of this process yet, have to hear it.
                self._stays = True
                self._start()
            # Nobody waits for a store that is known not to answer.
            self._await_round(_BRIEFLY if self.unanswered() > UNREACHABLE else _TELLING)

    def pass_on(self, failure: Failure) -> None:
        """Tell of a failure that was seen in another group, unless this one knows of it.

        Args:
            failure: Because of which this process gives up.
        """
        told = [peer.last_told() for peer in self._peers.values()]
        mine = None if self._told is None else self._told.failure
        if failure not in (*told, mine):
            self.tell(failure)

    def _failure_here(self, error: BaseException, doing: str, kind: FailureKind) -> Failure:
        message, trace = describe_error(error)
        host, pid = self._identity.host, self._identity.pid
        return Failure(self._ranks[self._rank], host, pid, kind, doing, message, trace)

    # --- what is known of the others -------------------------------------------------------------

    def expect(self, rank: int, channel: str, identity: dict[str, Any]) -> None:
        """Believe nothing about a rank any more but what comes from the channel that was met.

        Args:
            rank: An index of ``ranks``.
            channel, identity: As in :class:`~dataparallel.comm.peer.Peer`.
        """
        if rank in self._peers:
            self._peers[rank].expect(channel, identity)

    def failure_of(self, rank: int, known: int = 0) -> Failure | None:
        """Why a rank can be expected no more; None if nothing speaks against it.

        Args:
            rank: An index of ``ranks``; so below.
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
        return max((one.known.get(rank, 0) for one in self._listening()), default=0)

    def told(self, rank: int) -> Failure | None:
        """What a rank told last, of whatever consequence."""
        peer = self._peers.get(rank)
        return None if peer is None else peer.last_told()

    def look(self, seconds: float) -> None:
        """Wait until the others were looked at once more, for at most so many seconds."""
        with self._changed:
            if self._thread is not None:
                self._await_round(seconds)

    def describe(self, rank: int) -> str:
        """Where a rank that has not failed is, or for how long it is silent."""
        return self._peers[rank].describe() if rank in self._peers else ""

    def gone(self) -> Failure | None:
        """The failure to report if the process that holds the store seems to have ended."""
        lost = self.unanswered()
        return self.cut_off(lost, self._refusal) if self._refusal and lost > _REFUSING else None

    def unanswered(self) -> float:
        """For how many seconds the store has not answered; 0 if it has."""
        now, since = self._clock.tick(), self._lost_since
        return 0.0 if since is None else now - since

    def cut_off(self, seconds: float, reason: str = "") -> Failure:
        """That this process can't reach the store.

        Args:
            seconds: For how long.
            reason: What the store said. Default: nothing.
        """
        rank, identity = self._ranks[self._rank], self._identity
        return cut_off(rank, identity.host, identity.pid, seconds, reason)

    # --- the thread ------------------------------------------------------------------------------

    def _start(self) -> None:
        """Let the thread run; called with the lock held."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(
                target=self._run, name="dataparallel-failures", daemon=True
            )
            self._thread.start()

    def _await_round(self, seconds: float) -> None:
        """Wait for a round that begins from now on; called with the lock held."""
        if self._thread is threading.current_thread():
            return
        self._ticket += 1
        ticket = self._ticket
        self._wake.set()
        self._changed.wait_for(lambda: self._served >= ticket or self._thread is None, seconds)

    def _listening(self) -> list[Listener]:
        with self._changed:
            return list(self._listeners)

    def _run(self) -> None:
        before = self._clock.tick()
        while True:
            self._wake.clear()
            now = self._clock.tick()
            with self._changed:
                ticket, idle = self._ticket, self._is_idle()
            # A group that is gone may have taken its store along.
            if self._exists():
                self._round(now - before, idle)
            else:
                idle, ticket = True, self._ticket
            before = now
            with self._changed:
                self._served = ticket
                done = idle and self._is_idle() and ticket == self._ticket
                over = done or not self._exists()
                if over:
                    self._thread, connection = None, self._signs.release()
                self._changed.notify_all()
            if over:
                # To give it back may take a while, so nobody has to wait for that.
                del connection
                return
            if not idle:
                self._wake.wait(PERIOD)

    def _is_idle(self) -> bool:
        return self._stopping or not (self._listeners or self._stays)

    def _round(self, awake: float, idle: bool) -> None:
        with self._changed:
            told, count = self._told, self._count
        if not self._signs.rests:
            if self._lost_since is None:
                self._lost_since = self._clock.tick()
            try:
                self._signs.connect()
                places = [place for one in self._listening() if (place := one.place())]
                away = idle and not self._stopping
                self._signs.write("; ".join(places), told, count, away=away)
                if not self._stopping:
                    self._signs.read(self._peers, awake)
                self._lost_since, self._refusal = None, ""
            except Exception as error:
                # Whoever waits asks whether the store is gone.
                if isinstance(error, ConnectionRefusedError):
                    self._refusal = str(error)
                self._signs.drop()
        try:
            self._accuse()
        except Exception:
            _logger.exception("who listens for failures of processes has failed itself")

    def _accuse(self) -> None:
        for listener in self._listening():
            for i, peer in self._peers.items():
                failure = peer.failure(listener.known.get(i, 0))
                if failure is not None:
                    listener.hear(failure)


# --- which there are -----------------------------------------------------------------------------

_channels: GroupThreads[FailureChannel] = GroupThreads()


def channel_of(group: dist.ProcessGroup, store: Store, *, fresh: bool = False) -> FailureChannel:
    """The channel of a process group, made at the first call.

    Args:
        group: The group; not one of this package's own.
        store: Its store, under a prefix of this package.
        fresh: Whether no group before this one has used the same part of the store.
    """
    held = weakref.ref(group)

    def make() -> FailureChannel:
        ranks = dist.get_process_group_ranks(group)
        exists = functools.partial(_exists, held)
        return FailureChannel(store, ranks, group.rank(), fresh=fresh, exists=exists)

    return _channels.of(group, make)


def _exists(held: weakref.ref[dist.ProcessGroup]) -> bool:
    group = held()
    return group is not None and torch_internals.is_registered(group)


def all_channels() -> list[FailureChannel]:
    """All channels of this process."""
    return _channels.all()
