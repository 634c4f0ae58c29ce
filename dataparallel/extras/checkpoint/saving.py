"""``save`` and ``close``, and the processes that save or load together."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import filelock
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataparallel import devices as _devices
from dataparallel.comm.errors import CollectiveFailure, CollectiveTimeout
from dataparallel.comm.link import ProcessLink, parent_group
from dataparallel.extras.checkpoint import directory as _directory
from dataparallel.extras.checkpoint.directory import CheckpointError, Path
from dataparallel.extras.checkpoint.state import SHARED, USER, Encoder, ModuleState, entries_of

T = TypeVar("T")

_log = logging.getLogger("dataparallel")


class Peers:
    """The processes that save or load together: each learns what happened in the others."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None) -> None:
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        self._timeout = timeout
        self._link: ProcessLink | None = None

    def serves(self, group: dist.ProcessGroup | None, timeout: float | None) -> bool:
        """True if these are the processes of a group; the one of before may be gone."""
        is_same = self._group() is group and (group is not None or self.world_size == 1)
        return is_same and self._timeout == timeout

    def share(self, what: str, compute: Callable[[], T], *, fresh: bool = False) -> list[T]:
        """Return the results of all processes as JSON, by rank, or raise the error of one of them.

        With ``fresh`` it is the first exchange of a series. If another process has closed the link
        since the last one, both make a new one, and try once more.
        """
        if self.world_size == 1:
            return [compute()]
        failed: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer["value"] = compute()
        except Exception as error:
            failed = error
            answer["error"] = f"on {socket.gethostname()}: {_text_of(error)}"
        except BaseException:
            # The others are told by the end of the connections.
            self.close()
            raise
        answers = self._exchange(answer, fresh)
        if failed is not None:
            raise failed
        errors = [f"rank {r} {each['error']}" for r, each in enumerate(answers) if "error" in each]
        if errors:
            raise CheckpointError(f"{what} failed in {'; and in '.join(errors)}")
        return [each["value"] for each in answers]

    def _exchange(self, answer: Any, fresh: bool) -> list[Any]:
        if self._link is not None and self._link.broken:
            self.close()
        again = fresh and self._link is not None
        if self._link is None:
            self._link = ProcessLink(self._group(), timeout=self._timeout, purpose="checkpoint")
        try:
            return self._link.all_gather_json(answer, what="the answers of a checkpoint")
        except CollectiveFailure as error:
            self.close()
            known = isinstance(error, CollectiveTimeout) or error.failure is not None
            if again and not known:
                return self._exchange(answer, False)
            raise CheckpointError(str(error)) from error

    def close(self) -> None:
        """Give the connections back; the next exchange makes new ones."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def group_of(group: dist.ProcessGroup | None, model: nn.Module | None) -> dist.ProcessGroup | None:
    """Return the group that was passed, that of a model's wrapper, or all; None without any."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    own = getattr(model, "process_group", None)
    return parent_group(group or (own if isinstance(own, dist.ProcessGroup) else None))


# --- one save ------------------------------------------------------------------------------------


class Saving:
    """A save that may still be under way; see :func:`dataparallel.checkpoint.save`.

    Example::

        saving = save("run", model, optimizer, step=step, asynchronous=True)
        ...                                   # training goes on
        print("saved as generation", saving.wait())
    """

    def __init__(self, directory: str, number: int, tensors: dict[str, Tensor]) -> None:
        self._directory, self._number, self._tensors = directory, number, tensors
        self._ended = threading.Event()
        self._error: CheckpointError | None = None
        self._is_told = False

    def done(self) -> bool:
        """True if the save has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the generation is on the disk in all processes, and return its number.

        Args:
            timeout: Seconds. Default: until the save has ended, which has a limit of its own.

        Raises:
            CheckpointError: It was not saved; the last good generation is as it was.
            TimeoutError: The save takes longer than ``timeout``. It goes on.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self._directory} goes on after {timeout} s")
        self._is_told = True
        if self._error is not None:
            raise self._error
        return self._number

    def untold(self) -> CheckpointError | None:
        """Wait for the end; the error if nobody has seen it. A later question will tell it."""
        self._ended.wait()
        told, self._is_told = self._is_told, True
        return None if told else self._error

    def run(self, peers: Peers, trees: Any, about: Mapping[str, Any]) -> None:
        """Write the generation, together with the other processes; rank 0 commits it."""
        place, outcome = (self._directory, self._number), "nothing was saved"

        def write() -> dict[str, Any]:
            path = _directory.file_of(*place, peers.rank)
            return {"trees": trees, "file": _directory.write_tensors(path, self._tensors)}

        def commit() -> None:
            if peers.rank == 0:
                all_trees, files = ([each[what] for each in written] for what in ("trees", "file"))
                _directory.commit(*place, {**about, "trees": all_trees, "files": files})

        try:
            written = peers.share("writing the files", write)
            if peers.rank > 0:
                outcome = f"whether generation {self._number} was saved is not known"
            peers.share("writing the manifest", commit)
            if peers.rank == 0:
                _directory.prune(self._directory, about["keep"])
        except BaseException as error:
            self._error = CheckpointError(f"{outcome} to {self._directory}: {_text_of(error)}")
            self._error.__cause__ = error
            # Nobody may ever wait for it.
            _log.error("%s", self._error)
            if not isinstance(error, Exception):
                # The end of the connections tells the other processes.
                peers.close()
                raise
        finally:
            self._tensors = {}
            self._ended.set()


class _Saver:
    """A writer to one directory, with its lock, memory for copies and the link to the others."""

    def __init__(self, directory: str, peers: Peers) -> None:
        self.directory, self.peers = directory, peers
        self._host: dict[str, Tensor] = {}
        self._lock: filelock.BaseFileLock | None = None
        self._latest: Saving | None = None
        self._one_at_a_time = threading.Lock()

    def save(
        self, about: dict[str, Any], objects: tuple[Any, ...], user: Any, asynchronous: bool
    ) -> Saving:
        """Save one generation; see :func:`save`."""
        trees, tensors = dict[str, Any](), dict[str, Tensor]()
        digests = dict[str, str]()

        def begin() -> dict[str, Any]:
            earlier = None if self._latest is None else self._latest.untold()
            if earlier is not None:
                raise CheckpointError(f"an earlier save failed, and nobody waited: {earlier}")
            # Here, where the other processes learn of what is wrong with one.
            if about["keep"] < 1:
                raise ValueError(f"keep is at least 1, but got {about['keep']}")
            entries, encoder, is_first = entries_of(*objects), Encoder(), self.peers.rank == 0
            about["shared"] = [name for name, entry in entries.items() if isinstance(entry, SHARED)]
            for name, entry in entries.items():
                value = entry.save() if is_first or not isinstance(entry, SHARED) else entry.own()
                trees[name] = encoder.encode(value, name)
                if isinstance(entry, ModuleState) and self.peers.world_size > 1:
                    digests[name] = entry.digest(self.peers.world_size)
            trees[USER] = encoder.encode(user, USER)
            tensors.update(self._on_host(encoder.tensors, asynchronous))
            number = self._next_number() if is_first else 0
            place, names = os.path.basename(self.directory), list(trees)
            return {"directory": place, "entries": names, "number": number, "digests": digests}

        with self._one_at_a_time:
            begun = self.peers.share(f"saving to {self.directory}", begin, fresh=True)
            for rank, each in enumerate(begun):
                for what in ("entries", "directory"):
                    if each[what] != begun[0][what]:
                        raise CheckpointError(
                            f"rank {rank} saves {what} {each[what]}, but rank 0 {begun[0][what]}; "
                            "all processes save the same things to the same directory"
                        )
                for name, digest in each["digests"].items():
                    if digest != begun[0]["digests"].get(name):
                        raise CheckpointError(
                            f"{name} is not the same in rank 0 and rank {rank}; pass "
                            "its wrapper, wrap it in DistributedDataParallel, or let each process "
                            "save its own values by user=module.state_dict()"
                        )
            saving = Saving(self.directory, begun[0]["number"], tensors)
            arguments = (self.peers, trees, about)
            if asynchronous:
                # Not a daemon: the interpreter waits for it at its end.
                name = "dataparallel-checkpoint"
                threading.Thread(target=saving.run, args=arguments, name=name).start()
                self._latest = saving
            else:
                saving.run(*arguments)
                saving.wait()
            return saving

    def _on_host(self, tensors: Mapping[str, Tensor], asynchronous: bool) -> dict[str, Tensor]:
        """Tensors in host memory; copies if the training goes on, in the same memory again."""
        if not asynchronous:
            return {name: tensor.cpu() for name, tensor in tensors.items()}
        host = {}
        devices = {t.device for t in tensors.values() if _devices.is_accelerator(t.device)}
        for name, tensor in tensors.items():
            is_far, kept = tensor.device in devices, self._host.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty_like(tensor, device="cpu", pin_memory=is_far)
            host[name] = kept.copy_(tensor, non_blocking=is_far)
        for device in devices:
            _devices.synchronize(device)
        self._host = host
        return host

    def _next_number(self) -> int:
        """Return the number of the next generation; no other process writes to the directory."""
        path = os.path.join(self.directory, "writer.lock")
        # Somebody may have removed the directory.
        if self._lock is None or not os.path.exists(path):
            os.makedirs(self.directory, exist_ok=True)
            lock = filelock.FileLock(path, thread_local=False)
            try:
                # A moment: the process that this one has taken the place of may be about to end.
                lock.acquire(timeout=2.0)
            except filelock.Timeout:
                raise CheckpointError(
                    f"another process saves to {self.directory} and holds its lock (`fuser {path}` "
                    "names it); save elsewhere, or wait until it has ended or called close()"
                ) from None
            self._lock = lock
        return _directory.sweep(self.directory)

    def close(self) -> None:
        """Wait for what is being written, and release the lock, the memory and the link."""
        with self._one_at_a_time:
            if self._latest is not None:
                self._latest.untold()
            if self._lock is not None:
                self._lock.release()
            self._latest, self._lock, self._host = None, None, {}
            self.peers.close()


# --- the functions -------------------------------------------------------------------------------

# By process, since a fork is another writer, and by directory.
_savers: dict[tuple[int, str], _Saver] = {}
_lock = threading.Lock()


def save(
    directory: Path,
    model: nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int,
    epoch: int | None = None,
    sampler: Any = None,
    rng: bool = True,
    user: Any = None,
    states: Mapping[str, Any] | None = None,
    keep: int = 3,
    asynchronous: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Saving:
    """Save a training as a new generation; every process calls it.

    Rank 0 saves modules and optimizers, and each process all else for itself. If a process is
    killed meanwhile, the generation is either complete or does not count.

    Example::

        saving = checkpoint.save("run", model, optimizer, step=step, asynchronous=True)

    Args:
        directory: The directory to save to. No other training may save there until :func:`close`.
        model: A module, bare or in a wrapper; saved under the module's own names.
        optimizer, scheduler: Objects with ``state_dict()`` and ``load_state_dict()``.
        step: How many steps the training has made.
        epoch: The epoch it is in. Default: None.
        sampler: A :class:`ResumableSampler`, or an object with ``state_dict()``, with ``epoch`` and
            ``set_epoch()``, or with a ``torch.Generator`` as ``generator``.
        rng: True to save the random generators of Python, NumPy, torch and the model's devices.
        user: Your own data: numbers, strings, lists, dicts, tensors and the like.
        states: More objects by name, such as a ``GradScaler``.
        keep: How many generations stay, at least 1. Default: 3.
        asynchronous: True to return once the state is copied to host memory, and write it while the
            training goes on. The next save waits for it. Default: False.
        process_group: The processes. Default: those of the model's wrapper, else all.
        timeout: Seconds that a process waits for the others. Default: that of the group.

    Returns:
        A handle. Without ``asynchronous`` the save has ended.

    Raises:
        CheckpointError: Nothing was saved. The disk is full, another process failed or holds the
            directory, or an earlier asynchronous save failed unseen. Or a module that is in no
            wrapper is not the same in all processes.
        TypeError, ValueError: A value cannot be saved, or an argument is out of range.
    """
    saver = _saver(os.path.realpath(directory), group_of(process_group, model), timeout)
    objects = (model, optimizer, scheduler, sampler, states, rng)
    return saver.save({"step": step, "epoch": epoch, "keep": keep}, objects, user, asynchronous)


def close(directory: Path | None = None) -> None:
    """Wait for saves that are under way, and release the directory, its lock and the memory.

    You may save there again later. Every process should call it, or none.

    Example::

        checkpoint.close("run")

    Args:
        directory: As in :func:`save`. Default: all directories.
    """
    only = None if directory is None else os.path.realpath(directory)
    with _lock:
        keys = [key for key in _savers if key[0] == os.getpid() and only in (None, key[1])]
        closed = [_savers.pop(key) for key in keys]
    for saver in closed:
        saver.close()


def _saver(directory: str, group: dist.ProcessGroup | None, timeout: float | None) -> _Saver:
    key = os.getpid(), directory
    with _lock:
        saver = _savers.get(key)
        if saver is not None and saver.peers.serves(group, timeout):
            return saver
        _savers[key] = new = _Saver(directory, Peers(group, timeout))
    if saver is not None:
        saver.close()
    return new
