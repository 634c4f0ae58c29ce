"""The folders of generations in a directory: what there is, and what can go."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass

from dataparallel.extras.checkpoint import manifest
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.files import Folder, explained
from dataparallel.extras.checkpoint.generation_record import GenerationRecord
from dataparallel.extras.checkpoint.manifest import MANIFEST, Manifest

_FOLDER = re.compile(r"generation-([0-9]{8,15})")
_END = 10**15
UNFINISHED = "it was never finished, or its manifest is gone"
# What opening says of something that is not a directory itself.
_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class GenerationInfo:
    """What the folder of a generation shows without a look into its files.

    Attributes:
        number: The number of the generation.
        complete: Whether it is finished, and all of its files have their full size.
        bytes: The size of its files together.
        when: When it was finished, in seconds since 1970; None if that is not known.
        reason: Why it is not complete; None if it is.
    """

    number: int
    complete: bool
    bytes: int
    when: float | None
    reason: str | None


def folder_name(number: int) -> str:
    """The name of the folder of a generation. Raises ValueError for what is no number of one."""
    if type(number) is not int or not 0 <= number < _END:
        raise ValueError(f"the number of a generation is a whole one from 0 on, not {number!r}")
    return f"generation-{number:08d}"


def numbers(directory: str | os.PathLike[str]) -> list[int]:
    """The numbers of all generations that have a folder, finished or not, rising.

    Args:
        directory: Of the checkpoints; one that is not there has none.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [int(match[1]) for name in names if (match := _FOLDER.fullmatch(name))]
    return sorted(number for number in found if folder_name(number) in names)


def next_number(directory: str | os.PathLike[str]) -> int:
    """A number above those of all generations that were begun here.

    Args:
        directory: Of the checkpoints, which need not be there.

    Returns:
        The number; 0 for the first one.

    Raises:
        CheckpointError: The directory cannot be read, or the last number there is has been used.
    """
    with explained("looking for generations", os.fspath(directory)):
        number = max(numbers(directory), default=-1) + 1
    if number == _END:
        raise CheckpointError(
            f"{folder_name(number - 1)} in {os.fspath(directory)} has the highest number that "
            "there is, so no generation can come after it; move it out of the directory"
        )
    return number


def generations(directory: str | os.PathLike[str]) -> list[GenerationInfo]:
    """List the generations in a directory; only ``load`` verifies their hashes.

    Example::

        for info in generations("checkpoints"):
            print(info.number, info.bytes, info.reason or "complete")

    Args:
        directory: The directory of the checkpoints. If it does not exist, the list is empty.

    Returns:
        The generations, by rising number.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    with explained("looking for generations", os.fspath(directory)):
        return [_look(os.fspath(directory), number) for number in numbers(directory)]


def prune(
    directory: str | os.PathLike[str], keep: int, record: GenerationRecord | None = None
) -> list[int]:
    """Remove old generations.

    Only complete ones count as kept, without those that the record says were rejected; what is
    newer than the oldest of them stays, good or not.

    Args:
        directory: Of the checkpoints.
        keep: How many complete generations stay, at least 1.
        record: What is known of them. The one that was loaded stays until ``keep`` newer ones were
            written. Default: nothing is known.

    Returns:
        The numbers of those that were removed.

    Raises:
        ValueError: ``keep`` is below 1.
        CheckpointError: Something could not be removed; the others were.
    """
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep is how many generations stay, at least 1, not {keep!r}")
    path = os.fspath(directory)
    infos = generations(path)
    record = record or GenerationRecord()
    complete = [i.number for i in infos if i.complete and i.number not in record.rejected]
    if len(complete) <= keep:
        return []
    oldest = complete[-keep]
    removed: list[int] = []
    failed: OSError | None = None
    for info in infos:
        if info.number >= oldest or info.reason == UNFINISHED or record.spares(info.number, keep):
            continue
        try:
            _remove(os.path.join(path, folder_name(info.number)))
        except OSError as error:
            # A link, say, that somebody has put there is not ours to remove.
            failed = failed if error.errno in _NO_FOLDER else error
        else:
            removed.append(info.number)
    record.keep_only(complete[-keep:])
    if failed is not None:
        with explained("removing old generations", path):
            raise failed
    return removed


def sweep(directory: str, below: int) -> None:
    """Remove the generations that nobody finished.

    The caller holds the lock of the directory, so nobody else writes to one that counts.

    Args:
        directory: Of the checkpoints.
        below: Numbers from this one on stay: the caller's own.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    with explained("looking for generations", directory):
        found = [number for number in numbers(directory) if number < below]
    for number in found:
        # Somebody may not let us; then it is not ours to remove.
        path = os.path.join(directory, folder_name(number))
        with contextlib.suppress(OSError), Folder(path, follow=False) as folder:
            remove_unfinished(folder)


def remove_unfinished(folder: Folder) -> None:
    """Remove the folder of a generation, unless it was finished; what resists is left."""
    with contextlib.suppress(OSError):
        if MANIFEST not in folder.names():
            _clear(folder)


def read_manifest(folder: Folder, number: int) -> Manifest:
    """The manifest of a generation.

    Args:
        folder: Of the generation.
        number: Of the generation.

    Returns:
        The manifest, as it was written.

    Raises:
        ValueError: It is damaged, or something else.
        OSError: It is not there, or cannot be read.
    """
    fd, size = folder.open(MANIFEST)
    try:
        if size > manifest.MAX_BYTES:
            raise ValueError(
                f"its manifest has {size:,} bytes, and {manifest.MAX_BYTES:,} are allowed"
            )
        with open(fd, "rb", closefd=False) as file:
            return manifest.decode(file.read(size), number)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with Folder(path, follow=False) as folder:
        # First what makes it a generation, so that nobody begins to read it.
        folder.remove(MANIFEST)
        _clear(folder)


def _clear(folder: Folder) -> None:
    for name in folder.names():
        folder.remove(name)
    os.rmdir(folder.path)


def _look(directory: str, number: int) -> GenerationInfo:
    size = 0
    try:
        with Folder(os.path.join(directory, folder_name(number)), follow=False) as folder:
            try:
                found = read_manifest(folder, number)
            except FileNotFoundError:
                return GenerationInfo(number, False, 0, None, UNFINISHED)
            for entry in found.files:
                bytes_ = folder.size(entry.file)
                size += bytes_
                if bytes_ != entry.bytes:
                    raise ValueError(f"{entry.file} has {bytes_:,} bytes, not {entry.bytes:,}")
    except (OSError, ValueError, CheckpointError) as error:
        return GenerationInfo(number, False, size, None, reason_of(error))
    return GenerationInfo(number, True, size, found.written, None)


def reason_of(error: Exception) -> str:
    """What an error says, without the number and the path of an error of the system."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return f"{os.path.basename(name)}{error.strerror}"
    return str(error)
