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
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None
    return isinstance(
        value,
        (torch.Tensor, nn.Module, types.MethodType, functools.partial, weakref.ref),
    )


def remap(value: Any, counterparts: Counterparts) -> Any:
    """``value`` with every reference to an original replaced by its counterpart.

    Example::

        remap([layer.weight, 3], {id(layer.weight): replica_weight})   # [replica_weight, 3]

    Args:
        value: Any object; tensors and modules, bound methods, partial functions, functions that
            close over something, weak references and containers of those are followed, everything
            else is kept.
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
        if isinstance(value, types.FunctionType):
            return _remap_function(value, follow)
        target = value()
        counterpart = None if target is None else follow(target)
        # Of the same class: a WeakMethod refers to a method that nothing else holds.
        return value if counterpart is target else type(value)(counterpart)
    finally:
        inside.discard(id(value))


def _remap_dict(value: dict[Any, Any], follow: Callable[[Any], Any]) -> dict[Any, Any]:
    new = [(follow(key), follow(item)) for key, item in value.items()]
    if all(a is k and b is v for (a, b), (k, v) in zip(new, value.items(), strict=True)):
        return value
    result = copy.copy(value)
    result.clear()
    result.update(new)
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


def _remap_function(value: types.FunctionType, follow: Callable[[Any], Any]) -> types.FunctionType:
    assert value.__closure__ is not None
    cells = []
    for cell in value.__closure__:
        try:
            content = cell.cell_contents
        except ValueError:  # Not assigned yet, as in a function that refers to itself.
            cells.append(cell)
            continue
        new = follow(content)
        cells.append(cell if new is content else types.CellType(new))
    if all(a is b for a, b in zip(cells, value.__closure__, strict=True)):
        return value
    result = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    result.__kwdefaults__ = value.__kwdefaults__
    result.__dict__.update(value.__dict__)
    return result
