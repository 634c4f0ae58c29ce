"""Whether all processes are about to run the same collective, asked before it is launched.

Note [Checked collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A backend matches collectives by their order alone. Others of the same shape give wrong numbers,
other dtypes too, and other shapes end a process (gloo). So members tell each other what they are
about to launch, and launch it when that goes together; if not, all of them raise the same error and
nothing was launched. That costs as much as a small collective, so by default it is done for the
first three steps, for three after a difference, and for every 64th. In between each member notes
its collectives, and the next check compares these notes too: a difference is told late, but told.

The members may come at different times. One that has waited for a moment launches without an
answer, so that a program that waits for something else between a launch and its wait runs on. It
then hears of a difference in its wait, the others before they launch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch.distributed as dist

from dataparallel.comm.calls import Call, Said, describe, digest, digests
from dataparallel.comm.check_board import Board, Exchange, board_of
from dataparallel.comm.check_judge import WHICH, Judge
from dataparallel.comm.process_errors import CollectiveError, purpose_of
from dataparallel.errors import chosen

#: When collectives are checked: never; in the first three steps, in three after a difference, and
#: in every 64th; or always.
CheckMode: TypeAlias = Literal["off", "sampled", "always"]

FIRST_STEPS = 3
PERIOD = 64

# Seconds that a member waits for the others before it launches without an answer.
PATIENCE = 0.5
# Seconds that the store may take to let it.
_LEAVING = 0.5
# Seconds between two looks at whether the wait is still of use.
_SLICE = 0.05
#: Seconds that an answer is awaited where a collective has failed, of which it may give the reason.
LATE_ANSWER = 0.3
# How many collectives between two checks are kept to be named.
_KEPT = 4096

# How much longer than a collective a check is waited for: whatever ends that one is told first.
_LONGER = 1.5

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

_logger = logging.getLogger(__name__)
_default: CheckMode = "sampled"


_USABLE = (
    "Nothing else was launched, so all processes can go on with the next collective once they "
    "run the same ones in the same order"
)
_UNUSABLE = (
    "Some were launched already, so the processes are at different collectives; close what they "
    "belong to and make it anew in every process, and run the same collectives in the same order"
)


class CollectiveMismatch(CollectiveError):
    """Processes were about to run different collectives; the message shows those of each rank.

    Attributes:
        usable: Whether the same processes can go on: nothing was launched.
    """

    usable = True


def checked_mode(mode: str) -> CheckMode:
    """The mode, if it is one.

    Raises:
        ValueError: It is none.
    """
    found: CheckMode = chosen("checks", mode, get_args(CheckMode))
    return found


def default_mode() -> CheckMode:
    """The mode of links and process groups that have none of their own."""
    return _default


def set_default_mode(mode: str) -> None:
    """Change :func:`default_mode`, for links and process groups that are used from now on.

    Args:
        mode: The same in all processes.
    """
    global _default
    _default = checked_mode(mode)


class Sampling:
    """Which steps are checked. A step is a collective, unless somebody says when steps begin.

    Example::

        sampling = Sampling("sampled")
        assert [sampling.is_due() for _ in range(5)] == [True, True, True, False, False]

    Args:
        mode: See :data:`CheckMode`.
    """

    def __init__(self, mode: CheckMode) -> None:
        self.mode = mode
        self._step = 0
        self._counts_steps = False
        self._until = FIRST_STEPS

    def begin_step(self) -> None:
        """A step begins; from the first time on, only these are counted."""
        if not self._counts_steps:
            self._counts_steps, self._step = True, 0
        self._step += 1

    def is_due(self) -> bool:
        """Whether the collective that comes next is checked."""
        if self.mode != "sampled":
            return self.mode == "always"
        self._step += not self._counts_steps
        return self._step <= self._until or self._step % PERIOD == 0

    def after_difference(self) -> None:
        """Check the next steps."""
        self._until = self._step + FIRST_STEPS


class CollectiveChecks:
    """The checks of one link or process group. See Note [Checked collectives].

    Example::

        checks = CollectiveChecks("reducer/1", board, ranks, rank=0, mode="always", timeout=60.0)
        checks.before(Call("all_reduce", "sum", torch.float32, (4,), "bucket 0"))

    Args:
        name: Of the link; the same in all members, and never used before over these processes.
        board: Where the members meet.
        ranks: The number of each member in the default group.
        rank: This member, as an index of ``ranks``.
        mode: See :data:`CheckMode`; the same in all members.
        timeout: Seconds that a collective may take. If a member does not take part in a check for
            longer, there are no more.

    Attributes:
        sequence: How many collectives were begun.
        num_checks: How many checks were made.
    """

    def __init__(
        self,
        name: str,
        board: Board,
        ranks: Sequence[int],
        rank: int,
        *,
        mode: CheckMode,
        timeout: float,
    ) -> None:
        self.sequence = 0
        self.num_checks = 0
        self._name = name
        self._board = board
        self._ranks = list(ranks)
        self._rank = rank
        self._timeout = timeout
        self._sampling = Sampling("off" if len(ranks) == 1 else mode)
        self._history: deque[Call] = deque(maxlen=_KEPT)
        self._unanswered: deque[Exchange] = deque()
        self._lock = threading.RLock()

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, store: Store, name: str, mode: str | None, timeout: float
    ) -> CollectiveChecks:
        """The checks over the processes of a group.

        Args:
            group: The group; not one of this package's own.
            store: Its store, under a prefix of this package.
            name: As for the class.
            mode: As for the class. Default: that of :func:`set_default_mode`.
            timeout: As for the class.
        """
        mode = default_mode() if mode is None else checked_mode(mode)
        ranks = dist.get_process_group_ranks(group)
        board = board_of(group, store)
        return cls(name, board, ranks, group.rank(), mode=mode, timeout=timeout)

    @property
    def mode(self) -> CheckMode:
        """When there are checks."""
        return self._sampling.mode

    def begin_step(self, plan: str | None = None) -> None:
        """A step begins, here and in the other members.

        Args:
            plan: What the step will be, compared like a collective. Default: nothing is known.

        Raises:
            CollectiveMismatch: The members have different plans.
        """
        self._sampling.begin_step()
        if plan is not None:
            self.before(Call("a step", plan, None, ()))

    def before(self, call: Call, alive: Callable[[], object] = lambda: None) -> None:
        """Count a collective that is about to be launched, and check it, if that is due.

        Args:
            call: What this member is about to launch.
            alive: Raises an error if waiting for the others is of no use.

        Raises:
            CollectiveMismatch: The members are about to launch different collectives, or have done
                so since the last check. All of them get it, with the same text.
        """
        with self._lock:
            self.sequence += 1
            if self._sampling.mode == "off":
                return
            self.hear()
            if not self._sampling.is_due():
                self._history.append(call)
                return
            exchange = self._begin(call, self.sequence)
            if not self._unanswered:
                self._wait(exchange, alive)
            if exchange.over:
                self._settle(exchange)
            else:
                self._unanswered.append(exchange)
            self._history.append(call)

    def hear(self, seconds: float = 0.0) -> None:
        """Take note of answers that came late; cheap where none is awaited.

        Args:
            seconds: How long to wait for the first one. Default: not at all.

        Raises:
            CollectiveMismatch: The members have launched different collectives.
        """
        if not self._unanswered:
            return
        with self._lock:
            if self._unanswered and seconds:
                self._unanswered[0].wait_until_over(seconds)
            while self._unanswered and self._unanswered[0].over:
                self._settle(self._unanswered.popleft())

    def close(self) -> None:
        """Take part in no check any more."""
        self._board.drop(self._name)

    def _begin(self, call: Call, sequence: int) -> Exchange:
        history = list(self._history)
        self._history.clear()
        first = sequence - len(history)
        self.num_checks += 1

        def explain(question: Any) -> Any:
            if question == WHICH:
                return [sequence, first, digests(history)]
            at = int(question) - first
            if at == len(history):
                return f"{describe(call.to_json())} (not launched yet)"
            return describe(history[at].to_json()) if 0 <= at < len(history) else "nothing"

        exchange = Exchange(
            self._name,
            self.num_checks,
            # Where an answer is late already, this one is not waited for.
            Said(sequence, call.to_json(), digest(history), bool(self._unanswered)),
            self._rank,
            len(self._ranks),
            Judge(purpose_of(self._name), self._ranks),
            explain,
            _LONGER * self._timeout,
        )
        self._board.begin(exchange)
        return exchange

    def _wait(self, exchange: Exchange, alive: Callable[[], object]) -> None:
        deadline = time.monotonic() + min(PATIENCE, self._timeout / 4)
        while not exchange.wait(max(0.0, min(_SLICE, deadline - time.monotonic()))):
            alive()
            if time.monotonic() > deadline:
                exchange.leave(_LEAVING)
                return

    def _settle(self, exchange: Exchange) -> None:
        if exchange.error is not None:
            self._sampling.mode = "off"
            self._unanswered.clear()
            self._board.drop(self._name)
            _logger.warning(
                "collectives for %r are not checked any more, because a check failed: %s; all "
                "processes must have the same checks",
                purpose_of(self._name),
                exchange.error,
            )
            return
        assert exchange.answer is not None
        if exchange.answer:
            self._sampling.after_difference()
            self._history.clear()
            usable = exchange.answer["in_step"] and not exchange.answer["left"]
            text = f"{exchange.answer['text']}\n{_USABLE if usable else _UNUSABLE}"
            error = CollectiveMismatch(text)
            error.usable = usable
            raise error
