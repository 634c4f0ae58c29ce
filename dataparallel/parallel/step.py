"""One forward of a wrapper as a straight function, and the clones and threads that it uses.

batch -> plan -> chunks -> clones -> worker threads -> commit -> cut -> gather, or the loss
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.batch.joining import Joining, join_scalars
from dataparallel.batch.scatter import SharedObjects, move
from dataparallel.batch.tree import flatten
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.replica_batch_norm import synchronize
from dataparallel.devices import is_accelerator
from dataparallel.errors import listed
from dataparallel.parallel.buffers import BufferPolicy, merge_mean
from dataparallel.parallel.loss import LossCall
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.replicate import check_placement
from dataparallel.threads import intra_op
from dataparallel.threads.apply import apply_replicas
from dataparallel.threads.compile import CompiledCalls
from dataparallel.threads.timeline import Phase, Timeline, mark_backward
from dataparallel.threads.workers import WorkerPools

if TYPE_CHECKING:
    from dataparallel.parallel.data_parallel import DataParallel
    from dataparallel.parallel.training import Training


T = TypeVar("T")

# One for the model, and some for criteria and for forwards that run at the same time.
_MAX_IDLE = 8


class Lent(NamedTuple):
    """The replicas of one forward, and what keeps them, if they are clones of ours.

    Attributes:
        replicas: One module per replica.
        clones: What keeps them; None where the user or nobody does.
        standing: Whether the clones are the same in each forward.
    """

    replicas: Sequence[Any]
    clones: ModuleClones | None = None
    standing: bool = False


class Runner:
    """The clones and the worker threads of one wrapper, both made at first use and kept.

    The clones themselves are new at each call, see Note [Clones follow the original]; the copies of
    tensors in them are kept by a ``ModuleClones``. A call borrows one and gives it back, so calls
    may be nested or come from several threads: each has its own.
    """

    def __init__(
        self, devices: Sequence[torch.device], policy: BufferPolicy, timeline: Timeline
    ) -> None:
        self.devices = tuple(devices)
        self._policy = policy
        self._timeline = timeline
        self._pools = WorkerPools()
        self._compiled = CompiledCalls()
        self._idle: deque[ModuleClones] = deque(maxlen=_MAX_IDLE)
        # Handed out by the public `replicate`, to be recognized in a forward.
        self._shown: deque[Lent] = deque(maxlen=_MAX_IDLE)
        if len(self.devices) > 1:
            for device in set(self.devices):
                kernels.warm_up(device)

    # --- threads ---------------------------------------------------------------------------------

    def run(self, calls: Sequence[Callable[[], T]], phase: Phase = "forward") -> list[T]:
        """Run one call per replica, each in its replica's thread and on its device."""
        return apply_replicas(
            calls,
            self.devices[: len(calls)],
            self._pools,
            compiled=self._compiled,
            timeline=self._timeline,
            phase=phase,
        )

    def quiet(self) -> AbstractContextManager[None]:
        """For what the calling thread itself does to the inputs and outputs of replicas."""
        several_on_cpu = sum(not is_accelerator(device) for device in self.devices) > 1
        return intra_op.one_thread() if several_on_cpu else contextlib.nullcontext()

    def close(self) -> None:
        """End the worker threads; the next call starts new ones."""
        self._pools.close()

    # --- clones ----------------------------------------------------------------------------------

    def lend(
        self,
        module: nn.Module,
        num_replicas: int,
        standing: ModuleClones | None = None,
        batch_group: LocalGroup | None = None,
    ) -> Lent:
        """Clones of a module for the first slots, up to date; to be used within :meth:`using`.

        Args:
            module: The original.
            num_replicas: How many slots take part.
            standing: Clones that somebody else keeps. Default: our own.
            batch_group: Who has the batch of which ``"sync"`` takes the statistics. Default: the
                replicas of this process.
        """
        clones = self._borrow(module) if standing is None else standing
        try:
            replicas = clones.refresh(num_replicas, detach=not torch.is_grad_enabled())
            if self._policy == "sync":
                synchronize(clones, batch_group or LocalGroup())
        except BaseException:
            if standing is None:
                self._idle.append(clones)
            raise
        return Lent(replicas, clones, standing is not None)

    def lend_criterion(self, criterion: nn.Module | None, num_replicas: int) -> Lent:
        """Clones of a criterion; the criterion itself where there is one replica."""
        if criterion is None or num_replicas == 1:
            return Lent([criterion] * num_replicas)
        check_placement(criterion, self.devices[0])
        return self.lend(criterion, num_replicas)

    @contextlib.contextmanager
    def using(self, lent: Lent, sizes: Sequence[int]) -> Iterator[None]:
        """Carry what the forward wrote back to the original, and take the clones back.

        Raises:
            RuntimeError: A replica wrote parameters in place, or made some.
        """
        clones = lent.clones
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
            created = clones.created_parameters() if len(lent.replicas) > 1 else []
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
            if not lent.standing:
                self._idle.append(clones)

    def show(self, lent: Lent) -> list[Any]:
        """Hand clones out to the user's own code, which may bring them back in a forward."""
        self._shown.append(lent)
        return list(lent.replicas)

    def recognize(self, replicas: Sequence[Any]) -> Lent:
        """What was handed out as these replicas; nobody's clones if it was something else."""
        for lent in list(self._shown):
            if replicas and replicas[0] is lent.replicas[0]:
                with contextlib.suppress(ValueError):
                    self._shown.remove(lent)
                    return lent._replace(replicas=replicas)
        return Lent(replicas)

    def _borrow(self, module: nn.Module) -> ModuleClones:
        for clones in list(self._idle):
            if clones.module is module:
                with contextlib.suppress(ValueError):
                    self._idle.remove(clones)
                    return clones
        # A mean is written to the original, which must not be what a replica saved for backward.
        return ModuleClones(module, self.devices, "none" if self._policy == "mean" else "first")


class Chunks(NamedTuple):
    """The arguments of the replicas in one forward.

    Attributes:
        args, kwargs: Positional and keyword arguments per replica.
        sizes: Number of samples per replica.
        shared: Objects that all replicas get; None without any.
    """

    args: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    sizes: tuple[int, ...]
    shared: SharedObjects | None = None

    def guarded(self) -> AbstractContextManager[None]:
        """Within it nobody may fill what all replicas share of their arguments."""
        return contextlib.nullcontext() if self.shared is None else self.shared.guarded()


@dataclass(frozen=True)
class Call:
    """What one forward is told besides its inputs.

    Attributes:
        training: What the wrapper is trained with; None without a reducer.
        weight: What this process counts in an average; None adds up its chunks.
        weighs: Whether it matters what its chunks count.
        synchronize: Whether the backward is reduced over processes.
        loss: What each replica computes from its output. Default: nothing.
    """

    training: Training | None = None
    weight: float | None = None
    weighs: bool = False
    synchronize: bool = True
    loss: LossCall | None = None


def run(
    model: DataParallel[Any], call: Call, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """One forward: the gathered outputs, or the loss of the batch."""
    runner, timeline, loss = model._runner, model.timeline, call.loss
    with timeline.span("scatter"), runner.quiet():
        must = call.weighs and not (loss is None and callable(model.scalars))
        chunks = model._split(inputs, kwargs, must=must)
        if loss is not None:
            loss.check(kwargs, chunks.kwargs)
    if not model._is_repeating:
        timeline.call(chunks.sizes)
    training, num_replicas = call.training, len(chunks.args)
    direct = len(runner.devices) == 1 if training is None else training.direct
    if direct and loss is None:
        with timeline.span("forward"):
            output = model.module(*chunks.args[0], **chunks.kwargs[0])
        each = model.output_device == "each"
        result = [output] if each else move(output, model.output_device)
        return _marked(model, call, result)
    with timeline.span("scatter"):
        joining = Joining("stack", chunks.sizes)
        if loss is None:
            joining = join_scalars(model.scalars, *chunks[:3], weighs=call.weighs)
        args, keywords, graphs = chunks.args, chunks.kwargs, None
        if training is not None:
            args, keywords, graphs = training.begin(args, keywords)
        replicas = Lent([model.module]) if direct else model._replicas(num_replicas)
    with runner.using(replicas, chunks.sizes):
        if loss is None:
            with chunks.guarded():
                outputs = model.parallel_apply(replicas.replicas, args, keywords)
        else:
            criteria = runner.lend_criterion(loss.prepared.module, num_replicas)
            each = zip(
                replicas.replicas, criteria.replicas, args, keywords, chunks.sizes, strict=True
            )
            with runner.using(criteria, chunks.sizes), chunks.guarded():
                outputs = runner.run([functools.partial(loss, *entry) for entry in each])
    with timeline.span("gather"):
        if training is not None and graphs is not None:
            weight = float(sum(joining.counts)) if call.weight is None else call.weight
            outputs = training.end(graphs, outputs, weight=weight, synchronize=call.synchronize)
        if loss is not None:
            place = model.device_ids[0] if model.output_device == "each" else model.output_device
            result = loss.prepared.combine(outputs, place)
        else:
            with runner.quiet():
                result = model._join(outputs, chunks.sizes, joining)
    return _marked(model, call, result)


def _marked(model: DataParallel[Any], call: Call, result: Any) -> Any:
    """Let the timeline know of the backward, where no cut does."""
    without_cut = call.training is None or call.training.direct
    if without_cut and model.timeline.is_active:
        mark_backward(model.timeline, flatten(result)[0])
    return result
