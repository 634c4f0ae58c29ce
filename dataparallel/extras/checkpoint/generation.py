"""Read a generation: the one that is asked for, or the last one that is good."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dataparallel.extras.checkpoint import generation_folders, tensor_file
from dataparallel.extras.checkpoint.errors import CheckpointError, NoCheckpoint
from dataparallel.extras.checkpoint.files import Folder, explained
from dataparallel.extras.checkpoint.generation_folders import UNFINISHED, folder_name, reason_of
from dataparallel.extras.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from dataparallel.extras.checkpoint.safetensors_header import Header

_log = logging.getLogger("dataparallel")

# Readers at once: a disk is no faster for more.
_MAX_READERS = 8
# A writer that removes generations sooner than they are read so often is none to wait for.
_MAX_LISTINGS = 10


class Generation:
    """A generation that was found as it was written. See Note [What is checked is what is used].

    Made by :func:`read_generation`. It keeps the folder open until it is closed or collected.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.number = manifest.number
        self.written = manifest.written
        self.document: Any = manifest.document
        self.rejected: list[tuple[int, str]] = []
        self._folder = folder
        self._entries = {entry.name: entry for entry in manifest.files}
        self._headers: dict[str, Header] = {}
        self._close = weakref.finalize(self, folder.close)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def files(self) -> list[str]:
        """The names of its files, as they were given to the writer and in that order."""
        return list(self._entries)

    def tensors(self, name: str, wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a file.

        The file is read and hashed again, into the memory of the tensors.

        Args:
            name: One of :attr:`files`.
            wanted: Names of tensors; the others take no memory. Default: all.

        Returns:
            The tensors by name, on the host, each in memory of its own.

        Raises:
            CheckpointError: There is no such file, or it has changed since it was checked.
        """
        tensors, self._headers[name] = self._read(name, wanted)
        return tensors

    def names(self, name: str) -> list[str]:
        """The names of the tensors of a file.

        Args:
            name: One of :attr:`files`.

        Raises:
            CheckpointError: There is no such file, or it is not as it was written.
        """
        return [place.name for place in self._header(name).places]

    def metadata(self, name: str) -> Any:
        """What was noted with a file.

        Args:
            name: One of :attr:`files`.

        Returns:
            The metadata that the writer was given.

        Raises:
            CheckpointError: There is no such file, or it is not as it was written.
        """
        return self._header(name).metadata

    def close(self) -> None:
        """Let go of the folder; again does nothing."""
        self._close()

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare files with their hashes; they are read through, several at once.

        Args:
            names: Of the files. Default: all.

        Raises:
            CheckpointError: One is not as it was written; the message says what is wrong.
        """
        wanted = self.files if names is None else list(names)
        readers = min(len(wanted), _MAX_READERS, os.cpu_count() or 1)
        if readers < 2:
            for name in wanted:
                self._header(name)
            return
        with ThreadPoolExecutor(readers, "dataparallel-verify") as pool:
            for _ in pool.map(self._header, wanted):
                pass

    def _header(self, name: str) -> Header:
        if name not in self._headers:
            _, self._headers[name] = self._read(name, ())
        return self._headers[name]

    def _read(
        self, name: str, wanted: Collection[str] | None
    ) -> tuple[dict[str, torch.Tensor], Header]:
        if name not in self._entries:
            raise CheckpointError(
                f"generation {self.number} has no file {name!r}; it has {', '.join(self._entries)}"
            )
        if not self._close.alive:
            raise CheckpointError(f"generation {self.number} is closed; read it again")
        entry = self._entries[name]
        try:
            return self._read_file(entry, wanted)
        except (OSError, ValueError, MemoryError) as error:
            text = f"{entry.file}: {reason_of(error) or type(error).__name__}"
            raise CheckpointError(text) from error

    def _read_file(
        self, entry: FileEntry, wanted: Collection[str] | None
    ) -> tuple[dict[str, torch.Tensor], Header]:
        if entry.bytes > (memory := _memory_of_machine()):
            raise ValueError(f"it has {entry.bytes:,} bytes, and the machine {memory:,} of memory")
        fd, _ = self._folder.open(entry.file)
        try:
            return tensor_file.read(fd, entry.bytes, entry.sha256, wanted)
        finally:
            os.close(fd)


def read_generation(
    directory: str | os.PathLike[str],
    number: int | None = None,
    *,
    at_most: int | None = None,
    verify: Collection[str] | None = None,
    accept: Callable[[Generation], object] | None = None,
) -> Generation:
    """Open a generation of which every byte is as it was written.

    Another process may save and remove generations meanwhile: as long as the directory changes it
    is looked at again.

    Example::

        generation = read_generation("checkpoints")
        model.load_state_dict(generation.tensors("model"))
        print(generation.number, generation.rejected)

    Args:
        directory: Of the checkpoints.
        number: Of the generation. Default: the last one that is good; why newer ones are not is in
            its ``rejected``, and in a warning of the log.
        at_most: A number above which generations are left out. Default: None is.
        verify: Names of the files that are compared with their hashes now; those of them that the
            generation does not have are left out. Others are when they are read. Default: all.
        accept: Called with a generation whose hashes are right; if it raises a CheckpointError,
            that is the reason for which the generation is not good. Default: nothing is called.

    Returns:
        The generation.

    Raises:
        NoCheckpoint: Nothing was ever saved in the directory.
        CheckpointError: The generation with this number is not good, or none is; the message says
            why.
    """
    path = os.path.abspath(os.fspath(directory))

    def open_it(candidate: int) -> Generation:
        return _open(path, candidate, verify, accept)

    if number is not None:
        return _read_one(path, number, open_it)
    return _read_newest(path, at_most, open_it)


def _read_newest(
    path: str, at_most: int | None, open_it: Callable[[int], Generation]
) -> Generation:
    found = _listed(path, at_most)
    for _ in range(_MAX_LISTINGS):
        rejected: list[tuple[int, str]] = []
        for candidate in reversed(found):
            try:
                generation = open_it(candidate)
            except CheckpointError as error:
                rejected.append((candidate, str(error)))
            else:
                generation.rejected = rejected
                _tell(path, candidate, rejected)
                return generation
        # A writer may have removed those that were listed, for newer ones.
        before, found = found, _listed(path, at_most)
        if found == before:
            raise _none_is_good(path, rejected)
    raise CheckpointError(
        f"generations in {path} were removed sooner than they were read, {_MAX_LISTINGS} times; "
        "save with a larger keep"
    )


def _listed(path: str, at_most: int | None = None) -> dict[int, bool]:
    """The generations of a directory, and whether each is finished as far as its names tell."""
    with explained("looking for generations", path):
        found = generation_folders.numbers(path)
    return {
        number: os.path.lexists(os.path.join(path, folder_name(number), MANIFEST))
        for number in found
        if at_most is None or number <= at_most
    }


def _none_is_good(path: str, rejected: list[tuple[int, str]]) -> CheckpointError:
    if all(reason == UNFINISHED for _, reason in rejected):
        unfinished = f"; {len(rejected)} were begun and never finished" if rejected else ""
        return NoCheckpoint(f"nothing was saved in {path} yet{unfinished}")
    reasons = "".join(f"\n  generation {n}: {reason}" for n, reason in rejected)
    return CheckpointError(f"no generation in {path} is good:{reasons}")


def _read_one(path: str, number: int, open_it: Callable[[int], Generation]) -> Generation:
    folder_name(number)
    found = _listed(path)
    if number not in found:
        there = ", ".join(map(str, found)) or "nothing"
        raise CheckpointError(f"there is no generation {number} in {path}; there is {there}")
    try:
        return open_it(number)
    except CheckpointError as error:
        raise CheckpointError(f"generation {number} in {path} is not good: {error}") from error


def _open(
    path: str,
    number: int,
    verify: Collection[str] | None,
    accept: Callable[[Generation], object] | None,
) -> Generation:
    """Open and verify a generation; the CheckpointError it raises is the reason alone."""
    try:
        folder = Folder(os.path.join(path, folder_name(number)), follow=False)
    except OSError as error:
        raise CheckpointError(f"its folder: {error.strerror}") from error
    try:
        manifest = generation_folders.read_manifest(folder, number)
        generation = Generation(folder, manifest)
        generation.verify(n for n in generation.files if verify is None or n in verify)
        if accept is not None:
            accept(generation)
    except BaseException as error:
        folder.close()
        if isinstance(error, FileNotFoundError):
            raise CheckpointError(UNFINISHED) from None
        if isinstance(error, (OSError, ValueError, MemoryError)):
            raise CheckpointError(reason_of(error) or type(error).__name__) from error
        raise
    return generation


def _tell(path: str, used: int, rejected: list[tuple[int, str]]) -> None:
    for number, reason in rejected:
        if reason == UNFINISHED:
            # What a kill during a save leaves: nothing is wrong.
            _log.info("checkpoint generation %d in %s: %s", number, path, reason)
        else:
            _log.warning(
                "checkpoint generation %d in %s is not used, but %d: %s", number, path, used, reason
            )


def _memory_of_machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
