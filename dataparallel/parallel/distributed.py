"""The wrapper with persistent replicas and a reducer, over local devices and processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn

from dataparallel import torch_internals
from dataparallel.batch.joining import ScalarsOption
from dataparallel.devices import DeviceLike
from dataparallel.errors import suggesting
from dataparallel.optim.in_backward import InBackwardOptimizers
from dataparallel.parallel.buffers import BufferPolicy
from dataparallel.parallel.copied_state import CopiedGroup, CopiedHook
from dataparallel.parallel.data_parallel import DataParallel, OutputDevice
from dataparallel.parallel.distributed_names import TorchNames
from dataparallel.parallel.gradient_clipping import GradientClipping
from dataparallel.parallel.loss import LossCall
from dataparallel.parallel.mixed_precision import MixedPrecision
from dataparallel.parallel.process_choice import chosen_caps, chosen_devices, chosen_group
from dataparallel.parallel.step import Call, Lent, Runner
from dataparallel.parallel.training import Options, Training
from dataparallel.reducer.nonfinite import NonFiniteAction, NonFinitePolicy
from dataparallel.reducer.options import AverageKind, check_average
from dataparallel.reducer.trained import ignored_names, trained_parameters

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class _OfThread(threading.local):
    """What one thread has said of its forwards."""

    #: The weight of the next one in an average; None adds up its chunks'.
    weight: float | None = None
    #: Within `no_sync()`, whether backward is reduced; None outside of it.
    synchronizes: bool | None = None


@suggesting
class DistributedDataParallel(DataParallel[ModuleT], TorchNames, GradientClipping):
    """Train a module on the devices of this process, and of all processes of a group.

    Takes the arguments of ``torch.nn.parallel.DistributedDataParallel``. A process may have several
    devices, and a single process needs no process group. The replicas compute with parameters of
    their own. While backward still runs, the reducer adds their gradients bucket by bucket,
    all-reduces the buckets over the processes, and adds them to ``.grad`` of the module's own
    parameters. Within a context of :mod:`dataparallel.distributed_autograd` it reduces the
    gradients of the context instead, and leaves ``.grad`` alone. Several threads may call the
    wrapper: their forwards run one after another, and one backward runs at a time.

    Example::

        model = DistributedDataParallel(net, device_ids=["cpu", "cpu"])
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        module: The module. The constructor moves it from the CPU to the first device, in place, as
            ``module.to`` does. Parameters on another accelerator raise an error.
        device_ids: One device per replica of this process, repeats allowed. Default: as for
            :class:`DataParallel`; if several processes share the machine, the module's own device.
            A module whose layers are on several devices is one replica, and stays where it is.
        output_device, dim: See :class:`DataParallel`.
        broadcast_buffers: Whether all ranks take over rank 0's buffers, in the constructor and
            before each forward. Default: True.
        init_sync: Whether all ranks take over rank 0's parameters and buffers in the constructor.
            Default: True.
        forward_sync_buffers: As ``broadcast_buffers``, but for forwards only.
        process_group: The processes. Default: the default group. ``False``: this process trains
            alone, even if there is a group.
        bucket_cap_mb: Size of a bucket in MiB, or a list with one size per bucket. Default: 25 with
            several processes; 4 with one, which has nothing to send.
        find_unused_parameters: The default, ``None``, handles unused parameters without a flag.
            ``True`` and ``False`` mean the same as in torch.
        gradient_as_bucket_view: Whether ``.grad`` is a view of the bucket. That saves a copy, but a
            reference to ``.grad`` that you keep shows the next step's gradients. Default: False.
        static_graph: Whether every step uses the same parameters. Default: False.
        delay_all_reduce_named_params: Pairs of names and parameters that the reducer sends last.
        mixed_precision: The dtypes of the replicas, see :class:`MixedPrecision`.
        device_mesh: A mesh of one dimension, in place of ``process_group``.
        bucket_cap_mb_list: In place of ``bucket_cap_mb``, as in torch.
        param_to_hook_all_reduce, skip_all_reduce_unused_params, batched_grad_copy,
            lazy_bucket_allocation, check_reduction: Accepted for torch's sake, without effect.
        average: ``"processes"`` (default): the mean over processes, as in torch. ``"samples"``: a
            process counts by its samples, or by the weights of its chunks if ``scalars`` is a
            function. ``"none"``: the sum.
        deterministic: Whether the reducer adds in rank order, so that the sum does not depend on
            ``bucket_cap_mb``. Not together with communication hooks. Default: False.
        timeout: Seconds that a collective waits for other processes. Default: the time limit of the
            process group.
        nonfinite: What to do with a NaN or an infinity in a gradient of any replica of any process.
            ``"ignore"`` (default): nobody looks. ``"skip"``: ``.grad`` is None in all processes, so
            that an optimizer changes nothing, and the log has a warning. ``"raise"``: all processes
            raise :class:`~dataparallel.reducer.nonfinite.NonFiniteGradients`. Buffers stay as the
            forward left them. ``"skip"`` refuses PowerSGD hooks.
        buffers, scalars, in_dims, out_dims, split_lists: See :class:`DataParallel`.

    Attributes:
        reducer: The reducer, see :class:`dataparallel.reducer.reducer.Reducer`.

    Raises:
        ValueError: An option has an unknown value, options contradict each other, no parameter
            requires grad, or processes have different modules.
        TypeError: A device or an option has the wrong type, or an option is misspelled.
        RuntimeError: A launcher has started several processes (``WORLD_SIZE``), and there is no
            process group; see ``process_group``.
    """

    _keeps_spread = True
    _synchronizes = True
    #: Made at the first use; a copy has none before.
    _built: Training | None = None

    def __init__(
        self,
        module: ModuleT,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: OutputDevice = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | Literal[False, -100] | None = None,
        bucket_cap_mb: float | Sequence[float] | None = None,
        find_unused_parameters: bool | None = None,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        average: AverageKind = "processes",
        deterministic: bool = False,
        timeout: float | None = None,
        nonfinite: NonFiniteAction = "ignore",
        buffers: BufferPolicy = "replica0",
        scalars: ScalarsOption = "stack",
        in_dims: Mapping[str | int, Any] | None = None,
        out_dims: Any = None,
        split_lists: bool = False,
    ) -> None:
        group = chosen_group(process_group, device_mesh)
        device_ids = chosen_devices(device_ids, module, group)
        super().__init__(
            module,
            device_ids,
            output_device,
            dim,
            buffers=buffers,
            scalars=scalars,
            in_dims=in_dims,
            out_dims=out_dims,
            split_lists=split_lists,
        )
        self._set_processes(group, device_mesh, is_separate=process_group is False)
        self.average: AverageKind = check_average(average)
        self.bucket_cap_mb = chosen_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view, self.static_graph = gradient_as_bucket_view, static_graph
        self.deterministic, self.timeout = deterministic, timeout
        self._delayed = frozenset(name for name, _ in delay_all_reduce_named_params or ())
        self.mixed_precision = MixedPrecision.of(mixed_precision)
        self.mixed_precision.convert_buffers(module)
        self._nonfinite = NonFinitePolicy.of(nonfinite)
        self._optimizers = InBackwardOptimizers.of(module.parameters())
        self._forwards, self._own = threading.RLock(), _OfThread()
        self._start(broadcast_buffers, forward_sync_buffers, init_sync)

    # --- the reduction ---------------------------------------------------------------------------

    def _set_processes(
        self, group: dist.ProcessGroup | None, mesh: Any, *, is_separate: bool
    ) -> None:
        self.process_group = group
        self._is_separate = is_separate
        if mesh is not None:
            # As in torch, there is no such attribute otherwise.
            self.device_mesh = mesh

    def _start(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None, init_sync: bool
    ) -> None:
        """See that all processes train the same; a collective call."""
        _refuse_frozen(self.module)
        self._build()
        self._training.connect()
        self._init_sync(broadcast_buffers, forward_sync_buffers, init_sync)

    @property
    def _training(self) -> Training:
        """What reduces. It has links to other processes once a forward has needed them."""
        if self._built is None:
            self._build()
        assert self._built is not None
        return self._built

    def _build(self) -> None:
        """Make all that belongs to the module as it is now."""
        options = Options(
            process_group=self.process_group,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            delayed=self._delayed,
            average=self.average,
            deterministic=self.deterministic,
            timeout=self.timeout,
            mixed_precision=self.mixed_precision,
            nonfinite=self._nonfinite,
            hook=self._hook,
            optimizers=self._optimizers,
        )
        self._built = Training(
            self.module,
            self.buffer_policy,
            options,
            self._runner,
            self.timeline,
            spread=self._spread,
        )
        self._wait_for_buffers()
        self._closed = False

    def _open(self) -> None:
        """Make what :meth:`close` has ended anew, and what a copy has not."""
        if self._closed:
            self._build()

    def _rebuild(self) -> None:
        """Make everything anew, for other processes or other parameters."""
        if self._built is not None:
            self._built.close()
        self._build()

    def _use_runner(self, runner: Runner) -> None:
        super()._use_runner(runner)
        if not self._closed:
            self._built = self._training.on(runner)

    # --- forward ---------------------------------------------------------------------------------

    def _turn(self) -> AbstractContextManager[Any]:
        """The clones are there once, so forwards of several threads come one after another."""
        alone = self._training.direct and not self._closed
        return nullcontext() if alone else self._forwards

    @property
    def _is_whole(self) -> bool:
        return len(self.device_ids) == 1

    def _lend(self, module: nn.Module, num_replicas: int) -> Lent:
        training = self._training
        standing = training.clones if module is self.module else None
        return self._runner.lend(module, num_replicas, standing, training.batch_group)

    def _needs_others(self, reduces: bool) -> bool:
        """Whether a forward, or its backward, communicates with other processes."""
        sends = self._check_sync_bufs_pre_fwd() or self._check_sync_bufs_post_fwd()
        return reduces or sends or self._join_config.enable

    def _is_lost(self, reduces: bool) -> bool:
        """Whether a forward needs other processes, and the links to them are broken."""
        processes = self._training.processes
        if processes is None:
            return False
        # New links would let it be forgotten that gradients of an earlier step are wrong.
        processes.late.look()
        # The others may have ended, and what is left to do here is an evaluation.
        return processes.is_broken and self._needs_others(reduces)

    def _connect(self) -> None:
        """Make the links to other processes where there are none; a collective call then.

        Raises:
            RuntimeError: It is not known which processes these are.
        """
        if self._lost_group and self._processes is not None:
            raise RuntimeError(
                "this wrapper was loaded from a pickle, which does not hold the process group that "
                f"it was saved with, and the default group has {self._processes.world_size} "
                "processes; call update_process_group(group) in all processes of the group over "
                "which its gradients are to be reduced, or evaluate its .module"
            )
        self._training.connect()

    def _follow_parameters(self) -> None:
        """Make everything anew for other parameters; those that have joined hear of an error."""
        count = self._notify_join_context()
        with self._training.telling("forward", reduces=True):
            self._refuse_while_joined(count)
        self._rebuild()

    @contextmanager
    def _begin(self, loss: LossCall | None = None) -> Iterator[Call]:
        weight, self._own.weight = self._own.weight, None
        with self._turn():
            self._check_can_go_on()
            self._open()
            reduces = self._will_reduce
            if reduces:
                _refuse_outer(self)
            if self._is_lost(reduces):
                self._rebuild()
            elif not self._training.fits(self.module):
                self._follow_parameters()
            if self._needs_others(reduces):
                self._connect()
            training = self._training
            if reduces:
                training.reducer.statistics.begin()
            self._notify_join_context()
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
            several = training.processes is not None and training.processes.world_size > 1
            call = Call(
                training,
                weight,
                weighs=self.average == "samples" and several and reduces and weight is None,
                synchronize=self.require_backward_grad_sync,
                loss=loss,
            )
            with self._inside_ddp_forward(), training.telling("forward", reduces=reduces):
                yield call
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            self.require_forward_param_sync = reduces

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of forwards within a ``with`` block to this process.

        They are reduced over processes with those of the first backward after the block, as in
        torch. Gradients are summed over the local replicas in any case.
        """
        before, self._own.synchronizes = self._own.synchronizes, False
        try:
            yield
        finally:
            self._own.synchronizes = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of this thread's next forward is reduced over processes.

        Within :meth:`no_sync` it is a matter of the thread, and what is assigned ends with it.
        """
        within = self._own.synchronizes
        return self._synchronizes if within is None else within

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._own.synchronizes is None:
            self._synchronizes = value
        else:
            self._own.synchronizes = value

    def close(self) -> None:
        """End the worker threads, remove all hooks and give the process groups back.

        The wrapper can be used again; the next forward that reduces is a collective call then,
        like making it.
        """
        super().close()
        if self._built is not None:
            self._built.close()
        self._closed = True

    def __getstate__(self) -> dict[str, Any]:
        # See Note [Copies of a wrapper].
        state = super().__getstate__()
        # As in torch: the copy belongs to the default group of the process that makes it.
        for name in (
            "_built",
            "_buffer_futures",
            "_buffer_broadcast",
            "_forwards",
            "_own",
            "device_mesh",
        ):
            state.pop(name, None)
        for name in ("modules_buffers", "named_module_buffers", *self._OF_JOIN):
            del state[name]
        return {
            **state,
            "process_group": CopiedGroup(self.process_group, is_lost=self._lost_group),
            "_hook": CopiedHook(self._hook),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        group = state.pop("process_group")
        super().__setstate__({**state, "_hook": state["_hook"].hook})
        self.process_group, self._lost_group = group.group, group.is_lost
        self._forwards, self._own = threading.RLock(), _OfThread()
        self._closed = True
        self._restore_sync()


def _refuse_frozen(module: nn.Module) -> None:
    """Raise a ValueError where there is nothing to train."""
    if not trained_parameters(module, without=ignored_names(module)).parameters:
        raise ValueError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters "
            "that require a gradient; call the module itself, or use DataParallel"
        )


def _refuse_outer(model: nn.Module) -> None:
    """Raise a RuntimeError in the forward of a ``DistributedDataParallel`` of torch around this.

    Its hooks on the parameters do not see the gradients that this wrapper delivers. At the end of
    backward it writes what it has seen over them: zeros. In a single process it does not.
    """
    outer = torch_internals.active_torch_wrapper()
    if outer is None or outer.process_group.size() == 1:
        return
    if any(part is model for part in outer.modules()):
        raise RuntimeError(
            "torch's DistributedDataParallel is around this wrapper, and would set all gradients "
            "to zero; leave that one out, since this wrapper reduces gradients over the processes "
            "itself. accelerate adds it in prepare(): call accelerator.prepare_model(model, "
            "evaluation_mode=True) for the model. Lightning adds it with strategy='ddp'"
        )
