"""``load``: all processes take the same generation, and all of it or nothing.

Note [How processes agree on a generation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each process reads the newest generation that is good for it, and tells its number. What is damaged
for one may be good for another, which reads it through another machine; none above the smallest of
the numbers is good for all, so those that have another one go on from there. The numbers only fall,
so this ends, and skips none that is good for all.

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
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel.extras.checkpoint.random_states as random_states
from dataparallel.errors import listed
from dataparallel.extras.checkpoint.directory import (
    UNFINISHED,
    CheckpointError,
    File,
    NoCheckpoint,
    explained,
    generations,
    numbers,
    read_manifest,
    read_tensors,
    save_tensors,
)
from dataparallel.extras.checkpoint.parts import RNG, USER, Part, devices_of, merged, parts_of
from dataparallel.extras.checkpoint.peers import Peers
from dataparallel.extras.checkpoint.saving import Path, damaged, group_of
from dataparallel.extras.checkpoint.values import decode, references

_log = logging.getLogger("dataparallel")

# A writer that removes generations sooner than they are read so often is none to wait for.
_ATTEMPTS = 10


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
        directory: As in :func:`save`; or several, of which that with the latest save is loaded.
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
    is_one = isinstance(directory, (str, os.PathLike))
    directories: list[Any] = [directory] if is_one else list(directory)  # type: ignore[arg-type]
    if not directories or (not is_one and number is not None):
        mistake = f"there are {len(directories)} directories; pass one together with number="
        raise ValueError(f"{mistake}{number!r}")
    with contextlib.closing(Peers(process_group or group_of(model), timeout)) as peers:
        read = functools.partial(_Reading, rank=peers.rank, parts=parts, rng=rng)
        try:
            reading, rejected = _latest(peers, directories, number, read)
        except NoCheckpoint as error:
            if missing_ok and number is None:
                return Loaded()
            text = "look at the path, or pass missing_ok=True if the training may begin anew"
            raise NoCheckpoint(f"{error}; {text}") from None
        return _loaded(reading, rejected, peers, devices_of(model), strict)


def _loaded(
    reading: _Reading,
    rejected: Mapping[int, str],
    peers: Peers,
    devices: list[torch.device],
    strict: bool,
) -> Loaded:
    """Load it in all processes, or in none. See Note [All or nothing]."""
    what = f"loading generation {reading.number}"
    peers.share(what, lambda: reading.check(strict))
    try:
        peers.share(what, lambda: reading.apply(devices, strict))
    except BaseException:
        reading.take_back()
        raise
    newer = [(n, rejected[n]) for n in sorted(rejected, reverse=True) if n > reading.number]
    manifest = reading.manifest
    return Loaded(
        manifest["step"],
        manifest["epoch"],
        reading.user,
        reading.number,
        tuple(newer),
        manifest["processes"],
        reading.restorer(devices),
    )


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
        number: Which generation. Default: the last good one.

    Raises:
        CheckpointError: No generation is good, it holds no model, or the file cannot be written.
        NoCheckpoint: Nothing was ever saved.
    """

    def read(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
        if "model" not in manifest["parts"]:
            raise CheckpointError("it holds no model")
        values: dict[str, Any] = _values(directory, manifest, {"model": [0]})["model"][0]
        return values

    found, _ = _newest_good(directory, number, None, read)
    state = found["state"]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    save_tensors(path, tensors)


# --- which generation ----------------------------------------------------------------------------


def _newest_good(
    directory: Path,
    number: int | None,
    at_most: int | None,
    read: Callable[[Path, dict[str, Any]], Any],
) -> tuple[Any, dict[int, str]]:
    """What a directory holds, read by a function, and why newer generations were not used.

    Another process may save and remove generations meanwhile: as long as the directory changes it
    is looked at again.
    """
    found: list[int] = []
    for _ in range(_ATTEMPTS):
        with explained("looking for generations", directory):
            before, found = (
                found,
                [n for n in numbers(directory) if at_most is None or n <= at_most],
            )
        if number is not None and number not in found:
            there = ", ".join(map(str, found)) or "nothing"
            raise CheckpointError(
                f"there is no generation {number} in {os.fspath(directory)}; there is {there}"
            )
        rejected: dict[int, str] = {}
        for candidate in reversed(found if number is None else [number]):
            try:
                result = read(directory, read_manifest(directory, candidate))
            except CheckpointError as error:
                rejected[candidate] = str(error)
                continue
            for each, reason in rejected.items():
                # What a kill during a save leaves is nothing to warn of.
                level = logging.INFO if reason == UNFINISHED else logging.WARNING
                text = "checkpoint generation %d in %s is not used, but %d: %s"
                _log.log(level, text, each, os.fspath(directory), candidate, reason)
            return result, rejected
        if number is not None:
            raise CheckpointError(
                f"generation {number} in {os.fspath(directory)} is not good: {rejected[number]}"
            )
        if found == before or not found:
            break
    if all(reason == UNFINISHED for reason in rejected.values()):
        raise NoCheckpoint(f"nothing was saved in {os.fspath(directory)} yet")
    raise CheckpointError(f"no generation in {os.fspath(directory)} is good:{_lines(rejected)}")


def _lines(rejected: Mapping[int, str]) -> str:
    return "".join(f"\n  generation {n}: {reason}" for n, reason in sorted(rejected.items()))


def _agreed(
    peers: Peers, directory: Path, number: int | None, read: Callable[..., _Reading]
) -> tuple[_Reading, dict[int, str]]:
    """What all processes are to load of one directory.

    See Note [How processes agree on a generation].
    """
    at_most: int | None = None
    reading: _Reading | None = None
    rejected: dict[int, str] = {}
    attempts = _ATTEMPTS

    def look() -> dict[str, Any]:
        nonlocal reading
        bad: dict[int, str] = {}
        # What is in memory need not be read again, and may be gone from the directory.
        if reading is None or reading.number != at_most:
            # One at a time in memory.
            reading = None
            try:
                reading, bad = _newest_good(directory, number, at_most, read)
            except NoCheckpoint as error:
                return {"empty": str(error), "rejected": []}
            except CheckpointError as error:
                if at_most is None:
                    raise
                return {"rejected": [[at_most, str(error)]]}
        return {"number": reading.number, "is": reading.identity, "rejected": [*bad.items()]}

    while True:
        answers = peers.share(f"reading {os.fspath(directory)}", look)
        for rank, answer in enumerate(answers):
            for each, reason in answer["rejected"]:
                text = f"rank {rank}: {reason}" if peers.world_size > 1 else reason
                rejected.setdefault(each, text)
        found = [answer["number"] for answer in answers if "number" in answer]
        if len(found) < len(answers):
            if not found and all("empty" in answer for answer in answers):
                raise NoCheckpoint(answers[0]["empty"])
            attempts -= 1
            if at_most is not None and attempts:
                # A writer may have saved and removed generations meanwhile.
                at_most, reading = None, None
                rejected.clear()
                continue
            raise CheckpointError(
                f"no generation in {os.fspath(directory)} is good for all processes; all must see "
                f"the same directory:{_lines(rejected)}"
            )
        if len(set(found)) == 1:
            if len({answer["is"] for answer in answers}) > 1:
                raise CheckpointError(
                    f"generation {found[0]} in {os.fspath(directory)} is not the same for all "
                    "processes; all must see the same directory"
                )
            assert reading is not None
            bad = {n for n, reason in rejected.items() if reason != UNFINISHED}
            damaged.setdefault(os.path.realpath(directory), set()).update(bad)
            return reading, rejected
        at_most = min(found)


def _latest(
    peers: Peers,
    directories: Sequence[Path],
    number: int | None,
    read: Callable[..., _Reading],
) -> tuple[_Reading, dict[int, str]]:
    """What that one of several directories holds whose state was taken last."""
    if len(directories) == 1:
        return _agreed(peers, directories[0], number, read)

    def look() -> list[float]:
        return [max([i.when or 0.0 for i in generations(d)], default=0.0) for d in directories]

    looks = peers.share("looking for the newest", look)
    # What is in a directory was taken then at the latest.
    bounds = {index: max(times) for index, times in enumerate(zip(*looks, strict=True))}
    errors: list[CheckpointError] = []
    while bounds:
        index = max(bounds, key=lambda i: bounds[i])
        try:
            reading, rejected = _agreed(peers, directories[index], None, read)
        except CheckpointError as error:
            errors.append(error)
            del bounds[index]
            continue
        bounds[index] = reading.manifest["taken"]
        if bounds[index] == max(bounds.values()):
            for failed in errors:
                if not isinstance(failed, NoCheckpoint):
                    _log.warning("a directory of checkpoints is not used: %s", failed)
            return reading, rejected
    raise next((e for e in errors if not isinstance(e, NoCheckpoint)), errors[0])


# --- what it holds -------------------------------------------------------------------------------


def _values(
    directory: Path, manifest: Mapping[str, Any], ranks: Mapping[str, Collection[int]]
) -> dict[str, list[Any]]:
    """Parts as some processes saved them; of the files only what they need is kept."""
    trees = manifest["trees"]
    places: dict[tuple[int | None, str], File] = {
        (file.rank, name): file for file in manifest["files"] for name in file.tensors
    }
    needed: dict[str, set[str]] = {}
    for part, those in ranks.items():
        for rank in those:
            for name in references(trees[rank][part]):
                file = places.get((rank, name), places.get((None, name)))
                if file is None:
                    raise CheckpointError(f"no file has {name!r:.200}, which {part} needs")
                needed.setdefault(file.name, set()).add(name)
    files = {file.name: file for file in manifest["files"]}
    found = {
        (files[file].rank, name): tensor
        for file, names in needed.items()
        for name, tensor in read_tensors(directory, manifest["number"], files[file], names).items()
    }
    values: dict[str, list[Any]] = {}
    used: set[int] = set()
    for part, those in ranks.items():
        for rank in those:
            tensors = {}
            for name in references(trees[rank][part]):
                own = (rank, name) if (rank, name) in found else (None, name)
                tensor = found[own]
                # What two parts have in common is two tensors for them.
                tensors[name] = tensor.clone() if id(tensor) in used else tensor
                used.add(id(tensor))
            values.setdefault(part, []).append(decode(trees[rank][part], part, tensors))
    return values


class _Reading:
    """What a generation holds for this process, in host memory; the files are of no more use.

    Args:
        directory: Of the checkpoints.
        manifest: Of the generation.
        rank: Of this process.
        parts: What is to be loaded, by name.
        rng: Whether random generators are to be restored.

    Attributes:
        number: Of the generation.
        identity: What only this generation has.
        user: The user's data.

    Raises:
        CheckpointError: It does not hold what a generation does.
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        *,
        rank: int,
        parts: Mapping[str, Part],
        rng: bool,
    ) -> None:
        self.manifest, self.number, self.identity = manifest, manifest["number"], manifest["sha256"]
        self._rank, self._parts = rank, parts
        self._undo: list[Callable[[], object]] = []
        try:
            ranks = {
                part: self._ranks_of(part)
                for part in manifest["parts"]
                if part in parts or part == USER or (part == RNG and rng)
            }
            values = _values(directory, manifest, ranks)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"its manifest is no checkpoint's: {error!r:.200}") from error
        self.user = values.pop(USER, [None])[0]
        self._rng = values.pop(RNG, [None])[0]
        self._values = {p: merged(v) if len(v) > 1 else v[0] for p, v in values.items()}
        why = None if self._rng is None else random_states.problem(self._rng)
        if why is not None:
            raise CheckpointError(f"{RNG}: {why}")

    @property
    def _processes(self) -> int:
        count: int = self.manifest["processes"]
        return count

    def _ranks_of(self, part: str) -> Collection[int]:
        """The processes that saved what this one is to have of a part."""
        if part == RNG:
            # A process that was not there derives its own from the first one's.
            return [self._rank if self._rank < self._processes else 0]
        if self.manifest["parts"][part] == "shared":
            return [0]
        if part in self.manifest["divided"]:
            return range(self._processes)
        return [self._rank % self._processes]

    def check(self, strict: bool) -> None:
        """Compare all with what is to take it; nothing is changed.

        Raises:
            CheckpointError: It does not fit; the message says what.
        """
        missing = [name for name in self._parts if name not in self._values]
        if missing and strict:
            raise CheckpointError(
                f"generation {self.number} holds {', '.join(self.manifest['parts'])}, but "
                f"{', '.join(missing)} is to be loaded; leave that out, or pass strict=False"
            )
        problems = []
        for name, value in self._values.items():
            try:
                problems += (
                    [listed(found, "; ")]
                    if (found := self._parts[name].problems(value, strict))
                    else []
                )
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"{name} is not as it was saved: {error!r:.200}")
        if problems:
            raise CheckpointError(
                f"generation {self.number} does not fit, and nothing was loaded: "
                f"{'; '.join(problems)}"
            )

    def apply(self, devices: Sequence[torch.device], strict: bool) -> None:
        """Load everything; :meth:`take_back` undoes it, as long as other processes may fail."""
        if self._rng is not None:
            before = random_states.capture(devices)
            self._undo.append(functools.partial(random_states.restore, before, devices))
        for name, part in self._parts.items():
            if name in self._values:
                self._undo.append(part.remember())
                part.load(self._values[name], strict)
        restore = self.restorer(devices)
        if restore is not None:
            restore()

    def take_back(self) -> None:
        """Put the states back that were there before :meth:`apply`, as far as it came."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                _log.error("the state from before the load could not be put back: %s", error)

    def restorer(self, devices: Sequence[torch.device]) -> Callable[[], None] | None:
        """What restores the random generators, and holds nothing but their states."""
        if self._rng is None:
            return None
        if self._rank < self._processes:
            return functools.partial(random_states.restore, self._rng, devices)
        return functools.partial(random_states.derive, self._rng, self._rank, devices)
