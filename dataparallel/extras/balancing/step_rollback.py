"""What is remembered of a wrapper before one of its steps, so that it can run again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.extras.balancing.rollback import GradientRollback, Rollback
from dataparallel.graph.gradient_home import IN_GRAD
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.parallel.distributed import DistributedDataParallel
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.nonfinite import NonFinitePolicy


def num_processes(model: DataParallel[Any]) -> int:
    """How many processes train a wrapper's module together."""
    group = getattr(model, "process_group", None)
    return 1 if group is None else dist.get_world_size(group)


def check_repeatable(model: DataParallel[Any]) -> None:
    """Raise a RuntimeError if a step of a wrapper cannot be run again."""
    if num_processes(model) > 1:
        raise RuntimeError(
            f"Balancer.step runs a step again, which all {num_processes(model)} processes would "
            "have to do together; catch the error of backward in each of them (a RuntimeError, of "
            "which torch.OutOfMemoryError is one), drop the gradients and run the step again"
        )
    if isinstance(model, DistributedDataParallel) and model.options.optimizers is not None:
        raise RuntimeError(
            "optimizers that step in backward have stepped some parameters already when backward "
            "fails, so the step cannot be run again; use an ordinary optimizer"
        )


def _accumulated_by(model: DataParallel[Any]) -> list[Accumulated]:
    """What the reducers of a wrapper know of the gradients of its parameters."""
    if not isinstance(model, DistributedDataParallel):
        return []
    return [model.reducer.accumulations.of(IN_GRAD)]


class StepRollback:
    """Everything that forward and backward of a wrapper change, as it is now, in one process.

    Example::

        before = StepRollback(model)
        model(x).sum().backward()
        before.undo()

    Args:
        model: The wrapper.
        parameters: All tensors that get gradients. Default: the wrapper's parameters.
        modules: Further modules whose buffers are written, such as a criterion. Default: none.
    """

    def __init__(
        self,
        model: DataParallel[Any],
        parameters: Iterable[torch.Tensor] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._state = Rollback(model.timeline.devices)
        self._state.take([model.module, *modules])
        self._gradients = GradientRollback(model.parameters() if parameters is None else parameters)
        # A round that has succeeded takes what is unreduced for reduced, and counts what it skips.
        self._accumulated = [(one, one.state()) for one in _accumulated_by(model)]
        options = getattr(model, "options", None)
        self._policy: NonFinitePolicy | None = None if options is None else options.nonfinite
        self._num_skipped = 0 if self._policy is None else self._policy.num_skipped

    def undo(self) -> None:
        """Make everything as it was."""
        self._state.undo()
        self._gradients.undo()
        for accumulated, state in self._accumulated:
            accumulated.use_state(state)
        if self._policy is not None:
            self._policy.count_again_from(self._num_skipped)
