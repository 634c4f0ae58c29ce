"""Collectives over a process group, launched and not waited for.

Each function makes the result's memory, launches, registers the work for that memory (see
``pending.py``), and returns. What has to be done after the backend has finished, such as copying
into another layout, is done by whoever waits.

Note [What is sent]
~~~~~~~~~~~~~~~~~~~
A backend reads what it sends some time after the launch. The caller may write to its tensor as soon
as the call has returned, so what is sent is a copy: in the memory of the result where the backend
works in place, else contiguous and where the backend can read it (on the host for devices that it
does not take). That copy is the only one made at a launch.

What is only moved travels as bytes, if its dtype is not one that every operation of gloo takes.
What is reduced travels as ``wires.py`` says, which is right for NaN, for bool, and for
dtypes that the backend lacks. A reduce_scatter brings the chunks to where they belong and reduces
them there, in the order of the ranks: half of what gloo would send for it, and for any operation.

What the backend writes to is seen by it through ``Tensor.data``: autograd would take a write that
it does after the launch for a change of the result.

Gloo ends a process that gets more bytes than it expects, and a broadcast to a longer tensor leaves
its end unwritten. So it is compared with what the other processes come with; see
Note [Checked collectives].

Nothing is launched for tensors without elements, which all processes know to be such.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives import pending
from dataparallel.collectives.group_lookup import group_of as group_of
from dataparallel.collectives.process_checks import Call, checks_of
from dataparallel.collectives.process_work import ProcessWork, Start
from dataparallel.collectives.reductions import mean_of, reduce_terms
from dataparallel.collectives.wires import TAKEN, Reduction, Wire, plan_reduction

# Dtypes with which torch computes on the CPU. The others are added, and so on, as something else.
_COMPUTED = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)

# Gloo gathers no complex numbers.
_MOVED = frozenset(dtype for dtype in TAKEN if not dtype.is_complex)

_HOST = torch.device("cpu")

# For each group and device: where the backend works for a tensor there, and its name.
_backends: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[torch.device, tuple[torch.device, str]]
] = weakref.WeakKeyDictionary()


# --- reductions ------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, op: str, name: str) -> Tensor:
    """Launch; see ``functional.all_reduce``."""
    return _reduce("all_reduce", tensor, op, None, name)


def reduce(tensor: Tensor, op: str, root: int, name: str) -> Tensor:
    """Launch; see ``functional.reduce``."""
    return _reduce("reduce", tensor, op, root, name)


def _reduce(operation: str, tensor: Tensor, op: str, root: int | None, name: str) -> Tensor:
    group, tensor = _begun(operation, tensor, name, op if root is None else f"{op} to {root}")
    result = tensor.new_empty(tensor.shape)
    if tensor.numel() == 0:
        return result
    place, backend = _place_and_backend(group, tensor.device)
    plan, of_torch = _plan(op, tensor.dtype, backend)
    wire, size = plan.wire, group.size()
    direct = place == tensor.device and _is_plain(wire, tensor) and not plan.gathered
    if direct:
        sent = result.data.copy_(tensor)
    else:
        sent = tensor.new_empty(tensor.numel(), dtype=wire.dtype, device=place)
        wire.load(sent, tensor)
    here = root is None or group.rank() == root
    parts: list[Tensor] = []
    if plan.gathered:
        parts = [torch.empty_like(sent) for _ in range(size if here else 0)]
        start = _gathering(_as_moved(sent), [_as_moved(part) for part in parts], root, group)
    elif root is None:
        start = partial(dist.all_reduce, sent, of_torch, group)
    else:
        start = partial(dist.reduce, sent, group=group, group_dst=root, op=of_torch)

    def finish() -> None:
        if here:
            total = reduce_terms(plan.op, parts) if plan.gathered else sent
            _deliver(wire, total, result, op, size)
        else:
            result.zero_()

    idle = direct and here and op != "avg"
    return _launched(group, operation, tensor, sent, result, start, None if idle else finish)


def reduce_scatter(tensor: Tensor, op: str, dim: int, name: str) -> Tensor:
    """Launch; see ``functional.reduce_scatter_tensor``."""
    group, tensor = _begun("reduce_scatter_tensor", tensor, name, f"{op}, dim {dim}")
    size = group.size()
    chunks = _chunks(tensor, dim, size)
    result = tensor.new_empty(chunks.shape[1:])
    if tensor.numel() == 0:
        return result
    place, backend = _place_and_backend(group, tensor.device)
    plan, of_torch = _plan(op, tensor.dtype, backend)
    wire = Wire(tensor.dtype) if tensor.dtype in _COMPUTED else plan.wire
    sent = tensor.new_empty(tensor.numel(), dtype=wire.dtype, device=place)
    wire.load(sent, chunks)
    # See Note [What is sent].
    here = backend == "gloo" or wire != plan.wire or plan.gathered
    arrived = torch.empty_like(sent) if here else sent.new_empty(result.numel())
    if here:
        start = partial(dist.all_to_all_single, _as_moved(arrived), _as_moved(sent), group=group)
    else:
        start = partial(_renamed("reduce_scatter"), arrived, sent, of_torch, group)

    def finish() -> None:
        total = arrived
        if here:
            in_place = place == result.device and _is_plain(wire, result)
            terms, out = arrived.chunk(size), result.data.view(-1) if in_place else None
            total = reduce_terms("sum" if op == "avg" else op, terms, out=out)
        _deliver(wire, total, result, op, size)

    return _launched(group, "reduce_scatter_tensor", tensor, sent, result, start, finish)


@functools.lru_cache
def _plan(op: str, dtype: torch.dtype, backend: str) -> tuple[Reduction, Any]:
    """How the backend reduces, and torch's name of the operation."""
    if op == "avg" and dtype == torch.uint64:
        raise ValueError(
            "the operation 'avg' has no mean of torch.uint64; convert to int64, or use sum"
        )
    like = torch.empty(0, dtype=dtype, device=_HOST)
    plan = plan_reduction("sum" if op == "avg" else op, like, backend)
    return plan, getattr(dist.ReduceOp, plan.op.upper())


def _is_plain(wire: Wire, tensor: Tensor) -> bool:
    """Whether what travels is what the tensor holds."""
    return wire.dtype == tensor.dtype and wire.op is None


def _deliver(wire: Wire, total: Tensor, result: Tensor, op: str, size: int) -> None:
    """Bring what was reduced to the result. Changes ``total``."""
    values = wire.restore(total, result)
    if op == "avg":
        # The sum of narrow integers wraps around before it is divided.
        values = mean_of(values.to(result.dtype) if result.dtype in _COMPUTED else values, size)
    if values.data_ptr() != result.data_ptr():
        result.copy_(values)


# --- copies ----------------------------------------------------------------------------------


def broadcast(tensor: Tensor, root: int, name: str) -> Tensor:
    """Launch; see ``functional.broadcast``."""
    group, tensor = _begun("broadcast", tensor, name, f"from {root}")
    result = tensor.new_empty(tensor.shape)
    if tensor.numel() == 0:
        return result
    buffer, finish = _buffer_for(result, group)
    if group.rank() == root:
        buffer.copy_(tensor)
    sent = _as_moved(buffer.view(-1))
    start = partial(dist.broadcast, sent, group=group, group_src=root)
    return _launched(group, "broadcast", tensor, sent, result, start, finish)


def all_gather(tensor: Tensor, dim: int, name: str) -> Tensor:
    """Launch; see ``functional.all_gather_tensor``."""
    group, tensor = _begun("all_gather_tensor", tensor, name, f"dim {dim}")
    size = group.size()
    result = tensor.new_empty(_times(tensor.shape, dim, size))
    if tensor.numel() == 0:
        return result
    buffer, finish = _buffer_for(_chunks(result, dim, size), group)
    buffer[group.rank()].copy_(tensor)
    everything = _as_moved(buffer.view(-1))
    sent = everything.chunk(size)[group.rank()]
    start = partial(_renamed("all_gather"), everything, sent, group)
    return _launched(group, "all_gather_tensor", tensor, sent, result, start, finish)


def gather(tensor: Tensor, dim: int, root: int, name: str) -> Tensor:
    """Launch; see ``functional.gather``."""
    group, tensor = _begun("gather", tensor, name, f"dim {dim} to {root}")
    size = group.size()
    here = group.rank() == root
    result = tensor.new_empty(_times(tensor.shape, dim, size if here else 0))
    if tensor.numel() == 0:
        return result
    parts: Sequence[Tensor] = ()
    finish = None
    if here:
        buffer, finish = _buffer_for(_chunks(result, dim, size), group)
        buffer[root].copy_(tensor)
        parts = _as_moved(buffer.view(-1)).chunk(size)
        sent = parts[root]
    else:
        sent = _sent_copy(tensor, group)
    start = _gathering(sent, parts, root, group)
    return _launched(group, "gather", tensor, sent, result, start, finish)


def _gathering(
    sent: Tensor, parts: Sequence[Tensor], root: int | None, group: dist.ProcessGroup
) -> Start:
    if root is None:
        return partial(dist.all_gather, list(parts), sent, group)
    return partial(dist.gather, sent, list(parts) or None, group=group, group_dst=root)


def scatter(tensor: Tensor, dim: int, root: int, name: str) -> Tensor:
    """Launch; see ``functional.scatter``."""
    group, tensor = _begun("scatter", tensor, name, f"dim {dim} from {root}")
    size = group.size()
    chunks = _chunks(tensor, dim, size)
    result = tensor.new_empty(chunks.shape[1:])
    if tensor.numel() == 0:
        return result
    here = group.rank() == root
    parts = list(_sent_copy(chunks, group).chunk(size)) if here else None
    buffer, finish = _buffer_for(result, group)
    arrived = _as_moved(buffer.view(-1))
    start = partial(dist.scatter, arrived, parts, group=group, group_src=root)
    return _launched(group, "scatter", tensor, arrived, result, start, finish)


def all_to_all(tensor: Tensor, gets: Sequence[int], gives: Sequence[int], name: str) -> Tensor:
    """Launch; see ``functional.all_to_all_single``."""
    group, tensor = _begun("all_to_all_single", tensor, name, "", gives, gets)
    row = tensor.shape[1:]
    result = tensor.new_empty((sum(gets), *row))
    if row.numel() == 0:
        return result
    sent = _sent_copy(tensor, group)
    buffer, finish = _buffer_for(result, group)
    arrived = _as_moved(buffer.view(-1))
    scale = row.numel() * tensor.element_size() // sent.element_size()
    gets, gives = [rows * scale for rows in gets], [rows * scale for rows in gives]
    start = partial(dist.all_to_all_single, arrived, sent, gets, gives, group)
    return _launched(group, "all_to_all_single", tensor, sent, result, start, finish)


# --- what they have in common ----------------------------------------------------------------


def _begun(
    operation: str,
    tensor: Tensor,
    name: str,
    option: str,
    gives: Sequence[int] = (),
    gets: Sequence[int] = (),
) -> tuple[dist.ProcessGroup, Tensor]:
    """Check the tensor, and that the other processes come with the same; and find the group."""
    group = group_of(name)
    if tensor.layout != torch.strided:
        raise ValueError(
            f"collectives take strided tensors, but got one of shape {tuple(tensor.shape)} with "
            f"the layout {tensor.layout}; use its to_dense()"
        )
    # Each process may have another number of rows for the others.
    shape = tensor.shape[1:] if gets else tensor.shape
    checks_of(group).before(Call(operation, option, tensor.dtype, shape, "", gives, gets))
    return group, tensor.detach()


def _launched(
    group: dist.ProcessGroup,
    operation: str,
    given: Tensor,
    sent: Tensor,
    result: Tensor,
    start: Start,
    finish: Callable[[], object] | None,
) -> Tensor:
    work = ProcessWork(group, operation, given, sent, result.device, start, finish)
    pending.register(result, work)
    return result


def _place_and_backend(group: dist.ProcessGroup, device: torch.device) -> tuple[torch.device, str]:
    """Where the backend can read and write for a tensor on ``device``, and its name."""
    known = _backends.get(group)
    if known is None:
        known = _backends.setdefault(group, {})
    found = known.get(device)
    if found is None:
        taken = [each.type for each in torch_internals.group_devices(group)]
        if device.type not in taken and _HOST.type not in taken:
            raise ValueError(
                f"the process group {group.group_name!r} has backends for {', '.join(taken)}, but "
                f"the tensor is on {device}; move it there, or make the group with one for the "
                "cpu, as in init_process_group('cpu:gloo,cuda:nccl')"
            )
        place = device if device.type in taken else _HOST
        found = known[device] = place, str(torch_internals.group_backend(group, place).name())
    return found


def _as_moved(flat: Tensor) -> Tensor:
    """See Note [What is sent]."""
    return flat if flat.dtype in _MOVED else flat.view(torch.uint8)


def _renamed(operation: str) -> Any:
    """A function of torch that newer versions have under another name; there the old one warns."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{operation}_single", None) or getattr(dist, old[operation])


def _sent_copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    copy = tensor.new_empty(tensor.shape, device=_place_and_backend(group, tensor.device)[0]).copy_(
        tensor
    )
    return _as_moved(copy.view(-1))


def _buffer_for(
    result: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Callable[[], object] | None]:
    """Contiguous memory for the backend, and what brings it to the result afterwards.

    That is the result's own memory where the backend can write to it.
    """
    place, _ = _place_and_backend(group, result.device)
    if place == result.device and result.is_contiguous():
        return result.data, None
    buffer = result.new_empty(result.shape, device=place)
    return buffer, lambda: result.copy_(buffer)


def _chunks(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A view of equal chunks along ``dim``, stacked in front."""
    shape = list(tensor.shape)
    shape[dim : dim + 1] = [size, shape[dim] // size]
    return tensor.view(shape).movedim(dim, 0)


def _times(shape: torch.Size, dim: int, factor: int) -> list[int]:
    found = list(shape)
    found[dim] *= factor
    return found
