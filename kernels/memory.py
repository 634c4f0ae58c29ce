"""What a tensor's memory looks like: what kernels can read, and what overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.torch_internals import is_transformed

#: Of tensors that stand for nothing else; subclasses may wrap others, or have no memory.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are in memory as they are, at addresses.

    Not so for sparse tensors, lazy conjugates and negatives, and for subclasses and the tensors of
    function transforms, which may wrap others or stand for what is not there; nor where elements
    lie at addresses that are no multiples of their size, as in memory that is not torch's.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and not is_transformed(tensor)
        and tensor.layout == torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and lie_whole([tensor.data_ptr()], [tensor.dtype])
    )


def lie_whole(addresses: Sequence[int], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether elements lie at multiples of their size, as in all memory of torch's own.

    Args:
        addresses: Of tensors.
        dtypes: As many.
    """
    # The parts of a complex number lie alone.
    sizes = {dtype: dtype.itemsize // (1 + dtype.is_complex) for dtype in set(dtypes)}
    if len(sizes) == 1:
        (size,) = sizes.values()
        return not any(map((size - 1).__and__, addresses))
    return not any(a % sizes[dtype] for a, dtype in zip(addresses, dtypes, strict=True))


def mark_written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that a kernel has written to tensors, as each operation of torch does.

    It then refuses to use what it has saved of them.
    """
    # Those of inference have no version.
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(counted)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor fills its memory without gaps or overlaps, in any order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def lie_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two plain tensors of one shape have their elements in the same order."""
    if first.stride() == second.stride():
        return True
    # The stride of a dimension of one element says nothing.
    return all(
        size == 1 or one == other
        for size, one, other in zip(first.shape, first.stride(), second.stride(), strict=True)
    )


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two plain tensors have addresses in common, or could have: gaps count too."""
    if first.device != second.device or not first.numel() or not second.numel():
        return False
    return first.data_ptr() < _end(second) and second.data_ptr() < _end(first)


def _end(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
