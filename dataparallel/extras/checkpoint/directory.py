"""One directory of checkpoints: its generations and their files.

A generation is a folder with a safetensors file of each process, and a manifest. Each file is
written beside under a name that begins with a dot, synchronized with the disk, and renamed. The
manifest has the hashes of all files and of its own content, and is written last. A folder without
one does not count, and the next writer removes it. A generation is removed manifest first. So
whoever is killed, or loses power, leaves generations that are whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import safetensors.torch
from torch import Tensor

#: The type of the place of a checkpoint.
Path: TypeAlias = str | os.PathLike[str]

MANIFEST = "manifest.json"
#: The format of the manifest; 2 had several files of a process.
FORMAT = 3

_FOLDER = re.compile(r"generation-([0-9]{8,15})")


class CheckpointError(RuntimeError):
    """A checkpoint was not saved, or cannot be loaded; the message says why."""


class NoCheckpoint(CheckpointError):
    """Nothing was saved in the directory yet."""


def folder_of(directory: Path, number: int) -> pathlib.Path:
    """Return the folder of a generation."""
    return pathlib.Path(directory, f"generation-{number:08d}")


def file_of(directory: Path, number: int, rank: int) -> pathlib.Path:
    """Return the file with the tensors of a process."""
    return folder_of(directory, number) / f"rank-{rank:05d}.safetensors"


def numbers(directory: Path, *, finished: bool = False) -> list[int]:
    """Return the numbers of generations with a folder, or with a manifest, in rising order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)))
    return [n for n in found if not finished or (folder_of(directory, n) / MANIFEST).exists()]


# --- reading -------------------------------------------------------------------------------------


def read_manifest(directory: Path, number: int) -> dict[str, Any]:
    """Return the manifest of a generation; a CheckpointError says how it is damaged."""
    try:
        whole = json.loads((folder_of(directory, number) / MANIFEST).read_bytes())
        manifest: dict[str, Any] = whole["content"]
        if manifest["format"] != FORMAT:
            raise CheckpointError("another version saved it, in another format; load it with that")
        sha256 = hashlib.sha256(_text(manifest)).hexdigest()
        if sha256 != whole["sha256"] or manifest["number"] != number:
            raise CheckpointError(f"{MANIFEST} is damaged: its hash or its number is another one")
        return {**manifest, "sha256": sha256}
    except FileNotFoundError:
        raise CheckpointError("it was never finished, or its manifest is gone") from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error!r:.200}") from error


def check_size(path: pathlib.Path, file: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if a file is not there, or is not as long as it was."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from error
    if size != file["bytes"]:
        raise CheckpointError(f"{path.name} has {size:,} bytes, not {file['bytes']:,}")


@contextlib.contextmanager
def opened(path: pathlib.Path, file: Mapping[str, Any]) -> Iterator[Any]:
    """Open the tensors of a file that is as it was written; raise a CheckpointError if not."""
    try:
        if _sha256_of(path) != file["sha256"]:
            raise CheckpointError(f"{path.name} is damaged: its hash is another one")
        with safetensors.safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path.name}: {error!r:.200}") from error


def _sha256_of(path: pathlib.Path) -> str:
    found, piece = hashlib.sha256(), memoryview(bytearray(1 << 18))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            found.update(piece[:size])
    return found.hexdigest()


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


# --- writing -------------------------------------------------------------------------------------


def write_tensors(path: pathlib.Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write contiguous tensors of the host to a file, and return what the manifest says of it."""
    path.parent.mkdir(exist_ok=True)
    found: dict[str, Any] = {}

    def write(beside: pathlib.Path) -> None:
        safetensors.torch.save_file(dict(tensors), beside)
        found.update(bytes=beside.stat().st_size, sha256=_sha256_of(beside))

    _put(path, write)
    return found


def commit(directory: Path, number: int, manifest: Mapping[str, Any]) -> None:
    """Finish a generation: from now on readers see it, also after a power failure."""
    text = _text({"format": FORMAT, "number": number, "written": time.time(), **manifest})
    sha256, folder = hashlib.sha256(text).hexdigest().encode(), folder_of(directory, number)
    for rank, file in enumerate(manifest["files"]):
        # If the processes write to different disks, it is not there.
        check_size(file_of(directory, number, rank), file)
    _put(
        folder / MANIFEST,
        lambda beside: beside.write_bytes(b'{"sha256":"%s","content":%s}\n' % (sha256, text)),
    )
    for path in (folder, *folder.parents[:2]):
        # Some file systems cannot; a directory that one may only write to cannot be opened.
        with contextlib.suppress(OSError):
            _synchronize(path)


def _put(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Write a file that is there whole or not at all, also after a power failure."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        _synchronize(beside)
        os.replace(beside, path)
    except BaseException:
        # The first error tells more than one of the removal.
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _synchronize(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> int:
    """Remove generations that nobody finished, and return the number of the next one.

    The caller holds the lock of the directory, so nobody else writes one that counts.
    """
    found, finished = numbers(directory), numbers(directory, finished=True)
    for number in {*found} - {*finished}:
        shutil.rmtree(folder_of(directory, number), ignore_errors=True)
    # No number twice: a process that is late may still write a file.
    return max(found, default=-1) + 1


def prune(directory: Path, keep: int) -> None:
    """Remove old generations, as far as that is possible."""
    oldest = numbers(directory, finished=True)[-keep:][0]
    for number in numbers(directory):
        if number < oldest:
            # First what makes it a generation, so that nobody begins to read it.
            with contextlib.suppress(OSError):
                os.unlink(folder_of(directory, number) / MANIFEST)
            shutil.rmtree(folder_of(directory, number), ignore_errors=True)
