"""What watches a wrapper while it trains."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from dataparallel.devices import memory_allocated
from dataparallel.monitor.assembler import StepAssembler
from dataparallel.monitor.attach import Publisher
from dataparallel.monitor.optimizers import OptimizerSpans
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunState, describe_run, with_buckets
from dataparallel.monitor.summary import Summary, summarize
from dataparallel.monitor.trace import write_timeline
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.threads.timeline import Listener, Phase

P = ParamSpec("P")
T = TypeVar("T")


class StepMonitor:
    """Records in which phase each replica of a wrapper is, step by step.

    Phases are marked with the host's clock, and on accelerators with events; nothing waits for a
    device. See Note [Phases of a replica] and Note [Where a step ends]. The steps before are
    forgotten when replicas are dropped or added.

    Example::

        with dataparallel.monitor.StepMonitor(model) as monitor:
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(monitor.summary())

    Args:
        model: The wrapper.
        keep: How many steps are kept; older ones are forgotten. Default: 1000.
        publish: Whether ``dataparallel monitor top --attach`` of the same user may watch. Default:
            True.
        on_step: Called with each step's record, in the training thread. Default: nothing is;
            records are made when they are asked for, which takes less of the training thread.

    Raises:
        TypeError: ``model`` is no wrapper of this package.
        ValueError: ``keep`` is less than 1.
        RuntimeError: It is entered a second time.
    """

    def __init__(
        self,
        model: DataParallel[Any],
        *,
        keep: int = 1000,
        publish: bool = True,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        if not isinstance(model, DataParallel):
            raise TypeError(
                f"a StepMonitor watches a wrapper of this package, but got {type(model).__name__}; "
                "wrap the module in dataparallel.DataParallel or DistributedDataParallel"
            )
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"keep is a number of steps, an int, but got {keep!r}")
        if keep < 1:
            raise ValueError(f"keep is the number of steps to keep, at least 1, but got {keep}")
        if on_step is not None and not callable(on_step):
            raise TypeError(f"on_step is called with each step's record, but got {on_step!r}")
        self._model = model
        self._publish = publish
        self._on_step = on_step
        self._steps: deque[StepRecord] = deque(maxlen=keep)
        self._totals: list[dict[Phase, float]] = [{} for _ in model.timeline.devices]
        self._started = 0.0
        self._info = describe_run(model)
        # What ends a monitor that is collected holds these; they may not hold the monitor.
        self._listener = Listener(on_devices=_weakly(self._on_devices))
        self._assembler = StepAssembler(
            model.timeline, None if on_step is None else _weakly(self._tell), keep=keep
        )
        self._optimizers: OptimizerSpans | None = None
        self._lock = threading.Lock()

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> StepMonitor:
        if self._optimizers is not None:
            raise RuntimeError(
                "this StepMonitor is watching already; leave its with block first, or make another"
            )
        self._started = time.time()
        self._info = describe_run(self._model)
        self._totals = [{} for _ in self._model.timeline.devices]
        self._assembler.start()
        self._model.timeline.subscribe(self._listener)
        self._optimizers = OptimizerSpans(self._model.timeline, self._model)
        # Nobody may have left the with block that a notebook has entered by hand.
        publisher = Publisher(_weakly(self.state)) if self._publish else None
        self._end = weakref.finalize(self, _end, self._assembler, self._optimizers, publisher)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._optimizers is None:
            return
        self._model.timeline.unsubscribe(self._listener)
        self._optimizers = None
        self._end()
        self._assembler.finish()

    def step(self) -> None:
        """Say that a step ends here; from then on steps end nowhere else.

        For loops in which it cannot be told from the optimizer: several optimizers that take turns,
        or one that does not step each time.
        """
        self._assembler.end_step()

    # --- what is known ---------------------------------------------------------------------------

    def _keep(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._steps.append(record)
            for total, replica in zip(self._totals, record.replicas, strict=True):
                for phase, seconds in replica.seconds.items():
                    total[phase] = total.get(phase, 0.0) + seconds

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        """Replicas were dropped or added: what is kept is about those that there are now."""
        for record in self._assembler.drain():
            if self._on_step is not None:
                self._on_step(record)
        with self._lock:
            self._steps.clear()
            self._totals = [{} if old is None else self._totals[old] for old in kept]
            self._info = describe_run(self._model)

    def _tell(self, record: StepRecord) -> None:
        with self._lock:
            self._keep([record])
        if self._on_step is not None:
            self._on_step(record)

    @property
    def steps(self) -> list[StepRecord]:
        """The records of the steps that are kept, the oldest first; a new list."""
        with self._lock:
            if self._on_step is None:
                self._keep(self._assembler.drain())
            return list(self._steps)

    def summary(self) -> Summary:
        """What the steps that are kept come to: shares of phases, stragglers, what to change."""
        return summarize(self.steps, describe_run(self._model))

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the timelines of all replicas, for https://ui.perfetto.dev or chrome://tracing.

        Example::

            monitor.export_chrome_trace("timeline.json.gz")

        Args:
            path: Where to; compressed if the name ends with ``.gz``.

        Returns:
            The file.

        Raises:
            ValueError: No step has been recorded.
            OSError: The file cannot be written; one that was there before is kept.
        """
        return write_timeline(self.steps, self._info, path, _rank())

    def state(self) -> RunState:
        """The run as it is now, as it is published."""
        steps = self.steps
        with self._lock:
            totals = tuple(dict(total) for total in self._totals)
        timeline = self._model.timeline
        now = time.perf_counter_ns()
        return RunState(
            pid=os.getpid(),
            rank=_rank(),
            time=time.time(),
            started=self._started,
            num_steps=self._assembler.num_steps,
            num_samples=self._assembler.num_samples,
            info=with_buckets(self._model, self._info),
            now=tuple(
                (phase, (now - since) / 1e9 if since else 0.0)
                for phase, since in list(timeline.now)
            ),
            totals=totals,
            memory=tuple(memory_allocated(device) for device in timeline.devices),
            last=steps[-1] if steps else None,
        )


def _weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """A method that does not keep its object alive, and then does nothing."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        still_there = found()
        return None if still_there is None else still_there(*args, **kwargs)

    return call


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _end(assembler: StepAssembler, optimizers: OptimizerSpans, publisher: Publisher | None) -> None:
    assembler.stop()
    optimizers.remove()
    if publisher is not None:
        publisher.close()
