"""The originals in backward: where their gradients are, and the hooks of the user on them.

Note [Gradients in a context]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward of ``dataparallel.distributed_autograd`` puts gradients into its context and never into
``.grad``. A wrapper treats the gradients in the context like those of its parameters. It adds to
them, sends those that ``no_sync`` has left there, and knows nothing of other contexts and of
``.grad``. The node that begins a round asks once which of the two it is.

The parameters of the replicas are no concern of the context: the backward through the replicas is
one of its own, and belongs to no pass. So the pass does not go on from there to other
workers: a wrapped module whose outputs lead to some raises an error at the end of its forward.

The wrappers know nothing of contexts. ``dataparallel.distributed_autograd`` registers here, by
:func:`use_passes`, what knows of them.

Note [Hooks on the originals]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook sees the gradient of this process, summed over its replicas, before it is reduced over the
processes; as in torch's wrapper. Autograd's engine runs it, see Note [Gradients from outside of the
wrapper]. Hooks that run after accumulation see the reduced gradient: if the round ends after the
engine is done, the reducer runs them.

The engine also runs hooks of a parameter to which the cut, or a node of gradient edges, returns
nothing. In a bare module that never happens, and hooks do not expect a gradient that is None. So
each hook is put into a guard, in its own place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from operator import is_not
from typing import Any

import torch

from dataparallel import torch_internals


class GradientHome:
    """Gradients that are in ``.grad``."""

    #: The id of the context that has the gradients; None for ``.grad``.
    context_id: int | None = None

    def read(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, None where there is none."""
        return [parameter.grad for parameter in parameters]

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set the gradient of a parameter, or say that the tensor it is was written to."""
        parameter.grad = gradient

    def swap(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Set the gradient of each parameter; returns what they were."""
        before = self.read(parameters)
        differ = list(map(is_not, before, gradients))
        for parameter, new in compress(zip(parameters, gradients, strict=True), differ):
            self.write(parameter, new)
        return before


#: Outside of contexts.
IN_GRAD = GradientHome()


class BackwardPasses:
    """The answers to the wrappers' questions about backwards; here, for torch's own backwards."""

    def home(self) -> GradientHome:
        """Return the place in which the backward of this thread leaves gradients."""
        return IN_GRAD

    def reach_other_workers(self, outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """True if a backward from the outputs of the replicas goes on to other workers."""
        return False


#: Whom to ask about backwards now.
passes = BackwardPasses()


def use_passes(others: BackwardPasses) -> None:
    """Ask these from now on, since there are backwards that leave gradients elsewhere."""
    global passes
    passes = others


# --- hooks ---------------------------------------------------------------------------------------


class _Recorder:
    """The one hook of an original that is not the user's; tells the others when to run."""

    #: True if the engine has a gradient for the hooks that run after accumulation.
    arrives = False
    #: True if these hooks wait for the end of the round.
    waits = False
    #: The error that a hook has raised meanwhile.
    failure: BaseException | None = None

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.arrives = grad is not None

    def wait(self, waits: bool) -> None:
        # An error leads to all that it went through, and that to this hook.
        self.waits, self.failure = waits, None

    def before(self, hook: Callable[..., Any], grad: torch.Tensor | None) -> torch.Tensor | None:
        """Run a hook that may change the gradient."""
        try:
            return None if grad is None else hook(grad)
        except BaseException as error:
            if self.waits:
                self.failure = error
            raise

    def after(self, hook: Callable[..., Any], parameter: torch.Tensor) -> Any:
        """Run a hook that runs after accumulation; the engine refuses what it returns."""
        return hook(parameter) if self.arrives and not self.waits else None


class _Guarded(functools.partial[Any]):
    """A hook of the user in its guard."""


class OriginalHooks:
    """A guard of the hooks of the originals. See Note [Hooks on the originals]."""

    def __init__(self, originals: Sequence[torch.Tensor]) -> None:
        self._originals = originals
        self._recorders: dict[int, _Recorder] = {}
        #: Parameters with hooks that may change the gradient.
        self.with_gradient_hooks: set[int] = set()

    def guard(self) -> None:
        """Find hooks that are new; to be called before the engine runs them."""
        self.with_gradient_hooks = set()
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
        for hooks, guard in ((before, recorder.before), (after, recorder.after)):
            for key, hook in hooks.items():
                if not isinstance(hook, (_Recorder, _Guarded)):
                    hooks[key] = _Guarded(guard, hook)
        if len(before) > 1:
            self.with_gradient_hooks.add(index)

    @property
    def failure(self) -> BaseException | None:
        """Return the error that a hook has raised in the backward that is under way."""
        failures = (recorder.failure for recorder in self._recorders.values())
        return next(filter(None, failures), None)

    def wait(self, waits: bool) -> None:
        """Tell if hooks that run after accumulation are left to :meth:`delivered`."""
        for recorder in self._recorders.values():
            recorder.wait(waits)

    def delivered(self, indices: Collection[int], home: GradientHome) -> None:
        """Run the hooks that run after accumulation, of parameters that have got something."""
        for index in sorted(self._recorders.keys() & indices):
            original = self._originals[index]
            if home.read([original])[0] is None:
                # Dropped, or an optimizer has stepped with it.
                continue
            after = torch_internals.post_accumulate_grad_hooks(original) or {}
            for hook in list(after.values()):
                if isinstance(hook, _Guarded) and hook.args[0](original) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")
