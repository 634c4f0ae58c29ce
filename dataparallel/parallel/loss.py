"""The criterion of ``model.loss``, computed per chunk and combined to the loss of the batch.

Note [What a loss divides by]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The mean over a batch is not the mean of the means over its chunks: chunks may be uneven, targets
may be ignored, classes may be weighted. Every chunk therefore yields a numerator (the sum of its
losses) and a denominator (what torch's criterion would divide that sum by), and the loss of the
batch is the sum of the numerators over the sum of the denominators.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel import torch_internals
from dataparallel.batch.joining import read_weight
from dataparallel.threads.timeline import Timeline


class Part(NamedTuple):
    """What one replica contributes to the loss of the batch.

    ``numerator`` is 0-d, or holds the losses themselves where they are not reduced;
    ``denominator`` is ``None`` where nothing is divided; ``dtype`` is that of the loss, which may
    be narrower than that of the sums.
    """

    numerator: Tensor
    denominator: Tensor | float | None
    dtype: torch.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which losses of ``dtype`` are summed."""
    # A sum over a batch leaves the range of float16 long before the mean does.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _total(losses: Tensor) -> Tensor:
    return losses.sum(dtype=_wide(losses.dtype))


def _per_element(losses: Tensor, bound: Mapping[str, Any]) -> Part:
    return Part(_total(losses), losses.numel(), losses.dtype)


def _per_weight(losses: Tensor, bound: Mapping[str, Any]) -> Part:
    """The element weights of ``F.mse_loss`` and ``F.l1_loss`` are part of their denominator."""
    weight = bound.get("weight")
    denominator = losses.numel() if weight is None else _total(weight)
    return Part(_total(losses), denominator, losses.dtype)


def _per_target(losses: Tensor, bound: Mapping[str, Any]) -> Part:
    """Class indices count with their class weight unless ignored; probabilities count as 1."""
    target, weight = bound["target"], bound.get("weight")
    if target.is_floating_point():
        return _per_element(losses, bound)
    ignore_index = bound.get("ignore_index")
    valid = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return Part(_total(losses), valid.sum(), losses.dtype)
    weights = weight[target.long().where(valid, 0)]
    return Part(_total(losses), _total(weights.where(valid, 0)), losses.dtype)


def _per_sequence(losses: Tensor, bound: Mapping[str, Any]) -> Part:
    """CTC divides each loss by the length of its target before it takes the mean."""
    lengths = bound["target_lengths"].to(losses.device).clamp_min(1)
    return Part(_total(losses / lengths), losses.numel(), losses.dtype)


def _per_sample(losses: Tensor, bound: Mapping[str, Any]) -> Part:
    """``reduction="batchmean"`` divides by the number of samples, not of elements."""
    output: Tensor = next(iter(bound.values()))
    return Part(_total(losses), output.size(0), losses.dtype)


@dataclass(frozen=True)
class Rule:
    """How a family of criteria reduces its losses, and which shapes it needs for that.

    ``dims`` is the least number of dimensions of a batched output. ``aligned`` criteria broadcast
    output and target silently. ``reductions`` are those that exist.
    """

    mean: Callable[[Tensor, Mapping[str, Any]], Part]
    dims: int = 1
    aligned: bool = False
    reductions: tuple[str, ...] = ("mean", "sum", "none")


_ELEMENTS = Rule(_per_element)
_BROADCAST = Rule(_per_element, aligned=True)
_BROADCAST_WEIGHTED = Rule(_per_weight, aligned=True)
_DIVERGENCE = Rule(_per_element, 1, True, ("mean", "sum", "none", "batchmean"))
_ROWS = Rule(_per_element, dims=2)
_CLASSES = Rule(_per_target, dims=2)
_SEQUENCES = Rule(_per_sequence, dims=3)

_FAMILIES: tuple[tuple[type[nn.Module], Callable[..., Tensor], Rule], ...] = (
    (nn.BCELoss, F.binary_cross_entropy, _ELEMENTS),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, _ELEMENTS),
    (nn.CosineEmbeddingLoss, F.cosine_embedding_loss, _ROWS),
    (nn.CrossEntropyLoss, F.cross_entropy, _CLASSES),
    (nn.CTCLoss, F.ctc_loss, _SEQUENCES),
    (nn.GaussianNLLLoss, F.gaussian_nll_loss, _BROADCAST),
    (nn.HingeEmbeddingLoss, F.hinge_embedding_loss, _BROADCAST),
    (nn.HuberLoss, F.huber_loss, _BROADCAST),
    (nn.KLDivLoss, F.kl_div, _DIVERGENCE),
    (nn.L1Loss, F.l1_loss, _BROADCAST_WEIGHTED),
    (nn.MSELoss, F.mse_loss, _BROADCAST_WEIGHTED),
    (nn.MarginRankingLoss, F.margin_ranking_loss, _BROADCAST),
    (nn.MultiLabelMarginLoss, F.multilabel_margin_loss, _ROWS),
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, Rule(_per_element, 2, True)),
    (nn.MultiMarginLoss, F.multi_margin_loss, _ROWS),
    (nn.NLLLoss, F.nll_loss, _CLASSES),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, _BROADCAST),
    (nn.SmoothL1Loss, F.smooth_l1_loss, _BROADCAST),
    (nn.SoftMarginLoss, F.soft_margin_loss, _BROADCAST),
    (nn.TripletMarginLoss, F.triplet_margin_loss, _ROWS),
    (nn.TripletMarginWithDistanceLoss, F.triplet_margin_with_distance_loss, _ROWS),
)
_BY_CLASS = {module: rule for module, _, rule in _FAMILIES}
if hasattr(nn, "LinearCrossEntropyLoss"):
    _BY_CLASS[nn.LinearCrossEntropyLoss] = _CLASSES
_BY_FUNCTION = {function: rule for _, function, rule in _FAMILIES}


def _identify(criterion: Callable[..., Any]) -> tuple[str, Rule | None, str]:
    """Name, rule (None where it is not one of torch's) and reduction of a criterion."""
    if isinstance(criterion, nn.Module):
        own = {"forward", "__call__"} & set(vars(criterion))
        for ancestor in type(criterion).__mro__:
            if ancestor in _BY_CLASS and not own:
                if _same_forward(type(criterion), ancestor):
                    return ancestor.__name__, _BY_CLASS[ancestor], str(criterion.reduction)
                break
        return type(criterion).__name__, None, ""
    function, keywords = criterion, {}
    if isinstance(criterion, functools.partial):
        if criterion.args:
            return repr(criterion), None, ""
        function, keywords = criterion.func, criterion.keywords
    name = getattr(function, "__name__", None) or repr(function)
    try:
        rule = _BY_FUNCTION.get(function)
    except TypeError:  # not hashable, so none of torch's functions
        rule = None
    return name, rule, _reduction_of(keywords)


def _same_forward(found: type[nn.Module], known: type[nn.Module]) -> bool:
    return all(getattr(found, key) is getattr(known, key) for key in ("forward", "__call__"))


def _reduction_of(keywords: Mapping[str, Any]) -> str:
    averaged, reduced = keywords.get("size_average"), keywords.get("reduce")
    if averaged is None and reduced is None:
        return str(keywords.get("reduction", "mean"))
    # torch's deprecated pair of flags, each of which is on by default and wins over `reduction`.
    if reduced is False:
        return "none"
    return "sum" if averaged is False else "mean"


def _check_shapes(name: str, rule: Rule, bound: Mapping[str, Any], dim: int) -> None:
    """Refuse arguments whose losses do not divide into those of single samples."""
    output, target = list(bound.values())[:2]
    if output.dim() < rule.dims:
        raise ValueError(
            f"{name} needs an output with a batch dimension, of at least {rule.dims} dimensions, "
            f"but the module returned shape {tuple(output.shape)}"
        )
    if rule.aligned and isinstance(target, Tensor) and target.dim() not in (0, output.dim()):
        raise ValueError(
            f"{name} would compare every output of shape {tuple(output.shape)} with every target "
            f"of shape {tuple(target.shape)}, across samples; give both the same dimensions"
        )
    if rule.mean is _per_sequence:
        _check_sequences(name, bound)
    for key in ("weight", "pos_weight") if rule.mean is _per_element else ():
        weight = bound.get(key)
        if not isinstance(weight, Tensor):
            continue
        axis = dim % output.dim() - (output.dim() - weight.dim())
        if axis >= 0 and weight.size(axis) not in (1, output.size(dim)):
            raise ValueError(
                f"the {key} of {name} has shape {tuple(weight.shape)}, one entry per sample of "
                f"the whole batch, but this chunk has {output.size(dim)}; pass it with the "
                f"targets, so that it is split like them: targets={{'target': ..., {key!r}: ...}}"
            )


def _check_sequences(name: str, bound: Mapping[str, Any]) -> None:
    for key in ("input_lengths", "target_lengths"):
        if not isinstance(bound[key], Tensor):
            raise TypeError(
                f"{key} of {name} must be a tensor, so that it is split like the batch, but is "
                f"{type(bound[key]).__name__}"
            )
    if bound["targets"].dim() != 2:
        raise ValueError(
            f"the targets of {name} must be padded to shape (batch, length), so that they can be "
            f"split, but have shape {tuple(bound['targets'].shape)}"
        )


Weight: TypeAlias = Literal["samples"] | Callable[..., float | Tensor]

_SETTINGS = ("weight", "pos_weight", "ignore_index")
_REDUCTIONS = ("reduction", "size_average", "reduce")


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn what the user passes as inputs or as targets into positional and keyword arguments.

    A tuple is unpacked, a dict becomes keyword arguments, anything else (subclasses of the two
    included, such as a named tuple) is one argument.
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
        """Compute what one replica contributes; called in the replica's thread."""
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
        _check_shapes(self.name, self.rule, bound, self.dim)
        losses = call(output, *args, **kwargs)
        if self.reduction in ("sum", "none"):
            return Part(losses, None, losses.dtype)
        mean = _per_sample if self.reduction == "batchmean" else self.rule.mean
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
        return Part(loss.to(_wide(loss.dtype)) * weight, weight, loss.dtype)

    def _own_weight(self, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        assert callable(self.weight)
        return read_weight("weight=", self.weight(output, *args, **kwargs))

    def combine(self, parts: Sequence[Part], device: torch.device) -> Tensor:
        """Turn the contributions of the replicas, in their order, into the loss of the batch."""
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

    Args:
        criterion: A loss module of ``torch.nn`` (or a subclass with the same ``forward``), its
            function in ``torch.nn.functional``, a ``functools.partial`` of that function with
            keywords, or any callable that returns a 0-d tensor.
        weight: For other callables, whose loss of a chunk is taken for a weighted mean; see
            ``DataParallel.loss``. A chunk that weighs zero is left out.
        dim: Batch dimension of the output.
    """
    if not callable(criterion):
        raise TypeError(f"a criterion is a callable, but got {criterion!r}")
    name, rule, reduction = _identify(criterion)
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
        known = ", ".join(sorted(module.__name__ for module in _BY_CLASS))
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


@dataclass(frozen=True)
class LossCall:
    """The forward and the loss of one replica.

    Targets are scattered as keyword arguments beside the module's, under names of their own.

    Attributes:
        prepared: The criterion.
        targets: From the name under which a target is scattered to its position or its name.
        timeline: Is told when the loss is computed.
    """

    prepared: PreparedCriterion
    targets: Mapping[str, int | str]
    timeline: Timeline

    def check(self, given: Mapping[str, Any], chunks: Sequence[Mapping[str, Any]]) -> None:
        """Raise a ValueError if a scatter of the user's own has not split the targets."""
        for name in self.targets:
            whole = given[name] if isinstance(given[name], Tensor) and given[name].dim() else None
            for chunk in chunks:
                if name not in chunk or (len(chunks) > 1 and chunk[name] is whole is not None):
                    raise ValueError(
                        f"scatter() of the wrapper has not split {name}, which comes as a keyword "
                        "argument: split keyword arguments like inputs, as scatter() of "
                        "DataParallel does, or compute the loss from the output"
                    )

    def __call__(
        self,
        replica: nn.Module,
        criterion: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Part:
        """Run one replica and its criterion; called in the replica's thread."""
        own = {name: value for name, value in kwargs.items() if name not in self.targets}
        output = replica(*args, **own)
        given = [(key, kwargs[name]) for name, key in self.targets.items()]
        positional = [value for key, value in given if isinstance(key, int)]
        named = {key: value for key, value in given if isinstance(key, str)}
        with self.timeline.span_here("loss"):
            return self.prepared.local(
                output, positional, named, samples=samples, replica=criterion
            )
