"""Which optimizers step the parameters of a module, and when they do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from dataparallel.threads.timeline import Timeline

# A step may run another one: that of a base class, or of an optimizer within an optimizer.
_MAX_NESTED = 8


class _Begun(threading.local):
    """Per thread the spans that have begun: an optimizer may step another one."""

    def __init__(self) -> None:
        self.stack: list[tuple[Optimizer, AbstractContextManager[object]]] = []


class OptimizerSpans:
    """Tells a timeline when an optimizer steps a parameter of a module.

    Torch calls the same hooks for all optimizers; those of other modules are left out.

    Example::

        spans = OptimizerSpans(model.timeline, model)
        ...
        spans.remove()

    Args:
        timeline: What is told.
        module: The module.
    """

    def __init__(self, timeline: Timeline, module: nn.Module) -> None:
        # What torch keeps must not keep the model.
        self._timeline = weakref.ref(timeline)
        self._module = weakref.ref(module)
        self._ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._begun = _Begun()
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self._remove = weakref.finalize(timeline, _remove_all, handles)

    def remove(self) -> None:
        """Tell nothing any more. A second call does nothing."""
        self._remove()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None:
            module = self._module()
            members = {id(p) for p in module.parameters()} if module is not None else set()
            known = any(id(p) in members for g in optimizer.param_groups for p in g["params"])
            self._ours[optimizer] = known
        return known

    def _before(self, optimizer: Optimizer, *arguments: Any) -> None:
        timeline = self._timeline()
        if timeline is not None and self._is_ours(optimizer):
            stack = self._begun.stack
            # Torch calls nothing after a step that raises, so its span stays.
            del stack[: -_MAX_NESTED + 1]
            span = timeline.span("optimizer", 0)
            span.__enter__()
            stack.append((optimizer, span))

    def _after(self, optimizer: Optimizer, *arguments: Any) -> None:
        stack = self._begun.stack
        while any(one is optimizer for one, _ in stack):
            one, span = stack.pop()
            if one is optimizer:
                span.__exit__(None, None, None)
                break


def _remove_all(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
