"""Which parameters of a module a reducer has, and what is known of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from dataparallel.torch_internals import IGNORED_NAMES


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters that require grad, each once."""

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    indices: tuple[int, ...]
    sparse: tuple[bool, ...]

    def followed_by(self, others: TrainedParameters) -> TrainedParameters:
        """These and then others."""
        return TrainedParameters(
            self.parameters + others.parameters,
            self.names + others.names,
            self.indices + others.indices,
            self.sparse + others.sparse,
        )


def trained_parameters(
    module: nn.Module,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    frozen: bool = False,
) -> TrainedParameters:
    """Find the parameters of a module that a reducer is to have."""
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    chosen = [
        (index, name, parameter)
        for index, (name, parameter) in enumerate(module.named_parameters())
        if (frozen or parameter.requires_grad)
        and name not in without
        and (only is None or name in only)
    ]
    return TrainedParameters(
        tuple(parameter for _, _, parameter in chosen),
        tuple(name for _, name, _ in chosen),
        tuple(index for index, _, _ in chosen),
        tuple(id(parameter) in sparse for _, _, parameter in chosen),
    )


def ignored_names(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers that each process keeps to itself.

    They are those that torch's ``_set_params_and_buffers_to_ignore_for_model`` has left in the
    module, with or without the dot that torch's recipe puts before names of the module itself.
    What has several names is left out if all of them were given.
    """
    given = {name.removeprefix(".") for name in getattr(module, IGNORED_NAMES, ())}
    if not given:
        return given
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    return {name for each in names.values() if given.issuperset(each) for name in each}
