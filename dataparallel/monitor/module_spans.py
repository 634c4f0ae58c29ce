"""The phases of modules that are no wrappers of this package, by hooks.

Note [Modules that are called]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A loop need not call the module that the monitor was given: Lightning calls a method of its module,
and others call an encoder and a decoder. With an optimizer alone there is no module to start from.
So at first each module that may be called has hooks, and what is not called within another one is a
forward. With the optimizer's first step the hooks of all others go, for they cost time. A compiled
module gets no hooks within, where the compiler would see them.

If no module was called by then, all from one step of the optimizer to the first gradient counts as
forward. There may be parameters without a module, or a compiled module of which the monitor has the
original. If no output had a gradient, the backward begins with that of a parameter.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dataparallel import torch_internals
from dataparallel.batch.tree import flatten
from dataparallel.threads.timeline import Listener, Span, Timeline, mark_backward

#: After so many forwards without gradients it is known which modules are called.
_ENOUGH_FORWARDS = 32


def parameters_of(target: nn.Module | Optimizer) -> Iterator[nn.Parameter]:
    """Return the parameters of a module, or those that an optimizer steps."""
    if isinstance(target, nn.Module):
        return target.parameters()
    return (one for group in target.param_groups for one in group["params"])


def device_of(target: nn.Module | Optimizer) -> torch.device:
    """Return the device of the first parameter; the CPU if there is none, or no memory yet."""
    first = next(iter(parameters_of(target)), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


class ModuleSpans:
    """Hooks that tell a timeline with one replica of the forwards and backwards of a module.

    Or of all modules with parameters that an optimizer steps. See Note [Modules that are called].
    """

    def __init__(self, timeline: Timeline, target: nn.Module | Optimizer) -> None:
        self._timeline = timeline
        # The end of a collected monitor holds this; it may not hold the model.
        self._target = weakref.ref(target)
        self._handles: weakref.WeakKeyDictionary[nn.Module, list[Any]]
        self._handles = weakref.WeakKeyDictionary()
        self._gradients: RemovableHandle | None = None
        #: The modules that were called, in the order in which they first were.
        self._called: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._open: _Forward | None = None
        self._free: AbstractContextManager[object] | None = None
        self._num_forwards = 0
        #: Processor seconds that this has taken beside the spans.
        self.seconds = 0.0
        self._is_settled = self._had_backward = False
        self._listener = Listener(self._on_span)
        for module in _callable_modules(target):
            self._handles[module] = self._watch(module)
        timeline.subscribe(self._listener)

    def remove(self) -> None:
        """Tell nothing any more; the modules are as they were."""
        self._timeline.unsubscribe(self._listener)
        for module in list(self._handles):
            self._leave(module)
        if self._gradients is not None:
            self._gradients.remove()

    def _watch(self, module: nn.Module) -> list[Any]:
        compiled = torch_internals.compiled_call(module)
        if compiled is not None:
            return [_CompiledCall(module, compiled, self._begin, self._finish)]
        begin, finish = _Hook(self._begin), _Hook(self._finish)
        return [
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            module.register_forward_hook(finish, always_call=True),
        ]

    def _leave(self, module: nn.Module) -> None:
        for handle in self._handles.pop(module):
            handle.remove()

    # --- what the hooks tell ---------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if torch_internals.current_graph_task_id() >= 0:
            # A checkpoint runs it again.
            self._timeline.begin_backward()
        elif self._open is not None:
            self._open.depth += module is self._open.module
        elif module in self._handles:
            began = time.thread_time()
            self._num_forwards += not torch.is_grad_enabled()
            is_first = self._called.setdefault(module, len(self._called)) == 0
            target = self._target()
            device = None if target is None else device_of(target)
            if device is not None and device != self._timeline.devices[0]:
                self._timeline.use_devices([device], [None])
            # Each of several modules may get the batch.
            self._timeline.call((_num_samples(args, kwargs) if is_first else 0,))
            self.seconds += time.thread_time() - began
            self._open = _Forward(module, self._timeline)

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        forward = self._open
        if torch.compiler.is_compiling() or torch_internals.current_graph_task_id() >= 0:
            return
        if forward is None or forward.module is not module:
            return
        if forward.depth:
            forward.depth -= 1
            return
        self._open = None
        if forward.end():
            began = time.thread_time()
            mark_backward(self._timeline, flatten(output)[0])
            self.seconds += time.thread_time() - began
        if self._num_forwards >= _ENOUGH_FORWARDS and not self._is_settled:
            self._settle()

    def _on_span(self, span: Span) -> None:
        if span.phase == "backward":
            self._had_backward = True
        elif span.phase == "optimizer":
            # It is still open if Ctrl-C has ended it.
            self._open = None
            if not self._is_settled:
                self._settle()
                self._watch_gradients()
            if not self._called:
                self._timeline.call((1,))
                self._free = self._timeline.span("forward", 0)
                self._free.__enter__()

    # --- what is watched -------------------------------------------------------------------------

    def _settle(self) -> None:
        self._is_settled = True
        for module in list(self._handles):
            if module not in self._called:
                self._leave(module)

    def _watch_gradients(self) -> None:
        target = self._target()
        if target is not None and not self._had_backward:
            trained = [one for one in parameters_of(target) if one.requires_grad]
            if trained:
                self._gradients = register_multi_grad_hook(trained, self._on_gradient, mode="any")

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        free, self._free = self._free, None
        if free is not None:
            free.__exit__(None, None, None)
        self._timeline.begin_backward()


class _Forward:
    """A forward that is under way."""

    def __init__(self, module: nn.Module, timeline: Timeline) -> None:
        self.module = module
        #: The number of calls of the module by itself.
        self.depth = 0
        self._before = sys.exc_info()[1]
        self._span = timeline.span("forward", 0)
        self._span.__enter__()

    def end(self) -> bool:
        """True if it succeeded."""
        error = sys.exc_info()[1]
        if error is None or error is self._before:
            self._span.__exit__(None, None, None)
            return True
        self._span.__exit__(type(error), error, None)
        return False


class _Hook:
    """A hook in whose place copies and pickles of its module have one that does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    pass


class _CompiledCall:
    """A stand-in for hooks around a module that ``module.compile()`` has compiled."""

    def __init__(
        self,
        module: nn.Module,
        compiled: Callable[..., Any],
        begin: Callable[..., None],
        finish: Callable[..., None],
    ) -> None:
        self._module = weakref.ref(module)
        self._compiled = compiled
        self._begin, self._finish = begin, finish
        torch_internals.set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, output = self._module(), None
        self._begin(module, args, kwargs)
        try:
            output = self._compiled(*args, **kwargs)
            return output
        finally:
            self._finish(module, args, output)

    def remove(self) -> None:
        """Leave the module as it was, unless it has been compiled anew."""
        module = self._module()
        if module is not None and torch_internals.compiled_call(module) is self:
            torch_internals.set_compiled_call(module, self._compiled)


def _callable_modules(target: nn.Module | Optimizer) -> set[nn.Module]:
    """Return the modules with parameters that may be called, none of them within a compiled one."""
    found: set[nn.Module]
    if isinstance(target, nn.Module):
        found = {target, *(one for one in target.modules() if _has_any(one, None))}
    else:
        members = {id(one) for one in parameters_of(target)}
        # By their types: to ask a stand-in what it is may wake it up.
        alive = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
        found = {one for one in alive if _has_any(one, members)}
    compiled = [one for one in found if torch_internals.is_compiled(one)]
    return found - {inner for one in compiled for inner in one.modules() if inner is not one}


def _has_any(module: nn.Module, members: set[int] | None) -> bool:
    # It may be under construction.
    with contextlib.suppress(AttributeError):
        return any(members is None or id(one) in members for one in module.parameters())
    return False


def _num_samples(args: Any, kwargs: Mapping[str, Any]) -> int:
    """Return the first size of the first tensor; 1 if there is none."""
    tensors = (one for one in flatten((args, kwargs))[0] if isinstance(one, torch.Tensor))
    return next((len(one) for one in tensors if one.dim()), 1)
