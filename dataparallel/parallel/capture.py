"""Recordings of a wrapper's replicas in graphs of their devices, and their replays.

Note [Recorded replicas]
~~~~~~~~~~~~~~~~~~~~~~~~
A graph does the same work in the same memory each time. So a recorded replica has memory of its own
for inputs, outputs and their gradients. Parameters it reads where the replica's leaves are, which
stay there, and buffers where they were when it was recorded. The caller gets copies.

All that the host decides in forward is decided once. It is decided anew for other shapes, dtypes
and values of arguments, and in another mode (grad, inference, autocast). So it is when an attribute
of a module is another object than before, as after ``eval()``. Arguments of a new kind run as usual
the first time: libraries load their kernels then, which must not happen while a graph is recorded.

The graphs of one replica share memory. The saved tensors of a forward stay until the next replay,
so a forward that comes between the two runs as usual.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.batch.scatter import TARGETS
from dataparallel.batch.tree import Structure, flatten
from dataparallel.graph.functions import apply_function
from dataparallel.replicas.clones import REGISTRIES, ModuleClones, Parts
from dataparallel.replicas.spread import is_of_user
from dataparallel.replicas.values import ReplicaParameters, versions

#: The most kinds of arguments that one replica records.
_MOST_KINDS = 16

# One thread at a time may record.
_recording = threading.Lock()
_log = logging.getLogger("dataparallel")
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_Tensors: TypeAlias = Sequence[torch.Tensor]
_MaybeTensors: TypeAlias = Sequence[torch.Tensor | None]


class Recorder:
    """A recorder of the replicas of one wrapper. See Note [Recorded replicas].

    Args:
        leaves: The parameters of the replicas.
        devices: One device per replica.

    Raises:
        ValueError: A device has no graphs.
    """

    def __init__(self, leaves: ReplicaParameters, devices: Sequence[torch.device]) -> None:
        without = [str(device) for device in devices if not _devices.has_graphs(device)]
        if without:
            raise ValueError(
                f"capture=True records graphs of CUDA, which {without[0]} does not have; write "
                "capture=torch.cuda.is_available() for a program that also runs elsewhere"
            )
        self._leaves, self._slots = leaves, tuple(devices)
        self._num_changes = -1
        self._parts: Parts | None = None
        # The number of what the module is now, and those of what it has been.
        self._structure = -1
        self._numbers: dict[Any, int] = {}
        self._next = itertools.count()
        self._replicas: list[_Replica] = []

    def replace(
        self,
        clones: ModuleClones,
        replicas: Sequence[Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Sequence[Any],
    ) -> Sequence[Callable[..., Any]]:
        """Return the callables that take the place of the replicas for these arguments.

        Recordings are made here, in the calling thread, while no replica runs.
        """
        if _devices.is_capturing(self._slots[0]):
            return replicas
        if self._leaves.num_changes != self._num_changes:
            self._num_changes, rows = self._leaves.num_changes, self._leaves.rows
            self._replicas = [_Replica(i, self._slots[i], row) for i, row in enumerate(rows)]
        if clones.parts is not None and clones.parts is not self._parts:
            structure = _structure_of(clones.parts)
            if structure not in self._numbers:
                if len(self._numbers) == _MOST_KINDS:
                    # The oldest. A module that counts its calls is another one each time.
                    del self._numbers[next(iter(self._numbers))]
                self._numbers[structure] = next(self._next)
            self._structure, self._parts = self._numbers[structure], clones.parts
        pairs = zip(self._replicas, replicas, args, kwargs, strict=False)
        return [
            own.replace(clones, replica, self._structure, one, named)
            for own, replica, one, named in pairs
        ]


class _Replica:
    """The graphs of one replica, which share memory."""

    def __init__(self, index: int, device: torch.device, leaves: _Tensors) -> None:
        self._index, self._device = index, device
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._find_place()
        # By kind of arguments; None for those that came once.
        self._recordings: dict[Any, _Recording | None] = {}
        # The last forward that was replayed, as long as somebody may call its backward, and where.
        self._last: weakref.ref[_Forward] | None = None
        self._stream: _devices.Stream = None
        self._has_warned = False

    def replace(
        self,
        clones: ModuleClones,
        replica: Callable[..., Any],
        structure: int,
        args: Any,
        kwargs: Any,
    ) -> Callable[..., Any]:
        """Return the callable that takes the place of the replica."""
        last = None if self._last is None else self._last()
        if last is not None and not last.is_over:
            return replica
        # The targets of a loss are the criterion's.
        kwargs = {name: value for name, value in kwargs.items() if name != TARGETS}
        # An empty dict would be a leaf, and another one each time.
        values, form = flatten((args, kwargs) if kwargs else (args,))
        key = structure, form, tuple(map(_kind, values)), _mode(self._device)
        if key not in self._recordings:
            self._note(key)
            return replica
        buffers = clones.buffers_of(self._index)
        recording = self._recordings[key]
        if recording is None:
            # If it fails, the next call runs as usual.
            del self._recordings[key]
            recording = self._record(clones, values, form, buffers)
            self._recordings[key] = recording
        forward = _Forward(recording, buffers)
        self._last = weakref.ref(forward)
        stream = _devices.current_stream(self._device)
        if self._stream is not None:
            _devices.wait_stream(stream, self._stream)
        self._stream = stream
        return functools.partial(forward.run, values)

    def _find_place(self) -> None:
        """Take a stream to record on, and memory for the graphs."""
        module: Any = torch.get_device_module(self._device)
        self._place = module.Stream(self._device), module.graph_pool_handle()

    def _note(self, key: Any) -> None:
        """Arguments have come that have not come before."""
        if len(self._recordings) < _MOST_KINDS:
            self._recordings[key] = None
        elif not self._has_warned:
            self._has_warned = True
            _log.warning(
                "capture=True: the wrapper is called with more than %d kinds of arguments, and "
                "runs all others without graphs; pad batches to few shapes, and pass numbers that "
                "change as tensors",
                _MOST_KINDS,
            )

    def _record(
        self,
        clones: ModuleClones,
        values: Sequence[Any],
        form: Structure,
        buffers: list[torch.Tensor],
    ) -> _Recording:
        made = _Recording(self._device, self._place, buffers)
        # The leaves' own nodes may belong to the stream of another forward.
        aliases = [leaf.detach().requires_grad_() for leaf in self._leaves]
        replica = clones.clone_around(self._index, self._leaves, aliases)
        try:
            with _recording:
                made.record(replica, values, form)
                made.record_backward(aliases, self._leaves)
        except RuntimeError as error:
            # In the old one the allocator still records.
            self._find_place()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # An error within a recording makes its end fail, too.
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            raise RuntimeError(
                f"capture=True: replica {self._index} on {self._device} cannot be recorded: "
                f"{first}\nA recorded module reads nothing back to the host (.item(), a branch on "
                "values) and writes none of its inputs; change that, or leave capture out"
            ) from first
        return made


class _Recording:
    """The graphs of one replica's forward and backward, for one kind of arguments."""

    def __init__(self, device: torch.device, place: tuple[Any, Any], buffers: _Tensors) -> None:
        self._device, self._place, self._buffers = device, place, buffers

    def record(self, replica: Callable[..., Any], values: Sequence[Any], form: Structure) -> None:
        """Record the forward; nothing runs."""
        static = [self._own_memory(value) for value in values]
        self._inputs = [x for x in static if isinstance(x, torch.Tensor)]
        given = versions(self._inputs)
        args, *named = form.rebuild(static)
        with _devices.recording(*self._place) as self._forward:
            outputs = replica(*args, **(named[0] if named else {}))
        if versions(self._inputs) != given:
            raise RuntimeError("the forward writes an input in place")
        flat, self._form = flatten(outputs)
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        for output in tensors:
            self._check("an output", output)
        self._constants = [None if isinstance(x, torch.Tensor) else x for x in flat]
        self._places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        #: True for each output that has a backward.
        self.followed = [x.requires_grad for x in tensors]
        self._outputs = tensors

    def record_backward(self, aliases: _Tensors, leaves: _Tensors) -> None:
        """Record the backward, if there is one, to what the replica had in place of its leaves."""
        outputs = list(compress(self._outputs, self.followed))
        wanted = [*(x for x in self._inputs if x.requires_grad), *aliases]
        found: list[torch.Tensor | None] = [None] * len(wanted)
        self._backward: Any = None
        self._grads = [torch.empty_like(x) for x in outputs]
        if outputs:
            _refuse_others(outputs, set(map(id, wanted)))
            with _devices.recording(*self._place) as self._backward:
                found[:] = torch.autograd.grad(outputs, wanted, self._grads, allow_unused=True)
                for grad in found:
                    self._check("a gradient", grad)
        self._outputs = [x.detach() for x in self._outputs]
        got = {id(x): grad for x, grad in zip(wanted, found, strict=True) if grad is not None}
        pairs = [p for p in zip(aliases, leaves, strict=True) if id(p[0]) in got]
        #: The leaves that get gradients.
        self.leaves = [leaf for _, leaf in pairs]
        # For each input and each of the leaves its gradient, if any.
        self._found = [got.get(id(x)) for x in (*self._inputs, *(alias for alias, _ in pairs))]

    @property
    def has_backward(self) -> bool:
        """True if an output requires grad."""
        return self._backward is not None

    def replay_forward(self, inputs: _Tensors, buffers: _Tensors) -> tuple[torch.Tensor, ...]:
        """Copies of the outputs."""
        pairs = [p for p in zip(self._buffers, buffers, strict=True) if p[0] is not p[1]]
        with torch.no_grad():
            for own, value in zip(self._inputs, inputs, strict=True):
                own.copy_(value, non_blocking=True)
            for own, buffer in pairs:
                own.copy_(buffer)
            self._forward.replay()
            for own, buffer in pairs:
                buffer.copy_(own)
            return tuple(map(torch.clone, self._outputs))

    def replay_backward(self, grads: _MaybeTensors) -> list[torch.Tensor | None]:
        """Gradients of the inputs and of the leaves, in memory of their own."""
        for own, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                own.zero_()
            else:
                own.copy_(grad)
        self._backward.replay()
        # One kernel copies many; and each has memory of its own, so that a reducer may write it.
        copies = iter(torch_internals.foreach_mul([x for x in self._found if x is not None], 1))
        return [None if x is None else next(copies) for x in self._found]

    def rebuild(self, outputs: _Tensors) -> Any:
        """Rebuild the module's result around these tensors."""
        flat = list(self._constants)
        for place, output in zip(self._places, outputs, strict=True):
            flat[place] = output
        return self._form.rebuild(flat)

    def _own_memory(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self._check("an input", value)
        return torch.empty_like(value).requires_grad_(value.requires_grad)

    def _check(self, what: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if tensor.layout != torch.strided or tensor.device != self._device:
            kind = "sparse" if tensor.layout != torch.strided else f"on {tensor.device}"
            raise RuntimeError(f"{what} is {kind}")


def _refuse_others(outputs: _Tensors, known: set[int]) -> None:
    """Refuse what was computed with further leaves, whose gradients a graph would leave out."""
    nodes = [get_gradient_edge(output).node for output in outputs]
    seen = set(nodes)
    for node in nodes:
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            shape = tuple(variable.shape)
            raise RuntimeError(
                f"the forward uses a tensor of shape {shape} that requires grad and is neither "
                "a parameter nor an input"
            )
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)


class _Forward:
    """One replayed forward, which lives as long as its backward may come."""

    def __init__(self, recording: _Recording, buffers: _Tensors) -> None:
        self._recording, self._buffers = recording, buffers
        self._versions = versions(recording.leaves)
        #: True if others may replay now.
        self.is_over = not recording.has_backward

    def run(self, values: Sequence[Any], *_: Any, **__: Any) -> Any:
        """Do what the replica does."""
        recording = self._recording
        inputs = [x for x in values if isinstance(x, torch.Tensor)]
        if recording.has_backward:
            outputs = apply_function(_Replay, self, len(inputs), *inputs, *recording.leaves)
        else:
            outputs = self.forward(inputs)
        return recording.rebuild(outputs)

    def forward(self, inputs: _Tensors) -> tuple[torch.Tensor, ...]:
        """Copies of the outputs."""
        return self._recording.replay_forward(inputs, self._buffers)

    def not_followed(self, outputs: _Tensors) -> list[torch.Tensor]:
        """Return the outputs that have no backward."""
        return list(compress(outputs, [not one for one in self._recording.followed]))

    def backward(self, grads: _MaybeTensors) -> list[torch.Tensor | None]:
        """Gradients of the inputs and of the leaves."""
        if self.is_over:
            raise RuntimeError(
                "capture=True: a second backward through the same forward, whose saved tensors a "
                "graph does not keep; run the forward again, or leave capture out"
            )
        self.is_over = True
        if versions(self._recording.leaves) != self._versions:
            raise RuntimeError(
                "capture=True: parameters were modified by an inplace operation between forward "
                "and backward, so the gradients would be those of other values; take the "
                "optimizer's step after backward"
            )
        followed = compress(grads, self._recording.followed)
        return self._recording.replay_backward(list(followed))


class _Replay(torch.autograd.Function):
    """The node of a replayed forward."""

    @staticmethod
    def forward(ctx: Any, one: _Forward, count: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.one = one
        outputs = one.forward(tensors[:count])
        ctx.mark_non_differentiable(*one.not_followed(outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, None, *ctx.one.backward(grads)


class _Same:
    """An object in a key; equal to itself alone, and alive as long as the key is."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _kind(value: Any) -> Any:
    """Return a key that is equal for two arguments if a replica does the same with them."""
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    return (type(value), value) if isinstance(value, _CONSTANTS) else _Same(value)


def _mode(device: torch.device) -> tuple[Any, ...]:
    """Return the modes on which a forward depends."""
    casts = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if casts else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype


def _structure_of(parts: Parts) -> Any:
    """Return a key of a module; equal if the recordings would be the same."""
    hooked = [
        name or type(module).__name__
        for name, module in zip(parts.names, parts.modules, strict=True)
        if any(is_of_user(hook) for hook in torch_internals.module_hooks(module))
    ]
    if hooked:
        raise RuntimeError(
            f"capture=True: {hooked[0]!r} has hooks, which a graph does not call; remove them "
            "(weight_norm and spectral_norm of torch.nn.utils.parametrizations have none), or "
            "leave capture out"
        )
    if parts.loose_tensors():
        raise RuntimeError(
            "capture=True: the module holds tensors in plain attributes, which a graph reads where "
            "they were at first; register them as buffers, or leave capture out"
        )
    return tuple(
        (
            type(module),
            tuple((k, _kind(v)) for k, v in vars(module).items() if k not in REGISTRIES),
            tuple((k, _Same(v)) for r in REGISTRIES[:2] for k, v in vars(module)[r].items()),
            tuple((k, _kind(v)) for k, v in module._buffers.items()),
        )
        for module in parts.modules
    )
