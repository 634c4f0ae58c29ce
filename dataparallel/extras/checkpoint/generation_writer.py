"""Write a generation: the files of one checkpoint, finished by its manifest."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dataparallel.extras.checkpoint import generation_folders, manifest, tensor_file
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.files import Folder, explained, make_directory, write_all
from dataparallel.extras.checkpoint.manifest import MANIFEST, FileEntry


class GenerationWriter:
    """Writes one generation of checkpoints, alone or together with other processes.

    Each process writes files under names of its own; one of them commits, with the entries of all.
    Readers see nothing of it before. What is never committed is removed by
    :func:`~dataparallel.extras.checkpoint.generation_folders.sweep`; see Note [Files that are
    whole].

    Example::

        with GenerationWriter("checkpoints", 12) as writer:
            entry = writer.write("model", model.state_dict(), {"step": 1200})
            writer.commit([entry], {"step": 1200})

    Args:
        directory: Of the checkpoints; made if it is not there.
        number: Of the generation, at least 0; see ``next_number``.

    Raises:
        CheckpointError: The generation is there already, or the directory cannot be written.
        ValueError: The number is below 0.
    """

    def __init__(self, directory: str | os.PathLike[str], number: int) -> None:
        self._directory = os.path.abspath(os.fspath(directory))
        self._number = number
        path = os.path.join(self._directory, generation_folders.folder_name(number))
        with explained(f"beginning generation {number}", self._directory):
            make_directory(self._directory)
            os.makedirs(path, exist_ok=True)
            self._folder = Folder(path, follow=False)
        # An error between here and close() must not keep the folder open.
        self._close = weakref.finalize(self, self._folder.close)
        if MANIFEST in self._folder.names():
            self._close()
            raise CheckpointError(
                f"generation {number} is in {self._directory} already; save under a number above "
                f"{generation_folders.next_number(self._directory) - 1}"
            )

    def __enter__(self) -> GenerationWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        metadata: Any = None,
        progress: Callable[[int], None] | None = None,
    ) -> FileEntry:
        """Write a file of tensors. See Note [What is checked is what is used].

        Args:
            name: The file becomes ``<name>.safetensors``; one of that name is replaced.
            tensors: By any name; of any shape, on any device. They must not change meanwhile.
            metadata: What JSON can hold. Default: None.
            progress: Called with the number of bytes after each piece that was written, from this
                thread; what it raises ends the writing. Default: nothing is called.

        Returns:
            The entry for :meth:`commit`.

        Raises:
            TypeError: What cannot be saved is among the tensors or in the metadata.
            ValueError: The name cannot be that of a file, or the metadata is too long.
            CheckpointError: The disk is full, a limit is reached, or the file cannot be written
                otherwise. Nothing is left of it, and the same writer can write it again.
        """
        manifest.check_name(name)
        tensor_file.check(tensors)
        self._check_open()
        with explained(f"writing {name} of generation {self._number}", self._directory):
            size, sha256 = self._folder.put(
                name + manifest.SUFFIX,
                lambda fd: tensor_file.write(fd, tensors, metadata, progress),
            )
        # Not before: the hash is made while the disk writes.
        return FileEntry(name, size, sha256())

    def commit(self, entries: Sequence[FileEntry], document: Any = None) -> None:
        """Finish the generation: from now on readers see it, also after a power failure.

        Args:
            entries: All of its files, of all processes.
            document: What JSON can hold. Default: None.

        Raises:
            TypeError: The document holds something that JSON does not have.
            ValueError: The document is too long, or two entries have one name.
            CheckpointError: A file is missing, or the manifest cannot be written. The generation
                is unfinished then, and the same writer can commit it again.
        """
        text = manifest.encode(self._number, entries, document)
        self._check_open()
        with explained(f"committing generation {self._number}", self._directory):
            self._check_files(entries)
            self._folder.put(MANIFEST, lambda fd: _write(fd, text))
            self._folder.sync()
            with Folder(self._directory) as directory:
                directory.sync()
            # What an earlier attempt, or a process that was killed, has left.
            for name in set(self._folder.names()) - {MANIFEST, *(entry.file for entry in entries)}:
                self._folder.remove(name)
        self.close()

    def discard(self) -> None:
        """Remove what was written; a generation that was committed stays."""
        if self._close.alive:
            generation_folders.remove_unfinished(self._folder)
        self.close()

    def close(self) -> None:
        """Write no more. What was not committed is left to another process that commits it."""
        self._close()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise CheckpointError(
                f"generation {self._number} is committed or given up; begin another one"
            )

    def _check_files(self, entries: Sequence[FileEntry]) -> None:
        for entry in entries:
            try:
                size = self._folder.size(entry.file)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{entry.file} is not in {self._folder.path}; all processes must write to the "
                    "same directory, on a file system that they share"
                ) from None
            if size != entry.bytes:
                raise CheckpointError(
                    f"{self._folder.path}/{entry.file} has {size:,} bytes, and {entry.bytes:,} "
                    "were written; does another job save here?"
                )


def _write(fd: int, text: bytes) -> None:
    write_all(fd, memoryview(text))
