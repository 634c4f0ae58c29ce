"""What a generation holds for one process, read and compared with what is to take it."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.errors import listed
from dataparallel.extras.checkpoint import random_states
from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.extras.checkpoint.generation import Generation
from dataparallel.extras.checkpoint.optimizer_state import OptimizerState
from dataparallel.extras.checkpoint.parts import RNG, USER, Part
from dataparallel.extras.checkpoint.saver import FORMAT, file_of
from dataparallel.extras.checkpoint.values import JSON, decode, references

_log = logging.getLogger("dataparallel")


class Reading:
    """What a generation holds for this process, in host memory; the files are of no more use.

    Args:
        generation: Verified.
        rank: Of this process.
        parts: What is to be loaded, by name.
        rng: Whether random generators are to be restored.

    Attributes:
        number: Of the generation.
        taken: When the state was taken, in seconds since 1970.
        document: What is told about the whole.
        user: The user's data.

    Raises:
        CheckpointError: It does not hold what a generation does; the message says what.
    """

    def __init__(
        self, generation: Generation, rank: int, parts: Mapping[str, Part], rng: bool
    ) -> None:
        self.number = generation.number
        self.document = _checked_document(generation)
        self.taken: float = self.document.get("taken", generation.written)
        self._rank = rank
        self._parts = parts
        self._undo: list[Callable[[], None]] = []
        wanted = [name for name in (*parts, USER) if name in self.document["parts"]]
        if rng and RNG in self.document["parts"]:
            wanted.append(RNG)
        ranks = {name: self._ranks_of(name) for name in wanted}
        values = _values(generation, self._processes, ranks)
        self.user = values.pop(USER, [None])[0]
        self._rng = values.pop(RNG, [None])[0]
        self._values = {name: self._whole(name, each) for name, each in values.items()}
        why = None if self._rng is None else random_states.problem(self._rng)
        if why is not None:
            raise CheckpointError(f"{RNG}: {why}")

    @property
    def _processes(self) -> int:
        count: int = self.document["processes"]
        return count

    def _ranks_of(self, name: str) -> Collection[int]:
        """The processes that saved what this one is to have of a part."""
        if name == RNG:
            # A process that was not there derives its own from the first one's.
            return [self._rank if self._rank < self._processes else 0]
        if self.document["parts"][name] == "shared":
            return [0]
        if name in self.document["divided"] and isinstance(self._parts.get(name), OptimizerState):
            return range(self._processes)
        return [self._rank % self._processes]

    def _whole(self, name: str, values: Sequence[Any]) -> Any:
        part = self._parts[name]
        if isinstance(part, OptimizerState) and len(values) > 1:
            return part.merged(values)
        return values[0]

    # --- checking and loading --------------------------------------------------------------------

    def check(self, strict: bool) -> None:
        """Compare all with what is to take it; nothing is changed.

        Args:
            strict: Whether names and dtypes must be the same on both sides.

        Raises:
            CheckpointError: It does not fit; the message says what.
        """
        missing = [name for name in self._parts if name not in self._values]
        if missing and strict:
            raise CheckpointError(
                f"generation {self.number} holds {', '.join(self.document['parts'])}, but "
                f"{', '.join(missing)} is to be loaded; leave that out, or pass strict=False"
            )
        problems = [
            listed(found, "; ")
            for name, part, value in self._present()
            if (found := part.problems(value, strict))
        ]
        if problems:
            raise CheckpointError(
                f"generation {self.number} does not fit, and nothing was loaded: "
                f"{'; '.join(problems)}"
            )

    def apply(self, devices: Sequence[torch.device], strict: bool) -> None:
        """Load everything; until it is known that all processes did, :meth:`take_back` undoes it.

        Args:
            devices: Those of the replicas.
            strict: As for :meth:`check`.
        """
        if self._rng is not None:
            before = random_states.capture(devices)
            self._undo.append(functools.partial(random_states.restore, before, devices))
        for _, part, value in self._present():
            self._undo.append(part.remember())
            part.load(value, strict)
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
        """What restores the random generators, and holds nothing but their states.

        Args:
            devices: Those of the replicas.

        Returns:
            None if there is nothing to restore.
        """
        if self._rng is None:
            return None
        if self._rank < self._processes:
            return functools.partial(random_states.restore, self._rng, devices)
        return functools.partial(random_states.derive, self._rng, self._rank, devices)

    def _present(self) -> Iterator[tuple[str, Part, Any]]:
        for name, part in self._parts.items():
            if name in self._values:
                yield name, part, self._values[name]


def _values(
    generation: Generation, processes: int, ranks: Mapping[str, Collection[int]]
) -> dict[str, list[Any]]:
    """Parts as some processes saved them. Only those tensors are in memory that belong to them."""
    trees = {rank: _trees(generation, rank) for rank in sorted(set().union(*ranks.values()))}
    wanted = [(name, rank) for name, those in ranks.items() for rank in those]
    for name, rank in wanted:
        if name not in trees[rank]:
            raise CheckpointError(f"{file_of(rank)} lacks {name}, which the manifest says it has")
    source = _Source(generation, processes)
    sources = [source.of(references(trees[rank][name]), rank) for name, rank in wanted]
    tensors = _Tensors(generation, sources)
    values: dict[str, list[Any]] = {name: [] for name in ranks}
    for (name, rank), places in zip(wanted, sources, strict=True):
        values[name].append(decode(trees[rank][name], name, tensors.take(places)))
    return values


def _trees(generation: Generation, rank: int) -> dict[str, JSON]:
    metadata = generation.metadata(file_of(rank))
    trees = metadata.get("parts") if isinstance(metadata, dict) else None
    if not isinstance(trees, dict):
        raise CheckpointError(f"{file_of(rank)} does not say what its tensors are")
    return trees


class _Source:
    """In which file each tensor is."""

    def __init__(self, generation: Generation, processes: int) -> None:
        self._own = [set(generation.names(file_of(rank))) for rank in range(processes)]
        self._first: dict[str, int] = {}
        for rank, names in enumerate(self._own):
            for name in names:
                self._first.setdefault(name, rank)

    def of(self, names: Collection[str], rank: int) -> dict[str, int]:
        """The process that wrote each tensor; those that no file has are left out."""
        # Its own first: tensors of one name may differ from process to process.
        found = {name: rank if name in self._own[rank] else self._first.get(name) for name in names}
        return {name: writer for name, writer in found.items() if writer is not None}


class _Tensors:
    """Tensors of several files, each as often as it is needed, in memory of its own."""

    def __init__(self, generation: Generation, needed: Sequence[Mapping[str, int]]) -> None:
        self._uses = collections.Counter(
            (rank, name) for places in needed for name, rank in places.items()
        )
        names: dict[int, set[str]] = {}
        for rank, name in self._uses:
            names.setdefault(rank, set()).add(name)
        self._tensors = {
            (rank, name): tensor
            for rank, wanted in names.items()
            for name, tensor in generation.tensors(file_of(rank), wanted).items()
        }

    def take(self, places: Mapping[str, int]) -> dict[str, Tensor]:
        """Tensors that no later call gives."""
        return {name: self._take((rank, name)) for name, rank in places.items()}

    def _take(self, key: tuple[int, str]) -> Tensor:
        self._uses[key] -= 1
        return self._tensors[key].clone() if self._uses[key] else self._tensors.pop(key)


def _checked_document(generation: Generation) -> dict[str, Any]:
    """What is told about a generation, if it is of the right form."""
    document = generation.document
    form = document.get("format") if isinstance(document, dict) else None
    if form != FORMAT:
        raise CheckpointError(
            f"it has the format {form!r:.40}, but this version reads {FORMAT}; load it with the "
            "version that saved it"
        )
    assert isinstance(document, dict)
    parts, epoch = document.get("parts"), document.get("epoch")
    processes, taken = document.get("processes"), document.get("taken", 0.0)
    right = (
        type(document.get("step")) is int
        and document["step"] >= 0
        and (epoch is None or type(epoch) is int)
        and type(processes) is int
        and 0 < processes == len(generation.files)
        and set(generation.files) == set(map(file_of, range(processes)))
        and type(taken) is float
        and isinstance(parts, dict)
        and all(kind in ("shared", "own") for kind in parts.values())
        and isinstance(document.get("divided"), list)
    )
    if not right:
        raise CheckpointError("its manifest has other entries than those of a training")
    return document
