"""Writes generations to one directory, one after the other, together with the other processes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dataparallel.extras.checkpoint import layout
from dataparallel.extras.checkpoint.directory_lock import DirectoryLock
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation_folders import next_number, prune, sweep
from dataparallel.extras.checkpoint.generation_record import record_of
from dataparallel.extras.checkpoint.generation_writer import GenerationWriter
from dataparallel.extras.checkpoint.host_memory import HostMemory
from dataparallel.extras.checkpoint.manifest import FileEntry
from dataparallel.extras.checkpoint.peers import Peers
from dataparallel.extras.checkpoint.saving import Saving
from dataparallel.extras.checkpoint.values import JSON, TensorTable, encode

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
        timeout: As for :class:`~dataparallel.extras.checkpoint.peers.Peers`.
    """

    def __init__(
        self, directory: str, group: dist.ProcessGroup | None, timeout: float | None
    ) -> None:
        self.directory = directory
        self.peers = Peers(group, timeout)
        self._memory = HostMemory()
        self._directory_lock: DirectoryLock | None = None
        self._latest: Saving | None = None
        self._untold: BaseException | None = None
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
            if self._latest is not None:
                # One at a time: the memory for snapshots is there once.
                self._latest.wait_for_end()
                self._untold = self._latest.untold() or self._untold
            snapshot, failed = self._take(take, asynchronous)
            saving = Saving(self.directory)
            error: BaseException | None = failed
            if failed is None or self.peers.world_size > 1:
                self._start(_Job(self, saving, snapshot, failed, keep, asynchronous))
                if not asynchronous:
                    error = saving.untold()
                elif failed is not None:
                    saving.is_told()
            self._raise(error)
            return saving

    def _start(self, job: _Job) -> None:
        try:
            self._latest = job.saving
            if not job.asynchronous:
                job.run()
                return
            try:
                # Not a daemon: the interpreter waits for it at its end.
                threading.Thread(target=job.run, name="dataparallel-checkpoint").start()
            except RuntimeError as error:
                _log.warning("the training waits for the checkpoint to be written: %s", error)
                job.run()
        except BaseException as error:
            job.give_up(error)
            raise

    def _raise(self, error: BaseException | None) -> None:
        """Raise what went wrong in this save and, unless that was told, in an earlier one."""
        earlier, self._untold = self._untold, None
        if earlier is None:
            if error is not None:
                raise error
            return
        if error is None:
            raise CheckpointError(
                f"an earlier save failed, and nobody waited for it; the one that was asked for now "
                f"is not concerned: {earlier}"
            ) from earlier
        if not isinstance(error, CheckpointError):
            # The next save tells: this type may have no place for more text.
            self._untold = earlier
            raise error
        raise CheckpointError(
            f"{error}; an earlier save had failed too, and nobody waited for it: {earlier}"
        ) from error

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
        except BaseException:
            # The others are told by the end of the connections.
            self.peers.close()
            raise

    def lock(self) -> None:
        """Become the one that writes to the directory, unless it is that still."""
        if self._directory_lock is not None and not self.has_lock:
            self._directory_lock.release()
            self._directory_lock = None
        if self._directory_lock is None:
            # A moment: the process that this one has taken the place of may be about to end.
            self._directory_lock = DirectoryLock(self.directory, timeout=_LOCK_TIMEOUT)

    @property
    def has_lock(self) -> bool:
        """Whether nobody else can write to the directory: somebody may have removed the lock."""
        return self._directory_lock is not None and self._directory_lock.holds

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
        self._directory = saver.directory
        self.saving = saving
        self.asynchronous = asynchronous
        self._snapshot = snapshot
        self._failed = failed
        self._keep = keep
        # Taken by the thread that runs it, or by the one that gives it up.
        self._begun = threading.Lock()
        self._outcome = f"nothing was saved to {saver.directory}"
        self._writer: GenerationWriter | None = None

    def run(self) -> None:
        """Write, and tell the handle how it went."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self.saving.succeed(self._write())
        except BaseException as error:
            try:
                # Without the lock, the folder may be another writer's by now.
                if self._writer is not None and self._saver.has_lock:
                    self._writer.discard()
            finally:
                self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._snapshot = None
            if self._writer is not None:
                self._writer.close()

    def give_up(self, error: BaseException) -> None:
        """End the save unless it has begun; if it has, it ends by itself."""
        if self._begun.acquire(blocking=False):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        told = error
        if not isinstance(error, (CheckpointError, TypeError, ValueError)):
            told = CheckpointError(f"{self._outcome}: {str(error) or type(error).__name__}")
            told.__cause__ = error
        if not isinstance(error, Exception):
            # Who interrupts knows; the other processes are told by the end of the connections.
            self.saving.is_told()
            self._peers.close()
        self.saving.fail(told, asynchronous=self.asynchronous)

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
        self.saving.expect(sum(tensor.nbytes for tensor in plan.tensors.values()))
        entries = peers.share("writing the files", lambda: self._write_file(number, plan))

        def commit() -> None:
            if peers.rank == 0:
                document = {**snapshot.document, "parts": plan.kinds}
                self._commit(number, [FileEntry.from_json(entry) for entry in entries], document)
            else:
                self._outcome = (
                    f"whether generation {number} was saved to {self._directory} is not known"
                )

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
            sweep(self._directory, told["number"])
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
            progress=self.saving.add,
        )
        return entry.to_json()

    def _commit(self, number: int, entries: list[FileEntry], document: dict[str, Any]) -> None:
        assert self._writer is not None
        if not self._saver.has_lock:
            raise CheckpointError(
                f"the lock of {self._directory} was removed or replaced while generation {number} "
                "was written, so that others could write there too; leave the directory and "
                "writer.lock in it alone while a job saves"
            )
        self._writer.commit(entries, document)
        self._outcome = f"generation {number} was saved to {self._directory}, but not all know it"
        record_of(self._directory).note_written(number)

    def _prune(self) -> None:
        if self._peers.rank == 0:
            try:
                prune(self._directory, self._keep, record_of(self._directory))
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
