"""What a checkpoint holds of schedulers, samplers, generators and objects of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from dataparallel.errors import listed


class ObjectState:
    """Saves and loads what has ``state_dict()`` and ``load_state_dict()``.

    Args:
        name: What the object is called in messages and in names of tensors.
        value: The object.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._value = value

    def save(self) -> Any:
        """The state, as a value that a checkpoint can hold."""
        return self._value.state_dict()

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        own = self._value.state_dict()
        if not (isinstance(saved, dict) and isinstance(own, dict)):
            if isinstance(saved, type(own)):
                return []
            return [
                f"{self.name} is a {type(saved).__name__} in the checkpoint, but "
                f"{type(own).__name__} here"
            ]
        theirs, ours = set(saved) - set(own), set(own) - set(saved)
        # One side alone may have entries that another version has not.
        if theirs and ours:
            return [
                f"{self.name} has {_some(theirs)} in the checkpoint, but {_some(ours)} here: it "
                f"is no state of a {type(self._value).__name__}"
            ]
        return []

    def load(self, saved: Any, strict: bool) -> None:
        """Give the object a state."""
        self._value.load_state_dict(saved)

    def remember(self) -> Callable[[], None]:
        """What gives the object the state back that it has now."""
        state = copy.deepcopy(self._value.state_dict())
        return lambda: self._value.load_state_dict(state)


class PositionState(ObjectState):
    """Saves and loads a sampler of this package, also into one whose position is not known."""

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        if isinstance(saved, dict) and {"epoch", "taken"} <= set(saved):
            return []
        return [f"{self.name}: the checkpoint has no position of a sampler there"]

    def remember(self) -> Callable[[], None]:
        """What gives the sampler the position back that it has now."""
        before = dict(vars(self._value))
        return lambda: vars(self._value).update(before)


class EpochState:
    """Saves and loads the epoch of a sampler that has nothing else, such as DistributedSampler."""

    def __init__(self, name: str, sampler: Any) -> None:
        self.name = name
        self._sampler = sampler

    def save(self) -> Any:
        """The epoch."""
        return {"epoch": int(self._sampler.epoch)}

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        if isinstance(saved, dict) and type(saved.get("epoch")) is int:
            return []
        return [f"{self.name}: the checkpoint has no epoch of a sampler there"]

    def load(self, saved: Any, strict: bool) -> None:
        """Give the sampler its epoch."""
        self._sampler.set_epoch(saved["epoch"])

    def remember(self) -> Callable[[], None]:
        """What gives the sampler the epoch back that it has now."""
        epoch = self._sampler.epoch
        return lambda: self._sampler.set_epoch(epoch)


class GeneratorState:
    """Saves and loads a random generator of the user's, or that of a sampler."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self.name = name
        self._generator = generator

    def save(self) -> Any:
        """The state, as a tensor."""
        return self._generator.get_state()

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        device = self._generator.device
        try:
            torch.Generator(device).set_state(saved)
        except (RuntimeError, TypeError) as error:
            return [f"{self.name}: this is no state of a generator of {device}: {error!s:.200}"]
        return []

    def load(self, saved: Any, strict: bool) -> None:
        """Give the generator a state."""
        self._generator.set_state(saved)

    def remember(self) -> Callable[[], None]:
        """What gives the generator the state back that it has now."""
        state = self._generator.get_state()
        return lambda: void(self._generator.set_state(state))


def void(_: object) -> None:
    """Nothing: for functions whose result is of no interest."""


def _some(names: set[Any]) -> str:
    return listed(sorted(map(repr, names)))
