"""What becomes of buffers: those that replicas wrote, and those of several processes.

Note [Whose buffers]
~~~~~~~~~~~~~~~~~~~~
Before a forward the buffers of rank 0 replace those of all other processes, or a hook does what the
user wants with them. It is so in a forward that follows one whose gradients are reduced, as in
torch: between two optimizer steps nothing is sent. Replicas of one process are another matter, see
:data:`BufferPolicy`; they start from the buffers that arrived.

An earlier forward may have saved a buffer for its backward. What arrives is mostly what was there,
so its version counter is left alone, as torch does it, and that backward is no error.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from dataparallel import comm, torch_internals
from dataparallel.comm.link import ProcessLink
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.reducer.options import ignored_names
from dataparallel.reducer.verify import look, parts_of, refuse_differences
from dataparallel.replicas.clones import ModuleClones
from dataparallel.torch_internals import BufferCommHookLocation

#: ``"replica0"``: those of replica 0 are kept, as in torch. ``"mean"``: floating-point buffers
#: become the mean over the replicas, weighted by samples. ``"sync"``: batch norm uses the
#: statistics of the whole batch, so that all replicas write the same.
BufferPolicy: TypeAlias = Literal["replica0", "mean", "sync"]

#: Called with a state of the user's and the buffers by name; may return futures to wait for.
BufferCommHook: TypeAlias = Callable[[Any, dict[str, torch.Tensor]], Any]

#: As in torch; more is sent in several messages.
MESSAGE_BYTES = 250 * 2**20


#: When buffers are sent that no hook brings together.
PRE_FORWARD = BufferCommHookLocation.PRE_FORWARD

# --- replicas --------------------------------------------------------------------------------


def merge_mean(clones: ModuleClones, samples: Sequence[int]) -> None:
    """Set each floating-point buffer that a forward has written to its mean, weighted by samples.

    Buffers that cannot be averaged (integers, other shapes) become those of replica 0.
    """
    with torch.no_grad():
        clones.merge_buffers(functools.partial(_mean, samples))


def _mean(samples: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor:
    first, total = values[0], sum(samples)
    averages = first.is_floating_point() or first.is_complex()
    if not (total and averages and all(value.shape == first.shape for value in values)):
        return first
    shares = [v * (count / total) for v, count in zip(values, samples, strict=True)]
    return comm.reduce_add(shares, first.device)


# --- processes -------------------------------------------------------------------------------


class Buffers:
    """What a distributed wrapper does with its module's buffers. See Note [Whose buffers].

    Attributes:
        moment: Whether they come together before a forward or after it; None for neither.
        ignored: Names of the parameters and buffers that each process keeps to itself.
    """

    def __init__(self) -> None:
        self.moment: BufferCommHookLocation | None = None
        self._hook: Callable[[dict[str, torch.Tensor]], Any] | None = None
        self._processes: ReducerProcesses | None = None

    def follow(self, module: nn.Module, processes: ReducerProcesses | None) -> None:
        """Be about this module and these processes from now on."""
        self._module, self._processes = module, processes
        if self._hook is None:
            self.moment = None if processes is None else PRE_FORWARD
        self.ignored = ignored_names(module)

    def register(
        self, state: Any, function: BufferCommHook, location: BufferCommHookLocation
    ) -> None:
        """Let a hook bring the buffers together; see the method of the wrapper."""
        if not callable(function):
            raise TypeError(
                f"a hook for buffers is called as hook(state, buffers), but got {function!r}"
            )
        self._hook, self.moment = functools.partial(function, state), location

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers that are sent; anew each time, since a module may assign others."""
        return {n: b for n, b in self._module.named_buffers() if n not in self.ignored}

    def sync(self, source: int) -> None:
        """Bring the buffers together: by the hook, or those of rank ``source`` are sent to all."""
        named, processes = self.named(), self._processes
        counted = tuple(b for b in named.values() if not b.is_inference())
        with torch.no_grad(), torch_internals.keep_versions(counted):
            if self._hook is not None:
                returned = self._hook(named)
                one = isinstance(returned, torch_internals.Future)
                for future in [returned] if one else returned or ():
                    if processes is None:
                        future.wait()
                    else:
                        processes.buckets.wait_for(future, what="a future of the hook for buffers")
            elif processes is not None:
                broadcast(named, source, processes.buckets, what=f"buffers of rank {source}")

    def send_states(self, source: int, *, buffers: bool) -> None:
        """Let all processes have the parameters of one, and its buffers if wanted."""
        assert self._processes is not None
        what = f"parameters and buffers of rank {source}"
        broadcast(self._states(buffers), source, self._processes.buckets, what=what)

    def check_states(self, *, buffers: bool) -> None:
        """Raise a ValueError in all processes if names, shapes or dtypes differ; a collective."""
        assert self._processes is not None
        states = self._states(buffers)
        refuse_differences(
            {repr(name): look(tensor) for name, tensor in states.items()},
            self._processes.control,
            "parameters or buffers",
            "Build the same model in every process; or let each process keep its own tensor with "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)",
        )

    def _states(self, buffers: bool) -> dict[str, torch.Tensor]:
        states = dict[str, torch.Tensor](self._module.named_parameters())
        if buffers:
            states.update(self._module.named_buffers())
        return {n: t for n, t in states.items() if n not in self.ignored}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_processes": None}


def broadcast(
    tensors: Mapping[str, torch.Tensor], source: int, link: ProcessLink, *, what: str
) -> None:
    """Replace tensors in all processes by those of one; a collective call.

    Tensors of any dtypes travel together, as bytes: one message for each device and 250 MiB.
    """
    # Made in inference mode the views could not be used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        found = parts_of(tensors)
        for name, part in found.items():
            if part.layout != torch.strided or part.is_quantized:
                kind = "quantized" if part.is_quantized else str(part.layout)
                raise ValueError(
                    f"{name!r} is {kind}, and only dense tensors are sent to other processes; make "
                    "it dense, or let each process keep its own with DistributedDataParallel."
                    f"_set_params_and_buffers_to_ignore_for_model(module, [{name!r}])"
                )
        messages: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        sent = Counter[torch.device]()
        # Those of large elements first: each then begins at a multiple of its elements' size.
        for part in sorted(found.values(), key=lambda part: -part.element_size()):
            sent[part.device] += part.nbytes
            if part.numel():
                message = (part.device, sent[part.device] // MESSAGE_BYTES)
                messages.setdefault(message, []).append(part.detach())
        for parts in messages.values():
            size = sum(part.nbytes for part in parts)
            flat = torch.empty(size, dtype=torch.uint8, device=parts[0].device)
            pieces = torch.split(flat, [part.nbytes for part in parts])
            views = [
                piece.view(part.dtype).view(part.shape)
                for piece, part in zip(pieces, parts, strict=True)
            ]
            if link.rank == source:
                torch_internals.foreach_copy_(views, parts)
            link.broadcast(flat, source, what=what).wait()
            if link.rank != source:
                torch_internals.foreach_copy_(parts, views)
