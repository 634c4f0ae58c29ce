"""Replace references to a module's parts by references to the parts of its clone.

Modules refer to each other and to tensors not only through their registered children: in lists,
bound methods, partial functions, hooks and weak references. A clone whose attributes still led to
the original would compute on the wrong device.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

#: From the id of an original tensor or module to its counterpart.
Counterparts: TypeAlias = Mapping[int, Any]

#: Types that cannot refer to anything; most attributes of a module are of one of them.
OPAQUE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


def may_refer(value: Any) -> bool:
    """Whether :func:`remap` could change ``value``; quick, and never wrongly False."""
    kind = type(value)
    if kind in OPAQUE:
        return False
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return bool(value)
    return isinstance(
        value,
        (torch.Tensor, nn.Module, types.MethodType, functools.partial, weakref.ref),
    )


def remap(value: Any, counterparts: Counterparts) -> Any:
    """``value`` with every reference to an original replaced by its counterpart.

    Example::

        remap([layer.weight, 3], {id(layer.weight): replica_weight})   # [replica_weight, 3]

    Args:
        value: Any object; tensors and modules, bound methods, partial functions, weak references
            and containers of those are followed, everything else is kept.
        counterparts: From ``id(original)`` to what stands for it.

    Returns:
        ``value`` itself if nothing in it was replaced, so that identity is kept; else a new object
        of the same type.
    """
    return _remap(value, counterparts, set())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors that :func:`remap` would look up in ``value``."""
    found: list[torch.Tensor] = []

    class _Collector(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            if isinstance(default, torch.Tensor):
                found.append(default)
            return default

    _remap(value, _Collector(), set())
    return found


def _remap(value: Any, counterparts: Counterparts, inside: set[int]) -> Any:
    if not may_refer(value) or id(value) in inside:
        return value
    if isinstance(value, (torch.Tensor, nn.Module)):
        return counterparts.get(id(value), value)

    inside.add(id(value))

    def follow(part: Any) -> Any:
        return _remap(part, counterparts, inside)

    try:
        if isinstance(value, dict):
            return _remap_dict(value, follow)
        if isinstance(value, (list, tuple, set, frozenset)):
            return _remap_sequence(value, follow)
        if isinstance(value, types.MethodType):
            owner = follow(value.__self__)
            if owner is value.__self__:
                return value
            return types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            return _remap_partial(value, follow)
        target = value()
        counterpart = None if target is None else follow(target)
        return value if counterpart is target else weakref.ref(counterpart)
    finally:
        inside.discard(id(value))


def _remap_dict(value: dict[Any, Any], follow: Callable[[Any], Any]) -> dict[Any, Any]:
    changed = {}
    for key, item in value.items():
        new = follow(item)
        if new is not item:
            changed[key] = new
    if not changed:
        return value
    result = copy.copy(value)
    result.update(changed)
    return result


def _remap_sequence(value: Any, follow: Callable[[Any], Any]) -> Any:
    items = list(value)
    new = [follow(item) for item in items]
    if all(a is b for a, b in zip(new, items, strict=True)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new)
    if isinstance(value, list) and type(value) is not list:
        result = copy.copy(value)
        result[:] = new
        return result
    return type(value)(new)


def _remap_partial(
    value: functools.partial[Any], follow: Callable[[Any], Any]
) -> functools.partial[Any]:
    func, args, keywords = follow(value.func), follow(value.args), follow(value.keywords)
    if func is value.func and args is value.args and keywords is value.keywords:
        return value
    return type(value)(func, *args, **keywords)
