"""What a wrapper keeps between forwards: clones and worker threads, and how they are used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.batch.held_tensors import SharedObjects
from dataparallel.batch.joining import Joining
from dataparallel.batch.tree import flatten
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.devices import is_accelerator
from dataparallel.errors import listed
from dataparallel.parallel.batch_norm import synchronize
from dataparallel.parallel.buffers import BufferPolicy, merge_mean
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.replicate import check_placement
from dataparallel.threads import intra_op
from dataparallel.threads.apply import apply_replicas
from dataparallel.threads.compiled import CompiledCalls
from dataparallel.threads.timeline import Phase, Timeline, mark_backward
from dataparallel.threads.workers import WorkerPools

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

# One for the model, and some for criteria and for forwards that run at the same time.
_MAX_IDLE = 8


class PerReplica(list[T]):
    """A list with one entry per replica of one call, and what else is known of the call.

    Attributes:
        sizes: Number of samples of each replica; None where the user's own scatter split the
            batch.
        joining: Where the entries are outputs, how they are put together.
        clones: Where the entries are clones, what keeps them.
        shared: Where the entries are arguments, the objects that all replicas get.
    """

    def __init__(
        self,
        entries: Iterable[T],
        *,
        sizes: tuple[int, ...] | None = None,
        joining: Joining | None = None,
        clones: ModuleClones | None = None,
        shared: SharedObjects | None = None,
    ) -> None:
        super().__init__(entries)
        self.shared = shared
        self.sizes = sizes
        self.joining = joining
        self.clones = clones


class ReplicaCall:
    """The arguments and the outputs of the replicas in one forward, on their way in and out.

    Args:
        args: Positional arguments per replica.
        kwargs: Keyword arguments per replica.
    """

    def __init__(self, args: Sequence[Any], kwargs: Sequence[Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def leave(self, outputs: list[T]) -> list[T]:
        """The outputs as the caller sees them."""
        return outputs


class ReplicaEngine:
    """What makes the clones of one wrapper, and its threads; both made at first use and kept.

    The clones themselves are new at each call, see Note [Clones follow the original]; the copies of
    tensors in them are kept by a ``ModuleClones``. A call borrows one and gives it back, so calls
    may be nested or come from several threads: each has its own.

    Args:
        devices: One device per slot.
        policy: What becomes of buffers.
        batch_group: Who has the parts of the batch of which ``"sync"`` takes the statistics.
            Default: the replicas of this process.
        timeline: Is told in which phase the replicas are.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        policy: BufferPolicy,
        batch_group: LocalGroup | None = None,
        *,
        timeline: Timeline,
    ) -> None:
        self._devices = tuple(devices)
        self._policy = policy
        self._timeline = timeline
        self._batch_group = batch_group or LocalGroup()
        self._pools = WorkerPools()
        self._compiled = CompiledCalls()
        self._idle: list[ModuleClones] = []
        if len(self._devices) > 1:
            for device in set(self._devices):
                kernels.warm_up(device)

    @property
    def is_direct(self) -> bool:
        """Whether the module itself runs, in the calling thread."""
        return len(self._devices) == 1

    def check(self, module: nn.Module) -> None:
        """Raise a ValueError if a parameter or buffer is not where replicas start from."""
        check_placement(module, self._devices[0])

    def enter(
        self, args: Sequence[Any], kwargs: Sequence[Any], counts: Sequence[float]
    ) -> ReplicaCall:
        """Begin a forward with what was scattered.

        Args:
            args: Positional arguments per replica.
            kwargs: Keyword arguments per replica.
            counts: What each replica's chunk counts in an average over processes.
        """
        return ReplicaCall(args, kwargs)

    def replicas(self, module: ModuleT, num_replicas: int, *, detach: bool) -> PerReplica[ModuleT]:
        """Borrow clones of ``module`` for the first ``num_replicas`` slots, up to date.

        Args:
            module: The original.
            num_replicas: How many slots take part.
            detach: Whether to leave out the gradient edges.

        Returns:
            The clones, to be given back through :meth:`finishing`.
        """
        clones = self._borrow(module)
        try:
            entries = clones.refresh(num_replicas, detach=detach)
            if self._policy == "sync":
                synchronize(clones, self._batch_group)
        except BaseException:
            self._idle.append(clones)
            raise
        return PerReplica(cast("list[ModuleT]", entries), clones=clones)

    def criterion_replicas(self, criterion: nn.Module | None, num_replicas: int) -> PerReplica[Any]:
        """Borrow clones of a criterion; the criterion itself where there is one replica."""
        if criterion is None or num_replicas == 1:
            return PerReplica([criterion] * num_replicas)
        check_placement(criterion, self._devices[0])
        return self.replicas(criterion, num_replicas, detach=not torch.is_grad_enabled())

    @contextlib.contextmanager
    def finishing(self, replicas: Sequence[nn.Module], sizes: Sequence[int]) -> Iterator[None]:
        """Carry what the forward wrote back to the original, and give the clones back.

        Args:
            replicas: What :meth:`replicas` returned, or anything else, which is left alone.
            sizes: Number of samples of each replica.

        Raises:
            RuntimeError: A replica wrote parameters in place.
        """
        clones = getattr(replicas, "clones", None)
        if clones is None:
            yield
            return
        try:
            yield
            written = clones.written_parameters()
            if written:
                raise RuntimeError(
                    f"the forward changed parameters in place: {listed(written)}; replicas run "
                    "at the same time and would each change their own copy, so change parameters "
                    "outside of forward, or make them buffers"
                )
            created = clones.created_parameters() if len(replicas) > 1 else []
            if created:
                raise RuntimeError(
                    f"the forward created parameters: {listed(created)}; each replica would "
                    "have its own, so call the module once with an example before wrapping it"
                )
            if self._policy == "mean":
                merge_mean(clones, sizes)
            clones.commit()
        finally:
            clones.release()
            self._idle.append(clones)
            del self._idle[:-_MAX_IDLE]

    def between_replicas(self) -> AbstractContextManager[None]:
        """For what the calling thread itself does to the inputs and outputs of replicas."""
        several_on_cpu = sum(not is_accelerator(device) for device in self._devices) > 1
        return intra_op.one_thread() if several_on_cpu else contextlib.nullcontext()

    def leave(self, result: T) -> T:
        """What the caller of a forward gets."""
        if self._timeline.is_active:
            mark_backward(self._timeline, flatten(result)[0])
        return result

    def run(self, calls: Sequence[Callable[[], T]], phase: Phase = "forward") -> list[T]:
        """Run one call per replica, each in its replica's thread and on its device.

        Args:
            calls: A function for each of the first replicas.
            phase: What they do.

        Returns:
            Their results.
        """
        waiting = None
        if self._timeline.is_active:
            waiting = functools.partial(self._timeline.span, "idle")
            calls = [self._timeline.spanned(phase, i, call) for i, call in enumerate(calls)]
        devices = self._devices[: len(calls)]
        with self._compiled.arranged(calls, devices) as arranged:
            return apply_replicas(arranged, devices, self._pools, waiting=waiting)

    def close(self) -> None:
        """End the worker threads; the next call starts new ones."""
        self._pools.close()

    def _borrow(self, module: nn.Module) -> ModuleClones:
        for clones in self._idle:
            if clones.module is module:
                with contextlib.suppress(ValueError):
                    self._idle.remove(clones)
                    return clones
        # A mean is written to the original, which must not be what a replica saved for backward.
        return ModuleClones(module, self._devices, "none" if self._policy == "mean" else "first")


def guarded(args: Sequence[Any]) -> AbstractContextManager[None]:
    """Within it nobody may fill what all replicas share of their arguments."""
    shared: SharedObjects | None = getattr(args, "shared", None)
    return contextlib.nullcontext() if shared is None else shared.guarded()
