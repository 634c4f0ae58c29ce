"""What was meant where the name or the value of an option is misspelled."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

CalledT = TypeVar("CalledT", bound=Callable[..., Any])
T = TypeVar("T")


def suggesting(called: CalledT) -> CalledT:
    """Let the TypeError of a misspelled keyword name the parameter that is nearest.

    From 3.13 on Python does so for functions in Python; it is not said twice.

    Example::

        @suggesting
        def save(directory, *, step, keep=3): ...

        save("run", step=1, kep=5)   # ... unexpected keyword argument 'kep'. Did you mean 'keep'?

    Args:
        called: A function without ``**kwargs``, or a class with such an ``__init__``. Signature
            and types remain.
    """
    if isinstance(called, type):
        type.__setattr__(called, "__init__", suggesting(vars(called)["__init__"]))
        return called

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return called(*args, **kwargs)
        except TypeError as error:
            _suggest(error, kwargs, list(inspect.signature(called).parameters))
            raise

    return cast("CalledT", call)


def _suggest(error: TypeError, given: Iterable[str], known: list[str]) -> None:
    text = str(error)
    wrong = [name for name in given if name not in known and f"'{name}'" in text]
    near = difflib.get_close_matches(wrong[0], known, 1) if wrong else []
    if near and "Did you mean" not in text:
        error.args = (f"{text}. Did you mean '{near[0]}'?",)


def chosen(option: str, value: object, allowed: tuple[T, ...], other: str = "") -> T:
    """The one of the allowed values that an option has.

    Args:
        option: What messages call it.
        value: What was given.
        allowed: The values, strings as a rule.
        other: What else the option may be, for the message.

    Raises:
        ValueError: It is none of them; names all, and the nearest.
    """
    for known in allowed:
        if value == known:
            return known
    *first, last = [*map(repr, allowed), *([other] if other else [])]
    near = difflib.get_close_matches(value, map(str, allowed), 1) if isinstance(value, str) else []
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{option} must be {', '.join(first)} or {last}, but got {value!r}{hint}")
