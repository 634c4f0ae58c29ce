"""What the messages of errors are made of: lists, suggestions, and where something happened."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch.distributed as dist

CalledT = TypeVar("CalledT", bound=Callable[..., Any])
T = TypeVar("T")

# --- lists ----------------------------------------------------------------------------------------

#: How many entries a message shows. A model may have thousands of tensors, and nobody sees the
#: beginning of a message that names all of them.
MOST = 3


def listed(entries: Iterable[str], separator: str = ", ", *, number: int | None = None) -> str:
    """A list for a message, which stays short: "a, b, c and 2 more".

    ``number`` says how many there are, where ``entries`` are only the first ones.
    """
    texts = list(entries)
    more = (len(texts) if number is None else number) - MOST
    joint = " " if separator == ", " else separator
    return separator.join(texts[:MOST]) + (f"{joint}and {more} more" if more > 0 else "")


def debug_level() -> str:
    """That of ``TORCH_DISTRIBUTED_DEBUG``: ``"OFF"``, ``"INFO"`` or ``"DETAIL"``."""
    return dist.distributed_c10d.get_debug_level().name if dist.is_available() else "OFF"


def describe_names(names: Iterable[str]) -> str:
    """Names of parameters for a message, as a list; all of them at the debug level ``DETAIL``."""
    texts = list(names)
    if len(texts) <= MOST:
        return listed(texts)
    if debug_level() == "DETAIL":
        return ", ".join(texts)
    return f"{listed(texts)} (TORCH_DISTRIBUTED_DEBUG=DETAIL names all)"


def lines(entries: Iterable[str]) -> str:
    """A list for a message, each entry on a line of its own; begins with a new line."""
    texts = list(entries)
    more = len(texts) - MOST
    shown = [*texts[:MOST], *([f"and {more} more"] if more > 0 else [])]
    return "".join(f"\n  {text}" for text in shown)


# --- what was meant -------------------------------------------------------------------------------


def suggesting(called: CalledT) -> CalledT:
    """Let the TypeError of a misspelled keyword name the parameter that is nearest.

    From 3.13 on Python does so for functions in Python; it is not said twice.
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
    """The allowed value that an option has; else a ValueError names all, and the nearest.

    ``other`` is what else the option may be, for the message.
    """
    for known in allowed:
        if value == known:
            return known
    *first, last = [*map(repr, allowed), *([other] if other else [])]
    near = difflib.get_close_matches(value, map(str, allowed), 1) if isinstance(value, str) else []
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{option} must be {', '.join(first)} or {last}, but got {value!r}{hint}")


# --- where it happened ----------------------------------------------------------------------------


class _KeyMessage(str):
    """A string that ``KeyError`` shows as it is, where it would show the ``repr``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def locate(error: BaseException, label: str) -> None:
    """Add to an exception where it happened, so that ``str(error)`` tells.

    The exception stays the same object: type, attributes and traceback are kept. Where its type
    makes the text from something other than its message, the label is a note below the traceback.
    """
    text = str(error)
    if label in text:
        return
    told = None
    if len(error.args) == 1 and isinstance(error.args[0], str):
        told = f"{error.args[0]}\n{label}" if error.args[0] else label
    elif len(error.args) == 1 and isinstance(error, KeyError):
        told = f"{error.args[0]!r}\n{label}"
    elif not error.args and not text:
        told = label
    if told is not None:
        error.args = (_KeyMessage(told) if isinstance(error, KeyError) else told,)
    elif isinstance(error, OSError) and isinstance(error.strerror, str):
        error.strerror = f"{error.strerror} ({label})"
    elif isinstance(error, UnicodeError) and hasattr(error, "reason"):
        error.reason = f"{error.reason} ({label})"
    if label not in str(error):
        add_note(error, label)


def add_note(error: BaseException, note: str) -> None:
    """Add a line that is shown below the traceback of an exception."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        # Python 3.10 shows no notes, but keeps them for whoever looks.
        vars(error).setdefault("__notes__", []).append(note)
