"""References to tensors and modules, wherever they hide in an object.

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

_MISSING = object()
# Types that cannot refer to anything; most attributes of a module are of one of them.
_OPAQUE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})


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


def substitute(
    value: Any, replace: Callable[[Any], Any], inside: frozenset[int] = frozenset()
) -> Any:
    """``value`` with every tensor and module in it replaced by what ``replace`` makes of it.

    Bound methods, partial functions, functions (what they close over, defaults of arguments,
    attributes), weak references and containers of those are followed, everything else is kept, and
    so is an object in which nothing was replaced. Otherwise it is a new one of the same type.
    """
    if not may_refer(value) or id(value) in inside:
        return value
    if isinstance(value, (torch.Tensor, nn.Module)):
        return replace(value)
    old, rebuild = _opened(value)
    new = [substitute(part, replace, inside | {id(value)}) for part in old]
    return value if all(a is b for a, b in zip(new, old, strict=True)) else rebuild(new)


def with_counterparts(value: Any, counterparts: Counterparts) -> Any:
    """``value`` with every original in it replaced by its counterpart, see :func:`substitute`."""
    return substitute(value, lambda part: counterparts.get(id(part), part))


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
