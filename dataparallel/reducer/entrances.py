"""Which backwards of replicas make up one round.

Note [Several cuts in one round]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A wrapper that was called several times before one backward has several cuts in it, which make one
round. Mostly they run one after another. With devices that have backward threads of their own, one
may begin inside of another: a thread that waits for the backward of a cut takes the next node that
is ready, which may be a cut too. Then the round ends with the one that ends last.

Between two cuts of one backward, a re-entrant checkpoint may run a backward of its own in which the
wrapper was called, too. It becomes a part of the round that is under way. A round of a backward
that has failed is never continued; whether a backward still runs is known from an object that
nothing but the engine holds, as long as it runs.
"""

from __future__ import annotations

import functools
import threading
import weakref

from dataparallel import torch_internals
from dataparallel.reducer import messages

#: Number of no backward.
NO_TASK = -1


class _Token:
    """Held by the engine as long as a backward runs."""


class Entrances:
    """Counts the backwards of replicas in the current round.

    See Note [Several cuts in one round].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._computing = 0
        self._all_came = False
        self._task = NO_TASK
        self._token: weakref.ref[_Token] | None = None

    def enter(self, task: int, *, last: bool) -> bool:
        """Begin the backward of one cut.

        Args:
            task: Number of the engine's backward.
            last: Whether no other cut follows in it.

        Returns:
            Whether it belongs to the round that is under way.

        Raises:
            RuntimeError: Another backward runs.
        """
        with self._lock:
            same = task == self._task != NO_TASK
            joins = same or (self._token is not None and self._token() is not None)
            if self._inside and not joins:
                raise RuntimeError(messages.PRIOR_NOT_FINISHED)
            if not joins:
                self._task, self._all_came = task, False
                self._token = None if last or task == NO_TASK else _given_to_the_engine()
            if same or not joins:
                self._all_came |= last
            self._inside += 1
            self._computing += 1
            return joins

    def computed(self) -> bool:
        """Note that one has its gradients; returns whether the round is to be finished now."""
        with self._lock:
            self._computing -= 1
            return self._all_came and not self._computing

    def leave(self, *, ended: bool) -> None:
        """End what :meth:`enter` began.

        Args:
            ended: Whether the round has ended, well or with an error.
        """
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._computing = 0
            if ended:
                self._task, self._token = NO_TASK, None


def _given_to_the_engine() -> weakref.ref[_Token]:
    token = _Token()
    torch_internals.when_backward_ends(functools.partial(id, token))
    return weakref.ref(token)
