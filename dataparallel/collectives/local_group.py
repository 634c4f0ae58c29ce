"""The replicas of one process as a group.

Note [No collective in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The replicas meet in forward only. Activation checkpointing runs a part of forward again in
backward, where nobody else comes: a collective in it would find a group of one member, and its
result would be wrong without any sign. So it is refused when forward runs it under a checkpoint
within a replica: a frame of ``torch.utils.checkpoint`` is on the stack, or its saved-tensor hooks
are (they are all there is to see of checkpoints that are module hooks). What other code runs again
is refused in backward. There, frames of ``torch.utils.checkpoint`` are right: they have passed the
test in forward, so the group had one member then, too. A checkpoint around a whole wrapper is no
checkpoint within its replicas, see Note [Checkpoints around replicas] in ``threads/context.py``.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

import dataparallel.comm as comm
from dataparallel import torch_internals
from dataparallel.collectives.derivatives import run_call
from dataparallel.collectives.operations import AllReduce, Collective, mean_of
from dataparallel.comm.local import may_be_deferred
from dataparallel.devices import (
    Stream,
    current_stream,
    is_accelerator,
    record_stream,
    wait_stream,
)
from dataparallel.graph.functions import behind_own_nodes
from dataparallel.threads.apply import current_replica
from dataparallel.threads.meeting import DEFAULT_TIMEOUT, current_rendezvous
from dataparallel.torch_internals import untraced

_CHECKPOINT = torch.utils.checkpoint.__file__


class LocalGroup:
    """The group of the replicas of this process; pass ``"local"`` for the default one.

    In the forward of a module that runs in replicas, its members are the replicas of that call.
    Anywhere else it has one member. All members call the same collectives in the same order.

    A collective waits for all replicas. So it returns the result as a plain tensor (on an
    accelerator: in the order of the current stream).

    Example::

        class Net(nn.Module):
            def forward(self, x):
                mean = collectives.all_reduce(x.mean(0), "avg", "local")
                return x - mean

    Args:
        timeout: Seconds that a replica waits for the others. Default: 300.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is a positive number of seconds, but got {timeout}")
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"{type(self).__name__}(timeout={self.timeout:g})"

    def size(self) -> int:
        """How many members the group has here."""
        return self.place()[1]

    def rank(self) -> int:
        """The number of this member, from 0."""
        return self.place()[0]

    def place(self) -> tuple[int, int]:
        """``rank()`` and ``size()``."""
        replica = current_replica()
        return (0, 1) if replica is None else (replica.index, replica.num_replicas)

    @untraced
    def run(self, collective: Collective, tensor: Tensor) -> Tensor:
        """The result of this member; waits for the others."""
        check_input(collective.name, tensor)
        rendezvous = current_rendezvous()
        if rendezvous is None or rendezvous.num_replicas == 1:
            if rendezvous is None:
                refuse_in_backward(collective.name)
            # Plain operations, which any transform can follow.
            collective = collective.checked(tensor, 1)
            return LocalCall(collective.agree([collective]), 1).result([tensor], 0)
        refuse_in_replica(collective.name)
        # Where a fault is found by the replica that makes it, its error names this replica.
        collective = collective.checked(tensor, rendezvous.num_replicas)
        brought = Brought.here(collective, tensor)
        key = collective.signature(tensor)
        return brought.recorded(rendezvous.exchange(key, brought, _results, timeout=self.timeout))


def _results(brought: Sequence[Brought]) -> Sequence[Tensor]:
    """The results of all replicas; one of them calls this for all."""
    wanted = [each.collective for each in brought]
    call = LocalCall(wanted[0].agree(wanted), len(brought))
    with one_mode(brought), ordered(brought) as results:
        inputs = [each.tensor for each in brought]
        results += run_call(call, behind_own_nodes(inputs, inputs[0].device))
    return results


@dataclass(frozen=True)
class LocalCall:
    """A collective of the replicas of one call; see :class:`~derivatives.Call`."""

    collective: Collective
    size: int

    @property
    def indices(self) -> range:
        """All of them."""
        return range(self.size)

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Another collective of the same replicas."""
        call = LocalCall(collective, self.size)
        return run_call(call, behind_own_nodes(tensors, tensors[0].device))

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of all."""
        collective, devices = self.collective, [x.device for x in inputs]
        if not isinstance(collective, AllReduce):
            return [self.result(inputs, member) for member in self.indices]
        if collective.op in ("sum", "avg") and len(set(devices)) > 1:
            terms = [_settled(x, devices[0]) for x in inputs]
            total = comm.reduce_add(terms, devices[0]).contiguous()
            if collective.op == "avg":
                mean_of(total, len(inputs))
        else:
            total = self.result(inputs, 0)
        return spread(total, devices)

    def result(self, inputs: Sequence[Tensor], member: int) -> Tensor:
        """The result of one member alone."""
        own, collective = inputs[member], self.collective
        pieces = [collective.piece(x, i, member, self.size) for i, x in enumerate(inputs)]
        arrived = [bring(piece, own.device) for piece in pieces if piece is not None]
        return collective.combine(arrived, member, own)


def spread(value: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """The value on each device, each in memory of its own; itself where a device is its own."""
    if all(device == value.device for device in devices):
        return [value, *(value.clone() for _ in devices[1:])]
    # Copies on one device share memory, and each replica may write to its own.
    taken: set[torch.device] = set()
    results = []
    for copy in comm.broadcast(value, devices):
        results.append(copy.clone() if copy.device in taken else copy)
        taken.add(copy.device)
    return results


def bring(piece: Tensor, device: torch.device) -> Tensor:
    """A piece on ``device``: itself, or a copy."""
    if piece.device == device:
        return piece
    return comm.broadcast(_settled(piece, device), [device])[0]


def _settled(x: Tensor, device: torch.device) -> Tensor:
    """What may be copied to ``device`` without being read after the call has returned."""
    # Its member may write to it right then, and pinned memory is read later.
    return x.clone() if may_be_deferred(x, device) and not is_accelerator(x.device) else x


# --- what members bring ----------------------------------------------------------------------


class Brought(NamedTuple):
    """What a member wants and gives; from where, and how it uses the result."""

    collective: Collective
    #: Requires grad only where the member records gradients.
    tensor: Tensor
    #: None where there are none.
    stream: Stream | None
    inference: bool

    @staticmethod
    def here(collective: Collective, tensor: Tensor) -> Brought:
        """What this thread brings."""
        if tensor.requires_grad and not torch.is_grad_enabled():
            tensor = tensor.detach()
        stream = current_stream(tensor.device) if is_accelerator(tensor.device) else None
        return Brought(collective, tensor, stream, torch.is_inference_mode_enabled())

    @staticmethod
    def recorded(result: Tensor) -> Tensor:
        """A result as this thread gets it: a constant where it records nothing."""
        return result if torch.is_grad_enabled() or not result.requires_grad else result.detach()


@contextlib.contextmanager
def one_mode(brought: Sequence[Brought]) -> Iterator[None]:
    """Record gradients if a member does; the thread that computes may be another one's."""
    with contextlib.ExitStack() as stack:
        inference = all(each.inference for each in brought)
        if torch.is_inference_mode_enabled() != inference:
            stack.enter_context(torch.inference_mode(inference))
        if not torch.is_grad_enabled() and any(each.tensor.requires_grad for each in brought):
            stack.enter_context(torch.enable_grad())
        yield


@contextlib.contextmanager
def ordered(brought: Sequence[Brought]) -> Iterator[list[Tensor]]:
    """Order what this thread queues after the members' inputs and before what they do next.

    The block fills the list with the results.
    """
    apart = []
    for index, each in enumerate(brought):
        if each.stream is not None:
            ours = current_stream(each.tensor.device)
            if ours != each.stream:
                apart.append((index, each.stream, ours))
    for _, theirs, ours in apart:
        wait_stream(ours, theirs)
    results: list[Tensor] = []
    yield results
    for index, theirs, ours in apart:
        wait_stream(theirs, ours)
        record_stream(results[index], theirs)


# --- where no collective can be called -------------------------------------------------------


def check_input(name: str, tensor: object) -> None:
    """Raise unless a member gives a dense tensor to the collective of that name."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} takes a tensor, but got {type(tensor).__name__}")
    if tensor.is_nested:
        raise ValueError(f"{name} takes a dense tensor, but got a nested one; pad it first")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name} takes a dense tensor, but got one of layout {tensor.layout}; pass x.to_dense()"
        )


def refuse_in_replica(name: str) -> None:
    """Raise where a replica cannot meet the others. See Note [No collective in backward]."""
    if _has_checkpoint_frame() or _has_checkpoint_hooks():
        raise RuntimeError(
            f"{name} over replicas was called in a part of the module under activation "
            "checkpointing, which runs it again in backward, where the other replicas cannot take "
            "part; leave the collective out of the checkpointed part, or put the checkpoint "
            "around the whole wrapper"
        )
    refuse_in_backward(name)
    refuse_transforms(name)


def refuse_transforms(name: str) -> None:
    """Raise where somebody follows tensors, which cannot follow those of other members."""
    if torch_internals.transforms_active() or torch_internals.tracing_state() is not None:
        raise RuntimeError(
            f"{name} over replicas was called under a torch.func transform or torch.jit.trace, "
            "which cannot follow tensors of other members; call it outside of the transformed "
            "function"
        )


def refuse_in_backward(name: str) -> None:
    """Raise in backward, where a group of one may have had more members in forward.

    See Note [No collective in backward].
    """
    if torch_internals.current_graph_task_id() != -1 and not _has_checkpoint_frame():
        raise RuntimeError(
            f"{name} over replicas was called in backward, by a hook or by code that runs forward "
            "again, where no replica meets the others; call it in forward, use "
            "torch.utils.checkpoint to run forward again, or name a process group"
        )


def _has_checkpoint_frame() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def _has_checkpoint_hooks() -> bool:
    hooks = torch_internals.top_saved_tensors_hooks(True)
    if hooks is None:
        return False
    if getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:
        return True
    # Others may lie above them.
    torch_internals.pop_saved_tensors_hooks()
    try:
        return _has_checkpoint_hooks()
    finally:
        torch_internals.push_saved_tensors_hooks(*hooks)
