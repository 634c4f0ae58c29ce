"""One clone of one module: its parts found, replaced by others, and what a forward left read back.

Modules refer to each other and to tensors not only through their registered children: in lists,
bound methods, partial functions, hooks and weak references. A clone whose attributes still led to
the original would compute on the wrong device.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.errors import listed

#: From the id of an original tensor or module to its counterpart.
Counterparts: TypeAlias = Mapping[int, Any]
#: The attributes of a module, and after them its registries.
Tables: TypeAlias = Sequence[dict[str, Any]]

#: Where a module keeps its named parts.
REGISTRIES = ("_parameters", "_buffers", "_modules")
#: Containers of which those without entries cannot refer to anything.
CONTAINERS = (dict, list, set)

_MISSING = object()
_device = attrgetter("device")
_LAZY = frozenset({nn.UninitializedParameter, nn.UninitializedBuffer})
# Types that cannot refer to anything; most attributes of a module are of one of them.
_OPAQUE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


# --- the parts of a module -----------------------------------------------------------------------


class Parts:
    """The parts of a module tree, each once, in registration order.

    Raises:
        TypeError: A module in the tree cannot be cloned; the message lists all of them.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        #: Per module, the names of attributes that may lead to a tensor or a module.
        self.references: list[list[str]] = []
        parameters: dict[int, torch.Tensor] = {}
        buffers: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        pending: list[tuple[str, nn.Module]] = [("", root)]
        while pending:
            name, module = pending.pop()
            if id(module) in seen:
                continue
            if _is_closed(module):
                _refuse_closed(root)
            seen.add(id(module))
            attributes = module.__dict__
            self.modules.append(module)
            self.names.append(name)
            for registry, found in (("_parameters", parameters), ("_buffers", buffers)):
                found.update((id(t), t) for t in attributes[registry].values() if t is not None)
            self.references.append(
                [n for n, value in attributes.items() if n not in REGISTRIES and may_refer(value)]
            )
            prefix = name and f"{name}."
            children = reversed(attributes["_modules"].items())
            pending.extend((prefix + key, child) for key, child in children if child is not None)
        self.parameters = list(parameters.values())
        self.buffers = [buffer for key, buffer in buffers.items() if key not in parameters]
        self._registered = parameters.keys() | buffers.keys()

    def loose_tensors(self) -> list[torch.Tensor]:
        """Tensors that are in plain attributes now, neither parameters nor buffers."""
        found: dict[int, torch.Tensor] = {}

        def note(part: Any) -> Any:
            if isinstance(part, torch.Tensor) and id(part) not in self._registered:
                found[id(part)] = part
            return part

        for module, names in zip(self.modules, self.references, strict=True):
            for name in names:
                substitute(module.__dict__[name], note)
        return list(found.values())


def _is_closed(module: nn.Module) -> bool:
    """Whether a module has parts that no other object can be given."""
    slots = [base.__dict__.get("__slots__") for base in type(module).__mro__]
    return any(slots) or isinstance(module, torch.jit.ScriptModule)


def _refuse_closed(root: nn.Module) -> NoReturn:
    found = [
        f"{name or 'the module itself'!r} ({type(module).__name__})"
        for name, module in root.named_modules()
        if _is_closed(module)
    ]
    raise TypeError(
        f"cannot replicate {listed(found)}: scripted modules hold on to their own parameters, "
        "and classes with __slots__ to attributes, so a clone cannot have others; wrap the module "
        "before it is scripted, or use torch.compile, and leave out __slots__"
    )


def is_placed(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether :func:`check_placement` would find nothing; without the names, whose making costs."""
    return set(map(_device, tensors)) <= {device} and _LAZY.isdisjoint(map(type, tensors))


def check_placement(module: nn.Module, device: torch.device) -> None:
    """Raise a ValueError that names parameters and buffers that are not on ``device``."""
    if is_placed([*module.parameters(), *module.buffers()], device):
        return
    tensors = [
        *(("parameter", name, tensor) for name, tensor in module.named_parameters()),
        *(("buffer", name, tensor) for name, tensor in module.named_buffers()),
    ]
    uninitialized = [name for _, name, tensor in tensors if type(tensor) in _LAZY]
    if uninitialized:
        raise ValueError(
            f"cannot replicate parameters that are not initialized: {listed(uninitialized)}; "
            "call the module once with an example input first"
        )
    misplaced = [f"{kind} {n!r} is on {t.device}" for kind, n, t in tensors if t.device != device]
    if misplaced:
        raise ValueError(
            f"the module must be on {device}, the first of its devices, but "
            f"{listed(misplaced, '; ')}; call module.to({str(device)!r}) first"
        )


# --- references ----------------------------------------------------------------------------------


def may_refer(value: Any) -> bool:
    """Whether :func:`substitute` could find a part in ``value``; quick, and never wrongly False."""
    if type(value) in _OPAQUE:
        return False
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return bool(value)
    if isinstance(value, types.FunctionType):
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        closes = value.__closure__ is not None or bool(value.__dict__)
        return closes or any(type(one) not in _OPAQUE for one in given)
    return isinstance(
        value, (torch.Tensor, nn.Module, types.MethodType, functools.partial, weakref.ref)
    )


def substitute(value: Any, replace: Callable[[Any], Any]) -> Any:
    """``value`` with every tensor and module in it replaced by what ``replace`` makes of it.

    Args:
        value: Any object; tensors and modules, bound methods, partial functions, functions (what
            they close over, defaults of arguments, attributes), weak references and containers of
            those are followed, everything else is kept.
        replace: Called with each tensor and module, also where a container has it several times.

    Returns:
        ``value`` itself if nothing in it was replaced, so that identity is kept; else a new object
        of the same type.
    """
    return _substitute(value, replace, set())


def with_counterparts(value: Any, counterparts: Counterparts) -> Any:
    """``value`` with every original in it replaced by its counterpart, see :func:`substitute`."""
    return _substitute(value, lambda part: counterparts.get(id(part), part), set())


def _substitute(value: Any, replace: Callable[[Any], Any], inside: set[int]) -> Any:
    if not may_refer(value) or id(value) in inside:
        return value
    if isinstance(value, (torch.Tensor, nn.Module)):
        return replace(value)
    old, rebuild = _opened(value)
    inside.add(id(value))
    new = [_substitute(part, replace, inside) for part in old]
    inside.discard(id(value))
    return value if all(a is b for a, b in zip(new, old, strict=True)) else rebuild(new)


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What ``value`` refers to, and what makes another one of as many others."""
    kind: Any = type(value)
    if isinstance(value, dict):
        return [*value, *value.values()], functools.partial(_rebuilt_dict, value)
    if isinstance(value, list) and kind is not list:
        return list(value), functools.partial(_rebuilt_list, value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value), (lambda new: kind(*new)) if hasattr(value, "_fields") else kind
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda new: types.MethodType(value.__func__, new[0])
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return parts, lambda new: kind(new[0], *new[1], **new[2])
    if isinstance(value, types.FunctionType):
        cells = map(_content, value.__closure__ or ())
        parts = [*cells, value.__defaults__, value.__kwdefaults__, value.__dict__]
        return parts, functools.partial(_rebuilt_function, value)
    # Of the same class: a WeakMethod refers to a method that nothing else holds.
    return [value()], lambda new: kind(new[0])


def _rebuilt_dict(value: dict[Any, Any], new: list[Any]) -> Any:
    result = copy.copy(value)
    result.clear()
    result.update(zip(new[: len(value)], new[len(value) :], strict=True))
    return result


def _rebuilt_list(value: list[Any], new: list[Any]) -> Any:
    result = copy.copy(value)
    result[:] = new
    return result


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Not assigned yet, as in a function that refers to itself.
        return _MISSING


def _rebuilt_function(value: types.FunctionType, new: list[Any]) -> types.FunctionType:
    *contents, defaults, keywords, attributes = new
    cells = tuple(
        cell if part is _MISSING or part is _content(cell) else types.CellType(part)
        for cell, part in zip(value.__closure__ or (), contents, strict=True)
    )
    result = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    result.__kwdefaults__ = keywords
    result.__dict__.update(attributes)
    return result


# --- before a forward ----------------------------------------------------------------------------


def fill(
    module: nn.Module, clone: nn.Module, references: list[str], counterparts: Counterparts
) -> None:
    """Give a clone the attributes of its original, with the replica's own parts in them.

    Args:
        module: The original.
        clone: Any object of its class.
        references: Names of the attributes that may lead to a part.
        counterparts: From the id of an original part to the replica's.
    """
    attributes = module.__dict__.copy()
    for name in references:
        attributes[name] = with_counterparts(attributes[name], counterparts)
    for registry in REGISTRIES:
        parts = attributes[registry]
        if parts:
            found = [None if part is None else counterparts[id(part)] for part in parts.values()]
            attributes[registry] = dict(zip(parts, found, strict=True))
        else:
            attributes[registry] = {}
    for name in torch_internals.MODULE_HOOKS:
        # So that the hooks that a forward registers in one replica do not run in the others.
        if not attributes.get(name):
            attributes[name] = OrderedDict()
    attributes[torch_internals.REPLICA_MARK] = True
    attributes["zero_grad"] = _refuse_zero_grad
    # Not through the class: its own __setattr__ may expect attributes that are not there yet.
    object.__setattr__(clone, "__dict__", attributes)


def _refuse_zero_grad(set_to_none: bool = True) -> NoReturn:
    raise RuntimeError(
        "zero_grad() was called in the forward of a replica, whose parameters have no gradients "
        "of their own; call it on the wrapped module or the optimizer, outside of forward"
    )


# --- after a forward -----------------------------------------------------------------------------


def created_parameters(clone: nn.Module, before: Tables) -> list[str]:
    """Names of the parameters that the forward made and registered in a clone."""
    _, parameters, _, modules = before
    found = [
        name
        for name, part in clone.__dict__["_parameters"].items()
        if isinstance(part, nn.Parameter) and part.is_leaf and part is not parameters.get(name)
    ]
    for name, child in clone.__dict__["_modules"].items():
        if child is not None and child is not modules.get(name):
            new = torch_internals.REPLICA_MARK not in child.__dict__
            found += [f"{name}.{inner}" for inner, _ in child.named_parameters() if new]
    return found


def take_back(module: nn.Module, clone: nn.Module, before: Tables, back: Counterparts) -> None:
    """Do to the original what the forward did to the attributes of its clone.

    Args:
        module: The original.
        clone: The clone of replica 0, after its forward.
        before: Copies of its tables before it.
        back: From the id of a part of the clone to the original's.
    """
    attributes, assigned = module.__dict__, clone.__dict__
    given, *registries = before
    for name, value in assigned.items():
        if name not in REGISTRIES and value is not given.get(name, _MISSING):
            attributes[name] = with_counterparts(value, back)
        elif name in torch_internals.MODULE_HOOKS and value and not attributes.get(name, True):
            # The clone had an empty one of its own.
            attributes[name] = with_counterparts(value, back)
    for name in given.keys() - assigned.keys():
        attributes.pop(name, None)
    for registry, parts in zip(REGISTRIES, registries, strict=True):
        for name, part in assigned[registry].items():
            if part is not parts.get(name, _MISSING):
                attributes[registry][name] = back.get(id(part), part)
        for name in parts.keys() - assigned[registry].keys():
            attributes[registry].pop(name, None)
