"""The wrapper that trains a module on several devices from one process."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from dataparallel.batch.chunk_sizes import BatchSplitter, ChunkSizesOf
from dataparallel.batch.joining import (
    Joining,
    ScalarsOption,
    check_scalars,
    count_samples,
    join_scalars,
    nothing_to_split,
    tell_of_dims,
    tell_of_vectors,
)
from dataparallel.batch.scatter_gather import ScatterPlan, gather, move, plan_scatter
from dataparallel.comm import interpreter_end
from dataparallel.devices import DeviceLike, accelerators, parse_devices, parse_output_device
from dataparallel.errors import suggesting
from dataparallel.parallel.buffers import BufferPolicy, check_policy
from dataparallel.parallel.criterion import PreparedCriterion, Weight, arguments, prepare
from dataparallel.parallel.engine import PerReplica, ReplicaEngine, guarded
from dataparallel.parallel.prefix import NamesOfModule
from dataparallel.parallel.replica_changes import ReplicaChanges
from dataparallel.parallel.replica_loss import LossCall
from dataparallel.parallel.signature import with_signature_of_module
from dataparallel.replicas.replicate import place
from dataparallel.threads.compiled import untraced
from dataparallel.threads.context import refuse_transforms
from dataparallel.threads.timeline import Timeline

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)
OutputDevice = DeviceLike | Literal["each"] | None

_log = logging.getLogger("dataparallel")
# The wrapper whose `loss` scatters, and how many of the inputs are its module's own; the others are
# targets. It is no argument of `scatter`, which keeps torch's for those who override it.
_scattering: ContextVar[tuple[object, int]] = ContextVar("scattering", default=(None, 0))


@suggesting
class DataParallel(NamesOfModule, nn.DataParallel[ModuleT], ReplicaChanges):
    """Run a module on several devices at once, each on its part of the batch.

    Outputs, gradients of any order and updates are those of the bare module on the whole batch. The
    optimizer gets the module's own parameters. The wrapper works in a notebook, and needs no
    launcher and no process group. It is a ``torch.nn.DataParallel`` for code that asks by
    ``isinstance``.

    Example::

        model = DataParallel(net)                     # or device_ids=["cpu", "cpu"]
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            loss = criterion(model(x), y)             # or model.loss(criterion, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        module: The module. The constructor moves it from the CPU to the first device, in place, as
            ``module.to`` does. Parameters on another accelerator raise an error at the first call.
        device_ids: One device per replica: ints, strings or ``torch.device``, repeats allowed.
            Default: every accelerator; without accelerators, one replica on the CPU.
        output_device: Where the wrapper gathers outputs; ``-1`` is the CPU. With ``"each"`` a call
            returns a list with the output of each replica on its own device. Default: the first
            device.
        dim: The batch dimension of inputs and outputs. Default: 0.
        buffers: Which buffers the module keeps after a forward: ``"replica0"`` (default),
            ``"mean"`` or ``"sync"``; see :data:`dataparallel.parallel.buffers.BufferPolicy`.
        scalars: What to make of 0-d outputs, such as a loss. ``"stack"`` (default): a vector with
            one element per replica, as in torch. ``"mean"``: one scalar, weighted by samples.
            ``"sum"``: their sum. A function: the wrapper calls it with the arguments of each chunk,
            and it returns the weight of the chunk in the mean, such as the number of labels, as a
            number or a 0-d tensor (for which the host waits). If it returns None for all chunks,
            the wrapper adds the outputs.
        in_dims: Batch dimension per argument, by keyword name or position; ``None`` gives the
            argument whole to each replica. Example: ``{"mask": None, 1: 1}``.
        out_dims: Batch dimension of outputs where it is not ``dim``: an int, or a tuple, list or
            dict with an entry for each part of the output. An entry for a container holds for
            everything in it. ``None`` for a part: the part belongs to no sample, and the call
            returns that of replica 0. Example: ``(0, 1)`` for ``nn.LSTM(batch_first=True)``, whose
            states have the batch in dim 1.
        split_lists: Whether to split lists without tensors, too, if their length is the batch size.
            Default: False.

    Attributes:
        timeline: Tells listeners in which phase the replicas are.
        module: The wrapped module. ``state_dict()`` and the names of parameters and buffers are
            the module's own. If the wrapper lacks an attribute, it looks it up on the module.
        device_ids: The device of each replica.

    Raises:
        TypeError: A device or an option has the wrong type, or an option is misspelled.
        ValueError: A device does not exist, or an option has an unknown value.
    """

    module: ModuleT

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
        split_lists: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self._give_names_back()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, but got {type(module).__name__}")
        devices = parse_devices(device_ids)
        if device_ids is None and not accelerators():
            _log.warning(
                "no accelerator was found: one replica on the CPU; ask for more with "
                'device_ids=["cpu", "cpu"], one entry per replica'
            )
        self.module = module
        self.device_ids: list[torch.device] = list(devices)  # type: ignore[assignment]
        # A torch.device, or "each"; torch declares an int.
        self.output_device: Any = (
            "each" if output_device == "each" else parse_output_device(output_device, devices[0])
        )
        self.src_device_obj = devices[0]
        self.dim = dim
        self.buffer_policy = check_policy(buffers)
        self.scalars = check_scalars(scalars)
        self._told_of_vectors = self._told_of_dims = False
        self.in_dims = dict(in_dims) if in_dims is not None else None
        self.out_dims = out_dims
        self.split_lists = split_lists
        self.timeline = Timeline(devices)
        self._engine = ReplicaEngine(devices, self.buffer_policy, timeline=self.timeline)
        self._splitter: BatchSplitter | None = None
        self._place(module, devices)

    def _place(self, module: ModuleT, devices: Sequence[torch.device]) -> None:
        place(module, devices)

    @property
    def _weighs(self) -> bool:
        """Whether it matters what this process's chunks count among those of other processes."""
        return False

    # --- forward ---------------------------------------------------------------------------

    @with_signature_of_module
    @untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Split the inputs, run the replicas, gather their outputs.

        Args:
            inputs: Positional arguments of the module; tensors in them, however nested, are split
                along ``dim``, everything else goes to each replica.
            kwargs: Keyword arguments of the module, treated alike.

        Returns:
            The outputs in the structure that the module returns, tensors concatenated along
            ``dim``, or as ``out_dims`` says, on ``output_device``.

        Raises:
            ValueError: The inputs cannot be split (no tensor, batch sizes that disagree, ``dim``
                out of range), or the module is not on the first device.
            RuntimeError: The forward wrote parameters in place, or a ``torch.func`` transform is
                active around several replicas.
        """
        interpreter_end.come_by()
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            refuse_transforms(len(self.device_ids))
            self._engine.check(self.module)
            return self._attempt(lambda: self._forward_once(inputs, kwargs), (inputs, kwargs))

    def _forward_once(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self.timeline.span("scatter"), self._engine.between_replicas():
            args, keywords = self.scatter(inputs, kwargs, self.device_ids)
        weighs = self._weighs
        must = weighs and not callable(self.scalars)
        sizes = self._sizes(args, keywords, len(inputs), must=must)
        self._begin_call(sizes)
        if self._engine.is_direct:
            return self._single(args[0], keywords[0])
        with self.timeline.span("scatter"):
            joining = join_scalars(self.scalars, args, keywords, sizes, weighs=weighs)
            call = self._engine.enter(args, keywords, joining.counts)
            replicas = self.replicate(self.module, self.device_ids[: len(args)])
        with self._engine.finishing(replicas, sizes), guarded(args):
            outputs = self.parallel_apply(replicas, call.args, call.kwargs)
        with self.timeline.span("gather"):
            outputs = call.leave(outputs)
            with self._engine.between_replicas():
                parts = PerReplica(outputs, sizes=sizes, joining=joining)
                result = self.gather(parts, self.output_device)
        return self._engine.leave(result)

    def _attempt(self, call: Callable[[], T], inputs: Any, criterion: nn.Module | None = None) -> T:
        if self._splitter is None:
            return call()
        return self._splitter.attempt(call, (self.module, criterion), inputs)

    def _use_devices(self, devices: Sequence[torch.device]) -> None:
        self._engine.close()
        self._engine = ReplicaEngine(devices, self.buffer_policy, timeline=self.timeline)

    def _begin_call(self, sizes: Sequence[int]) -> None:
        if self._splitter is None or not self._splitter.is_repeating:
            self.timeline.call(sizes)

    def _single(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.timeline.span("forward"):
            output = self.module(*args, **kwargs)
        result = [output] if self.output_device == "each" else move(output, self.output_device)
        return self._engine.leave(result)

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        device_ids: Sequence[DeviceLike],
    ) -> Any:
        """Split the arguments; override to split in another way.

        Returns:
            A sequence of positional arguments and one of keyword arguments, each with one entry
            per replica that takes part.
        """
        owner, num_own = _scattering.get()
        plan = self._plan(
            inputs,
            kwargs or {},
            num_own if owner is self else len(inputs),
            len(device_ids),
            None if self._splitter is None else self._splitter.chunk_sizes,
        )
        if plan.batch_size is None and (inputs or kwargs):
            raise ValueError(
                f"{nothing_to_split((*inputs, *(kwargs or {}).values()))}; give at least one "
                "with a batch dimension, or call .module, which splits nothing"
            )
        args, keywords = plan.execute(parse_devices(device_ids))
        positional = PerReplica(args, sizes=plan.sizes, shared=plan.shared())
        return positional, PerReplica(keywords, sizes=plan.sizes)

    def _plan(
        self,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_own: int,
        num_slots: int,
        chunk_sizes: ChunkSizesOf | None = None,
    ) -> ScatterPlan:
        """How arguments are split, of which ``num_own`` by position are the module's."""
        in_dims = self._in_dims_of(num_own, kwargs)
        return plan_scatter(
            inputs, kwargs, num_slots, self.dim, chunk_sizes, in_dims, self.split_lists
        )

    def _sizes(
        self, args: Sequence[Any], kwargs: Sequence[Any], num_own: int, *, must: bool
    ) -> tuple[int, ...]:
        """Number of samples of each replica, from the plan or else from a plan of each chunk."""
        sizes: tuple[int, ...] | None = getattr(args, "sizes", None)
        if sizes is not None and len(sizes) == len(args):
            return sizes
        return tuple(
            count_samples(functools.partial(self._plan, *chunk, num_own, 1), chunk, must=must)
            for chunk in zip(args, kwargs, strict=True)
        )

    def _in_dims_of(self, num_own: int, kwargs: Mapping[str, Any]) -> Mapping[str | int, Any]:
        """``in_dims`` of the module's arguments, names of those given by position resolved."""
        if not self.in_dims:
            return {}
        names = list(inspect.signature(self.module.forward).parameters)[:num_own]
        places: dict[Any, int] = {name: i for i, name in enumerate(names) if name not in kwargs}
        resolved = {places.get(key, key): dim for key, dim in self.in_dims.items()}
        targets = [key for key in resolved if isinstance(key, int) and key >= num_own]
        return {key: dim for key, dim in resolved.items() if key not in targets}

    def replicate(self, module: ModuleT, device_ids: Sequence[DeviceLike]) -> list[ModuleT]:
        """The clones that run the next forward; override to change them."""
        return self._engine.replicas(module, len(device_ids), detach=not torch.is_grad_enabled())

    def parallel_apply(
        self, replicas: Sequence[ModuleT], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call each replica with its arguments, in the replicas' threads."""
        return self._engine.run(
            [
                functools.partial(replica, *args, **keywords)
                for replica, args, keywords in zip(replicas, inputs, kwargs, strict=True)
            ]
        )

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Put the outputs of the replicas together; override to do it in another way."""
        joining: Joining | None = getattr(outputs, "joining", None)
        if joining is None:
            if callable(self.scalars):
                raise ValueError(
                    "scalars= is a function of the chunks, and these outputs come without them; "
                    "hand on the list that gather was called with"
                )
            return gather(
                outputs,
                output_device,
                dim=self.dim,
                scalars=self.scalars,
                out_dims=self.out_dims,
            )
        stacks = joining.scalars == "stack" and len(outputs) > 1 and output_device != "each"
        if stacks and torch.is_grad_enabled() and not self._told_of_vectors:
            self._told_of_vectors = True
            tell_of_vectors(outputs[0], self.out_dims)
        result = gather(
            outputs,
            output_device,
            dim=self.dim,
            scalars=joining.scalars,
            weights=joining.counts,
            out_dims=self.out_dims,
        )
        if not self._told_of_dims and len(outputs) > 1 and output_device != "each":
            self._told_of_dims = True
            tell_of_dims(outputs, outputs.sizes, self.dim, self.out_dims)
        return result

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
        """The loss of the whole batch, computed where the outputs are.

        The criterion runs in each replica; only losses are gathered, weighted by its denominator.
        Result and gradients are those of ``criterion(module(inputs), targets)``, also for uneven
        chunks, ``ignore_index``, class weights and ``reduction="sum"``.

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
        with torch.autograd.profiler.record_function("DataParallel.loss"):
            prepared = prepare(criterion, weight, self.dim)
            refuse_transforms(len(self.device_ids))
            self._engine.check(self.module)
            call = functools.partial(
                self._loss_once, prepared, arguments(inputs), arguments(targets)
            )
            return self._attempt(call, (inputs, targets), prepared.module)

    def _loss_once(
        self,
        prepared: PreparedCriterion,
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
        targets: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> Tensor:
        (args, kwargs), (target_args, target_kwargs) = inputs, targets
        named = {LossCall.name(name): value for name, value in target_kwargs.items()}
        context = copy_context()
        context.run(_scattering.set, (self, len(args)))
        with self.timeline.span("scatter"), self._engine.between_replicas():
            chunks, keywords = context.run(
                self.scatter, (*args, *target_args), {**kwargs, **named}, self.device_ids
            )
        sizes = self._sizes(chunks, keywords, len(args), must=self._weighs)
        self._begin_call(sizes)
        with self.timeline.span("scatter"):
            call = self._engine.enter(chunks, keywords, sizes)
            replicas: Sequence[nn.Module] = [self.module]
            if not self._engine.is_direct:
                replicas = self.replicate(self.module, self.device_ids[: len(chunks)])
        with self._engine.finishing(replicas, sizes):
            criteria = self._engine.criterion_replicas(prepared.module, len(replicas))
            with self._engine.finishing(criteria, sizes), guarded(chunks):
                one = LossCall(prepared, len(args), tuple(target_kwargs), self.timeline)
                each = zip(replicas, criteria, call.args, call.kwargs, sizes, strict=True)
                parts = self._engine.run([functools.partial(one, *entry) for entry in each])
        place = self.device_ids[0] if self.output_device == "each" else self.output_device
        with self.timeline.span("gather"):
            loss: Tensor = prepared.combine(call.leave(parts), place)
        return self._engine.leave(loss)

    # --- what the wrapper shows of the module --------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    # --- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the worker threads. The wrapper can be used again; new threads start then."""
        self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_engine"], state["timeline"], state["_splitter"]
        state.pop("_loading", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._splitter = None
        self.timeline = Timeline(self.device_ids)
        self._engine = ReplicaEngine(self.device_ids, self.buffer_policy, timeline=self.timeline)
