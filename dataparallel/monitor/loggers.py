"""The numbers of a run for what a team looks at already: TensorBoard, wandb, Lightning."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.summary import Summary

#: The first part of the names of metrics.
_PREFIX = "dataparallel/"


class MetricsLogger:
    """A writer of the metrics of steps, each step once.

    The target is a ``SummaryWriter``, which has ``add_scalar``; a run of wandb, which has ``log``;
    or a logger of Lightning, which has ``log_metrics``.
    """

    def __init__(self, target: object, every: int) -> None:
        if every < 1:
            raise ValueError(f"log_every is a number of steps, at least 1, but got {every}")
        self._write = _writer(target)
        self._every = every
        #: The last step that was logged, and the one up to which steps are logged next.
        self.last_step, self.next_step = 0, every
        #: Processor seconds that logging has taken.
        self.seconds = 0.0

    def log(
        self, steps: Sequence[StepRecord], summarize: Callable[[Sequence[StepRecord]], Summary]
    ) -> None:
        """Log what steps come to, under the number of the last one."""
        if not steps:
            return
        began = time.thread_time()
        self.last_step = steps[-1].number
        self.next_step = self.last_step + self._every
        metrics = summarize(steps).as_metrics()
        self._write({_PREFIX + name: value for name, value in metrics.items()}, self.last_step)
        self.seconds += time.thread_time() - began

    def begin_anew(self) -> None:
        """Begin the numbers of steps with 1 again."""
        self.last_step, self.next_step = 0, self._every


def _add_scalars(writer: Any, metrics: dict[str, float], step: int) -> None:
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def _log(method: Callable[..., object], metrics: dict[str, float], step: int) -> None:
    method(metrics, step=step)


def _writer(target: Any) -> Callable[[dict[str, float], int], None]:
    if hasattr(target, "add_scalar"):
        return functools.partial(_add_scalars, target)
    for name in ("log_metrics", "log"):
        method: Any = getattr(target, name, None)
        # Others have a method of this name, too.
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(method).bind({}, step=0)
            return functools.partial(_log, method)
    raise TypeError(
        "log_to is a SummaryWriter of TensorBoard, a run of wandb, or a logger of Lightning, but "
        f"got {type(target).__name__}, which has none of add_scalar, log_metrics and log"
    )
