"""Moves between devices that autograd sees, each differentiable to any order.

Broadcast and ReduceAddCoalesced are each other's derivative, and so are Scatter and Gather. Names
and arguments are those of ``torch.nn.parallel._functions``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from dataparallel import comm, torch_internals
from dataparallel import devices as _devices

# In these functions `None` may stand for a tensor: the gradient of an output that nobody used, and,
# when the backward is itself differentiated, the input that this gradient then is.
_MaybeTensor = torch.Tensor | None


def apply_function(function: type[Function], *args: Any) -> Any:
    """``function.apply(*args)``, which torch leaves without types."""
    apply: Any = function.apply
    return apply(*args)


def apply_in_backward(function: type[_WithPlainWay], *args: Any) -> Any:
    """Apply a function to gradients; in another way where many are computed at once.

    ``is_grads_batched`` and vmap hand in gradients that stand for several, for which torch's own
    operations have rules, and functions like ours have none.
    """
    if any(isinstance(arg, torch.Tensor) and torch_internals.is_batched(arg) for arg in args):
        return function.plain(*args)
    return apply_function(function, *args)


class _WithPlainWay(Function):
    """A function that torch's operations can stand for, to any order too, but not coalesced."""

    @staticmethod
    def plain(*args: Any) -> Any:
        """The same as ``apply``."""
        raise NotImplementedError


def behind_own_nodes(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Arguments of a node whose first output is on ``device``: leaves elsewhere get one more node.

    The engine would else hand a leaf's gradient from the stream of one device to that of another,
    of which torch 2.11 warns. The node between has the leaf's own stream.

    Args:
        tensors: Arguments of the node.
        device: Where its first output is.
    """
    result = list(tensors)
    if not torch.is_grad_enabled():
        return result
    leaves: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if not (tensor.is_leaf and tensor.requires_grad):
            continue
        place = tensor.device
        if place != device and _devices.has_backward_thread(place):
            leaves.setdefault(place, []).append(position)
    for positions in leaves.values():
        same = apply_function(Identity, *[tensors[position] for position in positions])
        for position, tensor in zip(positions, same, strict=True):
            result[position] = tensor
    return result


class Identity(Function):
    """Tensors of one device as they are; see :func:`behind_own_nodes`."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        return grads


class Broadcast(_WithPlainWay):
    """Copies of several tensors on several devices; their gradients are summed over the devices.

    Example::

        w0, b0, w1, b1 = Broadcast.apply([0, 1], weight, bias)

    Args:
        devices: One device per replica; repeats allowed.
        tensors: Tensors of one device.

    Returns:
        A flat tuple: all tensors for the first device, then all for the second. Memory is shared on
        the tensors' own device and between slots of one device.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[_devices.DeviceLike], *tensors: _MaybeTensor
    ) -> tuple[_MaybeTensor, ...]:
        ctx.set_materialize_grads(False)
        slots = _devices.parse_devices(devices)
        present = [i for i, tensor in enumerate(tensors) if tensor is not None]
        sources = [tensor for tensor in tensors if tensor is not None]
        ctx.num_inputs = len(tensors)
        ctx.input_device = sources[0].device if sources else slots[0]
        flat: list[_MaybeTensor] = []
        constant: list[torch.Tensor] = []
        for copies in comm.broadcast_coalesced(sources, slots):
            of_replica: list[_MaybeTensor] = [None] * len(tensors)
            for i, copy in zip(present, copies, strict=True):
                of_replica[i] = copy
                if not ctx.needs_input_grad[1 + i]:
                    constant.append(copy)
            flat.extend(of_replica)
        ctx.mark_non_differentiable(*constant)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        sums = apply_in_backward(ReduceAddCoalesced, ctx.input_device, ctx.num_inputs, *grads)
        return (None, *sums)

    @staticmethod
    def plain(
        devices: Sequence[_devices.DeviceLike], *tensors: _MaybeTensor
    ) -> tuple[_MaybeTensor, ...]:
        slots = _devices.parse_devices(devices)
        return tuple(None if t is None else t.to(slot) for slot in slots for t in tensors)


class ReduceAddCoalesced(_WithPlainWay):
    """Sums of several tensors over the replicas, in replica order.

    Example::

        weight, bias = ReduceAddCoalesced.apply(0, 2, w0, b0, w1, b1)

    Args:
        destination: Device of the sums; ``None`` means that of the first tensor.
        num_inputs: How many tensors each replica gives.
        grads: A flat sequence: all tensors of the first replica, then all of the second. ``None``
            counts as zero.

    Returns:
        A tuple of ``num_inputs`` sums; ``None`` where no replica gives a tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, destination: _devices.DeviceLike | None, num_inputs: int, *grads: _MaybeTensor
    ) -> tuple[_MaybeTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_inputs = num_inputs
        ctx.origins = [None if grad is None else grad.device for grad in grads]
        first = next((grad.device for grad in grads if grad is not None), torch.device("cpu"))
        target = _devices.parse_output_device(destination, first)
        columns = [
            [grad for grad in grads[i::num_inputs] if grad is not None] for i in range(num_inputs)
        ]
        sums: list[_MaybeTensor] = [None] * num_inputs
        # Tensors that the same replicas give can be summed together.
        together: dict[tuple[torch.device, ...], list[int]] = {}
        for i, column in enumerate(columns):
            if column:
                together.setdefault(tuple(grad.device for grad in column), []).append(i)
        for givers, members in together.items():
            rows = [[columns[i][row] for i in members] for row in range(len(givers))]
            for i, total in zip(members, comm.reduce_add_coalesced(rows, target), strict=True):
                sums[i] = total
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(sums) if t is not None and not any(needed[i::num_inputs]))
        )
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        distinct = list(dict.fromkeys(device for device in ctx.origins if device is not None))
        copies = apply_in_backward(Broadcast, distinct, *grads) if distinct else ()
        result: list[_MaybeTensor] = []
        for position, origin in enumerate(ctx.origins):
            if origin is None:
                result.append(None)
            else:
                i = position % ctx.num_inputs
                result.append(copies[distinct.index(origin) * ctx.num_inputs + i])
        return (None, None, *result)

    @staticmethod
    def plain(
        destination: _devices.DeviceLike | None, num_inputs: int, *grads: _MaybeTensor
    ) -> tuple[_MaybeTensor, ...]:
        first = next((grad.device for grad in grads if grad is not None), torch.device("cpu"))
        target = _devices.parse_output_device(destination, first)
        columns = [
            [grad.to(target) for grad in grads[i::num_inputs] if grad is not None]
            for i in range(num_inputs)
        ]
        return tuple(functools.reduce(torch.add, column) if column else None for column in columns)


class Scatter(_WithPlainWay):
    """Chunks of one tensor on several devices; their gradients are gathered.

    Example::

        first, second = Scatter.apply([0, 1], None, 0, batch)

    Args:
        devices: One device per chunk; repeats allowed.
        chunk_sizes: Length of each chunk, or ``None`` to divide as ``torch.chunk`` does.
        dim: Dimension to split.
        tensor: The tensor to split. From pinned memory, copies overlap with what the devices do.

    Returns:
        A tuple of chunks, none of which shares memory with ``tensor``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[_devices.DeviceLike],
        chunk_sizes: Sequence[int] | None,
        dim: int,
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        ctx.input_device = tensor.device
        chunks = comm.scatter(tensor, devices, chunk_sizes, dim)
        # A replica may change its chunk in place. Shared memory would let it change what others
        # saved for backward, without their version counters noticing.
        return tuple(chunk.clone() if chunk.device == tensor.device else chunk for chunk in chunks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[_MaybeTensor, ...]:
        return None, None, None, apply_in_backward(Gather, ctx.input_device, ctx.dim, *grads)

    @staticmethod
    def plain(
        devices: Sequence[_devices.DeviceLike],
        chunk_sizes: Sequence[int],
        dim: int,
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        slots = _devices.parse_devices(devices)
        chunks = tensor.split_with_sizes(list(chunk_sizes), dim)
        return tuple(chunk.to(slot) for chunk, slot in zip(chunks, slots, strict=True))


class Gather(_WithPlainWay):
    """Several tensors concatenated on one device; the gradient is scattered.

    Example::

        batch = Gather.apply("cpu", 0, output_of_replica_0, output_of_replica_1)

    Args:
        destination: Device of the result; -1 means the CPU.
        dim: Dimension to concatenate along.
        tensors: One per replica, equal in all dimensions but ``dim``. Tensors without dimensions
            are stacked.

    Returns:
        One new tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, destination: _devices.DeviceLike | None, dim: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.origins = [tensor.device for tensor in tensors]
        ctx.stacked = all(tensor.dim() == 0 for tensor in tensors)
        ctx.dim = 0 if ctx.stacked else dim
        gathered = comm.gather(tensors, dim, destination)
        ctx.lengths = [1 if ctx.stacked else tensor.size(dim) for tensor in tensors]
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[_MaybeTensor, ...]:
        grads = apply_in_backward(Scatter, ctx.origins, ctx.lengths, ctx.dim, grad)
        if ctx.stacked:
            grads = tuple(part[0] for part in grads)
        return (None, None, *grads)

    @staticmethod
    def plain(
        destination: _devices.DeviceLike | None, dim: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        target = _devices.parse_output_device(destination, tensors[0].device)
        moved = [tensor.to(target) for tensor in tensors]
        if all(tensor.dim() == 0 for tensor in moved):
            return torch.stack(moved)
        return torch.cat(moved, dim)
