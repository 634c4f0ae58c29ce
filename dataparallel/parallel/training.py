"""What a distributed wrapper is trained with: leaves, reducer, links and standing clones."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import kernels
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.comm.failures import report
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.devices import is_accelerator
from dataparallel.graph import originals
from dataparallel.graph.cut import Cuts
from dataparallel.optim.in_backward import StepsInBackward
from dataparallel.parallel.buffers import BufferPolicy
from dataparallel.parallel.inputs import ReplicaGraphs, map_leaves
from dataparallel.parallel.mixed_precision import FULL, MixedPrecision
from dataparallel.parallel.step import Runner
from dataparallel.reducer.comm_hooks import ResolvedHook
from dataparallel.reducer.exchange import Progress, ReducerProcesses, is_late
from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.reducer.options import ReducerOptions, trained_parameters
from dataparallel.reducer.reducer import Reducer
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.replicate import check_placement
from dataparallel.replicas.values import ReplicaParameters
from dataparallel.threads.timeline import Timeline


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True, kw_only=True)
class Options(ReducerOptions):
    """How a wrapper wants its gradients reduced; see the arguments of the wrapper."""

    process_group: dist.ProcessGroup | None = None
    #: Whether this process trains by itself on purpose, if there are others or not.
    separate: bool = False
    timeout: float | None = None
    mixed_precision: MixedPrecision = FULL
    nonfinite: NonFinitePolicy = field(default_factory=NonFinitePolicy)
    #: Takes the place of the all-reduce.
    hook: ResolvedHook | None = None
    #: What takes steps in backward.
    optimizers: StepsInBackward | None = None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of what is sent; None for the parameters' own."""
        return self.mixed_precision.reduce_dtype

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)

    def check_alone(self) -> None:
        """Refuse to train without a process group where there are several processes."""
        if self.separate or self.process_group is not None:
            return
        separate = (
            "pass process_group=False to train separately in each process: nothing is reduced or "
            "compared between them then"
        )
        world = default_group()
        if world is not None and world.size() > 1:
            raise RuntimeError(
                f"this wrapper was made before the process group of {world.size()} processes, so "
                "it would train by itself; call dp.init_process_group() first and make the wrapper "
                f"after it, in every process, or {separate}"
            )
        launched = os.environ.get("WORLD_SIZE", "")
        if world is None and launched.isdecimal() and int(launched) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {launched}, so this process is one of several, but there is no "
                "process group: each process would train by itself. Call dp.init_process_group() "
                f"before the module is wrapped, or {separate}"
            )

    def check(self, policy: BufferPolicy) -> None:
        """Raise a ValueError where options contradict each other."""
        if policy == "sync" and self.average == "samples" and self.world_size > 1:
            raise ValueError(
                "buffers='sync' over several processes and average='samples' do not go together: "
                "the weights would come after backward, when gradients have gone through the "
                "statistics to other processes; multiply the loss by its process's share of the "
                "samples, and use average='none'"
            )
        if self.optimizers is not None:
            self.nonfinite.refuse_steps_in_backward()


class Training:
    """Everything that belongs to one module, as it is now, on some devices.

    Making it communicates with nobody; :meth:`connect` does. For other parameters another one is
    made, and for other devices :meth:`on` makes one with the same reducer and links.

    Args:
        module: The original.
        policy: What becomes of buffers.
        options: How gradients are reduced.
        runner: Runs the replicas.
        timeline: Is told in which phase the replicas are.
        progress: What the wrapper knows of its rounds.
        spread: Whether the one replica is on several devices itself.

    Attributes:
        processes: The links; None where there is no other process and no hook.
        reducer: Reduces over replicas and processes.
        leaves: The parameters of the replicas.
        clones: The replicas.
        batch_group: Who has the batch of which ``"sync"`` takes the statistics; None for the
            replicas of this process.
        direct: Whether the module itself runs: there is nothing to reduce.

    Raises:
        ValueError: A parameter is not on the first device, or options contradict each other.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: BufferPolicy,
        options: Options,
        runner: Runner,
        timeline: Timeline,
        progress: Progress,
        *,
        spread: bool = False,
    ) -> None:
        options.check(policy)
        if not spread:
            check_placement(module, runner.devices[0])
        self._module, self._policy, self._spread = module, policy, spread
        self._options, self._timeline = options, timeline
        self.processes: ReducerProcesses | None = None
        if options.process_group is not None and (options.world_size > 1 or options.hook):
            self.processes = ReducerProcesses(options.process_group, options.timeout, progress)
        parameters = list(module.parameters())
        dtype = options.mixed_precision.param_dtype
        self.leaves = ReplicaParameters(parameters, runner.devices, dtype)
        self._trained = trained_parameters(module)
        self.reducer = Reducer(
            self._trained,
            self._leaves_of_trained(),
            options,
            self.processes,
            timeline=timeline,
            nonfinite=options.nonfinite,
            hook=options.hook,
            optimizers=options.optimizers,
        )
        if self.processes is not None:
            for device in {parameter.device for parameter in self._trained.parameters}:
                kernels.warm_up(device)
        self.batch_group: HybridGroup | None = None
        if policy == "sync" and self.processes is not None:
            self.batch_group = HybridGroup(options.process_group, options.timeout)
        self._place(runner)

    def _leaves_of_trained(self) -> list[list[nn.Parameter]]:
        return [[row[k] for k in self._trained.indices] for row in self.leaves.rows]

    # --- the replicas ----------------------------------------------------------------------------

    def _place(self, runner: Runner) -> None:
        """Make what depends on the devices."""
        options, devices = self._options, runner.devices
        indices = self._trained.indices
        parameters = list(self._module.parameters())
        self._originals = [parameters[index] for index in indices]
        self._untrained = [p for i, p in enumerate(parameters) if i not in set(indices)]
        self._cuts = Cuts(
            self.reducer.reduce,
            self._originals,
            self._leaves_of_trained(),
            functools.partial(runner.run, phase="backward"),
            together=self._policy == "sync" or any(is_accelerator(d) for d in devices),
            across_processes=self.processes is not None,
            timeline=self._timeline,
        )
        self.clones = ModuleClones(
            self._module,
            devices,
            "none" if self._policy == "mean" and len(devices) > 1 else "first",
            leaves=self.leaves,
            spread=self._spread,
        )
        alone = len(devices) == 1 and self.processes is None
        self.direct = (
            alone
            and options.mixed_precision == FULL
            and options.optimizers is None
            and not options.nonfinite.looks
        )

    def on(self, runner: Runner) -> Training:
        """The same on other devices from now on; the other processes need not know."""
        self._cuts.retire()
        other = copy.copy(self)
        dtype = self._options.mixed_precision.param_dtype
        other.leaves = ReplicaParameters(list(self._module.parameters()), runner.devices, dtype)
        other.reducer.use_leaves(other._leaves_of_trained())
        other._place(runner)
        return other

    def fits(self, module: nn.Module) -> bool:
        """Whether leaves and reducer are right for a module and its parameters as they are now."""
        if self.direct or module is not self._module:
            return module is self._module
        followed = self.clones.follow() and self.leaves.follow()
        return followed and not any([p.requires_grad for p in self._untrained])

    def follow(self) -> None:
        """Look once more at the module, which code of the user's may have changed after `fits`."""
        if not (self.direct or self.clones.follow()):
            raise RuntimeError(
                "parameters of the wrapped module were replaced while its forward was being "
                "prepared; replace them between two forwards"
            )

    # --- one forward -----------------------------------------------------------------------------

    def begin(
        self, args: Sequence[Any], kwargs: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any], ReplicaGraphs | None]:
        """The arguments that the replicas get, and their graphs where gradients are computed."""
        precision = self._options.mixed_precision
        if precision.param_dtype is not None:
            args = [map_leaves(precision.convert_input, one) for one in args]
            kwargs = [map_leaves(precision.convert_input, one) for one in kwargs]
        if self.direct or not torch.is_grad_enabled() or not self._originals:
            return args, kwargs, None
        graphs = ReplicaGraphs(args, kwargs)
        return graphs.args, graphs.kwargs, graphs

    def end(
        self, graphs: ReplicaGraphs, outputs: list[Any], *, weight: float, synchronize: bool
    ) -> list[Any]:
        """The outputs with the cut behind them.

        Raises:
            RuntimeError: Their graphs lead to other workers.
        """
        followed = graphs.take(outputs)
        if not any(followed):
            return graphs.rebuild(followed) if graphs.is_written else outputs
        if originals.passes.reach_other_workers(followed):
            raise RuntimeError(
                "the wrapped module calls other workers in its forward, or computes with results "
                "of such calls that are not among its arguments; call the workers outside of the "
                "wrapper and pass their results to it, or use the bare module (.module of the "
                "wrapper)"
            )
        connected = self._cuts.connect(
            graphs.outer, graphs.leaves, followed, weight=weight, synchronize=synchronize
        )
        return graphs.rebuild(connected)

    # --- the processes ---------------------------------------------------------------------------

    def connect(self) -> None:
        """Make the links to the other processes where there are none yet; a collective call then.

        Raises:
            ValueError: The processes have different modules.
        """
        if self.processes is not None:
            self.processes.connect()

    def read_vote(self, *, needs_others: bool) -> None:
        """Read what all processes have said about the last round, as far as they have.

        Raises:
            CollectiveError, CollectiveTimeout: Another process has failed since.
        """
        try:
            self.reducer.read_vote()
        except (CollectiveError, CollectiveTimeout) as error:
            # With new links all find out who was given that round. Who needs nobody goes on
            # without those that have ended.
            others_ended = error.failure is None or error.failure.kind != "raised"
            if not (is_late(error) if needs_others else others_ended):
                raise

    def is_lost(self, *, needs_others: bool) -> bool:
        """Whether a forward needs other processes, and the links to them are broken."""
        if self.processes is None:
            return False
        self.read_vote(needs_others=needs_others)
        # New links would let it be forgotten that gradients of an earlier step are wrong.
        self.processes.check_late()
        # The others may have ended, and what is left to do here is an evaluation.
        return self.processes.is_broken and needs_others

    @contextlib.contextmanager
    def telling(self, doing: str, *, reduces: bool) -> Iterator[None]:
        """Let the other processes know of an exception, if they will wait for this process."""
        try:
            yield
        except BaseException as error:
            group = self._options.process_group
            if reduces and self.processes is not None and group is not None:
                report(error, doing, group)
            raise

    def close(self) -> None:
        """Remove all hooks and give the process groups back."""
        if self.batch_group is not None:
            self.batch_group.close()
        self.reducer.close()
