"""Writes generations to one directory, one after the other, together with the other processes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dataparallel.checkpoint import layout
from dataparallel.checkpoint.directory_lock import DirectoryLock
from dataparallel.checkpoint.errors import CheckpointError
from dataparallel.checkpoint.generation_folders import next_number, prune
from dataparallel.checkpoint.generation_writer import GenerationWriter
from dataparallel.checkpoint.host_memory import HostMemory
from dataparallel.checkpoint.manifest import FileEntry
from dataparallel.checkpoint.peers import Peers
from dataparallel.checkpoint.saving import Saving
from dataparallel.checkpoint.values import JSON, TensorTable, encode

_log = logging.getLogger("dataparallel")

FORMAT = 1
_LOCK_TIMEOUT = 2.0


class Snapshot(NamedTuple):
    """A state at one moment.

    Attributes:
        trees: The parts, as JSON.
        tensors: The tensors that they name.
        document: What is told about the whole.
    """

    trees: dict[str, JSON]
    tensors: dict[str, Tensor]
    document: dict[str, Any]


class Saver:
    """Writes generations to one directory.

    It holds the directory's lock, the memory for snapshots and the link to the other processes from
    the first save until :meth:`close`.

    Args:
        directory: Where the generations are.
        group: The processes that save together.
        timeout: Seconds that a process waits for the others.
    """

    def __init__(self, directory: str, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._directory = directory
        self.peers = Peers(group, timeout)
        self._memory = HostMemory()
        self._directory_lock: DirectoryLock | None = None
        self._latest: Saving | None = None
        self._turn = threading.Lock()

    def save(self, take: Callable[[], Any], keep: int, asynchronous: bool) -> Saving:
        """Save one generation.

        Args:
            take: Gives the values of the parts, and what is told about the whole.
            keep: How many generations stay.
            asynchronous: Whether this returns once the state is copied.

        Raises:
            CheckpointError: It was not saved; or an earlier one was not and nobody has asked for
                it, and this one goes on.
        """
        with self._turn:
            earlier = self._latest
            if earlier is not None:
                # One at a time: the memory for snapshots is there once.
                earlier.wait_for_end()
            self._latest = saving = Saving(self._directory)
            snapshot, failed = self._take(take, asynchronous)
            if failed is not None and (asynchronous or self.peers.world_size == 1):
                saving.is_told()
            if failed is not None and self.peers.world_size == 1:
                saving.fail(failed, asynchronous=False)
                raise failed
            job = _Job(self, saving, snapshot, failed, keep, asynchronous)
            if asynchronous:
                # Not a daemon: the interpreter waits for it at its end.
                threading.Thread(target=job.run, name="dataparallel-checkpoint").start()
            else:
                job.run()
        if failed is not None and asynchronous:
            raise failed
        if earlier is not None:
            earlier.raise_unless_known()
        if not asynchronous:
            saving.wait()
        return saving

    def _take(
        self, take: Callable[[], Any], asynchronous: bool
    ) -> tuple[Snapshot | None, Exception | None]:
        try:
            values, document = take()
            table = TensorTable()
            trees = {name: encode(value, name, table) for name, value in values.items()}
            tensors = table.tensors
            if asynchronous:
                tensors = self._memory.copy(tensors)
            else:
                tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
            return Snapshot(trees, tensors, document), None
        except Exception as error:
            return None, error

    def lock(self) -> None:
        """Become the one that writes to the directory."""
        if self._directory_lock is None:
            # A moment: the process that this one has taken the place of may be about to end.
            self._directory_lock = DirectoryLock(self._directory, timeout=_LOCK_TIMEOUT)

    def close(self) -> None:
        """Wait for what is being written, and release the lock, the memory and the link."""
        with self._turn:
            if self._latest is not None:
                self._latest.wait_for_end()
            if self._directory_lock is not None:
                self._directory_lock.release()
            self._directory_lock = None
            self._memory.clear()
            self.peers.close()


class _Job:
    """One save; may run in a thread of its own."""

    def __init__(
        self,
        saver: Saver,
        saving: Saving,
        snapshot: Snapshot | None,
        failed: Exception | None,
        keep: int,
        asynchronous: bool,
    ) -> None:
        self._saver = saver
        self._peers = saver.peers
        self._directory = saver._directory
        self._saving = saving
        self._snapshot = snapshot
        self._failed = failed
        self._keep = keep
        self._asynchronous = asynchronous
        self._writer: GenerationWriter | None = None

    def run(self) -> None:
        """Write, and tell the handle how it went."""
        try:
            number = self._write()
        except BaseException as error:
            if self._writer is not None and self._peers.rank == 0:
                self._writer.discard()
            told: BaseException = error
            if not isinstance(error, (CheckpointError, TypeError, ValueError)):
                told = CheckpointError(f"nothing was saved to {self._directory}: {error}")
                told.__cause__ = error
            self._saving.fail(told, asynchronous=self._asynchronous)
            if not self._asynchronous:
                self._saving.is_told()
            if not isinstance(error, Exception):
                raise
        else:
            self._saving.succeed(number)
        finally:
            self._snapshot = None
            if self._writer is not None:
                self._writer.close()

    def _write(self) -> int:
        peers = self._peers
        begun = peers.share(f"saving to {self._directory}", self._begin, fresh=True)
        number: int = begun[0]["number"]
        snapshot = self._snapshot
        assert snapshot is not None
        _check_same_parts(begun)
        plan = layout.plan(
            snapshot.trees, snapshot.tensors, peers, self._digests, [b["digests"] for b in begun]
        )
        self._saving.expect(sum(tensor.nbytes for tensor in plan.tensors.values()))
        entries = peers.share("writing the files", lambda: self._write_file(number, plan))

        def commit() -> None:
            if peers.rank == 0:
                assert self._writer is not None
                document = {**snapshot.document, "parts": plan.kinds}
                self._writer.commit([FileEntry.from_json(entry) for entry in entries], document)

        peers.share("writing the manifest", commit)
        self._prune()
        return number

    def _begin(self) -> dict[str, Any]:
        """What the first exchange is about: whether there is a state, and where it is to go."""
        if self._failed is not None:
            raise self._failed
        assert self._snapshot is not None
        self._digests = None
        told: dict[str, Any] = {
            "directory": os.path.basename(os.path.realpath(self._directory)),
            "parts": sorted(self._snapshot.trees),
            "digests": {},
        }
        if self._peers.rank == 0:
            self._saver.lock()
            told["number"] = next_number(self._directory)
            self._writer = GenerationWriter(self._directory, told["number"])
        if self._peers.world_size > 1:
            self._digests = layout.digests(self._snapshot.trees, self._snapshot.tensors)
            told["digests"] = self._digests["parts"]
        return told

    def _write_file(self, number: int, plan: layout.Layout) -> JSON:
        if self._writer is None:
            self._writer = GenerationWriter(self._directory, number)
        entry = self._writer.write(
            file_of(self._peers.rank),
            plan.tensors,
            {"parts": plan.trees},
            progress=self._saving.add,
        )
        return entry.to_json()

    def _prune(self) -> None:
        if self._peers.rank == 0:
            try:
                prune(self._directory, self._keep)
            except Exception as error:
                # The new generation is there; old ones only take room.
                _log.warning("old checkpoints in %s stay: %s", self._directory, error)


def file_of(rank: int) -> str:
    """The name of the file that a process writes."""
    return f"rank-{rank:05d}"


def _check_same_parts(begun: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(begun):
        for what in ("directory", "parts"):
            if each[what] != begun[0][what]:
                raise CheckpointError(
                    f"rank {rank} saves {what} {each[what]}, but rank 0 {begun[0][what]}; all "
                    "processes must save the same to the same directory"
                )
