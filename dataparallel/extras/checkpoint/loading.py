"""``load``: all processes take the same generation, and all of it or nothing.

Note [All or nothing]
~~~~~~~~~~~~~~~~~~~~~
Everything is read, verified and compared with what is to take it before anything is changed, and
the processes tell each other how that went. What can still fail then is code of the user's objects.
Each process keeps the states from before until it knows that all have loaded, and puts them back if
one has not.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.errors import suggesting
from dataparallel.extras.checkpoint.agreement import Agreement
from dataparallel.extras.checkpoint.errors import CheckpointError, NoCheckpoint
from dataparallel.extras.checkpoint.module_state import devices_of
from dataparallel.extras.checkpoint.parts import parts_of
from dataparallel.extras.checkpoint.peers import Peers
from dataparallel.extras.checkpoint.reading import Reading
from dataparallel.extras.checkpoint.saving_calls import Path, group_of


@dataclass(frozen=True)
class Loaded:
    """What :func:`load` has loaded.

    Attributes:
        step: How many steps the training had made; 0 if there was nothing to load.
        epoch: Which epoch it was in, if that was saved.
        user: What was saved as ``user``.
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

        Call it if code between the load and the first step draws random numbers that the saved
        training did not draw there. A new iterator of a ``DataLoader`` does so.

        Raises:
            CheckpointError: No states of random generators were saved.
        """
        if self._restore is None:
            raise CheckpointError("there are no states of random generators; save with rng=True")
        self._restore()


@suggesting
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
    timeout: float | None = None,
) -> Loaded:
    """Load the last good generation; every process calls it.

    If a generation is damaged, the log has a warning, and the one before it is loaded. The numbers
    of replicas and processes may differ from those at the save. Nothing in a file is executed.

    Example::

        loaded = checkpoint.load("run", model, optimizer, missing_ok=True)

    Args:
        directory: As in :func:`save`; or several, of which the one with the latest save is loaded:
            for example one in memory (``/dev/shm``) for every step, and one on the disk.
        model, optimizer, scheduler, sampler, states: The objects that get the saved state.
        number: Which generation. Default: the last good one.
        rng: Whether to restore random generators, if they were saved. A process with a new rank
            derives its own from those of rank 0. Default: True.
        strict: Whether names and dtypes must be the same on both sides. ``False`` loads the names
            that both have, and converts dtypes. Shapes must agree in any case. Default: True.
        missing_ok: Whether to return step 0 if nothing was ever saved. Default: False, an error.
        process_group, timeout: As in :func:`save`.

    Returns:
        The step, the user's data, and which generation it was.

    Raises:
        CheckpointError: No generation is good, or the one asked for is not, or it does not fit.
            Nothing was changed, in any process.
        NoCheckpoint: Nothing was ever saved, and ``missing_ok`` is False.
        TypeError, ValueError: As in :func:`save`.
    """
    parts = parts_of(model, optimizer, scheduler, sampler, states)
    peers = Peers(process_group or group_of(model), timeout)
    devices = devices_of(model)
    with contextlib.closing(peers):
        read = functools.partial(Reading, rank=peers.rank, parts=parts, rng=rng)
        agreement = Agreement(peers, read)
        reading = _found(agreement, directory, number, missing_ok)
        if reading is None:
            return Loaded()
        _apply(reading, peers, devices, strict)
    return _loaded(reading, agreement, devices)


def _found(
    agreement: Agreement,
    directory: Path | Sequence[Path],
    number: int | None,
    missing_ok: bool,
) -> Reading | None:
    """What is to be loaded, in memory; None if nothing was ever saved, and that is fine."""
    try:
        if isinstance(directory, (str, os.PathLike)):
            return agreement.on(directory, number)
        if number is not None or not directory:
            raise ValueError(
                f"there are {len(directory)} directories; pass one together with number={number!r}"
            )
        return agreement.on_newest(directory)
    except NoCheckpoint as error:
        if missing_ok and number is None:
            return None
        raise NoCheckpoint(
            f"{error}; look at the path, or pass missing_ok=True if the training may begin anew"
        ) from None


def _apply(reading: Reading, peers: Peers, devices: list[torch.device], strict: bool) -> None:
    """Load it in all processes, or in none. See Note [All or nothing]."""
    what = f"loading generation {reading.number}"
    peers.share(what, lambda: reading.check(strict))
    try:
        peers.share(what, lambda: reading.apply(devices, strict))
    except BaseException:
        reading.take_back()
        raise


def _loaded(reading: Reading, agreement: Agreement, devices: list[torch.device]) -> Loaded:
    document = reading.document
    return Loaded(
        document["step"],
        document.get("epoch"),
        reading.user,
        reading.number,
        _newer(agreement.rejected, reading.number),
        document["processes"],
        reading.restorer(devices),
    )


def _newer(rejected: Mapping[int, str], number: int) -> tuple[tuple[int, str], ...]:
    return tuple((n, rejected[n]) for n in sorted(rejected, reverse=True) if n > number)
