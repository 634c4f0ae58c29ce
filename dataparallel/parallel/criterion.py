"""The criterion of ``model.loss``, computed per chunk and combined to the loss of the batch."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dataparallel import torch_internals
from dataparallel.batch.joining import read_weight
from dataparallel.parallel.denominators import (
    BY_CLASS,
    Part,
    Rule,
    check_shapes,
    identify,
    per_sample,
    wide,
)

Weight: TypeAlias = Literal["samples"] | Callable[..., float | Tensor]

_SETTINGS = ("weight", "pos_weight", "ignore_index")
_REDUCTIONS = ("reduction", "size_average", "reduce")


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn what the user passes as inputs or as targets into positional and keyword arguments.

    Example::

        arguments(x)                 # (x,), {}
        arguments((x, y))            # (x, y), {}
        arguments({"target": y})     # (), {"target": y}
        arguments(({"boxes": y},))   # ({"boxes": y},), {}

    Args:
        value: A tuple is unpacked, a dict becomes keyword arguments, anything else (subclasses of
            the two included, such as a named tuple) is one argument.

    Returns:
        The positional and the keyword arguments.
    """
    if type(value) is tuple:
        return value, {}
    if type(value) is dict:
        return (), value
    return (value,), {}


@dataclass(frozen=True)
class PreparedCriterion:
    """A criterion whose denominator is known, from :func:`prepare`.

    ``module`` is what must be cloned to each device, or ``None`` for a plain function.
    """

    name: str
    criterion: Callable[..., Any]
    reduction: str
    dim: int
    rule: Rule | None
    weight: Weight | None

    @property
    def module(self) -> nn.Module | None:
        """The criterion as a module, whose clones :meth:`local` wants; ``None`` for a function."""
        return self.criterion if isinstance(self.criterion, nn.Module) else None

    def local(
        self,
        output: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        samples: int,
        replica: nn.Module | None = None,
    ) -> Part:
        """Compute what one replica contributes; called in the replica's thread.

        Args:
            output: What the replica returned for its chunk.
            args: Further positional arguments of the criterion, of this chunk.
            kwargs: Keyword arguments of the criterion, of this chunk.
            samples: Number of samples in the chunk.
            replica: The clone of :attr:`module` on this device. Default: the original.

        Returns:
            Numerator and denominator, on the device of ``output``. For a criterion of torch's the
            host does not wait for the device.

        Raises:
            TypeError: Output, targets or the loss are not of a type that can be divided.
            ValueError: The shapes mix samples of different chunks.
        """
        criterion = self.criterion if replica is None else replica
        if self.rule is None:
            return self._local_weighted(criterion, output, args, kwargs, samples)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{self.name} takes a tensor, but the module returned {type(output).__name__}; "
                "pass a function that picks the tensor, and weight="
            )
        reduction = self.reduction if self.reduction in ("sum", "none") else "none"
        call: Callable[..., Tensor]
        if isinstance(criterion, nn.Module):
            call = _with_reduction(criterion, reduction)
            forward = functools.partial(type(criterion).forward, criterion)
            bound = _bind(self.name, forward, output, args, kwargs)
            bound |= {key: getattr(criterion, key, None) for key in _SETTINGS}
        else:
            call = _with_keywords(criterion, reduction, output.device)
            bound = _bind(self.name, call, output, args, kwargs)
        check_shapes(self.name, self.rule, bound, self.dim)
        losses = call(output, *args, **kwargs)
        if self.reduction in ("sum", "none"):
            return Part(losses, None, losses.dtype)
        mean = per_sample if self.reduction == "batchmean" else self.rule.mean
        return mean(losses, bound)

    def _local_weighted(
        self,
        criterion: Callable[..., Any],
        output: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Part:
        weight = samples if self.weight == "samples" else self._own_weight(output, args, kwargs)
        if weight == 0:
            # The loss of a chunk without weight is often 0/0; even times zero it would be NaN.
            return Part(torch.zeros((), device=_device_of(output)), 0, torch.float32)
        loss = criterion(output, *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(f"{self.name} must return a 0-d tensor, but returned {found}")
        return Part(loss.to(wide(loss.dtype)) * weight, weight, loss.dtype)

    def _own_weight(self, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        assert callable(self.weight)
        return read_weight("weight=", self.weight(output, *args, **kwargs))

    def combine(self, parts: Sequence[Part], device: torch.device) -> Tensor:
        """Turn the contributions of the replicas into the loss of the batch.

        Args:
            parts: One per chunk, in replica order, which is also the order of summation.
            device: Where the loss is wanted.

        Returns:
            The loss, 0-d; for ``reduction="none"`` the losses concatenated along the batch
            dimension (along 0 where they have no such dimension).

        Raises:
            ValueError: All chunks weigh zero under the caller's own weight.
        """
        numerators = [part.numerator.to(device) for part in parts]
        if self.reduction == "none":
            dims = numerators[0].dim()
            return torch.cat(numerators, self.dim if -dims <= self.dim < dims else 0)
        total: Tensor = functools.reduce(torch.add, numerators)
        if self.reduction == "sum":
            return total
        denominators = [_moved(part.denominator, device) for part in parts]
        denominator: Tensor | float = functools.reduce(
            lambda left, right: left + right, denominators
        )
        if self.rule is not None:
            return (total / denominator).to(parts[0].dtype)
        if denominator == 0:
            raise ValueError("weight= is zero for every chunk of the batch, so there is no loss")
        kept = [part.dtype for part in parts if part.denominator]
        return (total / denominator).to(functools.reduce(torch.promote_types, kept))


def prepare(
    criterion: Callable[..., Any], weight: Weight | None = None, dim: int = 0
) -> PreparedCriterion:
    """Find out what ``criterion`` divides by.

    Example::

        prepared = prepare(nn.CrossEntropyLoss(ignore_index=0))
        parts = [prepared.local(y, (t,), {}, samples=len(t)) for y, t in chunks]
        loss = prepared.combine(parts, device)   # of the whole batch

        prepare(lambda y, t: (y - t).abs().max(), weight="samples")
        prepare(masked_loss, weight=lambda y, t: (t >= 0).sum())

    Args:
        criterion: A loss module of ``torch.nn`` (or a subclass with the same ``forward``), its
            function in ``torch.nn.functional``, a ``functools.partial`` of that function with
            keywords, or any callable that returns a 0-d tensor.
        weight: Only for other callables, whose loss of a chunk is taken for a weighted mean:
            ``"samples"`` weighs it by the number of samples, a function of the criterion's
            arguments returns the weight of its chunk (not negative; a chunk that weighs zero is
            left out; a tensor is read on the host, which waits for the device).
        dim: Batch dimension of the output. Default: 0.

    Returns:
        The prepared criterion.

    Raises:
        TypeError: ``criterion`` or ``weight`` is of another type.
        ValueError: The denominator of ``criterion`` is unknown and ``weight`` is missing, or it
            is known and ``weight`` is given.
    """
    if not callable(criterion):
        raise TypeError(f"a criterion is a callable, but got {criterion!r}")
    name, rule, reduction = identify(criterion)
    if rule is None:
        _check_weight(name, criterion, weight)
        return PreparedCriterion(name, criterion, "weighted", dim, None, weight)
    if weight is not None:
        raise ValueError(
            f"{name} knows its denominator itself, so weight={weight!r} has no meaning; "
            "leave it out, or wrap the criterion in a function of your own"
        )
    if reduction not in rule.reductions:
        raise ValueError(
            f"the reduction of {name} is one of {rule.reductions}, but is {reduction!r}"
        )
    if reduction == "batchmean" and dim != 0:
        raise ValueError(
            f"reduction='batchmean' divides by the size of dimension 0, but the batch is "
            f"dimension {dim}; use reduction='sum' and divide the loss"
        )
    return PreparedCriterion(name, criterion, reduction, dim, rule, None)


def _check_weight(name: str, criterion: Callable[..., Any], weight: object) -> None:
    if isinstance(criterion, nn.AdaptiveLogSoftmaxWithLoss):
        raise ValueError(
            "AdaptiveLogSoftmaxWithLoss returns two results, and which of them is the loss is not "
            'for us to say; wrap it in a module that returns its .loss, with weight="samples"'
        )
    if weight is None:
        known = ", ".join(sorted(module.__name__ for module in BY_CLASS))
        raise ValueError(
            f"what {name} divides its loss by is not known, so the losses of the chunks cannot be "
            'weighted; pass weight="samples" if it is a mean over samples, or a function of its '
            "arguments that returns what it divides by, for example "
            "weight=lambda output, target: (target != -100).sum(). Known without weight= are "
            f"{known}, their functions in torch.nn.functional, and functools.partial of those "
            "with keywords"
        )
    if weight != "samples" and not callable(weight):
        raise TypeError(
            f'weight= is "samples" or a function of the criterion\'s arguments, but got {weight!r}'
        )


def _with_reduction(criterion: nn.Module, reduction: str) -> Callable[..., Tensor]:
    if criterion.reduction == reduction:
        return criterion
    # A shallow copy shares parameters and buffers; the user's module stays as it is.
    quiet = copy.copy(criterion)
    quiet.reduction = reduction  # type: ignore[assignment]
    return quiet


def _with_keywords(
    criterion: Callable[..., Any], reduction: str, device: torch.device
) -> functools.partial[Tensor]:
    function, keywords = criterion, {}
    if isinstance(criterion, functools.partial):
        function, keywords = criterion.func, criterion.keywords
    moved = {key: _moved(value, device) for key, value in keywords.items()}
    kept = {key: value for key, value in moved.items() if key not in _REDUCTIONS}
    return functools.partial(function, **kept, reduction=reduction)


def _bind(
    name: str,
    call: functools.partial[Tensor],
    output: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments by name, in the order of the signature."""
    signature = _signature(call.func)
    try:
        theirs = signature.bind_partial(*call.args, output, *args, **kwargs).arguments
        bound = signature.bind(*call.args, output, *args, **{**call.keywords, **kwargs}).arguments
    except TypeError as error:
        raise TypeError(f"{name} cannot take these targets: {error}") from error
    if given := [key for key in _REDUCTIONS if theirs.get(key) is not None]:
        raise ValueError(
            f"{', '.join(given)} cannot come with the targets, since the replicas must agree on "
            f"it; pass functools.partial({name}, ...) as the criterion"
        )
    return {key: value for key, value in bound.items() if key != "self"}


@functools.lru_cache(maxsize=128)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _device_of(output: Any) -> torch.device:
    tensors = (leaf for leaf in torch_internals.tree_leaves(output) if isinstance(leaf, Tensor))
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device
