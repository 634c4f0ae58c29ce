"""The weight of a chunk's loss in the loss of the batch, found by comparison.

Note [How losses of chunks make the batch's]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Trainer counts the labels in all batches of a step, and gives the number to the model. Some models
divide the sum of their losses by it: then the losses of chunks add up. Others take a mean whatever
they are given, over the labels of the chunk, over these without the first, or over its samples.
Neither a signature nor a docstring tells which. So the bare model runs on two samples, together and
one by one. The gradient of the loss by the logits shows exactly how much each sample counts. It
also shows if the loss mixes samples, so that no sum over chunks is the batch's.

Two rules may be equal on a batch, such as labels and samples if no label is ignored. Then the next
batch on which they differ decides. To see that costs a wait for the device at each forward.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dataparallel import torch_internals
from dataparallel.batch.tree import flatten
from dataparallel.errors import add_note, describe_names
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.threads.random import default_generator

_log = logging.getLogger("dataparallel")

#: The rule of losses that add up; the others are named after what they count in a chunk.
_SUM = "sum"


class _Known(NamedTuple):
    """The facts about the losses of calls with the same arguments."""

    #: The rules that may be right, the best first.
    rules: Sequence[str]
    #: Their largest distance when they were compared.
    tried: float = 0.0


class ChunkLosses:
    """The weights of chunks' losses; see Note [How losses of chunks make the batch's].

    It is the wrapper's ``scalars=``, and :meth:`before` a hook on its forward. The loss is the
    first 0-d output. ``labels`` are names of arguments; None: each tensor of integers may hold
    labels. ``remedy`` tells what to do about losses that cannot be put together. If ``lenient``, it
    warns of random numbers, and of other 0-d outputs that cannot be put together.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: Sequence[str] | None,
        autocast: Callable[[], Any],
        remedy: str,
        *,
        lenient: bool = False,
    ) -> None:
        config = getattr(model, "config", None)
        self._ignored = getattr(config, "semantic_loss_ignore_index", -100)
        self._model, self._labels, self._autocast = model, labels, autocast
        self._remedy, self._lenient = remedy, lenient
        self._known: dict[Hashable, _Known] = {}

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Return the weight of a chunk in the mean of losses; None if losses add up."""
        kwargs["num_items_in_batch"] = num_items_in_batch
        known = self._known.get(_kind(args, kwargs))
        rule = known.rules[0] if known else _SUM
        return None if rule == _SUM else self._counts(args, kwargs)[rule].sum()

    @torch_internals.untraced
    def before(self, wrapper: DataParallel[Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Find out about a batch what is not known yet; a hook before the wrapper's forward."""
        known = self._known.get(_kind(args, kwargs))
        if len(wrapper.device_ids) == 1 or (known is not None and len(known.rules) == 1):
            return
        if _with_dims(flatten((args, kwargs))[0]):
            counts = self._counts(args, kwargs)
            known = known or _Known([*counts, _SUM])
            self._known[_kind(args, kwargs)] = self._compare(args, kwargs, known, counts)

    def _counts(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """By rule what each sample counts."""
        counts: dict[str, Tensor] = {}
        leaves, structure = flatten((args, kwargs))
        first = _with_dims(leaves)[0]
        if self._labels is None:
            named = dict(zip(structure.paths("arguments"), leaves, strict=True))
        else:
            named = {name: kwargs.get(name) for name in self._labels}
        for name, value in named.items():
            if not _with_dims([value]) or value.is_floating_point() or len(value) != len(first):
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
        """Run the model on two samples, if these tell more, and return the new facts."""
        means = [rule for rule in known.rules if rule != _SUM]
        table = torch.stack([counts[rule] for rule in means]).cpu().double()
        ours, theirs, apart = _most_different(table)
        learnt = _SUM not in known.rules and apart <= 2 * known.tried
        if learnt or ours == theirs or not table[0, ours]:
            return known
        shares = (table[:, ours] / (table[:, ours] + table[:, theirs]).clamp_min(1)).tolist()
        weights = {rule: (share, 1 - share) for rule, share in zip(means, shares, strict=True)}
        weights[_SUM] = (1.0, 1.0)
        with _left_as_it_is(self._model) as draws, self._autocast(), torch.enable_grad():
            pieces = [ours, theirs], [ours], [theirs]
            try:
                ran = [_run(self._model, args, kwargs, rows) for rows in pieces]
            except Exception as error:
                add_note(error, f"{_name(args)} ran on two samples, to compare. {self._remedy}")
                raise
            is_random = draws()
        if not ran[0].scalars:
            return _Known([_SUM])
        if is_random and self._lenient:
            _log.warning(
                "%s draws random numbers, so nothing can be compared, and the losses of chunks are "
                "averaged by samples. %s",
                _name(args),
                self._remedy,
            )
            return _Known(["samples"])
        off = {rule: _distances(weights[rule], *ran) for rule in known.rules}
        return _Known(self._decide(args, weights, off, ran), apart)

    def _decide(
        self,
        args: Any,
        weights: Mapping[str, Sequence[float]],
        off: Mapping[str, Mapping[str, float]],
        ran: Sequence[_Ran],
    ) -> Sequence[str]:
        """Return the rules that derive the loss of two samples from those of each, best first."""
        loss = next(iter(ran[0].scalars))
        best = min(off, key=lambda rule: off[rule][loss])
        others = [name for name in off[best] if name != loss and off[best][name] > 1]
        if others and self._lenient:
            _log.warning(
                "%s: %s of the batch is not the mean of that of the chunks, as the loss is, and "
                "replicas give that mean; compute it from outputs of the whole batch",
                _name(args),
                describe_names(others),
            )
        if off[best][loss] > 1 or (others and not self._lenient):
            tried = "; ".join(f"{rule}: {a:.3g} and {b:.3g}" for rule, (a, b) in weights.items())
            both, one, other = (float(each.scalars[loss]) for each in ran)
            raise ValueError(
                f"the loss of two samples is {both:.6g}, and of each alone {one:.6g} and "
                f"{other:.6g}. No known weights of these two ({tried}) make the former, its "
                "gradient and the other 0-d outputs. So the losses of chunks do not make that of "
                "the batch: the loss mixes samples, adds means over different things, or depends "
                f"on random numbers. {self._remedy}"
            )
        most = 4 * off[best][loss] + 1e-4
        return sorted((x for x in off if off[x][loss] <= most), key=lambda x: off[x][loss])


def _kind(args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    """Return the common properties of calls whose losses are made in the same way."""
    given = frozenset([name for name, value in kwargs.items() if value is not None])
    return given, *(value for value in args if isinstance(value, str))


def _name(args: Any) -> str:
    return next((value for value in args if isinstance(value, str)), "the model")


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
    """The results of a model for some samples."""

    #: The 0-d outputs, the loss first.
    scalars: Mapping[str, Tensor]
    #: The gradients of the loss by other outputs.
    gradients: Sequence[Tensor]


def _run(model: nn.Module, args: Any, kwargs: Mapping[str, Any], rows: list[int]) -> _Ran:
    leaves, structure = flatten((args, kwargs))
    size = len(_with_dims(leaves)[0])
    picked = [x[rows] if _with_dims([x]) and len(x) == size else x for x in leaves]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found, built = flatten(torch.func.functional_call(model, buffers, *structure.rebuild(picked)))
    outputs = {
        name: x
        for name, x in zip(built.paths("outputs"), found, strict=True)
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    scalars = {name: x for name, x in outputs.items() if not x.dim()}
    loss = next(iter(scalars.values()), None)
    logits = _with_dims(list(outputs.values()))
    logits = [x for x in logits if len(x) == len(rows) and x.requires_grad]
    gradients: Sequence[Tensor] = ()
    if loss is not None and loss.requires_grad and logits:
        gradients = torch.autograd.grad(loss, logits, materialize_grads=True)
    return _Ran({name: x.detach() for name, x in scalars.items()}, gradients)


def _distances(weights: Sequence[float], both: _Ran, *each: _Ran) -> dict[str, float]:
    """Measure, by output, how far two samples are from their weighted sum; up to 1 is rounding."""
    tensors = [*both.scalars.values(), *both.gradients]
    tolerance = 5e-2 if any(x.dtype.itemsize < 4 for x in tensors) else 1e-3
    off = {}
    for name, whole in both.scalars.items():
        # A value without weight may be no number.
        parts = [w * r.scalars[name].double() for w, r in zip(weights, each, strict=True) if w]
        off[name] = _gap(whole, torch.stack(parts).sum()) / tolerance
    least = 1e-3 * max([float(x.double().norm()) for x in both.gradients], default=0.0)
    loss = next(iter(off))
    for whole, *rows in zip(both.gradients, *(ran.gradients for ran in each), strict=True):
        for found, row, w in zip(whole, rows, weights, strict=True):
            if found.shape == row[0].shape:
                expected = w * row[0].double() if w else torch.zeros_like(found)
                off[loss] = max(off[loss], _gap(found, expected, least) / tolerance)
    return off


def _gap(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the distance between two tensors, relative to the larger one."""
    size = max(float(found.double().norm()), float(expected.norm()), least)
    gap = float((found.double() - expected).norm())
    return math.inf if math.isnan(gap) else gap / (size or 1.0)


@contextlib.contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Evaluate a module within the ``with`` block, and leave nothing of it changed.

    Gives what tells whether random numbers have been drawn.
    """
    homes = {torch.device("cpu"), *(parameter.device for parameter in model.parameters())}
    generators = [own for own in map(default_generator, homes) if own is not None]
    states = [(own, own.get_state()) for own in generators]
    # Attributes, and what is in their lists and dicts.
    tables = [vars(module) for module in model.modules()]
    values = [*tables, *(value for table in tables for value in table.values())]
    kept = [(x, copy.copy(x)) for x in values if type(x) in (dict, list)]
    tensors = [(x, x.clone()) for x in values if isinstance(x, Tensor) and not x.requires_grad]
    model.eval()
    try:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, lambda pair: pair[1].to(pair[0])):
            yield lambda: not all(own.get_state().equal(state) for own, state in states)
    finally:
        for value, before in kept:
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(before)
        for tensor, content in tensors:
            tensor.copy_(content)
        for own, state in states:
            own.set_state(state)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Keep on the host what a graph saves; without activation checkpointing it may be much."""
    base = torch_internals.base_of(tensor)
    is_parameter = isinstance(tensor if base is None else base, nn.Parameter)
    return tensor.device, tensor if is_parameter else tensor.cpu()
