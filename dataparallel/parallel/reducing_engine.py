"""The engine of a wrapper with a reducer: standing clones, the cut, and rounds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from dataparallel.batch.tree import flatten
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.devices import has_backward_thread
from dataparallel.graph.cut import CutGraphs, CutTerms, Rounds
from dataparallel.graph.gradient_home import refuse_calls
from dataparallel.graph.outside_tensors import OutsideTensors
from dataparallel.parallel.buffers import BufferPolicy
from dataparallel.parallel.engine import ReplicaCall, ReplicaEngine
from dataparallel.parallel.replica_inputs import ReplicaInputs, follow_write
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.replica_parameters import ReplicaParameters
from dataparallel.replicas.standing_clones import StandingClones
from dataparallel.threads.meeting import count_meetings
from dataparallel.threads.timeline import Timeline

T = TypeVar("T")


class ReducingEngine(ReplicaEngine):
    """What runs the replicas of one wrapper and reduces their gradients.

    Args:
        module: The original.
        devices: One device per slot.
        policy: What becomes of buffers.
        leaves: The parameters of the replicas, in the order of ``module.parameters()``.
        indices: Which of those the rounds are about, in their order.
        rounds: The reducer, or reducers.
        across_processes: Whether gradients are reduced over processes.
        spread: Whether the one replica is on several devices itself.
        direct: Whether the module itself runs: there is nothing to reduce.
        convert: What becomes of each leaf of the arguments. Default: nothing.
        batch_group: Who has the parts of the batch of which ``"sync"`` takes the statistics.
            Default: the replicas of this process.
        timeline: Is told in which phase the replicas are.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        policy: BufferPolicy,
        leaves: ReplicaParameters,
        indices: Sequence[int],
        rounds: Rounds,
        *,
        across_processes: bool,
        spread: bool = False,
        direct: bool = False,
        convert: Callable[[Any], Any] | None = None,
        batch_group: LocalGroup | None = None,
        timeline: Timeline,
    ) -> None:
        super().__init__(devices, policy, batch_group, timeline=timeline)
        self._direct = direct
        self._spread = spread
        self._convert = convert
        self._module = module
        self.leaves = leaves
        parameters = list(module.parameters())
        self._originals = [parameters[index] for index in indices]
        self._untrained = [p for i, p in enumerate(parameters) if i not in set(indices)]
        self._terms = CutTerms(
            rounds=rounds,
            leaves=[[leaves.of(i)[k] for k in indices] for i in range(len(devices))],
            run=functools.partial(self.run, phase="backward"),
            timeline=timeline,
            across_processes=across_processes,
        )
        self._clones = StandingClones(
            module,
            devices,
            leaves,
            "none" if policy == "mean" else "first",
            keep=policy == "replica0",
            spread=spread,
        )
        self._outside = OutsideTensors([leaves.of(i) for i in range(len(devices))])
        self.synchronize = True
        #: What each thread has said of its next forward.
        self.pending = threading.local()
        self._together = policy == "sync" or any(has_backward_thread(d) for d in devices)

    @property
    def weight(self) -> float | None:
        """The weight of this thread's next forward in an average; None adds up its chunks'."""
        return getattr(self.pending, "weight", None)

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.pending.weight = weight

    def fits(self) -> bool:
        """Whether the leaves and rounds are right for the parameters as they are now."""
        if self._direct:
            return True
        return self.leaves.follow() and not any([p.requires_grad for p in self._untrained])

    def retire(self) -> None:
        """Let a backward through earlier forwards fail: the replicas are others from now on."""
        self._terms.rounds = _Retired(self._terms.rounds)
        # Nothing runs any more. It would keep this engine and all leaves for the garbage collector,
        # and a device may have no memory for others meanwhile.
        self._terms.run = _no_run

    @property
    def is_direct(self) -> bool:
        """Whether the module itself runs, in the calling thread."""
        return self._direct

    def leave(self, result: T) -> T:
        """What the caller of a forward gets; the cut tells when backward begins."""
        return super().leave(result) if self._direct else result

    def check(self, module: nn.Module) -> None:
        """Placement is looked at when the clones are filled."""
        if self._direct and not self._spread:
            super().check(module)

    def enter(
        self, args: Sequence[Any], kwargs: Sequence[Any], counts: Sequence[float]
    ) -> ReplicaCall:
        """Begin a forward; where gradients are computed, its graph begins at the inputs."""
        weight, self.weight = self.weight, None
        if self._convert is not None:
            args = [map_leaves(self._convert, one) for one in args]
            kwargs = [map_leaves(self._convert, one) for one in kwargs]
        if self._direct or not torch.is_grad_enabled() or not self._originals:
            return ReplicaCall(args, kwargs)
        weight = float(sum(counts)) if weight is None else weight
        return _CutCall(self, args, kwargs, weight)

    def _borrow(self, module: nn.Module) -> ModuleClones:
        return self._clones if module is self._module else super()._borrow(module)

    def cut(
        self,
        outer_inputs: list[list[torch.Tensor]],
        inputs: list[list[torch.Tensor]],
        outputs: list[list[torch.Tensor]],
        weight: float,
        *,
        met: bool,
    ) -> list[list[torch.Tensor]]:
        """Cut off the graphs of one forward; returns what stands for the outputs.

        Raises:
            RuntimeError: They lead to other workers.
        """
        refuse_calls(outputs)
        outside, shared = self._outside.find(outputs, inputs, met=met)
        if outside:
            outer_inputs = [[*outer_inputs[0], *outside], *outer_inputs[1:]]
            inputs = [[*inputs[0], *outside], *inputs[1:]]
        graphs = CutGraphs(
            self._terms,
            self._originals,
            outer_inputs,
            inputs,
            outputs,
            separate=not (self._together or outside or shared),
            synchronize=self.synchronize,
            weight=weight,
            outside=outside,
        )
        return graphs.connect()


def _no_run(calls: Sequence[Callable[[], T]]) -> list[T]:
    raise AssertionError("rounds that are retired fail before this")


class _Retired:
    """Makes rounds that fail, in all processes, of a backward through replicas that are gone."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def reduce(self, backward: Callable[[], None], **arguments: Any) -> list[torch.Tensor | None]:
        return self._rounds.reduce(self._refuse, **arguments)

    def _refuse(self) -> None:
        raise RuntimeError(
            "replicas were dropped or added after the forward of this backward, so it has no "
            "replicas any more; run the forward again"
        )


class _CutCall(ReplicaCall):
    """A forward between its inputs and the cut."""

    def __init__(
        self, engine: ReducingEngine, args: Sequence[Any], kwargs: Sequence[Any], weight: float
    ) -> None:
        self._engine = engine
        self._weight = weight
        self._meetings = count_meetings()
        pairs = zip(args, kwargs, strict=True)
        self._inputs = [ReplicaInputs(pair) for pair in pairs]
        given = [inputs.given for inputs in self._inputs]
        super().__init__([args for args, _ in given], [kwargs for _, kwargs in given])

    def leave(self, outputs: list[T]) -> list[T]:
        """The outputs with the cut behind them."""
        flat = [flatten(output, name="outputs") for output in outputs]
        written = [inputs.written() for inputs in self._inputs]
        rows = [
            [*leaves, *(given for _, given in pairs)]
            for (leaves, _), pairs in zip(flat, written, strict=True)
        ]
        followed = [[leaf for leaf in row if _is_followed(leaf)] for row in rows]
        if not any(followed) and not any(written):
            return outputs
        if any(followed):
            met = count_meetings() != self._meetings
            outer = [inputs.outer for inputs in self._inputs]
            inner = [inputs.leaves for inputs in self._inputs]
            connected = self._engine.cut(outer, inner, followed, self._weight, met=met)
            for row, replica in zip(rows, connected, strict=True):
                new = iter(replica)
                row[:] = [next(new) if _is_followed(leaf) else leaf for leaf in row]
        for row, pairs in zip(rows, written, strict=True):
            for (tensor, _), result in zip(reversed(pairs), reversed(row), strict=False):
                follow_write(tensor, result)
        return [
            structure.rebuild(row[: structure.num_leaves])
            for (_, structure), row in zip(flat, rows, strict=True)
        ]


def _is_followed(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def map_leaves(function: Callable[[Any], Any], obj: Any) -> Any:
    """A container with every leaf replaced by what ``function`` makes of it."""
    leaves, structure = flatten(obj)
    return structure.rebuild([function(leaf) for leaf in leaves])
