"""What a generation holds for one process, read and compared with what is to take it."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.checkpoint import random_states
from dataparallel.checkpoint.errors import CheckpointError
from dataparallel.checkpoint.generation import Generation
from dataparallel.checkpoint.module_state import ModuleState
from dataparallel.checkpoint.optimizer_state import OptimizerState
from dataparallel.checkpoint.parts import RNG, USER, Part
from dataparallel.checkpoint.saver import FORMAT, file_of
from dataparallel.checkpoint.values import JSON, decode

_log = logging.getLogger("dataparallel")
# So many reasons are told at once.
_SHOWN = 10


class Reading:
    """What a generation holds for this process; makes sure that all of it fits.

    Args:
        generation: Verified.
        rank: Of this process.
        parts: What is to be loaded, by name.
        rng: Whether random generators are to be restored.
        strict: Whether names and dtypes must be the same on both sides.

    Attributes:
        document: What is told about the whole.
        user: The user's data.

    Raises:
        CheckpointError: It does not fit; the message says what. Nothing was changed.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int,
        parts: Mapping[str, Part],
        rng: bool,
        strict: bool,
    ) -> None:
        self._generation = generation
        self.document = _checked_document(generation)
        self._rank = rank
        self._parts = parts
        self._strict = strict
        self._tensors: dict[int, Mapping[str, Tensor]] = {}
        self._trees: dict[int, dict[str, JSON]] = {}
        self.user = self._value(USER) if USER in self.document["parts"] else None
        self._rng = self._random_state() if rng and RNG in self.document["parts"] else None
        self._values = {name: self._value_for(part) for name, part in self._present().items()}
        self._check()

    @property
    def has_rng(self) -> bool:
        """Whether there are states of random generators to restore."""
        return self._rng is not None

    @property
    def _processes(self) -> int:
        count: int = self.document["processes"]
        return count

    def _present(self) -> dict[str, Part]:
        saved = self.document["parts"]
        missing = [name for name in self._parts if name not in saved]
        if missing and self._strict:
            raise CheckpointError(
                f"generation {self._generation.number} holds {', '.join(saved)}, but "
                f"{', '.join(missing)} is to be loaded; leave that out, or pass strict=False"
            )
        return {name: part for name, part in self._parts.items() if name in saved}

    # --- reading ---------------------------------------------------------------------------------

    def _value_for(self, part: Part) -> Any:
        if isinstance(part, OptimizerState) and self._is_divided(part.name):
            ranks = range(self._processes)
            return part.merged([self._decoded(part.name, rank, True) for rank in ranks])
        # A module copies what it gets.
        return self._value(part.name, copy=not isinstance(part, ModuleState))

    def _random_state(self) -> Any:
        # A process that was not there derives its own from the first one's.
        return self._decoded(RNG, self._rank if self._rank < self._processes else 0, True)

    def _is_divided(self, name: str) -> bool:
        return name in self.document["divided"] and self.document["parts"][name] == "own"

    def _value(self, name: str, copy: bool = True) -> Any:
        shared = self.document["parts"][name] == "shared"
        return self._decoded(name, 0 if shared else self._rank % self._processes, copy)

    def _decoded(self, name: str, rank: int, copy: bool) -> Any:
        trees = self._trees_of(rank)
        if name not in trees:
            raise CheckpointError(f"{file_of(rank)} lacks {name}, which the manifest says it has")
        # Its own first: tensors of one name may differ from process to process.
        others = [self._tensors_of(i) for i in range(self._processes) if i != rank]
        tensors = collections.ChainMap(dict(self._tensors_of(rank)), *map(dict, others))
        return decode(trees[name], name, tensors, copy=copy)

    def _tensors_of(self, rank: int) -> Mapping[str, Tensor]:
        if rank not in self._tensors:
            self._tensors[rank] = self._generation.tensors(file_of(rank))
        return self._tensors[rank]

    def _trees_of(self, rank: int) -> dict[str, JSON]:
        if rank not in self._trees:
            metadata = self._generation.metadata(file_of(rank))
            trees = metadata.get("parts") if isinstance(metadata, dict) else None
            if not isinstance(trees, dict):
                raise CheckpointError(f"{file_of(rank)} does not say what its tensors are")
            self._trees[rank] = trees
        return self._trees[rank]

    # --- checking and loading --------------------------------------------------------------------

    def _check(self) -> None:
        problems = [
            problem
            for name, part in self._present().items()
            for problem in part.problems(self._values[name], self._strict)
        ]
        why = None if self._rng is None else random_states.problem(self._rng)
        if why is not None:
            problems.append(f"{RNG}: {why}")
        if problems:
            more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise CheckpointError(
                f"generation {self._generation.number} does not fit, and nothing was loaded: "
                f"{'; '.join([*problems[:_SHOWN], *more])}"
            )

    def apply(self, devices: Sequence[torch.device]) -> None:
        """Load everything. See Note [All or nothing]."""
        undo: list[Callable[[], None]] = []
        before = random_states.capture(devices)
        try:
            for name, part in self._present().items():
                undo.append(part.remember())
                part.load(self._values[name], self._strict)
            self.restore_rng(devices)
        except BaseException:
            for step in reversed(undo):
                try:
                    step()
                except Exception as error:
                    _log.error("the state from before the load could not be put back: %s", error)
            random_states.restore(before, devices)
            raise

    def restore_rng(self, devices: Sequence[torch.device]) -> None:
        """Restore the random generators, if they were saved and are to be restored."""
        if self._rng is None:
            return
        if self._rank < self._processes:
            random_states.restore(self._rng, devices)
        else:
            random_states.derive(self._rng, self._rank, devices)

    def release(self) -> None:
        """Let go of all but the random states."""
        self._tensors, self._trees, self._values = {}, {}, {}


def _checked_document(generation: Generation) -> dict[str, Any]:
    """What is told about a generation, if it is of the right form."""
    document = generation.document
    form = document.get("format") if isinstance(document, dict) else None
    if form != FORMAT:
        raise CheckpointError(
            f"generation {generation.number} has the format {form!r:.40}, but this version reads "
            f"{FORMAT}; load it with the version that saved it"
        )
    assert isinstance(document, dict)
    parts, epoch = document.get("parts"), document.get("epoch")
    right = (
        type(document.get("step")) is int
        and (epoch is None or type(epoch) is int)
        and type(document.get("processes")) is int
        and document["processes"] > 0
        and isinstance(parts, dict)
        and set(parts.values()) <= {"shared", "own"}
        and isinstance(document.get("divided"), list)
    )
    if not right:
        raise CheckpointError(f"the manifest of generation {generation.number} has other entries")
    return document
