"""The wrapper that trains a module on several devices from one process.

Note [Attributes of a wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Attributes that the wrapper lacks are read from its module, so they have to be written there, too. A
new head that only the wrapper had would be read back, and neither run, trained nor saved. The
wrapper's own are those that it has when its module is set, and those of its class. All others are
the module's, and so is each module, parameter and buffer: the wrapper has no state.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

import torch
from torch import Tensor, nn

from dataparallel import torch_internals
from dataparallel.batch.gather import (
    Notes,
    Scalars,
    ScalarsOption,
    gather,
    gather_outputs,
    gather_result,
    has_scalars,
    nothing_to_split,
    weigh_chunks,
)
from dataparallel.batch.scatter import (
    TARGETS,
    BatchSplitter,
    Leaf,
    ScatterPlan,
    execute,
    move,
    plan_scatter,
    watch,
)
from dataparallel.batch.tree import flatten
from dataparallel.comm.copy_check import check_copies
from dataparallel.devices import (
    DeviceLike,
    accelerators,
    describe_imbalance,
    parse_device,
    parse_devices,
    parse_output_device,
)
from dataparallel.errors import add_note, chosen, listed
from dataparallel.graph.functions import refuse_tangents
from dataparallel.parallel.buffers import BufferPolicy, runs_by_itself
from dataparallel.parallel.loss import Loss, Weight, arguments
from dataparallel.parallel.runner import Runner
from dataparallel.parallel.state_names import finish_state, load_state
from dataparallel.parallel.training import Reduction, Training
from dataparallel.replicas.clones import (
    Parts,
    Result,
    check_placement,
    is_model_parallel,
    left_elsewhere,
    place,
)
from dataparallel.replicas.spread import was_spread
from dataparallel.threads.timeline import Timeline, mark_backward
from dataparallel.torch_internals import untraced

if TYPE_CHECKING:
    from dataparallel.pool import Pool

ModuleT = TypeVar("ModuleT", bound=nn.Module)
OutputDevice = DeviceLike | Literal["each"] | None

_log = logging.getLogger("dataparallel")
# Layers that take an input of two dimensions for one sequence without a batch.
_OF_SEQUENCES = (
    *(nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder),
    *(nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


class _Forward(functools.partial[Any]):
    """A wrapper's ``forward``, which shows what the module's takes; a descriptor, as functions."""

    # The compiler comes by here before it comes to the function.
    @untraced
    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self.func if wrapper is None else _Forward(self.func, wrapper)

    @property
    def __signature__(self) -> inspect.Signature:
        # Trainers ask which arguments they may give.
        return inspect.signature(self.args[0].module.forward)


class Chunks(NamedTuple):
    """The arguments of the replicas in one forward."""

    args: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    #: Number of samples per replica.
    sizes: tuple[int, ...]
    #: The reason why the samples were not counted, if they could not be; each chunk counts 1 then.
    fault: str = ""
    #: Objects that all replicas get.
    shared: Sequence[Leaf] = ()


class DataParallel(nn.DataParallel[ModuleT]):
    """A wrapper that runs a module on several devices at once, each on its part of the batch.

    Outputs, gradients of any order and updates are those of the bare module on the whole batch. The
    optimizer gets the module's own parameters. There is no launcher and no process group. For code
    that asks by ``isinstance`` it is a ``torch.nn.DataParallel``.

    Example::

        model = DataParallel(net)                     # or device_ids=["cpu", "cpu"]
        criterion(model(x), y).backward()             # or model.loss(criterion, x, y).backward()

    Args:
        module: The module. The constructor moves it from the CPU to the first device, in place, as
            ``module.to`` does. Parameters on another accelerator raise an error at the first call.
        device_ids: One device per replica: ints, strings or ``torch.device``, repeats allowed.
            Default: every accelerator; without accelerators, one replica on the CPU.
        output_device: The device of the gathered outputs; ``-1`` is the CPU. With ``"each"`` it
            returns a list, each replica's output on its own device. Default: the first device.
        dim: The batch dimension of inputs and outputs. Default: 0.
        buffers: The buffers that the module keeps after a forward: ``"replica0"`` (default),
            ``"mean"`` or ``"sync"``; see :data:`dataparallel.parallel.buffers.BufferPolicy`.
        scalars: The way to join 0-d outputs, such as a loss. ``"stack"`` (default): a vector with
            one element per replica, as in torch. ``"mean"``: one scalar, weighted by samples.
            ``"sum"``: their sum. A function of a chunk's arguments that returns its weight in the
            mean, such as the number of labels. It is a number or a 0-d tensor (for which the host
            waits). If it returns None for all chunks, the wrapper adds the outputs.
        in_dims: Batch dimension per argument, by keyword name or position; ``None`` gives the
            argument whole to each replica. ``"samples"``: a list, an array or an object with one
            entry per sample is divided. ``"targets"`` names those of :meth:`loss`, too. Example:
            ``{"mask": None, 1: 1, "captions": "samples"}``.
        out_dims: Batch dimension of outputs if it is not ``dim``. It is an int, or a tuple, list or
            dict with an entry for each part of the output. An example is ``(0, 1)`` for
            ``nn.LSTM(batch_first=True)``, whose states have the batch in dim 1. ``None``: the part
            belongs to no sample, and the call returns that of replica 0. ``"samples"``: it has one
            entry per sample. ``"sum"``: the numbers or tensors of the replicas are added.

    Attributes:
        timeline: Tells listeners in which phase the replicas are.
        module: The wrapped module. The wrapper has its attributes and the names of its state;
            ``load_state_dict()`` takes names with a ``module.`` prefix, too.
        device_ids: The device of each replica.

    Raises:
        TypeError: A device or an option has the wrong type.
        ValueError: A device does not exist, or an option has an unknown value.
    """

    module: ModuleT
    # Attributes of `options` that are the wrapper's, too.
    _SHOWN_OPTIONS: frozenset[str] = frozenset()
    # True if a single replica may be on several devices itself.
    _MAY_BE_MODEL_PARALLEL = False
    # The attributes that belong to one wrapper alone, and a copy makes anew.
    _NOT_COPIED: tuple[str, ...] = ("_runner", "timeline", "_splitter", "_notes")

    def __init__(
        self,
        module: ModuleT,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: OutputDevice = None,
        dim: int = 0,
        *,
        buffers: BufferPolicy = "replica0",
        scalars: ScalarsOption = "stack",
        in_dims: Mapping[str | int, Any] | None = None,
        out_dims: Any = None,
    ) -> None:
        check_module(module)
        nn.Module.__init__(self)
        devices = parse_devices(device_ids)
        if device_ids is None and not accelerators():
            _log.warning(
                "no accelerator was found: one replica on the CPU; ask for more with "
                'device_ids=["cpu", "cpu"], one entry per replica'
            )
        check_copies(devices)
        _warn_of(module, type(self).__name__)
        imbalance = describe_imbalance(devices)
        if imbalance:
            _log.warning(
                "the slowest or smallest device sets the pace: %s. Leave it out of device_ids, or "
                "let dataparallel.balance(model) give it fewer samples",
                imbalance,
            )
        hooks: Any = self
        hooks.register_state_dict_post_hook(finish_state)
        hooks.register_load_state_dict_post_hook(DataParallel._finish_load)
        self.device_ids: list[torch.device] = list(devices)  # type: ignore[assignment]
        # A torch.device, or "each"; torch declares an int.
        self.output_device: Any = (
            "each" if output_device == "each" else parse_output_device(output_device, devices[0])
        )
        self.src_device_obj = devices[0]
        self.dim = dim
        self.buffer_policy = chosen("buffers", buffers, get_args(BufferPolicy))
        if not callable(scalars):
            chosen("scalars", scalars, get_args(Scalars), "a function that gives a chunk's weight")
        self.scalars = scalars
        self.in_dims = dict(in_dims or {})
        self.out_dims = out_dims
        if len(devices) > 1 and dim == 0:
            _warn_of_time_first(module)
        self._begin_life()
        self._is_model_parallel = (
            self._MAY_BE_MODEL_PARALLEL
            and len(devices) == 1
            and is_model_parallel(module)
            and not was_spread(module)
        )
        # Last: without a module, all that is set is the wrapper's own.
        self.module = module
        if not self._is_model_parallel:
            place(module, devices)

    def _begin_life(self) -> None:
        """Make what no copy takes over."""
        self.timeline = Timeline(self.device_ids)
        self._runner = Runner(self.device_ids, self.buffer_policy, self.timeline)
        self._splitter: BatchSplitter | None = None
        self._notes = Notes()

    # --- forward ---------------------------------------------------------------------------

    @_Forward
    @untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split the inputs, run the replicas, gather their outputs.

        Args:
            inputs, kwargs: Arguments of the module. Tensors in them are split along ``dim``, lists
                as ``in_dims`` says; everything else goes to each replica.

        Returns:
            The outputs in the structure that the module returns, on ``output_device``.

        Raises:
            ValueError: The inputs cannot be split, a list may hold samples or not, or the module is
                not on the first device.
            RuntimeError: The forward wrote parameters in place, a ``torch.func`` transform is
                active around several replicas, or the wrapper is traced or exported.
        """
        several = len(self.device_ids) > 1
        if torch.compiler.is_exporting() or (several and torch_internals.tracing_state()):
            self.__prepare_scriptable__()
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            return self._call(inputs, kwargs)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse to be exported, traced or scripted; ``torch.jit.script`` calls it first."""
        raise RuntimeError(
            f"a {type(self).__name__} was to be exported, traced or scripted, which cannot follow "
            "replicas in threads; export the module, which has the weights: .module"
        )

    def _call(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss | None = None
    ) -> Any:
        """Run one forward within all that surrounds it."""
        watching = nullcontext() if self._splitter is None else self._splitter.watching()
        with self._begin() as reduction:
            try:
                with watching:
                    result = self._run(inputs, kwargs, loss, reduction)
            except RuntimeError as error:
                if "on the same device" in str(error):
                    _name_left_elsewhere(error, self.module, self.device_ids[0])
                raise
            if self.timeline.listeners and (reduction is None or reduction.training.direct):
                # No cut tells of the backward.
                mark_backward(self.timeline, flatten(result)[0])
            return result

    def _begin(self) -> AbstractContextManager[Reduction | None]:
        """Surround one forward, and say how its gradients are reduced; None: not at all."""
        return nullcontext()

    def _run(
        self,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: Loss | None,
        reduction: Reduction | None,
    ) -> Any:
        """Run one forward: batch -> chunks -> clones -> threads -> cut -> gathered, or the loss."""
        module, runner, timeline = self.module, self._runner, self.timeline
        direct = self._is_direct() if reduction is None else reduction.training.direct
        if not direct and torch_internals.forward_mode_level() >= 0:
            _refuse_tangents_of(module, (inputs, kwargs))
        with timeline.span("scatter"), runner.quiet():
            chunks = self._split(inputs, kwargs)
        if timeline.listeners:
            timeline.call(chunks.sizes)
        if direct and loss is None:
            with timeline.span("forward"):
                output = module(*chunks.args[0], **chunks.kwargs[0])
            return self._gather_outputs([output])
        with timeline.span("scatter"):
            weights = self._weigh(chunks, loss, reduction)
            args, named = chunks.args, chunks.kwargs
            if reduction is not None:
                args, named = reduction.begin(args, named)
            criteria = [] if loss is None else self._criteria(loss, len(args))
            recorder = None if reduction is None else reduction.training.recorder
            replicas: Sequence[Any] = [module]
            if not direct:
                replicas = self._replicas(len(args), defers=recorder is None)
            called = replicas
            if reduction is not None and recorder is not None:
                called = recorder.replace(reduction.training.clones, replicas, args, named)
        with runner.using((module, replicas), (loss and loss.module, criteria)) as used:
            shared = watch(chunks.shared) if chunks.shared else nullcontext()
            with shared, used[0].watching() if used else nullcontext():
                if loss is None:
                    outputs = self.parallel_apply(called, args, named)
                else:
                    each = zip(called, criteria, args, named, chunks.sizes, strict=True)
                    outputs = runner.run([functools.partial(loss, timeline, *one) for one in each])
            found = runner.check(used, chunks.sizes, reduction.inputs if reduction else ())
            with timeline.span("gather"):
                weights = weights or self._weigh(chunks, loss, reduction, (outputs[0], found))
                scalars, counts = weights or ("stack", chunks.sizes)
                outputs = _beside(outputs, found) if found else outputs
                if reduction is not None:
                    outputs = reduction.end(outputs, counts)
                results: dict[int, Tensor] = {}
                if found:
                    rule = weights if loss is None else None
                    outputs, results = self._gather_results(chunks, found, outputs, rule)
                for clones in used:
                    clones.commit(results)
                if loss is not None:
                    return loss.combine(outputs)
                with runner.quiet():
                    sizes = None if chunks.fault else chunks.sizes
                    return self._gather_outputs(outputs, scalars, counts, sizes)

    def _is_direct(self) -> bool:
        """True if, without a reducer, the module itself runs and no clone."""
        if len(self.device_ids) > 1 or not runs_by_itself(self.module):
            return False
        check_placement(self.module, self.device_ids[0])
        return True

    @property
    def _training(self) -> Training | None:
        """The object that reduces gradients and keeps the replicas; None without a reducer."""
        return None

    # --- the steps of a forward, which torch lets the user override ------------------------------

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        device_ids: Sequence[DeviceLike],
    ) -> Any:
        """Positional and keyword arguments of each replica; override to split in another way."""
        chunks = self._chunks(inputs, kwargs or {}, parse_devices(device_ids))
        return chunks.args, chunks.kwargs

    def _split(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Chunks:
        """Return the chunks of one forward."""
        if getattr(self.scatter, "__func__", None) is DataParallel.scatter:
            return self._chunks(inputs, kwargs, self.device_ids)
        args, keywords = self.scatter(inputs, dict(kwargs), self.device_ids)
        if self._training is not None and not self._training.direct:
            self._training.fits(self.module)
        return self._counted(args, keywords)

    def _chunks(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Sequence[torch.device]
    ) -> Chunks:
        if len(devices) == 1:
            device = None if self._is_model_parallel else devices[0]
            return self._counted([move(inputs, device)], [move(dict(kwargs), device)])
        if isinstance(self.module, _OF_SEQUENCES):
            _refuse_unbatched(self.module, inputs)
        plan = self._plan(inputs, kwargs, len(devices))
        if plan.batch_size is None and (inputs or kwargs):
            raise ValueError(
                f"{nothing_to_split((*inputs, *kwargs.values()))}; give at least one "
                'with a batch dimension, say "samples" through in_dims of a list, an array or an '
                "object with one entry per sample, or call .module, which splits nothing"
            )
        shared = plan.by_action.get("unknown", ()) if len(plan.sizes) > 1 else ()
        own, named = zip(*execute(plan, devices), strict=True)
        return Chunks(own, named, plan.sizes, shared=shared)

    def _plan(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], num_slots: int
    ) -> ScatterPlan:
        in_dims: dict[str | int, Any] | None = None
        if self.in_dims:
            # Inputs that are given by position have their entries by position.
            names = list(inspect.signature(self.module.forward).parameters)[: len(inputs)]
            places: dict[Any, int] = {name: i for i, name in enumerate(names)}
            in_dims = {places.get(key, key): dim for key, dim in self.in_dims.items()}
            if TARGETS in kwargs and "targets" in self.in_dims:
                in_dims[TARGETS] = self.in_dims["targets"]
        splitter = self._splitter if num_slots > 1 else None
        chunk_sizes = None if splitter is None else splitter.chunk_sizes
        known = self._notes.no_samples
        return plan_scatter(inputs, kwargs, num_slots, self.dim, chunk_sizes, in_dims, known)

    def _counted(self, args: Sequence[Any], kwargs: Sequence[Any]) -> Chunks:
        """Chunks that no plan has made; a plan of each tells its number of samples."""
        sizes, fault = [], ""
        for own, named in zip(args, kwargs, strict=True):
            size = None
            try:
                size = self._plan(own, named, 1).batch_size
                if size is None and (own or named):
                    fault = nothing_to_split((*own, *named.values()))
            except (TypeError, ValueError) as error:
                fault = str(error)
            sizes.append(1 if size is None else size)
        return Chunks(args, kwargs, tuple(sizes), fault)

    def replicate(self, module: ModuleT, device_ids: Sequence[DeviceLike]) -> list[ModuleT]:
        """Return the clones that run the next forward; override to change them."""
        return self._lend(module, len(device_ids))

    def _replicas(self, count: int, *, defers: bool) -> Sequence[Any]:
        """Return the clones of one forward, to which values may be on their way."""
        if getattr(self.replicate, "__func__", None) is DataParallel.replicate:
            return self._lend(self.module, count, defers=defers)
        return self.replicate(self.module, self.device_ids[:count])

    def _lend(self, module: ModuleT, count: int, *, defers: bool = False) -> list[ModuleT]:
        training = self._training
        standing = None if training is None else training.clones
        return self._runner.lend(module, count, standing, defers=defers)

    def parallel_apply(
        self, replicas: Sequence[ModuleT], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica with its arguments, in the replicas' threads."""
        return self._runner.run(
            [
                functools.partial(replica, *args, **keywords)
                for replica, args, keywords in zip(replicas, inputs, kwargs, strict=True)
            ]
        )

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Put the outputs of the replicas together; override to do it in another way."""
        # It does not know the weights of chunks in a mean.
        scalars: Scalars = "sum" if self.scalars == "sum" else "stack"
        return gather(outputs, output_device, self.dim, scalars=scalars, out_dims=self.out_dims)

    def _criteria(self, loss: Loss, count: int) -> Sequence[Any]:
        """Return the criterion of each replica; a clone if it is a module."""
        if loss.module is None or count == 1:
            return [loss.criterion] * count
        return self._runner.lend(loss.module, count)

    def _weigh(
        self, chunks: Chunks, loss: Loss | None, reduction: Reduction | None, outputs: Any = None
    ) -> tuple[Scalars, Sequence[float]] | None:
        """Return how 0-d outputs are put together, and what each chunk counts.

        A function of the user, which may wait for the device, is for 0-d outputs alone. So it is
        asked before the forward if such a call has had some; else afterwards, if there are some.
        """
        weighs = reduction is not None and reduction.weight is None
        rule = self.scalars if loss is None else "stack"
        kind = len(chunks.args[0]), *chunks.kwargs[0]
        if callable(rule) and not weighs and kind not in self._notes.with_scalars:
            if outputs is None or not has_scalars(outputs):
                return None
            self._notes.with_scalars.add(kind)
        return weigh_chunks(rule, *chunks[:4], weighs=weighs)

    def _gather_outputs(
        self,
        outputs: Sequence[Any],
        scalars: Scalars = "stack",
        counts: Sequence[float] = (),
        sizes: Sequence[int] | None = None,
    ) -> Any:
        """Return the outputs of one forward, as the caller gets them."""
        if len(self.device_ids) == 1:
            if self.output_device == "each":
                return outputs
            return move(outputs[0], None if self._is_model_parallel else self.output_device)
        if getattr(self.gather, "__func__", None) is not DataParallel.gather:
            return self.gather(outputs, self.output_device)
        weights = counts if scalars == "mean" else ()
        dims = self.dim, self.out_dims
        return gather_outputs(
            outputs, self.output_device, *dims, scalars, weights, sizes, self._notes
        )

    def _gather_results(
        self,
        chunks: Chunks,
        found: Sequence[Result],
        rows: Sequence[Any],
        weights: tuple[Scalars, Sequence[float]] | None,
    ) -> tuple[list[Any], dict[int, Tensor]]:
        """Return the outputs, and the module's results by the ids of the tensors of replica 0.

        ``rows`` are what :func:`_beside` has made, as the cut has returned them; ``weights`` tell
        how 0-d outputs are put together, and what each chunk counts, where that is known.
        """
        outputs, *columns = map(list, zip(*rows, strict=True))
        tensors = [[tensor for part in column for tensor in part] for column in columns]
        if len(self.device_ids) == 1:
            gathered = [column[0] for column in tensors]
        else:
            if weights is None and has_scalars(tensors):
                named = _without_targets(chunks.kwargs)
                own = chunks.args, named, chunks.sizes
                weights = weigh_chunks(self.scalars, *own, weighs=False)
            rule = weights or ("stack", chunks.sizes)
            with self._runner.quiet():
                gathered = [
                    gather_result(one.path, column, self.dim, chunks.sizes, *rule)
                    for one, column in zip(found, tensors, strict=True)
                ]
        firsts = [id(one.tensors[0]) for one in found]
        return outputs, dict(zip(firsts, gathered, strict=True))

    # --- loss ------------------------------------------------------------------------------

    @untraced
    def loss(
        self,
        criterion: Callable[..., Any],
        inputs: Any,
        targets: Any,
        *,
        weight: Weight | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch, computed on the devices of the outputs.

        Result and gradients are those of ``criterion(module(inputs), targets)``: only losses are
        gathered, and each is weighted by what the criterion divides by in its chunk.

        Example::

            model.loss(nn.CrossEntropyLoss(ignore_index=0), x, y).backward()
            model.loss(my_loss, x, y, weight="samples").backward()

        Args:
            criterion: A loss of ``torch.nn`` or ``torch.nn.functional`` (or a ``partial`` of one),
                or any callable that returns a 0-d tensor, with ``weight``.
            inputs: The module's argument; a tuple is unpacked, a dict gives keyword arguments.
            targets: Further arguments of the criterion, in the same manner; split along ``dim``.
            weight: How much a chunk's loss counts, for criteria that are not known:
                ``"samples"`` or a function of the criterion's arguments. Default: the criterion's
                own denominator.

        Returns:
            A 0-d tensor on the output device (one loss per sample for ``reduction="none"``).

        Raises:
            ValueError: ``weight`` is missing for an unknown criterion; or as :meth:`forward`.
        """
        args, kwargs = arguments(inputs)
        target = self.device_ids[0] if self.output_device == "each" else self.output_device
        loss = Loss(criterion, weight, self.dim, target)
        record = torch.autograd.profiler.record_function("DataParallel.loss")
        with record:
            result: Tensor = self._call(args, {**kwargs, TARGETS: targets}, loss)
            return result

    # --- what the wrapper shows of the module --------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters under the module's own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the module's buffers under the module's own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *found: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, *found)
        load_state(self.module, DataParallel, state_dict, prefix, local_metadata, *found)
        # Torch goes on to the children of the wrapper.
        self._modules, self._loaded = {}, self._modules

    def _finish_load(self, _: Any) -> None:
        self._modules = self._loaded

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self._SHOWN_OPTIONS:
                return getattr(self.__dict__["options"], name)
            module = self.__dict__.get("_modules", {}).get("module")
            for owner in (self, module):
                # Torch says that there is no such attribute if a property has failed.
                found = inspect.getattr_static(type(owner), name, None)
                if isinstance(found, property):
                    return found.__get__(owner)
            if module is None:
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # See Note [Attributes of a wrapper].
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or name == "module":
            super().__setattr__(name, value)
            return
        if name in self._SHOWN_OPTIONS:
            raise AttributeError(
                f"{name!r} is an option of {type(self).__name__}; pass it to the constructor"
            )
        if name in self.__dict__ or hasattr(type(self), name):
            if _is_part(value):
                raise AttributeError(
                    f"{type(self).__name__} has {name!r} itself, which is no part that learns; "
                    f"set the module's: .module.{name} = ..."
                )
            # Torch would look for parts of this name before.
            object.__setattr__(self, name, value)
        elif hasattr(type(module), name) or hasattr(module, name):
            kind = type(self)
            if not kind.__init__.__module__.startswith("dataparallel."):
                raise AttributeError(
                    f"{name!r} may be of {kind.__name__}, which has a constructor of its own, or "
                    f"of its module: set .module.{name}, or give the class {kind.__name__} an "
                    f"attribute {name} = None to keep it there"
                )
            setattr(module, name, value)
        elif _is_part(value):
            setattr(module, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._modules or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def extra_repr(self) -> str:
        """Return the devices, and the options that differ from the default, for the constructor."""
        shown = {"device_ids": f"[{', '.join(map(str, self.device_ids))}]"}
        for name, value in self._given().items():
            shown[name] = getattr(value, "__name__", None) or repr(value)
        return ", ".join(f"{name}={text}" for name, text in shown.items())

    def _given(self) -> dict[str, Any]:
        """Return the options that are not the default."""
        output = self.output_device
        options = {
            "output_device": None if output == self.device_ids[0] else output,
            "dim": self.dim,
            "buffers": self.buffer_policy,
            "scalars": self.scalars,
            "in_dims": self.in_dims or None,
            "out_dims": self.out_dims,
        }
        return not_default(DataParallel.__init__, options)

    # --- other replicas --------------------------------------------------------------------------

    def drop_replica(self, index: int) -> None:
        """Train with one replica less from the next forward on; the others take its samples.

        Replicas after it move up by one. Other processes need not do the same. It comes between two
        steps: the backward of a forward before it is an error in :class:`DistributedDataParallel`.

        Example::

            model = dataparallel.DataParallel(net, ["cpu", "cpu", "cpu"])
            model.drop_replica(1)

        Args:
            index: The index of the replica, from 1 on. Replica 0 stays: the module's own parameters
                and the state of the optimizer are on its device.

        Raises:
            ValueError: There is no such replica, or it is replica 0.
        """
        number = len(self.device_ids)
        if index not in range(1, number):
            raise ValueError(
                f"there are {number} replicas, of which all but replica 0, which has the module's "
                f"own parameters, can be dropped; but got {index!r}"
            )
        self._keep_replicas([i for i in range(number) if i != index])

    def add_replica(self, device: DeviceLike) -> None:
        """Train with one replica more, the last one; as :meth:`drop_replica`, between two steps.

        Example::

            model = dataparallel.DataParallel(net, ["cpu", "cpu"])
            model.add_replica("cpu")

        Args:
            device: The device on which it computes; a device may have several replicas.

        Raises:
            TypeError: ``device`` is of another type.
            ValueError: There is no such device, or the module is on several devices itself.
        """
        if self._is_model_parallel:
            raise ValueError(
                "the layers of the module are on several devices, so it is one replica and there "
                "can be no other"
            )
        self._keep_replicas(range(len(self.device_ids)), [parse_device(device)])

    def _keep_replicas(self, kept: Sequence[int], new: Sequence[torch.device] = ()) -> None:
        """Let the replicas be some of those that there are, and new ones after them."""
        devices = [*(self.device_ids[index] for index in kept), *new]
        self.device_ids = devices
        self._runner.close()
        self._runner = Runner(devices, self.buffer_policy, self.timeline, self._runner)
        self.timeline.use_devices(devices, [*kept, *(None for _ in new)])
        if self._training is not None:
            self._training.use_runner(self._runner)

    # --- single items -----------------------------------------------------------------------------

    def pool(self, **options: Any) -> Pool:
        """Return a pool that calls this wrapper's replicas with items, each on a free device.

        The replicas are up to date, and need no further copies. Train when the pool is idle.

        Example::

            model.eval()
            with model.pool() as pool:
                for output in pool.map(x for x, _ in loader):
                    ...

        Args:
            options: Those of :class:`dataparallel.Pool`.

        Returns:
            A pool; leave its ``with`` block, or close it, to end its threads.

        Raises:
            ValueError: As :class:`dataparallel.Pool` does.
        """
        # Imported late: few need one.
        from dataparallel.pool import Pool

        return Pool(self, **options)

    @contextmanager
    def _lend_to_pool(self) -> Iterator[Sequence[Callable[..., Any]]]:
        """Give the replicas, up to date, for as long as a pool uses them."""
        with torch.inference_mode(False), torch.no_grad():
            replicas = self._replicas_as_they_are()
        with self._runner.using((self.module, replicas)) as used:
            try:
                yield replicas
            finally:
                for clones in used:
                    clones.discard()

    def _replicas_as_they_are(self) -> Sequence[Callable[..., Any]]:
        """Return the module, or its clones, without asking any other process."""
        return [self.module] if self._is_direct() else self._lend(self.module, len(self.device_ids))

    # --- life ----------------------------------------------------------------------------------

    def _divide_by(self, splitter: BatchSplitter | None) -> None:
        """Let this one divide batches from now on; None for even chunks."""
        self._splitter = splitter

    def close(self) -> None:
        """End the worker threads. The wrapper can be used again; new threads start then."""
        self._runner.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in vars(self).items() if k not in self._NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # As in the constructor, the module comes last.
        super().__setstate__({**state, "_modules": {}})  # type: ignore[no-untyped-call]
        self._begin_life()
        self._modules = state["_modules"]


def check_module(module: object) -> None:
    """Raise a TypeError that says what is wrapped, unless it is a module."""
    if isinstance(module, nn.Module):
        return
    if isinstance(module, type) and issubclass(module, nn.Module):
        name = module.__name__
        raise TypeError(f"the wrapper takes a module, but got the class {name}; pass {name}(...)")
    raise TypeError(
        f"the wrapper takes a torch.nn.Module, but got {module!r} of type {type(module).__name__}"
    )


def _warn_of(module: nn.Module, name: str) -> None:
    """Say in the log why a wrapper of that name should be around something else."""
    if any(base.__name__ == "LightningModule" for base in type(module).__mro__):
        _log.warning(
            "Lightning's Trainer takes no wrapper of a LightningModule; give it the module and "
            "strategy=dataparallel.extras.lightning.Replicas(), or wrap the network inside"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        _log.warning(
            "the module of this %s is a wrapper itself (%s), and a second one divides and "
            "reduces for nothing; wrap what is in it: .module",
            name,
            type(module).__name__,
        )


def _is_part(value: object) -> bool:
    """True if a module registers such a value."""
    tensors = (nn.Parameter, nn.Buffer)
    return isinstance(value, nn.Module) or (
        isinstance(value, Tensor) and isinstance(value, tensors)
    )


def not_default(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a function that differ from their defaults."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if value != known[name].default}


def time_first_layers(module: nn.Module) -> list[str]:
    """Return the names of torch's layers in a module that have the batch in dim 1, not 0."""
    return [
        name or type(layer).__name__
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and not layer.batch_first
    ]


def _warn_of_time_first(module: nn.Module) -> None:
    found = time_first_layers(module)
    if found:
        _log.warning(
            "the module has layers with batch_first=False (%s), which take the batch in dim 1, and "
            "the wrapper splits dim 0 of the inputs; pass dim=1, or make the layers with "
            "batch_first=True, unless the module itself turns its inputs",
            listed(found),
        )


def _refuse_unbatched(module: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise a ValueError for one sequence without a batch dimension."""
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 2:
        raise ValueError(
            f"{type(module).__name__} takes an input of shape {tuple(inputs[0].shape)} for one "
            "sequence without a batch, which cannot be split over replicas; give it three "
            "dimensions, or call .module"
        )


def _refuse_tangents_of(module: nn.Module, inputs: Any) -> None:
    """Refuse forward-mode derivatives of the inputs, or of what a module holds."""
    held = *module.parameters(), *module.buffers(), *Parts(module).loose_tensors()
    refuse_tangents((*flatten(inputs)[0], *held))


def _name_left_elsewhere(error: RuntimeError, module: nn.Module, device: torch.device) -> None:
    """Add to torch's error on devices which tensors nobody has moved, if there are some."""
    left = left_elsewhere(module, device)
    if left:
        add_note(
            error,
            f"these attributes hold tensors that are no parts of the module, so that no replica "
            f"has its own: {listed(left)}; register them as submodules, parameters or buffers "
            "(what is not trained with requires_grad_(False))",
        )


def _beside(outputs: Sequence[Any], found: Sequence[Result]) -> list[Any]:
    """Per replica its output, and for each result a list with its tensor, if it has one."""
    return [(o, *[result.tensors[i : i + 1] for result in found]) for i, o in enumerate(outputs)]


def _without_targets(kwargs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keyword arguments of the module alone; the targets are the criterion's."""
    return [{k: v for k, v in one.items() if k != TARGETS} for one in kwargs]


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: OutputDevice = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    in_dims: Mapping[str | int, Any] | None = None,
    out_dims: Any = None,
) -> Any:
    """Run a module once on several devices, each on its part of the batch.

    Example::

        output = data_parallel(net, x, device_ids=["cpu", "cpu"])

    Args:
        module: The module, on the first device.
        inputs: Its argument, or a tuple of positional arguments; None for none.
        module_kwargs: Keyword arguments of the module.
        device_ids, output_device, dim, in_dims, out_dims: See :class:`DataParallel`.

    Returns:
        The result of :class:`DataParallel` for the same call.

    Raises:
        ValueError: As :class:`DataParallel` does.
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    devices = parse_devices(device_ids)
    # The wrapper moves the module to its only device; a function should not move its argument.
    check_placement(module, devices[0])
    wrapper = DataParallel(module, devices, output_device, dim, in_dims=in_dims, out_dims=out_dims)
    try:
        return wrapper(*inputs, **(module_kwargs or {}))
    finally:
        wrapper.close()
