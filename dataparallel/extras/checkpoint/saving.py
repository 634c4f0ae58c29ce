"""``save`` and ``close``: who writes what when processes save one generation together.

Note [What is saved once, and what by each process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes that train together have the same parameters and the same state of the optimizer, and each
has random numbers of its own. Which is which is found out, not assumed: processes compare numbers
that depend on all bits of each tensor, computed where the tensors are. What is equal in all is
copied to the host, hashed and written by rank 0 alone. Of a part that differs each process saves
what it has itself. So buffers that differ, and parameters that are left to each process, come back
as they were, and nothing is mixed from several processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel.extras.checkpoint.random_states as random_states
from dataparallel import devices as _devices
from dataparallel.errors import add_note
from dataparallel.extras.checkpoint.directory import (
    CheckpointError,
    Writer,
    WriterLock,
    prune,
    sweep,
)
from dataparallel.extras.checkpoint.parts import RNG, USER, Part, devices_of, parts_of
from dataparallel.extras.checkpoint.peers import Peers
from dataparallel.extras.checkpoint.values import JSON, TensorTable, encode, references
from dataparallel.kernels import fingerprint

#: Where a checkpoint is.
Path = str | os.PathLike[str]

_log = logging.getLogger("dataparallel")


class Progress(NamedTuple):
    """How far a save has come in this process.

    Attributes:
        written: Bytes written so far.
        total: Bytes that this process writes; 0 until that is known.
    """

    written: int
    total: int


class Saving:
    """A save that may still be under way; see :func:`dataparallel.checkpoint.save`.

    Example::

        saving = save("run", model, optimizer, step=step, asynchronous=True)
        ...                                   # training goes on
        print(saving.progress())              # Progress(written=..., total=...)
        print("saved as generation", saving.wait())
    """

    def __init__(self, directory: str, total: int) -> None:
        self._directory, self._total = directory, total
        self._process = os.getpid()
        self._ended = threading.Event()
        self._written = 0
        self._number: int | None = None
        self._error: BaseException | None = None
        self._is_told = False

    def __repr__(self) -> str:
        state = f"{self._written} of {self._total} bytes"
        if self._ended.is_set():
            state = "failed" if self._error else f"generation {self._number}"
        return f"Saving({self._directory}, {state})"

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set()

    def progress(self) -> Progress:
        """How many bytes this process has written, and how many there are."""
        return Progress(self._written, self._total)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the generation is on the disk in all processes.

        Args:
            timeout: Seconds. Default: without a limit; the save itself waits for the other
                processes no longer than its own ``timeout``.

        Returns:
            The number of the generation.

        Raises:
            CheckpointError: It was not saved; the last good generation is as it was. Or this is a
                fork of the process that saves.
            TimeoutError: The save takes longer than ``timeout``. It goes on.
        """
        if not self._ended.is_set() and self._process != os.getpid():
            # The thread that saves is not in the fork.
            raise CheckpointError(
                f"process {self._process} saves to {self._directory}, and this one ({os.getpid()}) "
                "was forked from it meanwhile; wait there"
            )
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"the save to {self._directory} has written {self._written} of {self._total} bytes "
                f"after {timeout} s; it goes on, wait longer"
            )
        if self._error is not None:
            self._is_told = True
            raise self._error
        assert self._number is not None
        return self._number

    # --- for the writer --------------------------------------------------------------------------

    def add(self, count: int) -> None:
        """Say that some more bytes are written."""
        self._written += count

    def end(self, number: int | None, error: BaseException | None = None) -> None:
        """Say that the generation is on the disk, or why not."""
        self._number, self._error = number, error
        self._ended.set()

    def untold(self) -> BaseException | None:
        """Wait for the end; the error if nobody has seen it yet. Who asks will tell it."""
        self._ended.wait()
        told, self._is_told = self._is_told, True
        return None if told else self._error


@dataclass
class _State:
    """What is to be saved, at one moment.

    Attributes:
        trees: The parts, as JSON.
        tensors: The tensors that they name; on their devices at first.
        about: What is told about the whole.
        hashes: Per tensor, what depends on all of its bits, to compare it with other processes'.
        kinds: Per part ``"shared"``, if it is the same in all processes, or ``"own"``.
        shared: Names of the tensors that are the same in all processes.
    """

    trees: dict[str, JSON]
    tensors: dict[str, Tensor]
    about: dict[str, Any]
    hashes: dict[str, str]
    kinds: dict[str, str]
    shared: set[str]

    def digests(self) -> dict[str, str]:
        """What tells the parts of this process from those of others; random numbers are no part."""
        found = {}
        for part, tree in self.trees.items():
            if part != RNG:
                hashes = {name: self.hashes[name] for name in references(tree)}
                text = json.dumps([tree, hashes], sort_keys=True).encode()
                found[part] = hashlib.sha256(text).hexdigest()
        return found


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Per tensor its dtype, its shape, and a number that depends on all of its bits."""
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    found = {}
    for names in by_device.values():
        bits = fingerprint([tensors[name] for name in names]).tolist()
        for name, number in zip(names, bits, strict=True):
            found[name] = f"{tensors[name].dtype} {tuple(tensors[name].shape)} {number}"
    return found


class _Saver:
    """Writes generations to one directory, one after the other.

    It holds the directory's lock, the memory for copies and the link to the other processes from
    the first save until :meth:`close`.
    """

    def __init__(self, directory: str, peers: Peers) -> None:
        self.directory, self.peers = directory, peers
        self._host: dict[str, Tensor] = {}
        self._lock: WriterLock | None = None
        self._latest: Saving | None = None
        self._one_at_a_time = threading.Lock()

    def save(self, take: Callable[[], _State], keep: int, asynchronous: bool) -> Saving:
        """Save one generation; see :func:`save`."""
        with self._one_at_a_time:
            earlier = None if self._latest is None else self._latest.untold()
            try:
                self._latest = self._save(take, keep, asynchronous)
                error = None if asynchronous else self._latest.untold()
                if error is not None:
                    raise error
            except Exception as error:
                if earlier is not None:
                    add_note(error, f"an earlier save had failed too, and nobody waited: {earlier}")
                raise
            if earlier is not None:
                raise CheckpointError(
                    "an earlier save failed, and nobody waited for it; the one that was asked for "
                    f"now is not concerned: {earlier}"
                ) from earlier
            return self._latest

    def _save(self, take: Callable[[], _State], keep: int, asynchronous: bool) -> Saving:
        state: _State | None = None
        failed: Exception | None = None
        number = 0

        def begin() -> dict[str, Any]:
            nonlocal state, failed, number
            try:
                state = take()
                if self.peers.rank == 0:
                    self._take_lock()
                    number = sweep(self.directory)
                several = self.peers.world_size > 1
                state.hashes.update(_hashes(state.tensors) if several else {})
                place = os.path.basename(self.directory)
                digests = state.digests() if several else {}
                return {"directory": place, "number": number, "parts": digests}
            except Exception as error:
                failed = error
                raise

        try:
            begun = self.peers.share(f"saving to {self.directory}", begin, fresh=True)
        except CheckpointError as error:
            # Who made a mistake gets its own error, and the others a text.
            raise failed or CheckpointError(
                f"nothing was saved to {self.directory}: {error}"
            ) from error
        assert state is not None
        number = begun[0]["number"]
        self._compare(state, begun)
        job = _Job(self, state, number, keep)
        job.copy(asynchronous)
        if asynchronous:
            try:
                # Not a daemon: the interpreter waits for it at its end.
                threading.Thread(target=job.run, name="dataparallel-checkpoint").start()
                return job.saving
            except RuntimeError as error:
                _log.warning("the training waits for the checkpoint to be written: %s", error)
        job.run()
        return job.saving

    def _compare(self, state: _State, begun: list[dict[str, Any]]) -> None:
        """Find out what is the same in all processes."""
        for rank, each in enumerate(begun):
            for what, ours, theirs in (
                ("parts", sorted(begun[0]["parts"]), sorted(each["parts"])),
                ("directory", begun[0]["directory"], each["directory"]),
            ):
                if ours != theirs:
                    raise CheckpointError(
                        f"rank {rank} saves {what} {theirs}, but rank 0 {ours}; all processes save "
                        "the same things to the same directory"
                    )
        several = self.peers.world_size > 1
        digests = [each["parts"] for each in begun]
        for part in state.trees:
            same = part != RNG and all(each[part] == digests[0][part] for each in digests[1:])
            state.kinds[part] = "shared" if same else "own"
        own = [part for part, kind in state.kinds.items() if kind == "own" and part != RNG]
        shared = [tree for part, tree in state.trees.items() if state.kinds[part] == "shared"]
        state.shared.update(*map(references, shared))
        if several and own:
            mine = {n: state.hashes[n] for part in own for n in references(state.trees[part])}
            all_of = self.peers.share("the comparison of tensors", lambda: mine)
            first = all_of[0].items()
            state.shared.update(n for n, h in first if all(each.get(n) == h for each in all_of))

    # --- what it holds ---------------------------------------------------------------------------

    def host_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, which the next ones are written to again; pinned if possible."""
        self._host = {name: self._place_for(name, tensor) for name, tensor in tensors.items()}
        devices = {t.device for t in tensors.values() if _devices.is_accelerator(t.device)}
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._host[name].copy_(tensor, non_blocking=tensor.device in devices)
        for device in devices:
            _devices.synchronize(device)
        return dict(self._host)

    def _place_for(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._host.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if _devices.is_accelerator(tensor.device):
            try:
                return memory.pin_memory()
            except (RuntimeError, NotImplementedError):
                # There is no driver that pins; copies are only slower then.
                return memory
        return memory

    def _take_lock(self) -> None:
        if self._lock is not None and not self._lock.holds:
            self._lock.release()
            self._lock = None
        if self._lock is None:
            self._lock = WriterLock(self.directory)

    @property
    def has_lock(self) -> bool:
        """Whether no other process can write to the directory."""
        return self._lock is not None and self._lock.holds

    def close(self) -> None:
        """Wait for what is being written, and release the lock, the memory and the link."""
        with self._one_at_a_time:
            if self._latest is not None:
                self._latest.untold()
            self._latest = None
            if self._lock is not None:
                self._lock.release()
            self._lock = None
            self._host = {}
            self.peers.close()


class _Job:
    """The writing of one generation; may run in a thread of its own."""

    def __init__(self, saver: _Saver, state: _State, number: int, keep: int) -> None:
        self._saver, self._peers, self._state = saver, saver.peers, state
        self._number, self._keep = number, keep
        self._failed: Exception | None = None
        self._asynchronous = False
        self._writer: Writer | None = None
        self._outcome = f"nothing was saved to {saver.directory}"
        is_first = self._peers.rank == 0
        # What this process writes; on the host once it was copied.
        self._tensors = {
            name: tensor
            for name, tensor in state.tensors.items()
            if is_first or name not in state.shared
        }
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        self.saving = Saving(saver.directory, total)

    def copy(self, asynchronous: bool) -> None:
        """Bring to the host what this process writes; with copies of what may change."""
        tensors, self._asynchronous = self._tensors, asynchronous
        try:
            if asynchronous:
                self._tensors = self._saver.host_copies(tensors)
            else:
                self._tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        except Exception as error:
            # The others learn of it with the files.
            self._failed = error

    def run(self) -> None:
        """Write, and tell the handle how it went."""
        try:
            self._write()
        except BaseException as error:
            if self._writer is not None and self._peers.rank == 0 and self._saver.has_lock:
                self._writer.discard()
            told = CheckpointError(f"{self._outcome}: {str(error) or type(error).__name__}")
            told.__cause__ = error
            if self._asynchronous:
                # Nobody may ever wait for it.
                _log.error("the checkpoint was not saved to %s: %s", self._saver.directory, told)
            self.saving.end(None, told)
            if not isinstance(error, Exception):
                # The other processes are told by the end of the connections.
                self._peers.close()
                raise
        else:
            self.saving.end(self._number)
        finally:
            self._tensors = {}

    def _write(self) -> None:
        written = self._peers.share("writing the files", self._write_files)

        def commit() -> None:
            if self._peers.rank > 0:
                self._outcome = (
                    f"whether generation {self._number} was saved to {self._saver.directory} is "
                    "not known"
                )
                return
            assert self._writer is not None
            self._check_lock()
            manifest = {
                **self._state.about,
                "parts": self._state.kinds,
                "trees": [each["trees"] for each in written],
                "files": [file for each in written for file in each["files"]],
            }
            self._writer.commit(manifest)
            self._outcome = f"generation {self._number} was saved, but not all processes know it"
            known = damaged.get(self._saver.directory, set())
            known.discard(self._number)
            try:
                prune(self._saver.directory, self._keep, known)
            except CheckpointError as error:
                _log.warning("%s", error)

        self._peers.share("writing the manifest", commit)

    def _write_files(self) -> dict[str, Any]:
        if self._failed is not None:
            raise self._failed
        state, is_first = self._state, self._peers.rank == 0
        if is_first:
            self._check_lock()
        self._writer = Writer(self._saver.directory, self._number, self._peers.rank)
        files = []
        for shared in (True, False):
            tensors = {n: t for n, t in self._tensors.items() if (n in state.shared) == shared}
            files += self._writer.write(tensors, shared=shared, progress=self.saving.add)
        trees = {p: t for p, t in state.trees.items() if is_first or state.kinds[p] == "own"}
        return {"files": files, "trees": trees}

    def _check_lock(self) -> None:
        if not self._saver.has_lock:
            raise CheckpointError(
                f"the lock of {self._saver.directory} was removed or replaced during the save, so "
                "that others could write there too; leave the directory and writer.lock in it "
                "alone while a job saves"
            )


# --- the functions -------------------------------------------------------------------------------

#: By directory, the generations that a load has found damaged: they do not count as kept.
damaged: dict[str, set[int]] = {}

_savers: dict[str, _Saver] = {}
_lock = threading.Lock()
_inherited: list[dict[str, _Saver]] = []


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

    If a process is killed meanwhile, the generation is either complete or does not count.

    Example::

        saving = checkpoint.save("run", model, optimizer, step=step, asynchronous=True)

    Args:
        directory: Where to save. No other training may save there until :func:`close`.
        model: A module, bare or in a wrapper; saved under the module's own names.
        optimizer, scheduler: Objects with ``state_dict()`` and ``load_state_dict()``.
        step: How many steps the training has made.
        epoch: Which epoch it is in. Default: None.
        sampler: A :class:`ResumableSampler`, or an object with ``state_dict()``, with ``epoch`` and
            ``set_epoch()``, or with a ``torch.Generator`` as ``generator``.
        rng: Whether to save the random generators of Python, NumPy, torch and the model's devices.
        user: Your own data: numbers, strings, lists, dicts, tensors and the like.
        states: More objects by name, such as a ``GradScaler``.
        keep: How many generations stay, at least 1. Default: 3.
        asynchronous: Whether to return once the state is copied to host memory, and write it while
            the training goes on. The next save waits for it. Default: False.
        process_group: The processes. Default: those of the model's wrapper, else all.
        timeout: Seconds that a process waits for the others. Default: that of the group.

    Returns:
        A handle. Without ``asynchronous`` the save has ended.

    Raises:
        CheckpointError: Nothing was saved: the disk is full, or another process failed or holds the
            directory. Or this one is saved, but an earlier asynchronous save failed unseen.
        TypeError, ValueError: A value cannot be saved, or an argument is out of range.
    """
    saver = _saver(directory, process_group or group_of(model), timeout)
    about = {"step": step, "epoch": epoch, "processes": saver.peers.world_size}

    def take() -> _State:
        # Here, where the other processes learn of what is wrong with one.
        _check(step=(step, 0), epoch=(0 if epoch is None else epoch, 0), keep=(keep, 1))
        parts = parts_of(model, optimizer, scheduler, sampler, states)
        return _state_of(parts, user, devices_of(model) if rng else None, about)

    return saver.save(take, keep, asynchronous)


def _check(**numbers: tuple[int, int]) -> None:
    for name, (number, least) in numbers.items():
        if type(number) is not int or number < least:
            raise ValueError(f"{name} is a whole number, at least {least}, but got {number!r}")


def _state_of(
    parts: Mapping[str, Part],
    user: Any,
    devices: list[torch.device] | None,
    about: Mapping[str, Any],
) -> _State:
    """The state as it is now; with that of random generators where the devices are given."""
    told = {
        **about,
        "taken": time.time(),
        "divided": [name for name, part in parts.items() if getattr(part, "divided", False)],
        "torch": torch.__version__,
    }
    values: dict[str, Any] = {name: part.save() for name, part in parts.items()}
    if devices is not None:
        values[RNG] = random_states.capture(devices)
    table = TensorTable()
    trees = {name: encode(value, name, table) for name, value in {**values, USER: user}.items()}
    return _State(trees, table.tensors, told, {}, {}, set())


def close(directory: Path | None = None) -> None:
    """Wait for saves that are under way, and release the directory, its lock and the memory.

    You may save there again later. Every process should call it, or none.

    Example::

        checkpoint.close("run")

    Args:
        directory: As in :func:`save`. Default: all directories.
    """
    with _lock:
        names = list(_savers) if directory is None else [os.path.realpath(directory)]
        closed = [_savers.pop(name) for name in names if name in _savers]
    for saver in closed:
        saver.close()


def group_of(model: nn.Module | None) -> dist.ProcessGroup | None:
    """The processes of a model's wrapper; None for all."""
    group = getattr(model, "process_group", None)
    return group if dist.is_available() and isinstance(group, dist.ProcessGroup) else None


def _saver(directory: Path, group: dist.ProcessGroup | None, timeout: float | None) -> _Saver:
    name = os.path.realpath(directory)
    with _lock:
        saver = _savers.get(name)
        if saver is not None and saver.peers.serves(group) and saver.peers.timeout == timeout:
            return saver
        _savers[name] = new = _Saver(name, Peers(group, timeout))
    if saver is not None:
        saver.close()
    return new


def _after_fork() -> None:
    global _lock
    # They are the parent's, as is the thread that may be writing. They are kept all the same: what
    # would be given back with them, such as connections, belongs to the parent too.
    _inherited.append(dict(_savers))
    _savers.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
