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


def _elements(losses: Tensor, bound: Mapping[str, Any]) -> Tensor | float:
    return losses.numel()


def _element_weights(losses: Tensor, bound: Mapping[str, Any]) -> Tensor | float:
    weight = bound.get("weight")
    return losses.numel() if weight is None else _total(weight)


def _targets(losses: Tensor, bound: Mapping[str, Any]) -> Tensor | float:
    """Class indices count with their class weight unless ignored; probabilities count as 1."""
    target: Tensor = bound["target"]
    weight, ignore_index = bound.get("weight"), bound.get("ignore_index")
    if target.is_floating_point():
        return losses.numel()
    valid = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return valid.sum()
    return _total(weight[target.long().where(valid, 0)].where(valid, 0))


@dataclass(frozen=True)
class Rule:
    """What the mean of a family of criteria divides by, and which shapes it needs for that.

    ``dims`` is the least number of dimensions of a batched output. ``aligned`` criteria broadcast
    output and target silently. ``reductions`` are those that exist.
    """

    denominator: Callable[[Tensor, Mapping[str, Any]], Tensor | float]
    dims: int = 1
    aligned: bool = False
    reductions: tuple[str, ...] = ("mean", "sum", "none")


_ELEMENTS = Rule(_elements)
_BROADCAST = Rule(_elements, aligned=True)
_BROADCAST_WEIGHTED = Rule(_element_weights, aligned=True)
_DIVERGENCE = Rule(_elements, 1, True, ("mean", "sum", "none", "batchmean"))
_ROWS = Rule(_elements, dims=2)
_CLASSES = Rule(_targets, dims=2)
# CTC divides each loss by the length of its target first.
_SEQUENCES = Rule(_elements, dims=3)

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
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, Rule(_elements, 2, True)),
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
    if rule is _SEQUENCES:
        _check_sequences(name, bound)
    for key in ("weight", "pos_weight") if rule.denominator is _elements else ():
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
    """Positional and keyword arguments: a tuple or a dict as such, anything else as one of them."""
    if type(value) is tuple:
        return value, {}
    if type(value) is dict:
        return (), value
    return (value,), {}


@dataclass(frozen=True)
class Loss:
    """The forward and the loss of one batch; made by :func:`prepare`.

    Attributes:
        name, criterion, reduction: The criterion, what messages call it and how it reduces.
        dim: Batch dimension of the output.
        rule: What it divides by; None for a criterion that is not known.
        weight: What a chunk of such a criterion counts.
        targets: From the name under which a target is scattered to its position or its name.
    """

    name: str
    criterion: Callable[..., Any]
    reduction: str
    dim: int
    rule: Rule | None
    weight: Weight | None
    targets: Mapping[str, int | str]

    @property
    def module(self) -> nn.Module | None:
        """The criterion as a module, whose clones replicas want; ``None`` for a function."""
        return self.criterion if isinstance(self.criterion, nn.Module) else None

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
        timeline: Timeline,
        replica: nn.Module,
        criterion: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Part:
        """Run one replica and its criterion; called in the replica's thread."""
        own = {name: value for name, value in kwargs.items() if name not in self.targets}
        output = replica(*args, **own)
        given = {key: kwargs[name] for name, key in self.targets.items()}
        positional = [given.pop(key) for key in list(given) if isinstance(key, int)]
        with timeline.span_here("loss"):
            return self.local(output, positional, given, samples=samples, replica=criterion)

    def local(
        self,
        output: Any,
        args: Sequence[Any],
        kwargs: Mapping[Any, Any],
        *,
        samples: int,
        replica: nn.Module | None = None,
    ) -> Part:
        """What one replica contributes, from its output."""
        criterion = self.criterion if replica is None else replica
        if self.rule is None:
            return self._weighted(criterion, output, args, kwargs, samples)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{self.name} takes a tensor, but the module returned {type(output).__name__}; "
                "pass a function that picks the tensor, and weight="
            )
        divides = self.reduction not in ("sum", "none")
        call = _with_reduction(criterion, "none" if divides else self.reduction, output.device)
        bound = _bind(self.name, criterion, call, output, args, kwargs)
        _check_shapes(self.name, self.rule, bound, self.dim)
        losses = call(output, *args, **kwargs)
        if not divides:
            return Part(losses, None, losses.dtype)
        dtype = losses.dtype
        if self.rule is _SEQUENCES:
            losses = losses / bound["target_lengths"].to(losses.device).clamp_min(1)
        if self.reduction == "batchmean":
            return Part(_total(losses), output.size(0), dtype)
        return Part(_total(losses), self.rule.denominator(losses, bound), dtype)

    def _weighted(
        self,
        criterion: Callable[..., Any],
        output: Any,
        args: Sequence[Any],
        kwargs: Mapping[Any, Any],
        samples: int,
    ) -> Part:
        weight: float = samples
        if callable(self.weight):
            weight = read_weight("weight=", self.weight(output, *args, **kwargs))
        if weight == 0:
            # The loss of a chunk without weight is often 0/0; even times zero it would be NaN.
            return Part(torch.zeros((), device=_device_of(output)), 0, torch.float32)
        loss = criterion(output, *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(f"{self.name} must return a 0-d tensor, but returned {found}")
        return Part(loss.to(_wide(loss.dtype)) * weight, weight, loss.dtype)

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
    criterion: Callable[..., Any],
    weight: Weight | None = None,
    dim: int = 0,
    targets: Mapping[str, int | str] | None = None,
) -> Loss:
    """Find out what a criterion divides by; see the arguments of ``DataParallel.loss``."""
    if not callable(criterion):
        raise TypeError(f"a criterion is a callable, but got {criterion!r}")
    name, rule, reduction = _identify(criterion)
    if rule is None:
        _check_weight(name, criterion, weight)
        return Loss(name, criterion, "weighted", dim, None, weight, targets or {})
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
    return Loss(name, criterion, reduction, dim, rule, None, targets or {})


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


def _with_reduction(
    criterion: Callable[..., Any], reduction: str, device: torch.device
) -> Callable[..., Tensor]:
    """A module or a function of torch that reduces in another way."""
    if isinstance(criterion, nn.Module):
        if criterion.reduction == reduction:
            return criterion
        # A shallow copy shares parameters and buffers; the user's module stays as it is.
        quiet = copy.copy(criterion)
        quiet.reduction = reduction  # type: ignore[assignment]
        return quiet
    function, keywords = criterion, {}
    if isinstance(criterion, functools.partial):
        function, keywords = criterion.func, criterion.keywords
    kept = {k: _moved(v, device) for k, v in keywords.items() if k not in _REDUCTIONS}
    return functools.partial(function, **kept, reduction=reduction)


def _bind(
    name: str,
    criterion: Callable[..., Any],
    call: Callable[..., Tensor],
    output: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[Any, Any],
) -> dict[str, Any]:
    """The arguments by name, in the order of the signature, and the settings of a module."""
    if isinstance(criterion, nn.Module):
        call = functools.partial(type(criterion).forward, criterion)
    assert isinstance(call, functools.partial)
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
    found = {key: value for key, value in bound.items() if key != "self"}
    if isinstance(criterion, nn.Module):
        found |= {key: getattr(criterion, key, None) for key in _SETTINGS}
    return found


@functools.lru_cache(maxsize=128)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _device_of(output: Any) -> torch.device:
    tensors = (leaf for leaf in torch_internals.tree_leaves(output) if isinstance(leaf, Tensor))
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device
