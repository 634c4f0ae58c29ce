"""The folder of compiled code, and the check of who may have written it.

Note [Trusted code]
~~~~~~~~~~~~~~~~~~~
Code from the cache runs with the rights of this user, so nobody else may be able to put it there.
Trusted are this user, root, and whoever owns this package: all of them can run code here anyway.
The folder of an extension and the file in it must belong to one of them, with no right to write for
others. A folder above that everybody can write to must be sticky, as ``/tmp`` is.

Folders and files of this user that others can write to, as a umask of 002 makes them, are no reason
to stop. The folder is closed, and its content is compiled anew.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    """``$DATAPARALLEL_CACHE_DIR``, else ``dataparallel`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("DATAPARALLEL_CACHE_DIR"):
        return Path(own).expanduser()
    if general := os.environ.get("XDG_CACHE_HOME"):
        return Path(general).expanduser() / "dataparallel"
    return Path.home() / ".cache" / "dataparallel"


@contextlib.contextmanager
def keeping_code(directory: Path) -> Iterator[None]:
    """Within this, an OSError becomes a RuntimeError that says where else code can be kept."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"cannot keep compiled code in {directory}: {error.strerror or error}; set "
            "DATAPARALLEL_CACHE_DIR to a directory of your own, which can be written"
        ) from error


def close_to_others(directory: Path) -> None:
    """Make a folder for compiled code, or see that nobody else can write to the one that is there.

    RuntimeError if it cannot be made, or somebody else can write to it: see Note [Trusted code].
    """
    with keeping_code(directory):
        for folder in reversed((directory, *directory.parents)):
            if not folder.exists():
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o755)
        _check(directory)


def is_trusted(path: Path) -> bool:
    """True if a file of a closed folder was written by whom it may, and by nobody else since.

    False, too, if there is no such file.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISREG(found.st_mode) and _is_trusted(found.st_uid) and not found.st_mode & _WRITABLE
    )


def _is_trusted(user: int) -> bool:
    return user in (os.geteuid(), 0, os.stat(__file__).st_uid)


def _check(directory: Path) -> None:
    # Nobody can put another folder in the place of this one, by its name or behind a link.
    for folder in {*directory.absolute().parents, *directory.resolve().parents}:
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"every user can replace what is in {folder} (close it with: chmod o-w {folder})"
            )
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError("it is no directory of its own (a link?)")
    if not _is_trusted(found.st_uid):
        raise PermissionError(
            f"it belongs to the user with number {found.st_uid}, not to {os.geteuid()}"
        )
    if found.st_mode & _WRITABLE:
        # Not ours: this fails, and says why.
        directory.chmod(stat.S_IMODE(found.st_mode) & ~_WRITABLE)
