"""The wrapper with persistent replicas and a reducer, over local devices and processes.

Note [Copies of a wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy takes what describes the wrapper. Its replicas and links are made at its first forward, to
which all processes come; copying communicates with nobody. A copy within the process has the same
process group. A pickle cannot hold it: who loads one gets the default group. No copy has gradients,
since torch copies parameters without them, nor the communication hook, whose state belongs to the
buckets of one wrapper.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from dataparallel import torch_internals
from dataparallel.batch.gather import ScalarsOption, read_weight
from dataparallel.devices import DeviceLike, is_accelerator, parse_device
from dataparallel.errors import chosen
from dataparallel.graph.cut import NO_TASK
from dataparallel.optim.in_backward import InBackwardOptimizers, TorchsOptimizers
from dataparallel.parallel.buffers import BufferPolicy, send_buffers, send_states
from dataparallel.parallel.data_parallel import (
    DataParallel,
    OutputDevice,
    check_module,
    not_default,
)
from dataparallel.parallel.join import JoinBlock
from dataparallel.parallel.training import Reduction, Training
from dataparallel.reducer.nonfinite import SkippedSteps
from dataparallel.reducer.options import AverageKind, NonFiniteAction, Options, OriginalsKind
from dataparallel.reducer.parameters import (
    MixedPrecision,
    ignored_names,
    shared_tensors,
)
from dataparallel.reducer.processes import Progress, TrainingGroup, find_group
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.verify import check_replicas
from dataparallel.replicas.clones import is_model_parallel
from dataparallel.replicas.spread import gather

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.reducer.comm_hooks import ResolvedHook
    from dataparallel.reducer.logging_data import LoggingValue

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_STEPPED = "the parameters of this wrapper are stepped in backward already"


class _NextWeight(threading.local):
    """The weight of this process in the next forward of a thread that is reduced."""

    # None adds up the weights of its chunks.
    _value: float | None = None

    def give(self, weight: float) -> None:
        self._value = weight

    def take(self) -> float | None:
        weight, self._value = self._value, None
        return weight


class DistributedDataParallel(DataParallel[ModuleT], Joinable):
    """A wrapper that trains a module on the devices of this process and of all in a group.

    A process may have several devices, and a single process needs no process group. The replicas
    compute with parameters of their own. While backward still runs, the reducer adds their
    gradients bucket by bucket and all-reduces the buckets over the processes. It adds them to
    ``.grad`` of the module's own parameters. Within a context of
    :mod:`dataparallel.distributed_autograd` it adds them to the gradients of the context instead.
    Several threads may call the wrapper: forwards run one after another, one backward at a time.

    Example::

        model = DistributedDataParallel(net, device_ids=["cpu", "cpu"])
        model.loss(criterion, x, y).backward()

    Args:
        module: The module. The constructor moves it from the CPU to the first device, in place, as
            ``module.to`` does. Parameters on another accelerator raise an error.
        device_ids: One device per replica of this process, repeats allowed. Default: as for
            :class:`DataParallel`; if several processes share the machine, the module's own device.
            A module whose layers are on several devices is one replica, and stays where it is.
        process_group: The processes. Default: the default group. ``False``: this process trains
            alone, even if there is a group.
        bucket_cap_mb: Size of a bucket in MiB, or a list with one size per bucket. Default: 25 with
            several processes, 8 on the CPU; 4 with one process, which has nothing to send.
        find_unused_parameters: The default, ``None``, handles unused parameters without a flag.
            ``True`` and ``False`` mean the same as in torch.
        gradient_as_bucket_view: As in torch, with several processes. It saves a copy, but a
            reference to ``.grad`` that you keep shows the next step's gradients. Default: False.
        broadcast_buffers, init_sync, forward_sync_buffers, static_graph, bucket_cap_mb_list,
            delay_all_reduce_named_params, device_mesh: As in torch.
        mixed_precision: The dtypes of the replicas, see :class:`MixedPrecision`.
        param_to_hook_all_reduce, skip_all_reduce_unused_params, batched_grad_copy,
            lazy_bucket_allocation, check_reduction: Accepted for torch's sake, without effect.
        average: ``"processes"`` (default): the mean over processes, as in torch. ``"samples"``: a
            process counts by its samples, or by the weights of its chunks if ``scalars`` is a
            function. ``"none"``: the sum.
        deterministic: True if the reducer adds in rank order, so that the sum does not depend on
            ``bucket_cap_mb``. Not together with communication hooks. Default: False.
        timeout: Seconds that a collective waits for other processes. Default: the time limit of the
            process group.
        nonfinite: The action for a NaN or an infinity in a gradient of any replica of any process.
            ``"ignore"`` (default): nobody looks. ``"skip"``: ``.grad`` is None in all processes, so
            that an optimizer changes nothing, and the log has a warning. ``"raise"``: all processes
            raise :class:`~dataparallel.reducer.nonfinite.NonFiniteGradients`. Buffers stay as the
            forward left them.
        originals: The place of the module's parameters, their gradients and the state of their
            optimizers. ``"home"`` (default): the first device. ``"spread"``: each of the devices
            has a part of them, so that none has to hold all, see "Spread originals" in the
            documentation. The module cannot run by itself then.
        capture: True to record each replica's forward and backward in CUDA graphs, which launch all
            kernels at once: for models that wait for the host. The module reads nothing back, has
            no hooks, and gets few shapes of inputs. Otherwise its forward raises a RuntimeError or
            runs as usual, see "CUDA graphs" in the documentation. Default: False.
        output_device, dim, buffers, scalars, in_dims, out_dims: See :class:`DataParallel`.

    Attributes:
        reducer: The reducer, see :class:`dataparallel.reducer.reducer.Reducer`.

    Raises:
        ValueError: An option has an unknown value, options contradict each other, no parameter
            requires grad, or processes have different modules.
        TypeError: A device or an option has the wrong type, or an option is misspelled.
        RuntimeError: A launcher has started several processes (``WORLD_SIZE``), and there is no
            process group; see ``process_group``.
    """

    _SHOWN_OPTIONS = frozenset({*Options.__dataclass_fields__, "process_group"}) - {
        *("delayed", "on_cpu", "sends_buffers", "forward_sync_buffers", "init_sync"),
    }
    _MAY_BE_MODEL_PARALLEL = True
    _NOT_COPIED = (
        *DataParallel._NOT_COPIED,
        *("_made", "_forwards", "_block", "_weight", "_hook", "device_mesh"),
    )
    # Made at the first use; a copy has none before, nor has a wrapper that was closed.
    _made: Training | None = None
    # Takes the place of the all-reduce; a copy has none.
    _hook: ResolvedHook | None = None
    # They take steps in backward.
    _optimizers: StepsInBackward | None = None
    # The block of `join()` under way, or the last one.
    _block: JoinBlock | None = None
    #: The mesh that was passed; a copy has none.
    device_mesh: Any = None
    #: True if the last forward's gradients are reduced; buffers are sent after such forwards.
    require_forward_param_sync = True

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
        originals: OriginalsKind = "home",
        capture: bool = False,
        buffers: BufferPolicy = "replica0",
        scalars: ScalarsOption = "stack",
        in_dims: Mapping[str | int, Any] | None = None,
        out_dims: Any = None,
    ) -> None:
        group = find_group(process_group, device_mesh)
        options = Options(
            bucket_cap_mb=bucket_cap_mb if bucket_cap_mb_list is None else bucket_cap_mb_list,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            delayed=frozenset(name for name, _ in delay_all_reduce_named_params or ()),
            average=chosen("average", average, get_args(AverageKind)),
            deterministic=deterministic,
            timeout=timeout,
            mixed_precision=MixedPrecision.of(mixed_precision),
            nonfinite=chosen("nonfinite", nonfinite, get_args(NonFiniteAction)),
            originals=chosen("originals", originals, get_args(OriginalsKind)),
            capture=capture,
            init_sync=init_sync,
        )
        if device_ids is None:
            device_ids = _default_devices(module, group.group)
        self.options, self.device_mesh = options, device_mesh
        self._group, self._skipped = group, SkippedSteps()
        dims: dict[str, Any] = {"in_dims": in_dims, "out_dims": out_dims}
        super().__init__(
            module, device_ids, output_device, dim, buffers=buffers, scalars=scalars, **dims
        )
        self._start(broadcast_buffers, forward_sync_buffers)

    def _start(self, broadcast: bool | None, forward_sync: bool | None) -> None:
        """See that all processes train the same; a collective call."""
        options = self.options
        _check_alone(self._group)
        ignored = ignored_names(self.module)
        named = self.module.named_parameters()
        if not any(p.requires_grad and name not in ignored for name, p in named):
            raise ValueError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters "
                "that require a gradient; call the module itself, or use DataParallel"
            )
        options.mixed_precision.convert_buffers(self.module)
        forwards = (broadcast if forward_sync is None else forward_sync) is not False
        self.options = replace(
            options,
            on_cpu=not is_accelerator(self.device_ids[0]),
            # As in torch, `forward_sync_buffers` says nothing of the constructor.
            sends_buffers=forwards or forward_sync is not None,
            forward_sync_buffers=forwards,
        )
        self._take_optimizers()
        processes = self._training.processes
        if processes is not None:
            processes.connect()
            if options.init_sync:
                send_states(self.module, 0, processes.buckets, buffers=self.options.sends_buffers)

    def _take_optimizers(self) -> None:
        """Take over what torch's ``_apply_optimizer_in_backward`` has left on the parameters."""
        left, before = TorchsOptimizers(self.module.parameters()), self._optimizers
        if left.found and left.found != getattr(before, "found", None):
            if isinstance(before, InBackwardOptimizers):
                raise RuntimeError(_STEPPED)
            self.options.allow_steps_in_backward()
            self._optimizers = left
            self._drop_training()

    def _begin_life(self) -> None:
        super()._begin_life()
        self._forwards, self._progress = threading.RLock(), Progress()
        #: True if the backward of the next forward is reduced over processes.
        self.require_backward_grad_sync = True
        self._weight, self._has_begun = _NextWeight(), False
        # The number of open blocks of `gather_originals()`.
        self._num_gathering = 0
        Joinable.__init__(self)

    # --- what it is trained with -----------------------------------------------------------------

    @property
    def _training(self) -> Training:
        """The current training; it has links to other processes once a forward has needed them."""
        if self._made is None:
            with self._forwards:
                return self._made or self._build()
        return self._made

    def _build(self) -> Training:
        """Make everything anew, for other processes, options or parameters.

        Buckets, too, since what was sent over links that are lost may still write to the old.
        """
        with self._forwards:
            before = self._made
            self._drop_training()
            made = Training(
                self.module,
                self.options,
                self._runner,
                self._group,
                self._progress,
                hook=self._hook,
                optimizers=self._optimizers,
                skipped=self._skipped,
                is_model_parallel=self._is_model_parallel,
            )
            if before is not None:
                made.reducer.go_on_from(before.reducer)
            self._made = made
            return made

    def _keep_replicas(self, kept: Sequence[int], new: Sequence[torch.device] = ()) -> None:
        before, after = set(self.device_ids), {*(self.device_ids[i] for i in kept), *new}
        shared = self._training.processes is not None
        if self.options.spreads and shared and len(before) != len(after):
            raise ValueError(
                f"originals='spread' has {len(before)} owners in every process, and this one would "
                f"have {len(after)}; make a new wrapper in all processes, or use originals='home'"
            )
        super()._keep_replicas(kept, new)

    def _drop_training(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The processes over which gradients are reduced; None if this one trains by itself."""
        return self._group.group

    @property
    def reducer(self) -> Reducer:
        """The reducer of the gradients, see :class:`dataparallel.reducer.reducer.Reducer`."""
        return self._training.reducer

    # --- forward ---------------------------------------------------------------------------------

    @contextmanager
    def _begin(self) -> Iterator[Reduction]:
        if not self._has_begun:
            # Since the constructor, too.
            self._take_optimizers()
            self._has_begun = True
        # The clones are there once, so forwards of several threads come one after another.
        with nullcontext() if self._training.direct else self._forwards:
            synchronizes, weight = self.require_backward_grad_sync, None
            reduces = synchronizes and torch.is_grad_enabled()
            if reduces:
                weight = self._weight.take() if self.options.average == "samples" else None
                # At the end of backward it would write zeros over the gradients that this wrapper
                # delivers, which its hooks do not see. In a single process it does not.
                outer = torch_internals.active_torch_wrapper()
                if outer and outer.process_group.size() > 1 and self in outer.modules():
                    raise RuntimeError(
                        "torch's DistributedDataParallel is around this wrapper, and would set all "
                        "gradients to zero; leave that one out, since this wrapper reduces "
                        "gradients over the processes itself. accelerate adds it in prepare(): "
                        "call accelerator.prepare_model(model, evaluation_mode=True) for the "
                        "model. Lightning adds it with strategy='ddp'"
                    )
            training = self._ready(reduces=reduces)
            if not reduces or self.options.average != "samples" or self._group.world_size == 1:
                # Nobody asks what the chunks count.
                weight = 1.0
            try:
                yield Reduction(training, weight, synchronize=synchronizes)
            except BaseException as error:
                if reduces and not isinstance(error, torch_internals.StopRecomputation):
                    training.tell(error)
                raise
            self._note_forward(reduces)

    def _replicas_as_they_are(self) -> Sequence[Callable[..., Any]]:
        with self._forwards:
            training = self._training
            if not training.fits(self.module):
                training = self._build()
            if training.direct:
                return [self.module]
            return self._lend(self.module, len(self.device_ids))

    def _ready(self, *, reduces: bool) -> Training:
        """Return the training of the next forward, made anew and connected if that is needed."""
        training = self._training
        _check_alone(self._group)
        shared = training.processes is not None
        block = self._block if shared and torch_internals.join_config(self).enable else None
        fits = block is not None or training.fits(self.module)
        # It is much quicker to see that nothing has changed than to look for buffers.
        may_send = shared and (block is not None or training.clones.has_buffers)
        sends = may_send and self.will_sync_module_buffers()
        needs_others = shared and (reduces or sends or block is not None)
        lost = shared and training.is_lost(needs_others=needs_others)
        if lost and training.processes is not None:
            training.processes.pay()
        if sends and block is None and not lost:
            # Another may be in a backward, and would take buffers for its buckets.
            lost = training.has_parted()
        if lost or not fits:
            training = self._build()
        processes = training.processes
        if processes is not None and needs_others:
            processes.connect()
            self._progress.check()
            source = 0 if block is None else block.notify(reduces=reduces)
            if block is not None and not training.fits(self.module):
                # All would be made anew, and those that have joined cannot know.
                error = RuntimeError(
                    "parameters of the module were replaced, or have another shape, dtype or "
                    "device, within a block of join(), and processes that have joined cannot do "
                    "the same. Replace parameters before the block, or after it in all processes; "
                    "p.data.copy_(...) changes values at any time"
                )
                training.tell(error)
                raise error
            if sends:
                # It begins the scattering of the next step, and waits for the slowest rank.
                with self.timeline.span("scatter"), self.timeline.span("reduce across processes"):
                    send_buffers(self.module, source, processes.buckets)
        if reduces:
            training.reducer.statistics.begin()
        return training

    def gather_originals(self, device: DeviceLike | None = None) -> AbstractContextManager[None]:
        """Bring the module's parameters to one device, so that it can run by itself.

        For ``originals="spread"``. The next forward of the wrapper spreads them again, and so does
        the end of a ``with`` block. Gradients come along, and states of optimizers at their next
        step. The device needs room for all of them.

        Example::

            with model.gather_originals():
                torch.onnx.export(model.module, (x,), "net.onnx")

        Args:
            device: The device. Default: the first one of the wrapper.

        Returns:
            A context manager, at whose end the parameters are spread again.

        Raises:
            RuntimeError: A backward is under way, or a forward of the wrapper.
            ValueError: The device does not exist, or parameters cannot be moved there in place.
        """
        # The replicas of a forward would wait for it, and that for them. Hooks run in a backward.
        in_backward = torch_internals.current_graph_task_id() != NO_TASK
        if in_backward or not self._forwards.acquire(blocking=False):
            raise RuntimeError(
                f"gather_originals() was called during a {'back' if in_backward else 'for'}ward, "
                "which needs the parameters where they are; call it between two steps"
            )
        try:
            gather(self.module, self.device if device is None else parse_device(device))
        finally:
            self._forwards.release()
        return self._spreading()

    @contextmanager
    def _spreading(self) -> Iterator[None]:
        """Spread the originals again at the end of the outermost ``with`` block."""
        self._num_gathering += 1
        try:
            yield
        finally:
            with self._forwards:
                self._num_gathering -= 1
                if not self._num_gathering:
                    self._training.bring_back()

    # --- what its users say ----------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of forwards within a ``with`` block to this process.

        They are reduced over processes with those of the first backward after the block. Gradients
        are summed over the local replicas in any case.
        """
        self._read_vote()
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def set_weight(self, weight: float) -> None:
        """Give this process's weight in ``average="samples"`` for the next forward that is reduced.

        Example::

            model.set_weight(num_tokens)
            loss = model.loss(criterion, x, y)

        Args:
            weight: Any finite number that is not negative, such as the number of tokens. Default,
                where this is not called: the number of samples, or the sum of the weights of the
                chunks if ``scalars`` is a function.

        Raises:
            ValueError: It is no such number, or ``average`` is another one.
        """
        average = self.options.average
        if average != "samples":
            raise ValueError(
                f"a weight counts with average='samples', but this wrapper has {average!r}"
            )
        self._weight.give(read_weight("set_weight()", weight))

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Let a hook reduce the buckets over the processes, in place of an all-reduce.

        The hook gets buckets that are summed over the local replicas. Hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` run unmodified. All processes register it;
        the next forward makes new links between them.

        Example::

            model.register_comm_hook(None, "bf16_compress")
            model.register_comm_hook(PowerSGDState(None), powerSGD_hook)

        Args:
            state: The first argument of the hook; for a name, the process group.
            hook: ``hook(state, bucket)`` that returns a future of the bucket's content; or
                ``"allreduce"``, ``"fp16_compress"``, ``"bf16_compress"`` or ``"noop"``.

        Raises:
            TypeError, ValueError: The hook cannot be one, or there is no process group; or it is
                one of PowerSGD, and ``nonfinite="skip"``.
            RuntimeError: There is a hook already.
        """
        # Imported late: it loads all hooks of torch.
        from dataparallel.reducer.comm_hooks import resolve_hook

        with self.reducer.noting_errors():
            resolved = resolve_hook(hook, state)
            if self._hook is not None:
                raise RuntimeError(
                    "register_comm_hook or register_builtin_comm_hook can only be called once"
                )
        resolved.check(self.options, self.process_group)
        self._hook = resolved
        self._build()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Let one of torch's hooks reduce the buckets; see :meth:`register_comm_hook`."""
        self.register_comm_hook(self.process_group, comm_hook_type)

    def step_in_backward(
        self, optimizer_class: type[torch.optim.Optimizer], **arguments: Any
    ) -> InBackwardOptimizers:
        """Take an optimizer's step for each bucket as soon as it is reduced, within backward.

        Gradients are freed at once, so they never take as much memory as the parameters. The
        wrapper finds the optimizers of torch's ``_apply_optimizer_in_backward`` without this.

        Example::

            optimizers = model.step_in_backward(torch.optim.SGD, lr=0.1)
            model.loss(criterion, x, y).backward()        # and that is the whole step

        Args:
            optimizer_class: One of ``torch.optim`` (not LBFGS), or derived from one.
            arguments: Its further arguments.

        Returns:
            The optimizers, for learning rate schedules and checkpoints.

        Raises:
            RuntimeError: There are such optimizers already.
            ValueError: The wrapper looks for gradients that are not finite.
        """
        if self._optimizers is not None:
            raise RuntimeError(_STEPPED)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        made = InBackwardOptimizers(optimizer_class, trained, **arguments)
        self.options.allow_steps_in_backward()
        self._step_with(made)
        return made

    def _step_with(self, optimizers: StepsInBackward | None) -> None:
        """Let optimizers take their steps in backward from now on, or none."""
        self._optimizers = optimizers
        self._build()

    def _set_static_graph(self) -> None:
        """Do as with ``static_graph=True``, before the first backward and in every process."""
        if self.options.static_graph:
            return
        with self.reducer.noting_errors():
            if self.reducer.num_rounds:
                raise RuntimeError(
                    "set_static_graph() must come before the first backward, but there were "
                    f"{self.reducer.num_rounds}; pass static_graph=True to the wrapper"
                )
        self.options = replace(self.options, static_graph=True)
        self._build()

    def check_replicas(self) -> None:
        """Compare parameters over replicas and processes, and buffers over processes, bit for bit.

        Every process calls it. Nothing but fingerprints travels as long as all are the same.

        Raises:
            ReplicaMismatch: Something differs; the message names tensors, replicas and ranks.
            RuntimeError: There are several processes, but the wrapper has no process group.
        """
        training = self._training
        _check_alone(self._group)
        if training.is_lost(needs_others=True) or training.has_parted():
            training = self._build()
        leaves, processes = training.leaves, training.processes
        # Deliberate changes are carried over first; that must not repair other changes.
        leaves.follow()
        leaves.values.carry()
        originals = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        names = [
            name if leaf.dtype == originals[name].dtype else f"{name} as {leaf.dtype}"
            for name, leaf in zip(originals, leaves.rows[0], strict=False)
        ]
        replicas = [{**originals, **dict(zip(names, row, strict=True))} for row in leaves.rows]
        link = None if processes is None else processes.control
        check_replicas(replicas[0], replicas[1:], link)
        self._progress.settle()

    def update_process_group(self, process_group: Any) -> None:
        """Reduce over other processes from now on; one that is not in the group keeps the old."""
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            return
        self._progress = Progress()
        group = find_group(process_group).group
        if self._hook is not None:
            self._hook.check(self.options, group)
        self._group = TrainingGroup(group)
        self._build()

    _update_process_group = update_process_group

    @property
    def num_skipped(self) -> int:
        """The number of backwards skipped with ``nonfinite="skip"``, the same in all processes.

        A learning rate schedule that is not to go on with a skipped step compares this number.
        """
        return self._skipped.count

    # --- the vote --------------------------------------------------------------------------------

    def _read_vote(self) -> None:
        """Raise if another process has failed in the last round; see Note [The vote]."""
        if self._made is not None:
            self._made.read_vote(needs_others=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state, without a ``module.`` prefix.

        Raises:
            CollectiveError: Another process has failed after the last backward of this one.
        """
        self._read_vote()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        processes = None if self._made is None else self._made.processes
        if processes is not None and (self._progress.doubt or processes.is_broken):
            # All processes load the same.
            self._progress.settle()

    # --- uneven inputs ---------------------------------------------------------------------------

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

        An optimizer with a state (momentum, Adam) needs ``step``. If it has made fewer steps, its
        state is another one, and the processes would go apart after the block. Or use one that
        joins itself, with torch's ``Join([model, optimizer])``. Each forward in the block is
        followed by one backward, unless it is under ``no_sync()`` or ``torch.no_grad()``.

        A module whose forward communicates, as a synchronized batch norm does in training, would
        wait for those that have joined: it needs ``throw_on_early_termination``.

        Args:
            divide_by_initial_world_size: True to divide gradients always by the number of all
                processes, with ``average="processes"``. False: by the number of those that have
                inputs, with communication hooks, too. Default: True.
            enable: True if inputs may be uneven at all. Default: True.
            throw_on_early_termination: True if all processes raise a RuntimeError as soon as one
                has no more. Default: False.
            step: Called in a process that has no more after each round of the others, with its
                gradients alone in ``.grad``, to do what the loop does then: clipping, the
                optimizer's step. Default: nothing is called.

        Returns:
            The context manager for the training loop.

        Raises:
            RuntimeError: At its end, or in a forward, with ``throw_on_early_termination``.
            CollectiveTimeout: Another process did not come in time.
        """
        processes = self._training.processes
        if processes is None or not enable:
            return nullcontext()
        block = self._make_block(divides=divide_by_initial_world_size, step=step)
        return block.run(throws=throw_on_early_termination)

    def _make_block(self, *, divides: bool, step: Callable[[], object] | None) -> JoinBlock:
        # Bound to this wrapper, the function would keep it.
        note = DistributedDataParallel._note_forward
        self._block = JoinBlock(self, note, divides=divides, step=step)
        return self._block

    def _note_forward(self, reduces: bool) -> None:
        """Note that this process, or another one while this one has joined, has made a forward."""
        if self.require_forward_param_sync is not reduces:
            self.require_forward_param_sync = reduces

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return torch's ``Join`` a hook for a process without more inputs; see :meth:`join`."""
        if self._training.processes is None:
            return JoinHook()
        divides = kwargs.get("divide_by_initial_world_size", True)
        return self._make_block(divides=divides, step=kwargs.get("step"))

    @property
    def join_device(self) -> torch.device:
        """A device whose tensors the process group takes."""
        taken = {device.type for device in torch_internals.group_devices(self.process_group)}
        return self.device if self.device.type in taken else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The processes that join."""
        return self.process_group

    # --- buffers ---------------------------------------------------------------------------------

    @property
    def forward_sync_buffers(self) -> bool:
        """True if the buffers of rank 0 are sent before forwards; may be set, in all processes."""
        return self.options.forward_sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.options = replace(self.options, forward_sync_buffers=value)

    # The older name.
    broadcast_buffers = forward_sync_buffers

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that each process keeps to itself."""
        return ignored_names(self.module)

    def will_sync_module_buffers(self) -> bool:
        """True if the next forward begins with the buffers of rank 0."""
        due = self.require_forward_param_sync and self.forward_sync_buffers
        return due and bool(shared_tensors(self.module, parameters=False))

    # --- further names of torch's wrapper --------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the module; the first one if its parameters are spread."""
        if self.options.spreads:
            return self.device_ids[0]
        return next(iter(self.module.parameters())).device

    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_internals.ignore_names)

    def get_ddp_logging_data(self) -> dict[str, LoggingValue]:
        """Return the wrapper's options, the state of its buckets, and measured times.

        The names are torch's. Lists are joined by ``", "``, truth values are 0 and 1, sizes are in
        bytes and times in nanoseconds. An index of -1 is the CPU. Accelerators are waited for, as
        far as something is measured there.

        Example::

            model.get_ddp_logging_data()["avg_backward_compute_comm_overlap_time"]
        """
        # Imported late: few ask.
        from dataparallel.collectives.batch_norm import SyncBatchNorm
        from dataparallel.reducer.logging_data import logging_data

        batch_norms = nn.SyncBatchNorm, SyncBatchNorm
        synchronized = any(isinstance(part, batch_norms) for part in self.module.modules())
        more: dict[str, LoggingValue] = {"has_sync_bn": int(synchronized)}
        if self._hook is not None:
            more["comm_hook"] = self._hook.name
        return logging_data(
            self.reducer,
            self.module,
            group=self.process_group,
            devices=[*self.device_ids, self.output_device],
            broadcast_buffers=int(self.forward_sync_buffers),
            join_uneven_inputs=int(self._block is not None),
            **more,
        )

    _get_ddp_logging_data = get_ddp_logging_data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure the first ten iterations, and then one in so many; 1 or more."""
        self.reducer.statistics.set_sample_rate(sample_rate)

    def _given(self) -> dict[str, Any]:
        shown = {n: value for n, value in vars(self.options).items() if n in self._SHOWN_OPTIONS}
        precision = shown["mixed_precision"]
        options = {
            "process_group": False if self._group.separate else None,
            **shown,
            "mixed_precision": None if precision == MixedPrecision() else precision,
        }
        return super()._given() | not_default(DistributedDataParallel.__init__, options)

    # --- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the worker threads, remove all hooks and give the process groups back.

        The wrapper can be used again; the next forward that reduces is a collective call then,
        like making it.
        """
        super().close()
        self._drop_training()


def _default_devices(
    module: nn.Module, group: dist.ProcessGroup | None
) -> Sequence[DeviceLike] | None:
    """Return the module's own device if others use the machine or it has several; None for all."""
    check_module(module)
    local = os.environ.get("LOCAL_WORLD_SIZE")
    others = group is not None and (int(local) if local else dist.get_world_size(group)) > 1
    if not others and not is_model_parallel(module):
        return None
    first = next(module.parameters(), None)
    return [torch.device("cpu") if first is None else first.device]


def _check_alone(group: TrainingGroup) -> None:
    """Refuse to train without a process group if there are several processes."""
    if group.separate or group.group is not None:
        return
    launched = os.environ.get("WORLD_SIZE", "")
    if dist.is_available() and dist.is_initialized():
        launched = str(dist.get_world_size())
    if launched.isdecimal() and int(launched) > 1:
        raise RuntimeError(
            f"this process is one of {launched}, but the wrapper has no group and "
            "would train by itself; call dp.init_process_group() before the module is wrapped, "
            "in every process, or pass process_group=False to train separately in each of "
            "them: nothing is reduced or compared between them then"
        )
