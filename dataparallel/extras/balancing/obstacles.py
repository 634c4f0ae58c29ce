"""Why a forward that has failed must not be run again.

Note [What cannot be run again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What goes to other processes cannot be taken back. Where processes meet within the forward, those
without trouble are ahead, and a collective that one of them repeats would meet another one of
theirs. So nothing is repeated where batch norm is synchronized between processes, nor after any
collective of processes, which the sequence numbers of the process groups tell. And an input that
the forward has written in place is no longer what it was; its version tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import torch_internals
from dataparallel.batch.tree import flatten
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.errors import listed

# What can be done where other processes are ahead.
_REMEDY = (
    "so it cannot be run again, and the step fails in all of them: go on from a checkpoint with a "
    "smaller batch, or with the limits that state_dict() of the Balancer has now"
)


class Obstacles:
    """Tells why a forward that begins now must not be run again. See Note [What cannot be run
    again].

    Example::

        obstacles = Obstacles([model.module], inputs)
        try:
            model(*inputs)
        except RuntimeError:
            print(obstacles.found() or "it may be run again")

    Args:
        modules: The modules that it runs; None stands for none.
        inputs: What it is given, in any containers.
        syncs_buffers: Whether the wrapper synchronizes batch norm between processes. Default:
            False.

    Attributes:
        is_certain: Whether it is clear beforehand.
    """

    def __init__(
        self, modules: Iterable[nn.Module | None], inputs: Any, *, syncs_buffers: bool = False
    ) -> None:
        self._modules = [module for module in modules if module is not None]
        self._versions = _versions(inputs)
        self._num_collectives = _num_collectives()
        self.is_certain = syncs_buffers

    def found(self) -> str:
        """What there is after an attempt, with what can be done; nothing if there is nothing."""
        if self.is_certain:
            return (
                "The forward of other processes is waiting for this one in batch norm "
                f"(buffers='sync'), {_REMEDY}"
            )
        layer = _layer_of_all_processes(self._modules)
        if layer:
            return (
                f"The forward of other processes is waiting for this one in batch norm ({layer}), "
                f"{_REMEDY}"
            )
        # A group that nobody uses any more may be gone meanwhile.
        before = self._num_collectives
        if any(number > before.get(name, 0) for name, number in _num_collectives().items()):
            return (
                "The forward has called collectives of several processes, which the others would "
                f"have to call again too, {_REMEDY}"
            )
        written = [tensor for tensor, version in self._versions if tensor._version != version]
        if written:
            shapes = listed(str(tuple(tensor.shape)) for tensor in written)
            return (
                f"The forward has written inputs in place (of shape {shapes}), so it cannot be run "
                "again with what they were: let it write to copies, or make the inputs anew and "
                "run the step again"
            )
        return ""


def _versions(inputs: Any) -> list[tuple[torch.Tensor, int]]:
    # Tensors of inference mode have no version.
    return [
        (leaf, leaf._version)
        for leaf in flatten(inputs)[0]
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]


def _num_collectives() -> dict[str, int]:
    """How many collectives this process has called, by the names of its groups."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    numbers: dict[str, int] = {}
    for group in list(torch_internals.world().pg_map):
        try:
            numbers[group.group_name] = torch_internals.num_collectives(group)
        except RuntimeError:
            # Not every backend counts.
            continue
    return numbers


def _layer_of_all_processes(modules: Sequence[nn.Module]) -> str:
    """A layer that takes statistics over processes, in words; nothing if there is none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return ""
    for module in modules:
        for name, layer in module.named_modules():
            is_ours = isinstance(layer, SyncBatchNorm) and layer.group != "local"
            if layer.training and (is_ours or isinstance(layer, nn.SyncBatchNorm)):
                return f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    return ""
