"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file beside its place, and put it there when the ``with`` block ends.

    What was there before stays where the block raises.

    Example::

        with written_whole(Path("out.json")) as unfinished:
            unfinished.write_text("{}")

    Args:
        path: Where the file is to be.

    Returns:
        Where to write it; the name ends differently.

    Raises:
        OSError: It cannot be put there.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
