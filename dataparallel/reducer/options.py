"""What a reducer is told once: which parameters it has, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from dataparallel.torch_internals import IGNORED_NAMES

#: ``"processes"``: the mean over the processes, as in torch. ``"samples"``: the mean weighted by
#: each process's number of samples, or by a weight that the user gives. ``"none"``: the sum.
AverageKind: TypeAlias = Literal["processes", "samples", "none"]

MIB = 2**20
#: As in torch: small, so that communication begins early.
FIRST_BUCKET_BYTES = MIB
#: As in torch.
BUCKET_BYTES = 25 * MIB
#: Without processes nothing is sent, and what a bucket holds is freed when it is summed: small
#: buckets keep less alive.
LOCAL_BUCKET_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """What of the options of a wrapper a reducer reads; see the arguments of the wrapper."""

    bucket_cap_mb: float | Sequence[float] | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    #: Names of parameters that are reduced last.
    delayed: frozenset[str] = frozenset()
    average: AverageKind = "processes"
    deterministic: bool = False

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of what is sent; None for the parameters' own."""
        return None

    def bucket_bytes(self, *, sends: bool) -> int | tuple[int, ...]:
        """The limit of the buckets behind the first one, or a limit for each."""
        caps = self.bucket_cap_mb
        if caps is None:
            return BUCKET_BYTES if sends else LOCAL_BUCKET_BYTES
        return (
            tuple(int(cap * MIB) for cap in caps) if isinstance(caps, Sequence) else int(caps * MIB)
        )


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters that require grad, each once, and what is known of each.

    Attributes:
        parameters, names: First those that are reduced over processes, then those that are not.
        indices: Their numbers among all parameters of the module.
        sparse: Whether their gradients will be sparse.
        num_reduced: How many are reduced over processes.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    indices: tuple[int, ...]
    sparse: tuple[bool, ...]
    num_reduced: int


def trained_parameters(module: nn.Module) -> TrainedParameters:
    """Find the parameters of a module that a reducer is to have."""
    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    ignored = ignored_names(module)
    found = [(index, *named) for index, named in enumerate(module.named_parameters())]
    shared = [each for each in found if each[1] not in ignored]
    # All are frozen since the wrapper was made, as those of an average may be.
    reduced = [each for each in shared if each[2].requires_grad] or shared
    kept = [each for each in found if each[1] in ignored and each[2].requires_grad]
    chosen = [*reduced, *kept]
    return TrainedParameters(
        parameters=tuple(parameter for _, _, parameter in chosen),
        names=tuple(name for _, name, _ in chosen),
        indices=tuple(index for index, _, _ in chosen),
        sparse=tuple(id(parameter) in sparse for _, _, parameter in chosen),
        num_reduced=len(reduced),
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
    parameters = module.named_parameters(remove_duplicate=False)
    named = [*parameters, *module.named_buffers(remove_duplicate=False)]
    kept = {id(tensor) for name, tensor in named if name not in given}
    return {name for name, tensor in named if name in given and id(tensor) not in kept}
