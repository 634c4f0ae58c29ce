"""Containers of tensors: flatten them to leaves, rebuild them around other leaves.

A container is what models take and return: tuples, lists, dicts and their subclasses, named tuples,
dataclasses, dicts with attributes (``ModelOutput``), and whatever is registered with
``torch.utils._pytree``. Everything else, ``None`` included, is a leaf.

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
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dataparallel import torch_internals

# Looked up first: most leaves are of these types, and none of them is ever opened. A PackedSequence
# is a named tuple, but its parts have no batch dimension of their own.
_LEAF_TYPES = (
    *(torch.Tensor, nn.Module, torch.Size, PackedSequence, type(None), type),
    *(str, bytes, int, float, complex),
)
# Nothing in these is looked at. What a module or a function holds is shared on purpose.
_OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum),
    *(nn.Module, PackedSequence, torch.Size, torch.dtype, torch.device, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
#: How many values are looked at in one object: a vocabulary has more, and a batch has fewer.
_MOST_VALUES = 10_000

_Make: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a container is built, without its leaves; equal where types, keys and nesting are."""

    #: Type of the container; None for a leaf.
    kind: type | None = None
    #: Index, dict key or attribute name of each child.
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    #: Whether the keys are attribute names.
    attributes: bool = False
    #: What a registered node keeps beside its children.
    context: Any = None
    make: _Make = dataclasses.field(default=tuple, compare=False, repr=False)
    num_leaves: int = dataclasses.field(default=1, compare=False, repr=False)
    #: Whether all children are leaves.
    is_flat: bool = dataclasses.field(default=True, compare=False, repr=False)

    @property
    def is_leaf(self) -> bool:
        """Whether this is the place of one leaf."""
        return self.kind is None

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Build the container again around ``leaves``, as many as :attr:`num_leaves`."""
        assert len(leaves) == self.num_leaves, (len(leaves), self.num_leaves)
        if self.kind is None:
            return leaves[0]
        return self.make(leaves) if self.is_flat else self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        return self.make(
            [next(leaves) if child is LEAF else child._rebuild(leaves) for child in self.children]
        )

    def child_path(self, root: str, position: int) -> str:
        """How a reader would write the child at ``position`` of a container called ``root``."""
        return root + _step(self.keys[position], self.attributes)

    def paths(self, root: str) -> list[str]:
        """One expression per leaf, such as ``inputs[0]['mask']``, for error messages."""
        if self.kind is None:
            return [root]
        return [
            path
            for position, child in enumerate(self.children)
            for path in child.paths(self.child_path(root, position))
        ]


def _step(key: Any, attributes: bool) -> str:
    return f".{key}" if attributes else f"[{key!r}]"


LEAF = Structure()


def flatten(
    obj: Any,
    *,
    like: Structure | None = None,
    is_leaf: Callable[[Any], bool] | None = None,
    name: str = "input",
) -> tuple[list[Any], Structure]:
    """The leaves of a container in order, and the structure that builds it around others.

    Dicts with the same keys as in ``like`` are taken in its order; ``is_leaf`` makes leaves of
    containers. ``name`` is for the ValueError if a container contains itself.
    """
    if isinstance(obj, _LEAF_TYPES):
        return [obj], LEAF
    walk = _Walk([], [], is_leaf, name)
    structure = _visit(obj, like, walk)
    return walk.leaves, structure


class _Walk(NamedTuple):
    """The state of one :func:`flatten`; a closure would keep the leaves in a reference cycle."""

    leaves: list[Any]
    #: The containers around the current one, and the steps that lead further down.
    around: list[tuple[Any, Any, bool]]
    is_leaf: Callable[[Any], bool] | None
    name: str


class _Opened(NamedTuple):
    """The children of a container, and how another one is made around others."""

    values: Sequence[Any]
    keys: tuple[Any, ...]
    make: _Make
    attributes: bool = False
    context: Any = None


def _visit(obj: Any, like: Structure | None, walk: _Walk) -> Structure:
    """Append the leaves of ``obj``, and return how it is built."""
    opened = None if walk.is_leaf is not None and walk.is_leaf(obj) else _open(obj)
    if opened is None:
        walk.leaves.append(obj)
        return LEAF
    values, keys, make, attributes, context = opened
    if like is not None and like.keys != keys and _are_in_other_order(obj, keys, like):
        by_key = dict(zip(keys, values, strict=True))
        keys, make, values = like.keys, like.make, [by_key[key] for key in like.keys]
    for container, _, _ in walk.around:
        if container is obj:
            steps = "".join([_step(key, named) for _, key, named in walk.around])
            raise ValueError(
                f"{walk.name}{steps} contains itself; pass containers without "
                "cycles, or hold the object in a class that is not a container"
            )
    before, is_flat, children = len(walk.leaves), True, []
    for position, value in enumerate(values):
        child = LEAF
        if isinstance(value, _LEAF_TYPES):
            walk.leaves.append(value)
        else:
            below = like.children[position] if like and position < len(like.children) else None
            walk.around.append((obj, keys[position], attributes))
            child = _visit(value, below, walk)
            walk.around.pop()
        is_flat = is_flat and child is LEAF
        children.append(child)
    num_leaves = len(walk.leaves) - before
    return Structure(
        type(obj), keys, tuple(children), attributes, context, make, num_leaves, is_flat
    )


def _are_in_other_order(obj: Any, keys: tuple[Any, ...], like: Structure) -> bool:
    return isinstance(obj, dict) and type(obj) is like.kind and set(keys) == set(like.keys)


def difference(
    first: Structure,
    other: Structure,
    root: str,
    names: tuple[str, str] = ("the first", "the other"),
) -> str | None:
    """Say where two structures of containers called ``root`` part; None when they are equal."""
    if first == other:
        return None
    mine, theirs = names
    if first.kind is not other.kind:
        kinds = [f"a {s.kind.__name__}" if s.kind else "a leaf" for s in (first, other)]
        return f"{root} is {kinds[0]} in {mine} but {kinds[1]} in {theirs}"
    if first.keys != other.keys:
        if first.kind is not None and issubclass(first.kind, (list, tuple)):
            sizes = len(first.keys), len(other.keys)
            return f"{root} has {sizes[0]} elements in {mine} but {sizes[1]} in {theirs}"
        missing = [key for key in first.keys if key not in other.keys]
        extra = [key for key in other.keys if key not in first.keys]
        return f"{root} has the keys {missing} only in {mine} and {extra} only in {theirs}"
    if first.context != other.context:
        return f"{root} holds {first.context!r} in {mine} but {other.context!r} in {theirs}"
    for position, pair in enumerate(zip(first.children, other.children, strict=True)):
        found = difference(*pair, first.child_path(root, position), names)
        if found is not None:
            return found
    return f"{root} is built differently in {mine} and {theirs}"


# --- kinds of containers: the children, and how to build one again --------------------------------


def _open(obj: Any) -> _Opened | None:
    kind: Any = type(obj)
    if kind is tuple or kind is list:
        return _Opened(obj, tuple(range(len(obj))), kind)
    if kind is dict:
        keys = tuple(obj)
        return _Opened([*obj.values()], keys, lambda new: dict(zip(keys, new, strict=True)))
    is_data, is_dict = dataclasses.is_dataclass(obj), isinstance(obj, dict)
    # The constructor of a dict that is a dataclass may take a single field apart, and torch's
    # functions for these two leave out what a subclass of theirs would have.
    registered = torch_internals.registered_containers.get(kind)
    if registered and not (is_data and is_dict) and kind not in (OrderedDict, defaultdict):
        return _open_registered(obj, registered)
    if is_dict:
        return _open_dict(obj)
    if isinstance(obj, (list, tuple)):
        if hasattr(kind, "n_sequence_fields"):
            return _Opened(obj, tuple(range(len(obj))), kind)
        if hasattr(kind, "_fields") and hasattr(kind, "_make"):
            return _Opened(obj, tuple(kind._fields), kind._make, attributes=True)
        return _open_sequence(obj)
    if isinstance(obj, UserDict):
        return _open_attributes(obj, ("data",))
    if is_data:
        return _open_attributes(obj, tuple(n for n in _field_names(obj) if hasattr(obj, n)))
    return None


def _open_registered(obj: Any, node: Any) -> _Opened:
    values, context = node.flatten_fn(obj)
    keys: tuple[Any, ...] = tuple(range(len(values)))
    attributes = False
    if node.flatten_with_keys_fn is not None:
        entries = [entry for entry, _ in node.flatten_with_keys_fn(obj)[0]]
        attributes = all(isinstance(entry, torch_internals.AttributeKey) for entry in entries)
        keys = tuple(_raw_key(entry) for entry in entries)
    make = lambda children: node.unflatten_fn(list(children), context)  # noqa: E731
    return _Opened(values, keys, make, attributes, context)


def _raw_key(entry: Any) -> Any:
    named = [getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name)]
    return named[0] if named else entry


# These make another one without the class's own methods: they may check, convert or refuse what
# they are given, and the original has been through them already.


def _open_dict(obj: dict[Any, Any]) -> _Opened:
    kind, keys, fields = type(obj), tuple(obj), _field_names(obj)

    def make(children: Sequence[Any]) -> Any:
        new: Any = kind.__new__(kind)
        _copy_attributes(obj, new)
        if isinstance(obj, defaultdict):
            defaultdict.__init__(new, obj.default_factory)
        base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
        for key, child in zip(keys, children, strict=True):
            base.__setitem__(new, key, child)
            if key in fields or key in getattr(obj, "__dict__", ()):
                object.__setattr__(new, key, child)
        return new

    return _Opened([dict.__getitem__(obj, key) for key in keys], keys, make)


def _open_sequence(obj: list[Any] | tuple[Any, ...]) -> _Opened:
    kind: Any = type(obj)

    def make(children: Sequence[Any]) -> Any:
        new = list.__new__(kind) if isinstance(obj, list) else tuple.__new__(kind, children)
        _copy_attributes(obj, new)
        if isinstance(new, list):
            list.extend(new, children)
        return new

    return _Opened(list(obj), tuple(range(len(obj))), make)


def _open_attributes(obj: Any, names: tuple[str, ...]) -> _Opened:
    kind = type(obj)

    def make(children: Sequence[Any]) -> Any:
        new = object.__new__(kind)
        _copy_attributes(obj, new)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    return _Opened([getattr(obj, name) for name in names], names, make, attributes=True)


def _field_names(obj: Any) -> tuple[str, ...]:
    fields = dataclasses.fields(obj) if dataclasses.is_dataclass(obj) else ()
    return tuple(field.name for field in fields)


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
