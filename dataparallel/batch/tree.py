"""Containers of tensors: flatten them to leaves, rebuild them around other leaves.

A container is what models take and return: tuples, lists, dicts and their subclasses, named tuples,
dataclasses, dicts with attributes (``ModelOutput``), and whatever is registered with
``torch.utils._pytree``. Everything else, ``None`` included, is a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel import torch_internals

_Make = Callable[[Sequence[Any]], Any]

# Looked up first: most leaves are of these types, and none of them is ever opened. A PackedSequence
# is a named tuple, but its parts have no batch dimension of their own.
_LEAF_TYPES = (
    torch.Tensor,
    torch.nn.Module,
    torch.Size,
    PackedSequence,
    type,
    str,
    bytes,
    int,
    float,
    complex,
)
_BUILTIN_TYPES = (tuple, list, dict, OrderedDict, defaultdict)


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a container is built, without its leaves.

    Two structures are equal when containers, keys and their nesting are.

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
    make: _Make = dataclasses.field(default=lambda leaves: leaves[0], compare=False, repr=False)

    @property
    def is_leaf(self) -> bool:
        """Whether this is the place of one leaf."""
        return self.kind is None

    @functools.cached_property
    def num_leaves(self) -> int:
        """How many leaves :meth:`rebuild` takes."""
        return 1 if self.is_leaf else sum(child.num_leaves for child in self.children)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Build the container again around ``leaves``, as many as :attr:`num_leaves`."""
        assert len(leaves) == self.num_leaves, (len(leaves), self.num_leaves)
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        if self.is_leaf:
            return next(leaves)
        return self.make([child._rebuild(leaves) for child in self.children])

    def child_path(self, root: str, position: int) -> str:
        """How a reader would write the child at ``position`` of a container called ``root``."""
        key = self.keys[position]
        return f"{root}.{key}" if self.attributes else f"{root}[{key!r}]"

    def paths(self, root: str) -> list[str]:
        """One expression per leaf, such as ``inputs[0]['mask']``, for error messages."""
        if self.is_leaf:
            return [root]
        return [
            path
            for position, child in enumerate(self.children)
            for path in child.paths(self.child_path(root, position))
        ]


_LEAF = Structure()


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
    walk = _Walk(is_leaf, name)
    structure = walk.visit(obj, like)
    return walk.leaves, structure


class _Walk:
    """One pass over a container."""

    def __init__(self, is_leaf: Callable[[Any], bool] | None, name: str) -> None:
        self.leaves: list[Any] = []
        self._is_leaf = is_leaf
        self._name = name
        # The containers around the current one, each with the step that leads further down.
        self._around: list[tuple[Any, str]] = []

    def visit(self, obj: Any, like: Structure | None) -> Structure:
        opened = None if self._is_leaf is not None and self._is_leaf(obj) else _open(obj)
        if opened is None:
            self.leaves.append(obj)
            return _LEAF
        values, skeleton = opened
        if like is not None and isinstance(obj, dict):
            values, skeleton = _in_order_of(like, values, skeleton)
        if any(container is obj for container, _ in self._around):
            path = self._name + "".join(step for _, step in self._around)
            raise ValueError(
                f"{path} contains itself; pass containers without cycles, or hold the object in a "
                "class that is not a container"
            )
        children = []
        for position, value in enumerate(values):
            self._around.append((obj, skeleton.child_path("", position)))
            below = like.children[position] if like and position < len(like.children) else None
            children.append(self.visit(value, below))
            self._around.pop()
        return dataclasses.replace(skeleton, children=tuple(children))


def difference(
    first: Structure,
    other: Structure,
    root: str,
    names: tuple[str, str] = ("the first", "the other"),
) -> str | None:
    """Say where two structures part and what each is there.

    Args:
        first: One structure.
        other: Another one.
        root: What the containers are called in the text.
        names: How the text tells the two apart.

    Returns:
        ``None`` when they are equal.
    """
    if first == other:
        return None
    mine, theirs = names
    if first.kind is not other.kind:
        return f"{root} is {_describe(first)} in {mine} but {_describe(other)} in {theirs}"
    if first.keys != other.keys:
        if first.kind is not None and issubclass(first.kind, (list, tuple)):
            return (
                f"{root} has {len(first.keys)} elements in {mine} but {len(other.keys)} in {theirs}"
            )
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


def _describe(structure: Structure) -> str:
    return "a leaf" if structure.kind is None else f"a {structure.kind.__name__}"


def _in_order_of(
    like: Structure, values: Sequence[Any], skeleton: Structure
) -> tuple[Sequence[Any], Structure]:
    if like.kind is not skeleton.kind or set(like.keys) != set(skeleton.keys):
        return values, skeleton
    by_key = dict(zip(skeleton.keys, values, strict=True))
    return [by_key[key] for key in like.keys], dataclasses.replace(
        skeleton, keys=like.keys, make=like.make
    )


# --- one function per kind of container: its children, and how to build it again -----------------

_Opened = tuple[Sequence[Any], Structure]


def _open(obj: Any) -> _Opened | None:
    if obj is None or isinstance(obj, _LEAF_TYPES):
        return None
    kind = type(obj)
    if isinstance(obj, dict) and dataclasses.is_dataclass(obj):
        # Before the registry, whose constructor call may take a single field apart.
        return _open_dict(obj)
    if kind not in _BUILTIN_TYPES and kind in torch_internals.registered_containers:
        return _open_registered(obj)
    if isinstance(obj, dict):
        return _open_dict(obj)
    if isinstance(obj, list):
        return _open_list(obj)
    if isinstance(obj, tuple):
        return _open_tuple(obj)
    if isinstance(obj, UserDict):
        return _open_attributes(obj, ["data"])
    if dataclasses.is_dataclass(obj):
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

    def make(children: Sequence[Any]) -> Any:
        return node.unflatten_fn(list(children), context)

    return values, Structure(type(obj), keys, (), attributes, context, make)


def _raw_key(entry: Any) -> Any:
    for name in ("idx", "key", "name"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return entry


def _open_dict(obj: dict[Any, Any]) -> _Opened:
    kind, keys = type(obj), tuple(obj)
    if kind is dict:
        return list(obj.values()), Structure(
            kind, keys, make=lambda children: dict(zip(keys, children, strict=True))
        )
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

    return [dict.__getitem__(obj, key) for key in keys], Structure(kind, keys, make=make)


def _open_list(obj: list[Any]) -> _Opened:
    kind = type(obj)
    keys = tuple(range(len(obj)))
    if kind is list:
        return obj, Structure(kind, keys, make=list)

    def make(children: Sequence[Any]) -> Any:
        new = kind.__new__(kind)
        _copy_attributes(obj, new)
        list.extend(new, children)
        return new

    return list(obj), Structure(kind, keys, make=make)


def _open_tuple(obj: tuple[Any, ...]) -> _Opened:
    kind: Any = type(obj)
    keys: tuple[Any, ...] = tuple(range(len(obj)))
    if kind is tuple:
        return obj, Structure(kind, keys, make=tuple)
    if hasattr(obj, "_fields") and hasattr(obj, "_make"):
        return obj, Structure(kind, tuple(kind._fields), (), True, None, kind._make)
    if hasattr(kind, "n_sequence_fields"):
        return obj, Structure(kind, keys, make=kind)

    def make(children: Sequence[Any]) -> Any:
        new = tuple.__new__(kind, children)
        _copy_attributes(obj, new)
        return new

    return tuple(obj), Structure(kind, keys, make=make)


def _open_attributes(obj: Any, names: Sequence[str]) -> _Opened:
    kind = type(obj)

    def make(children: Sequence[Any]) -> Any:
        new = object.__new__(kind)
        _copy_attributes(obj, new)
        for name, child in zip(names, children, strict=True):
            # Past a frozen dataclass's own __setattr__, and without running __init__ again.
            object.__setattr__(new, name, child)
        return new

    return [getattr(obj, name) for name in names], Structure(
        kind, tuple(names), (), True, None, make
    )


def _field_names(obj: Any) -> tuple[str, ...]:
    fields = dataclasses.fields(obj) if dataclasses.is_dataclass(obj) else ()
    return tuple(field.name for field in fields)


def _copy_attributes(source: Any, target: Any) -> None:
    attributes = getattr(source, "__dict__", None)
    if attributes is None:
        return
    for name, value in attributes.items():
        # A cached property was computed from the leaves that are being replaced.
        if not isinstance(getattr(type(source), name, None), functools.cached_property):
            target.__dict__[name] = value
