"""``load`` and ``export``: all processes take the same generation, verified before it is used."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dataparallel.extras.checkpoint.directory import (
    CheckpointError,
    NoCheckpoint,
    Path,
    file_of,
    numbers,
    opened,
    read_manifest,
    write_tensors,
)
from dataparallel.extras.checkpoint.saving import Peers, group_of
from dataparallel.extras.checkpoint.state import RNG, USER, Entry, decode, entries_of

_log = logging.getLogger("dataparallel")


@dataclass(frozen=True)
class Loaded:
    """The result of :func:`load`.

    Attributes:
        step: How many steps the training had made; 0 if there was nothing to load.
        epoch: The epoch it was in, if that was saved.
        user: The value that was saved as ``user``.
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


def load(
    directory: Path,
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
    """Load the newest generation that is good in all processes; every process calls it.

    If a generation is damaged, the log has a warning, and the one before it is loaded. The numbers
    of replicas and processes may differ from those at the save. Nothing in a file is executed.

    Example::

        loaded = checkpoint.load("run", model, optimizer, missing_ok=True)

    Args:
        directory: As in :func:`save`.
        model, optimizer, scheduler, sampler, states: The objects that get the saved state.
        number: The number of the generation. Default: the last good one.
        rng: True to restore random generators, if they were saved. A process with a new rank
            derives its own from those of rank 0. Default: True.
        strict: True if names and the optimizer's class must be the same, and all be there.
        missing_ok: True to return step 0 if nothing was ever saved. Default: False, an error.
        process_group, timeout: As in :func:`save`.

    Returns:
        The step, the user's data, and which generation it was.

    Raises:
        CheckpointError: No generation is good, and nothing was changed. Or an entry does not fit in
            some process: what is loaded already stays, so make the objects anew.
        NoCheckpoint: Nothing was ever saved, and ``missing_ok`` is False.
        TypeError, ValueError: As in :func:`save`.
    """
    entries = entries_of(model, optimizer, scheduler, sampler, states, rng)
    with contextlib.closing(Peers(group_of(process_group, model), timeout)) as peers:
        try:
            manifest, values, rejected = _newest_good(directory, number, peers, {*entries, USER})
        except NoCheckpoint:
            if missing_ok and number is None:
                return Loaded()
            raise
        _load_all(manifest["number"], entries, values, strict, peers)
    restore = functools.partial(entries[RNG].load, values[RNG], True) if RNG in values else None
    newer = tuple((each, why) for each, why in rejected.items() if each > manifest["number"])
    about, processes = (manifest["step"], manifest["epoch"]), len(manifest["trees"])
    return Loaded(*about, values.get(USER), manifest["number"], newer, processes, restore)


def _load_all(
    number: int, entries: Mapping[str, Entry], values: Mapping[str, Any], strict: bool, peers: Peers
) -> None:
    """Load all entries; raise in all processes if one does not fit in one of them."""

    def apply() -> None:
        missing = [name for name in entries if name not in values and name != RNG]
        if missing and strict:
            raise CheckpointError(
                f"generation {number} holds {', '.join(values)}, but {', '.join(missing)} is to be "
                "loaded; leave that out, or pass strict=False"
            )
        for name in (name for name in entries if name in values):
            try:
                entries[name].load(values[name], strict)
            except Exception as error:
                raise CheckpointError(
                    f"generation {number} does not fit, and other entries may be loaded already: "
                    f"{name}: {error}"
                ) from error

    peers.share(f"loading generation {number}", apply)


def export(directory: Path, path: Path, *, number: int | None = None) -> None:
    """Write the weights of a checkpoint to one safetensors file, under the module's own names.

    Any program that reads safetensors loads it, and so does the bare module. One process calls it.

    Example::

        import safetensors.torch

        checkpoint.save("run", model, step=1)
        checkpoint.export("run", "weights.safetensors")
        net.load_state_dict(safetensors.torch.load_file("weights.safetensors"))

    Args:
        directory: As in :func:`save`.
        path: The file; one that is there is replaced.
        number: The number of the generation. Default: the last good one.

    Raises:
        CheckpointError: No generation is good, or it holds no model.
        NoCheckpoint: Nothing was ever saved.
    """
    _, values, _ = _newest_good(directory, number, Peers(None, None), {"model"})
    if "model" not in values:
        raise CheckpointError(f"the checkpoint in {os.fspath(directory)} holds no model")
    state = values["model"]["state"]
    # The format has no tensors that share memory.
    tensors = {name: v.clone() for name, v in state.items() if isinstance(v, Tensor)}
    write_tensors(pathlib.Path(path), tensors)


# --- which generation ----------------------------------------------------------------------------


def _newest_good(
    directory: Path, number: int | None, peers: Peers, wanted: set[str], before: Any = None
) -> tuple[dict[str, Any], dict[str, Any], dict[int, str]]:
    """Return the newest manifest and values that all can read, and why newer ones were not used."""
    where = os.fspath(directory)
    manifest, values, rejected = dict[str, Any](), dict[str, Any](), dict[int, str]()

    def read(candidate: int) -> dict[str, str]:
        nonlocal manifest, values
        # One at a time in memory.
        values = {}
        try:
            manifest = read_manifest(directory, candidate)
            values = _values(directory, manifest, peers.rank, wanted)
        except CheckpointError as error:
            return {"error": str(error)}
        return {"sha256": manifest["sha256"]}

    seen = peers.share(f"looking into {where}", lambda: numbers(directory, finished=True))
    if not any(seen) and seen == before:
        raise NoCheckpoint(f"nothing was saved in {where} yet (missing_ok=True begins anew)")
    common = sorted(set.intersection(*map(set, seen)), reverse=True)
    for candidate in common if number is None else [number]:
        what = f"reading generation {candidate}"
        answers = peers.share(what, functools.partial(read, candidate))
        errors = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
        if len({answer.get("sha256") for answer in answers}) == 1 and not errors:
            for each, why in rejected.items():
                text = "checkpoint generation %d in %s is not used, but %d: %s"
                _log.warning(text, each, where, candidate, why)
            return manifest, values, rejected
        rejected[candidate] = "; ".join(errors) or "the processes see different ones"
    if seen != before:
        # Another process may have saved and removed generations meanwhile.
        return _newest_good(directory, number, peers, wanted, seen)
    reasons = "".join(f"\n  generation {n}: {why}" for n, why in sorted(rejected.items()))
    which = "no generation is" if number is None else f"generation {number} is not"
    raise CheckpointError(f"{which} good for all processes in {where}; they see {seen}{reasons}")


def _values(
    directory: Path, manifest: Mapping[str, Any], rank: int, wanted: set[str]
) -> dict[str, Any]:
    """Return a process's values in a generation, saved by any number of processes."""
    values: dict[str, Any] = {}
    try:
        own = rank % len(manifest["trees"])
        for saver in sorted({0, own}):
            path = file_of(directory, manifest["number"], saver)
            with opened(path, manifest["files"][saver]) as file:
                for entry, tree in manifest["trees"][saver].items():
                    if entry in wanted and (saver == own or entry in manifest["shared"]):
                        value = decode(tree, file, {})
                        if entry in values:
                            values[entry]["state"].update(value)
                        else:
                            values[entry] = value
        if RNG in values and rank >= len(manifest["trees"]):
            values[RNG]["new_rank"] = rank
        return values
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as e:
        raise CheckpointError(f"it is not as it was saved: {e!r:.300}") from e
