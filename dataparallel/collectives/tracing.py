"""Whether calls are being recorded or transformed."""

from __future__ import annotations

import torch

from dataparallel import torch_internals


def is_tracing() -> bool:
    """Whether calls are being recorded or transformed, so that results cannot be wrapped.

    True while torch compiles or exports, under fake, proxy and functional modes, and within the
    transforms of ``torch.func``. An operator has to wait for the result then.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    if torch_internals.num_dispatch_modes() and _has_tracing_mode():
        return True
    if torch_internals.is_key_included(torch_internals.PRE_DISPATCH):
        return True
    return torch_internals.innermost_transform() is not None


def _has_tracing_mode() -> bool:
    keys = torch_internals.TorchsModes
    find = torch_internals.torchs_dispatch_mode
    return any(find(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
