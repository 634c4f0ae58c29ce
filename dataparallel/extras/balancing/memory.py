"""What happens when a replica runs out of memory: the others take over a part of its chunk.

Note [Too little memory]
~~~~~~~~~~~~~~~~~~~~~~~~
Where a replica runs out of memory in forward, nothing has left the replicas yet. What they have
changed meanwhile is brought back: buffers, and the states of the generators. Then the forward runs
again with a smaller chunk for that replica and larger ones for the others; except where that is not
so, see Note [What cannot be run again]. In backward the graph is gone and gradients are half done:
those of the round are dropped, and the step has to be run again, by whoever called it or by
``Balancer.step``. Other processes do not notice the first; the second ends the backward in all of
them.

Note [What cannot be run again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What goes to other processes cannot be taken back. Where processes meet within the forward, those
without trouble are ahead, and a collective that one of them repeats would meet another one of
theirs. So nothing is repeated where batch norm is synchronized between processes, nor after any
collective of processes, which the sequence numbers of the process groups tell. And an input that
the forward has written in place is no longer what it was; its version tells.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import torch_internals
from dataparallel.batch.tree import flatten
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.devices import empty_cache
from dataparallel.errors import add_note, listed
from dataparallel.extras.balancing.speeds import fits
from dataparallel.graph.originals import IN_GRAD
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.threads.random import current_source, default_generator
from dataparallel.threads.timeline import Span

T = TypeVar("T")

_Registered: TypeAlias = "dict[str, torch.Tensor | None]"

# What a replica is left with of a chunk for which its memory was too small.
_KEPT = 0.75
# On an exception: whether the step may be run again, where that has been decided.
_MARK = "_dataparallel_may_run_again"
# What can be done where other processes are ahead.
_REMEDY = (
    "so it cannot be run again, and the step fails in all of them: go on from a checkpoint with a "
    "smaller batch, or with the limits that state_dict() of the Balancer has now"
)
# What is raised as a plain RuntimeError: by the CPU's allocator, and by libraries that allocate
# for themselves.
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_DEVICE = re.compile(r"\b(?:GPU |virtual:)(\d+)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that there was too little memory.

    Example::

        try:
            model(x)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    Args:
        error: Any exception, or None.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _MESSAGES)


def replicas_named_by(error: BaseException, devices: Sequence[torch.device]) -> list[int]:
    """The replicas on the accelerator that the text of an exception names; none for the CPU.

    Args:
        error: The exception of an allocator.
        devices: The device of each replica.
    """
    # A later line may tell of another device: where the error was passed on.
    found = _DEVICE.search(str(error).split("\n", 1)[0])
    if found is None:
        return []
    return [i for i, device in enumerate(devices) if device.index == int(found[1])]


# --- what may be run again -----------------------------------------------------------------------


class Obstacles:
    """Tells why a forward that begins now must not be run again. See Note [What cannot be run
    again].

    Example::

        obstacles = Obstacles([model.module], inputs)
        try:
            model(*inputs)
        except RuntimeError:
            print(obstacles.found() or "it may be run again")

    Args:
        modules: The modules that it runs; None stands for none.
        inputs: What it is given, in any containers.
        syncs_buffers: Whether the wrapper synchronizes batch norm between processes. Default:
            False.

    Attributes:
        is_certain: Whether it is clear beforehand.
    """

    def __init__(
        self, modules: Iterable[nn.Module | None], inputs: Any, *, syncs_buffers: bool = False
    ) -> None:
        self._modules = [module for module in modules if module is not None]
        self._versions = _versions(inputs)
        self._num_collectives = _num_collectives()
        self.is_certain = syncs_buffers

    def found(self) -> str:
        """What there is after an attempt, with what can be done; nothing if there is nothing."""
        if self.is_certain:
            return (
                "The forward of other processes is waiting for this one in batch norm "
                f"(buffers='sync'), {_REMEDY}"
            )
        layer = _layer_of_all_processes(self._modules)
        if layer:
            return (
                f"The forward of other processes is waiting for this one in batch norm ({layer}), "
                f"{_REMEDY}"
            )
        # A group that nobody uses any more may be gone meanwhile.
        before = self._num_collectives
        if any(number > before.get(name, 0) for name, number in _num_collectives().items()):
            return (
                "The forward has called collectives of several processes, which the others would "
                f"have to call again too, {_REMEDY}"
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


def _versions(inputs: Any) -> list[tuple[torch.Tensor, int]]:
    # Tensors of inference mode have no version.
    return [
        (leaf, leaf._version)
        for leaf in flatten(inputs)[0]
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]


def _num_collectives() -> dict[str, int]:
    """How many collectives this process has called, by the names of its groups."""
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


def _layer_of_all_processes(modules: Sequence[nn.Module]) -> str:
    """A layer that takes statistics over processes, in words; nothing if there is none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return ""
    for module in modules:
        for name, layer in module.named_modules():
            is_ours = isinstance(layer, SyncBatchNorm) and layer.group != "local"
            if layer.training and (is_ours or isinstance(layer, nn.SyncBatchNorm)):
                return f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    return ""


# --- what is brought back ------------------------------------------------------------------------


class Rollback:
    """The buffers of some modules and the states of the generators, as they are now.

    Values are written back where they are, so that what refers to a buffer goes on to do so; where
    a forward has assigned another tensor, or None, the buffer is the same object as before again.
    Everything else that a forward changes, such as other attributes of a module, is not brought
    back.

    Example::

        rollback = Rollback(devices, [model.module])
        try:
            model(x)
        except torch.OutOfMemoryError:
            rollback.undo()

    Args:
        devices: The devices whose default generators may be drawn from, besides the CPU's.
        modules: The modules; None stands for none.
    """

    def __init__(
        self, devices: Sequence[torch.device], modules: Iterable[nn.Module | None]
    ) -> None:
        #: What each module has as buffers, and what it had before.
        self._registered = [(live, dict(live)) for live in _registered_in(modules)]
        found = [buffer for _, kept in self._registered for buffer in kept.values()]
        self._buffers = list({id(each): each for each in found if each is not None}.values())
        # Memory that was made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._values = [buffer.detach().clone() for buffer in self._buffers]
        source = current_source()
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        for device in dict.fromkeys((torch.device("cpu"), *devices)):
            own = None if source is None else source(device)
            generator = own or default_generator(device)
            if generator is not None:
                self._states.append((generator, generator.get_state()))

    def undo(self) -> None:
        """Make everything as it was."""
        for generator, state in self._states:
            generator.set_state(state)
        for live, kept in self._registered:
            if [*map(id, live.values())] != [*map(id, kept.values())] or [*live] != [*kept]:
                live.clear()
                live.update(kept)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                # A graph that has saved a buffer which did not change stays valid.
                if not _is_same(buffer, value):
                    buffer.copy_(value)


def _registered_in(modules: Iterable[nn.Module | None]) -> Iterator[_Registered]:
    """The buffers of each module that may have some, by name, as the module itself keeps them.

    ``Module.buffers`` makes whole names, which takes longer than this.
    """
    waiting = [module for module in modules if module is not None]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module._buffers
        waiting.extend(child for child in module._modules.values() if child is not None)


def _is_same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    if buffer.layout != torch.strided or buffer.is_quantized:
        return False
    return torch.equal(buffer, value)


def num_processes(model: DataParallel[Any]) -> int:
    """How many processes train a wrapper's module together."""
    group = getattr(model, "process_group", None)
    return 1 if group is None else dist.get_world_size(group)


def check_repeatable(model: DataParallel[Any]) -> None:
    """Raise a RuntimeError if a step of a wrapper cannot be run again."""
    if num_processes(model) > 1:
        raise RuntimeError(
            f"Balancer.step runs a step again, which all {num_processes(model)} processes would "
            "have to do together; catch the error of backward in each of them (a RuntimeError, of "
            "which torch.OutOfMemoryError is one), drop the gradients and run the step again"
        )
    if isinstance(model, DistributedDataParallel) and model.options.optimizers is not None:
        raise RuntimeError(
            "optimizers that step in backward have stepped some parameters already when backward "
            "fails, so the step cannot be run again; use an ordinary optimizer"
        )


def _accumulated_by(model: DataParallel[Any]) -> list[Accumulated]:
    """What the reducers of a wrapper know of the gradients of its parameters."""
    if not isinstance(model, DistributedDataParallel):
        return []
    return [model.reducer.accumulations.of(IN_GRAD)]


class StepRollback:
    """Everything that forward and backward of a wrapper change, as it is now, in one process.

    Example::

        before = StepRollback(model)
        model(x).sum().backward()
        before.undo()

    Args:
        model: The wrapper.
        parameters: All tensors that get gradients. Default: the wrapper's parameters.
        modules: Further modules whose buffers are written, such as a criterion. Default: none.
    """

    def __init__(
        self,
        model: DataParallel[Any],
        parameters: Iterable[torch.Tensor] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._state = Rollback(model.timeline.devices, [model.module, *modules])
        tensors = model.parameters() if parameters is None else parameters
        self._gradients = [
            (tensor, tensor.grad, None if tensor.grad is None else tensor.grad.detach().clone())
            for tensor in tensors
        ]
        # A round that has succeeded takes what is unreduced for reduced, and counts what it skips.
        self._accumulated = [(one, one.state()) for one in _accumulated_by(model)]
        options = getattr(model, "options", None)
        self._policy: NonFinitePolicy | None = None if options is None else options.nonfinite
        self._num_skipped = 0 if self._policy is None else self._policy.num_skipped

    def undo(self) -> None:
        """Make everything as it was."""
        self._state.undo()
        for tensor, grad, value in self._gradients:
            # The object that it was, with the value that it had.
            IN_GRAD.write(tensor, grad)
            if grad is not None and value is not None:
                grad.detach().copy_(value)
        for accumulated, state in self._accumulated:
            accumulated.use_state(state)
        if self._policy is not None:
            self._policy.count_again_from(self._num_skipped)


# --- the handover --------------------------------------------------------------------------------


class _Attempt:
    """One attempt at a forward."""

    def __init__(self, owner: MemoryHandover) -> None:
        self.owner = owner
        self.sizes: tuple[int, ...] = ()
        #: The replicas that ran out of memory.
        self.failed: set[int] = set()

    def note_sizes(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    def sizes_that_failed(self) -> list[int]:
        """The sizes of the chunks for which memory was too small."""
        return [self.sizes[replica] for replica in self.failed if replica < len(self.sizes)]


_current: ContextVar[_Attempt | None] = ContextVar("balanced_attempt", default=None)


class MemoryHandover:
    """Limits the chunks of replicas to what their memory has been enough for.

    Args:
        devices: The device of each replica.
        on_change: Called with the sizes that failed and a sentence when a limit has changed.

    Attributes:
        limits: Per replica how many samples it may get; None where nothing is known.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        on_change: Callable[[tuple[int, ...], str], None],
    ) -> None:
        self._devices = tuple(devices)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._last_sizes: tuple[int, ...] = ()
        self.limits: list[int | None] = [None] * len(devices)

    def use_devices(self, devices: Sequence[torch.device], kept: Sequence[int | None]) -> None:
        """Let the replicas be others.

        Args:
            devices: The device of each replica.
            kept: Per replica which one it was, None for a new one.
        """
        with self._lock:
            self._devices = tuple(devices)
            self._last_sizes = ()
            self.limits = [None if old is None else self.limits[old] for old in kept]

    def note_sizes(self, sizes: Sequence[int]) -> None:
        """Remember how the batch of the forward under way is divided."""
        self._last_sizes = tuple(sizes)
        attempt = _current.get()
        if attempt is not None and attempt.owner is self:
            attempt.note_sizes(sizes)

    # --- forward ---------------------------------------------------------------------------------

    def attempt(
        self,
        call: Callable[..., T],
        modules: Sequence[nn.Module | None],
        obstacles: Obstacles,
    ) -> T:
        """Run a forward, again with other chunks as long as that may help.

        Args:
            call: Splits the batch and runs the replicas; told whether this is the first attempt.
            modules: The originals whose buffers it may write.
            obstacles: What may forbid to run it again, made just before.

        Raises:
            BaseException: What ``call`` raised.
        """
        rollback = Rollback(self._devices, () if obstacles.is_certain else modules)
        limits = list(self.limits)
        is_first = True
        while True:
            attempt = _Attempt(self)
            token = _current.set(attempt)
            try:
                return call(is_first=is_first)
            except Exception as error:
                if not is_out_of_memory(error) or not self._hand_over(attempt, error, obstacles):
                    if 1 in attempt.sizes_that_failed():
                        # It was not the chunks that took the memory.
                        self.limits[:] = limits
                    raise
            finally:
                _current.reset(token)
            # Only here the exception is gone, and what its traceback held.
            rollback.undo()
            self.free()
            is_first = False

    def free(self) -> None:
        """Give memory back that nobody uses."""
        gc.collect()
        for device in dict.fromkeys(self._devices):
            empty_cache(device)

    def on_span(self, span: Span) -> None:
        """Listen to a timeline: what has failed, and in which replica."""
        if not span.failed:
            return
        # The span is a context manager, which is left with the exception being handled.
        error = sys.exc_info()[1]
        if error is None or not is_out_of_memory(error):
            return
        attempt = _current.get()
        if span.phase == "backward":
            self.failed_in_backward(error, span.replicas)
        elif attempt is not None and attempt.owner is self:
            if span.phase == "forward" and len(span.replicas) == 1:
                attempt.failed.update(span.replicas)
            elif span.phase == "scatter":
                attempt.failed.update(replicas_named_by(error, self._devices))

    def _hand_over(self, attempt: _Attempt, error: BaseException, obstacles: Obstacles) -> bool:
        # Whatever comes of it, it is not a failure of backward.
        vars(error)[_MARK] = False
        sizes = attempt.sizes
        failed = sorted(replica for replica in attempt.failed if replica < len(sizes))
        if not failed:
            return False
        where = self._lower(failed, sizes)
        obstacle = obstacles.found()
        if obstacle:
            add_note(error, f"{where}; its chunks are smaller from now on. {obstacle}")
            self._on_change(sizes, where)
            return False
        trouble = self._trouble(failed, sizes)
        if trouble:
            add_note(error, f"{where}. {trouble}")
            return False
        self._on_change(sizes, where)
        return True

    # --- backward --------------------------------------------------------------------------------

    def failed_in_backward(self, error: BaseException, replicas: Sequence[int]) -> None:
        """Let a replica have smaller chunks from now on, and say so in the exception."""
        if getattr(error, _MARK, None) is not None:
            return
        if len(replicas) > 1:
            replicas = replicas_named_by(error, self._devices)
        sizes = self._last_sizes
        failed = [replica for replica in replicas if replica < len(sizes)]
        if not failed:
            return
        where = self._lower(failed, sizes, "in backward ")
        trouble = self._trouble(failed, sizes)
        vars(error)[_MARK] = not trouble
        if not trouble:
            limits = [self.limits[replica] for replica in failed]
            most = ", ".join(str(limit) for limit in limits)
            add_note(error, f"{where}; its chunk is at most {most} from now on: run the step again")
            self._on_change(sizes, where)
        else:
            add_note(error, f"{where}. {trouble}")

    def may_run_again(self, error: BaseException) -> bool:
        """Whether a step that failed with ``error`` may succeed with other chunks.

        Args:
            error: What its forward or backward raised.
        """
        if not is_out_of_memory(error):
            return False
        self.failed_in_backward(error, range(len(self._devices)))
        return bool(getattr(error, _MARK, False))

    # --- limits ----------------------------------------------------------------------------------

    def _trouble(self, failed: Sequence[int], sizes: Sequence[int]) -> str:
        """Why the others cannot take over, and what can be done; nothing if they can."""
        full = [i for i in failed if sizes[i] <= 1]
        if full:
            names = " and ".join(f"replica {i} on {self._devices[i]}" for i in full)
            return (
                f"There is not enough memory for a single sample in {names}, and each replica gets "
                "at least one: leave the device out of device_ids, or give it more memory"
            )
        if fits(sum(sizes), self.limits):
            return ""
        each = ", ".join(
            f"replica {i} {'any number' if limit is None else f'at most {limit}'}"
            for i, limit in enumerate(self.limits)
        )
        return (
            f"The others cannot take over a part of its chunk: for a batch of {sum(sizes)} there "
            f"is memory for too few samples ({each}); use a smaller batch"
        )

    def _lower(self, failed: Sequence[int], sizes: Sequence[int], when: str = "") -> str:
        with self._lock:
            for replica in failed:
                limit = max(1, int(sizes[replica] * _KEPT))
                before = self.limits[replica]
                self.limits[replica] = limit if before is None else min(before, limit)
        return " and ".join(
            f"replica {i} on {self._devices[i]} ran out of memory {when}with {sizes[i]} samples"
            for i in failed
        )
