"""What happens when a replica runs out of memory: the others take over a part of its chunk.

Note [Too little memory]
~~~~~~~~~~~~~~~~~~~~~~~~
Where a replica runs out of memory in forward, nothing has left the replicas yet. What they have
changed meanwhile is brought back: buffers, and the states of the generators. Then the forward runs
again with a smaller chunk for that replica and larger ones for the others; except where that is not
so, see Note [What cannot be run again]. In backward the graph is gone and gradients are half done:
those of the round are dropped, and the step has to be run again, by whoever called it or by
``Balancer.step``. Other processes do not notice the first; the second ends the backward in all of
them.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import nn

from dataparallel.devices import empty_cache
from dataparallel.errors import add_note
from dataparallel.extras.balancing.chunk_shares import fits
from dataparallel.extras.balancing.obstacles import Obstacles
from dataparallel.extras.balancing.out_of_memory import is_out_of_memory, replicas_named_by
from dataparallel.extras.balancing.rollback import Rollback, RollbackPool
from dataparallel.threads.timeline import Span

T = TypeVar("T")

# What a replica is left with of a chunk for which its memory was too small.
_KEPT = 0.75
# On an exception: whether the step may be run again, where that has been decided.
_MARK = "_dataparallel_may_run_again"


class _Attempt:
    """One attempt at a forward."""

    def __init__(self, owner: MemoryHandover, *, is_first: bool) -> None:
        self.owner = owner
        self.is_first = is_first
        self.sizes: tuple[int, ...] = ()
        #: The replicas that ran out of memory.
        self.failed: set[int] = set()

    def note_sizes(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    def sizes_that_failed(self) -> list[int]:
        """The sizes of the chunks for which memory was too small."""
        return [self.sizes[replica] for replica in self.failed if replica < len(self.sizes)]


_current: ContextVar[_Attempt | None] = ContextVar("balanced_attempt", default=None)


class MemoryHandover:
    """Limits the chunks of replicas to what their memory has been enough for.

    Args:
        devices: The device of each replica.
        on_change: Called with the sizes that failed and a sentence when a limit has changed.

    Attributes:
        limits: Per replica how many samples it may get; None where nothing is known.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        on_change: Callable[[tuple[int, ...], str], None],
    ) -> None:
        self._devices = tuple(devices)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._last_sizes: tuple[int, ...] = ()
        self._rollbacks = RollbackPool(devices)
        self.limits: list[int | None] = [None] * len(devices)

    def use_devices(self, devices: Sequence[torch.device], kept: Sequence[int | None]) -> None:
        """Let the replicas be others.

        Args:
            devices: The device of each replica.
            kept: Per replica which one it was, None for a new one.
        """
        with self._lock:
            self._devices = tuple(devices)
            self._rollbacks = RollbackPool(devices)
            self._last_sizes = ()
            self.limits = [None if old is None else self.limits[old] for old in kept]

    @property
    def is_repeating(self) -> bool:
        """Whether the forward under way in this thread is not the first attempt."""
        attempt = _current.get()
        return attempt is not None and attempt.owner is self and not attempt.is_first

    def note_sizes(self, sizes: Sequence[int]) -> None:
        """Remember how the batch of the forward under way is divided."""
        self._last_sizes = tuple(sizes)
        attempt = _current.get()
        if attempt is not None and attempt.owner is self:
            attempt.note_sizes(sizes)

    # --- forward ---------------------------------------------------------------------------------

    def attempt(
        self,
        call: Callable[[], T],
        modules: Sequence[nn.Module | None],
        obstacles: Obstacles,
    ) -> T:
        """Run a forward, again with other chunks as long as that may help.

        Args:
            call: Splits the batch and runs the replicas.
            modules: The originals whose buffers it may write.
            obstacles: What may forbid to run it again, made just before.

        Raises:
            BaseException: What ``call`` raised.
        """
        with self._rollbacks.taken(() if obstacles.is_certain else modules) as rollback:
            return self._repeated(call, obstacles, rollback)

    def _repeated(self, call: Callable[[], T], obstacles: Obstacles, rollback: Rollback) -> T:
        limits = list(self.limits)
        is_first = True
        while True:
            attempt = _Attempt(self, is_first=is_first)
            token = _current.set(attempt)
            try:
                return call()
            except Exception as error:
                if not is_out_of_memory(error) or not self._hand_over(attempt, error, obstacles):
                    if 1 in attempt.sizes_that_failed():
                        # It was not the chunks that took the memory.
                        self.limits[:] = limits
                    raise
            finally:
                _current.reset(token)
            # Only here the exception is gone, and what its traceback held.
            rollback.undo()
            self.free()
            is_first = False

    def free(self) -> None:
        """Give memory back that nobody uses."""
        gc.collect()
        for device in dict.fromkeys(self._devices):
            empty_cache(device)

    def on_span(self, span: Span) -> None:
        """Listen to a timeline: what has failed, and in which replica."""
        if not span.failed:
            return
        # The span is a context manager, which is left with the exception being handled.
        error = sys.exc_info()[1]
        if error is None or not is_out_of_memory(error):
            return
        attempt = _current.get()
        if span.phase == "backward":
            self.failed_in_backward(error, span.replicas)
        elif attempt is not None and attempt.owner is self:
            if span.phase == "forward" and len(span.replicas) == 1:
                attempt.failed.update(span.replicas)
            elif span.phase == "scatter":
                attempt.failed.update(replicas_named_by(error, self._devices))

    def _hand_over(self, attempt: _Attempt, error: BaseException, obstacles: Obstacles) -> bool:
        # Whatever comes of it, it is not a failure of backward.
        vars(error)[_MARK] = False
        sizes = attempt.sizes
        failed = sorted(replica for replica in attempt.failed if replica < len(sizes))
        if not failed:
            return False
        where = self._lower(failed, sizes)
        obstacle = obstacles.found()
        if obstacle:
            add_note(error, f"{where}; its chunks are smaller from now on. {obstacle}")
            self._on_change(sizes, where)
            return False
        trouble = self._trouble(failed, sizes)
        if trouble:
            add_note(error, f"{where}. {trouble}")
            return False
        self._on_change(sizes, where)
        return True

    # --- backward --------------------------------------------------------------------------------

    def failed_in_backward(self, error: BaseException, replicas: Sequence[int]) -> None:
        """Let a replica have smaller chunks from now on, and say so in the exception."""
        if getattr(error, _MARK, None) is not None:
            return
        if len(replicas) > 1:
            replicas = replicas_named_by(error, self._devices)
        sizes = self._last_sizes
        failed = [replica for replica in replicas if replica < len(sizes)]
        if not failed:
            return
        where = self._lower(failed, sizes, "in backward ")
        trouble = self._trouble(failed, sizes)
        vars(error)[_MARK] = not trouble
        if not trouble:
            limits = [self.limits[replica] for replica in failed]
            most = ", ".join(str(limit) for limit in limits)
            add_note(error, f"{where}; its chunk is at most {most} from now on: run the step again")
            self._on_change(sizes, where)
        else:
            add_note(error, f"{where}. {trouble}")

    def may_run_again(self, error: BaseException) -> bool:
        """Whether a step that failed with ``error`` may succeed with other chunks.

        Args:
            error: What its forward or backward raised.
        """
        if not is_out_of_memory(error):
            return False
        self.failed_in_backward(error, range(len(self._devices)))
        return bool(getattr(error, _MARK, False))

    # --- limits ----------------------------------------------------------------------------------

    def _trouble(self, failed: Sequence[int], sizes: Sequence[int]) -> str:
        """Why the others cannot take over, and what can be done; nothing if they can."""
        full = [i for i in failed if sizes[i] <= 1]
        if full:
            names = " and ".join(f"replica {i} on {self._devices[i]}" for i in full)
            return (
                f"There is not enough memory for a single sample in {names}, and each replica gets "
                "at least one: leave the device out of device_ids, or give it more memory"
            )
        if fits(sum(sizes), self.limits):
            return ""
        each = ", ".join(
            f"replica {i} {'any number' if limit is None else f'at most {limit}'}"
            for i, limit in enumerate(self.limits)
        )
        return (
            f"The others cannot take over a part of its chunk: for a batch of {sum(sizes)} there "
            f"is memory for too few samples ({each}); use a smaller batch"
        )

    def _lower(self, failed: Sequence[int], sizes: Sequence[int], when: str = "") -> str:
        with self._lock:
            for replica in failed:
                limit = max(1, int(sizes[replica] * _KEPT))
                before = self.limits[replica]
                self.limits[replica] = limit if before is None else min(before, limit)
        return " and ".join(
            f"replica {i} on {self._devices[i]} ran out of memory {when}with {sizes[i]} samples"
            for i in failed
        )
