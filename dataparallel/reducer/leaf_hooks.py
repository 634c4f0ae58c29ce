"""Hooks on leaves that do not keep their owner alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch


class LeafHooks:
    """The hooks of one owner, called when a gradient was accumulated.

    The garbage collector does not see what a hook of a tensor holds, so hooks hold their owner
    weakly.

    Example::

        hooks = LeafHooks(self)
        hooks.add(leaf, MyClass.on_gradient, index)     # self.on_gradient(index, leaf)
        hooks.remove_all()

    Args:
        owner: Whose methods are called.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __len__(self) -> int:
        """How many hooks there are."""
        return len(self._handles)

    def add(self, leaf: torch.Tensor, method: Callable[..., None], *arguments: Any) -> None:
        """Call ``method`` of the owner with ``arguments`` and the leaf."""
        # torch declares no types for it.
        register: Any = torch.Tensor.register_post_accumulate_grad_hook
        hook = functools.partial(_call, self._owner, method, *arguments)
        self._handles.append(register(leaf, hook))

    def remove_all(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _call(owner: weakref.ref[Any], method: Callable[..., None], *arguments: Any) -> None:
    found = owner()
    if found is not None:
        method(found, *arguments)
