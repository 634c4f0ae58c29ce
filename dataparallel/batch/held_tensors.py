"""Tensors in objects that are no containers: caches, batches and results of a class of their own.

Note [Objects of unknown type]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What is no container (see :mod:`dataparallel.tree`) goes to each replica as the one object that it
is. For a number, a name or a configuration that is right. An object that holds a batch would reach
each replica whole, and one that a module fills (a cache of keys and values) would be filled by all
replicas at the same time. Both are errors that say what to do; ``Replicate(obj)`` shares an object
all the same. An object that holds no tensors, or only such as have nothing to do with the batch, is
shared, and an error follows if the replicas have put other tensors into it.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

# Nothing in these is looked at. What a module or a function holds is shared on purpose.
_OPAQUE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    nn.Module,
    PackedSequence,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.Generator,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
#: How many values are looked at in one object: a vocabulary has more, and a batch has fewer.
_MOST_VALUES = 10_000

WAY_OUT = (
    "pass its tensors in a tuple, a dict or a dataclass, or register its class with "
    "torch.utils._pytree.register_pytree_node"
)


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
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending.extend(value)
        pending.extend(_attributes(value) if not isinstance(value, torch.Tensor) else ())
    return found


def _attributes(obj: Any) -> list[Any]:
    values = list(getattr(obj, "__dict__", {}).values())
    for kind in type(obj).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        values += [getattr(obj, name) for name in names if hasattr(obj, name)]
    return values


def refuse_batch(obj: Any, path: str, batch_size: int, dim: int) -> None:
    """Raise a TypeError if an object, which replicas would share, holds a batch."""
    for tensor in held_tensors(obj):
        if -tensor.dim() <= dim < tensor.dim() and tensor.size(dim) == batch_size:
            raise TypeError(
                f"{path} is a {type(obj).__name__}, which is no container that can be split, but "
                f"it holds a tensor of shape {tuple(tensor.shape)}, with the {batch_size} samples "
                f"of the batch along dim {dim}; {WAY_OUT}. A cache of keys and values is left out "
                "with use_cache=False. Replicate(...) gives the object itself to all replicas"
            )


class SharedObjects:
    """Objects that all replicas of a call get. See Note [Objects of unknown type].

    Args:
        objects: Pairs of a path, such as ``kwargs['cache']``, and an object.
    """

    def __init__(self, objects: Sequence[tuple[str, Any]]) -> None:
        self._objects = [(path, obj, _state(obj)) for path, obj in objects]

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise a RuntimeError if replicas put tensors into an object within a ``with`` block."""
        try:
            yield
        except Exception as error:
            # What a replica raises then is often what it found of the others.
            self._check(error)
            raise
        self._check(None)

    def _check(self, cause: Exception | None) -> None:
        for path, obj, before in self._objects:
            now = _state(obj)
            if len(now) == len(before) and all(
                tensor is old and version == earlier
                for (tensor, version), (old, earlier) in zip(now, before, strict=True)
            ):
                continue
            raise RuntimeError(
                f"the replicas have written tensors into {path}, a {type(obj).__name__} that all "
                "of them share, so it holds a mixture of their chunks; leave it out (a cache of "
                f"keys and values with use_cache=False), or {WAY_OUT}. If it may be shared all "
                "the same, mark it with Replicate(...)"
            ) from cause


def _state(obj: Any) -> list[tuple[torch.Tensor, int]]:
    found = held_tensors(obj)
    return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in found]
