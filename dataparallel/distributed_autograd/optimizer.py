"""An optimizer of parameters that belong to several workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc

from dataparallel.distributed_autograd.endpoint import find_context, in_context
from dataparallel.distributed_autograd.local_optimizer import LocalOptimizer
from dataparallel.distributed_autograd.remote_reference import RRef, around, remote

Parameter = Any
_Groups = list[dict[str, Any]]


class DistributedOptimizer:
    """Runs an optimizer on every worker that owns some of the parameters.

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
            Or groups of them as torch's optimizers take them: a list of dicts, whose ``params``
            are such references and whose other entries are the options of the group.
        args: More arguments for ``optimizer_class``.
        kwargs: More arguments for ``optimizer_class``, ``lr`` for one.

    Raises:
        TypeError: Something is neither a reference nor a tensor, or the optimizer needs a closure.
        ValueError: There are no parameters, or one is given twice or is no leaf.
        RuntimeError: This process is no worker, or a worker cannot make its optimizer for another
            reason. The text has the errors of all workers; their type, if they share one, is kept.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Parameter],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _refuse_closures(optimizer_class)
        by_owner = _groups_by_owner(params_rref)
        with in_context(None):
            self._optimizers: dict[str, RRef[LocalOptimizer]] = {
                owner: remote(owner, LocalOptimizer, (optimizer_class, groups, args, kwargs))
                for owner, groups in by_owner.items()
            }
            self._on_all("construct")

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
            Exception: The optimizer of a worker raised this. The other workers have made their
                step. If several failed, the text has all errors.
        """
        find_context(context_id)
        self._on_all("step", lambda owner: (context_id,))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of every worker's optimizer, copied to the CPU of this worker.

        Example::

            optimizer = DistributedOptimizer(torch.optim.Adam, [w], lr=0.1)
            torch.save(optimizer.state_dict(), os.devnull)

        Returns:
            By the name of the worker, what ``state_dict()`` of its optimizer returns.
        """
        return self._on_all("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Any]]) -> None:
        """Give every worker's optimizer its state back.

        Example::

            optimizer = DistributedOptimizer(torch.optim.Adam, [w], lr=0.1)
            optimizer.load_state_dict(optimizer.state_dict())

        Args:
            state_dict: What :meth:`state_dict` returned, for the same parameters in the same
                order on workers of the same names.

        Raises:
            ValueError: It is for other workers or other parameters.
        """
        if set(state_dict) != set(self._optimizers):
            raise ValueError(
                f"the state is for the workers {sorted(state_dict)}, but the parameters belong to "
                f"{sorted(self._optimizers)}: load what an optimizer of the same parameters saved"
            )
        self._on_all("load_state_dict", lambda owner: (state_dict[owner],))

    def _on_all(
        self, method: str, args: Callable[[str], tuple[Any, ...]] = lambda owner: ()
    ) -> dict[str, Any]:
        """Call a method of the optimizers of all owners at once, outside of any context."""
        results: dict[str, Any] = {}
        errors: dict[str, Exception] = {}
        futures: dict[str, torch.futures.Future[Any]] = {}
        with in_context(None):
            for owner, optimizer in self._optimizers.items():
                try:
                    futures[owner] = getattr(optimizer.rpc_async(), method)(*args(owner))
                except Exception as error:
                    errors[owner] = error
            for owner, future in futures.items():
                try:
                    results[owner] = future.wait()
                except Exception as error:
                    errors[owner] = error
        if errors:
            _raise_together(method, errors)
        return results


def _refuse_closures(optimizer_class: Callable[..., torch.optim.Optimizer]) -> None:
    if not callable(optimizer_class):
        raise TypeError(
            f"optimizer_class is {optimizer_class!r}: it must be a class of torch.optim, not an "
            "optimizer"
        )
    step = getattr(optimizer_class, "step", None)
    if step is None:
        return
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{optimizer_class.__name__} needs a closure that computes the loss again, which "
            "cannot run on several workers: use an optimizer whose step() needs none"
        )


def _groups_by_owner(params: Iterable[Parameter]) -> dict[str, _Groups]:
    """The groups of parameters of each owner, with those of its parameters in them."""
    if isinstance(params, torch.Tensor | RRef | torch_rpc.PyRRef):  # type: ignore[attr-defined]
        raise TypeError("params_rref must be a list of references, not a single one: write [rref]")
    listed = list(params)
    if not listed:
        raise ValueError("there are no parameters: params_rref is empty")
    groups = listed if isinstance(listed[0], Mapping) else [{"params": listed}]
    by_owner: dict[str, _Groups] = {}
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                f"a parameter group is {group!r}: it must be a dict with the key 'params'"
            )
        given = group["params"]
        members = [given] if isinstance(given, torch.Tensor | RRef) else list(given)
        options = {name: option for name, option in group.items() if name != "params"}
        of_owner: dict[str, list[RRef[Any]]] = {}
        for member in members:
            rref = _reference(member)
            of_owner.setdefault(rref.owner_name(), []).append(rref)
        for owner, rrefs in of_owner.items():
            by_owner.setdefault(owner, []).append({"params": rrefs, **options})
    return by_owner


def _reference(parameter: Parameter) -> RRef[Any]:
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


def _raise_together(method: str, errors: Mapping[str, Exception]) -> None:
    kinds = {type(error) for error in errors.values()}
    parts = [f"worker '{owner}': {error}" for owner, error in errors.items()]
    doing = {
        "construct": "the optimizer could not be made",
        "step": "the step of the optimizer failed",
    }.get(method, f"{method}() of the optimizer failed")
    text = f"{doing} on " + "\n\non ".join(parts)
    try:
        together = kinds.pop()(text) if len(kinds) == 1 else RuntimeError(text)
    except Exception:
        together = RuntimeError(text)
    raise together from next(iter(errors.values()))
