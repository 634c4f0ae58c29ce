"""The parts of a training that a checkpoint holds: each has a name, and its own way to be saved.

Note [State that is divided among processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.distributed.optim.ZeroRedundancyOptimizer`` has the state of each parameter in one process.
Each process saves what it has, under the parameter's number in the whole; loading puts the parts of
all together, so that it does not matter how many processes there were. Its own way, which sends the
state of all to one process, is made with pickle.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataparallel import torch_internals
from dataparallel.errors import listed
from dataparallel.extras.checkpoint.resumable_sampler import ResumableSampler
from dataparallel.extras.checkpoint.values import name_of_dtype

#: Names of parts that are not objects of the caller's.
RNG, USER = "rng", "user"

# In groups of optimizers, but no options of theirs.
_NOT_OPTIONS = frozenset({"params", "param_names", "initial_lr", "max_lr", "min_lr"})


class Part(Protocol):
    """Saves and loads one object."""

    name: str

    def save(self) -> Any:
        """The state, as a value that a checkpoint can hold."""

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""

    def load(self, saved: Any, strict: bool) -> None:
        """Give the object a state."""

    def remember(self) -> Callable[[], object]:
        """What gives the object the state back that it has now."""


def parts_of(
    model: nn.Module | None,
    optimizer: Any,
    scheduler: Any,
    sampler: Any,
    states: Mapping[str, Any] | None,
) -> dict[str, Part]:
    """The parts of a training, by name, in the order in which they are loaded.

    Raises:
        TypeError: Something is of a type that cannot be saved.
        ValueError: A name is taken.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, but got {type(model).__name__}")
    names = {}
    if model is not None:
        parameters = bare(model).named_parameters(remove_duplicate=False)
        names = {id(parameter): name for name, parameter in parameters}
    given = {"sampler": sampler, "scheduler": scheduler, "optimizer": optimizer, "model": model}
    for name in states or {}:
        if not isinstance(name, str) or name in given or name in (RNG, USER) or not name:
            raise ValueError(
                f"states has the name {name!r}; it must be a text other than "
                f"{', '.join([*given, RNG, USER])}"
            )
    objects = {**(states or {}), **{k: v for k, v in given.items() if v is not None}}
    return {name: _part(name, value, names) for name, value in objects.items()}


def _part(name: str, value: Any, names: Mapping[int, str]) -> Part:
    if isinstance(value, nn.Module):
        return ModuleState(name, value)
    if isinstance(value, Optimizer):
        return OptimizerState(name, value, names)
    if isinstance(value, torch.Generator):
        return GeneratorState(name, value)
    if isinstance(value, ResumableSampler):
        return _PositionState(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return ObjectState(name, value)
    if callable(getattr(value, "set_epoch", None)) and isinstance(
        getattr(value, "epoch", None), int
    ):
        return EpochState(name, value)
    if isinstance(getattr(value, "generator", None), torch.Generator):
        return GeneratorState(name, value.generator)
    raise TypeError(
        f"{name} is a {type(value).__name__}, which has neither state_dict() and "
        "load_state_dict(), nor an epoch and set_epoch(), nor a torch.Generator as its generator; "
        "give it those, or save its values as user=..."
    )


def devices_of(module: nn.Module | None) -> list[torch.device]:
    """The devices of a wrapper's replicas, or those of a module's parameters."""
    if module is None:
        return []
    ids = getattr(module, "device_ids", None)
    if ids and all(isinstance(device, torch.device) for device in ids):
        return list(ids)
    return list(dict.fromkeys(p.device for p in module.parameters() if not p.is_meta))


# --- modules -------------------------------------------------------------------------------------


def bare(module: nn.Module) -> nn.Module:
    """The module within a wrapper, so that a state has the names of the module itself."""
    while True:
        inner = torch_internals.original_module(module)
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class ModuleState:
    """Parameters, buffers and extra state of a module, bare or in a wrapper, by name."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = bare(module)

    def save(self) -> dict[str, Any]:
        """The state, and the versions of its modules."""
        state = self._module.state_dict()
        versions = torch_internals.state_versions(state) or {}
        return {
            "state": dict(state),
            "versions": {k: dict(v) for k, v in versions.items() if isinstance(v, Mapping)},
        }

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """How names, shapes and dtypes differ."""
        if not isinstance(saved, dict) or saved.keys() != {"state", "versions"}:
            return [f"{self.name}: the checkpoint has no state of a module there"]
        theirs, ours = saved["state"], self._module.state_dict()
        found = []
        if strict:
            found += [f"{self.name}.{k} is in the module only" for k in ours if k not in theirs]
            found += [f"{self.name}.{k} is in the checkpoint only" for k in theirs if k not in ours]
        for key in ours:
            why = _difference(theirs[key], ours[key], strict) if key in theirs else None
            found += [f"{self.name}.{key} {why}"] if why else []
        return found

    def load(self, saved: Any, strict: bool) -> None:
        """Write a state to the module."""
        state: OrderedDict[str, Any] = OrderedDict(saved["state"])
        torch_internals.set_state_versions(state, OrderedDict(saved["versions"]))
        self._module.load_state_dict(state, strict=strict)

    def remember(self) -> Callable[[], object]:
        """Copies of all tensors in host memory: an accelerator may have no room for them."""
        state = self._module.state_dict()
        for key, value in state.items():
            if isinstance(value, Tensor) and not is_lazy(value):
                state[key] = value.detach().to("cpu", copy=True)
        return lambda: self._module.load_state_dict(state, strict=False)


def _difference(saved: Any, own: Any, strict: bool) -> str | None:
    """How a tensor of a checkpoint differs in form from the one that is to take its values."""
    if not isinstance(own, Tensor) or is_lazy(own):
        return None
    if own.is_meta:
        return "is on the device 'meta' here and takes no values; call to_empty(device=...) before"
    if not isinstance(saved, Tensor):
        return f"is a {type(saved).__name__} in the checkpoint, but a tensor here"
    if saved.shape != own.shape:
        return f"has the shape {tuple(saved.shape)} in the checkpoint, but {tuple(own.shape)} here"
    if strict and saved.dtype != own.dtype:
        theirs, ours = name_of_dtype(saved.dtype), name_of_dtype(own.dtype)
        return f"is {theirs} in the checkpoint, but {ours} here (strict=False converts)"
    if saved.is_complex() and not own.is_complex():
        return "is complex in the checkpoint, but real here"
    return None


# --- optimizers ----------------------------------------------------------------------------------


class OptimizerState:
    """The state of any optimizer that keeps to torch's ``state_dict`` of optimizers.

    Args:
        name: What the optimizer is called in messages and in names of tensors.
        optimizer: The optimizer.
        names: Of parameters, by identity; to find them again in another order.
    """

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._names = names
        zero: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        #: Whether each process has a part of the state only.
        self.divided = zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)

    @property
    def _class(self) -> str:
        """The class whose state it has; some optimizers have another one do the work."""
        optimizer: Any = self._optimizer.optim if self.divided else self._optimizer  # type: ignore[attr-defined]
        found = getattr(optimizer, "optimizer_class", None)
        return (found if isinstance(found, type) else type(optimizer)).__name__

    def save(self) -> dict[str, Any]:
        """The state, and which parameters it is of."""
        return {
            "state_dict": self._state_dict(),
            "parameters": self._parameters(),
            "class": self._class,
        }

    def _state_dict(self) -> dict[str, Any]:
        optimizer: Any = self._optimizer
        if not self.divided:
            state: dict[str, Any] = optimizer.state_dict()
            return state
        numbers = torch_internals.own_state_numbers(optimizer)
        own = {numbers[p]: state for p, state in optimizer.optim.state.items()}
        groups = Optimizer.state_dict(optimizer)["param_groups"]
        return {"state": dict(sorted(own.items())), "param_groups": groups}

    def _parameters(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    "shape": list(p.shape),
                    "name": self._names.get(id(p)),
                    "dtype": name_of_dtype(p.dtype),
                }
                for p in group["params"]
            ]
            for group in self._optimizer.param_groups
        ]

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """How class, groups, options and parameters differ."""
        if not isinstance(saved, dict) or saved.keys() != {"state_dict", "parameters", "class"}:
            return [f"{self.name}: the checkpoint has no state of an optimizer there"]
        if strict and saved["class"] != self._class:
            return [
                f"{self.name} is {saved['class']} in the checkpoint, but {self._class} here "
                "(strict=False loads it if the options are the same)"
            ]
        groups, theirs, ours = (
            saved["state_dict"]["param_groups"],
            saved["parameters"],
            self._parameters(),
        )
        if len(theirs) != len(ours):
            return [
                f"{self.name} has {len(theirs)} parameter groups in the checkpoint, but "
                f"{len(ours)} here"
            ]
        found = []
        for index, (old, new) in enumerate(zip(theirs, ours, strict=True)):
            where = f"{self.name}.param_groups[{index}]"
            found += _differences(old, new, where)
            options = set(self._optimizer.param_groups[index]) - _NOT_OPTIONS
            saved_options = set(groups[index]) - _NOT_OPTIONS
            if options - saved_options and saved_options - options:
                found.append(
                    f"{where} has the options {', '.join(sorted(map(str, saved_options)))} in the "
                    f"checkpoint, but {', '.join(sorted(options))} here: it is another optimizer"
                )
        return found or self._misfits(saved)

    def _misfits(self, saved: Any) -> list[str]:
        """Which tensors have another shape than those of a state that there is already."""
        own, found = self._state_dict()["state"], []
        for number, entries in _in_order(saved, self._parameters())["state"].items():
            now = own.get(number)
            if not isinstance(entries, dict) or not isinstance(now, dict):
                continue
            for key, value in entries.items():
                here = now.get(key)
                if not (isinstance(value, Tensor) and isinstance(here, Tensor)):
                    continue
                # Numbers may be tensors of one element.
                if value.shape != here.shape and value.numel() + here.numel() > 2:
                    found.append(
                        f"{self.name}: {key} of parameter {number} has the shape "
                        f"{list(value.shape)} in the checkpoint, but {list(here.shape)} here"
                    )
        return found

    def load(self, saved: Any, strict: bool) -> None:
        """Give the optimizer a state, in the order that its parameters have here."""
        ours = self._parameters()
        state_dict = _in_order(saved, ours)
        # The optimizer may change what it gets.
        self._optimizer.load_state_dict({**state_dict, "state": dict(state_dict["state"])})
        if self.divided:
            return
        here, before = _dtypes(ours, ours), _dtypes(saved["parameters"], ours)
        # State of a parameter's own dtype goes with it when that is another one now.
        self._restore_dtypes(
            state_dict["state"],
            lambda number, dtype: before[number] == here[number] or dtype != before[number],
        )

    def _restore_dtypes(self, saved: Mapping[Any, Any], keeps: Callable[[int, str], bool]) -> None:
        """Torch converts state to the dtype of the parameter, also what was in another one."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, entries in saved.items():
            if not isinstance(number, int) or not isinstance(entries, dict):
                continue
            loaded = self._optimizer.state.get(parameters[number], {})
            for key, value in entries.items():
                now = loaded.get(key) if isinstance(loaded, dict) else None
                if not (isinstance(value, Tensor) and isinstance(now, Tensor)):
                    continue
                if now.dtype != value.dtype and keeps(number, name_of_dtype(value.dtype)):
                    loaded[key] = value.to(now.device)

    def remember(self) -> Callable[[], object]:
        """The state of now: steps write tensors in place, but a load replaces them."""
        state = self._state_dict()
        kept = {k: dict(v) if isinstance(v, dict) else v for k, v in state["state"].items()}

        def put_back() -> None:
            # The optimizer may change what it gets.
            self._optimizer.load_state_dict({**state, "state": dict(kept)})
            if not self.divided:
                self._restore_dtypes(kept, lambda number, dtype: True)

        return put_back


def merged(states: Sequence[Any]) -> Any:
    """The state of an optimizer, out of the parts of all processes.

    See Note [State that is divided among processes].
    """
    first = states[0]
    whole = {k: v for each in states for k, v in each["state_dict"]["state"].items()}
    return {**first, "state_dict": {**first["state_dict"], "state": whole}}


def _dtypes(theirs: list[list[dict[str, Any]]], ours: list[list[dict[str, Any]]]) -> list[str]:
    """What the parameters had when they were saved, in the order that they have here."""
    return [
        old[there]["dtype"]
        for old, new in zip(theirs, ours, strict=True)
        for there in _order(old, new) or []
    ]


def _differences(old: list[dict[str, Any]], new: list[dict[str, Any]], where: str) -> list[str]:
    """How the parameters of a group differ, apart from their order where they have names."""
    if len(old) != len(new):
        return [f"{where} has {len(old)} parameters in the checkpoint, but {len(new)} here"]
    order = _order(old, new)
    if order is None:
        mine, theirs = {m["name"] for m in new}, {m["name"] for m in old}
        return [
            f"{where} has {_some(theirs - mine)} in the checkpoint, but {_some(mine - theirs)} here"
        ]
    return [
        f"{where}: {here['name'] or f'parameter {place}'} has the shape {old[there]['shape']} in "
        f"the checkpoint, but {here['shape']} here"
        for place, (there, here) in enumerate(zip(order, new, strict=True))
        if old[there]["shape"] != here["shape"]
    ]


def _order(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[int] | None:
    """For each parameter of a group now, its place in the saved group; None if it was not there."""
    names = [member["name"] for member in old]
    wanted = [member["name"] for member in new]
    known = all(isinstance(name, str) for name in (*names, *wanted))
    if not known or names == wanted or len(set(names)) < len(names):
        return list(range(len(new)))
    if set(wanted) != set(names):
        return None
    return [names.index(name) for name in wanted]


def _in_order(saved: Any, ours: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The saved state with the numbers that the parameters have here."""
    state_dict: dict[str, Any] = saved["state_dict"]
    numbers: dict[int, int] = {}
    begin = 0
    groups = []
    for group, old, new in zip(state_dict["param_groups"], saved["parameters"], ours, strict=True):
        order = _order(old, new) or []
        numbers.update({begin + there: begin + here for here, there in enumerate(order)})
        if "param_names" in group:
            group = {**group, "param_names": [group["param_names"][i] for i in order]}
        groups.append(group)
        begin += len(old)
    state = {numbers.get(k, k): entry for k, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _some(names: set[Any]) -> str:
    return listed(sorted(map(str, names)))


# --- schedulers, samplers, generators, objects of the user's -------------------------------------


class ObjectState:
    """What has ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._value = value

    def save(self) -> Any:
        """What the object says."""
        return self._value.state_dict()

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Whether the entries are those of another kind of object."""
        own = self._value.state_dict()
        if not (isinstance(saved, dict) and isinstance(own, dict)):
            theirs_is, ours_is = type(saved).__name__, type(own).__name__
            same = isinstance(saved, type(own))
            return (
                []
                if same
                else [f"{self.name} is a {theirs_is} in the checkpoint, but {ours_is} here"]
            )
        theirs, ours = set(saved) - set(own), set(own) - set(saved)
        # One side alone may have entries that another version has not.
        if theirs and ours:
            return [
                f"{self.name} has {_some(theirs)} in the checkpoint, but {_some(ours)} here: it "
                f"is no state of a {type(self._value).__name__}"
            ]
        return []

    def load(self, saved: Any, strict: bool) -> None:
        """Give the object a state."""
        self._value.load_state_dict(saved)

    def remember(self) -> Callable[[], object]:
        """A copy of the state of now."""
        state = copy.deepcopy(self._value.state_dict())
        return lambda: self._value.load_state_dict(state)


class _PositionState(ObjectState):
    """A sampler of this package; a load gives a position also to one whose own is not known."""

    def problems(self, saved: Any, strict: bool) -> list[str]:
        if isinstance(saved, dict) and {"epoch", "taken"} <= set(saved):
            return []
        return [f"{self.name}: the checkpoint has no position of a sampler there"]

    def remember(self) -> Callable[[], object]:
        before = dict(vars(self._value))
        return lambda: vars(self._value).update(before)


class EpochState:
    """The epoch of a sampler that has nothing else, such as DistributedSampler."""

    def __init__(self, name: str, sampler: Any) -> None:
        self.name = name
        self._sampler = sampler

    def save(self) -> Any:
        """The epoch."""
        return {"epoch": int(self._sampler.epoch)}

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Whether it is no epoch."""
        if isinstance(saved, dict) and type(saved.get("epoch")) is int:
            return []
        return [f"{self.name}: the checkpoint has no epoch of a sampler there"]

    def load(self, saved: Any, strict: bool) -> None:
        """Give the sampler its epoch."""
        self._sampler.set_epoch(saved["epoch"])

    def remember(self) -> Callable[[], object]:
        """The epoch of now."""
        epoch = self._sampler.epoch
        return lambda: self._sampler.set_epoch(epoch)


class GeneratorState:
    """A random generator of the user's, or that of a sampler."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self.name = name
        self._generator = generator

    def save(self) -> Any:
        """The state, as a tensor."""
        return self._generator.get_state()

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Whether a generator of this device takes it."""
        device = self._generator.device
        try:
            torch.Generator(device).set_state(saved)
        except (RuntimeError, TypeError) as error:
            return [f"{self.name}: this is no state of a generator of {device}: {error!s:.200}"]
        return []

    def load(self, saved: Any, strict: bool) -> None:
        """Give the generator a state."""
        self._generator.set_state(saved)

    def remember(self) -> Callable[[], object]:
        """The state of now."""
        state = self._generator.get_state()
        return lambda: self._generator.set_state(state)
