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
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dataparallel import torch_internals

# Looked up first: most leaves are of these types, and none of them is ever opened. A PackedSequence
# is a named tuple, but its parts have no batch dimension of their own.
_LEAF_TYPES = (
    *(torch.Tensor, nn.Module, torch.Size, PackedSequence, type),
    *(str, bytes, int, float, complex),
)
_BUILTIN_TYPES = (tuple, list, dict, OrderedDict, defaultdict)
# Nothing in these is looked at. What a module or a function holds is shared on purpose.
_OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum),
    *(nn.Module, PackedSequence, torch.Size, torch.dtype, torch.device, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
#: How many values are looked at in one object: a vocabulary has more, and a batch has fewer.
_MOST_VALUES = 10_000


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a container is built, without its leaves; equal where containers, keys and nesting are.

    Example::

        leaves, structure = flatten({"a": 1, "b": [2, 3]})
        leaves                            # [1, 2, 3]
        structure.paths("inputs")         # ["inputs['a']", "inputs['b'][0]", "inputs['b'][1]"]
        structure.rebuild([10, 20, 30])   # {"a": 10, "b": [20, 30]}
    """

    kind: type | None = None
    """Type of the container; ``None`` for a leaf."""
    keys: tuple[Any, ...] = ()
    """Index, dict key or attribute name of each child."""
    children: tuple[Structure, ...] = ()
    attributes: bool = False
    """Whether the keys are attribute names."""
    context: Any = None
    """What a registered node keeps beside its children."""
    make: Callable[[Sequence[Any]], Any] = dataclasses.field(
        default=lambda leaves: leaves[0], compare=False, repr=False
    )

    @property
    def is_leaf(self) -> bool:
        """Whether this is the place of one leaf."""
        return self.kind is None

    @functools.cached_property
    def num_leaves(self) -> int:
        """How many leaves :meth:`rebuild` takes."""
        return 1 if self.kind is None else sum([child.num_leaves for child in self.children])

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Build the container again around ``leaves``, as many as :attr:`num_leaves`."""
        assert len(leaves) == self.num_leaves, (len(leaves), self.num_leaves)
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        return self.make([child._rebuild(leaves) for child in self.children])

    def child_path(self, root: str, position: int) -> str:
        """How a reader would write the child at ``position`` of a container called ``root``."""
        key = self.keys[position]
        return f"{root}.{key}" if self.attributes else f"{root}[{key!r}]"

    def paths(self, root: str) -> list[str]:
        """One expression per leaf, such as ``inputs[0]['mask']``, for error messages."""
        if self.kind is None:
            return [root]
        return [
            path
            for position, child in enumerate(self.children)
            for path in child.paths(self.child_path(root, position))
        ]


_LEAF = Structure()
_Opened = tuple[Sequence[Any], Structure]


def flatten(
    obj: Any,
    *,
    like: Structure | None = None,
    is_leaf: Callable[[Any], bool] | None = None,
    name: str = "input",
) -> tuple[list[Any], Structure]:
    """Take a container apart.

    Args:
        obj: Any object; one that is not a container is itself the only leaf.
        like: Take the keys of dicts in the order of this structure wherever they are the same keys,
            so that dicts filled in another order compare equal.
        is_leaf: Containers for which this is true are leaves too.
        name: What ``obj`` is called in error messages.

    Returns:
        The leaves in order, and the structure that rebuilds ``obj`` around as many others.

    Raises:
        ValueError: A container contains itself.
    """
    flattening = _Flattening(is_leaf, name)
    structure = flattening.visit(obj, like)
    return flattening.leaves, structure


class _Flattening:
    """The state of one :func:`flatten`; a closure would keep the leaves in a reference cycle."""

    def __init__(self, is_leaf: Callable[[Any], bool] | None, name: str) -> None:
        self._is_leaf, self._name = is_leaf, name
        self.leaves: list[Any] = []
        # The containers around the current one, each with the place that leads further down.
        self._around: list[tuple[Any, Structure, int]] = []

    def visit(self, obj: Any, like: Structure | None) -> Structure:
        """Append the leaves of ``obj``, and return how it is built."""
        opened = None if self._is_leaf is not None and self._is_leaf(obj) else _open(obj)
        if opened is None:
            self.leaves.append(obj)
            return _LEAF
        values, skeleton = opened
        if like is not None and isinstance(obj, dict) and _has_other_order(skeleton, like):
            by_key = dict(zip(skeleton.keys, values, strict=True))
            values = [by_key[key] for key in like.keys]
            skeleton = dataclasses.replace(skeleton, keys=like.keys, make=like.make)
        self._refuse_cycle(obj)
        children = []
        for position, value in enumerate(values):
            self._around.append((obj, skeleton, position))
            below = like.children[position] if like and position < len(like.children) else None
            children.append(self.visit(value, below))
            self._around.pop()
        return dataclasses.replace(skeleton, children=tuple(children))

    def _refuse_cycle(self, obj: Any) -> None:
        for container, _, _ in self._around:
            if container is obj:
                steps = [step.child_path("", place) for _, step, place in self._around]
                raise ValueError(
                    f"{self._name}{''.join(steps)} contains itself; pass containers without "
                    "cycles, or hold the object in a class that is not a container"
                )


def _has_other_order(first: Structure, other: Structure) -> bool:
    is_other = first.kind is other.kind and first.keys != other.keys
    return is_other and set(first.keys) == set(other.keys)


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
    if obj is None or isinstance(obj, _LEAF_TYPES):
        return None
    kind = type(obj)
    is_data = dataclasses.is_dataclass(obj)
    # The constructor of a dict that is a dataclass may take a single field apart.
    registered = kind in torch_internals.registered_containers and kind not in _BUILTIN_TYPES
    if registered and not (is_data and isinstance(obj, dict)):
        return _open_registered(obj)
    if isinstance(obj, dict):
        return _open_dict(obj)
    if isinstance(obj, (list, tuple)):
        return _open_sequence(obj)
    if isinstance(obj, UserDict):
        return _open_attributes(obj, ["data"])
    if is_data:
        return _open_attributes(obj, [name for name in _field_names(obj) if hasattr(obj, name)])
    return None


def _open_registered(obj: Any) -> _Opened:
    node = torch_internals.registered_containers[type(obj)]
    values, context = node.flatten_fn(obj)
    keys: tuple[Any, ...] = tuple(range(len(values)))
    attributes = False
    if node.flatten_with_keys_fn is not None:
        entries = [entry for entry, _ in node.flatten_with_keys_fn(obj)[0]]
        attributes = all(isinstance(entry, torch_internals.AttributeKey) for entry in entries)
        keys = tuple(_raw_key(entry) for entry in entries)
    make = lambda children: node.unflatten_fn(list(children), context)  # noqa: E731
    return values, Structure(type(obj), keys, (), attributes, context, make)


def _raw_key(entry: Any) -> Any:
    named = [getattr(entry, name) for name in ("idx", "key", "name") if hasattr(entry, name)]
    return named[0] if named else entry


def _open_dict(obj: dict[Any, Any]) -> _Opened:
    kind, keys = type(obj), tuple(obj)
    values = [dict.__getitem__(obj, key) for key in keys]
    if kind is dict:
        return values, Structure(kind, keys, make=lambda new: dict(zip(keys, new, strict=True)))
    fields = _field_names(obj)

    def make(children: Sequence[Any]) -> Any:
        # Without the class's own methods: they may check, convert or refuse what they are given,
        # and the original has been through them already.
        new: Any = kind.__new__(kind)
        _copy_attributes(obj, new)
        if isinstance(obj, defaultdict):
            new.default_factory = obj.default_factory
        base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
        for key, child in zip(keys, children, strict=True):
            base.__setitem__(new, key, child)
            if key in fields or key in getattr(obj, "__dict__", ()):
                object.__setattr__(new, key, child)
        return new

    return values, Structure(kind, keys, make=make)


def _open_sequence(obj: list[Any] | tuple[Any, ...]) -> _Opened:
    kind: Any = type(obj)
    keys: tuple[Any, ...] = tuple(range(len(obj)))
    if kind in (list, tuple) or hasattr(kind, "n_sequence_fields"):
        return obj, Structure(kind, keys, make=kind)
    if hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return obj, Structure(kind, tuple(kind._fields), (), True, None, kind._make)

    def make(children: Sequence[Any]) -> Any:
        new = list.__new__(kind) if isinstance(obj, list) else tuple.__new__(kind, children)
        _copy_attributes(obj, new)
        if isinstance(new, list):
            list.extend(new, children)
        return new

    return list(obj), Structure(kind, keys, make=make)


def _open_attributes(obj: Any, names: Sequence[str]) -> _Opened:
    kind = type(obj)

    def make(children: Sequence[Any]) -> Any:
        new = object.__new__(kind)
        _copy_attributes(obj, new)
        for name, child in zip(names, children, strict=True):
            # Past a frozen dataclass's own __setattr__, and without running __init__ again.
            object.__setattr__(new, name, child)
        return new

    values = [getattr(obj, name) for name in names]
    return values, Structure(kind, tuple(names), (), True, None, make)


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
