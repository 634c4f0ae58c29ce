"""The device that lacks memory, and the changes of a forward that ran out of it.

Note [Too little memory]
~~~~~~~~~~~~~~~~~~~~~~~~
If a replica runs out of memory in forward, nothing has left the replicas yet. Their changes are
undone: buffers, and the states of the generators. Then the forward runs again with a smaller chunk
for that replica and larger ones for the others. In backward the graph is gone and gradients are
half done. Those of the round are dropped, and whoever called it has to run the step again. Other
processes do not notice the first; the second ends the backward in all.

Two things cannot be taken back. Messages to other processes: they would be ahead, and a collective
that this one repeats would meet another one of theirs. The sequence numbers of the process groups
tell. And an input that the forward has written in place; its version tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import torch_internals
from dataparallel.batch.tree import flatten
from dataparallel.errors import listed
from dataparallel.threads.random import default_generator, own_generator

# The messages of plain RuntimeErrors: of the CPU's allocator, and of libraries that allocate for
# themselves.
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_DEVICE = re.compile(r"\b(?:GPU |virtual:)(\d+)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an exception says that there was too little memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _MESSAGES)


def replicas_named_by(error: BaseException, devices: Sequence[torch.device]) -> list[int]:
    """Return the replicas on the accelerator that an exception names; none for the CPU."""
    # A later line may tell of another device: where the error was passed on.
    found = _DEVICE.search(str(error).split("\n", 1)[0])
    if found is None:
        return []
    return [i for i, device in enumerate(devices) if device.index == int(found[1])]


# --- what may be run again, and from where -------------------------------------------------------


class Rollback:
    """The state that the forward of some modules may change, and reasons why it cannot run again.

    Values are written back in place, so that references to a buffer stay right. If a forward has
    assigned another tensor, or None, the buffer is the same object as before again. Everything else
    that a forward changes, such as other attributes of a module, stays.
    """

    def __init__(
        self, devices: Iterable[torch.device], modules: Iterable[nn.Module | None], inputs: Any = ()
    ) -> None:
        every = [each for module in modules if module is not None for each in module.modules()]
        #: The buffers of each module, now and before.
        self._registered = [(each._buffers, dict(each._buffers)) for each in every]
        found = [buffer for _, kept in self._registered for buffer in kept.values()]
        buffers = {id(each): each for each in found if each is not None}.values()
        # Memory that was made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        for device in dict.fromkeys((torch.device("cpu"), *devices)):
            generator = own_generator(device) or default_generator(device)
            if generator is not None:
                self._states.append((generator, generator.get_state()))
        tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
        # Tensors of inference mode have no version.
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]
        self._num_collectives = _num_collectives()

    def obstacle(self) -> str:
        """Return why the forward must not run again, and the remedy; empty if it may."""
        # A group that nobody uses any more may be gone meanwhile.
        before = self._num_collectives
        if any(number > before.get(name, 0) for name, number in _num_collectives().items()):
            return (
                "The forward has called collectives of several processes, which the others would "
                "have to call again too, so it cannot be run again, and the step fails in all of "
                "them: go on from a checkpoint with a smaller batch, or with the limits that "
                "state_dict() of the Balancer has now"
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

    def undo(self) -> None:
        """Make everything as it was."""
        for generator, state in self._states:
            generator.set_state(state)
        for live, kept in self._registered:
            if [*map(id, live.values())] != [*map(id, kept.values())] or [*live] != [*kept]:
                live.clear()
                live.update(kept)
        with torch.no_grad():
            for buffer, value in self._buffers:
                # A graph that has saved a buffer which did not change stays valid.
                if buffer.layout != torch.strided or not torch.equal(buffer, value):
                    buffer.copy_(value)


def _num_collectives() -> dict[str, int]:
    """Count the collectives that this process has called, by the names of its groups."""
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
