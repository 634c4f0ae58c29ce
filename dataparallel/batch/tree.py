"""Containers of tensors: flatten them to leaves, rebuild them around other leaves.

A container is a value that models take and return: tuples, lists, dicts and their subclasses, named
tuples, dataclasses, dicts with attributes (``ModelOutput``). So is everything that is registered
with ``torch.utils._pytree``. Everything else is a leaf, ``None`` included. So is an empty
container: it is often there to be filled, and the caller looks into it afterwards.

Note [Objects of unknown type]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A leaf that is no tensor goes to each replica as the one object that it is. For a number, a name or
a configuration that is right. An object that holds a batch would reach each replica whole. One that
a module fills (a cache of keys and values) would be filled by all replicas at the same time. Both
are errors that say what to do; ``Replicate(obj)`` shares an object all the same. A class that is
registered with :func:`register_batch_type` says itself how its objects are divided by samples.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import itertools
import operator
import sys
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dataparallel.torch_internals import registered_containers

# The wrappers look into none of these. A module or a function shares the objects that it holds on
# purpose.
_OPAQUE = (
    *(type(None), int, float, complex, str, bytes, type, enum.Enum, nn.Module),
    *(torch.Size, torch.dtype, torch.device, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
# A PackedSequence is a named tuple, but its parts have no batch dimension of their own.
_LEAF_TYPES = (torch.Tensor, *_OPAQUE, PackedSequence)
#: The most values to look at in one object: a vocabulary has more, and a batch has fewer.
_MOST_VALUES = 10_000

T = TypeVar("T")
#: The place of a part of a container: the position of a child, then of its child, and so on.
Place: TypeAlias = tuple[int, ...]
_Make: TypeAlias = Callable[[Sequence[Any]], Any]
#: The keys of a container, its children, what makes another one of others, and the context of a
#: registered one.
_Opened: TypeAlias = tuple[Sequence[Any], Sequence[Any], _Make, Any]


@dataclasses.dataclass(frozen=True)
class Replicate:
    """A mark on an argument that goes whole to each replica.

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
    """The layout of a container without its leaves; equal if types, keys and nesting are equal."""

    #: Type of the container; None for a leaf.
    kind: type | None = None
    #: Index, dict key or attribute name of each child.
    keys: Sequence[Any] = ()
    children: tuple[Structure, ...] = ()
    #: The data that a registered node keeps beside its children.
    context: Any = None
    make: _Make = dataclasses.field(default=tuple, compare=False, repr=False)
    num_leaves: int = dataclasses.field(default=1, compare=False, repr=False)
    #: True if there is a :class:`Replicate` in it.
    is_marked: bool = dataclasses.field(default=False, compare=False, repr=False)
    #: True if it, or a part of it, is of a kind that may hold samples one by one.
    has_units: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def is_list(self) -> bool:
        """True for a list or a tuple whose parts have no names."""
        is_sequence = self.kind is not None and issubclass(self.kind, (list, tuple))
        return is_sequence and isinstance(self.keys, range)

    def part(self, place: Place) -> tuple[Structure, int]:
        """Return the structure at a place, and how many leaves are before it."""
        found, start = self, 0
        for position in place:
            start += sum([child.num_leaves for child in found.children[:position]])
            found = found.children[position]
        return found, start

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
        """Return the child of a container called ``root`` as a reader would write it."""
        key = self.keys[position]
        if not isinstance(key, str) or (self.kind is not None and issubclass(self.kind, dict)):
            return f"{root}[{key!r}]"
        return f"{root}.{key}" if root else key

    def paths(self, root: str) -> list[str]:
        """Return one expression per leaf, such as ``inputs[0]['mask']``, for error messages."""
        if self.kind is None:
            return [root]
        return [
            path
            for position, child in enumerate(self.children)
            for path in child.paths(self.child_path(root, position))
        ]

    def __str__(self) -> str:
        """Return a readable form, such as ``dict(x=leaf, y=list(leaf, leaf))``."""
        if self.kind is None:
            return "leaf"
        parts = [] if self.context is None else [repr(self.context)]
        for key, child in zip(self.keys, self.children, strict=True):
            parts.append(str(child) if isinstance(self.keys, range) else f"{key}={child}")
        return f"{self.kind.__name__}({', '.join(parts)})"


LEAF = Structure()


class Path(NamedTuple):
    """The place of a leaf; as a string, the expression for it, which only errors ask for."""

    root: str
    structure: Structure
    place: int

    def __str__(self) -> str:
        return self.structure.paths(self.root)[self.place]


def flatten(obj: Any, *, like: Structure = LEAF) -> tuple[list[Any], Structure]:
    """Return the leaves of a container in order, and the structure that builds it around others.

    Dicts with the same keys as in ``like`` are taken in its order.
    """
    kind: Any = type(obj)
    is_plain = kind is tuple or kind is list
    # Some types of torch are asked in Python.
    if not is_plain and isinstance(obj, _LEAF_TYPES):
        return [obj], LEAF
    opened: _Opened = (range(len(obj)), obj, kind, None) if is_plain else _open(obj, like)
    keys, values, make, context = opened
    if not keys:
        return [obj], LEAF
    leaves: list[Any] = []
    children: list[Structure] = []
    is_marked, has_units = kind is Replicate, is_plain or _may_be_unit(kind)
    for position, value in enumerate(values):
        # Mostly there are no keyword arguments.
        if (type(value) is dict and not value) or isinstance(value, _LEAF_TYPES):
            leaves.append(value)
            children.append(LEAF)
            continue
        below = like.children[position] if position < len(like.children) else LEAF
        found, child = flatten(value, like=below)
        leaves += found
        children.append(child)
        is_marked, has_units = is_marked or child.is_marked, has_units or child.has_units
    parts = tuple(children)
    return leaves, Structure(kind, keys, parts, context, make, len(leaves), is_marked, has_units)


def fold(
    leaves: Sequence[Any], structure: Structure, units: Collection[Place], here: Place = ()
) -> tuple[list[Any], Structure]:
    """Make the parts of a container that are at some places leaves of it."""
    if here in units:
        return [structure.rebuild(leaves)], LEAF
    if structure.kind is None or not units:
        return list(leaves), structure
    found: list[Any] = []
    children, start = [], 0
    for position, child in enumerate(structure.children):
        end = start + child.num_leaves
        below, folded = fold(leaves[start:end], child, units, (*here, position))
        found += below
        children.append(folded)
        start = end
    parts = tuple(children)
    return found, dataclasses.replace(structure, children=parts, num_leaves=len(found))


# --- what holds samples one by one ----------------------------------------------------------------


class BatchType(NamedTuple):
    """The way in which objects of one class hold the samples of a batch."""

    #: Returns the number of samples.
    length: Callable[[Any], int] = len
    #: Those from one number up to another one.
    take: Callable[[Any, int, int], Any] = lambda batch, start, stop: batch[start:stop]
    #: One of several; None if nobody has said how.
    join: Callable[[Sequence[Any]], Any] | None = None
    #: The object on a device; None for a container, and for what holds no tensors.
    to: Callable[[Any, torch.device], Any] | None = None


def _join_lists(parts: Sequence[Any]) -> Any:
    return (tuple if isinstance(parts[0], tuple) else list)(itertools.chain(*parts))


def _nested(tensors: Sequence[torch.Tensor], layout: torch.layout) -> torch.Tensor:
    result: torch.Tensor = torch.nested.as_nested_tensor(list(tensors), layout=layout)
    return result


def _to_device(batch: Any, device: torch.device) -> Any:
    return batch.to(device)


_LIST = BatchType(join=_join_lists)
_ARRAY = BatchType(join=lambda arrays: sys.modules["numpy"].concatenate(arrays))
_OTHER = BatchType()
_NESTED = BatchType(
    lambda tensor: tensor.size(0),
    lambda tensor, start, stop: _nested(tensor.unbind()[start:stop], tensor.layout),
    lambda parts: _nested([*itertools.chain(*[part.unbind() for part in parts])], parts[0].layout),
    _to_device,
)
_registered: dict[type, BatchType] = {}


def register_batch_type(
    cls: type[T],
    *,
    length: Callable[[T], int] = len,  # type: ignore[assignment]
    take: Callable[[T, int, int], T] = _OTHER.take,
    join: Callable[[Sequence[T]], T] | None = None,
    to: Callable[[T, torch.device], T] | None = None,
) -> type[T]:
    """Let the wrappers divide the objects of a class by samples, wherever they are in a batch.

    Example::

        class Graphs(list):                     # with a length and [start:stop]; often with .to()
            pass

        dataparallel.register_batch_type(Graphs)

    Args:
        cls: The class; it holds for classes derived from it, too.
        length: The number of samples of an object. Default: its ``len``.
        take: ``take(batch, start, stop)`` returns an object with these samples. Default:
            ``batch[start:stop]``.
        join: Makes one object of those that replicas return. Default: the wrapper returns a list
            with one per replica.
        to: ``to(batch, device)`` returns the object on a device. Default: ``batch.to(device)`` if
            the class has such a method; otherwise tensors move if the class is a container.

    Returns:
        ``cls``, so that this can be a decorator.
    """
    if to is None and hasattr(cls, "to"):
        to = _to_device
    _registered[cls] = BatchType(length, take, join, to)
    return cls


def registered_type(kind: type) -> BatchType | None:
    """Return the way in which a registered class holds samples; None for every other class."""
    if not _registered:
        return None
    return next((_registered[base] for base in kind.__mro__ if base in _registered), None)


def find_movable(structure: Structure, place: Place = ()) -> Iterator[Place]:
    """Yield the places of objects in a container that know how to get to a device."""
    if _registered and structure.has_units:
        holder = registered_type(structure.kind or object)
        if holder is not None and holder.to is not None:
            yield place
            return
        for i, child in enumerate(structure.children):
            yield from find_movable(child, (*place, i))


def batch_type_of(value: Any) -> BatchType | None:
    """Return the way in which an object holds samples one by one; None if it cannot."""
    if isinstance(value, torch.Tensor):
        return _NESTED if value.is_nested else None
    found = registered_type(type(value))
    if found is not None or isinstance(value, (*_OPAQUE, dict, PackedSequence)):
        return found
    if isinstance(value, (list, tuple)):
        return _LIST
    if is_array(value):
        return _ARRAY if value.ndim else None
    return _OTHER if hasattr(value, "__len__") and hasattr(value, "__getitem__") else None


def is_array(value: Any) -> bool:
    """True for an array of numpy, which is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _may_be_unit(kind: type) -> bool:
    return issubclass(kind, (list, tuple)) or registered_type(kind) is not None


# --- kinds of containers --------------------------------------------------------------------------


def _open(obj: Any, like: Structure) -> _Opened:
    """Return a container that is neither a plain tuple nor a list; without keys for a leaf."""
    kind: Any = type(obj)
    keys: Sequence[Any] = ()
    if kind is Replicate:
        return ("value",), (obj.value,), operator.itemgetter(0), None
    if isinstance(obj, dict):
        keys = like.keys if kind is like.kind and set(obj) == set(like.keys) else tuple(obj)
        values = [dict.__getitem__(obj, key) for key in keys]
    elif kind in registered_containers:
        node = registered_containers[kind]
        values, context = node.flatten_fn(obj)
        keys = range(len(values))
        return keys, values, lambda new: node.unflatten_fn(list(new), context), context
    elif isinstance(obj, (list, tuple)):
        if hasattr(kind, "_make"):
            return kind._fields, obj, kind._make, None
        keys, values = range(len(obj)), list(obj)
        if hasattr(kind, "n_sequence_fields"):
            # A struct sequence, such as time.struct_time, refuses `tuple.__new__`.
            return keys, values, kind, None
    else:
        if isinstance(obj, UserDict):
            keys = ("data",)
        elif dataclasses.is_dataclass(obj):
            names = [field.name for field in dataclasses.fields(obj)]
            keys = tuple([name for name in names if hasattr(obj, name)])
        values = [getattr(obj, name) for name in keys]
    return keys, values, functools.partial(_another, obj, keys), None


def _another(obj: Any, keys: Sequence[Any], children: Sequence[Any]) -> Any:
    """Return a container like ``obj`` with other children, made without the methods of its class.

    They may check, convert or refuse what they are given, and the original has been through that.
    """
    kind: Any = type(obj)
    bases: tuple[Any, ...] = (tuple, list, OrderedDict, dict, object)
    base = next(base for base in bases if isinstance(obj, base))
    new = tuple.__new__(kind, children) if base is tuple else base.__new__(kind)
    for name, value in getattr(obj, "__dict__", {}).items():
        # A cached property was computed from the leaves that are being replaced.
        if not isinstance(getattr(kind, name, None), functools.cached_property):
            new.__dict__[name] = value
    if isinstance(obj, defaultdict):
        defaultdict.__init__(new, obj.default_factory)
    if base is list:
        list.extend(new, children)
    for key, child in zip(keys, children, strict=True) if base not in (tuple, list) else ():
        if base is not object:
            base.__setitem__(new, key, child)
        if base is object or key in getattr(new, "__dict__", ()):
            object.__setattr__(new, key, child)
    return new


# --- tensors in objects that are no containers ----------------------------------------------------


def may_hold(obj: Any) -> bool:
    """True if it takes a look to know that an object holds no tensors."""
    return not isinstance(obj, _OPAQUE)


def held_tensors(obj: Any) -> list[torch.Tensor]:
    """Return the tensors that an object holds, however deep, each once."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    pending = [obj]
    while pending and len(seen) < _MOST_VALUES:
        value = pending.pop()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            pending.extend(gc.get_referents(value))
    return found
