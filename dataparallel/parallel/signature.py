"""A wrapper's ``forward`` that tells which arguments the module takes."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from torch import nn

from dataparallel.threads.compile import untraced

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _Wrapper(Protocol):
    module: nn.Module


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
        # Copies of the function, by the function whose signature they have: that of a method,
        # which is shown without its first argument, or one that a module holds itself.
        self._of_methods: _Copies = weakref.WeakKeyDictionary()
        self._of_functions: _Copies = weakref.WeakKeyDictionary()

    @untraced
    def __get__(self, wrapper: _Wrapper | None, owner: type | None = None) -> Any:
        if wrapper is None:
            return self._function
        return types.MethodType(self._like(wrapper.module.forward), wrapper)

    def _like(self, forward: Callable[..., Any]) -> types.FunctionType:
        of_method = isinstance(forward, types.MethodType)
        copies = self._of_methods if of_method else self._of_functions
        source = forward.__func__ if isinstance(forward, types.MethodType) else forward
        try:
            found = copies.get(source)
            if found is None:
                found = copies[source] = _with_signature(self._function, inspect.signature(forward))
        except (TypeError, ValueError):
            # It is no Python function, and has no signature or cannot be a key.
            return self._function
        return found


_Copies = weakref.WeakKeyDictionary[Callable[..., Any], types.FunctionType]


def _with_signature(
    function: types.FunctionType, signature: inspect.Signature
) -> types.FunctionType:
    """A copy of a method's function that shows a signature once it is bound."""
    # A copy, and nothing around it: the compiler and other tools look into the function.
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__doc__ = function.__doc__
    made.__dict__.update(function.__dict__)
    # Of a bound method the first one is not shown.
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    made.__dict__["__signature__"] = signature.replace(
        parameters=[first, *signature.parameters.values()]
    )
    return made
