"""Where processes tell each other what they are about to do, before they do it.

Note [The board]
~~~~~~~~~~~~~~~~
Each member writes what it is about to do under a name of its own in the store of the group; member
0 reads them all, compares, and writes its answer, which the others read: the same text for all. No
collective is needed, so nothing can be matched wrongly, members may come at any time and in any
order, and one that does not come keeps nobody: whoever has waited long enough leaves. Who leaves
and the answer that stops everybody could cross, so both add to one number in the store, and what
was added first counts.

Requests to a store have no time limit. They are made in a thread, which ends when nothing is left
to do.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dataparallel.comm.group_threads import GroupThreads, get_all, own_connection

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

# Seconds between two looks at the store: at first, and at most.
_SHORTEST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.05
# Seconds for which the thread stays when nothing is left to do.
_LINGER = 0.1
# What the answer adds to the number to which those that leave add one each.
_STOPPED = 1 << 32


class Exchange:
    """One check, as one member takes part in it.

    Args:
        name: Under what the members of this check meet; they come to its checks in one order.
        number: The number of the check under that name.
        says: What this member says.
        rank: This member.
        size: How many there are.
        judge: Compares what all say, by member, and returns the answer; called at member 0.
        explain: Answers a question of the judge.
        timeout: Seconds after which nobody is waited for any more.
    """

    def __init__(
        self,
        name: str,
        number: int,
        says: Any,
        rank: int,
        size: int,
        judge: Callable[[Sequence[Any]], dict[str, Any]],
        explain: Callable[[Any], Any],
        timeout: float,
    ) -> None:
        self.name = name
        self._number = number
        self._says = says
        self._rank = rank
        self._size = size
        self._judge = judge
        self._explain = explain
        self._deadline = time.monotonic() + timeout
        self._turn = 0
        self._has_written = False
        self._wants_to_leave = self._has_asked = False
        self._changed = threading.Event()
        #: What member 0 has answered; None before.
        self.answer: dict[str, Any] | None = None
        #: Why there will be no answer.
        self.error: Exception | None = None
        #: Whether this member goes on without an answer.
        self.has_left = False

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.answer is not None or self.error is not None

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, or this member has left."""
        return self._changed.wait(seconds)

    def wait_until_over(self, seconds: float) -> None:
        """Wait until it is over, whether this member has left or not."""
        self._changed.clear()
        if not self.over:
            self._changed.wait(seconds)

    def leave(self, seconds: float) -> None:
        """Go on without an answer, unless there is one by then.

        Args:
            seconds: How long the store may take for that.
        """
        self._changed.clear()
        self._wants_to_leave = True
        if not self.over:
            self._changed.wait(seconds)
        self.has_left = self.has_left or not self.over

    # --- in the thread of the board ----------------------------------------------------------

    def advance(self, store: Store) -> bool:
        """Do what can be done now; whether anything was."""
        try:
            if not self._has_written:
                self._write(store)
            if time.monotonic() > self._deadline:
                raise TimeoutError("not all processes took part in the check")
            moved = self._collect(store) if self._rank == 0 else self._read(store)
            if self._wants_to_leave and not self._has_asked and not self.over:
                self._has_asked = True
                # Who is stopped already waits for the answer, which is on its way.
                if store.add(self._gate, 1) < _STOPPED:
                    self.has_left = True
                    self._changed.set()
        except Exception as error:
            self.fail(error)
            return True
        return moved

    def fail(self, error: Exception) -> None:
        """There will be no answer."""
        self.error = error
        self._changed.set()

    @property
    def _gate(self) -> str:
        return f"{self.name}/gate/{self._number}"

    def _write(self, store: Store) -> None:
        self._has_written = True
        if self._rank != 0 or self._size == 1:
            store.set(self._key(self._rank), json.dumps([self._number, self._turn, self._says]))

    def _key(self, rank: int) -> str:
        return f"{self.name}/said/{rank}"

    def _collect(self, store: Store) -> bool:
        others = range(1, self._size)
        keys = [self._key(rank) for rank in others]
        if not store.check(keys):
            return False
        heard = [json.loads(text) for text in get_all(store, keys)]
        if any(each[:2] != [self._number, self._turn] for each in heard):
            return False
        answer = self._judge([self._says, *(says for _, _, says in heard)])
        if "question" in answer:
            self._says, self._turn = self._explain(answer["question"]), self._turn + 1
        elif answer:
            # See Note [The board].
            answer["left"] = store.add(self._gate, _STOPPED) != _STOPPED
        store.set(f"{self.name}/answer", json.dumps([self._number, self._turn, answer]))
        if "question" not in answer:
            self._end(answer)
        return True

    def _read(self, store: Store) -> bool:
        key = f"{self.name}/answer"
        if not store.check([key]):
            return False
        number, turn, answer = json.loads(store.get(key))
        if (
            number != self._number
            or turn < self._turn
            or ("question" in answer) == (turn == self._turn)
        ):
            return False
        if "question" in answer:
            self._says, self._turn = self._explain(answer["question"]), turn
            self._write(store)
        else:
            self._end(answer)
        return True

    def _end(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self._changed.set()


class Board:
    """The checks of this process over one process group. See Note [The board].

    Args:
        store: The store of the group, under a prefix of this package.
    """

    def __init__(self, store: Store) -> None:
        self._original = store
        self._store: Store | None = None
        # By name: those that come later begin when those before them are over.
        self._queues: dict[str, deque[Exchange]] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def begin(self, exchange: Exchange) -> None:
        """Take part in a check."""
        with self._wake:
            self._queues.setdefault(exchange.name, deque()).append(exchange)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, name="dataparallel-checks", daemon=True
                )
                self._thread.start()
            self._wake.notify()

    def drop(self, name: str) -> None:
        """Forget all checks under a name."""
        with self._wake:
            for exchange in self._queues.pop(name, ()):
                exchange.fail(RuntimeError("the link was closed"))

    def stop(self) -> None:
        """End the thread; called when the interpreter ends."""
        with self._wake:
            self._stopping = True
            thread = self._thread
            self._wake.notify()
        if thread is not None:
            thread.join(1.0)

    def _run(self) -> None:
        pause = _SHORTEST_PAUSE
        idle_since = time.monotonic()
        while True:
            with self._wake:
                first = [queue[0] for queue in self._queues.values()]
                now = time.monotonic()
                if self._stopping or (not first and now - idle_since > _LINGER):
                    self._thread = None
                    return
                if not first:
                    if self._wake.wait(_LINGER):
                        pause = _SHORTEST_PAUSE
                    continue
            idle_since = now
            moved = [self._advance(exchange) for exchange in first]
            pause = _SHORTEST_PAUSE if any(moved) else min(2 * pause, _LONGEST_PAUSE)
            with self._wake:
                self._tidy()
                if self._queues and not any(moved) and self._wake.wait(pause):
                    pause = _SHORTEST_PAUSE

    def _advance(self, exchange: Exchange) -> bool:
        if self._store is None:
            try:
                self._store = own_connection(self._original)
            except Exception as error:
                exchange.fail(error)
                return True
        return exchange.advance(self._store)

    def _tidy(self) -> None:
        for name, queue in list(self._queues.items()):
            while queue and queue[0].over:
                queue.popleft()
            if not queue:
                del self._queues[name]


# --- which there are -------------------------------------------------------------------------

_boards: GroupThreads[Board] = GroupThreads()


def board_of(group: dist.ProcessGroup, store: Store) -> Board:
    """The board of a process group, made at the first call.

    Args:
        group: The group; not one of this package's own.
        store: Its store, under a prefix of this package.
    """
    return _boards.of(group, lambda: Board(store))
