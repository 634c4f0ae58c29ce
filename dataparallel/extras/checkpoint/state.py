"""The content of a checkpoint: the entries of a training, as JSON and tensors. Never pickle.

JSON has null, booleans, numbers, strings, lists and objects with strings as keys. Other values in
states are objects with the key ``"$"``, which says what they are. Reading makes nothing but the
types that are listed here: no name in a file leads to code.

Note [What is saved once, and what by each process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes that train together have the same parameters and the same state of the optimizer: rank 0
saves modules and optimizers. Each other process saves the part of these that its wrapper leaves to
it. These are ignored parameters, with their state in the optimizer, and buffers that are not
broadcast. All else each process saves for itself, such as its random numbers. If no wrapper keeps a
module the same in these processes, they compare it first: the values of all but rank 0 would be
lost.
"""

from __future__ import annotations

import base64
import collections
import copy
import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.errors import listed
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer import verify
from dataparallel.threads.random import default_generator, mixed_seed

#: Names of entries that are not objects of the caller's.
RNG, USER = "rng", "user"

# --- values --------------------------------------------------------------------------------------

_TAG = "$"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
#: The types that every version of safetensors knows; tensors of other types are written as bytes.
_COMMON = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def _pairs(mapping: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in mapping.items()]


#: For each type what it is written as, of simpler types, and what makes it of that.
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    dict: (_pairs, dict),
    collections.OrderedDict: (_pairs, collections.OrderedDict),
    collections.Counter: (_pairs, lambda pairs: collections.Counter(dict(pairs))),
    torch.Size: (list, torch.Size),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.dtype: (str, _DTYPES.__getitem__),
    torch.device: (str, torch.device),
}
_MADE = {kind.__name__: made for kind, (_, made) in _KINDS.items()}
_MADE |= {"array": lambda tensor: tensor.numpy(), "scalar": lambda tensor: tensor.numpy()[()]}


class Encoder:
    """An encoder of values as JSON; it keeps their tensors: contiguous, each once, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # With the tensors: memory that is free could be that of another one.
        self._known: dict[Any, tuple[Any, Tensor]] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON; a TypeError says where something is that cannot be saved."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(each, f"{path}.{i}") for i, each in enumerate(value)]
        if kind is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(each, f"{path}.{key}") for key, each in value.items()}
        if kind in _KINDS:
            return {_TAG: kind.__name__, "value": self.encode(_KINDS[kind][0](value), path)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        numpy: Any = sys.modules.get("numpy")
        of_numpy = numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))
        if of_numpy and value.dtype.kind in "biufc":
            array = torch.from_numpy(numpy.array(value, dtype=value.dtype.newbyteorder("=")))
            name = "array" if isinstance(value, numpy.ndarray) else "scalar"
            return {_TAG: name, "value": self._tensor(array, path)}
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}: {value!r:.80}; a checkpoint holds "
            "numbers, strings, lists, tuples, dicts, sets, tensors and arrays"
        )

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        odd = is_lazy(tensor) or tensor.is_nested or torch_internals.is_wrapper(tensor)
        if odd or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(
                f"{path} is a {type(tensor).__name__} that is not dense or has no values; leave it "
                "out, or save what it is made of"
            )
        place = (tensor.data_ptr(), tensor.device) if tensor.numel() else (id(tensor),)
        form = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if (place, form) in self._known:
            return self._known[place, form][0]
        told: dict[str, Any] = {_TAG: "tensor", "name": path}
        while told["name"] in self.tensors:
            told["name"] += "'"
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if plain.dtype not in _COMMON:
            told.update(dtype=str(plain.dtype), shape=list(plain.shape))
            plain = plain.view(-1).view(torch.uint8)
        self.tensors[told["name"]] = plain
        self._known[place, form] = told, tensor
        return told


def decode(coded: Any, file: Any, made: dict[str, Tensor]) -> Any:
    """Return the decoded value, with the tensors of a safetensors file, in memory of their own."""
    if isinstance(coded, list):
        return [decode(each, file, made) for each in coded]
    if not isinstance(coded, dict):
        return coded
    if _TAG not in coded:
        return {key: decode(each, file, made) for key, each in coded.items()}
    if coded[_TAG] != "tensor":
        return _MADE[coded[_TAG]](decode(coded["value"], file, made))
    name = coded["name"]
    if name not in made:
        tensor = file.get_tensor(name).clone()
        if "dtype" in coded:
            tensor = tensor.view(_DTYPES[coded["dtype"]]).view(coded["shape"])
        made[name] = tensor
    return made[name]


# --- entries -------------------------------------------------------------------------------------


def entries_of(
    model: nn.Module | None,
    optimizer: Any,
    scheduler: Any,
    sampler: Any,
    states: Mapping[str, Any] | None,
    rng: bool,
) -> dict[str, Entry]:
    """Return the entries of a training, by name, in the order in which they are loaded."""
    parameters = [] if model is None else bare(model).named_parameters(remove_duplicate=False)
    names = {id(parameter): name for name, parameter in parameters}
    own = set[str]() if model is None else _left_to_each(model)
    given = {"sampler": sampler, "scheduler": scheduler, "optimizer": optimizer, "model": model}
    for name in states or {}:
        if not isinstance(name, str) or name in (*given, RNG, USER):
            raise ValueError(f"states has the name {name!r}, which is taken or no text")
    objects = {**(states or {}), **{k: v for k, v in given.items() if v is not None}}
    entries = {name: _entry(name, value, names, own) for name, value in objects.items()}
    if rng:
        devices = _accelerators(model)
        capture = functools.partial(_capture_random, devices)
        entries[RNG] = ObjectState(capture, functools.partial(_restore_random, devices))
    return entries


def _entry(name: str, value: Any, names: Mapping[int, str], own: set[str]) -> Entry:
    if isinstance(value, nn.Module):
        return ModuleState(value)
    if isinstance(value, Optimizer):
        return OptimizerState(value, names, own)
    if not isinstance(value, torch.Generator) and not hasattr(value, "state_dict"):
        value = getattr(value, "generator", None) or value
    if isinstance(value, torch.Generator):
        return ObjectState(value.get_state, value.set_state)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return ObjectState(value.state_dict, value.load_state_dict)
    if hasattr(value, "set_epoch") and isinstance(getattr(value, "epoch", None), int):
        return ObjectState(lambda: value.epoch, value.set_epoch)
    raise TypeError(
        f"{name} is a {type(value).__name__}, which has neither state_dict() and "
        "load_state_dict(), nor an epoch and set_epoch(), nor a torch.Generator as its generator"
    )


def bare(module: nn.Module) -> nn.Module:
    """Return the module within a wrapper, so that a state has the names of the module itself."""
    inner = torch_internals.original_module(module)
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = module.module
    return bare(inner) if isinstance(inner, nn.Module) else module


def _left_to_each(module: nn.Module) -> set[str]:
    """Names of what a wrapper for several processes leaves to each of them."""
    names = set(getattr(module, "parameters_to_ignore", ()))
    if getattr(module, "broadcast_buffers", True) is False:
        names |= {name for name, _ in bare(module).named_buffers()}
    return names


class ObjectState:
    """An object with a state to save and to load."""

    def __init__(self, say: Callable[[], Any], take: Callable[[Any], object]) -> None:
        self.save, self._take = say, take

    def load(self, saved: Any, strict: bool) -> None:
        """Give the object a state."""
        self._take(saved)


class ModuleState:
    """Parameters, buffers and extra state of a module, bare or in a wrapper, by name."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._left = bare(module), _left_to_each(module)
        self._given = module

    def digest(self, world_size: int) -> str:
        """Return a hash of the values that no wrapper keeps the same in so many processes."""
        kept = tuple(
            f"{name}." if name else ""
            for name, module in self._given.named_modules()
            if isinstance(module, (DistributedDataParallel, nn.parallel.DistributedDataParallel))
            and module.process_group is not None
            and module.process_group.size() == world_size
        )
        state = self._module.state_dict().items()
        tensors = {k: v for k, v in state if isinstance(v, Tensor) and not k.startswith(kept)}
        text = repr(verify.described([verify.parts_of(tensors)]))
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self) -> dict[str, Any]:
        """Return the state, and the versions of its modules."""
        state = self._module.state_dict()
        versions = torch_internals.state_versions(state) or {}
        return {"state": dict(state), "versions": {k: dict(v) for k, v in versions.items()}}

    def own(self) -> dict[str, Any]:
        """Return the part of the state that each process has for itself."""
        state = self._module.state_dict()
        return {name: value for name, value in state.items() if name in self._left}

    def load(self, saved: Any, strict: bool) -> None:
        """Write a state to the module."""
        state = collections.OrderedDict(saved["state"])
        torch_internals.set_state_versions(state, collections.OrderedDict(saved["versions"]))
        self._module.load_state_dict(state, strict=strict)


class OptimizerState:
    """The state of any optimizer that keeps to torch's ``state_dict`` of optimizers."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], left: set[str]) -> None:
        self._optimizer, self._names, self._left = optimizer, names, left
        # Some optimizers have another one do the work.
        self._class = getattr(optimizer, "optimizer_class", type(optimizer)).__name__

    def save(self) -> dict[str, Any]:
        """Return the state, and by number the name and the dtype of each parameter."""
        rest = self._optimizer.state_dict()
        # A load replaces what is in them.
        state = {number: copy.copy(entries) for number, entries in rest.pop("state").items()}
        known = {
            number: [self._names.get(id(parameter)), str(parameter.dtype)]
            for group, here in zip(rest["param_groups"], self._optimizer.param_groups, strict=True)
            for number, parameter in zip(group["params"], here["params"], strict=True)
        }
        return {"state": state, "rest": rest, "parameters": known, "class": self._class}

    def own(self) -> dict[Any, Any]:
        """Return the part of the state that each process has for itself."""
        saved = self.save() if self._left else {"state": {}}
        left = (n for n in saved["state"] if saved["parameters"][n][0] in self._left)
        return {number: saved["state"][number] for number in left}

    def load(self, saved: Any, strict: bool) -> None:
        """Give the optimizer a state; parameters that have names may have another order."""
        if strict and saved["class"] != self._class:
            raise ValueError(
                f"it is {saved['class']} in the checkpoint, but {self._class} here (strict=False "
                "loads it all the same)"
            )
        groups, here = saved["rest"]["param_groups"], self._optimizer.param_groups
        if len(groups) == len(here):
            groups = list(map(self._ordered, groups, here, itertools.repeat(saved["parameters"])))
        # The optimizer may change what it gets.
        whole = {**saved["rest"], "param_groups": groups, "state": dict(saved["state"])}
        self._optimizer.load_state_dict(whole)
        numbers = [number for group in groups for number in group["params"]]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded = self._optimizer.state.get(parameter, {})
            for key, value in saved["state"].get(number, {}).items():
                # Torch turns all into the dtype of the parameter, also what was in another one.
                dtype = saved["parameters"][number][1]
                if isinstance(value, Tensor) and str(value.dtype) != dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _ordered(self, group: Any, here: Any, known: Mapping[int, Any]) -> dict[str, Any]:
        """Return a saved group with its parameters in the order that they have here."""
        before = [known[number][0] for number in group["params"]]
        names: list[Any] = [self._names.get(id(parameter)) for parameter in here["params"]]
        if None in before or None in names or len({*before}) < len(before):
            return dict(group)
        if {*before} != {*names}:
            theirs, ours = (listed(map(str, each)) for each in (before, names))
            raise ValueError(f"a group has {theirs} in the checkpoint, but {ours} here")
        lists = [key for key in ("params", "param_names") if key in group]
        places = [before.index(name) for name in names]
        return {**group, **{key: [group[key][i] for i in places] for key in lists}}


Entry: TypeAlias = ObjectState | ModuleState | OptimizerState
#: Those of which rank 0 saves the common state; see Note [What is saved once, and what by each
#: process].
SHARED = (ModuleState, OptimizerState)


# --- random generators ---------------------------------------------------------------------------
#
# Replicas need none of their own. Each call seeds theirs from the caller's CPU generator and the
# index of the replica, see Note [Random numbers in replicas] in dataparallel/threads/random.py.


def _accelerators(module: nn.Module | None) -> list[torch.Generator]:
    """Return the generators of the devices of a wrapper's replicas, or of a module's parameters."""
    ids: Any = getattr(module, "device_ids", None)
    if module is not None and not (ids and all(isinstance(each, torch.device) for each in ids)):
        ids = [p.device for p in module.parameters() if not p.is_meta]
    there = dict.fromkeys(device for device in ids or () if _devices.is_accelerator(device))
    return [found for device in there if (found := default_generator(device)) is not None]


def _capture_random(accelerators: Sequence[torch.Generator]) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, as they are now."""
    numpy: Any = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "cpu": torch.default_generator.get_state(),
        "devices": [generator.get_state() for generator in accelerators],
        "numpy": numpy.random.get_state() if numpy else None,
    }


def _restore_random(accelerators: Sequence[torch.Generator], state: dict[str, Any]) -> None:
    """Put all generators into the states that they had.

    An accelerator that was not there is seeded from its position and the CPU's state. All are, and
    from the rank, in a process that was not there.
    """
    numpy: Any = sys.modules.get("numpy")
    digest = hashlib.sha256(state["cpu"].numpy().tobytes()).digest()
    seed = mixed_seed(int.from_bytes(digest[:8], "little"), state.get("new_rank", 0))
    saved = state["devices"]
    if "new_rank" in state:
        saved = []
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
    else:
        random.setstate(state["python"])
        torch.default_generator.set_state(state["cpu"])
        if numpy and state["numpy"] is not None:
            numpy.random.set_state(state["numpy"])
    for index, generator in enumerate(accelerators):
        if index < len(saved):
            generator.set_state(saved[index])
        else:
            generator.manual_seed(mixed_seed(seed, index + 1))
