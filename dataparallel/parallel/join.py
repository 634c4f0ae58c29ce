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
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from dataparallel import torch_internals
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.comm.link import Pending, ProcessLink
from dataparallel.parallel.buffers import PRE_FORWARD
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.torch_internals import BatchNorm

if TYPE_CHECKING:
    from dataparallel.parallel.distributed import DistributedDataParallel

_COUNT = "how many processes have inputs left"
_REDUCES = "whether gradients will be reduced"


class _Asked(NamedTuple):
    """Numbers of all processes that are being reduced."""

    numbers: torch.Tensor
    pending: Pending

    def first(self) -> int:
        """The first of the results; waits for them."""
        self.pending.wait()
        return int(self.numbers[0])


def _ask(processes: ReducerProcesses, numbers: Sequence[int], op: str, what: str) -> _Asked:
    tensor = torch.tensor(numbers, dtype=torch.int64)
    return _Asked(tensor, processes.join.all_reduce(tensor, op=op, what=what))


class UnevenInputs(JoinHook):
    """What one wrapper does for ``join()``. See Note [A process that has joined].

    Attributes:
        was_used: Whether the wrapper has ever joined.
    """

    def __init__(self, model: DistributedDataParallel[Any]) -> None:
        self._model = weakref.ref(model)
        self._divides = True
        self._step: Callable[[], object] | None = None
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

    def begin(
        self, *, divides: bool, step: Callable[[], object] | None, limited: bool = False
    ) -> UnevenInputs:
        """The block of a context manager is entered, or will be."""
        self._divides, self._step, self._is_limited = divides, step, limited
        self.was_used = True
        return self

    # --- in a process that has inputs ----------------------------------------------------------

    def notify(self) -> Callable[[], int] | None:
        """Let those that have joined know of a forward; returns what counts those that have not."""
        config, processes = self._config, self._processes
        if not config.enable:
            return None
        throws = config.throw_on_early_termination
        count: Callable[[], int] | None = None
        if self._is_limited and processes is not None:
            asked = _ask(processes, [1, 0], "sum", _COUNT)
            count = asked.first
            if throws:
                asked.pending.wait()
                if asked.numbers[1]:
                    raise RuntimeError(
                        "Detected at least one rank that exhausted inputs. Throwing across all "
                        "ranks."
                    )
        else:
            if processes is not None and not throws:
                self.refuse_shared_statistics()
            notify: Any = Join.notify_join_context
            work = notify(self.model)
            if work is not None and processes is not None:
                count = functools.partial(_number_in, work.get_future(), processes.control)
        if processes is not None:
            processes.count_active(None if self._divides else count)
        return count

    def refuse_other_parameters(self, count: Callable[[], int] | None) -> None:
        """Raise where everything is made anew and some have joined, by what notify() returned."""
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
        if self._processes is not None and self._config.enable:
            _ask(self._processes, [reduces], "max", _REDUCES)

    def source(self, *, has_inputs: bool = True) -> int:
        """The rank whose buffers are sent: the largest that has inputs; a collective call."""
        processes = self._processes
        if processes is None or not self._config.enable:
            return 0
        return _largest(processes, has_inputs)

    def refuse_shared_statistics(self) -> None:
        """Raise a ValueError if a batch norm layer would wait for processes that have joined."""
        model = self.model
        for name, layer in model.module.named_modules():
            if _waits_for_all(layer, synced=model.buffer_policy == "sync"):
                raise ValueError(
                    f"the batch norm {name!r} ({type(layer).__name__}) takes statistics over all "
                    "processes, but one that has joined has no batch to give to them, and the "
                    "others would wait for it; use buffers='mean' or a layer of torch.nn, or "
                    "join(throw_on_early_termination=True), which ends the epoch in all processes "
                    "as soon as one has no more"
                )

    # --- in a process that has joined ----------------------------------------------------------

    def count_others(self) -> int:
        """How many processes have inputs; a collective call."""
        assert self._processes is not None
        terminates = self._config.throw_on_early_termination
        return _ask(self._processes, [0, terminates], "sum", _COUNT).first()

    def main_hook(self) -> None:
        """Do what a forward and backward of the others does together with this process."""
        processes, buffers = self._processes, self.model.buffer_sync
        sends = buffers.moment is not None and self.model.will_sync_module_buffers()
        if sends and buffers.moment == PRE_FORWARD:
            buffers.sync(self.source(has_inputs=False))
        reduces = processes is not None and _ask(processes, [0], "max", _REDUCES).first() == 1
        if sends and buffers.moment != PRE_FORWARD:
            buffers.sync(self.source(has_inputs=False))
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
            parameter.grad = None
        results = reducer.reduce(lambda: None, has_data=False)
        for parameter, grad in zip(parameters, results, strict=True):
            if grad is not None:
                parameter.grad = grad

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: have the parameters and buffers of one that joined last."""
        if self._processes is not None:
            self.model.reducer.read_vote()
            source, model = _largest(self._processes, is_last_joiner), self.model
            model.buffer_sync.send_states(source, buffers=model.forward_sync_buffers)
        self.end()

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
        self._uneven, self._divides, self._step = uneven, divide, step
        initialize: Any = super().__init__
        initialize([uneven.model], True, throw)
        # Not before the block is entered.
        uneven.end()

    def __enter__(self) -> None:
        # Again, since the block may be entered again.
        torch_internals.configure_join(self)
        self._uneven.begin(divides=self._divides, step=self._step, limited=True)

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


def _number_in(future: torch.futures.Future[list[torch.Tensor]], link: ProcessLink) -> int:
    return int(link.wait_for(future, what=_COUNT)[0].item())


def _largest(processes: ReducerProcesses, answer: bool) -> int:
    """The largest rank of those that answer yes; a collective call."""
    candidate = [processes.rank if answer else -1]
    largest = _ask(processes, candidate, "max", "which process has inputs left").first()
    assert largest >= 0, "one process at least has inputs, or was the last to have some"
    return largest


def _waits_for_all(layer: nn.Module, *, synced: bool) -> bool:
    """Whether a layer takes statistics over all processes in its next forward."""
    if isinstance(layer, SyncBatchNorm):
        return layer.training and layer.group != "local"
    if isinstance(layer, nn.SyncBatchNorm):
        return layer.training
    uses_batch = isinstance(layer, BatchNorm) and (layer.training or layer.running_mean is None)
    return synced and uses_batch
