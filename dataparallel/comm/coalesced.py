"""Broadcast and sum of many tensors at once: few large copies instead of many small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from dataparallel import devices as _devices
from dataparallel.comm.local import broadcast, check_same_device, reduce_add
from dataparallel.comm.packing import pack, packed_strides, plan_groups, unpack
from dataparallel.comm.sums import add_columns

DEFAULT_BUFFER_SIZE = 10485760


def broadcast_coalesced(
    tensors: Iterable[torch.Tensor],
    devices: Iterable[_devices.DeviceLike],
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> list[list[torch.Tensor]]:
    """Copy several tensors to several devices, small ones together.

    Example::

        on_first, on_second = broadcast_coalesced([weight, bias], [0, 1])

    Args:
        tensors: Tensors of one device, of any dtypes, layouts and strides.
        devices: One device per result; repeats allowed.
        buffer_size: Most bytes that are copied together. Default: 10 MiB.

    Returns:
        For each device the list of tensors on it, in the order of ``tensors``. On the tensors' own
        device, and between slots of one device, memory is shared; see
        Note [Version counters of coalesced results].

    Raises:
        ValueError: A device doesn't exist, there is none, or the tensors are on several devices.
    """
    given = list(tensors)
    slots = _devices.parse_devices(list(devices))
    check_same_device(given)
    if not given or all(slot == given[0].device for slot in slots):
        return [[tensor.detach() for tensor in given] for _ in slots]
    sources = [tensor.detach() for tensor in given]
    results: list[list[torch.Tensor | None]] = [[None] * len(sources) for _ in slots]
    dense = [i for i, source in enumerate(sources) if source.layout == torch.strided]
    groups = plan_groups([sources[i] for i in dense], buffer_size)
    alone = [(i,) for i, source in enumerate(sources) if source.layout != torch.strided]
    for members in [*(tuple(dense[j] for j in group) for group in groups), *alone]:
        parts = _broadcast_group([sources[i] for i in members], slots)
        for result, part in zip(results, parts, strict=True):
            for i, tensor in zip(members, part, strict=True):
                result[i] = tensor
    return [_complete(result) for result in results]


def _broadcast_group(
    tensors: Sequence[torch.Tensor], slots: Sequence[torch.device]
) -> list[list[torch.Tensor]]:
    if len(tensors) == 1:
        return [[copy] for copy in broadcast(tensors[0], slots)]
    strides = [packed_strides(tensor) for tensor in tensors]
    shapes = [tensor.shape for tensor in tensors]
    home = tensors[0].device
    flat = pack(tensors, strides)
    results: list[list[torch.Tensor]] = []
    unpacked: dict[torch.device, list[torch.Tensor]] = {home: list(tensors)}
    for slot, copy in zip(slots, broadcast(flat, slots), strict=True):
        if slot not in unpacked:
            unpacked[slot] = unpack(copy, shapes, strides)
        results.append([tensor.detach() for tensor in unpacked[slot]])
    return results


def reduce_add_coalesced(
    inputs: Iterable[Iterable[torch.Tensor]],
    destination: _devices.DeviceLike | None = None,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> tuple[torch.Tensor, ...]:
    """Sum several tensors over the replicas, small ones together.

    Example::

        weight_grad, bias_grad = reduce_add_coalesced([[w0, b0], [w1, b1]], destination=0)

    Args:
        inputs: For each replica its tensors: as many in each, with equal sizes and dtypes.
        destination: Where the sums are. Default: the device of the first input.
        buffer_size: Most bytes that are copied together. Default: 10 MiB.

    Returns:
        One sum per tensor, in order, in new memory unless there is only one replica.
        See Note [Order of a sum].

    Raises:
        ValueError: Sizes, dtypes or counts disagree, or ``destination`` doesn't exist.
    """
    replicas = [list(tensors) for tensors in inputs]
    if not replicas:
        raise ValueError("reduce_add_coalesced needs the tensors of at least one replica, got none")
    counts = [len(replica) for replica in replicas]
    if len(set(counts)) > 1:
        raise ValueError(f"each replica must give as many tensors, but the replicas give {counts}")
    if not replicas[0]:
        return ()
    target = replicas[0][0].device if destination is None else _devices.parse_device(destination)
    sums: list[torch.Tensor | None] = [None] * len(replicas[0])
    with torch.no_grad():
        for members, reduce in _plan_sums(replicas, target, buffer_size):
            rows = [[replica[i] for i in members] for replica in replicas]
            for i, total in zip(members, reduce(rows, target), strict=True):
                sums[i] = total
    return tuple(_complete(sums))


_Reduce = Callable[[Sequence[Sequence[torch.Tensor]], torch.device], Sequence[torch.Tensor]]


def _plan_sums(
    replicas: Sequence[Sequence[torch.Tensor]], target: torch.device, buffer_size: int
) -> Iterator[tuple[Sequence[int], _Reduce]]:
    """Which tensors are summed together, and how."""
    here: list[int] = []
    elsewhere: list[int] = []
    alone: list[int] = []
    for i, column in enumerate(zip(*replicas, strict=True)):
        first = column[0]
        if len(column) == 1 or not all(
            tensor.layout == torch.strided
            and tensor.shape == first.shape
            and tensor.dtype == first.dtype
            for tensor in column
        ):
            # Sparse tensors, and those of which `reduce_add` says what is wrong with them.
            alone.append(i)
        elif all(tensor.device == target for tensor in column):
            here.append(i)
        else:
            elsewhere.append(i)
    if here:
        yield here, _reduce_here
    for group in plan_groups([replicas[0][i] for i in elsewhere], buffer_size):
        if len(group) == 1:
            alone.append(elsewhere[group[0]])
        else:
            yield [elsewhere[j] for j in group], _reduce_packed
    for i in alone:
        yield [i], _reduce_alone


def _reduce_alone(
    rows: Sequence[Sequence[torch.Tensor]], target: torch.device
) -> Sequence[torch.Tensor]:
    return [reduce_add([tensor for (tensor,) in rows], target)]


def _reduce_here(
    rows: Sequence[Sequence[torch.Tensor]], target: torch.device
) -> Sequence[torch.Tensor]:
    """On one device nothing moves, and one call adds many small tensors."""
    return add_columns(list(zip(*rows, strict=True)), in_place=False)


def _reduce_packed(
    rows: Sequence[Sequence[torch.Tensor]], target: torch.device
) -> Sequence[torch.Tensor]:
    strides = [packed_strides(model) for model in rows[0]]
    for row in rows:
        check_same_device(row)
    flat = [pack(row, strides) for row in rows]
    return unpack(reduce_add(flat, target), [model.shape for model in rows[0]], strides)


def _complete(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    complete = [tensor for tensor in tensors if tensor is not None]
    return complete
