"""Training with uneven inputs: a process that has no more takes part in what the others do.

Note [A process that has joined]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes have to launch the same collectives. One that has no inputs left stays at the end of
the ``with`` block. It does its part in each forward of the others, until all have come there:

    others: who is there?, buffers, forward, backward whose gradients are reduced: a round
    joined: who is there?, buffers,          if they will be reduced: a round without gradients

So within the block one backward follows each forward whose gradients are reduced. Buffers are then
those of the largest rank that has inputs, since the others' are out of date. At the end all get the
parameters and buffers of a process that joined last.

The gradients of a round are in ``.grad`` of a joined process, too, until all have joined. Whoever
makes the optimizer's step there needs it: ``step``, or an optimizer that joins with the model, as
torch's ``ZeroRedundancyOptimizer``, where the process has to make the step of its own shard.
Afterwards ``.grad`` is what it was.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from dataparallel import torch_internals
from dataparallel.graph.originals import IN_GRAD
from dataparallel.parallel.buffers import send_buffers, send_states


def _source(said: Sequence[int]) -> int:
    """Return the rank whose tensors are sent: the largest that has said something."""
    return max(rank for rank, number in enumerate(said) if number)


class JoinBlock(JoinHook):
    """The part of one wrapper in a block of ``join()``. See Note [A process that has joined].

    Args:
        model: The wrapper, of which the block uses public names alone.
        note_forward: Tells the wrapper that another process has made a forward.
        divides: As ``divide_by_initial_world_size``.
        step: The caller's step in a process that has joined.
    """

    def __init__(
        self,
        model: Joinable,
        note_forward: Callable[[Any, bool], None],
        *,
        divides: bool,
        step: Callable[[], object] | None,
    ) -> None:
        # The wrapper has this block, and is not to be kept by it.
        self._model: Any = weakref.proxy(model)
        self._note_forward, self._divides, self._step = note_forward, divides, step
        # True if this is our block, not one of torch's `Join`.
        self._is_own = False
        # The content of `.grad` when this process joined.
        self._kept: dict[nn.Parameter, Tensor | None] = {}

    @property
    def _processes(self) -> Any:
        return self._model.reducer.processes

    def _say(self, number: int) -> list[int]:
        """Exchange a number for one forward with all processes; a collective call.

        0: it has joined. 1: it has inputs. 2: its gradients will be reduced, too.
        """
        processes = self._processes
        said = torch.zeros(processes.world_size, dtype=torch.int64)
        said[processes.rank] = number
        link = processes.join_link
        link.all_reduce(said, op="sum", what="which processes have inputs left").wait()
        return said.tolist()

    @contextlib.contextmanager
    def run(self, *, throws: bool) -> Iterator[None]:
        """Follow the protocol of torch's ``Join`` with one wrapper; waits name who is missing."""
        self._is_own = True
        torch_internals.set_join(self._model, enable=True, throws=throws)
        try:
            yield
            is_last = True
            while any(said := self._say(0)):
                if throws:
                    raise RuntimeError(f"Rank {self._processes.rank} exhausted all inputs.")
                self._shadow(said)
                is_last = False
            self.post_hook(is_last)
        finally:
            self._end()

    # --- in a process that has inputs ----------------------------------------------------------

    def notify(self, *, reduces: bool) -> int:
        """Let those that have joined know of a forward; returns the rank whose buffers are sent."""
        if not self._is_own:
            notify: Any = Join.notify_join_context
            notify(self._model)
        said = self._say(1 + reduces)
        if 0 in said and torch_internals.join_config(self._model).throw_on_early_termination:
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )
        self._processes.count_active(len(said) if self._divides else sum(map(bool, said)))
        return _source(said)

    # --- in a process that has joined ----------------------------------------------------------

    def main_hook(self) -> None:
        """Follow one forward of the others; torch's ``Join`` calls this for each of them."""
        self._shadow(self._say(0))

    def _shadow(self, said: Sequence[int]) -> None:
        """Do what a forward and backward of the others does together with this process."""
        model, reduces = self._model, max(said) > 1
        if model.will_sync_module_buffers():
            send_buffers(model.module, _source(said), self._processes.buckets)
        self._note_forward(model, reduces)
        if not reduces:
            return
        if not self._kept:
            # A view of a bucket will hold other numbers.
            viewed = model.reducer.options.gradient_as_bucket_view
            self._kept = {
                p: p.grad.clone() if viewed and p.grad is not None else p.grad
                for p in model.reducer.trained.parameters
            }
        for parameter in self._kept:
            IN_GRAD.write(parameter, None)
        model.reducer.reduce(lambda: None, weight=0.0)
        if self._step is not None:
            self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters and buffers of a process that joined last, when all have joined."""
        model = self._model
        model.reducer.read_vote()
        source, link = _source(self._say(int(is_last_joiner))), self._processes.buckets
        send_states(model.module, source, link, buffers=model.forward_sync_buffers)
        self._end()

    def _end(self) -> None:
        """Be as before the block; may be called again."""
        kept, self._kept = self._kept, {}
        for parameter, grad in kept.items():
            IN_GRAD.write(parameter, grad)
        # Torch leaves it as it is: then forwards after the block still tell of themselves.
        torch_internals.set_join(self._model, enable=False)
        self._processes.count_active(self._processes.world_size)
