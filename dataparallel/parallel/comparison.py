"""Runs of a module and of wrappers on one batch, all on copies, and what differs in results."""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dataparallel.batch.gather import gather
from dataparallel.batch.scatter import Arguments, move
from dataparallel.batch.tree import LEAF, Structure, flatten, held_tensors
from dataparallel.errors import add_note
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.differences import FAULT, MISSED, Gap, Incomparable
from dataparallel.parallel.loss import is_known
from dataparallel.threads.random import default_generator

#: A part of the results, such as ``"outputs"``, and the name of a value in it.
Key: TypeAlias = tuple[str, str]
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNNBase, nn.MultiheadAttention),
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# The attributes that every module has.
_OF_MODULES = set(vars(nn.Module()))


# --- copies --------------------------------------------------------------------------------------


def copied(model: Any, *, drops: bool = False) -> Any:
    """Return a deep copy, without dropout, and without graphs that attributes kept."""
    module = model.module if isinstance(model, DataParallel) else model
    held = [tensor for part in module.modules() for tensor in held_tensors(vars(part))]
    memo = {id(tensor): tensor.detach().clone() for tensor in held if tensor.grad_fn is not None}
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        add_note(error, "verify() works on deep copies of the module, and this one has no copy")
        raise
    for part in [] if drops else dropouts(made):
        vars(part).update(dict.fromkeys(vars(part).keys() & {"p", "dropout"}, 0.0))
    return made


def dropouts(module: nn.Module) -> list[nn.Module]:
    """Return the layers that drop something."""
    layers = [part for part in module.modules() if isinstance(part, _DROPOUTS) and part.training]
    return [part for part in layers if vars(part).get("p") or vars(part).get("dropout")]


def _fresh(values: Any) -> Any:
    """Return a copy of arguments, in which tensors that require grad are leaves."""
    memo: dict[int, Any] = {}
    for leaf in flatten(values)[0]:
        for tensor in held_tensors(leaf):
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        try:
            copy.deepcopy(leaf, memo)
        except (TypeError, ValueError, RuntimeError):
            # Such as a random generator.
            memo[id(leaf)] = leaf
    return copy.deepcopy(values, memo)


class Generators:
    """The random generators of the caller, and their states at the beginning."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        every = {torch.default_generator, *map(default_generator, devices)}
        self._states = {each: each.get_state() for each in every if each is not None}
        # If nobody has imported it, nobody draws from it.
        numpy = getattr(sys.modules.get("numpy"), "random", None)
        self._others: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = [
            (get, put, get())
            for get, put in (
                (random.getstate, random.setstate),
                *([(numpy.get_state, numpy.set_state)] if numpy else []),
            )
        ]

    def restore(self) -> None:
        """Let all be as they were at the beginning."""
        for generator, state in self._states.items():
            generator.set_state(state)
        for _, put, state in self._others:
            put(state)

    def have_drawn(self) -> bool:
        """True if any is not as it was at the beginning."""
        return any(not g.get_state().equal(state) for g, state in self._states.items()) or any(
            str(get()) != str(state) for get, _, state in self._others
        )


# --- runs ----------------------------------------------------------------------------------------


class Unknown(NamedTuple):
    """A stand-in for an object that is no container, with the tensors in it."""

    kind: str
    tensors: list[Tensor]

    def __repr__(self) -> str:
        return self.kind


@dataclass
class Results:
    """The comparable results of one run, on the CPU; and the errors that ended it, by part."""

    values: dict[Key, Any] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    #: The structure of the output.
    structure: Structure = LEAF
    #: The attributes in which the forward has left losses.
    losses: Collection[str] = ()

    def add(self, part: str, name: str, value: Any) -> Structure:
        """Add the leaves of a value, each under an expression such as ``output['loss']``."""
        leaves, structure = flatten(value)
        for path, leaf in zip(structure.paths(name), leaves, strict=True):
            if isinstance(leaf, Tensor):
                dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
                self.values[part, path] = dense.to("cpu", copy=True)
            elif isinstance(leaf, _PLAIN):
                self.values[part, path] = leaf
            elif part == "outputs":
                held = [tensor.detach().to("cpu", copy=True) for tensor in held_tensors(leaf)]
                self.values[part, path] = Unknown(type(leaf).__name__, held)
        return structure

    def add_gradients(self, total: Any, module: nn.Module, given: Arguments, part: str) -> None:
        """Run a backward, and add the gradients of parameters and inputs."""
        if not (isinstance(total, Tensor) and total.requires_grad):
            return
        torch.autograd.backward(total)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self.add(part, name, parameter.grad)
        leaves, structure = flatten(given)
        for path, leaf in zip(structure.paths(""), leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.add("input gradients" if part == "gradients" else part, path, leaf.grad)

    def shapes(self) -> dict[Key, torch.Size]:
        """Return the shapes of the outputs."""
        outputs = [(key, value) for key, value in self.values.items() if key[0] == "outputs"]
        return {key: value.shape for key, value in outputs if isinstance(value, Tensor)}


def attributes(module: nn.Module) -> Results:
    """Return the plain attributes of a module and of its parts."""
    found = Results()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OF_MODULES and not isinstance(value, nn.Parameter):
                found.add("attributes", f"{path}.{name}".removeprefix("."), value)
    return found


@dataclass(frozen=True)
class Case:
    """A run to make: a wrapper or its module, the batch, and the loss."""

    model: DataParallel[Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]
    loss: Callable[..., Any] | None
    generators: Generators

    @property
    def device(self) -> torch.device | None:
        """Return the device of the bare module; None if it is on several devices."""
        return None if self.model._is_model_parallel else self.model.device_ids[0]

    @property
    def has_known_loss(self) -> bool:
        """True if ``model.loss`` can be compared, too."""
        has_one_kind = not (self.inputs and self.kwargs)
        return bool(self.targets) and is_known(self.loss) and has_one_kind

    def run_module(self, module: nn.Module) -> Results:
        """Run the bare module, or raise its error."""
        return self.run(
            module, lambda *args, **kw: module(*move(args, self.device), **move(kw, self.device))
        )

    def run_wrappers(
        self,
        make: Callable[[], Any],
        like: Results,
        tell: Callable[[BaseException], None] = lambda _: None,
    ) -> Results:
        """Run wrappers that are made anew, for the output and for ``model.loss``."""
        found = Results()
        runs: list[Callable[..., Results]] = [self.run, self._run_loss]
        for run in runs[: 1 + self.has_known_loss]:
            try:
                wrapper = make()
            except (TypeError, ValueError) as error:
                found.errors["outputs"] = error
                return found
            try:
                more = run(wrapper.module, wrapper, like, tell)
            finally:
                wrapper.close()
            found.values.update(more.values)
            found.errors.update(more.errors)
        return found

    def run(
        self, module: nn.Module, call: Any, like: Results | None = None, tell: Any = None
    ) -> Results:
        """Run a call and a backward. It may raise, unless it is to be ``like`` another."""
        given, targets = _fresh((Arguments(self.inputs, self.kwargs), self.targets))
        found, part = Results(), "outputs"
        self.generators.restore()
        try:
            output = call(*given.inputs, **given.kwargs)
            if isinstance(call, DataParallel) and call.output_device == "each":
                output = gather(output, self.device, call.dim, out_dims=call.out_dims)
            found.structure = found.add("outputs", "output", output)
            part = "gradients" if self.loss is None else "loss"
            total = self._total(output, targets, found, like)
            part = "gradients"
            total = _with_losses(total, module, found, like)
            found.add_gradients(total, module, given, part)
        except Exception as error:
            if like is None:
                raise
            if tell is not None:
                tell(error)
            found.errors[part] = error
        if part != "outputs":
            for name, buffer in module.named_buffers():
                found.add("buffers", name, buffer)
            found.values.update(attributes(module).values)
        return found

    def _total(self, output: Any, targets: Any, found: Results, like: Results | None) -> Any:
        """Return the number whose gradients are compared; None if nothing requires grad."""
        leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        if self.loss is not None:
            loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
            result = loss(output, *move(targets, leaves[0].device if leaves else None))
            found.add("loss", "loss", result)
            return result
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor) and own.requires_grad:
            return own
        if like is not None and found.shapes() != like.shapes():
            raise Incomparable("not compared, since outputs have other shapes")
        terms = []
        for seed, leaf in enumerate(leaves):
            if leaf.requires_grad:
                real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
                noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(seed))
                terms.append((real * noise.to(real)).sum())
        return sum(terms[1:], terms[0]) if terms else None

    def _run_loss(self, module: nn.Module, wrapper: Any, like: Results, tell: Any) -> Results:
        """Run ``model.loss`` and its backward."""
        given, targets = _fresh((Arguments(self.inputs, self.kwargs), self.targets))
        found = Results()
        self.generators.restore()
        try:
            total = wrapper.loss(self.loss, given.kwargs or tuple(given.inputs), *targets)
            found.add("model.loss", "loss", total)
            total = _with_losses(total, module, found, like)
            found.add_gradients(total, module, given, "model.loss")
        except Exception as error:
            tell(error)
            found.errors["model.loss"] = error
        return found


def _with_losses(total: Any, module: nn.Module, found: Results, like: Results | None) -> Any:
    """Add to a loss those that a forward has left in attributes, such as those of experts."""
    graphs = {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    scalars = [name for name, value in graphs.items() if not value.dim()]
    found.losses = scalars if like is None else like.losses
    for name in found.losses:
        if name not in scalars:
            raise Incomparable(f"not compared, since {name} has another shape")
        # None if nothing else requires grad.
        total = graphs[name] if total is None else total + graphs[name].to(total.device)
    return total


# --- the comparison ------------------------------------------------------------------------------


class Comparison:
    """The expected results of a run, and the distance that counts as equal.

    Args:
        expected: The results of the bare module.
        before: The attributes before all runs.
    """

    def __init__(self, expected: Results, before: Results, rtol: float, atol: float | None) -> None:
        self.expected, self._before, self._rtol = expected, before.values, rtol
        sizes: dict[str, float] = {}
        for (part, _), value in expected.values.items():
            if isinstance(value, Tensor):
                sizes[part] = max(sizes.get(part, 0.0), _size(value))
        self._atol = {
            part: rtol / 100 * size if atol is None else atol for part, size in sizes.items()
        }
        values = expected.values.items()
        #: The values to compare: only those attributes that the forward has changed.
        self.values = {k: v for k, v in values if k[0] != "attributes" or self._is_new(k, v)}

    def _is_new(self, key: Key, value: Any) -> bool:
        return key not in self._before or self.gap(key, self._before[key], value) is not None

    def gaps(self, found: Results) -> dict[Key, Gap]:
        """Return the differences of another run."""
        missed = {each for part in found.errors for each in MISSED[part]}
        pairs = {k: (v, found.values.get(k)) for k, v in self.values.items() if k[0] not in missed}
        for key, value in found.values.items():
            if key in pairs or key[0] in missed:
                continue
            inside = any(key[0] == part and key[1].startswith(f"{name}[") for part, name in pairs)
            if not inside and (key[0] != "attributes" or self._is_new(key, value)):
                pairs[key] = self.expected.values.get(key), value
        gaps = {k: gap for k, pair in pairs.items() if (gap := self.gap(k, *pair))}
        return gaps | {(part, FAULT): Gap(_text(error)) for part, error in found.errors.items()}

    def gap(self, key: Key, expected: Any, found: Any) -> Gap | None:
        """Measure how far a value is from the expected one; None if they are equal."""
        if isinstance(expected, float) and isinstance(found, float):
            expected, found = torch.tensor(expected), torch.tensor(found)
        if isinstance(expected, Unknown) and isinstance(found, Unknown):
            pairs = itertools.zip_longest(expected.tensors, found.tensors)
            return next(filter(None, (self.gap(key, *pair) for pair in pairs)), None)
        if not (isinstance(expected, Tensor) and isinstance(found, Tensor)):
            is_same = type(expected) is type(found) and expected == found
            return None if is_same else Gap(f"{_shown(found)} in place of {_shown(expected)}")
        if expected.shape != found.shape:
            return Gap(f"shape {tuple(found.shape)} in place of {tuple(expected.shape)}")
        is_exact = not (expected.is_floating_point() or expected.is_complex())
        rtol, atol = (0.0, 0.0) if is_exact else (self._rtol, self._atol.get(key[0], 0.0))
        return _distance(expected, found, rtol, atol)


def _distance(expected: Tensor, found: Tensor, rtol: float, atol: float) -> Gap | None:
    wide = torch.complex128 if expected.is_complex() or found.is_complex() else torch.float64
    a, b = expected.to(wide), found.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
    size = _size(expected)
    wrong = apart > atol + rtol * size
    if not wrong.any():
        return None
    furthest = apart.max().item()
    relative = furthest / size if size else math.inf
    index = tuple(wrong.nonzero()[0].tolist())
    return Gap(f"off by {furthest:.2g}", furthest, relative, index)


def _size(tensor: Tensor) -> float:
    """Return the largest finite element."""
    sizes = tensor.abs().to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
    return sizes.max().item() if sizes.numel() else 0.0


def _text(error: Exception) -> str:
    if isinstance(error, Incomparable):
        return str(error)
    # Errors of other processes come with their traceback.
    return f"{type(error).__name__}: {error}".partition("\nTraceback")[0]


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
