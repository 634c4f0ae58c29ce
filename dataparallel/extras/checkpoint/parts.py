"""The parts that a checkpoint of a training has: each has a name, and its own way to be saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from dataparallel.extras.checkpoint.module_state import ModuleState, names_of
from dataparallel.extras.checkpoint.object_state import (
    EpochState,
    GeneratorState,
    ObjectState,
    PositionState,
)
from dataparallel.extras.checkpoint.optimizer_state import OptimizerState
from dataparallel.extras.checkpoint.resumable_sampler import ResumableSampler

#: Names of parts that are not objects of the caller's.
RNG, USER = "rng", "user"


class Part(Protocol):
    """Saves and loads one object."""

    name: str

    def save(self) -> Any:
        """The state, as a value that a checkpoint can hold."""

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""

    def load(self, saved: Any, strict: bool) -> None:
        """Give the object a state."""

    def remember(self) -> Callable[[], None]:
        """What gives the object the state back that it has now."""


def parts_of(
    model: nn.Module | None,
    optimizer: Any,
    scheduler: Any,
    sampler: Any,
    states: Mapping[str, Any] | None,
) -> dict[str, Part]:
    """The parts of a training, by name, in the order in which they are loaded.

    Raises:
        TypeError: Something is of a type that cannot be saved.
        ValueError: A name is taken.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, but got {type(model).__name__}")
    names = names_of(model)
    given = {"sampler": sampler, "scheduler": scheduler, "optimizer": optimizer, "model": model}
    parts: dict[str, Part] = {}
    for name, value in (states or {}).items():
        if not isinstance(name, str) or name in given or name in (RNG, USER) or not name:
            raise ValueError(
                f"states has the name {name!r}; it must be a text other than "
                f"{', '.join([*given, RNG, USER])}"
            )
        parts[name] = _part(name, value, names)
    for name, value in given.items():
        if value is not None:
            parts[name] = _part(name, value, names)
    return parts


def _part(name: str, value: Any, names: Mapping[int, str]) -> Part:
    if isinstance(value, nn.Module):
        return ModuleState(name, value)
    if isinstance(value, Optimizer):
        return OptimizerState(name, value, names)
    if isinstance(value, torch.Generator):
        return GeneratorState(name, value)
    if isinstance(value, ResumableSampler):
        return PositionState(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return ObjectState(name, value)
    if callable(getattr(value, "set_epoch", None)) and isinstance(
        getattr(value, "epoch", None), int
    ):
        return EpochState(name, value)
    if isinstance(getattr(value, "generator", None), torch.Generator):
        return GeneratorState(name, value.generator)
    raise TypeError(
        f"{name} is a {type(value).__name__}, which has neither state_dict() and "
        "load_state_dict(), nor an epoch and set_epoch(), nor a torch.Generator as its generator; "
        "give it those, or save its values as user=..."
    )
