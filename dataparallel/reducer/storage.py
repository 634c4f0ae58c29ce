"""One flat tensor for the gradients of a bucket, and the view of each parameter in it.

Note [Gradient layout contract]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A bucket view has the strides of its parameter if that is dense and does not overlap itself, else it
is contiguous. This is what the autograd engine makes of a gradient that it accumulates, so adding
one to the other is a pass over memory in order, and an optimizer's fused step finds both alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.kernels import BucketLayout


class BucketStorage:
    """A flat tensor and views of it, one per parameter.

    Example::

        storage = BucketStorage([weight, bias])
        storage.views[1].shape == bias.shape

    Args:
        parameters: What the views are for, of one dtype and on one device.
        dtype: Of the flat tensor. Default: that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        first = parameters[0]
        size = sum(like.numel() for like in parameters)
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.zeros(size, dtype=dtype or first.dtype, device=first.device)
            self.views = _make_views(self.flat, parameters)
        #: The places of the views, for the kernels.
        self.layout = BucketLayout(self.flat, self.views)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor fills its memory without gaps or overlaps, in any order."""
    # This is what decides whether torch keeps strides in new tensors.
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _make_views(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See Note [Gradient layout contract]."""
    views = []
    offset = 0
    for like in likes:
        part = flat[offset : offset + like.numel()]
        if is_dense(like):
            views.append(part.as_strided(like.size(), like.stride(), part.storage_offset()))
        else:
            views.append(part.view(like.shape))
        offset += like.numel()
    return views
