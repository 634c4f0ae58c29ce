"""A wrapper's ``forward`` that tells which arguments the module takes."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dataparallel.threads.compile import untraced

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def with_signature_of_module(function: FunctionT) -> FunctionT:
    """Give ``forward`` of a wrapper the signature of ``wrapper.module.forward``.

    Trainers read it to find out which columns of a data set a module takes. It is right after
    another module took the place of the first, too.

    Example::

        @with_signature_of_module
        def forward(self, *inputs, **kwargs): ...

    Args:
        function: The method. It remains what the class has under its name.
    """
    return cast("FunctionT", _Forward(cast("types.FunctionType", function)))


class _Forward:
    """What the class has in place of the function; a descriptor, as functions are."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        # Copies of the function, by the function whose signature they have, and whether it is that
        # of a method, which is shown without its first argument, or one that a module holds itself.
        self._copies: weakref.WeakKeyDictionary[Any, dict[bool, types.FunctionType]] = (
            weakref.WeakKeyDictionary()
        )

    @untraced
    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self._function
        forward = wrapper.module.forward
        of_method = isinstance(forward, types.MethodType)
        try:
            copies = self._copies.setdefault(forward.__func__ if of_method else forward, {})
            if of_method not in copies:
                copies[of_method] = _with_signature(self._function, inspect.signature(forward))
            return types.MethodType(copies[of_method], wrapper)
        except (TypeError, ValueError):
            # It is no Python function, and has no signature or cannot be a key.
            return types.MethodType(self._function, wrapper)


def _with_signature(
    function: types.FunctionType, signature: inspect.Signature
) -> types.FunctionType:
    """A copy of a method's function that shows a signature once it is bound."""
    # A copy, and nothing around it: the compiler and other tools look into the function.
    code, name = function.__code__, function.__name__
    made = types.FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(made, function, [*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"])
    # Of a bound method the first one is not shown.
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown = signature.replace(parameters=[first, *signature.parameters.values()])
    made.__dict__["__signature__"] = shown
    del made.__dict__["__wrapped__"]
    return made
