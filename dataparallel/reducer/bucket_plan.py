"""Which gradients are reduced together, and in which order: decided from sizes alone.

Note [Order of buckets]
~~~~~~~~~~~~~~~~~~~~~~~
Buckets are launched in the order of their numbers, in every process. One that waits for a late
gradient holds up those behind it, so they are in the order in which they are complete. Until a
backward has shown that order, gradients are taken to arrive from the last parameter to the first.

Two buckets should be small: the first, so that communication begins early, and the last, since
nothing is left to hide it. Torch gives the smaller limit to one of them. As long as the order of
arrival is not known, it fills buckets from the first parameter on and then reverses their list: the
last bucket has the smaller limit. Afterwards it fills them in the order of arrival: the first has
it. The plan here does the same. A limit is where a bucket ends that has reached it, so a bucket can
be much larger; the one that ``small_last`` puts at the end cannot.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from dataparallel.errors import listed

#: The limit of a bucket that has none: that of a gradient which is expected to be sparse.
NO_LIMIT = 0

_Group: TypeAlias = tuple[torch.dtype, torch.device]

_SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which they are launched. See Note [Order of buckets].

    Attributes:
        buckets: Indices of parameters, bucket by bucket; each index is in exactly one.
        limits: Per bucket, the bytes with which it was full; 0 for a gradient that is expected to
            be sparse, which is alone in its bucket.
        bytes: Per bucket, the bytes of its parameters.
    """

    buckets: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    bytes: tuple[int, ...]

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self.buckets)

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Per parameter, the number of its bucket and its position in the bucket."""
        found = {
            index: (number, position)
            for number, bucket in enumerate(self.buckets)
            for position, index in enumerate(bucket)
        }
        return tuple(found[index] for index in range(len(found)))

    def bucket_of(self, index: int) -> int:
        """The number of the bucket that has the parameter ``index``."""
        return self.places[index][0]


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
        bucket_size_limits: Bytes with which a bucket is full; the tensor that fills it belongs to
            it. The buckets of each dtype and device use the limits one after another, and the last
            one for all further buckets.
        expect_sparse_gradient: Whether the gradient of a tensor will be sparse; it is then alone in
            its bucket. One entry per tensor, found by the tensor's index. Default: none will be.
        tensor_indices: The index of each tensor; it says that the tensors are in the order in which
            their gradients arrive. Default: 0, 1, 2 and so on, in no particular order.

    Returns:
        A list of indices for each bucket, and the limit of each bucket, 0 for a sparse gradient.
        The buckets are sorted by their smallest index. With ``tensor_indices`` they are in the
        order in which they became full, and behind them are those that did not, in the order of
        their last tensors.

    Raises:
        ValueError: There are no tensors or no limits, a limit is negative, tensors are sparse,
            indices occur twice or have no expectation, or lengths differ.

    Source: ``compute_bucket_assignment_by_size`` in torch's ``reducer.cpp``.
    """
    _check_tensors(tensors, "tensors")
    limits = _checked_limits(bucket_size_limits, "bucket_size_limits")
    indices = tuple(tensor_indices or range(len(tensors)))
    _check_length(indices, len(tensors), "tensor_indices")
    sparse = _expected_sparse(expect_sparse_gradient, len(tensors), "expect_sparse_gradient")
    bound = len(tensors) if expect_sparse_gradient else sys.maxsize
    _check_indices(indices, bound, "tensor_indices")

    full, others = _fill(zip(indices, tensors, strict=True), limits, sparse)
    buckets = [*full, *others]
    if not tensor_indices:
        buckets.sort(key=lambda bucket: min(bucket.indices))
    return [bucket.indices for bucket in buckets], [bucket.limit for bucket in buckets]


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    *,
    first_bytes: int,
    cap_bytes: int | Sequence[int],
    expect_sparse: Sequence[bool] | None = None,
    order: Sequence[int] | None = None,
    small_last: bool = False,
) -> BucketPlan:
    """Decide which gradients are reduced together. See Note [Order of buckets].

    Example::

        plan = plan_buckets([weight, bias], first_bytes=2**20, cap_bytes=25 * 2**20)
        plan.buckets    # ((0, 1),), since both are small

    Args:
        parameters: At least one dense tensor, in registration order.
        first_bytes: The smaller limit; if it is not below ``cap_bytes``, all limits are the same.
        cap_bytes: The limit of the other buckets, in bytes. Or a list: the limits of the buckets of
            each dtype and device, in the order of launching, the last one for all further buckets;
            then ``first_bytes`` is used for ``small_last`` alone.
        expect_sparse: Whether the gradient of a parameter will be sparse. Default: none will be.
        order: Every index once, in the order in which the gradients arrive. Default: not known.
        small_last: Put what arrives last into a bucket of its own, as much as fits into
            ``first_bytes``, and at least one tensor. If that has several dtypes or devices, there
            is one bucket for each. Sparse gradients do not count. Default: False.

    Returns:
        The plan; the same in every process where dtypes, sizes and the arguments are.

    Raises:
        ValueError: There are no parameters, lengths differ, a limit is negative, or ``order`` lacks
            an index.
    """
    _check_tensors(parameters, "parameters")
    count = len(parameters)
    (first,) = _checked_limits(first_bytes, "first_bytes")
    listed = isinstance(cap_bytes, Sequence)
    caps = _checked_limits(cap_bytes, "cap_bytes")
    sparse = _expected_sparse(expect_sparse, count, "expect_sparse")
    arrival = tuple(reversed(range(count)) if order is None else order)
    _check_length(arrival, count, "order")
    _check_indices(arrival, count, "order")

    last = _last_to_arrive(parameters, arrival, sparse, first) if small_last else frozenset[int]()
    backwards = order is None and not listed
    # Backwards, the smaller limit is that of the last bucket, which there is already.
    has_first = not listed and first < caps[0] and not (backwards and small_last)
    sequence = arrival[::-1] if backwards else arrival
    found = _fill(
        ((index, parameters[index]) for index in sequence if index not in last),
        (first, *caps) if has_first else caps,
        sparse,
    )
    # One bucket for each group, since none is ever full.
    ends = _fill(((i, parameters[i]) for i in sequence if i in last), (sys.maxsize,), sparse)
    small = [_Bucket(bucket.indices, first) for bucket in ends.others]
    return _in_order(parameters, [*found.full, *found.others, *small], arrival)


class _Bucket(NamedTuple):
    indices: list[int]
    limit: int


class _Filled(NamedTuple):
    full: list[_Bucket]
    others: list[_Bucket]


def whole_order(arrived: Sequence[int], count: int) -> list[int]:
    """The order of all parameters, from that in which some have arrived, maybe several times."""
    order = list(dict.fromkeys(arrived))
    return order + sorted(set(range(count)).difference(order), reverse=True)


def _fill(
    tensors: Iterable[tuple[int, torch.Tensor]], limits: Sequence[int], sparse: AbstractSet[int]
) -> _Filled:
    """The buckets that became full, in this order, and the others in the order of their ends."""
    full: list[_Bucket] = []
    filling: dict[_Group, tuple[_Bucket, int]] = {}
    num_full: Counter[_Group] = Counter()
    for index, tensor in tensors:
        if index in sparse:
            full.append(_Bucket([index], NO_LIMIT))
            continue
        group = (tensor.dtype, tensor.device)
        limit = limits[min(num_full[group], len(limits) - 1)]
        # Taken out and put in again, a group comes behind those that had their last tensor before.
        bucket, size = filling.pop(group, (_Bucket([], limit), 0))
        bucket.indices.append(index)
        size += _num_bytes(tensor)
        if size >= limit:
            full.append(bucket)
            num_full[group] += 1
        else:
            filling[group] = (bucket, size)
    return _Filled(full, [bucket for bucket, _ in filling.values()])


def _last_to_arrive(
    parameters: Sequence[torch.Tensor],
    arrival: Sequence[int],
    sparse: AbstractSet[int],
    max_bytes: int,
) -> frozenset[int]:
    """The longest end of the order of arrival that has no more bytes, but one tensor at least."""
    found: list[int] = []
    total = 0
    for index in reversed(arrival):
        if index in sparse:
            continue
        total += _num_bytes(parameters[index])
        if found and total > max_bytes:
            break
        found.append(index)
    return frozenset(found)


def _in_order(
    parameters: Sequence[torch.Tensor], buckets: Sequence[_Bucket], arrival: Sequence[int]
) -> BucketPlan:
    """The plan that has the buckets in the order in which their last gradients arrive."""
    when = {index: position for position, index in enumerate(arrival)}
    ordered = sorted(buckets, key=lambda bucket: max(when[index] for index in bucket.indices))
    return BucketPlan(
        buckets=tuple(tuple(bucket.indices) for bucket in ordered),
        limits=tuple(bucket.limit for bucket in ordered),
        bytes=tuple(sum(_num_bytes(parameters[i]) for i in bucket.indices) for bucket in ordered),
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- what is refused -------------------------------------------------------------------------


def _check_tensors(tensors: Sequence[torch.Tensor], name: str) -> None:
    if not tensors:
        raise ValueError(f"{name} is empty; pass at least one tensor")
    sparse = [
        f"{name}[{position}] ({tensor.layout})"
        for position, tensor in enumerate(tensors)
        if tensor.layout in _SPARSE
    ]
    if sparse:
        raise ValueError(
            f"No support for sparse tensors, but sparse are {listed(sparse)}; a dense parameter "
            "may have sparse gradients, which are announced by expecting them"
        )


def _expected_sparse(flags: Sequence[bool] | None, count: int, name: str) -> frozenset[int]:
    """The indices with a true flag; no flags are no such indices."""
    if not flags:
        return frozenset()
    _check_length(flags, count, name)
    return frozenset(index for index, flag in enumerate(flags) if flag)


def _checked_limits(limits: int | Sequence[int], name: str) -> tuple[int, ...]:
    limits = limits if isinstance(limits, Sequence) else (limits,)
    if not limits:
        raise ValueError(f"{name} is empty; pass at least one limit in bytes")
    wrong = [limit for limit in limits if not isinstance(limit, int) or limit < 0]
    if wrong:
        raise ValueError(
            f"{name} are whole numbers of bytes, 0 or more, but among them are "
            f"{listed(map(repr, wrong))}; MiB are to be multiplied by 2**20 and rounded"
        )
    return tuple(limits)


def _check_length(entries: Sequence[object], count: int, name: str) -> None:
    if len(entries) != count:
        raise ValueError(
            f"{name} has {len(entries)} entries, but there are {count} tensors; "
            "pass one entry per tensor"
        )


def _check_indices(indices: Sequence[int], bound: int, name: str) -> None:
    """Refuse what occurs twice or is not in ``range(bound)``."""
    repeated = [index for index, times in Counter(indices).items() if times > 1]
    if repeated:
        raise ValueError(
            f"{name} has {listed(map(str, sorted(repeated)))} more than once; each tensor has "
            "an index of its own"
        )
    outside = [index for index in indices if not 0 <= index < bound]
    if outside:
        upper = "" if bound == sys.maxsize else f" and below {bound}"
        raise ValueError(
            f"{name} has {listed(map(str, outside))}, but the index of a tensor is at least 0"
            f"{upper}"
        )
