"""The parts of error messages: lists, suggestions, and the place where something happened."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# --- lists ----------------------------------------------------------------------------------------

#: The most entries that a message shows. A model may have thousands of tensors, and nobody sees the
#: beginning of a message that names all of them.
MOST = 3


def listed(entries: Iterable[str], separator: str = ", ") -> str:
    """Return a list for a message, which stays short: "a, b, c and 2 more"."""
    texts = list(entries)
    more = len(texts) - MOST
    joint = " " if separator == ", " else separator
    return separator.join(texts[:MOST]) + (f"{joint}and {more} more" if more > 0 else "")


def describe_names(names: Iterable[str]) -> str:
    """Names of parameters for a message, as a list; all of them at the debug level ``DETAIL``."""
    texts = list(names)
    if len(texts) <= MOST:
        return listed(texts)
    # Readings of devices and the command line need messages, and no torch.
    import torch.distributed as dist

    if dist.is_available() and dist.distributed_c10d.get_debug_level().name == "DETAIL":
        return ", ".join(texts)
    return f"{listed(texts)} (TORCH_DISTRIBUTED_DEBUG=DETAIL names all)"


def lines(entries: Iterable[str]) -> str:
    """Return a list for a message, each entry on a line of its own; begins with a new line."""
    separator = "\n  "
    return separator + listed(entries, separator)


# --- what was meant -------------------------------------------------------------------------------


def chosen(option: str, value: object, allowed: tuple[T, ...], other: str = "") -> T:
    """Return the allowed value that an option has; else a ValueError names all, and the nearest.

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


def locate(error: BaseException, label: str) -> None:
    """Add to an exception where it happened: to its message, or as a note below the traceback.

    The exception stays the same object: type, attributes and traceback are kept.
    """
    text = str(error)
    if error.args == (text,) and text:
        error.args = (text if label in text else f"{text}\n{label}",)
    elif label not in getattr(error, "__notes__", ()):
        # Its type makes the text from something other than its message.
        add_note(error, label)


def add_note(error: BaseException, note: str) -> None:
    """Add a line that is shown below the traceback of an exception."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        # Python 3.10 shows no notes, but keeps them for whoever looks.
        vars(error).setdefault("__notes__", []).append(note)


# --- optional packages ---------------------------------------------------------------------------


def install_command(extra: str) -> str:
    """Return the command that adds an optional dependency group to this installation.

    It names the clone or the wheel that the package was installed from, and never an index, where
    another package may have the same name.
    """
    import json
    from importlib import metadata
    from urllib import parse

    try:
        text = metadata.distribution("dataparallel").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text or "{}")
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f'pip install -e "{parse.unquote(parse.urlparse(url).path)}[{extra}]"'
    if url:
        return f'pip install "dataparallel[{extra}] @ {url}"'
    return f'pip install ".[{extra}]" in a clone of dataparallel'


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Within the ``with`` block a missing package is explained by the extra that brings it.

    Example::

        with needs_extra("tools"):
            from rich.table import Table

    Args:
        extra: Name of an optional dependency group of this package.

    Raises:
        ImportError: A package is missing; the message holds the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "dataparallel":
            raise
        raise ImportError(
            f"this needs the package {package!r}, which is not installed; "
            f"install it with: {install_command(extra)}",
            name=error.name,
        ) from error
