"""What a wrapper is trained with: leaves, reducers, groups of processes and the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import kernels
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.comm.failure_channel import channel_of
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.process_group import shared_store
from dataparallel.graph.cut import Rounds
from dataparallel.optim.in_backward import StepsInBackward
from dataparallel.parallel.buffers import BufferPolicy
from dataparallel.parallel.mixed_precision import FULL, MixedPrecision
from dataparallel.parallel.reducing_engine import ReducingEngine
from dataparallel.reducer.average import AverageKind
from dataparallel.reducer.chained import ChainedReducers
from dataparallel.reducer.comm_hooks import ResolvedHook
from dataparallel.reducer.ignored import ignored_names
from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.reducer.options import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LOCAL_BUCKET_BYTES,
    MIB,
    ReducerOptions,
)
from dataparallel.reducer.processes import ReducerProcesses
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.trained import TrainedParameters, trained_parameters
from dataparallel.replicas.replica_parameters import ReplicaParameters
from dataparallel.replicas.replicate import check_placement
from dataparallel.replicas.standing_clones import OtherParameters
from dataparallel.threads.timeline import Timeline


@dataclass
class ReductionSettings:
    """How a wrapper wants its gradients reduced; see the arguments of the wrapper.

    Attributes:
        process_group: The processes; None for this one alone.
        bucket_cap_mb: Size of a bucket in MiB, or one for each; None for the default.
        find_unused_parameters: What is known of unused parameters.
        gradient_as_bucket_view: Whether ``.grad`` is a part of the bucket.
        static_graph: Whether the same parameters are used in every backward.
        delayed: Names of parameters that are reduced last.
        average: How the processes' gradients are put together.
        deterministic: Whether sums over processes are made in rank order.
        timeout: Seconds to wait for other processes. Default: the time limit of the group.
        precision: In which dtypes the replicas compute.
        hook: A communication hook.
        optimizers: What takes steps in backward.
        nonfinite: What becomes of gradients that are not finite.
    """

    process_group: dist.ProcessGroup | None = None
    bucket_cap_mb: float | Sequence[float] | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    delayed: frozenset[str] = frozenset()
    average: AverageKind = "processes"
    deterministic: bool = False
    timeout: float | None = None
    precision: MixedPrecision = FULL
    hook: ResolvedHook | None = None
    optimizers: StepsInBackward | None = None
    nonfinite: NonFinitePolicy = field(default_factory=NonFinitePolicy)

    def options(self, names: Sequence[str], *, sends: bool) -> ReducerOptions:
        """The options of a reducer for parameters of these names."""
        caps = self.bucket_cap_mb
        if caps is None:
            bucket_bytes: int | tuple[int, ...] = BUCKET_BYTES if sends else LOCAL_BUCKET_BYTES
        elif isinstance(caps, Sequence):
            bucket_bytes = tuple(int(cap * MIB) for cap in caps)
        else:
            bucket_bytes = int(caps * MIB)
        return ReducerOptions(
            first_bucket_bytes=FIRST_BUCKET_BYTES,
            bucket_bytes=bucket_bytes,
            average=self.average,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            deterministic=self.deterministic,
            reduce_dtype=self.precision.reduce_dtype,
            delayed=frozenset(i for i, name in enumerate(names) if name in self.delayed),
        )


class Reduction:
    """Everything that belongs to one module, as it is now, on some devices.

    Building it communicates with nobody; :meth:`connect` does.

    Args:
        module: The original.
        devices: One device per replica.
        policy: What becomes of buffers.
        settings: How gradients are reduced.
        timeline: Is told in which phase the replicas are.
        spread: Whether the one replica is on several devices itself.

    Attributes:
        processes: The links; None where there is no other process and no hook.
        reducer: Reduces over replicas and processes.
        local: Reduces what is left out over processes; None where nothing is.
        leaves: The parameters of the replicas.
        engine: Runs the replicas.

    Raises:
        ValueError: A parameter is not on the first device, or settings contradict each other.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        policy: BufferPolicy,
        settings: ReductionSettings,
        timeline: Timeline,
        *,
        spread: bool = False,
    ) -> None:
        ignored = ignored_names(module)
        trained = trained_parameters(module, without=ignored)
        if not trained.parameters:
            # All are frozen since the wrapper was made, as those of an average may be.
            trained = trained_parameters(module, without=ignored, frozen=True)
        if not spread:
            check_placement(module, devices[0])
        self._module = module
        self._policy = policy
        self._settings = settings
        self._timeline = timeline
        self._spread = spread
        self._num_replicas = len(devices)
        if policy == "sync":
            _check_weights(settings)
        if settings.optimizers is not None:
            settings.nonfinite.refuse_steps_in_backward()
        self.processes = _processes(settings)
        precision = settings.precision
        self.leaves = ReplicaParameters(list(module.parameters()), devices, precision.param_dtype)
        self.reducer = self._make_reducer(trained, self.processes)
        self.reducer.hook = settings.hook
        self.reducer.optimizers = settings.optimizers
        kept = trained_parameters(module, only=ignored)
        self.local = self._make_reducer(kept, None) if kept.parameters else None
        self._trained, self._kept = trained, kept
        if self.processes is not None:
            for device in {parameter.device for parameter in trained.parameters}:
                kernels.warm_up(device)
        self._batch_group: HybridGroup | None = None
        if policy == "sync" and self.processes is not None:
            self._batch_group = HybridGroup(settings.process_group, settings.timeout)
        self.engine = self._make_engine(devices)

    def _make_engine(self, devices: Sequence[torch.device]) -> ReducingEngine:
        settings = self._settings
        precision = settings.precision
        rounds: Rounds = self.reducer
        if self.local is not None:
            rounds = ChainedReducers(self.reducer, self.local)
        alone = len(devices) == 1 and self.processes is None
        return ReducingEngine(
            self._module,
            devices,
            self._policy,
            self.leaves,
            self._trained.indices + self._kept.indices,
            rounds,
            across_processes=self.processes is not None,
            spread=self._spread,
            direct=alone
            and not settings.gradient_as_bucket_view
            and precision == FULL
            and settings.optimizers is None
            and not settings.nonfinite.looks,
            convert=precision.convert_input if precision.param_dtype else None,
            batch_group=self._batch_group,
            timeline=self._timeline,
        )

    def _make_reducer(
        self, trained: TrainedParameters, processes: ReducerProcesses | None
    ) -> Reducer:
        return Reducer(
            trained.parameters,
            trained.names,
            self._leaves_of(trained),
            self._settings.options(trained.names, sends=processes is not None),
            processes,
            trained.sparse,
            timeline=self._timeline,
            nonfinite=self._settings.nonfinite,
        )

    def _leaves_of(self, trained: TrainedParameters) -> list[list[nn.Parameter]]:
        replicas = range(self._num_replicas)
        return [[self.leaves.of(i)[k] for k in trained.indices] for i in replicas]

    def connect(self) -> None:
        """Make the links to the other processes where there are none yet; a collective call then.

        Raises:
            ValueError: The processes have different modules.
        """
        if self.processes is not None:
            self.processes.connect()

    def use_devices(self, devices: Sequence[torch.device]) -> None:
        """Compute on other devices from now on; the other processes need not know.

        Args:
            devices: One device per replica; the first is the one of the originals, as before.
        """
        before = self.engine
        before.retire()
        before.close()
        self._num_replicas = len(devices)
        self.leaves = self.leaves.on(devices)
        for reducer, trained in ((self.reducer, self._trained), (self.local, self._kept)):
            if reducer is not None:
                reducer.use_leaves(self._leaves_of(trained))
        self.engine = self._make_engine(devices)
        self.engine.synchronize = before.synchronize
        self.engine.pending = before.pending

    @contextlib.contextmanager
    def telling(self, doing: str, *, reduces: bool) -> Iterator[None]:
        """Let the other processes know of an exception, if they will wait for this process."""
        try:
            yield
        except OtherParameters:
            # It is no failure.
            raise
        except BaseException as error:
            group = self._settings.process_group
            alone = self.processes is None or self.processes.world_size == 1
            if reduces and not alone and group is not None:
                channel = channel_of(group, shared_store(group))
                if not isinstance(error, (CollectiveError, CollectiveTimeout)):
                    channel.tell(error, doing)
                elif error.failure is not None:
                    # Only those that took part in the collective know it.
                    channel.pass_on(error.failure)
            raise

    def reset(self) -> None:
        """Forget a round that was left unfinished by an error."""
        for reducer in (self.reducer, self.local):
            if reducer is not None:
                reducer.reset()

    def close(self) -> None:
        """End the worker threads, remove all hooks and give the process groups back."""
        self.engine.close()
        if self._batch_group is not None:
            self._batch_group.close()
        for reducer in (self.reducer, self.local):
            if reducer is not None:
                reducer.close()


def _check_weights(settings: ReductionSettings) -> None:
    group = settings.process_group
    if settings.average == "samples" and group is not None and dist.get_world_size(group) > 1:
        raise ValueError(
            "buffers='sync' over several processes and average='samples' do not go together: the "
            "weights would come after backward, when gradients have gone through the statistics to "
            "other processes; multiply the loss by its process's share of the samples, and use "
            "average='none'"
        )


def _processes(settings: ReductionSettings) -> ReducerProcesses | None:
    group = settings.process_group
    if group is None or (dist.get_world_size(group) == 1 and settings.hook is None):
        return None
    return ReducerProcesses(group, settings.timeout)
