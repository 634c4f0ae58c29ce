"""Broadcast and sum of many tensors at once: few large copies instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dataparallel import devices as _devices
from dataparallel.comm.bucket_plan import fill
from dataparallel.comm.local import broadcast, check_same_device, reduce_add
from dataparallel.comm.packing import LARGE_BYTES, pack, packed_strides, unpack
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
        buffer_size: Bytes with which a buffer is full. Default: 10 MiB.

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
    results = [list(sources) for _ in slots]
    for members in _plan_groups(sources, buffer_size):
        parts = _broadcast_group([sources[i] for i in members], slots)
        for result, part in zip(results, parts, strict=True):
            for i, tensor in zip(members, part, strict=True):
                result[i] = tensor
    return results


def _plan_groups(tensors: Sequence[torch.Tensor], buffer_size: int) -> list[list[int]]:
    """Which tensors share a buffer; large ones and sparse ones are alone."""
    alone = {
        i for i, t in enumerate(tensors) if t.layout != torch.strided or t.nbytes >= LARGE_BYTES
    }
    return [group.indices for group in fill(enumerate(tensors), [buffer_size], alone)]


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
        buffer_size: Bytes with which a buffer is full. Default: 10 MiB.

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
    here, groups = _plan_sums(replicas, target, buffer_size)
    sums: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        # On one device nothing moves, and one call adds many small tensors.
        columns = list(zip(*replicas, strict=True))
        totals = add_columns([columns[i] for i in here], in_place=False)
        sums.update(zip(here, totals, strict=True))
        for group in groups:
            if len(group) == 1:
                totals = [reduce_add(columns[group[0]], target)]
            else:
                rows = [[replica[i] for i in group] for replica in replicas]
                totals = _reduce_packed(rows, target)
            sums.update(zip(group, totals, strict=True))
    return tuple([sums[i] for i in range(len(sums))])


def _plan_sums(
    replicas: Sequence[Sequence[torch.Tensor]], target: torch.device, buffer_size: int
) -> tuple[list[int], list[list[int]]]:
    """Which tensors are summed where they are, and which others travel together."""
    first = replicas[0]
    if len(replicas) == 1:
        return [], [[i] for i in range(len(first))]
    forms = [[(t.layout, t.shape, t.dtype) for t in replica] for replica in replicas]
    # Not sparse ones, and not those of which `reduce_add` says what is wrong with them.
    dense = [
        i
        for i, form in enumerate(zip(*forms, strict=True))
        if form[0][0] == torch.strided and form.count(form[0]) == len(form)
    ]
    here = dense
    if {t.device for replica in replicas for t in replica} != {target}:
        here = [i for i in dense if all([row[i].device == target for row in replicas])]
    if len(here) == len(first):
        return here, []
    apart = sorted(set(dense).difference(here))
    groups = _plan_groups([first[i] for i in apart], buffer_size)
    others = set(range(len(first))).difference(dense)
    return here, [*([apart[j] for j in group] for group in groups), *([i] for i in others)]


def _reduce_packed(
    rows: Sequence[Sequence[torch.Tensor]], target: torch.device
) -> list[torch.Tensor]:
    strides = [packed_strides(model) for model in rows[0]]
    for row in rows:
        check_same_device(row)
    flat = [pack(row, strides) for row in rows]
    return unpack(reduce_add(flat, target), [model.shape for model in rows[0]], strides)
