"""Several tensors in one flat buffer, and out of it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Bytes from which a tensor is copied on its own. Packing spares a tensor the fixed cost of a copy
#: and costs two more passes over its memory; from this size on the passes are what costs more.
LARGE_BYTES = 256 * 2**10


def packed_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps that keep the order of dimensions in memory (channels_last, say)."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def memory_order(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """All elements as one dimension, in the order in which packed ``strides`` lay them out.

    A view where the tensor has these strides, else a copy.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.stride() != tuple(strides):
        laid_out = torch.empty_strided(
            tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device
        )
        tensor = laid_out.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def pack(tensors: Sequence[torch.Tensor], strides: Sequence[Sequence[int]]) -> torch.Tensor:
    """One flat tensor with the elements of ``tensors``, of one dtype and device, in order."""
    flat = [memory_order(tensor, s) for tensor, s in zip(tensors, strides, strict=True)]
    return torch.cat(flat)


def unpack(
    flat: torch.Tensor, shapes: Sequence[torch.Size], strides: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The tensors in a flat buffer: they share its memory.

    See Note [Version counters of coalesced results].
    """
    tensors = []
    offset = flat.storage_offset()
    for shape, stride in zip(shapes, strides, strict=True):
        tensors.append(flat.as_strided(shape, tuple(stride), offset).data)
        offset += shape.numel()
    return tensors


# Note [Version counters of coalesced results]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Views of one buffer share its version counter: an in-place change of one parameter would then
# count as a change of all, and backward would refuse tensors that nobody touched. The results
# occupy disjoint parts of the buffer and the buffer itself is never handed out, so each gets a
# counter of its own (`.data`).
