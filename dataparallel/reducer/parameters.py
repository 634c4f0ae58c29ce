"""The parameters that a reducer has, and the dtypes in which replicas compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataparallel.torch_internals import IGNORED_NAMES


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes with which replicas compute and send gradients.

    The module's own parameters and their gradients keep their dtype, so optimizers and checkpoints
    do not change. Only floating-point tensors are converted.

    Example::

        model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))

    Args:
        param_dtype: The dtype of the replicas' parameters and inputs. Default: no change.
        reduce_dtype: The dtype of the gradients that the reducer sends. Default: ``param_dtype``.
        buffer_dtype: The dtype of buffers, which the constructor converts. Default: no change.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @staticmethod
    def of(config: Any) -> MixedPrecision:
        """Read a configuration: None, one of this class, or torch's ``_MixedPrecision``."""
        if config is None:
            return MixedPrecision()
        reduced = config.reduce_dtype or config.param_dtype
        return MixedPrecision(config.param_dtype, reduced, config.buffer_dtype)

    def convert_buffers(self, module: nn.Module) -> None:
        """Convert the floating-point buffers of a module, in place."""
        for buffer in module.buffers() if self.buffer_dtype else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.buffer_dtype)

    def convert_input(self, value: Any) -> Any:
        """Return a leaf of a forward's arguments as the replicas get it; gradients flow back."""
        converts = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.param_dtype) if converts else value


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters that require grad, each once, and what is known of each.

    Attributes:
        parameters, names: First those that are reduced over processes, then those that are not.
        indices: Their numbers among all parameters of the module.
        sparse: True for each parameter whose gradients will be sparse.
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
    A tensor with several names is left out if all of them were given.
    """
    given = {name.removeprefix(".") for name in getattr(module, IGNORED_NAMES, ())}
    if not given:
        return given
    parameters = module.named_parameters(remove_duplicate=False)
    named = [*parameters, *module.named_buffers(remove_duplicate=False)]
    kept = {id(tensor) for name, tensor in named if name not in given}
    return {name for name, tensor in named if name in given and id(tensor) not in kept}


def shared_tensors(
    module: nn.Module, *, parameters: bool = True, buffers: bool = True
) -> dict[str, torch.Tensor]:
    """Return the common tensors of all processes, by name; modules may assign new ones."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters()) if parameters else {}
    found.update(module.named_buffers() if buffers else ())
    ignored = ignored_names(module)
    return {name: tensor for name, tensor in found.items() if name not in ignored}
