"""The clones and the worker threads of a wrapper."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.devices import is_accelerator, is_capturing
from dataparallel.graph.cut import ReplicaInputs
from dataparallel.parallel.buffers import BufferPolicy, Members, mean_buffer, watch_of
from dataparallel.replicas.clones import ModuleClones, Result, clones_of
from dataparallel.replicas.values import ReplicaParameters, Sharing
from dataparallel.threads import Phase
from dataparallel.threads.apply import Pace, apply_replicas
from dataparallel.threads.context import one_thread
from dataparallel.threads.timeline import Timeline
from dataparallel.threads.workers import WorkerPools

T = TypeVar("T")
# The clones that wait for the next forward.
_MOST_IDLE = 8


class Runner:
    """The clones and the worker threads of one wrapper; calls may be nested, and in threads."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        policy: BufferPolicy,
        timeline: Timeline,
        before: Runner | None = None,
    ) -> None:
        self.devices, self.policy, self.timeline = tuple(devices), policy, timeline
        self._members: Members = before._members if before else Members(policy)
        self._pools = WorkerPools()
        # The kinds of calls that compile nothing.
        self._quiet_calls: set[Hashable] = set()
        self._paces: dict[Phase, Pace] = {"forward": Pace(), "backward": Pace()}
        # The clones of the model, and some of criteria and of forwards that run at the same time.
        self._idle: list[ModuleClones] = []
        several_on_cpu = sum(not is_accelerator(device) for device in self.devices) > 1
        #: For what the calling thread itself does to the inputs and outputs of replicas.
        self.quiet: Callable[[], AbstractContextManager[None]] = (
            one_thread if several_on_cpu else contextlib.nullcontext
        )
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
            quiet=self._quiet_calls,
            pace=self._paces.get(phase),
            timeline=self.timeline,
            phase=phase,
        )

    def close(self) -> None:
        """End the worker threads; the next call starts new ones."""
        self._pools.close()

    # --- clones ----------------------------------------------------------------------------------

    def lend(
        self,
        module: nn.Module,
        num_replicas: int,
        standing: ModuleClones | None = None,
        *,
        defers: bool = False,
    ) -> list[Any]:
        """Return replicas of a module for the first slots, up to date; see :meth:`using`.

        They are those of ``standing``, if these are clones of the module; with ``defers`` until
        they are released, see :meth:`ModuleClones.refresh`.
        """
        if len(set(self.devices)) > 1 and is_capturing(self.devices[0]):
            raise RuntimeError(
                "a CUDA graph cannot record replicas on several devices: it would leave out that "
                "what an optimizer changes is copied to the others between the steps; record one "
                "process per GPU, or compile the module with mode='reduce-overhead'"
            )
        if standing is None or standing.module is not module:
            standing = self._take_idle(module) or self.make_clones(module)
        detach = not torch.is_grad_enabled()
        return standing.refresh(num_replicas, detach=detach, marks=True, defers=defers)

    @contextlib.contextmanager
    def using(self, *lent: tuple[object, Sequence[Any]]) -> Iterator[list[ModuleClones]]:
        """Use the replicas of some modules; gives their clones, but for replicas of the user."""
        used = list(filter(None, itertools.starmap(clones_of, lent)))
        try:
            yield used
        finally:
            for clones in used:
                clones.release()
                if not clones.are_standing:
                    self._idle.append(clones)
                    del self._idle[:-_MOST_IDLE]

    def check(
        self, used: Sequence[ModuleClones], sizes: Sequence[int], inputs: Sequence[ReplicaInputs]
    ) -> list[Result]:
        """See that forwards wrote nothing that they must not; return what they left in attributes.

        Buffers are merged as the policy says.
        """
        results: list[Result] = []
        for clones in used:
            assigned = clones.check()
            if clones.has_buffers:
                watch_of(clones.module, self.policy).look(clones)
            if self.policy == "mean" and len(self.devices) > 1:
                clones.merge_buffers(functools.partial(mean_buffer, sizes))
            if assigned:
                results += clones.results({id(leaf) for one in inputs for leaf in one.leaves})
        return results

    def make_clones(
        self,
        module: nn.Module,
        leaves: ReplicaParameters | None = None,
        members: Members | None = None,
    ) -> ModuleClones:
        """Clones whose buffers are treated as the policy says; ``members`` have the batch."""
        # A mean is written to the original, which must not be what a replica saved for backward.
        is_mean = self.policy == "mean" and len(self.devices) > 1
        sharing: Sharing = "none" if is_mean else "first"
        watch = watch_of(module, self.policy)
        dress = functools.partial((members or self._members).dress, watch)
        return ModuleClones(module, self.devices, sharing, leaves=leaves, dress=dress)

    def _take_idle(self, module: nn.Module) -> ModuleClones | None:
        """Clones of a module that no forward uses, out of what several threads may take from."""
        for clones in list(self._idle):
            if clones.module is module:
                with contextlib.suppress(ValueError):
                    self._idle.remove(clones)
                    return clones
        return None
