"""The plan of buckets: the tensors that travel together, and their order, from dtypes and sizes.

Note [Order of buckets]
~~~~~~~~~~~~~~~~~~~~~~~
Buckets are launched in the order of their numbers, in every process. One that waits for a late
gradient holds up those behind it, so they are in the order in which they are complete. Until a
backward has shown that order, gradients are taken to arrive from the last parameter to the first.

Two buckets should be small: the first, so that communication begins early, and the last, since
nothing is left to hide it. Torch gives the smaller limit to one of them, and so does the plan here.
As long as the order of arrival is not known, it goes to the last: buckets are filled from the first
parameter on and their list is then reversed. Afterwards it goes to the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import torch

from dataparallel.errors import listed

_group, _nbytes = attrgetter("dtype", "device"), attrgetter("nbytes")

_Group: TypeAlias = tuple[torch.dtype, torch.device]

#: As in torch: the bucket that begins or ends a backward is small.
FIRST_BUCKET_BYTES = 2**20
#: Within a process. Small, because the gradients of a bucket and their copies are alive together:
#: what one bucket frees, the next one uses. Between 1 and 4 MiB no difference was measured, and the
#: larger of these packs more small tensors into one copy.
LOCAL_BUCKET_BYTES = 4 * 2**20


class Filled(NamedTuple):
    """The indices of tensors in a bucket, and the bytes with which it is full; 0 for a sparse."""

    indices: list[int]
    limit: int


def fill(
    tensors: Iterable[tuple[int, torch.Tensor]],
    limits: Sequence[int] = (FIRST_BUCKET_BYTES, LOCAL_BUCKET_BYTES),
    sparse: Collection[int] = (),
) -> list[Filled]:
    """Return the buckets that became full, in this order, then the others in the order of ends.

    Each dtype and device has buckets of its own, which take the limits one after another, and the
    last one for all further buckets. The tensor with which a bucket has reached its limit is the
    last one in it. Indices in ``sparse`` are alone.
    """
    tensors = list(tensors)
    # At the speed of C, for small models: one bucket has all.
    indices, members = zip(*tensors, strict=True) if tensors else ((), ())
    is_one = not sparse and len(set(map(_group, members))) == 1
    if is_one and sum(map(_nbytes, members)) < limits[0]:
        return [Filled(list(indices), limits[0])]
    full: list[Filled] = []
    filling: dict[_Group, tuple[Filled, int]] = {}
    num_full: Counter[_Group] = Counter()
    for index, tensor in tensors:
        if index in sparse:
            full.append(Filled([index], 0))
            continue
        group = (tensor.dtype, tensor.device)
        limit = limits[min(num_full[group], len(limits) - 1)]
        # Taken out and put in again, a group comes behind those that had their last tensor before.
        bucket, size = filling.pop(group, (Filled([], limit), 0))
        bucket.indices.append(index)
        size += tensor.numel() * tensor.element_size()
        if size >= limit:
            full.append(bucket)
            num_full[group] += 1
        else:
            filling[group] = (bucket, size)
    return [*full, *[bucket for bucket, _ in filling.values()]]


def compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    bucket_size_limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool] | None = None,
    tensor_indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Group tensors into buckets of one dtype and one device that are full with a number of bytes.

    Example::

        buckets, limits = compute_bucket_assignment_by_size([weight, bias], [2**20, 25 * 2**20])

    Args:
        tensors: At least one dense tensor; only dtypes, devices and sizes count.
        bucket_size_limits: Bytes with which a bucket is full, for the buckets of each dtype and
            device in turn; the last one is for all further buckets.
        expect_sparse_gradient: By index, whether the gradient of a tensor will be sparse; it is
            then alone in its bucket. Default: none will be.
        tensor_indices: The index of each tensor; they are then in the order in which gradients
            arrive. Default: 0, 1, 2 and so on, in no particular order.

    Returns:
        The indices in each bucket, and the limit of each bucket, 0 for a sparse gradient. The
        buckets are sorted by their smallest index. With ``tensor_indices`` those that became full
        come first, in this order, and then the others in the order of their last tensors.

    Raises:
        ValueError: There are no tensors or no limits, tensors are sparse, or lengths differ.

    Source: ``compute_bucket_assignment_by_size`` in torch's ``reducer.cpp``.
    """
    if not tensors or not bucket_size_limits:
        raise ValueError(
            f"pass at least one tensor and one limit in bytes, but there are {len(tensors)} "
            f"tensors and {len(bucket_size_limits)} limits"
        )
    for entries in (expect_sparse_gradient, tensor_indices):
        if entries and len(entries) != len(tensors):
            raise ValueError(
                f"there are {len(tensors)} tensors, and expect_sparse_gradient and tensor_indices "
                f"have one entry per tensor, but one of them has {len(entries)}"
            )
    faults = [
        f"tensors[{position}] ({tensor.layout})"
        for position, tensor in enumerate(tensors)
        if tensor.layout not in (torch.strided, torch.jagged)
    ]
    if faults:
        raise ValueError(
            f"No support for sparse tensors, but sparse are {listed(faults)}; a dense parameter "
            "may have sparse gradients, which are announced by expecting them"
        )
    indices = tensor_indices or range(len(tensors))
    sparse = {index for index, flag in enumerate(expect_sparse_gradient or ()) if flag}
    buckets = fill(zip(indices, tensors, strict=True), bucket_size_limits, sparse)
    if not tensor_indices:
        buckets.sort(key=lambda bucket: min(bucket.indices))
    return [bucket.indices for bucket in buckets], [bucket.limit for bucket in buckets]


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    *,
    first_bytes: int,
    cap_bytes: int | Sequence[int],
    expect_sparse: Sequence[bool] = (),
    order: Sequence[int] | None = None,
    parts: Sequence[Collection[int]] = (),
) -> list[list[int]]:
    """Group gradients into buckets, in the order of launching; each index is in one bucket.

    See Note [Order of buckets].
    ``first_bytes`` is the smaller limit, and is not used where ``cap_bytes`` lists the limits.
    ``order`` is that in which gradients arrive, if it is known. ``parts`` have buckets of their
    own, which are launched one part after another.
    """
    sparse = {index for index, flag in enumerate(expect_sparse) if flag}
    arrival = list(reversed(range(len(parameters)))) if order is None else list(order)
    when = {index: position for position, index in enumerate(arrival)}
    if isinstance(cap_bytes, int):
        limits = [first_bytes, cap_bytes] if first_bytes < cap_bytes else [cap_bytes]
        sequence = arrival[::-1] if order is None else arrival
    else:
        limits, sequence = list(cap_bytes), arrival
    buckets: list[Filled] = []
    for part in parts or [range(len(parameters))]:
        members = [(index, parameters[index]) for index in sequence if index in part]
        found = fill(members, limits, sparse)
        buckets += sorted(found, key=lambda bucket: max(when[index] for index in bucket.indices))
    return [bucket.indices for bucket in buckets]
