"""One clone of one module: made, filled, and read back."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.replicas.parts import REGISTRIES
from dataparallel.replicas.remap import Counterparts, remap

_MISSING = object()
# Attributes of a function that torch.compile made, which lead to what was compiled.
_COMPILED = frozenset(
    {"__wrapped__", torch_internals.COMPILED_INLINE, torch_internals.COMPILED_ORIGINAL}
)


class Given(NamedTuple):
    """What a clone was given before its forward; what differs afterwards, the forward assigned."""

    attributes: dict[str, Any]
    registries: dict[str, dict[str, Any]]
    slots: dict[str, Any]
    own_tables: list[str]


def blank(module: nn.Module) -> nn.Module:
    """An object of the module's class without attributes.

    Not made by the class: a ``__new__`` of its own may want arguments, or return another object.
    """
    clone: nn.Module = object.__new__(type(module))
    return clone


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
        attributes[name] = _with_parts_of(attributes[name], counterparts)
    for registry in REGISTRIES:
        parts = attributes[registry]
        attributes[registry] = {
            name: None if part is None else counterparts[id(part)] for name, part in parts.items()
        }
    for name in torch_internals.MODULE_HOOKS:
        # So that the hooks that a forward registers in one replica do not run in the others.
        if not attributes.get(name, True):
            attributes[name] = OrderedDict()
    attributes[torch_internals.REPLICA_MARK] = True
    attributes["zero_grad"] = _refuse_zero_grad
    for name in _slots(cast(Any, type(module))):
        value = _slot(module, name)
        if value is not _MISSING:
            object.__setattr__(clone, name, remap(value, counterparts))
    # Not through the class: its own __setattr__ may expect attributes that are not there yet.
    object.__setattr__(clone, "__dict__", attributes)


def _with_parts_of(value: Any, counterparts: Counterparts) -> Any:
    """``remap``, and in a compiled function the attributes that lead to what was compiled.

    Such a function closes over what was compiled, and so does its copy over the replica's. When it
    is called within something bigger that is compiled, the attributes are followed instead.
    """
    copied = remap(value, counterparts)
    if copied is not value and isinstance(copied, types.FunctionType):
        attributes = copied.__dict__
        for name in _COMPILED & attributes.keys():
            attributes[name] = remap(attributes[name], counterparts)
    return copied


def given_to(clone: nn.Module) -> Given:
    """What a clone has now, after :func:`fill` and before its forward."""
    attributes = clone.__dict__
    registries = {registry: dict(attributes[registry]) for registry in REGISTRIES}
    slots = {name: _slot(clone, name) for name in _slots(cast(Any, type(clone)))}
    return Given(dict(attributes), registries, slots, list(own_tables(clone)))


def own_tables(clone: nn.Module) -> dict[str, dict[int, Any]]:
    """The tables of hooks that a clone does not share, by name, after :func:`fill`: empty ones."""
    tables = {name: clone.__dict__.get(name) for name in torch_internals.MODULE_HOOKS}
    return {name: table for name, table in tables.items() if table is not None and not table}


def created_parameters(clone: nn.Module, given: Given) -> list[str]:
    """Names of the parameters that the forward made and registered in a clone."""
    found = [
        name
        for name, part in clone.__dict__["_parameters"].items()
        if isinstance(part, nn.Parameter)
        and part.is_leaf
        and part is not given.registries["_parameters"].get(name)
    ]
    for name, child in clone.__dict__["_modules"].items():
        if child is not None and child is not given.registries["_modules"].get(name):
            new = torch_internals.REPLICA_MARK not in child.__dict__
            found += [f"{name}.{inner}" for inner, _ in child.named_parameters() if new]
    return found


def take_back(module: nn.Module, clone: nn.Module, given: Given, back: Counterparts) -> None:
    """Do to the original what the forward did to the attributes of its clone.

    Args:
        module: The original.
        clone: The clone of replica 0, after its forward.
        given: What the clone had before it.
        back: From the id of a part of the clone to the original's.
    """
    attributes, assigned = module.__dict__, clone.__dict__
    for name, value in assigned.items():
        if name not in REGISTRIES and value is not given.attributes.get(name, _MISSING):
            attributes[name] = remap(value, back)
    for name in given.own_tables:
        if assigned[name]:
            attributes[name] = remap(assigned[name], back)
    for name in given.attributes.keys() - assigned.keys():
        attributes.pop(name, None)
    for registry in REGISTRIES:
        before, after = given.registries[registry], assigned[registry]
        for name, part in after.items():
            if part is not before.get(name, _MISSING):
                attributes[registry][name] = back.get(id(part), part)
        for name in before.keys() - after.keys():
            attributes[registry].pop(name, None)
    for name in _slots(cast(Any, type(module))):
        value = _slot(clone, name)
        if value is not _MISSING and value is not given.slots.get(name, _MISSING):
            object.__setattr__(module, name, remap(value, back))


def as_parameter(alias: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Make ``alias`` look like ``value``: a parameter if that is one, with its attributes."""
    if isinstance(value, nn.Parameter):
        if type(value) is not nn.Parameter:
            alias.__class__ = type(value)
        torch_internals.mark_as_parameter(alias)
    for name, attribute in vars(value).items():
        setattr(alias, name, attribute)
    return alias


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        declared = base.__dict__.get("__slots__", ())
        names += [declared] if isinstance(declared, str) else declared
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _slot(module: nn.Module, name: str) -> Any:
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return _MISSING


def _refuse_zero_grad(set_to_none: bool = True) -> NoReturn:
    raise RuntimeError(
        "zero_grad() was called in the forward of a replica, whose parameters have no gradients "
        "of their own; call it on the wrapped module or the optimizer, outside of forward"
    )
