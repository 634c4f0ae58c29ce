"""What all processes have in common: all of a module at first, and its buffers in each forward.

Note [Whose buffers]
~~~~~~~~~~~~~~~~~~~~
Before a forward the buffers of rank 0 replace those of all other processes, or a hook does what the
user wants with them. It is so in a forward that follows one whose gradients are reduced, as in
torch: between two optimizer steps nothing is sent. Replicas of one process are another matter, see
:data:`dataparallel.parallel.buffers.BufferPolicy`; they start from the buffers that arrived.

An earlier forward may have saved a buffer for its backward. What arrives is mostly what was there,
so its version counter is left alone, as torch does it, and that backward is no error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.parallel.tensor_broadcast import Broadcast, check_same
from dataparallel.parallel.training import Training
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.reducer.trained import ignored_names
from dataparallel.torch_internals import BufferCommHookLocation

_Future: TypeAlias = "torch.futures.Future[Any]"

#: Called with a state of the user's and the buffers by name; may return futures that are waited for
#: at the end of backward.
BufferCommHook: TypeAlias = Callable[[Any, dict[str, torch.Tensor]], Any]


class BufferFutures:
    """What a hook for buffers has begun.

    Args:
        processes: The processes; None if there are no others.
    """

    def __init__(self, processes: ReducerProcesses | None) -> None:
        self._processes = processes
        self._futures: list[_Future] = []

    def add(self, returned: Any) -> None:
        """Take what a hook returned: futures, one future, or None."""
        if isinstance(returned, torch_internals.Future):
            returned = [returned]
        self._futures += returned or ()

    def wait(self) -> None:
        """Wait until it is done."""
        futures, self._futures = self._futures, []
        for future in futures:
            if self._processes is None:
                future.wait()
            else:
                self._processes.buckets.wait_for(future, what="a future of the hook for buffers")


class _RegisteredHook(NamedTuple):
    """A hook for buffers; the names are those of torch."""

    buffer_comm_hook: BufferCommHook
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: BufferCommHookLocation


class BufferSync:
    """What a distributed wrapper does with buffers, under torch's names. See Note [Whose buffers].

    Attributes:
        forward_sync_buffers: Whether buffers are sent before forwards.
        require_forward_param_sync: Whether they are in the next forward; False after a forward
            whose gradients are not reduced.
        modules_buffers: The buffers, as they were when they were last sent.
        named_module_buffers: The same by name.
        parameters_to_ignore: Names of the parameters and buffers that each process keeps to itself.
    """

    module: Any
    #: As in torch; so much is sent at once at most, where parameters or buffers are broadcast.
    broadcast_bucket_size = 250 * 2**20

    process_group: dist.ProcessGroup | None
    _join_config: Any

    @property
    def _training(self) -> Training:
        """What reduces; the wrapper knows how to make it."""
        raise NotImplementedError

    def _init_sync(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None, init_sync: bool
    ) -> None:
        """Take these arguments of the constructor, and have the same in all processes."""
        if forward_sync_buffers is not None and broadcast_buffers is not None:
            warnings.warn(
                "both broadcast_buffers and forward_sync_buffers were passed; forward_sync_buffers "
                f"counts, which is {forward_sync_buffers}. Pass one of them",
                FutureWarning,
                stacklevel=6,
            )
        self.forward_sync_buffers = forward_sync_buffers is not False
        if forward_sync_buffers is None:
            self.forward_sync_buffers = broadcast_buffers is not False
        self.require_forward_param_sync = True
        self.buffer_hook: _RegisteredHook | None = None
        self.parameters_to_ignore = ignored_names(self.module)
        self._restore_sync()
        if init_sync:
            at_once = self.forward_sync_buffers or forward_sync_buffers is not None
            self._sync_at_construction(buffers=at_once)

    def _restore_sync(self) -> None:
        """Make what no copy takes over."""
        self._buffer_broadcast = Broadcast()
        self._assign_modules_buffers()

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with the buffers of rank 0.

        Example::

            model.will_sync_module_buffers()

        Returns:
            Whether it was asked for, the last forward was one whose gradients are reduced, and the
            module had buffers.
        """
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    def register_buffer_comm_hook(
        self,
        state: Any,
        hook: BufferCommHook,
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let a hook bring the buffers of all processes together, in place of a broadcast.

        Example::

            def mean(state, buffers):
                for buffer in buffers.values():
                    torch.distributed.all_reduce(buffer.div_(world_size))

            model.register_buffer_comm_hook(None, mean)

        Args:
            state: What the hook is called with.
            hook: ``hook(state, buffers)`` with a dictionary of buffers by name, to be changed in
                place. It may return a list of futures, which are waited for at the end of backward.
            comm_hook_location: Torch's ``_BufferCommHookLocation``, whether the hook is called
                before a forward or after it. Default: after it.

        Raises:
            TypeError: The hook is not callable, or the location is none.
        """
        if not callable(hook):
            raise TypeError(
                f"a hook for buffers is called as hook(state, buffers), but got {hook!r}"
            )
        if not isinstance(comm_hook_location, BufferCommHookLocation):
            raise TypeError(
                "comm_hook_location is _BufferCommHookLocation.PRE_FORWARD or POST_FORWARD of "
                f"torch.nn.parallel.distributed, but got {comm_hook_location!r}"
            )
        self.buffer_hook = _RegisteredHook(hook, state, comm_hook_location)

    _register_buffer_comm_hook = register_buffer_comm_hook

    def _wait_for_buffers(self) -> None:
        """Let each round end when what a hook has begun has ended."""
        self._buffer_futures = BufferFutures(self._processes)
        self._training.reducer.call_at_end(self._buffer_futures.wait)

    # --- at the beginning, and when all processes have joined ------------------------------------

    def _sync_at_construction(self, *, buffers: bool) -> None:
        """Have the parameters of rank 0, and its buffers if wanted; a collective call.

        Raises:
            ValueError: The processes have different modules.
        """
        if self._processes is not None:
            states = self._module_states(buffers)
            what = "the comparison of parameters and buffers"
            check_same(states, self._processes.control, what=what)
            self._sync_module_states(0, buffers=buffers)

    def _sync_module_states(self, source: int, *, buffers: bool) -> None:
        """Replace parameters, and buffers if wanted, by those of one process."""
        if self._processes is not None:
            Broadcast().run(
                self._module_states(buffers),
                source,
                self._processes.buckets,
                what=f"parameters and buffers of rank {source}",
            )

    def _module_states(self, buffers: bool) -> dict[str, torch.Tensor]:
        states = dict[str, torch.Tensor](self.module.named_parameters())
        if buffers:
            states.update(self.module.named_buffers())
        return {n: t for n, t in states.items() if n not in self.parameters_to_ignore}

    # --- in a forward --------------------------------------------------------------------------

    def _assign_modules_buffers(self) -> None:
        # Anew each time, since a module may assign other tensors.
        self.named_module_buffers: dict[str, torch.Tensor] = {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }
        self.modules_buffers = list(self.named_module_buffers.values())

    def _check_sync_bufs_pre_fwd(self) -> bool:
        before = BufferCommHookLocation.PRE_FORWARD
        hook = self.buffer_hook
        at_all = hook is not None or self._processes is not None
        here = hook is None or hook.buffer_comm_hook_location == before
        return at_all and here and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        after = BufferCommHookLocation.POST_FORWARD
        here = self.buffer_hook and self.buffer_hook.buffer_comm_hook_location == after
        return bool(here) and self.will_sync_module_buffers()

    def _sync_buffers(self, *, has_inputs: bool = True) -> None:
        """Bring the buffers of all processes together, by a broadcast or by the hook.

        Args:
            has_inputs: Whether this process computes a forward. One that has joined early does not,
                and its buffers are out of date.
        """
        source = 0
        if self._join_config.enable and self._processes is not None:
            source = self._find_common_rank(self._processes.rank, has_inputs)
        self._buffer_futures.wait()
        self._assign_modules_buffers()
        counted = tuple(b for b in self.modules_buffers if not b.is_inference())
        with torch.no_grad(), torch_internals.keep_versions(counted):
            self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.buffer_hook
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        state, function = hook.buffer_comm_hook_state, hook.buffer_comm_hook
        self._buffer_futures.add(function(state, self.named_module_buffers))
        if self._processes is None:
            # There may be no round at whose end it would be waited for.
            self._buffer_futures.wait()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """What happens without a hook; a hook may call it, too."""
        buffers = self.modules_buffers if bufs is None else bufs
        size = self.broadcast_bucket_size if bucket_size is None else bucket_size
        self._distributed_broadcast_coalesced(buffers, size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Have the tensors of one process, on which ``buffer_size`` has no influence."""
        if self._processes is not None:
            names = {id(buffer): name for name, buffer in self.named_module_buffers.items()}
            self._buffer_broadcast.run(
                {names.get(id(t), f"tensor {i}"): t for i, t in enumerate(tensors)},
                authoritative_rank,
                self._processes.buckets,
                what=f"buffers of rank {authoritative_rank}",
            )

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The largest rank of those that answer yes; a collective call."""
        assert self._processes is not None
        candidate = torch.tensor([input_rank if rank_cond else -1])
        what = "which process has inputs left"
        self._processes.control.all_reduce(candidate, op="max", what=what).wait()
        assert candidate.item() >= 0, (
            "one process at least has inputs, or was the last to have some"
        )
        return int(candidate.item())

    @property
    def _distributed_rank(self) -> int:
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    @property
    def _processes(self) -> ReducerProcesses | None:
        return self._training.processes
