"""One directory of checkpoints: its generations, and the lock of the process that writes there.

Note [A generation counts or it does not]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A generation is a folder of safetensors files and a manifest. Each file is written beside under a
name that begins with a dot, synchronized with the disk, and renamed. The manifest has the hashes of
all files and of its own content, and is written last; a folder without one does not count, and the
next writer removes it. A generation is removed manifest first. So whoever is killed, or loses
power, leaves generations that are whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

MANIFEST = "manifest.json"
#: Of the manifest; 1 had tensors' meaning in the files.
FORMAT = 2
UNFINISHED = "it was never finished, or its manifest is gone"

_FOLDER = re.compile(r"generation-([0-9]{8,15})")
_FILE = re.compile(r"(shared|rank-[0-9]{5,9})-[0-9]{5,9}\.safetensors")
# Of a file, in bytes; what is in memory twice, and after how much progress is told.
_FILE_BYTES = 64 << 20
_LOCK_SECONDS = 2.0


class CheckpointError(RuntimeError):
    """A checkpoint was not saved, or cannot be loaded; the message says why."""


class NoCheckpoint(CheckpointError):
    """Nothing was saved in the directory yet."""


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


@dataclass(frozen=True)
class File:
    """One file of a generation, in its manifest.

    Attributes:
        name: In the folder of the generation.
        rank: Of the process whose own tensors it has; None for what is the same in all.
        bytes, sha256: Its size and its hash.
        tensors: The names of its tensors.
    """

    name: str
    rank: int | None
    bytes: int
    sha256: str
    tensors: list[str]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "checkpoints need the packages safetensors and filelock: "
            "pip install 'dataparallel[checkpoint]'"
        ) from error
    return safetensors.torch


@contextlib.contextmanager
def explained(what: str, directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = {
            errno.ENOSPC: "; make room, or keep fewer generations",
            errno.EDQUOT: "; make room, or keep fewer generations",
            errno.EFBIG: "; a limit on the size of files is set (ulimit -f)",
            errno.EROFS: "; save to a directory that is not read-only",
            errno.EACCES: "; let this user read and write the directory",
        }.get(error.errno or 0, "")
        raise CheckpointError(
            f"{what} failed in {os.fspath(directory)}: {error.strerror or error}{remedy}; earlier "
            "generations are as they were, and the next save starts anew"
        ) from error


# --- generations ---------------------------------------------------------------------------------


def folder_of(directory: str | os.PathLike[str], number: int) -> pathlib.Path:
    """Where a generation is."""
    return pathlib.Path(directory, f"generation-{number:08d}")


def numbers(directory: str | os.PathLike[str]) -> list[int]:
    """The numbers of all generations that have a folder, finished or not, rising."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [int(match[1]) for name in names if (match := _FOLDER.fullmatch(name))]
    return sorted(number for number in found if folder_of(directory, number).name in names)


def generations(directory: str | os.PathLike[str]) -> list[GenerationInfo]:
    """List the generations in a directory; only ``load`` verifies their hashes.

    Example::

        for info in generations("checkpoints"):
            print(info.number, info.bytes, info.reason or "complete")

    Args:
        directory: The directory of the checkpoints. If it does not exist, the list is empty.

    Returns:
        One entry per generation that was begun, the oldest first.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    with explained("looking for generations", directory):
        return [_look(directory, number) for number in numbers(directory)]


def _look(directory: str | os.PathLike[str], number: int) -> GenerationInfo:
    size = 0
    try:
        manifest = read_manifest(directory, number)
        for file in manifest["files"]:
            size += file.bytes
            check_size(directory, number, file)
    except CheckpointError as error:
        return GenerationInfo(number, False, size, None, str(error))
    return GenerationInfo(number, True, size, manifest["written"], None)


def read_manifest(directory: str | os.PathLike[str], number: int) -> dict[str, Any]:
    """The manifest of a generation, with its ``"files"``; "sha256" is that of its content.

    Raises:
        CheckpointError: It is damaged, or not there.
    """
    try:
        whole = json.loads((folder_of(directory, number) / MANIFEST).read_bytes())
        manifest: dict[str, Any] = whole["content"]
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"it has the format {manifest.get('format')!r:.40}, but this version reads "
                f"{FORMAT}; load it with the version that saved it"
            )
        sha256 = hashlib.sha256(_text(manifest)).hexdigest()
        if sha256 != whole["sha256"] or manifest["number"] != number:
            raise CheckpointError(f"{MANIFEST} is damaged: its hash or its number is another one")
        files = [File(**entry) for entry in manifest["files"]]
        if not all(_FILE.fullmatch(file.name) for file in files):
            raise CheckpointError(f"{MANIFEST} names files that no checkpoint has")
        return {**manifest, "files": files, "sha256": sha256}
    except FileNotFoundError:
        raise CheckpointError(UNFINISHED) from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error!r:.200}") from error


def check_size(directory: str | os.PathLike[str], number: int, file: File) -> None:
    """Raise a CheckpointError if a file is not there, or is not as long as it was."""
    try:
        size = os.stat(folder_of(directory, number) / file.name).st_size
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror}") from error
    if size != file.bytes:
        raise CheckpointError(f"{file.name} has {size:,} bytes, not {file.bytes:,}")


def read_tensors(
    directory: str | os.PathLike[str], number: int, file: File, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Tensors of a file whose hash is right; the file is read once.

    Raises:
        CheckpointError: It is not as it was written.
    """
    # A huge one is not read to find out that it is none.
    check_size(directory, number, file)
    try:
        data = (folder_of(directory, number) / file.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise CheckpointError(f"{file.name} is damaged: its hash is another one")
        found: dict[str, Tensor] = _safetensors().load(data)
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror}") from error
    except (MemoryError, ValueError, LookupError) as error:
        raise CheckpointError(f"{file.name}: {error!r:.200}") from error
    return {name: found[name] for name in wanted if name in found}


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file that is there whole or not at all.

    Raises:
        CheckpointError: It cannot be written.
    """
    # The format has no tensors that share memory.
    data = _safetensors().save({name: tensor.clone() for name, tensor in tensors.items()})
    with explained("writing the weights", path):
        _put(pathlib.Path(path), data)


# --- writing -------------------------------------------------------------------------------------


class Writer:
    """Writes one generation, together with the other processes; rank 0 commits it.

    Args:
        directory: Of the checkpoints.
        number: Of the generation.
        rank: Of this process.
    """

    def __init__(self, directory: str, number: int, rank: int) -> None:
        self._directory, self._number, self._rank = directory, number, rank
        self._folder = folder_of(directory, number)
        with explained(f"beginning generation {number}", directory):
            os.makedirs(self._folder, exist_ok=True)

    def write(
        self, tensors: Mapping[str, Tensor], *, shared: bool, progress: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """Write tensors into files, and return what the manifest says of these.

        Args:
            tensors: On the host, contiguous.
            shared: Whether they are the same in all processes.
            progress: Called with the number of bytes after each file.
        """
        files = []
        prefix = "shared" if shared else f"rank-{self._rank:05d}"
        for index, names in enumerate(_divided(tensors)):
            name = f"{prefix}-{index:05d}.safetensors"
            part = {each: tensors[each] for each in names}
            data = _safetensors().save(part)
            with explained(f"writing {name} of generation {self._number}", self._directory):
                _put(self._folder / name, data)
            sha256 = hashlib.sha256(data).hexdigest()
            rank = None if shared else self._rank
            files.append(asdict(File(name, rank, len(data), sha256, names)))
            progress(sum(tensor.nbytes for tensor in part.values()))
        return files

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Finish the generation: from now on readers see it, also after a power failure."""
        content = {"format": FORMAT, "number": self._number, "written": time.time(), **manifest}
        text = _text(content)
        sha256 = hashlib.sha256(text).hexdigest().encode()
        with explained(f"committing generation {self._number}", self._directory):
            for file in content["files"]:
                try:
                    check_size(self._directory, self._number, File(**file))
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{error}; all processes must write to the same directory, on a file "
                        "system that they share, and no other job may"
                    ) from None
            _put(self._folder / MANIFEST, b'{"sha256":"%s","content":%s}\n' % (sha256, text))
            for path in (self._folder, *self._folder.parents[:2]):
                _sync_folder(path)

    def discard(self) -> None:
        """Remove what was written; a generation that was committed stays."""
        if not (self._folder / MANIFEST).exists():
            shutil.rmtree(self._folder, ignore_errors=True)


def _divided(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the tensors of each file."""
    files: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > room:
            files.append([])
            room = _FILE_BYTES
        files[-1].append(name)
        room -= tensor.nbytes
    return files


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _put(path: pathlib.Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        # What the removal says is of less use than what went wrong before.
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _sync_folder(path: pathlib.Path) -> None:
    # Some file systems cannot; a directory that one may only write to cannot be opened.
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sweep(directory: str) -> int:
    """Remove generations that nobody finished, and return the number of the next one.

    The caller holds the lock of the directory, so nobody else writes one that counts.
    """
    with explained("looking for generations", directory):
        found = numbers(directory)
    for number in found:
        folder = folder_of(directory, number)
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return max(found, default=-1) + 1


def prune(directory: str, keep: int, damaged: Collection[int]) -> None:
    """Remove old generations; those that are known to be damaged do not count as kept."""
    complete = [info.number for info in generations(directory) if info.complete]
    good = [number for number in complete if number not in damaged]
    oldest = good[-keep:][0] if good else 0
    for number in numbers(directory):
        if number < oldest:
            # First what makes it a generation, so that nobody begins to read it.
            gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
            with explained("removing old generations", directory), gone:
                (folder_of(directory, number) / MANIFEST).unlink()
            shutil.rmtree(folder_of(directory, number), ignore_errors=True)


class WriterLock:
    """Keeps other processes from writing to a directory, on file systems that have locks.

    Raises:
        CheckpointError: Another process holds it.
    """

    def __init__(self, directory: str) -> None:
        try:
            import filelock
        except ImportError as error:
            raise ImportError(
                "checkpoints need the packages safetensors and filelock: "
                "pip install 'dataparallel[checkpoint]'"
            ) from error
        self._path = pathlib.Path(directory, "writer.lock")
        holder = self._path.with_name("writer.json")
        with explained("taking the lock", directory):
            os.makedirs(directory, exist_ok=True)
            self._lock = filelock.FileLock(self._path, thread_local=False)
            try:
                # A moment: the process that this one has taken the place of may be about to end.
                self._lock.acquire(timeout=_LOCK_SECONDS)
            except filelock.Timeout:
                raise CheckpointError(_held(directory, holder)) from None
            self._inode = self._path.stat().st_ino
            holder.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))

    @property
    def holds(self) -> bool:
        """Whether nobody else can write to the directory: somebody may have removed the lock."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def release(self) -> None:
        """Let others write to the directory."""
        self._lock.release()


def _held(directory: str, holder: pathlib.Path) -> str:
    try:
        who = json.loads(holder.read_bytes())
        text = f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, LookupError, TypeError):
        text = "another process"
    return (
        f"{text} saves to {directory} and holds its lock; save to another directory, or wait until "
        "it has ended or called close()"
    )
