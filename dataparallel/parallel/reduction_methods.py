"""What users say to, and ask of, the reduction of a wrapper."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from dataparallel.optim.in_backward import InBackwardOptimizers, StepsInBackward
from dataparallel.parallel.process_choice import check_alone, chosen_group
from dataparallel.parallel.training import Training
from dataparallel.reducer.comm_hooks import ResolvedHook, resolve_hook
from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.reducer.options import AverageKind
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.verify import check_replicas


class ReductionMethods:
    """The part of a wrapper that is about its gradients; it has no state of its own."""

    module: Any
    device_ids: Any
    process_group: dist.ProcessGroup | None
    average: AverageKind
    deterministic: bool
    _hook: ResolvedHook | None = None
    # Whether this process trains by itself on purpose.
    _is_separate = False
    # Why the processes can never reduce together again; empty if they can.
    _stuck = ""
    _optimizers: StepsInBackward | None
    _nonfinite: NonFinitePolicy
    _own: Any
    #: Whether this is loaded from a pickle that could not hold the process group of the wrapper.
    _lost_group = False

    @property
    def _training(self) -> Training:
        """What reduces; the wrapper knows how to make it."""
        raise NotImplementedError

    def _rebuild(self) -> None:
        """Make everything anew; the wrapper knows how."""
        raise NotImplementedError

    @property
    def reducer(self) -> Reducer:
        """What reduces the gradients, see :class:`dataparallel.reducer.reducer.Reducer`."""
        return self._training.reducer

    def set_weight(self, weight: float) -> None:
        """Give this process's weight in ``average="samples"`` for this thread's next forward.

        Example::

            model.set_weight(num_tokens)
            loss = model.loss(criterion, x, y)

        Args:
            weight: Any finite number that is not negative, such as the number of tokens; with 0
                this process adds nothing, whatever its gradients are. Default, where this is not
                called: the number of samples, or in a forward the sum of its chunks' weights if
                ``scalars`` is a function.

        Raises:
            ValueError: It is no such number, or ``average`` is another one.
        """
        if self.average != "samples":
            raise ValueError(
                f"a weight counts with average='samples', but this wrapper has {self.average!r}"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(
                f"a weight must be finite and not negative, but got {weight}; pass the number of "
                "samples or tokens of this process"
            )
        self._own.weight = float(weight)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Let a hook reduce the buckets over the processes, in place of an all-reduce.

        The hook gets buckets that are summed over the local replicas. Hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` run unmodified.

        Example::

            model.register_comm_hook(None, "bf16_compress")
            model.register_comm_hook(PowerSGDState(None), powerSGD_hook)

        Args:
            state: What the hook is called with; for a name, the process group.
            hook: ``hook(state, bucket)`` that returns a future of the bucket's content, or the name
                of one; see :func:`dataparallel.reducer.comm_hooks.resolve_hook`.

        Raises:
            TypeError, ValueError: The hook cannot be one, or there is no process group; or the hook
                is one of PowerSGD, and ``nonfinite="skip"``.
            RuntimeError: There is a hook already.
        """
        resolved = resolve_hook(hook, state)
        if self.process_group is None:
            raise ValueError(
                "a communication hook reduces over processes, but there is no process group; call "
                "torch.distributed.init_process_group() before the module is wrapped"
            )
        if self._hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once"
            )
        if self.deterministic:
            raise ValueError(
                "deterministic=True makes the sum over processes in rank order, which a "
                "communication hook replaces; use one of them"
            )
        if resolved.is_power_sgd:
            self._nonfinite.refuse_kept_nan(resolved.name)
        self._hook = resolved
        if self._training.processes is None:
            self._rebuild()
        else:
            self.reducer.use_hook(resolved)

    def step_in_backward(
        self, optimizer_class: type[torch.optim.Optimizer], **arguments: Any
    ) -> InBackwardOptimizers:
        """Take an optimizer's step for each bucket as soon as it is reduced, within backward.

        Gradients are freed at once, so they never take as much memory as the parameters. What
        torch's ``_apply_optimizer_in_backward`` left on the parameters is picked up without this.

        Example::

            optimizers = model.step_in_backward(torch.optim.SGD, lr=0.1)
            model.loss(criterion, x, y).backward()        # and that is the whole step

        Args:
            optimizer_class: Any whose parameters are stepped one by one.
            arguments: Its further arguments.

        Returns:
            The optimizers, for learning rate schedules and checkpoints.

        Raises:
            RuntimeError: There are such optimizers already.
            ValueError: The wrapper looks for gradients that are not finite.
        """
        self._nonfinite.refuse_steps_in_backward()
        if self._optimizers is not None:
            raise RuntimeError("the parameters of this wrapper are stepped in backward already")
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._optimizers = made = InBackwardOptimizers.make(optimizer_class, trained, **arguments)
        self._rebuild()
        return made

    def check_replicas(self) -> None:
        """Compare parameters over replicas and processes, and buffers over processes, bit for bit.

        Every process calls it. Nothing but fingerprints travels as long as all are the same.

        Raises:
            ReplicaMismatch: Something differs; the message names tensors, replicas and ranks.
            RuntimeError: There are several processes, but the wrapper has no process group.
        """
        self._check_alone()
        leaves, processes = self._training.leaves, self._training.processes
        # What was changed on purpose is carried over first; it must not repair what was not.
        leaves.refresh(read_values=False)
        originals = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        replicas = []
        for i in range(len(self.device_ids)):
            replica: dict[str, torch.Tensor] = {**originals, **buffers}
            for (name, original), leaf in zip(originals.items(), leaves.of(i), strict=True):
                same = leaf.dtype == original.dtype
                replica[name if same else f"{name} as {leaf.dtype}"] = leaf
            replicas.append(replica)
        link = None if processes is None else processes.buckets
        check_replicas(replicas[0], replicas[1:], link)

    def _check_alone(self) -> None:
        """Refuse to go on without a process group where there are several processes."""
        if self.process_group is None and not self._is_separate:
            check_alone()

    def _check_can_go_on(self) -> None:
        """Refuse a forward whose gradients could not be reduced, at once and in all processes."""
        self._check_alone()
        processes = self._training.processes
        if processes is not None and not self._stuck:
            self._stuck = processes.stuck
        if self._stuck:
            raise RuntimeError(
                f"this wrapper cannot go on, and no process can: {self._stuck.rstrip()}\n"
                "Since then the processes are at different collectives of the hook, whose results "
                "would be mixed up. Start the processes again from a checkpoint; or call "
                "torch.distributed.destroy_process_group() and dp.init_process_group() in every "
                "process, and wrap .module again"
            )

    def update_process_group(self, process_group: dist.ProcessGroup | None) -> None:
        """Reduce over other processes from now on; every process of the new group calls it."""
        self.process_group = chosen_group(process_group, None)
        self._is_separate = False
        self._lost_group = False
        self._rebuild()
        self._training.connect()

    def reset_state(self) -> None:
        """Forget a backward that was left unfinished by an error."""
        self._training.reset()
