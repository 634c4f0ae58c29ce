"""What watches a wrapper while it trains."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dataparallel.devices import memory_allocated
from dataparallel.monitor.assembler import OptimizerSpans, StepAssembler
from dataparallel.monitor.attach import Publisher
from dataparallel.monitor.findings import Part
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunState, describe_run, name_of_job, rank_of_process
from dataparallel.monitor.summary import Summary, summarize
from dataparallel.monitor.trace import write_timeline
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.threads.timeline import Listener, Phase

P = ParamSpec("P")
T = TypeVar("T")

_numbers = itertools.count()


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
        if keep < 1:
            raise ValueError(f"keep is the number of steps to keep, at least 1, but got {keep}")
        self._model = model
        self._publish = publish
        self._number = next(_numbers)
        self._on_step = on_step
        self._lock = threading.Lock()
        self._steps: deque[StepRecord] = deque(maxlen=keep)
        self._begin_anew()
        # What ends a monitor that is collected holds these; they may not hold the monitor.
        self._listener = Listener(on_devices=_weakly(self._on_devices))
        self._assembler = StepAssembler(
            model.timeline, None if on_step is None else _weakly(self._tell), keep=keep
        )
        self._end: weakref.finalize[..., Any] | None = None

    def _begin_anew(self) -> None:
        self._started = time.time()
        self._last_number = 0
        self._totals: list[dict[Phase, float]] = [{} for _ in self._model.timeline.devices]

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> StepMonitor:
        if self._end is not None:
            raise RuntimeError(
                "this StepMonitor is watching already; leave its with block first, or make another"
            )
        timeline = self._model.timeline
        self._assembler.start()
        timeline.subscribe(self._listener)
        optimizers = OptimizerSpans(timeline, self._model)
        publisher = Publisher(_weakly(self.state)) if self._publish else None
        # Nobody may have left the with block that a notebook has entered by hand.
        unsubscribe = functools.partial(timeline.unsubscribe, self._listener)
        self._end = weakref.finalize(
            self, _end, publisher, unsubscribe, self._assembler.stop, optimizers.remove
        )
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
            self._assembler.finish()

    def step(self) -> None:
        """Say that a step ends here; from then on steps end nowhere else.

        For loops in which it cannot be told from the optimizer: several optimizers that take turns,
        or one that does not step each time.
        """
        self._assembler.end_step()

    # --- what is known ---------------------------------------------------------------------------

    def _keep(self, records: Sequence[StepRecord]) -> None:
        if not records:
            return
        # Steps that were forgotten before anybody asked count like the others.
        number = records[-1].number
        factor = (number - self._last_number) / len(records)
        self._last_number = number
        for record in records:
            self._steps.append(record)
            for total, replica in zip(self._totals, record.replicas, strict=True):
                for phase, seconds in replica.seconds.items():
                    total[phase] = total.get(phase, 0.0) + factor * seconds

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        """Replicas were dropped or added: what is kept is about those that there are now."""
        with self._lock:
            self._steps.clear()
            self._begin_anew()

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
        return summarize([Part.of(step) for step in self.steps], describe_run(self._model))

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
            OSError: The file cannot be written.
        """
        return write_timeline(self.steps, describe_run(self._model), path, rank_of_process())

    def state(self) -> RunState:
        """The run as it is now, as it is published."""
        steps = self.steps
        with self._lock:
            totals = tuple(dict(total) for total in self._totals)
        timeline = self._model.timeline
        now = time.perf_counter_ns()
        return RunState(
            job=name_of_job(),
            rank=rank_of_process(),
            host=socket.gethostname(),
            pid=os.getpid(),
            number=self._number,
            time=time.time(),
            started=self._started,
            num_steps=self._assembler.num_steps,
            num_samples=self._assembler.num_samples,
            info=describe_run(self._model),
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


def _end(publisher: Publisher | None, *ends: Callable[[], None]) -> None:
    for end in ends:
        end()
    if publisher is not None:
        publisher.close()
