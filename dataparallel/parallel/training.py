"""What a distributed wrapper trains with: leaves, reducer, links and standing clones.

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

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.batch.tree import flatten
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.comm.failures import CollectiveError, CollectiveTimeout, report
from dataparallel.devices import is_accelerator
from dataparallel.graph.cut import Cuts, ReplicaInputs
from dataparallel.reducer.exchange import ReducerProcesses
from dataparallel.reducer.options import MixedPrecision, trained_parameters
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.verify import verify_across_processes
from dataparallel.replicas.clones import ModuleClones, check_placement
from dataparallel.replicas.values import ReplicaParameters, Sharing

if TYPE_CHECKING:
    from dataparallel.parallel.distributed import DistributedDataParallel

_requires_grad = attrgetter("requires_grad")


class Training:
    """Everything that belongs to one module, as it is now; making it communicates with nobody.

    Attributes:
        processes: The links; None where there is no other process and no hook.
        batch_group: Who has the batch of which ``"sync"`` takes the statistics; None for the
            replicas of this process.
        direct: Whether the module itself runs: there is nothing to reduce.
    """

    def __init__(self, model: DistributedDataParallel[Any]) -> None:
        module, options = model.module, model.options
        group, policy = options.process_group, model.buffer_policy
        if policy == "sync" and options.average == "samples" and options.world_size > 1:
            raise ValueError(
                "buffers='sync' over several processes and average='samples' do not go together: "
                "the weights would come after backward, when gradients have gone through the "
                "statistics to other processes; multiply the loss by its process's share of the "
                "samples, and use average='none'"
            )
        if not model._spread:
            check_placement(module, model.device_ids[0])
        self._module, self._options = module, options
        self._trained = trained_parameters(module)
        trained = set(self._trained.indices)
        self._untrained = [p for i, p in enumerate(module.parameters()) if i not in trained]
        self.processes: ReducerProcesses | None = None
        self.batch_group: HybridGroup | None = None
        if group is not None and (options.world_size > 1 or options.hook):
            verify = functools.partial(verify_across_processes, module, self._trained, options)
            self.processes = ReducerProcesses(group, options.timeout, model._progress, verify)
            for device in {parameter.device for parameter in self._trained.parameters}:
                kernels.warm_up(device)
            if policy == "sync":
                self.batch_group = HybridGroup(group, options.timeout)
        leaves = self._make_leaves(model.device_ids)
        self.reducer = Reducer(
            self._trained, leaves, options, self.processes, timeline=model.timeline
        )
        self._make_replicas(model, leaves)

    def _make_leaves(self, devices: Sequence[torch.device]) -> list[list[nn.Parameter]]:
        """Make what the replicas compute with; returns what is trained of it."""
        dtype = self._options.mixed_precision.param_dtype
        self.leaves = ReplicaParameters(list(self._module.parameters()), devices, dtype)
        return [[row[k] for k in self._trained.indices] for row in self.leaves.rows]

    def _make_replicas(
        self, model: DistributedDataParallel[Any], leaves: list[list[nn.Parameter]]
    ) -> None:
        options, policy, devices = self._options, model.buffer_policy, model.device_ids
        self._cuts = Cuts(
            self.reducer.reduce,
            self._trained.parameters,
            leaves,
            functools.partial(model._runner.run, phase="backward"),
            together=policy == "sync" or any(is_accelerator(d) for d in devices),
            across_processes=self.processes is not None,
            timeline=model.timeline,
        )
        sharing: Sharing = "none" if policy == "mean" and len(devices) > 1 else "first"
        self.clones = ModuleClones(self._module, devices, sharing, leaves=self.leaves)
        self.direct = (
            len(devices) == 1
            and self.processes is None
            and options.mixed_precision == MixedPrecision()
            and options.optimizers is None
            and not options.nonfinite.looks
        )

    def use_devices(self, model: DistributedDataParallel[Any]) -> None:
        """Train on the wrapper's devices from now on; the other processes need not know."""
        self._cuts.retire()
        leaves = self._make_leaves(model.device_ids)
        self.reducer.use_leaves(leaves)
        self._make_replicas(model, leaves)

    def fits(self, module: nn.Module) -> bool:
        """Whether leaves and reducer are right for a module and its parameters as they are now."""
        if self.direct or module is not self._module:
            return module is self._module
        same = self.clones.follow() and self.leaves.follow()
        return same and not any(map(_requires_grad, self._untrained))

    def check_fits(self, module: nn.Module) -> None:
        """Raise in all processes where everything would be made anew, and some may have joined."""
        if not self.fits(module):
            error = RuntimeError(
                "parameters of the module were replaced, or have another shape, dtype or device, "
                "within a block of join(), and processes that have joined cannot do the same. "
                "Replace parameters before the block, or after it in all processes; "
                "p.data.copy_(...) changes values at any time"
            )
            self.tell(error)
            raise error

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
