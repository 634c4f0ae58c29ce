"""Adds to an exception where it happened."""

from __future__ import annotations


class _KeyMessage(str):
    """A string that ``KeyError`` shows as it is, where it would show the ``repr``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def locate(error: BaseException, label: str) -> None:
    """Add to an exception where it happened, so that ``str(error)`` tells.

    The exception stays the same object: type, attributes and traceback are kept. Where its type
    makes the text from something other than its message, the label is a note below the traceback.

    Args:
        error: The exception, changed in place.
        label: For example ``"in replica 0 on device cpu"``.
    """
    text = str(error)
    if label in text:
        return
    if len(error.args) == 1 and isinstance(error.args[0], str):
        message = f"{error.args[0]}\n{label}" if error.args[0] else label
        error.args = (_KeyMessage(message) if isinstance(error, KeyError) else message,)
    elif len(error.args) == 1 and isinstance(error, KeyError):
        error.args = (_KeyMessage(f"{error.args[0]!r}\n{label}"),)
    elif not error.args and not text:
        error.args = (label,)
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
