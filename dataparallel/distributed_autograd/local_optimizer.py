"""The part of a distributed optimizer that one worker runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dataparallel import devices
from dataparallel.distributed_autograd.endpoint import current_endpoint
from dataparallel.distributed_autograd.remote_reference import RRef
from dataparallel.graph.originals import IN_GRAD

#: Optimizers of this worker may have the same parameters, so they take turns.
_turn = threading.Lock()


class LocalOptimizer:
    """Updates parameters of this worker by the gradients of a context.

    Its optimizer works on tensors that share the memory and the version of the parameters and have
    a ``.grad`` of their own: that of the parameters is neither read nor written.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._parameters: list[torch.Tensor] = []
        self._shadows: list[torch.Tensor] = []
        made = [{**group, "params": self._add(group["params"])} for group in groups]
        self._optimizer = optimizer_class(made, *args, **kwargs)

    def construct(self) -> None:
        """Nothing: that it can be called says that the optimizer was made."""

    def step(self, context_id: int) -> None:
        """Update the parameters that have a gradient in the context."""
        context = current_endpoint().worker.find(context_id)
        if context is None:
            # No call of the context came here, so no gradient did.
            return
        pairs = list(zip(self._parameters, self._shadows, strict=True))
        with _turn:
            try:
                for parameter, shadow in pairs:
                    # Somebody may have given the parameter other memory, as Module.to() does.
                    shadow.data = parameter.data
                    IN_GRAD.write(shadow, context.gradient(parameter))
                self._optimizer.step()
            finally:
                self._optimizer.zero_grad()
            # Calls that come next may use other streams.
            for device in {parameter.device for parameter in self._parameters}:
                if (stream := devices.current_stream(device)) is not None:
                    stream.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, on the CPU."""
        with _turn:
            state: dict[str, Any] = _on_cpu(self._optimizer.state_dict())
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        with _turn:
            self._optimizer.load_state_dict(state)

    def _add(self, rrefs: Sequence[RRef[torch.Tensor]]) -> list[torch.Tensor]:
        shadows = []
        for rref in rrefs:
            parameter = rref.local_value()
            self._check(parameter)
            self._parameters.append(parameter)
            shadows.append(parameter.detach().requires_grad_(parameter.requires_grad))
        self._shadows += shadows
        return shadows

    def _check(self, parameter: Any) -> None:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"a parameter is of type {type(parameter).__name__} on its owner: it must be a "
                "tensor; of a module, make an RRef of each of its parameters()"
            )
        if not parameter.is_leaf:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is no leaf, but was computed by "
                f"{parameter.grad_fn}: optimize what it was computed from"
            )
        if any(parameter is other for other in self._parameters):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is given twice: each step would "
                "apply its gradient twice"
            )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
