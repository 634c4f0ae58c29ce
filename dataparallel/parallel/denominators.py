"""What each of torch's criteria divides by when it takes the mean.

The mean over a batch is not the mean of the means over its chunks: chunks may be uneven, targets
may be ignored, classes may be weighted. Every chunk therefore yields a numerator (the sum of its
losses) and a denominator (what torch's criterion would divide that sum by), and the loss of the
batch is the sum of the numerators over the sum of the denominators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Part(NamedTuple):
    """What one replica contributes to the loss of the batch.

    ``numerator`` is 0-d, or holds the losses themselves where they are not reduced;
    ``denominator`` is ``None`` where nothing is divided; ``dtype`` is that of the loss, which may
    be narrower than that of the sums.
    """

    numerator: Tensor
    denominator: Tensor | float | None
    dtype: torch.dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which losses of ``dtype`` are summed."""
    # A sum over a batch leaves the range of float16 long before the mean does.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _total(losses: Tensor) -> Tensor:
    return losses.sum(dtype=wide(losses.dtype))


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


def per_sample(losses: Tensor, bound: Mapping[str, Any]) -> Part:
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
BY_CLASS = {module: rule for module, _, rule in _FAMILIES}
if hasattr(nn, "LinearCrossEntropyLoss"):
    BY_CLASS[nn.LinearCrossEntropyLoss] = _CLASSES
_BY_FUNCTION = {function: rule for _, function, rule in _FAMILIES}


def identify(criterion: Callable[..., Any]) -> tuple[str, Rule | None, str]:
    """Find the rule of a criterion.

    Args:
        criterion: A module, a function, or a ``functools.partial`` of a function.

    Returns:
        Its name for messages, its rule (``None`` where it is not one of torch's), and its
        reduction (empty where there is no rule).
    """
    if isinstance(criterion, nn.Module):
        own = {"forward", "__call__"} & set(vars(criterion))
        for ancestor in type(criterion).__mro__:
            if ancestor in BY_CLASS and not own:
                if _same_forward(type(criterion), ancestor):
                    return ancestor.__name__, BY_CLASS[ancestor], str(criterion.reduction)
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


def check_shapes(name: str, rule: Rule, bound: Mapping[str, Any], dim: int) -> None:
    """Refuse arguments whose losses do not divide into those of single samples.

    Args:
        name: The criterion's name, for messages.
        rule: The criterion's rule.
        bound: The criterion's arguments by name, the output first and the target second.
        dim: Batch dimension of the output.

    Raises:
        TypeError: Lengths of sequences are not a tensor.
        ValueError: Shapes have no batch dimension, or mix samples.
    """
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
