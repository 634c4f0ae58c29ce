"""What the loss of a chunk counts in that of the batch, found out by comparing.

Note [How losses of chunks make the batch's]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Trainer counts the labels in all batches of a step, and gives the number to the model. Some models
divide the sum of their losses by it: then the losses of chunks add up. Others take a mean whatever
they are given, over the labels of the chunk, over these without the first, or over its samples.
Neither a signature nor a docstring tells which. So the bare model runs on two samples, together and
one by one. The gradient of the loss by the logits shows how much each sample counts, exactly, and
also whether the loss mixes samples, so that no sum over chunks is the batch's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dataparallel.batch.tree import flatten
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.threads.random import default_generator

#: The rule of losses that add up; the others are named after what they count in a chunk.
_SUM = "sum"


class _Known(NamedTuple):
    """What is known of the losses of calls with the same arguments."""

    #: The rules that may be right, the best first.
    rules: Sequence[str]
    #: How far they were apart, at most, where they were compared.
    tried: float = 0.0


class ChunkLosses:
    """What the loss of a chunk counts; see Note [How losses of chunks make the batch's].

    It is the wrapper's ``scalars=``, and :meth:`before` a hook on its forward.
    """

    def __init__(
        self, labels: Sequence[str], model: nn.Module, autocast: Callable[[], Any]
    ) -> None:
        config = getattr(model, "config", None)
        self._ignored = getattr(config, "semantic_loss_ignore_index", -100)
        self._labels = dict.fromkeys([*labels, "labels", "shift_labels"])
        self._model, self._autocast = model, autocast
        self._known: dict[frozenset[str], _Known] = {}

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """What a chunk counts in the mean of losses; None where losses add up."""
        given = {**kwargs, "num_items_in_batch": num_items_in_batch}
        known = self._known.get(_names(given))
        rule = known.rules[0] if known else _SUM
        return None if rule == _SUM else self._counts(args, given)[rule].sum()

    def before(self, wrapper: DataParallel[Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Find out about a batch what is not known yet; a hook before the wrapper's forward."""
        names = _names(kwargs)
        known = self._known.get(names)
        several = len(wrapper.device_ids) > 1 and bool(_with_dims(flatten((args, kwargs))[0]))
        if several and (known is None or len(known.rules) > 1):
            counts = self._counts(args, kwargs)
            known = known or _Known([*counts, _SUM])
            self._known[names] = self._compare(args, kwargs, known, counts)

    def _counts(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """By rule what each sample counts."""
        counts: dict[str, Tensor] = {}
        first = _with_dims(flatten((args, kwargs))[0])[0]
        for name in self._labels:
            value = kwargs.get(name)
            if not isinstance(value, Tensor) or value.is_floating_point() or not value.dim():
                continue
            valid = (value != self._ignored).long()
            counts[f"labels in {name}"] = valid.view(len(valid), -1).sum(1)
            if valid.dim() > 1 and valid.size(-1) > 1:
                later = valid[..., 1:].flatten(1)
                counts[f"labels in {name}, without the first"] = later.sum(1)
        counts["samples"] = torch.ones(len(first), dtype=torch.long, device=first.device)
        return counts

    def _compare(
        self, args: Any, kwargs: Mapping[str, Any], known: _Known, counts: Mapping[str, Tensor]
    ) -> _Known:
        """What is known after the model has run on two samples, if these tell more."""
        means = [rule for rule in known.rules if rule != _SUM]
        table = torch.stack([counts[rule] for rule in means]).cpu().double()
        ours, theirs, apart = _most_different(table)
        learnt = _SUM not in known.rules and apart <= 2 * known.tried
        if learnt or ours == theirs or not table[0, ours]:
            return known
        shares = (table[:, ours] / (table[:, ours] + table[:, theirs]).clamp_min(1)).tolist()
        weights = {rule: (share, 1 - share) for rule, share in zip(means, shares, strict=True)}
        weights[_SUM] = (1.0, 1.0)
        with _left_as_it_is(self._model), self._autocast(), torch.enable_grad():
            pieces = [ours, theirs], [ours], [theirs]
            ran = [_run(self._model, args, kwargs, rows) for rows in pieces]
        if not ran[0].scalars:
            return _Known([_SUM])
        off = {rule: _distance(weights[rule], *ran) for rule in known.rules}
        best = min(off.values())
        if best > 1:
            _refuse(weights, [float(each.scalars[0]) for each in ran])
        rules = sorted((rule for rule in off if off[rule] <= 4 * best + 1e-4), key=off.__getitem__)
        return _Known(rules, apart)


def _refuse(weights: Mapping[str, Sequence[float]], losses: Sequence[float]) -> None:
    """Refuse losses that cannot be put together."""
    tried = "; ".join(f"{rule}: {a:.3g} and {b:.3g}" for rule, (a, b) in weights.items())
    raise ValueError(
        f"the model's loss of two samples is {losses[0]:.6g}, and of each alone {losses[1]:.6g} "
        f"and {losses[2]:.6g}. No known weights of these two ({tried}) make the former, its "
        "gradient and the other 0-d outputs. So the losses of chunks do not make that of the "
        "batch: the model mixes samples, adds means over different things, or draws random "
        "numbers. Pass compute_loss_func=, which gets the outputs of the whole batch; or, if you "
        'know what chunks count, wrapper_options={"scalars": ...}'
    )


def _names(given: Mapping[str, Any]) -> frozenset[str]:
    return frozenset([name for name, value in given.items() if value is not None])


def _with_dims(leaves: Sequence[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor) and x.dim()]


def _most_different(table: Tensor) -> tuple[int, int, float]:
    """Two samples on which rules differ most, the first with the most labels; and how far."""
    ours = int(table[0].argmax())
    shares = table / (table + table[:, ours, None]).clamp_min(1)
    apart = (shares.amax(0) - shares.amin(0)) / shares.amin(0).clamp_min(1e-3)
    # A sample without labels may have no loss.
    apart[(table == 0).any(0)] *= 1e-6
    apart[ours] = -1
    theirs = int(apart.argmax())
    return ours, theirs, float(apart[theirs])


# --- the bare model on some samples --------------------------------------------------------------


class _Ran(NamedTuple):
    """What a model made of some samples."""

    #: The 0-d outputs, the loss first.
    scalars: Sequence[Tensor]
    #: The gradients of the loss by other outputs.
    gradients: Sequence[Tensor]


def _run(model: nn.Module, args: Any, kwargs: Mapping[str, Any], rows: list[int]) -> _Ran:
    leaves, structure = flatten((args, kwargs))
    size = len(_with_dims(leaves)[0])
    picked = [x[rows] if _with_dims([x]) and len(x) == size else x for x in leaves]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = torch.func.functional_call(model, buffers, *structure.rebuild(picked))
    outputs = [x for x in flatten(found)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    scalars = [output for output in outputs if not output.dim()]
    logits = [x for x in _with_dims(outputs) if len(x) == len(rows) and x.requires_grad]
    gradients: Sequence[Any] = ()
    if scalars and scalars[0].requires_grad and logits:
        gradients = torch.autograd.grad(scalars[0], logits, materialize_grads=True)
    return _Ran([scalar.detach() for scalar in scalars], gradients)


def _distance(weights: Sequence[float], both: _Ran, *each: _Ran) -> float:
    """How far two samples are from the weighted sum of each; up to 1 it may be rounding."""
    # What has no weight may be no number.
    scalars = [
        sum(w * part.double() for w, part in zip(weights, parts, strict=True) if w)
        for parts in zip(*(one.scalars for one in each), strict=True)
    ]
    pairs: list[Any] = list(zip(both.scalars, scalars, strict=True))
    for whole, *parts in zip(both.gradients, *(one.gradients for one in each), strict=True):
        for row, part, w in zip(whole, parts, weights, strict=True):
            if part[0].shape == row.shape:
                pairs.append((row, part[0].double() * w if w else torch.zeros_like(row)))
    least = 1e-3 * max([float(g.double().norm()) for g in both.gradients], default=0.0)
    gaps = [_gap(found, expected, least) for found, expected in pairs]
    tolerance = 5e-2 if any(found.dtype.itemsize < 4 for found, _ in pairs) else 1e-3
    return max(gaps) / tolerance


def _gap(found: Tensor, expected: Tensor, least: float) -> float:
    size = max(float(found.double().norm()), float(expected.norm()), least)
    gap = float((found.double() - expected).norm())
    return math.inf if math.isnan(gap) else gap / (size or 1.0)


@contextlib.contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Evaluate a module within the ``with`` block, and leave nothing of it changed."""
    homes = {torch.device("cpu"), *(parameter.device for parameter in model.parameters())}
    generators = [each for each in map(default_generator, homes) if each is not None]
    states = [each.get_state() for each in generators]
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    model.eval()
    try:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, lambda kept: kept[1].to(kept[0])):
            yield
    finally:
        for own, before in attributes:
            own.clear()
            own.update(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Keep on the host what a graph saves; without activation checkpointing it may be much."""
    owner = tensor if tensor._base is None else tensor._base
    return tensor.device, tensor if isinstance(owner, nn.Parameter) else tensor.cpu()
