"""``save`` and ``close``, and the savers that they share."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.errors import suggesting
from dataparallel.extras.checkpoint import random_states
from dataparallel.extras.checkpoint.module_state import devices_of
from dataparallel.extras.checkpoint.parts import RNG, USER, Part, parts_of
from dataparallel.extras.checkpoint.saver import FORMAT, Saver
from dataparallel.extras.checkpoint.saving import Saving

#: Where a checkpoint is.
Path = str | os.PathLike[str]

_savers: dict[str, Saver] = {}
_lock = threading.Lock()
_inherited: list[dict[str, Saver]] = []


@suggesting
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

    The manifest with the hashes of all files is written last. So if a process is killed, the
    generation is either complete or does not count.

    Example::

        saving = checkpoint.save("run", model, optimizer, step=step, asynchronous=True)

    Args:
        directory: Where to save; the same in all processes. No other training may save there
            between the first save and :func:`close`.
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
            the training goes on. The next save waits until it is written. Default: False.
        process_group: The processes that save. Default: those of the model's wrapper, else all.
        timeout: Seconds that a process waits for the slowest one to write. Default: the time limit
            of the process group.

    Returns:
        A handle. Without ``asynchronous`` the save has ended.

    Raises:
        CheckpointError: Nothing was saved: the disk is full, or another process failed or holds the
            directory. Or this one is saved, but an earlier asynchronous save failed unseen.
        TypeError, ValueError: A value cannot be saved, or an argument is out of range. The other
            processes raise a CheckpointError.
    """
    saver = _saver(directory, process_group or group_of(model), timeout)
    told = {"step": step, "epoch": epoch, "processes": saver.peers.world_size}
    # Looked at with the state: the others learn what is wrong with the arguments of one process.
    parts = functools.partial(parts_of, model, optimizer, scheduler, sampler, states)
    take = functools.partial(_take, parts, user, model, rng, keep, told)
    return saver.save(take, keep, asynchronous)


def _take(
    parts_of_all: Callable[[], Mapping[str, Part]],
    user: Any,
    model: nn.Module | None,
    rng: bool,
    keep: int,
    told: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all parts as they are now, and what is told about the whole."""
    _check(told["step"], told["epoch"], keep)
    parts = parts_of_all()
    taken = time.time()
    values = {name: part.save() for name, part in parts.items()}
    if rng:
        values[RNG] = random_states.capture(devices_of(model))
    divided = [name for name, part in parts.items() if getattr(part, "divided", False)]
    about = {"taken": taken, "divided": divided, "torch": torch.__version__}
    return {**values, USER: user}, {"format": FORMAT, **told, **about}


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


def _saver(directory: Path, group: dist.ProcessGroup | None, timeout: float | None) -> Saver:
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is a positive number of seconds, but got {timeout!r}")
    name = os.path.realpath(directory)
    with _lock:
        saver = _savers.get(name)
        if saver is not None and saver.peers.serves(group) and saver.peers.timeout == timeout:
            return saver
        if saver is not None:
            saver.close()
        _savers[name] = Saver(name, group, timeout)
        return _savers[name]


def _check(step: int, epoch: int | None, keep: int) -> None:
    for what, value, least in (("step", step, 0), ("epoch", epoch, 0), ("keep", keep, 1)):
        if value is None and what == "epoch":
            continue
        if type(value) is not int or value < least:
            raise ValueError(f"{what} is a whole number, at least {least}, but got {value!r}")


def _after_fork() -> None:
    global _lock
    # They are the parent's, as is the thread that may be writing. They are kept all the same: what
    # would be given back with them, such as connections, belongs to the parent too.
    _inherited.append(dict(_savers))
    _savers.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
