"""Training with uneven inputs: a process that has no more takes part in what the others do.

Note [A process that has joined]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes have to launch the same collectives. One that has no inputs left stays at the end of
the ``with`` block, and does for each forward of the others what that does together with them, until
all have come there:

    others: count, buffers, will gradients be reduced?, forward, backward: a round of the reducer
    joined: count, buffers, will gradients be reduced?,          if so:    a round without gradients

So within the block one backward follows each forward whose gradients are reduced. Buffers are then
those of the largest rank that has inputs, since the others' are out of date. At the end all get the
parameters and buffers of a process that joined last.

What a round gave is in ``.grad`` of a joined process, too, until all have joined. Whoever makes the
optimizer's step there needs it: ``step``, or an optimizer that joins with the model, as torch's
``ZeroRedundancyOptimizer``, where the process has to make the step of its own shard. Afterwards
``.grad`` is what it was.

Parameters are made equal at the end, but the state of an optimizer is not: nothing but its own
steps brings the momentum of a process that has joined to where that of the others is.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from dataparallel import torch_internals
from dataparallel.comm.processes import Pending, ProcessLink
from dataparallel.parallel.buffer_sync import BufferSync
from dataparallel.parallel.buffers import BufferPolicy
from dataparallel.parallel.join_obstacles import refuse_shared_statistics

_WHAT = "how many processes have inputs left"


def _count(
    link: ProcessLink, *, has_inputs: bool, terminates: bool
) -> tuple[torch.Tensor, Pending]:
    """Begin to count the processes that have inputs, and those that want all to stop."""
    counts = torch.tensor([int(has_inputs), int(terminates)])
    return counts, link.all_reduce(counts, what=_WHAT)


class _LimitedJoin(Join):
    """Torch's protocol, with waits that are limited in time and say who is missing."""

    def __init__(
        self, wrapper: UnevenInputs, throw: bool, divide: bool, step: Callable[[], object] | None
    ) -> None:
        self._wrapper = wrapper
        initialize: Any = super().__init__
        initialize([wrapper], True, throw, divide_by_initial_world_size=divide, step=step)
        # Not before the block is entered.
        wrapper._end_join()

    def __enter__(self) -> None:
        # Again, since the block may be entered again.
        torch_internals.configure_join(self)
        self._wrapper._join_is_limited = True

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave: Any = super().__exit__
        try:
            # It changes the filters for warnings of the whole program.
            with warnings.catch_warnings():
                leave(type, value, traceback)
        finally:
            self._wrapper._end_join()

    def _get_num_nonjoined_procs(self) -> int:
        config = self._wrapper._join_config
        assert self._wrapper._processes is not None
        link = self._wrapper._processes.control
        counts, pending = _count(
            link, has_inputs=False, terminates=config.throw_on_early_termination
        )
        pending.wait()
        return int(counts[0])

    def _notify_procs_to_terminate(self) -> None:
        # The others know from the count.
        raise RuntimeError(f"Rank {self._wrapper._distributed_rank} exhausted all inputs.")


class _ShadowHook(JoinHook):
    """What a wrapper does while it is joined, for torch's context manager."""

    def __init__(self, wrapper: UnevenInputs, step: Callable[[], object] | None) -> None:
        self._wrapper = wrapper
        self._step = step

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        if self._wrapper._shadow_iteration() and self._step is not None:
            self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: have the same everywhere."""
        self._wrapper._sync_final_model(is_last_joiner)
        self._wrapper._end_join()


class UnevenInputs(BufferSync, Joinable):
    """What a distributed wrapper does for ``join()``. See Note [A process that has joined]."""

    #: What is so within a `with` block only.
    _OF_JOIN = ("_join_is_limited", "_kept_grads", "_join_config")

    require_backward_grad_sync: bool
    buffer_policy: BufferPolicy
    _open: Callable[[], None]
    _connect: Callable[[], None]

    def _init_sync(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None, init_sync: bool
    ) -> None:
        initialize: Any = Joinable.__init__
        initialize(self)
        self._divide_by_initial_world_size = True
        self._has_joined = False
        super()._init_sync(broadcast_buffers, forward_sync_buffers, init_sync)

    def _restore_sync(self) -> None:
        self._join_is_limited = False
        self._kept_grads: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._join_config = torch_internals.disabled_join_config()
        super()._restore_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        step: Callable[[], object] | None = None,
    ) -> AbstractContextManager[None]:
        """Train although processes have different numbers of batches.

        A process that has no more takes part in the steps of the others with zeros, so that none
        waits for it. At the end all have the parameters of a process that came last.

        Example::

            with model.join(step=optimizer.step):
                for x, y in loader:
                    criterion(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        An optimizer with a state (momentum, Adam) needs ``step``: parameters are equal at the end
        anyway, but the state of an optimizer that has made fewer steps is not, and from the next
        step on the processes would go apart. Without it, make a new optimizer after the block, or
        use one that joins itself, with torch's ``Join([model, optimizer])``.

        What a process computed under ``no_sync()`` after its last reduced backward is applied
        nowhere: it stays in its ``.grad``, as in torch. Call ``zero_grad()`` after the block, or
        let the last backward of each process be a reduced one.

        Args:
            divide_by_initial_world_size: Whether gradients are always divided by the number of all
                processes. False: by the number of those that have inputs, with communication hooks,
                too. It says nothing for ``average="samples"`` and ``"none"``. Default: True.
            enable: Whether inputs may be uneven at all. Default: True.
            throw_on_early_termination: Whether all processes raise a RuntimeError as soon as one
                has no more. Default: False.
            step: Called in a process that has no more after each backward of the others whose
                gradients are reduced, with these alone in ``.grad``. It does what the loop does
                after each of them: clipping, the optimizer's step, that of a scheduler. Default:
                nothing is called.

        Returns:
            The context manager for the training loop. Each forward in it is followed by one
            backward, unless it is under ``no_sync()`` or ``torch.no_grad()``.

        Raises:
            ValueError: A batch norm layer takes statistics over all processes, and
                ``throw_on_early_termination`` is False.
            RuntimeError: At its end, or in a forward, with ``throw_on_early_termination``.
            CollectiveTimeout: Another process did not come in time.
        """
        self._open()
        if self._processes is None or not enable:
            return contextlib.nullcontext()
        self._connect()
        if not throw_on_early_termination:
            self._refuse_shared_statistics()
        return _LimitedJoin(self, throw_on_early_termination, divide_by_initial_world_size, step)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` calls in a process that has no more inputs.

        Args:
            kwargs: ``divide_by_initial_world_size`` and ``step``, see :meth:`join`; others are for
                others.
        """
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self._has_joined = True
        return _ShadowHook(self, kwargs.get("step"))

    def _refuse_shared_statistics(self) -> None:
        refuse_shared_statistics(self.module, synced=self.buffer_policy == "sync")

    @property
    def join_device(self) -> torch.device:
        """A device whose tensors the process group takes."""
        own: torch.device = next(iter(self.module.parameters())).device
        taken = {device.type for device in torch_internals.group_devices(self.join_process_group)}
        return own if own.type in taken else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The processes that join."""
        return self.process_group

    # --- in a process that has inputs ----------------------------------------------------------

    def _notify_join_context(self) -> Callable[[], int] | None:
        """Let those that have joined know that a forward begins here; a collective call.

        Returns:
            What tells how many processes have not joined; None outside of the block.
        """
        config = self._join_config
        if not config.enable:
            return None
        processes = self._processes
        count: Callable[[], int] | None = None
        if not self._join_is_limited or processes is None:
            if processes is not None and not config.throw_on_early_termination:
                self._refuse_shared_statistics()
            notify: Any = Join.notify_join_context
            work = notify(self)
            if work is not None and processes is not None:
                future = work.get_future()
                count = functools.partial(_number_in, future, processes.control)
        else:
            counts, pending = _count(processes.control, has_inputs=True, terminates=False)
            if config.throw_on_early_termination:
                pending.wait()
                if counts[1]:
                    raise RuntimeError(
                        "Detected at least one rank that exhausted inputs. Throwing across all "
                        "ranks."
                    )
            count = functools.partial(_first_of, counts, pending)
        if processes is not None:
            processes.count_active(None if self._divide_by_initial_world_size else count)
        return count

    def _refuse_while_joined(self, count: Callable[[], int] | None) -> None:
        """Refuse to make everything anew for other parameters where a process has joined.

        Args:
            count: What :meth:`_notify_join_context` has returned in this forward.
        """
        processes = self._processes
        if count is None or processes is None:
            return
        joined = processes.world_size - count()
        if joined:
            raise RuntimeError(
                "parameters of the module were replaced, or have another shape, dtype or device, "
                f"while {joined} of {processes.world_size} processes have joined: those cannot do "
                "the same. Replace parameters before the block of join(), or after it in all "
                "processes; p.data.copy_(...) changes values at any time"
            )

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        """Whether gradients of this forward will be reduced; a collective call.

        Args:
            is_joined_rank: Whether this process has to be told; the others tell, and do not wait.
        """
        processes = self._processes
        own = not is_joined_rank and self._will_reduce
        if processes is not None and self._join_config.enable:
            answer = torch.tensor([int(own)])
            what = "whether gradients will be reduced"
            pending = processes.control.all_reduce(answer, op="max", what=what)
            if is_joined_rank:
                pending.wait()
                return bool(answer.item())
        return own

    @property
    def _will_reduce(self) -> bool:
        return self.require_backward_grad_sync and torch.is_grad_enabled()

    # --- in a process that has joined ----------------------------------------------------------

    def _shadow_iteration(self) -> bool:
        """Do what a forward and backward of the others does together with this process.

        Returns:
            Whether their gradients were reduced, and are in ``.grad``.
        """
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers(has_inputs=False)
        synchronize = self._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers(has_inputs=False)
        self.require_forward_param_sync = synchronize
        if synchronize:
            self._shadow_round()
        return synchronize

    def _shadow_round(self) -> None:
        reducer = self._training.reducer
        trained = dict[str, torch.nn.Parameter](self.module.named_parameters())
        parameters = [trained[name] for name in reducer.names]
        if not self._kept_grads:
            # A view of a bucket will hold other numbers.
            viewed = reducer.options.gradient_as_bucket_view
            self._kept_grads = {
                p: p.grad.clone() if viewed and p.grad is not None else p.grad for p in parameters
            }
        for parameter in parameters:
            parameter.grad = None
        results = reducer.reduce(lambda: None, has_data=False)
        for parameter, grad in zip(parameters, results, strict=True):
            if grad is not None:
                parameter.grad = grad

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Have the parameters and buffers of a process that joined last; a collective call."""
        if self._processes is not None:
            source = self._find_common_rank(self._processes.rank, is_last_joiner)
            self._sync_module_states(source, buffers=self.forward_sync_buffers)

    def _end_join(self) -> None:
        """Be as before the block; may be called again."""
        for parameter, grad in self._kept_grads.items():
            parameter.grad = grad
        self._kept_grads = {}
        self._join_is_limited = False
        # Torch leaves it as it is: then forwards after the block still tell of themselves.
        self._join_config = torch_internals.disabled_join_config()
        processes = self._processes
        if processes is not None:
            processes.count_active(None)


def _first_of(counts: torch.Tensor, pending: Pending) -> int:
    pending.wait()
    return int(counts[0])


def _number_in(future: torch.futures.Future[list[torch.Tensor]], link: ProcessLink) -> int:
    return int(link.wait_for(future, what=_WHAT)[0].item())
