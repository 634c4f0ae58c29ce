"""``load``: all processes take the same generation, and all of it or nothing.

Note [All or nothing]
~~~~~~~~~~~~~~~~~~~~~
Everything is read, verified and compared with what is to take it before anything is changed, and
the processes tell each other how that went. What can still fail then is code of the user's objects;
their states from before are put back.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.checkpoint.errors import CheckpointError, NoCheckpoint
from dataparallel.checkpoint.generation import Generation, read_generation
from dataparallel.checkpoint.module_state import devices_of
from dataparallel.checkpoint.parts import parts_of
from dataparallel.checkpoint.peers import Peers
from dataparallel.checkpoint.reading import Reading
from dataparallel.checkpoint.saving_calls import Path, group_of
from dataparallel.comm.process_errors import name_ranks

_log = logging.getLogger("dataparallel")


@dataclass(frozen=True)
class Loaded:
    """What :func:`load` found.

    Attributes:
        step: How many steps the training had made; 0 if there was nothing to load.
        epoch: Which epoch it was in, if that was saved.
        user: The user's data.
        number: The generation; None if there was nothing to load.
        rejected: Newer generations that were not used, each with the reason.
        processes: How many processes saved it.
    """

    step: int = 0
    epoch: int | None = None
    user: Any = None
    number: int | None = None
    rejected: tuple[tuple[int, str], ...] = ()
    processes: int = 0
    _restore: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def restore_rng(self) -> None:
        """Put the random generators into their saved states once more.

        For code between the load and the first step that draws random numbers, which the training
        did not at this place: a new iterator of a ``DataLoader`` for example.

        Raises:
            CheckpointError: No states of random generators were saved.
        """
        if self._restore is None:
            raise CheckpointError("there are no states of random generators; save with rng=True")
        self._restore()


def load(
    directory: Path | Sequence[Path],
    model: nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    number: int | None = None,
    sampler: Any = None,
    rng: bool = True,
    states: Mapping[str, Any] | None = None,
    strict: bool = True,
    missing_ok: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 300.0,
) -> Loaded:
    """Load the last good generation; every process calls it.

    A damaged generation is not used: the one before it is, with a warning in the log. There may be
    other numbers of replicas and processes than at the save. Nothing from a file is executed.

    Example::

        loaded = checkpoint.load("run", model, optimizer, missing_ok=True)

    Args:
        directory: As in :func:`save`; or several, of which the one with the most steps is taken:
            say one in memory (``/dev/shm``), saved to at every step, and one on the disk.
        model, optimizer, scheduler, sampler, states: What takes the saved state; None is left out.
        number: Which generation. Default: the last good one.
        rng: Whether to restore random generators, if they were saved. A process that was not there
            derives numbers of its own from the first one's. Default: True.
        strict: Whether names and dtypes must be the same on both sides. ``False`` loads what is on
            both, and converts dtypes; shapes must agree in any case. Default: True.
        missing_ok: Whether it is fine that nothing was ever saved. Default: False.
        process_group, timeout: As in :func:`save`.

    Returns:
        What was loaded, and the user's data.

    Raises:
        CheckpointError: There is no good generation, or not the one asked for; or it does not fit.
            Nothing was changed, in any process.
        TypeError, ValueError: As in :func:`save`.
    """
    parts = parts_of(model, optimizer, scheduler, sampler, states)
    peers = Peers(process_group or group_of(model), timeout)
    with contextlib.closing(peers):
        found = _latest(directory, number, peers, missing_ok)
        if found is None:
            return Loaded()
        reading: list[Reading] = []

        what = f"loading generation {found.number}"
        devices = devices_of(model)
        with found:
            peers.share(
                what, lambda: reading.append(Reading(found, peers.rank, parts, rng, strict))
            )
        peers.share(what, lambda: reading[0].apply(devices))
        return _loaded(found, reading[0], devices)


def _loaded(found: Generation, reading: Reading, devices: list[torch.device]) -> Loaded:
    reading.release()
    document = reading.document
    return Loaded(
        document["step"],
        document["epoch"],
        reading.user,
        found.number,
        tuple(found.rejected),
        document["processes"],
        (lambda: reading.restore_rng(devices)) if reading.has_rng else None,
    )


def _latest(
    directory: Path | Sequence[Path], number: int | None, peers: Peers, missing_ok: bool
) -> Generation | None:
    """What is to be loaded: of several directories the one with the most steps."""
    if isinstance(directory, (str, os.PathLike)):
        return _agree(directory, number, peers, missing_ok)
    if number is not None or not directory:
        raise ValueError(
            f"there are {len(directory)} directories; pass one together with number={number!r}"
        )
    found: list[Generation] = []
    errors: list[CheckpointError] = []
    for each in directory:
        try:
            generation = _agree(each, None, peers, missing_ok)
        except CheckpointError as error:
            errors.append(error)
        else:
            found += [generation] if generation is not None else []
    if not found and errors:
        raise errors[0]
    for failed in errors:
        _log.warning("a directory of checkpoints is not used: %s", failed)
    found.sort(key=lambda generation: int(generation.document["step"]))
    for older in found[:-1]:
        older.close()
    return found[-1] if found else None


def _agree(
    directory: Path, number: int | None, peers: Peers, missing_ok: bool
) -> Generation | None:
    """The newest generation that is good in all processes, or the one asked for."""
    empty: list[NoCheckpoint] = []
    while True:
        read: list[Generation] = []

        def attempt(wanted: int | None = number, into: list[Generation] = read) -> int | None:
            try:
                into.append(read_generation(directory, wanted))
            except NoCheckpoint as error:
                empty.append(error)
                return None
            return into[0].number

        found = peers.share(f"reading {directory}", attempt)
        if all(each is None for each in found):
            if missing_ok and number is None:
                return None
            raise NoCheckpoint(
                f"{empty[0]}; look at the path, or pass missing_ok=True if the training may begin "
                "anew"
            )
        numbers = [each for each in found if each is not None]
        if len(numbers) < len(found):
            without = name_ranks([rank for rank, each in enumerate(found) if each is None])
            raise CheckpointError(
                f"{without} found nothing in {directory}, and others did; all processes must see "
                "the same directory"
            )
        if len(set(numbers)) == 1:
            return read[0]
        read[0].close()
        # What is damaged for one may be good for another, which read it through another machine.
        number = min(numbers)
