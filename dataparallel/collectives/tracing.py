"""Whether calls are being recorded or transformed."""

from __future__ import annotations

from typing import Any

import torch


def is_tracing() -> bool:
    """Whether calls are being recorded or transformed, so that results cannot be wrapped.

    True while torch compiles or exports, under fake, proxy and functional modes, and within the
    transforms of ``torch.func``. An operator has to wait for the result then.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    if torch._C._len_torch_dispatch_stack() and _has_tracing_mode():
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def _has_tracing_mode() -> bool:
    keys = torch._C._TorchDispatchModeKey
    find: Any = torch._C._get_dispatch_mode
    return any(find(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
