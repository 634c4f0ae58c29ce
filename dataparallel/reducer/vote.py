"""The messages of all ranks about a round: as it begins, and the vote at its end.

Note [The vote]
~~~~~~~~~~~~~~~
In each round every rank launches one collective of fixed size, in the host's memory: which
parameters it used, which gradients came late, and whether something is not finite. Nothing that
another rank says decides whether it is launched. A rank that used all parameters needs no answer:
it reads that at its next forward. A rank with unused parameters waits for it in backward, before it
delivers them. So does a rank with gradients that came after their bucket was sent. All ranks wait
for it in the first round and with a communication hook. Gradients that came late are in no sum
where some rank did not wait. Then all raise, that one at its next forward.

Note [Ranks that part]
~~~~~~~~~~~~~~~~~~~~~~
A rank whose backward raises before it comes to the wrapper begins no round, and tells nobody. If
its loop goes on, its next round would meet the one in which the others still are: the gradients of
different steps would be added up from then on. So all ranks say, when a round begins, how many
steps they have left open before it: forwards to which no backward has come. In ranks that do the
same it is the same number, however many forwards a round is about. It is larger in a rank that has
left out a step. Then the others raise before a gradient is used, which leaves the step out there,
too. The rank itself has left its step out before: with what it has computed it takes part in the
others' next round. So all go on with the same step. A step that all have left out counts no more.
If several wrappers are in a backward that is dropped, those whose rounds were left raise once more
at their next forward, in all ranks.

A forward under ``no_grad`` or ``no_sync`` is no step, nor one that a backward runs again, as of a
checkpoint. One in evaluation mode is a step only in a wrapper that trains in this mode. Each thread
has steps of its own, since forwards of threads come in any order.

If the host waits for buckets, it looks at the numbers behind them, when they have long come. On
accelerators it waits for nothing, and looks with the vote. A rank whose next forward sends buffers
may come to no round: where a step is open it first tells of that, and links are made anew.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from dataparallel.comm.errors import RanksParted
from dataparallel.comm.link import ProcessLink
from dataparallel.errors import describe_names
from dataparallel.graph.cut import Forward
from dataparallel.reducer.processes import ReducerProcesses

_log = logging.getLogger("dataparallel")

# Seconds that a process which ends gives to the others to get its last vote.
_LAST_VOTE = 2.0

# --- the begin of a round --------------------------------------------------------------------


class Agreement:
    """The messages of all ranks as a round begins, under way. See Note [Ranks that part].

    With ``forwards`` it is about the round of these; with None, a rank begins another forward.
    """

    def __init__(
        self,
        processes: ReducerProcesses,
        forwards: Sequence[Forward] | None,
        weight: float = 0.0,
    ) -> None:
        self._processes, self._forwards = processes, forwards or ()
        #: The steps before it that are open here.
        self.open: list[Forward] = []
        # Their number, NaN where there is no forward.
        number = math.nan
        if forwards is None:
            self.open = processes.forwards.open_before()
            # More than in the round that was left out.
            number = len(self.open) + 0.5
        elif forwards:
            self.open = processes.forwards.open_before(max(forwards, key=attrgetter("number")))
            number = len(self.open)
        self._pending = processes.control.tell(weight, number, what="the begin of a round")
        self._is_checked = False

    @functools.cached_property
    def _heard(self) -> list[float]:
        self._pending.wait()
        return self._pending.sent.tolist()

    def total_weight(self) -> float:
        """Return the sum of the weights of all processes in an average."""
        return sum(self._heard[::2])

    def check(self, outcome: str) -> RanksParted | None:
        """Look once whether ranks have left out different steps: an error where others have more.

        Returns the error in a rank that has left out most.
        """
        if self._is_checked:
            return None
        self._is_checked = True
        forwards = self._processes.forwards
        numbers = {i: n for i, n in enumerate(self._heard[1::2]) if not math.isnan(n)}
        most = max(numbers.values(), default=0.0)
        if {most}.issuperset(numbers.values()):
            forwards.settle(self.open if self._forwards else ())
            return None
        ranks = self._processes.ranks
        counts = "; ".join(f"rank {ranks[i]}: {int(number)}" for i, number in numbers.items())
        failure = self._processes.failure_of(
            next(rank for rank, number in numbers.items() if number == most),
            "left out the backward of a step: it raised before it came to the wrapper, or was not "
            f"called, and the loop went on (forwards without a backward before this: {counts}). "
            "Put the loop into dp.telling_failures(), so that all raise when one does; run a "
            "forward that gets no backward under torch.no_grad() or model.no_sync()",
        )
        error = RanksParted(f"{failure}. {outcome}", failure)
        if numbers.get(self._processes.rank) == most:
            _log.warning("%s", error)
            return error
        forwards.drop(self._forwards)
        raise error


# --- the vote --------------------------------------------------------------------------------

#: The marks of ranks for one parameter; the largest is the mark of all of them together. ``.grad``
#: held something that was sent; it got a gradient; it got one after its bucket was sent.
HELD, CAME, LATE = 1, 2, 3


class Answer(NamedTuple):
    """The common answer of all ranks."""

    #: Per parameter, one of the above, or 0.
    marks: bytes
    #: The parameters that are LATE; and those of them that some rank did not wait for.
    late: list[int]
    lost: list[int]
    nonfinite: bool


class Vote:
    """The vote of one round, under way. See Note [The vote]."""

    def __init__(
        self, control: ProcessLink, marks: bytearray, *, waits: bool, nonfinite: bool
    ) -> None:
        said = marks + bytes([not waits, nonfinite])
        self._said = torch.frombuffer(said, dtype=torch.uint8)
        self._pending = control.all_reduce(self._said, op="max", what="the vote of a round")
        _unread[id(self)] = self

    def read(self) -> Answer:
        """Wait for the votes of all ranks."""
        self._pending.wait()
        _unread.pop(id(self), None)
        *marks, some_left, nonfinite = self._said.tolist()
        late = [index for index, mark in enumerate(marks) if mark == LATE]
        return Answer(bytes(marks), late, late if some_left else [], bool(nonfinite))

    def is_under_way(self) -> bool:
        """True if some rank may still need this one to get the votes of all."""
        return not self._pending.done()


#: By their ids.
_unread: weakref.WeakValueDictionary[int, Vote] = weakref.WeakValueDictionary()


@atexit.register
def linger() -> None:
    """Let the other ranks get the last votes, before this one closes its links."""
    deadline = time.monotonic() + _LAST_VOTE
    while time.monotonic() < deadline:
        # Other threads may vote meanwhile.
        left = [reference() for reference in _unread.valuerefs()]
        if not any([vote is not None and vote.is_under_way() for vote in left]):
            return
        time.sleep(0.001)


def late_error(names: Iterable[str]) -> RuntimeError:
    """Return the error if gradients came late in some ranks, and others did not wait for them."""
    return RuntimeError(
        "these parameters got a gradient after their bucket was sent, and not in all processes: "
        f"{describe_names(names)}. The others did not wait for it, so it is in no sum. Use "
        "them outside of the wrapper's forward, or in checkpoints, in all processes, or in the "
        "first step already, if only times zero; then their buckets wait for the end of backward"
    )
