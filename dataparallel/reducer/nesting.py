"""Which backwards of replicas make up one round, and when it ends.

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

A round that is reduced over processes ends when the whole backward does: the parameters may get
gradients from other parts of the graph before and after the cut, see
Note [Gradients from outside of the wrapper].
"""

from __future__ import annotations

import threading
import weakref

from dataparallel.graph.ending import NO_TASK, Ending


class Nesting:
    """Counts the backwards of replicas in a round. See Note [Several cuts in one round]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._computing = 0
        self._all_came = False
        self._task = NO_TASK
        self._thread = 0
        self._ending: weakref.ref[Ending] | None = None

    def enter(self, task: int, *, last: bool, ending: weakref.ref[Ending] | None) -> bool:
        """Begin the backward of one cut; returns whether it belongs to the round under way."""
        outer = None if ending is None else ending()
        if outer is not None:
            task = outer.task
        here = threading.get_ident()
        with self._lock:
            same = task == self._task != NO_TASK
            alive = self.ending is not None
            joins = same or (alive and self._thread == here)
            if (self._inside or alive) and not joins:
                raise RuntimeError(
                    "Expected to have finished reduction in the prior iteration before starting a "
                    "new one: another backward of the same wrapper is running, in another thread "
                    "or from within a hook; let one end before the next begins"
                )
            if not joins:
                self._task, self._thread, self._all_came = task, here, False
                self._ending = ending
                if outer is None and task != NO_TASK:
                    self._ending = Ending.given_to_the_engine()
            if same or not joins:
                self._all_came |= last
            self._inside += 1
            self._computing += 1
            return joins

    @property
    def ending(self) -> Ending | None:
        """What the engine calls at the end of the backward; None if none runs."""
        return None if self._ending is None else self._ending()

    def computed(self) -> bool:
        """Note that one has its gradients; returns whether all have."""
        with self._lock:
            self._computing -= 1
            return self._all_came and not self._computing

    def leave(self, *, ended: bool) -> None:
        """End what :meth:`enter` began; tell whether the round has ended, well or with an error."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._computing = 0
        if ended:
            self.end()

    def end(self) -> None:
        """Note that the round has ended."""
        with self._lock:
            self._task, self._ending = NO_TASK, None
