"""The wrapper that trains a module on several devices from one process.

Our wrappers give the state of their module under the module's own names. Torch's wrappers put
``module.`` before each, and states of both are loaded. A name that begins with ``module.`` may be
either, since a module may have a child of that name. So each wrapper decides for all names that
come to it at once, by which reading more of them are known. As many both ways: then they have the
prefix if all of them begin with it and no name of the module does.

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
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from dataparallel import torch_internals
from dataparallel.batch.gather import (
    Notes,
    Scalars,
    ScalarsOption,
    gather,
    join_outputs,
    nothing_to_split,
)
from dataparallel.batch.scatter import (
    TARGETS,
    BatchSplitter,
    ScatterPlan,
    execute,
    move,
    plan_scatter,
)
from dataparallel.comm.links import require_sound
from dataparallel.devices import (
    DeviceLike,
    accelerators,
    describe_imbalance,
    parse_device,
    parse_devices,
    parse_output_device,
)
from dataparallel.errors import chosen, listed
from dataparallel.parallel import step
from dataparallel.parallel.buffers import BufferPolicy
from dataparallel.parallel.loss import Loss, Weight, arguments
from dataparallel.parallel.runner import Runner
from dataparallel.parallel.step import Call, Chunks
from dataparallel.parallel.training import Training
from dataparallel.replicas.clones import check_placement, is_spread, place
from dataparallel.threads.timeline import Timeline
from dataparallel.torch_internals import untraced

ModuleT = TypeVar("ModuleT", bound=nn.Module)
OutputDevice = DeviceLike | Literal["each"] | None

_log = logging.getLogger("dataparallel")
# The prefix of torch's wrappers for the names of their module.
_PREFIX = "module."
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
    _MAY_SPREAD = False
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
        require_sound(devices)
        _warn_of(module, type(self).__name__)
        imbalance = describe_imbalance(devices)
        if imbalance:
            _log.warning(
                "the slowest or smallest device sets the pace: %s. Leave it out of device_ids, or "
                "let dataparallel.balance(model) give it fewer samples",
                imbalance,
            )
        hooks: Any = self
        hooks.register_state_dict_post_hook(DataParallel._finish_state)
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
        self._spread = self._MAY_SPREAD and len(devices) == 1 and is_spread(module)
        # Last: without a module, all that is set is the wrapper's own.
        self.module = module
        if not self._spread:
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
            raise RuntimeError(
                f"a {type(self).__name__} was to be exported or traced, which cannot follow "
                "replicas in threads; export the module, which has the weights: .module"
            )
        with torch.autograd.profiler.record_function("DataParallel.forward"), self._begin() as call:
            return step.run(self, call, inputs, kwargs)

    def _begin(self, loss: Loss | None = None) -> AbstractContextManager[Call]:
        """Surround one forward, and return the facts about it."""
        return nullcontext(Call(loss=loss))

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
            device = None if self._spread else devices[0]
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
        standing = None if self._training is None else self._training.clones
        return self._runner.lend(module, len(device_ids), standing)

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

    def _join(
        self,
        outputs: list[Any],
        scalars: Scalars = "stack",
        counts: Sequence[float] = (),
        sizes: Sequence[int] | None = None,
    ) -> Any:
        """Return the outputs of one forward, as the caller gets them."""
        if len(self.device_ids) == 1:
            if self.output_device == "each":
                return outputs
            return move(outputs[0], None if self._spread else self.output_device)
        if getattr(self.gather, "__func__", None) is not DataParallel.gather:
            return self.gather(outputs, self.output_device)
        weights = counts if scalars == "mean" else ()
        dims = self.dim, self.out_dims
        return join_outputs(
            outputs, self.output_device, *dims, scalars, weights, sizes, self._notes
        )

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
        loss = Loss(criterion, weight, self.dim)
        record = torch.autograd.profiler.record_function("DataParallel.loss")
        with record, self._begin(loss) as call:
            result: Tensor = step.run(self, call, args, {**kwargs, TARGETS: targets})
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

    def _finish_state(self, state: dict[str, Any], path: str, _: Any) -> None:
        """Take the prefix away from the names that torch has just given."""
        inner = path + _PREFIX
        for table in (state, torch_internals.state_versions(state) or {}):
            found = {name: table.pop(name) for name in list(table) if f"{name}.".startswith(inner)}
            # The version of the module itself has no name below it.
            below = _below(inner, found).items()
            table.update((path + name if name else path[:-1], value) for name, value in below)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *found: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, *found)
        missing_keys, unexpected_keys, errors = found
        names = [name for name in state_dict if name.startswith(prefix)]
        is_prefixed = _is_prefixed(self.module, [name[len(prefix) :] for name in names])
        inner = prefix + _PREFIX if is_prefixed else prefix
        state = OrderedDict(_below(inner, state_dict))
        versions = torch_internals.versions_being_loaded()
        torch_internals.set_state_versions(state, _below(inner, versions or {}))
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            # The load of the module's own class is for those who call it themselves.
            missing, unexpected = nn.Module.load_state_dict(self.module, state, False, assign)
        except RuntimeError as error:
            errors.append(str(error).replace("mismatch for ", f"mismatch for {prefix}"))
        else:
            missing_keys += [prefix + name for name in missing]
            unexpected_keys += [inner + name for name in unexpected]
        unexpected_keys += [name for name in names if not name.startswith(inner)]
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
        if self._spread:
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


def _below(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names begin with a path, without it; the path becomes ``""``."""
    start = len(path)
    return {f"{n}."[start:-1]: v for n, v in table.items() if f"{n}.".startswith(path)}


def _is_prefixed(module: nn.Module, names: Collection[str]) -> bool:
    """True if names that a wrapper of the module is to load have the prefix."""
    stripped = [name[len(_PREFIX) :] for name in names if name.startswith(_PREFIX)]
    if not stripped:
        return False
    known = _known(module)
    as_they_are, without = (
        len({known[n] for n in some if n in known}) for some in (names, stripped)
    )
    if as_they_are != without:
        return without > as_they_are
    own = any(name.startswith(_PREFIX) for name in known.values())
    return len(stripped) == len(names) and not own


def _known(module: nn.Module) -> dict[str, str]:
    """From each name under which a load finds a tensor to the tensor's name in the state."""
    if isinstance(module, DataParallel):
        known = _known(module.module)
        return {f"{_PREFIX}{name}": own for name, own in known.items()} | known
    known = {name: name for name in module.state_dict(keep_vars=True)}
    for path, child in module.named_children():
        below = _known(child).items()
        known = {f"{path}.{name}": f"{path}.{own}" for name, own in below} | known
    return known


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
