"""Lists in messages: the first three entries, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable

#: How many entries a message shows. A model may have thousands of tensors, and nobody sees the
#: beginning of a message that names all of them.
MOST = 3


def listed(entries: Iterable[str], separator: str = ", ", *, number: int | None = None) -> str:
    """A list for a message, which stays short.

    Example::

        listed(["a", "b"])                    # "a, b"
        listed(["a", "b", "c", "d", "e"])     # "a, b, c and 2 more"

    Args:
        entries: What is listed, in this order.
        separator: What stands between two of them. Default: a comma.
        number: How many there are, where ``entries`` are only the first ones. Default: those.
    """
    texts = list(entries)
    more = (len(texts) if number is None else number) - MOST
    joint = " " if separator == ", " else separator
    return separator.join(texts[:MOST]) + (f"{joint}and {more} more" if more > 0 else "")


def lines(entries: Iterable[str]) -> str:
    """A list for a message, each entry on a line of its own; begins with a new line.

    Args:
        entries: What is listed, in this order.
    """
    texts = list(entries)
    more = len(texts) - MOST
    shown = [*texts[:MOST], *([f"and {more} more"] if more > 0 else [])]
    return "".join(f"\n  {text}" for text in shown)
