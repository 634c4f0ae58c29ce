"""Training with uneven inputs: a process that has no more takes part in what the others do.

Note [A process that has joined]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes have to launch the same collectives. One that has no inputs left stays at the end of
the ``with`` block, and does for each forward of the others what that does together with them, until
all have come there:

    others: who is there?, buffers, forward, backward whose gradients are reduced: a round
    joined: who is there?, buffers,          if they will be reduced: a round without gradients

So within the block one backward follows each forward whose gradients are reduced. Buffers are then
those of the largest rank that has inputs, since the others' are out of date. At the end all get the
parameters and buffers of a process that joined last.

What a round gave is in ``.grad`` of a joined process, too, until all have joined. Whoever makes the
optimizer's step there needs it: ``step``, or an optimizer that joins with the model, as torch's
``ZeroRedundancyOptimizer``, where the process has to make the step of its own shard. Afterwards
``.grad`` is what it was.

Parameters are made equal at the end, but the state of an optimizer is not: nothing but its own
steps brings the momentum of a process that has joined to where that of the others is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook

from dataparallel import torch_internals
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.graph.originals import IN_GRAD
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.torch_internals import BatchNorm

if TYPE_CHECKING:
    from dataparallel.parallel.distributed import DistributedDataParallel


class Answers:
    """What each process says of one forward; a collective call, for which the answers wait."""

    def __init__(self, processes: ReducerProcesses, *, has_inputs: bool, reduces: bool) -> None:
        self._numbers = torch.zeros(processes.world_size, dtype=torch.int64)
        self._numbers[processes.rank] = has_inputs + reduces
        what = "which processes have inputs left"
        self._pending = processes.join.all_reduce(self._numbers, op="sum", what=what)

    def _by_rank(self) -> list[int]:
        self._pending.wait()
        return self._numbers.tolist()

    def count(self) -> int:
        """How many processes have inputs left."""
        return sum(number > 0 for number in self._by_rank())

    def count_joined(self) -> int:
        """How many have none."""
        return len(self._numbers) - self.count()

    def source(self) -> int:
        """The rank whose buffers are sent: the largest that has inputs."""
        return max(rank for rank, number in enumerate(self._by_rank()) if number)

    def reduces(self) -> bool:
        """Whether gradients will be reduced."""
        return max(self._by_rank()) > 1


class UnevenInputs(JoinHook):
    """What one wrapper does for ``join()``. See Note [A process that has joined].

    Attributes:
        was_used: Whether the wrapper has ever joined.
    """

    def __init__(self, model: DistributedDataParallel[Any]) -> None:
        self._model = weakref.ref(model)
        self._divides = True
        self._step: Callable[[], object] | None = None
        # Whether this is a block of our own, whose waits say who is missing; else it is torch's.
        self._is_own = False
        # What was in `.grad` when this process joined.
        self._kept: dict[nn.Parameter, Tensor | None] = {}
        self.was_used = False

    @property
    def model(self) -> DistributedDataParallel[Any]:
        """The wrapper."""
        model = self._model()
        assert model is not None
        return model

    @property
    def _processes(self) -> ReducerProcesses | None:
        return self.model._training.processes

    @property
    def _config(self) -> Any:
        return torch_internals.join_config(self.model)

    def _ask(self, *, has_inputs: bool = False, reduces: bool = False) -> Answers:
        assert self._processes is not None
        return Answers(self._processes, has_inputs=has_inputs, reduces=reduces)

    def begin(self, *, divides: bool, step: Callable[[], object] | None) -> UnevenInputs:
        """A block is entered, or will be."""
        self._divides, self._step, self.was_used = divides, step, True
        return self

    @contextlib.contextmanager
    def block(
        self, *, throws: bool, divides: bool, step: Callable[[], object] | None
    ) -> Iterator[None]:
        """The protocol of torch's ``Join`` with one wrapper, with waits that say who is missing."""
        self.begin(divides=divides, step=step)
        self._is_own = True
        torch_internals.set_join(self.model, enable=True, throws=throws)
        try:
            yield
            is_last = True
            while (answers := self._ask()).count():
                if throws:
                    raise RuntimeError(f"Rank {self.model._distributed_rank} exhausted all inputs.")
                self._shadow(answers)
                is_last = False
            self.post_hook(is_last)
        finally:
            self._end()

    # --- in a process that has inputs ----------------------------------------------------------

    def notify(self, *, reduces: bool) -> Answers | None:
        """Let those that have joined know of a forward; None outside of a block."""
        config, processes = self._config, self._processes
        if processes is None or not config.enable:
            return None
        if not self._is_own:
            notify: Any = Join.notify_join_context
            notify(self.model)
        answers = self._ask(has_inputs=True, reduces=reduces)
        if self._is_own and config.throw_on_early_termination and answers.count_joined():
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )
        processes.count_active(None if self._divides else answers.count)
        return answers

    def refuse_other_parameters(self) -> None:
        """Raise where everything is made anew for a forward, and some have joined."""
        answers = self.notify(reduces=True)
        if answers is not None and (joined := answers.count_joined()):
            raise RuntimeError(
                "parameters of the module were replaced, or have another shape, dtype or device, "
                f"while {joined} other processes have joined, which cannot do the same. Replace "
                "parameters before the block of join(), or after it in all processes; "
                "p.data.copy_(...) changes values at any time"
            )

    def refuse_shared_statistics(self) -> None:
        """Raise a ValueError if a batch norm layer would wait for processes that have joined."""
        model = self.model
        shared = BatchNorm if model.buffer_policy == "sync" else (nn.SyncBatchNorm, SyncBatchNorm)
        for name, layer in model.module.named_modules():
            local = isinstance(layer, SyncBatchNorm) and layer.group == "local"
            if isinstance(layer, shared) and layer.training and not local:
                raise ValueError(
                    f"the batch norm {name!r} ({type(layer).__name__}) takes statistics over all "
                    "processes, but one that has joined has no batch to give to them, and the "
                    "others would wait for it; use buffers='mean' or a layer of torch.nn, or "
                    "join(throw_on_early_termination=True), which ends the epoch in all processes "
                    "as soon as one has no more"
                )

    # --- in a process that has joined ----------------------------------------------------------

    def main_hook(self) -> None:
        """What torch's ``Join`` calls for each forward of the others."""
        self._shadow(self._ask())

    def _shadow(self, answers: Answers) -> None:
        """Do what a forward and backward of the others does together with this process."""
        buffers, reduces = self.model.buffer_sync, answers.reduces()
        if buffers.moment is not None and self.model.will_sync_module_buffers():
            buffers.sync(answers.source())
        self.model._note_forward(reduces=reduces)
        if reduces:
            self._shadow_round()
            if self._step is not None:
                self._step()

    def _shadow_round(self) -> None:
        reducer = self.model.reducer
        trained = dict[str, nn.Parameter](self.model.module.named_parameters())
        parameters = [trained[name] for name in reducer.names]
        if not self._kept:
            # A view of a bucket will hold other numbers.
            viewed = reducer.options.gradient_as_bucket_view
            self._kept = {
                p: p.grad.clone() if viewed and p.grad is not None else p.grad for p in parameters
            }
        for parameter in parameters:
            IN_GRAD.write(parameter, None)
        reducer.reduce(lambda: None, has_data=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: have the parameters and buffers of one that joined last."""
        model = self.model
        if self._processes is not None:
            model.reducer.read_vote()
            source = self._ask(has_inputs=is_last_joiner).source()
            model.buffer_sync.send_states(source, buffers=model.forward_sync_buffers)
        self._end()

    def _end(self) -> None:
        """Be as before the block; may be called again."""
        kept, self._kept, self._is_own = self._kept, {}, False
        for parameter, grad in kept.items():
            IN_GRAD.write(parameter, grad)
        # Torch leaves it as it is: then forwards after the block still tell of themselves.
        torch_internals.set_join(self.model, enable=False)
        if self._processes is not None:
            self._processes.count_active(None)
