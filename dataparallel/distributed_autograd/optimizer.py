"""An optimizer of parameters that belong to several workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

from dataparallel import devices
from dataparallel.distributed_autograd.calls import current_endpoint, in_context, rpc_async
from dataparallel.distributed_autograd.contexts import find_context
from dataparallel.distributed_autograd.references import RRef, around
from dataparallel.graph.originals import IN_GRAD

_Groups = list[dict[str, Any]]


class DistributedOptimizer:
    """An optimizer on every worker that owns some of the parameters.

    A step takes the gradients of a context and leaves ``.grad`` of the parameters alone.
    Parameters without a gradient in the context stay as they are: they get no momentum or weight
    decay either. Steps, also of several optimizers and threads, take turns on each worker.

    Example::

        rref = RRef(torch.ones(3, requires_grad=True))
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref, w], lr=0.1)
        with context() as context_id:
            backward(context_id, [(rref.to_here() * w).sum()])
            optimizer.step(context_id)

    Args:
        optimizer_class: An optimizer of ``torch.optim``, or a function with the same arguments
            that returns one. It must not need a closure.
        params_rref: References to the parameters, of this package or of torch; each must be a
            leaf tensor on the worker that owns it. Parameters of this worker need no reference.
            Or groups of them as torch's optimizers take them: a list of dicts. Their ``params`` are
            such references and their other entries the options of the group.
        args: More arguments for ``optimizer_class``.
        kwargs: More arguments for ``optimizer_class``, ``lr`` for one.

    Raises:
        TypeError: Something is neither a reference nor a tensor.
        ValueError: There are no parameters.
        RuntimeError: This process is no worker.
        Exception: A worker cannot make its optimizer, since a parameter is no leaf for one. The
            text has the errors of all workers.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = _groups_by_owner(params_rref)
        calls = {owner: (optimizer_class, each, args, kwargs) for owner, each in groups.items()}
        self._optimizers: dict[str, RRef[torch.optim.Optimizer]] = _on_all(
            "the optimizer could not be made", _make, calls
        )

    def step(self, context_id: int) -> None:
        """Update the parameters of all workers by the gradients of a context.

        Example::

            optimizer = DistributedOptimizer(torch.optim.Adam, [w], lr=0.1)
            with context() as context_id:
                backward(context_id, [(w * x).sum()])
                optimizer.step(context_id)

        Args:
            context_id: The id of a ``with context() as context_id:`` block that has not ended.

        Raises:
            ValueError: There is no such context on this worker.
            Exception: The optimizer of a worker raised an error; the text has those of all
                workers. The other workers have made their step.
        """
        find_context(context_id)
        calls = {owner: (rref, context_id) for owner, rref in self._optimizers.items()}
        _on_all("step() of the optimizer failed", _step, calls)


def _groups_by_owner(params: Iterable[Any]) -> dict[str, _Groups]:
    """Return the groups of parameters of each owner, with those of its parameters in them."""
    if isinstance(params, torch.Tensor | RRef | torch_rpc.PyRRef):  # type: ignore[attr-defined]
        raise TypeError("params_rref must be a list of references, not a single one: write [rref]")
    listed = list(params)
    if not listed:
        raise ValueError("there are no parameters: params_rref is empty")
    groups = listed if isinstance(listed[0], Mapping) else [{"params": listed}]
    by_owner: dict[str, _Groups] = {}
    for group in groups:
        of_owner: dict[str, list[RRef[Any]]] = {}
        for member in group["params"]:
            rref = _reference(member)
            of_owner.setdefault(rref.owner_name(), []).append(rref)
        for owner, rrefs in of_owner.items():
            by_owner.setdefault(owner, []).append({**group, "params": rrefs})
    return by_owner


def _reference(parameter: Any) -> RRef[Any]:
    if isinstance(parameter, RRef):
        return parameter
    if isinstance(parameter, torch_rpc.PyRRef):  # type: ignore[attr-defined]
        return around(parameter)
    if isinstance(parameter, torch.Tensor):
        return RRef(parameter)
    raise TypeError(
        f"a parameter is of type {type(parameter).__name__}: it must be an RRef of a tensor, or a "
        "tensor of this worker; of a module, make an RRef of each of its parameters()"
    )


def _on_all(
    failure: str, function: Callable[..., Any], calls: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Call a function on all owners at once, outside of any context."""
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    with in_context(None):
        futures = {owner: rpc_async(owner, function, args) for owner, args in calls.items()}
    for owner, future in futures.items():
        try:
            results[owner] = future.wait()
        except Exception as error:
            errors[owner] = error
    if errors:
        parts = (f"worker '{owner}': {error}" for owner, error in errors.items())
        kinds = {type(error) for error in errors.values()}
        kind = kinds.pop() if len(kinds) == 1 else RuntimeError
        raise kind(f"{failure} on " + "\n\non ".join(parts)) from next(iter(errors.values()))
    return results


# --- on an owner ---------------------------------------------------------------------------------

#: Optimizers of this worker may have the same parameters, so they take turns.
_turn = threading.Lock()


def _make(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RRef[torch.optim.Optimizer]:
    local = [
        {**group, "params": [rref.local_value() for rref in group["params"]]} for group in groups
    ]
    return RRef(optimizer_class(local, *args, **kwargs))


def _step(rref: RRef[torch.optim.Optimizer], context_id: int) -> None:
    """Update the parameters of this worker that have a gradient in the context."""
    context = current_endpoint().worker.find(context_id)
    if context is None:
        # No call of the context came here, so no gradient did.
        return
    optimizer = rref.local_value()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with _turn:
        own = IN_GRAD.swap(parameters, [context.gradient(each) for each in parameters])
        try:
            optimizer.step()
        finally:
            IN_GRAD.swap(parameters, own)
        # Calls that come next may use other streams.
        for device in {parameter.device for parameter in parameters}:
            if (stream := devices.current_stream(device)) is not None:
                stream.synchronize()
