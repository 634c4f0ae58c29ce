"""The reducer, the links to other processes and the standing clones of one module.

A wrapper that reduces gradients makes another one where parameters are replaced, or links break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataparallel import kernels, torch_internals
from dataparallel.batch.tree import Structure, flatten
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout, RanksParted
from dataparallel.comm.failures import report
from dataparallel.devices import is_accelerator
from dataparallel.graph.cut import Cuts, Forwards, ReplicaInputs
from dataparallel.graph.functions import refuse_tangents
from dataparallel.parallel.buffers import Members, broadcast, has_sync_batch_norm, runs_by_itself
from dataparallel.parallel.runner import Runner
from dataparallel.reducer.nonfinite import SkippedSteps
from dataparallel.reducer.options import Options
from dataparallel.reducer.parameters import MixedPrecision, shared_tensors, trained_parameters
from dataparallel.reducer.processes import Progress, ReducerProcesses, TrainingGroup
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.verify import gather_if_different, verify_across_processes
from dataparallel.reducer.vote import Agreement
from dataparallel.replicas.clones import check_placement, place, refuse_uninitialized
from dataparallel.replicas.spread import end, lay_out, spread, was_spread
from dataparallel.replicas.values import ReplicaParameters

if TYPE_CHECKING:
    from dataparallel.comm.link import ProcessLink
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.parallel.capture import Recorder
    from dataparallel.reducer.comm_hooks import ResolvedHook


class Training:
    """The reducer, links and clones of one module, as it is now; made without communication.

    Args:
        module: The module.
        options: The wrapper's options.
        runner: The threads and devices of the replicas.
        group: The process group with which the wrapper trains.
        progress: The wrapper's record of its rounds.
        hook: Takes the place of the all-reduce.
        optimizers: They take steps in backward.
        skipped: The wrapper's count of the backwards that it has skipped.
        is_model_parallel: True if the module is one replica on several devices.

    Attributes:
        processes: The links; None if there is no other process and no hook.
        direct: True if the module itself runs: there is nothing to reduce.
        recorder: The recorder of the replicas in graphs, if there is one.
        cuts: The nodes behind the outputs of forwards.
        leaves: The parameters of the replicas.
        clones: The standing clones, which have these.
    """

    # By parameter, the number of its owner among the devices; empty with originals at home.
    _owners: Sequence[int] = ()

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        runner: Runner,
        group: TrainingGroup,
        progress: Progress,
        *,
        hook: ResolvedHook | None,
        optimizers: StepsInBackward | None,
        skipped: SkippedSteps,
        is_model_parallel: bool,
    ) -> None:
        others = group.group if group.world_size > 1 or hook else None
        self._module, self.options, self._runner = module, options, runner
        self._group, self._optimizers = group, optimizers
        self._members = Members(
            runner.policy, others, separate=group.separate, timeout=options.timeout
        )
        self._refuse_options(is_model_parallel=is_model_parallel)
        refuse_uninitialized(module)
        self._trained = trained_parameters(module)
        if not is_model_parallel:
            self._arrange()
        trained = set(self._trained.indices)
        self._untrained = [p for i, p in enumerate(module.parameters()) if i not in trained]
        self.processes: ReducerProcesses | None = None
        if others is not None:
            hooked = hook is not None
            verify = functools.partial(
                verify_across_processes,
                module,
                self._trained,
                options,
                hooked=hooked,
                num_owners=len(set(runner.devices)) if options.spreads else 1,
            )
            self.processes = ReducerProcesses(
                others,
                options.timeout,
                progress,
                functools.partial(_meet, module, options, progress, verify),
                Forwards(module),
                hook=hook,
            )
            for device in {parameter.device for parameter in self._trained.parameters}:
                kernels.warm_up(device)
        with self._as_made():
            leaves = self._make_leaves()
            self.reducer = Reducer(
                self._trained,
                leaves,
                options,
                self.processes,
                optimizers=optimizers,
                skipped=skipped,
                timeline=runner.timeline,
            )
            self._make_replicas(leaves)

    def _refuse_options(self, *, is_model_parallel: bool) -> None:
        """Raise a ValueError for options that do not go together with this module."""
        options, policy, module = self.options, self._runner.policy, self._module
        averages = options.average == "samples" and self._group.world_size > 1
        if averages and self._members.spans_processes(module):
            raise ValueError(
                "batch norm over several processes (buffers='sync', or torch.nn.SyncBatchNorm) and "
                "average='samples' do not go together: the weights would come after backward, when "
                "gradients have gone through the statistics to other processes; multiply the loss "
                "by its process's share of the samples, and use average='none'"
            )
        if options.spreads and is_model_parallel:
            raise ValueError(
                "originals='spread' is for replicas that have all parameters on their device, and "
                "the layers of this module are on several devices; move it to one device first, or "
                "leave originals at 'home'"
            )
        waits = policy == "sync" or has_sync_batch_norm(module)
        if options.capture and (is_model_parallel or waits):
            raise ValueError(
                "capture=True goes neither with buffers='sync' or torch.nn.SyncBatchNorm, whose "
                "replicas wait for each other, nor with a module whose layers are on several "
                "devices; leave one of them out"
            )

    def _arrange(self, *, again: bool = False) -> None:
        """Let the originals be where they belong; an error if somebody has put some elsewhere.

        With ``again`` they keep their owners, in whose order other processes send buckets.
        """
        module, devices = self._module, self._runner.devices
        home, may_move = devices[0], set[int]()
        if was_spread(module):
            may_move = {id(p) for p in module.parameters() if p.device.type == home.type}
        check_placement(module, home, but=may_move)
        parameters, places = list(module.parameters()), list(dict.fromkeys(devices))
        if again and self.leaves.stands_for(parameters):
            lay_out(module, parameters, [places[owner] for owner in self._owners])
        elif self.options.spreads:
            spread(module, self._trained.parameters, devices)
            self._owners = [places.index(parameter.device) for parameter in parameters]
        elif may_move:
            end(module, home)

    def _as_made(self) -> AbstractContextManager[None]:
        """Return the mode in which the parameters were made: inference-mode leaves never train."""
        return torch.inference_mode(any(map(torch.Tensor.is_inference, self._module.parameters())))

    def _make_leaves(self) -> list[list[nn.Parameter]]:
        """Make what the replicas compute with; returns what is trained of it."""
        dtype = self.options.mixed_precision.param_dtype
        parameters = list(self._module.parameters())
        self.leaves = ReplicaParameters(parameters, self._runner.devices, dtype)
        return [[row[k] for k in self._trained.indices] for row in self.leaves.rows]

    def _make_replicas(self, leaves: list[list[nn.Parameter]]) -> None:
        options, runner = self.options, self._runner
        self.cuts = Cuts(
            self.reducer.reduce,
            self._trained.parameters,
            leaves,
            functools.partial(runner.run, phase="backward"),
            together=runner.policy == "sync" or any(map(is_accelerator, runner.devices)),
            forwards=None if self.processes is None else self.processes.forwards,
            timeline=runner.timeline,
        )
        self.clones = runner.make_clones(self._module, self.leaves, self._members)
        self.direct = (
            len(runner.devices) == 1
            and self.processes is None
            and options.mixed_precision == MixedPrecision()
            and self._optimizers is None
            and options.nonfinite == "ignore"
            and not options.capture
            and runs_by_itself(self._module)
        )
        self.recorder: Recorder | None = None
        if options.capture:
            # Imported late: few record.
            from dataparallel.parallel.capture import Recorder

            self.recorder = Recorder(self.leaves, runner.devices)

    def use_runner(self, runner: Runner) -> None:
        """Train on another runner's devices from now on; the other processes need not know."""
        self.cuts.retire()
        before, self._runner = len(set(self._runner.devices)), runner
        self._arrange(again=self.options.spreads and len(set(runner.devices)) == before)
        with self._as_made():
            leaves = self._make_leaves()
            self.reducer.use_leaves(leaves)
            self._make_replicas(leaves)

    def fits(self, module: nn.Module) -> bool:
        """True if leaves and reducer are right for a module and its parameters as they are now."""
        if self.direct or module is not self._module:
            return module is self._module
        same = self.clones.follow() and self.leaves.follow()
        if not same and self.options.spreads:
            # Somebody has moved them, which the other processes need not know.
            self.bring_back()
            same = self.clones.follow() and self.leaves.follow()
        return same and not any(map(attrgetter("requires_grad"), self._untrained))

    def bring_back(self) -> None:
        """Let spread originals be where they belong; a backward may still need the leaves."""
        if self.options.spreads:
            place(self._module, self._runner.devices)
            self._arrange(again=True)

    # --- the processes ---------------------------------------------------------------------------

    def read_vote(self, *, needs_others: bool) -> None:
        """Read the vote on the last round; raise if another process has failed since."""
        try:
            self.reducer.read_vote()
        except (CollectiveError, CollectiveTimeout) as error:
            # A process that needs nobody goes on without those that have ended.
            kind = "" if error.failure is None else error.failure.kind
            if needs_others or kind in ("raised", "late", "skipped"):
                raise
            assert self.processes is not None
            self.processes.withdraw()

    def is_lost(self, *, needs_others: bool) -> bool:
        """True if a forward needs other processes, and the links to them are broken."""
        if self.processes is None:
            return False
        try:
            self.read_vote(needs_others=needs_others)
            if needs_others:
                self.reducer.check_left()
            # New links would let it be forgotten that gradients of an earlier step are wrong.
            self.processes.check_late()
        except (CollectiveError, CollectiveTimeout):
            # With new links all find out which processes got that round.
            if not needs_others or self.processes.num_owed >= 0:
                raise
        # The others may have ended, and what is left to do here is an evaluation.
        return self.processes.is_broken and needs_others

    def has_parted(self) -> bool:
        """True if others are still in a step that is open here; a collective call if one is."""
        if self.processes is None or not self.processes.forwards.open_before():
            return False
        outcome = "The others drop their step, too, and nothing of it is kept"
        try:
            error = Agreement(self.processes, None).check(outcome)
        except RanksParted as behind:
            self.tell(behind)
            raise
        if error is not None:
            self.tell(error)
        return error is not None

    def tell(self, error: BaseException) -> None:
        """Let the other processes, which will wait for this one, know why its forward failed."""
        if self.processes is not None:
            report(error, "forward", self._group.group)

    def close(self) -> None:
        """Remove all hooks and give the process groups back."""
        self._members.close()
        self.reducer.close()


def _meet(
    module: nn.Module,
    options: Options,
    progress: Progress,
    verify: Callable[[ProcessLink], None],
    buckets: ProcessLink,
    control: ProcessLink,
) -> None:
    """Compare with the other processes; parameters that are new since get rank 0's values."""
    verify(control)
    parameters = shared_tensors(module, buffers=False)
    if options.init_sync:
        # The constructor sends all; to a copy of a wrapper none is new.
        known = parameters.values() if progress.parameters is None else progress.parameters
        ids = set(map(id, known))
        new = [name for name, parameter in parameters.items() if id(parameter) not in ids]
        given = gather_if_different(new, control, what="which parameters are new") or [new]
        sent = {name: parameters[name] for name in dict.fromkeys(chain(*given))}
        broadcast(sent, 0, buckets, what="new parameters of rank 0")
    progress.parameters = list(parameters.values())


@dataclass
class Reduction:
    """The reduction of the gradients of one forward: leaves before its replicas, the cut behind."""

    training: Training
    #: The weight of this process in an average over samples; None adds up its chunks.
    weight: float | None
    #: True if they are reduced over processes, too.
    synchronize: bool
    #: The inputs of the replicas, if gradients are computed.
    inputs: list[ReplicaInputs] = field(default_factory=list)

    def begin(
        self, args: Sequence[Any], kwargs: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the arguments of the replicas, with leaves in place of what requires grad."""
        training, self.inputs = self.training, []
        precision = training.options.mixed_precision
        follows = not training.direct and torch.is_grad_enabled()
        if not follows and precision.param_dtype is None:
            return args, kwargs
        if follows:
            training.cuts.begin(training.leaves.num_changes)
        pairs = []
        for pair in zip(args, kwargs, strict=True):
            values, structure = flatten(pair)
            if precision.param_dtype is not None:
                values = list(map(precision.convert_input, values))
            if follows:
                self.inputs.append(ReplicaInputs(values))
                values = self.inputs[-1].given
            pairs.append(structure.rebuild(values))
        args, kwargs = zip(*pairs, strict=True)
        return args, kwargs

    def end(self, outputs: list[Any], counts: Sequence[float]) -> list[Any]:
        """Return the outputs with the cut behind them; ``counts`` are the weights of the chunks."""
        if not self.inputs:
            return outputs
        rows, structures = zip(*map(flatten, outputs), strict=True)
        if torch_internals.forward_mode_level() >= 0:
            # They come from tensors that the module has from outside.
            refuse_tangents([value for row in rows for value in row])
        weight = float(sum(counts)) if self.weight is None else self.weight
        cut = self.training.cuts.connect(
            self.inputs, rows, weight=weight, synchronize=self.synchronize
        )
        return list(map(Structure.rebuild, structures, cut))
