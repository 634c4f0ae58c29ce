"""Hooks that the user has registered on the originals.

Note [Hooks on the originals]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook sees the gradient of this process, summed over its replicas, before it is reduced over the
processes; as in torch's wrapper. Autograd's engine runs the hooks when it accumulates what the cut
returns; where that is reduced over processes see also Note [Gradients from outside of the wrapper].
With bucket views, and in a round that does not belong to a backward of the engine, the reducer runs
them, and what the engine does afterwards must not run them again. Hooks that run after accumulation
see the reduced gradient: if the round ends after the engine is done, the reducer runs them.

The engine also runs hooks of a parameter to which the cut, or a node of gradient edges, returns
nothing, since it was not used or since its gradient is in ``.grad`` already. In a bare module that
never happens, and hooks do not expect a gradient that is None. So each hook is put into a guard, in
its own place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from dataparallel import torch_internals
from dataparallel.graph.gradient_home import GradientHome


class _Recorder:
    """The one hook that is not the user's; knows what becomes of an original's next gradient."""

    def __init__(self) -> None:
        #: Whether it was put into ``.grad``, past the engine.
        self.published = False
        #: Whether there is one, for the hooks that run after accumulation.
        self.arrives = False
        #: Whether these wait for the end of the round.
        self.waits = False
        #: What a hook has raised meanwhile.
        self.failure: BaseException | None = None

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.arrives = grad is not None or self.published
        self.published = False

    def wait(self, waits: bool) -> None:
        # An error leads to all that it went through, and that to this hook.
        self.waits, self.failure = waits, None

    def publish(self) -> None:
        self.published = True

    def fail(self, error: BaseException) -> None:
        if self.waits:
            self.failure = error


class _GradientHook:
    """The guard of a hook that may change the gradient."""

    def __init__(
        self, hook: Callable[[torch.Tensor], torch.Tensor | None], recorder: _Recorder
    ) -> None:
        self.hook = hook
        self._recorder = recorder
        # Whether the engine is to leave it out.
        self._has_run = False

    def leave_out(self) -> None:
        self._has_run = True

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        has_run, self._has_run = self._has_run, False
        if has_run or grad is None:
            return None
        try:
            return self.hook(grad)
        except BaseException as error:
            self._recorder.fail(error)
            raise


class _AccumulatedHook:
    """The guard of a hook that runs after accumulation."""

    def __init__(self, hook: Callable[[torch.Tensor], None], recorder: _Recorder) -> None:
        self.hook = hook
        self._recorder = recorder

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._recorder.arrives and not self._recorder.waits:
            self.hook(parameter)


class OriginalHooks:
    """Guards the hooks of the originals. See Note [Hooks on the originals]."""

    def __init__(self, originals: Sequence[torch.Tensor]) -> None:
        self._originals = originals
        self._recorders: dict[int, _Recorder] = {}
        #: Parameters with hooks that may change the gradient.
        self.with_gradient_hooks: set[int] = set()
        # Those that have run in this round. After a round that fails the engine runs none of its
        # hooks, so they are marked only at its end.
        self._ran: list[_GradientHook] = []

    def guard(self) -> None:
        """Find hooks that are new; to be called before the engine runs them."""
        self._ran.clear()
        self.with_gradient_hooks.clear()
        for index, original in enumerate(self._originals):
            before = torch_internals.backward_hooks(original)
            after = torch_internals.post_accumulate_grad_hooks(original)
            if before or after:
                self._guard(index, original, before or {}, after or {})

    def _guard(
        self, index: int, original: torch.Tensor, before: dict[int, Any], after: dict[int, Any]
    ) -> None:
        recorder = next((hook for hook in before.values() if isinstance(hook, _Recorder)), None)
        if recorder is None:
            recorder = _Recorder()
            register: Any = original.register_hook
            register(recorder)
        self._recorders[index] = recorder
        for key, hook in before.items():
            if not isinstance(hook, (_Recorder, _GradientHook)):
                before[key] = _GradientHook(hook, recorder)
        for key, hook in after.items():
            if not isinstance(hook, _AccumulatedHook):
                after[key] = _AccumulatedHook(hook, recorder)
        if any(isinstance(hook, _GradientHook) for hook in before.values()):
            self.with_gradient_hooks.add(index)

    def run(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """What the hooks of a parameter make of its gradient; the engine runs them no more."""
        if index not in self.with_gradient_hooks:
            return grad
        table = torch_internals.backward_hooks(self._originals[index])
        for hook in list(table.values()):
            if isinstance(hook, _GradientHook):
                changed = hook.hook(grad)
                grad = grad if changed is None else changed
                self._ran.append(hook)
        return grad

    def run_all(
        self, indices: Sequence[int], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """:meth:`run` for those of several parameters that have a gradient."""
        pairs = zip(indices, grads, strict=True)
        return [None if grad is None else self.run(index, grad) for index, grad in pairs]

    @property
    def failure(self) -> BaseException | None:
        """What a hook has raised in this round, in the engine."""
        return next((r.failure for r in self._recorders.values() if r.failure is not None), None)

    def wait(self, waits: bool) -> None:
        """Whether hooks that run after accumulation are left to :meth:`delivered`."""
        for recorder in self._recorders.values():
            recorder.wait(waits)

    def delivered(self, indices: Collection[int], home: GradientHome) -> None:
        """Run the hooks that run after accumulation, of parameters that have got something."""
        for index in sorted(self._recorders.keys() & indices):
            original = self._originals[index]
            after = torch_internals.post_accumulate_grad_hooks(original) or {}
            for hook in list(after.values()):
                if isinstance(hook, _AccumulatedHook):
                    with home.lent(original):
                        hook.hook(original)

    def published(self, indices: Collection[int]) -> None:
        """End a round in which gradients of some parameters were put into ``.grad`` already."""
        for hook in self._ran:
            hook.leave_out()
        for index in self._recorders.keys() & indices:
            self._recorders[index].publish()
