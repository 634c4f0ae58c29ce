"""Late imports of optional packages, with an error that says what to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
        if (error.name or "").split(".")[0] == "dataparallel":
            raise
        raise ImportError(
            f"this command needs the package {error.name!r}, which is not installed; "
            f'install it with: pip install "dataparallel[{extra}]"',
            name=error.name,
        ) from error
