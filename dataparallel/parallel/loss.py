"""The criterion of ``model.loss``, computed per chunk and combined to the loss of the batch.

The mean over a batch is not the mean of the means over its chunks. Chunks may be uneven, targets
may be ignored, and classes may be weighted. Every chunk therefore yields a numerator (the sum of
its losses) and a denominator (torch's divisor of that sum). The loss of the batch is the sum of the
numerators over the sum of the denominators.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataparallel.batch.gather import read_weight
from dataparallel.batch.scatter import TARGETS
from dataparallel.threads.timeline import Timeline

Weight: TypeAlias = Literal["samples"] | Callable[..., float | Tensor]


class Fraction(NamedTuple):
    """The contribution of one replica to the loss of the batch."""

    #: 0-d; the losses themselves if they are not reduced.
    numerator: Tensor
    #: None if the losses are not reduced.
    denominator: Tensor | float | None
    #: The dtype of the loss, which may be narrower than the sum; None for a chunk without weight.
    dtype: torch.dtype | None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses of ``dtype`` are summed."""
    # A sum over a batch leaves the range of float16 long before the mean does.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _total(losses: Tensor) -> Tensor:
    return losses.sum(dtype=_wide(losses.dtype))


# --- torch's own criteria --------------------------------------------------------------------


def _element_weights(losses: Tensor, named: Mapping[str, Any]) -> Tensor | float:
    weight = named.get("weight")
    return losses.numel() if weight is None else _total(weight)


def _targets(losses: Tensor, named: Mapping[str, Any]) -> Tensor | float:
    """Class indices count with their class weight unless ignored; probabilities count as 1."""
    target: Tensor = named["target"]
    weight = named.get("weight")
    if target.is_floating_point():
        return losses.numel()
    # None ignores nothing; no target is NaN.
    ignored = named.get("ignore_index", -100)
    valid: Tensor = target != (math.nan if ignored is None else ignored)
    if weight is None:
        return valid.sum()
    return _total(weight[target.long().where(valid, 0)].where(valid, 0))


class Rule(NamedTuple):
    """The rule for one of torch's criteria."""

    function: Callable[..., Tensor]
    #: True if output and target of other shapes are broadcast silently.
    broadcasts: bool = False
    #: The divisor of the mean, from the losses and the arguments by name; None: their number.
    denominator: Callable[[Tensor, Mapping[str, Any]], Tensor | float] | None = None


_RULES: dict[type[nn.Module], Rule] = {
    nn.BCELoss: Rule(F.binary_cross_entropy),
    nn.BCEWithLogitsLoss: Rule(F.binary_cross_entropy_with_logits),
    nn.CosineEmbeddingLoss: Rule(F.cosine_embedding_loss),
    nn.CrossEntropyLoss: Rule(F.cross_entropy, denominator=_targets),
    nn.CTCLoss: Rule(F.ctc_loss),
    nn.GaussianNLLLoss: Rule(F.gaussian_nll_loss, broadcasts=True),
    nn.HingeEmbeddingLoss: Rule(F.hinge_embedding_loss, broadcasts=True),
    nn.HuberLoss: Rule(F.huber_loss, broadcasts=True),
    nn.KLDivLoss: Rule(F.kl_div, broadcasts=True),
    nn.L1Loss: Rule(F.l1_loss, broadcasts=True, denominator=_element_weights),
    nn.MSELoss: Rule(F.mse_loss, broadcasts=True, denominator=_element_weights),
    nn.MarginRankingLoss: Rule(F.margin_ranking_loss, broadcasts=True),
    nn.MultiLabelMarginLoss: Rule(F.multilabel_margin_loss),
    nn.MultiLabelSoftMarginLoss: Rule(F.multilabel_soft_margin_loss, broadcasts=True),
    nn.MultiMarginLoss: Rule(F.multi_margin_loss),
    nn.NLLLoss: Rule(F.nll_loss, denominator=_targets),
    nn.PoissonNLLLoss: Rule(F.poisson_nll_loss, broadcasts=True),
    nn.SmoothL1Loss: Rule(F.smooth_l1_loss, broadcasts=True),
    nn.SoftMarginLoss: Rule(F.soft_margin_loss, broadcasts=True),
    nn.TripletMarginLoss: Rule(F.triplet_margin_loss),
    nn.TripletMarginWithDistanceLoss: Rule(F.triplet_margin_with_distance_loss),
}
if hasattr(nn, "LinearCrossEntropyLoss"):
    _RULES[nn.LinearCrossEntropyLoss] = _RULES[nn.CrossEntropyLoss]


def _rule_of(criterion: Callable[..., Any]) -> Rule | None:
    """Return the rule for one of torch's own criteria; None for any other."""
    if isinstance(criterion, nn.Module):
        found = type(criterion)
        if "forward" in vars(criterion) or found.__call__ is not nn.Module.__call__:
            return None
        known = (kind for kind in _RULES if issubclass(found, kind))
        return next((_RULES[kind] for kind in known if found.forward is kind.forward), None)
    if isinstance(criterion, functools.partial) and not criterion.args:
        criterion = criterion.func
    return next((rule for rule in _RULES.values() if rule.function is criterion), None)


def is_known(criterion: Callable[..., Any] | None) -> bool:
    """True if it is one of torch's own criteria, whose denominator is known."""
    return criterion is not None and _rule_of(criterion) is not None


def _unreduced(
    criterion: Callable[..., Any], output: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    """Return a function that computes unreduced losses, and its arguments by name, in order."""
    if isinstance(criterion, nn.Module):
        # The user's own stays as it is.
        quiet = object.__new__(type(criterion))
        vars(quiet).update(vars(criterion), reduction="none")
        keys = ("weight", "ignore_index")
        settings = {key: getattr(quiet, key) for key in keys if hasattr(quiet, key)}
        bound = inspect.signature(quiet.forward).bind(output, *args, **kwargs)
        return functools.partial(quiet, output, *args, **kwargs), bound.arguments | settings
    function, keywords = criterion, {}
    if isinstance(criterion, functools.partial):
        function, keywords = criterion.func, criterion.keywords
    moved = {k: _moved(value, output.device) for k, value in keywords.items() if k != "reduction"}
    given = {**moved, **kwargs}
    bound = inspect.signature(function).bind(output, *args, **given)
    # A reduction among the targets is an error here.
    return functools.partial(function, output, *args, reduction="none", **given), bound.arguments


# --- any criterion ---------------------------------------------------------------------------


def arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: a tuple or a dict as such, anything else as one of them."""
    if type(value) is tuple:
        return value, {}
    if type(value) is dict:
        return (), value
    return (value,), {}


class Loss:
    """The loss of one batch, on a device; for its arguments see ``DataParallel.loss``."""

    def __init__(
        self,
        criterion: Callable[..., Any],
        weight: Weight | None,
        dim: int,
        device: torch.device,
    ) -> None:
        name, rule = _name_of(criterion), _rule_of(criterion)
        if isinstance(criterion, type):
            name = criterion.__name__
            raise TypeError(f"the criterion is the class {name}, not an object; pass {name}(...)")
        self.criterion, self._rule, self._weight, self._dim = criterion, rule, weight, dim
        self._device = device
        #: The criterion as a module, whose clones replicas want; None for a function.
        self.module = criterion if isinstance(criterion, nn.Module) else None
        self._reduction, self._smooths = "weighted", False
        if rule is None:
            if weight == "samples" or callable(weight):
                return
            raise ValueError(
                f"what {name} divides its loss by is not known, so the losses of the chunks cannot "
                f'be weighted with weight={weight!r}; pass weight="samples" if it is a mean over '
                "samples, or a function of its arguments that returns what it divides by, for "
                "example weight=lambda output, target: (target != -100).sum(). Known are the "
                "losses of torch.nn and torch.nn.functional, and functools.partial of those with "
                "keywords"
            )
        if weight is not None:
            raise ValueError(
                f"{name} knows its denominator itself, so weight={weight!r} has no meaning; "
                "leave it out, or wrap the criterion in a function of your own"
            )
        options = vars(criterion)
        if isinstance(criterion, functools.partial):
            options = criterion.keywords
        self._smooths = bool(options.get("label_smoothing"))
        self._reduction = reduction = options.get("reduction", "mean")
        known = ("mean", "sum", "none", *(["batchmean"] if rule.function is F.kl_div else []))
        if reduction not in known:
            raise ValueError(f"the reduction of {name} is one of {known}, but is {reduction!r}")
        if reduction == "batchmean" and dim != 0:
            raise ValueError(
                f"reduction='batchmean' divides by the size of dimension 0, but the batch is "
                f"dimension {dim}; use reduction='sum' and divide the loss"
            )

    def __call__(
        self,
        timeline: Timeline,
        replica: nn.Module,
        criterion: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Fraction:
        """Run one replica and its criterion; called in the replica's thread."""
        own = dict(kwargs)
        targets, named = arguments(own.pop(TARGETS))
        output = replica(*args, **own)
        with timeline.span_here("loss"):
            return self.local(criterion, output, targets, named, samples)

    def local(
        self,
        criterion: Callable[..., Any],
        output: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Fraction:
        """Return the contribution of one replica, from its output."""
        if self._rule is None:
            return self._weighted(criterion, output, args, kwargs, samples)
        name = _name_of(criterion)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{name} takes a tensor, but the module returned {type(output).__name__}; "
                "pass a function that picks the tensor, and weight="
            )
        compute, named = _unreduced(criterion, output, args, kwargs)
        shape, target = tuple(output.shape), list(named.values())[1]
        aligned = not isinstance(target, Tensor) or target.dim() in (0, output.dim())
        if self._rule.broadcasts and not aligned:
            raise ValueError(
                f"{name} would compare every output of shape {shape} with every target of shape "
                f"{tuple(target.shape)}, across samples; give both the same dimensions"
            )
        losses = compute()
        if not (output.dim() and losses.dim()) or "reduce" in named:
            raise ValueError(
                f"{name} has no loss for each sample of the output, which has shape {shape}: it "
                "needs a batch dimension; and size_average= and reduce= are not supported, use "
                f"functools.partial({name}, reduction=...)"
            )
        if self._reduction == "none":
            return Fraction(losses, None, losses.dtype)
        dtype = losses.dtype
        # The divisor of "batchmean"; a sum is not divided.
        denominator: Tensor | float = output.size(0)
        if self._reduction == "mean":
            find = self._rule.denominator
            denominator = losses.numel() if find is None else find(losses, named)
            if self._rule.function is F.ctc_loss:
                # It divides each loss by the length of its target first.
                lengths = torch.as_tensor(named["target_lengths"], device=losses.device)
                losses = losses / lengths.clamp_min(1)
        return Fraction(_total(losses), denominator, dtype)

    def _weighted(
        self,
        criterion: Callable[..., Any],
        output: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: int,
    ) -> Fraction:
        weight: float = samples
        if callable(self._weight):
            weight = read_weight("weight=", self._weight(output, *args, **kwargs))
        if weight == 0:
            # The loss of a chunk without weight is often 0/0; even times zero it would be NaN.
            return Fraction(torch.zeros(()), 0, None)
        loss = criterion(output, *args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise TypeError(f"{_name_of(criterion)} must return a 0-d tensor, but returned {found}")
        return Fraction(loss.to(_wide(loss.dtype)) * weight, weight, loss.dtype)

    def combine(self, fractions: Sequence[Fraction]) -> Tensor:
        """Turn the contributions of the replicas, in their order, into the loss of the batch."""
        device = self._device
        numerators = [one.numerator.to(device) for one in fractions]
        if self._reduction == "none":
            dims = numerators[0].dim()
            return torch.cat(numerators, self._dim if -dims <= self._dim < dims else 0)
        dtypes = [one.dtype for one in fractions if one.dtype is not None]
        if not dtypes:
            raise ValueError("weight= is zero for every chunk of the batch, so there is no loss")
        total: Tensor = functools.reduce(torch.add, numerators)
        if self._reduction != "sum":
            denominators = [_moved(one.denominator, device) for one in fractions]
            denominator = functools.reduce(operator.add, denominators)
            total = total / denominator
            if self._smooths and isinstance(denominator, Tensor):
                # Torch adds the part that is not smoothed, which is 0/0 then.
                total = total.masked_fill(denominator == 0, math.nan)
        return total.to(functools.reduce(torch.promote_types, dtypes))


def _name_of(criterion: Callable[..., Any]) -> str:
    function = criterion.func if isinstance(criterion, functools.partial) else criterion
    return getattr(function, "__name__", type(function).__name__)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
