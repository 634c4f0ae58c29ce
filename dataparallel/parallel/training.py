"""What a distributed wrapper trains with: options, leaves, reducer, links and standing clones.

Note [Copies of a wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy takes what describes the wrapper, and makes everything else anew at its first forward: the
replicas, and the links to other processes if that forward needs them. All processes come to that
forward; none of them has to come to the copying, which communicates with nobody.

A copy within the process has the same process group. A pickle cannot hold it: who loads one gets
the default group. No copy has gradients, since torch copies parameters without them, nor the
communication hook, whose state belongs to the buckets of one wrapper.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import kernels
from dataparallel.batch.tree import flatten
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout, report
from dataparallel.devices import is_accelerator
from dataparallel.graph.cut import Cuts, ReplicaInputs
from dataparallel.optim.in_backward import StepsInBackward
from dataparallel.reducer.comm_hooks import ResolvedHook
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.reducer.options import ReducerOptions, trained_parameters
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.verify import verify_across_processes
from dataparallel.replicas.clones import ModuleClones
from dataparallel.replicas.replicate import check_placement
from dataparallel.replicas.values import ReplicaParameters

if TYPE_CHECKING:
    from dataparallel.parallel.distributed import DistributedDataParallel

_log = logging.getLogger("dataparallel")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes with which replicas compute and send gradients.

    The module's own parameters and their gradients keep their dtype, so optimizers and checkpoints
    do not change. Only floating-point tensors are converted.

    Example::

        model = DistributedDataParallel(net, mixed_precision=MixedPrecision(torch.bfloat16))

    Args:
        param_dtype: Of the replicas' parameters and inputs. Default: no change.
        reduce_dtype: Of the gradients that the reducer sends. Default: ``param_dtype``.
        buffer_dtype: Of the module's buffers, which the constructor converts. Default: no change.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    @staticmethod
    def of(config: Any) -> MixedPrecision:
        """Read a configuration: None, one of this class, or torch's ``_MixedPrecision``."""
        if config is None:
            return MixedPrecision()
        reduced = config.reduce_dtype or config.param_dtype
        return MixedPrecision(config.param_dtype, reduced, config.buffer_dtype)

    def convert_buffers(self, module: nn.Module) -> None:
        """Convert the floating-point buffers of a module, in place."""
        for buffer in module.buffers() if self.buffer_dtype else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.buffer_dtype)

    def convert_input(self, value: Any) -> Any:
        """A leaf of a forward's arguments as the replicas get it; gradients flow back."""
        converts = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.param_dtype) if converts else value


@dataclass(frozen=True, kw_only=True)
class Options(ReducerOptions):
    """How a wrapper wants its gradients reduced; see the arguments of the wrapper."""

    process_group: dist.ProcessGroup | None = None
    #: Whether this process trains by itself on purpose, if there are others or not.
    separate: bool = False
    timeout: float | None = None
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    nonfinite: NonFinitePolicy = field(default_factory=NonFinitePolicy)
    #: Takes the place of the all-reduce.
    hook: ResolvedHook | None = None
    #: What takes steps in backward.
    optimizers: StepsInBackward | None = None

    def __post_init__(self) -> None:
        caps = self.bucket_cap_mb
        sizes = caps if isinstance(caps, Sequence) else [caps or 0.0]
        if not sizes or min(sizes) < 0:
            raise ValueError(f"bucket_cap_mb is one size or several, in MiB, but got {caps!r}")
        if self.optimizers is not None:
            self.nonfinite.refuse_steps_in_backward()

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        nonfinite, optimizers = copy.deepcopy((self.nonfinite, self.optimizers), memo)
        return replace(self, nonfinite=nonfinite, optimizers=optimizers)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group not in (None, default_group()):
            _log.warning(
                "the pickle of a wrapper does not hold its process group: who loads it gets the "
                "default group, or calls update_process_group(group) of the wrapper"
            )
        return {**vars(self), "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = None if state["separate"] else default_group()
        vars(self).update(state, process_group=group)

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
        world = default_group()
        launched = os.environ.get("WORLD_SIZE", "") if world is None else str(world.size())
        if launched.isdecimal() and int(launched) > 1:
            raise RuntimeError(
                f"this process is one of {launched}, but the wrapper has no group and "
                "would train by itself; call dp.init_process_group() before the module is wrapped, "
                "in every process, or pass process_group=False to train separately in each of "
                "them: nothing is reduced or compared between them then"
            )


#: Those that are no attributes of the wrapper.
HIDDEN_OPTIONS = {"delayed", "hook", "optimizers", "separate"}


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def find_group(group: Any, mesh: Any = None) -> dist.ProcessGroup | None:
    """The group that was passed, that of a mesh of one dimension, or the default one, if any."""
    if mesh is not None:
        if group is not None:
            raise ValueError("pass process_group or device_mesh, not both")
        group = mesh.get_group()
    if group is None or group is False:
        return default_group() if group is None else None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group is a torch.distributed.ProcessGroup (such as that of "
            "torch.distributed.new_group(), in the processes that are its members), None for the "
            f"default group, or False for none, but got {group!r} of type {type(group).__name__}"
        )
    return group


class Training:
    """Everything that belongs to one module, as it is now; making it communicates with nobody.

    Attributes:
        processes: The links; None where there is no other process and no hook.
        batch_group: Who has the batch of which ``"sync"`` takes the statistics; None for the
            replicas of this process.
        direct: Whether the module itself runs: there is nothing to reduce.
    """

    def __init__(self, model: DistributedDataParallel[Any]) -> None:
        module, options, devices = model.module, model.options, model._runner.devices
        policy = model.buffer_policy
        if policy == "sync" and options.average == "samples" and options.world_size > 1:
            raise ValueError(
                "buffers='sync' over several processes and average='samples' do not go together: "
                "the weights would come after backward, when gradients have gone through the "
                "statistics to other processes; multiply the loss by its process's share of the "
                "samples, and use average='none'"
            )
        if not model._spread:
            check_placement(module, devices[0])
        self._module, self._options = module, options
        self._trained = trained_parameters(module)
        self.processes: ReducerProcesses | None = None
        group = options.process_group
        if group is not None and (options.world_size > 1 or options.hook):
            verify = functools.partial(
                verify_across_processes,
                self._trained,
                options=options,
                more={
                    "nonfinite": options.nonfinite.action,
                    "communication hook": "none" if options.hook is None else "registered",
                },
            )
            self.processes = ReducerProcesses(group, options.timeout, model._progress, verify)
        parameters = list(module.parameters())
        dtype = options.mixed_precision.param_dtype
        self.leaves = ReplicaParameters(parameters, devices, dtype)
        trained = set(self._trained.indices)
        self._untrained = [p for i, p in enumerate(parameters) if i not in trained]
        self.reducer = Reducer(
            self._trained,
            self._leaves_of_trained(),
            options,
            self.processes,
            timeline=model.timeline,
            nonfinite=options.nonfinite,
            hook=options.hook,
            optimizers=options.optimizers,
        )
        self.batch_group: HybridGroup | None = None
        if self.processes is not None:
            for device in {parameter.device for parameter in self._trained.parameters}:
                kernels.warm_up(device)
            if policy == "sync":
                self.batch_group = HybridGroup(group, options.timeout)
        self._make_replicas(model)

    def _make_replicas(self, model: DistributedDataParallel[Any]) -> None:
        options, policy, runner = self._options, model.buffer_policy, model._runner
        devices = runner.devices
        self._cuts = Cuts(
            self.reducer.reduce,
            self._trained.parameters,
            self._leaves_of_trained(),
            functools.partial(runner.run, phase="backward"),
            together=policy == "sync" or any(is_accelerator(d) for d in devices),
            across_processes=self.processes is not None,
            timeline=model.timeline,
        )
        self.clones = ModuleClones(
            self._module,
            devices,
            "none" if policy == "mean" and len(devices) > 1 else "first",
            leaves=self.leaves,
        )
        self.direct = (
            len(devices) == 1
            and self.processes is None
            and options.mixed_precision == MixedPrecision()
            and options.optimizers is None
            and not options.nonfinite.looks
        )

    def _leaves_of_trained(self) -> list[list[nn.Parameter]]:
        return [[row[k] for k in self._trained.indices] for row in self.leaves.rows]

    def use_devices(self, model: DistributedDataParallel[Any]) -> None:
        """Train on the wrapper's devices from now on; the other processes need not know."""
        self._cuts.retire()
        parameters, dtype = self._module.parameters(), self._options.mixed_precision.param_dtype
        self.leaves = ReplicaParameters(list(parameters), model._runner.devices, dtype)
        self.reducer.use_leaves(self._leaves_of_trained())
        self._make_replicas(model)

    def fits(self, module: nn.Module) -> bool:
        """Whether leaves and reducer are right for a module and its parameters as they are now."""
        if self.direct or module is not self._module:
            return module is self._module
        if not (self.clones.follow() and self.leaves.follow()):
            return False
        return not self._untrained or not any(p.requires_grad for p in self._untrained)

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
    ) -> tuple[Sequence[Any], Sequence[Any], list[ReplicaInputs] | None]:
        """The arguments that the replicas get, and their inputs where gradients are computed."""
        precision = self._options.mixed_precision
        follows = not self.direct and torch.is_grad_enabled() and bool(self._trained.parameters)
        if not follows and precision.param_dtype is None:
            return args, kwargs, None
        inputs: list[ReplicaInputs] = []
        pairs = []
        for pair in zip(args, kwargs, strict=True):
            values, structure = flatten(pair)
            if precision.param_dtype is not None:
                values = list(map(precision.convert_input, values))
            if follows:
                inputs.append(ReplicaInputs(values))
                values = inputs[-1].given
            pairs.append(structure.rebuild(values))
        args, kwargs = zip(*pairs, strict=True)
        return args, kwargs, inputs if follows else None

    def end(
        self, inputs: list[ReplicaInputs], outputs: list[Any], *, weight: float, synchronize: bool
    ) -> list[Any]:
        """The outputs with the cut behind them."""
        rows, structures = zip(*map(flatten, outputs), strict=True)
        connected = self._cuts.connect(inputs, rows, weight=weight, synchronize=synchronize)
        return [s.rebuild(row) for s, row in zip(structures, connected, strict=True)]

    # --- the processes ---------------------------------------------------------------------------

    def read_vote(self, *, needs_others: bool) -> None:
        """Read the vote on the last round; raises where another process has failed since."""
        try:
            self.reducer.read_vote()
        except (CollectiveError, CollectiveTimeout) as error:
            # With new links all find out who was given that round. Who needs nobody goes on
            # without those that have ended.
            kind = "" if error.failure is None else error.failure.kind
            if (kind != "late") if needs_others else (kind in ("raised", "late")):
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

    def tell(self, error: BaseException) -> None:
        """Let the other processes, which will wait for this one, know why its forward failed."""
        if self.processes is not None and self._options.process_group is not None:
            report(error, "forward", self._options.process_group)

    def close(self) -> None:
        """Remove all hooks and give the process groups back."""
        if self.batch_group is not None:
            self.batch_group.close()
        self.reducer.close()
