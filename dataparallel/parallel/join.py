"""Training with uneven inputs: a process that has no more takes part in what the others do.

Note [A process that has joined]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes have to launch the same collectives. One that has no inputs left stays at the end of
the ``with`` block, and does for each forward of the others what that does together with them, until
all have come there:

    others: count, buffers, will gradients be reduced?, forward, backward: a round of the reducer
    joined: count, buffers, will gradients be reduced?,          if so:    a round without gradients

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

import functools
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from dataparallel import torch_internals
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.comm.link import Pending, ProcessLink
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.torch_internals import BatchNorm

if TYPE_CHECKING:
    from dataparallel.parallel.distributed import DistributedDataParallel

_WHAT = "how many processes have inputs left"


def _count(
    link: ProcessLink, *, has_inputs: bool, terminates: bool
) -> tuple[torch.Tensor, Pending]:
    """Begin to count the processes that have inputs, and those that want all to stop."""
    counts = torch.tensor([int(has_inputs), int(terminates)])
    return counts, link.all_reduce(counts, what=_WHAT)


class UnevenInputs:
    """What one wrapper does for ``join()``. See Note [A process that has joined].

    Attributes:
        was_used: Whether the wrapper has ever joined.
    """

    def __init__(self, model: DistributedDataParallel[Any]) -> None:
        self._model = weakref.ref(model)
        self._divides = True
        # Whether waits are limited in time, in our own context manager.
        self._is_limited = False
        # What was in `.grad` when this process joined.
        self._kept: dict[nn.Parameter, torch.Tensor | None] = {}
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

    def begin(self) -> None:
        """The block of our own context manager is entered."""
        self._is_limited = True

    def hook(self, *, divides: bool, step: Callable[[], object] | None) -> JoinHook:
        """What the process does once it has no more inputs."""
        self._divides, self.was_used = divides, True
        return _ShadowHook(self, step)

    def describe(self) -> tuple[bool, bool, bool]:
        """Whether inputs may be uneven, who divides, and whether all stop with the first."""
        return self._config.enable, self._divides, self._config.throw_on_early_termination

    # --- in a process that has inputs ----------------------------------------------------------

    def notify(self) -> Callable[[], int] | None:
        """Let those that have joined know that a forward begins here; a collective call.

        Returns:
            What tells how many processes have not joined; None outside of the block.
        """
        config, processes = self._config, self._processes
        if not config.enable:
            return None
        count: Callable[[], int] | None = None
        if not self._is_limited or processes is None:
            if processes is not None and not config.throw_on_early_termination:
                self.refuse_shared_statistics()
            notify: Any = Join.notify_join_context
            work = notify(self.model)
            if work is not None and processes is not None:
                count = functools.partial(_number_in, work.get_future(), processes.control)
        else:
            counts, pending = _count(processes.control, has_inputs=True, terminates=False)
            if config.throw_on_early_termination:
                pending.wait()
                if counts[1]:
                    raise RuntimeError(
                        "Detected at least one rank that exhausted inputs. Throwing across all "
                        "ranks."
                    )
            count = functools.partial(_first_of, counts, pending)
        if processes is not None:
            processes.count_active(None if self._divides else count)
        return count

    def refuse_other_parameters(self, count: Callable[[], int] | None) -> None:
        """Raise where everything is to be made anew for other parameters and some have joined.

        Args:
            count: What :meth:`notify` has returned in this forward.
        """
        processes = self._processes
        if count is None or processes is None:
            return
        joined = processes.world_size - count()
        if joined:
            raise RuntimeError(
                "parameters of the module were replaced, or have another shape, dtype or device, "
                f"while {joined} of {processes.world_size} processes have joined: those cannot do "
                "the same. Replace parameters before the block of join(), or after it in all "
                "processes; p.data.copy_(...) changes values at any time"
            )

    def tell(self, *, reduces: bool) -> None:
        """Let those that have joined know whether gradients of this forward will be reduced."""
        processes = self._processes
        if processes is not None and self._config.enable:
            answer = torch.tensor([int(reduces)])
            processes.control.all_reduce(answer, op="max", what="whether gradients will be reduced")

    def source(self, *, has_inputs: bool = True) -> int:
        """The rank whose buffers are sent: the largest that has inputs; a collective call."""
        processes = self._processes
        if processes is None or not self._config.enable:
            return 0
        return _largest(processes, has_inputs)

    def refuse_shared_statistics(self) -> None:
        """Raise a ValueError if a batch norm layer would wait for processes that have joined."""
        model = self.model
        _refuse_shared_statistics(model.module, synced=model.buffer_policy == "sync")

    # --- in a process that has joined ----------------------------------------------------------

    def count_others(self) -> int:
        """How many processes have inputs; a collective call."""
        assert self._processes is not None
        counts, pending = _count(
            self._processes.control,
            has_inputs=False,
            terminates=self._config.throw_on_early_termination,
        )
        pending.wait()
        return int(counts[0])

    def shadow_iteration(self) -> bool:
        """Do what a forward and backward of the others does together with this process.

        Returns:
            Whether their gradients were reduced, and are in ``.grad``.
        """
        processes, buffers = self._processes, self.model.buffer_sync
        link = None if processes is None else processes.buckets
        if buffers.come_before(link):
            buffers.sync(link, self.source(has_inputs=False))
        reduces = False
        if processes is not None:
            answer = torch.tensor([0])
            what = "whether gradients will be reduced"
            processes.control.all_reduce(answer, op="max", what=what).wait()
            reduces = bool(answer.item())
        if buffers.come_after():
            buffers.sync(link, self.source(has_inputs=False))
        buffers.note_forward(reduces=reduces)
        if reduces:
            self._shadow_round()
        return reduces

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
            parameter.grad = None
        results = reducer.reduce(lambda: None, has_data=False)
        for parameter, grad in zip(parameters, results, strict=True):
            if grad is not None:
                parameter.grad = grad

    def agree(self, is_last: bool) -> None:
        """Have the parameters and buffers of a process that joined last; a collective call."""
        processes = self._processes
        if processes is not None:
            buffers = self.model.buffer_sync
            source = _largest(processes, is_last)
            buffers.send_states(processes.buckets, source, buffers=buffers.sends)

    def end(self) -> None:
        """Be as before the block; may be called again."""
        for parameter, grad in self._kept.items():
            parameter.grad = grad
        self._kept = {}
        self._is_limited = False
        # Torch leaves it as it is: then forwards after the block still tell of themselves.
        torch_internals.leave_join(self.model)
        if self._processes is not None:
            self._processes.count_active(None)


class LimitedJoin(Join):
    """Torch's protocol, with waits that are limited in time and say who is missing."""

    def __init__(
        self, uneven: UnevenInputs, throw: bool, divide: bool, step: Callable[[], object] | None
    ) -> None:
        self._uneven = uneven
        initialize: Any = super().__init__
        initialize([uneven.model], True, throw, divide_by_initial_world_size=divide, step=step)
        # Not before the block is entered.
        uneven.end()

    def __enter__(self) -> None:
        # Again, since the block may be entered again.
        torch_internals.configure_join(self)
        self._uneven.begin()

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave: Any = super().__exit__
        try:
            # It changes the filters for warnings of the whole program.
            with warnings.catch_warnings():
                leave(type, value, traceback)
        finally:
            self._uneven.end()

    def _get_num_nonjoined_procs(self) -> int:
        return self._uneven.count_others()

    def _notify_procs_to_terminate(self) -> None:
        # The others know from the count.
        raise RuntimeError(f"Rank {self._uneven.model._distributed_rank} exhausted all inputs.")


class _ShadowHook(JoinHook):
    """What a wrapper does while it is joined, for torch's context manager."""

    def __init__(self, uneven: UnevenInputs, step: Callable[[], object] | None) -> None:
        self._uneven = uneven
        self._step = step

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        if self._uneven.shadow_iteration() and self._step is not None:
            self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: have the same everywhere."""
        self._uneven.agree(is_last_joiner)
        self._uneven.end()


def _first_of(counts: torch.Tensor, pending: Pending) -> int:
    pending.wait()
    return int(counts[0])


def _number_in(future: torch.futures.Future[list[torch.Tensor]], link: ProcessLink) -> int:
    return int(link.wait_for(future, what=_WHAT)[0].item())


def _largest(processes: ReducerProcesses, answer: bool) -> int:
    """The largest rank of those that answer yes; a collective call."""
    candidate = torch.tensor([processes.rank if answer else -1])
    what = "which process has inputs left"
    processes.control.all_reduce(candidate, op="max", what=what).wait()
    assert candidate.item() >= 0, "one process at least has inputs, or was the last to have some"
    return int(candidate.item())


def _refuse_shared_statistics(module: nn.Module, *, synced: bool) -> None:
    """Raise a ValueError if a batch norm layer would wait for the processes that have joined."""
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            waits = layer.training and layer.group != "local"
        elif isinstance(layer, nn.SyncBatchNorm):
            waits = layer.training
        else:
            waits = synced and isinstance(layer, BatchNorm) and _uses_batch(layer)
        if waits:
            named = f"{name!r} ({type(layer).__name__})"
            raise ValueError(
                f"the batch norm {named} takes statistics over all processes, but one that has "
                "joined has no batch to give to them, and the others would wait for it; use "
                "buffers='mean' or a layer of torch.nn, or join(throw_on_early_termination=True), "
                "which ends the epoch in all processes as soon as one has no more"
            )


def _uses_batch(layer: BatchNorm) -> bool:
    return layer.training or layer.running_mean is None
