"""Which operators of torch share memory, and which are made of others."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dataparallel import torch_internals

_aten = torch.ops.aten

#: What never reads memory and always shares it. Not ``_conj`` and ``_neg_view``: their result is
#: marked, and a wrapper of it would need the same mark.
VIEWS = frozenset(
    {
        torch_internals.reshape_alias,
        _aten.alias,
        _aten.as_strided,
        _aten.detach,
        _aten.diagonal,
        _aten.expand,
        _aten.permute,
        _aten.select,
        _aten.slice,
        _aten.split,
        _aten.split_with_sizes,
        _aten.squeeze,
        _aten.t,
        _aten.transpose,
        _aten.unbind,
        _aten.unfold,
        _aten.unsqueeze,
        _aten.view,
        _aten.view_as_complex,
        _aten.view_as_real,
    }
)


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether torch composes the operator of others for all tensors."""
    key = "CompositeImplicitAutograd"
    return bool(torch_internals.has_kernel(func.name(), key))
