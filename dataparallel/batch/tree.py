"""Containers of tensors: flatten them to leaves, rebuild them around other leaves.

A container is what models take and return: tuples, lists, dicts and their subclasses, named tuples,
dataclasses, dicts with attributes (``ModelOutput``), and whatever is registered with
``torch.utils._pytree``. Everything else is a leaf, ``None`` included, and so is an empty container:
it is often there to be filled, and the caller looks into it afterwards.

Note [Objects of unknown type]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A leaf that is no tensor goes to each replica as the one object that it is. For a number, a name or
a configuration that is right. An object that holds a batch would reach each replica whole, and one
that a module fills (a cache of keys and values) would be filled by all replicas at the same time.
Both are errors that say what to do; ``Replicate(obj)`` shares an object all the same. An object
that holds no tensors, or only such as have nothing to do with the batch, is shared, and an error
follows if the replicas have put other tensors into it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dataparallel.torch_internals import registered_containers

# Nothing in these is looked at. What a module or a function holds is shared on purpose.
_OPAQUE = (
    *(type(None), int, float, complex, str, bytes, type, enum.Enum, nn.Module),
    *(torch.Size, torch.dtype, torch.device, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
# A PackedSequence is a named tuple, but its parts have no batch dimension of their own.
_LEAF_TYPES = (torch.Tensor, *_OPAQUE, PackedSequence)
#: How many values are looked at in one object: a vocabulary has more, and a batch has fewer.
_MOST_VALUES = 10_000

_Make: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Marks an argument that goes whole to each replica.

    Tensors in it are copied to each replica, and their gradients from all replicas are summed. The
    first replica on a tensor's own device gets the tensor itself; each further one costs memory.

    Example::

        model(batch, Replicate(mask))

    Args:
        value: A tensor or a container of tensors.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a container is built, without its leaves; equal where types, keys and nesting are."""

    #: Type of the container; None for a leaf.
    kind: type | None = None
    #: Index, dict key or attribute name of each child.
    keys: Sequence[Any] = ()
    children: tuple[Structure, ...] = ()
    #: What a registered node keeps beside its children.
    context: Any = None
    make: _Make = dataclasses.field(default=tuple, compare=False, repr=False)
    num_leaves: int = dataclasses.field(default=1, compare=False, repr=False)
    #: Whether there is a :class:`Replicate` in it.
    is_marked: bool = dataclasses.field(default=False, compare=False, repr=False)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Build the container again around ``leaves``, without any :class:`Replicate`."""
        assert len(leaves) == self.num_leaves, (len(leaves), self.num_leaves)
        if self.kind is None:
            return leaves[0]
        children, start = [], 0
        for child in self.children:
            end = start + child.num_leaves
            own = leaves[start] if child is LEAF else child.rebuild(leaves[start:end])
            children.append(own)
            start = end
        return self.make(children)

    def child_path(self, root: str, position: int) -> str:
        """How a reader would write the child at ``position`` of a container called ``root``."""
        key = self.keys[position]
        if not isinstance(key, str) or (self.kind is not None and issubclass(self.kind, dict)):
            return f"{root}[{key!r}]"
        return f"{root}.{key}" if root else key

    def paths(self, root: str) -> list[str]:
        """One expression per leaf, such as ``inputs[0]['mask']``, for error messages."""
        if self.kind is None:
            return [root]
        return [
            path
            for position, child in enumerate(self.children)
            for path in child.paths(self.child_path(root, position))
        ]

    def describe(self) -> str:
        """What a container has, for error messages."""
        if self.kind is None:
            return "no parts"
        by_position = list(self.keys) == list(range(len(self.keys)))
        return f"length {len(self.keys)}" if by_position else str(list(self.keys))


LEAF = Structure()


class Path(NamedTuple):
    """Where a leaf is; as a string what a reader would write, which errors alone ask for."""

    root: str
    structure: Structure
    place: int

    def __str__(self) -> str:
        return self.structure.paths(self.root)[self.place]


def flatten(
    obj: Any, *, like: Structure | None = None, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Structure]:
    """The leaves of a container in order, and the structure that builds it around others.

    Dicts with the same keys as in ``like`` are taken in its order; ``is_leaf`` makes leaves of
    containers.
    """
    if isinstance(obj, _LEAF_TYPES) or (is_leaf is not None and is_leaf(obj)):
        return [obj], LEAF
    kind: Any = type(obj)
    if kind is tuple or kind is list:
        opened = _Opened(range(len(obj)), obj, kind)
    else:
        opened = _open(obj, like)
    keys, values, make, context = opened
    if not keys:
        return [obj], LEAF
    leaves: list[Any] = []
    children: list[Structure] = []
    is_marked = kind is Replicate
    for position, value in enumerate(values):
        # Mostly there are no keyword arguments.
        if isinstance(value, _LEAF_TYPES) or (type(value) is dict and not value):
            leaves.append(value)
            children.append(LEAF)
            continue
        below = like.children[position] if like and position < len(like.children) else None
        found, child = flatten(value, like=below, is_leaf=is_leaf)
        leaves += found
        children.append(child)
        is_marked = is_marked or child.is_marked
    return leaves, Structure(kind, keys, tuple(children), context, make, len(leaves), is_marked)


def difference(first: Structure, other: Structure, root: str, names: tuple[str, str]) -> str:
    """Say where two structures of containers called ``root`` part, which are not equal."""
    mine, theirs = names
    if first.kind is not other.kind:
        kinds = [f"a {s.kind.__name__}" if s.kind else "a leaf" for s in (first, other)]
        return f"{root} is {kinds[0]} in {mine} but {kinds[1]} in {theirs}"
    if first.keys != other.keys:
        return f"{root} has {first.describe()} in {mine} but {other.describe()} in {theirs}"
    for position, (child, counterpart) in enumerate(
        zip(first.children, other.children, strict=True)
    ):
        if child != counterpart:
            return difference(child, counterpart, first.child_path(root, position), names)
    return f"{root} holds {first.context!r} in {mine} but {other.context!r} in {theirs}"


# --- kinds of containers --------------------------------------------------------------------------


class _Opened(NamedTuple):
    """The children of a container, and how another one is made around others."""

    keys: Sequence[Any] = ()
    #: None where it is a leaf.
    values: Sequence[Any] = ()
    make: _Make = tuple
    context: Any = None


def _open(obj: Any, like: Structure | None) -> _Opened:
    """A container that is neither a tuple nor a list; without values where it is a leaf."""
    kind: Any = type(obj)
    if isinstance(obj, dict):
        keys: tuple[Any, ...] = tuple(obj)
        if like is not None and kind is like.kind and set(keys) == set(like.keys):
            keys = tuple(like.keys)
        values = [dict.__getitem__(obj, key) for key in keys]
        return _Opened(keys, values, functools.partial(_new_dict, obj, keys))
    if kind is Replicate:
        return _Opened(("value",), (obj.value,), operator.itemgetter(0))
    if kind in registered_containers:
        return _open_registered(obj, registered_containers[kind])
    if isinstance(obj, (list, tuple)):
        if hasattr(kind, "_fields") and hasattr(kind, "_make"):
            return _Opened(kind._fields, obj, kind._make)
        if hasattr(kind, "n_sequence_fields"):
            # Such as time.struct_time; object.__new__ and tuple.__new__ refuse these.
            return _Opened(range(len(obj)), obj, kind)
        return _Opened(range(len(obj)), list(obj), functools.partial(_new_sequence, obj))
    names: list[str] = []
    if isinstance(obj, UserDict):
        names = ["data"]
    elif dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
    make = functools.partial(_new_object, obj, names)
    return _Opened(tuple(names), [getattr(obj, name) for name in names], make)


def _open_registered(obj: Any, node: Any) -> _Opened:
    values, context = node.flatten_fn(obj)
    keys: Sequence[Any] = range(len(values))
    if node.flatten_with_keys_fn is not None:
        entries = [entry for entry, _ in node.flatten_with_keys_fn(obj)[0]]
        # One of them, by the kind of the entry.
        names = [getattr(entry, "name", getattr(entry, "key", None)) for entry in entries]
        keys = tuple(i if name is None else name for i, name in enumerate(names))
    return _Opened(keys, values, lambda new: node.unflatten_fn(list(new), context), context)


# These make another one without the class's own methods: they may check, convert or refuse what
# they are given, and the original has been through them already.


def _new_dict(obj: dict[Any, Any], keys: Sequence[Any], children: Sequence[Any]) -> Any:
    kind: Any = type(obj)
    new = kind.__new__(kind)
    _copy_attributes(obj, new)
    if isinstance(obj, defaultdict):
        defaultdict.__init__(new, obj.default_factory)
    base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
    for key, child in zip(keys, children, strict=True):
        base.__setitem__(new, key, child)
        if key in getattr(new, "__dict__", ()):
            object.__setattr__(new, key, child)
    return new


def _new_sequence(obj: list[Any] | tuple[Any, ...], children: Sequence[Any]) -> Any:
    kind: Any = type(obj)
    new = list.__new__(kind) if isinstance(obj, list) else tuple.__new__(kind, children)
    _copy_attributes(obj, new)
    if isinstance(new, list):
        list.extend(new, children)
    return new


def _new_object(obj: Any, names: Sequence[str], children: Sequence[Any]) -> Any:
    new = object.__new__(type(obj))
    _copy_attributes(obj, new)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(new, name, child)
    return new


def _copy_attributes(source: Any, target: Any) -> None:
    for name, value in getattr(source, "__dict__", {}).items():
        # A cached property was computed from the leaves that are being replaced.
        if not isinstance(getattr(type(source), name, None), functools.cached_property):
            target.__dict__[name] = value


# --- tensors in objects that are no containers ----------------------------------------------------


def may_hold(obj: Any) -> bool:
    """Whether it takes a look to know that an object holds no tensors."""
    return not isinstance(obj, _OPAQUE)


def held_tensors(obj: Any) -> list[torch.Tensor]:
    """The tensors in the attributes of an object, however deep, each once."""
    found: list[torch.Tensor] = []
    # Values made by a property would be gone before another one has the same id.
    seen: dict[int, Any] = {}
    pending = [obj]
    while pending and len(seen) < _MOST_VALUES:
        value = pending.pop()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found.append(value)
            continue
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending.extend(value)
        pending.extend(getattr(value, "__dict__", {}).values())
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            pending.extend(getattr(value, name) for name in names if hasattr(value, name))
    return found
