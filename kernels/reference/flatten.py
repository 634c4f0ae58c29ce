"""Copies of tensors to and from a bucket, in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.kernels.dtypes import wide

# Up to this many elements, scaling all tensors in one call costs less than a pass over each; above
# it the other way round.
_SMALL = 2**14


def flatten(
    tensors: Sequence[torch.Tensor | None],
    scale: float,
    views: Sequence[torch.Tensor],
    bucket: torch.Tensor | None = None,
) -> None:
    """As :func:`dataparallel.kernels.flatten`, on views of a bucket.

    Args:
        tensors: As there.
        scale: As there.
        views: One for each tensor.
        bucket: What the views fill. Default: they may leave gaps.
    """
    if scale != 1 and bucket is not None and _are_small_and_alike(tensors, bucket):
        # Scaled in one pass, since a call for each would cost more.
        torch_internals.foreach_copy_(
            list(views), [tensor for tensor in tensors if tensor is not None]
        )
        bucket.mul_(scale)
        return
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is None:
            view.zero_()
    sources = [tensor for tensor in tensors if tensor is not None]
    _copy(_chosen(views, tensors), sources, scale)


def _are_small_and_alike(tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor) -> bool:
    return 0 < bucket.numel() <= _SMALL * len(tensors) and {bucket.dtype} == {
        None if tensor is None else tensor.dtype for tensor in tensors
    }


def unflatten(
    tensors: Sequence[torch.Tensor | None], scale: float, views: Sequence[torch.Tensor]
) -> None:
    """As :func:`dataparallel.kernels.unflatten`, on views of a bucket."""
    targets = [tensor for tensor in tensors if tensor is not None]
    _copy(targets, _chosen(views, tensors), scale)


def _chosen(
    views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The views of tensors that are not None."""
    return [view for view, tensor in zip(views, tensors, strict=True) if tensor is not None]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], scale: float) -> None:
    """Write scaled sources to targets, each value rounded once."""
    if scale != 1:
        targets, sources = _scale_on_the_way(targets, sources, scale)
    if targets:
        torch_internals.foreach_copy_(targets, sources)
        if scale != 1:
            torch_internals.foreach_mul_(targets, scale)


def _scale_on_the_way(
    targets: list[torch.Tensor], sources: list[torch.Tensor], scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy those that are not to be scaled in the target; returns the others."""
    dtypes = [tensor.dtype for tensor in targets]
    given = [tensor.dtype for tensor in sources]
    # A wider target takes the value as it is; in another one it would be rounded twice, and the
    # call for several tensors rounds the scale to 16 bits as well.
    in_target = {
        pair: _computed_in(*pair) == pair[0] for pair in set(zip(dtypes, given, strict=True))
    }
    large = [target.numel() > _SMALL for target in targets]
    if all(in_target.values()) and not any(large):
        return targets, sources
    left: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source, is_large in zip(targets, sources, large, strict=True):
        pair = (target.dtype, source.dtype)
        if in_target[pair] and not (is_large and pair[0] == pair[1]):
            left[0].append(target)
            left[1].append(source)
        else:
            # Torch widens within a product of one dtype.
            computed = pair[0] if pair[0] == pair[1] else _computed_in(*pair)
            torch.mul(source.to(target.device, computed), scale, out=target)
    return left


@functools.cache
def _computed_in(target: torch.dtype, source: torch.dtype) -> torch.dtype:
    return torch.promote_types(wide(target), wide(source))
