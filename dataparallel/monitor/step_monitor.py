"""The monitor of a model while it trains."""

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

from torch import nn
from torch.optim import Optimizer

from dataparallel.devices import memory_allocated, memory_of
from dataparallel.monitor.assembler import OptimizerSpans, StepAssembler
from dataparallel.monitor.attach import Publisher
from dataparallel.monitor.describe import describe_run, name_of_job, rank_of_process
from dataparallel.monitor.findings import StepWindow
from dataparallel.monitor.loggers import MetricsLogger
from dataparallel.monitor.module_spans import ModuleSpans, device_of
from dataparallel.monitor.record import Kind, StepRecord, StepTotals
from dataparallel.monitor.run import RunState
from dataparallel.monitor.summary import Summary, summarize
from dataparallel.monitor.trace import write_timeline
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.threads.timeline import Listener, Timeline

P = ParamSpec("P")
T = TypeVar("T")

_numbers = itertools.count()
# Those that watch now.
_watching: weakref.WeakSet[StepMonitor] = weakref.WeakSet()


def num_watching() -> int:
    """Return how many monitors watch in this process."""
    return len(_watching)


class StepMonitor:
    """A record of the phase of each replica of a model, step by step.

    A wrapper of this package tells the phases of its replicas itself, also where it is a part of
    something else. Hooks watch any other module, such as torch's ``DistributedDataParallel`` or
    ``FullyShardedDataParallel``, or one that ``torch.compile`` or ``fully_shard`` has changed. It
    counts as one replica, on the device of its first parameter. Its contents are its forward, with
    wrappers of this package in it. An optimizer stands for all modules that hold its parameters.
    With torch's wrappers the all-reduce is a part of the backward, and the gathering of sharded
    parameters of both. Parameters without a module have all between the optimizer's step and the
    backward as forward. See Note [Modules that are called].

    Phases are marked with the host's clock, and on accelerators with events; nothing waits for a
    device once a with block has begun. See Note [Phases of a replica] and Note [Where a step ends].
    The steps before are forgotten when replicas are dropped or added, or a module goes to another
    device.

    Example::

        with dataparallel.monitor.StepMonitor(model) as monitor:
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(monitor.summary())

    Args:
        model: A wrapper, a module, or an optimizer.
        keep: How many steps are kept; older ones are forgotten. Default: 1000.
        publish: True if ``dataparallel monitor top --attach`` of the same user may watch. Default:
            True.
        on_step: Called with each step's record, in the training thread. Default: nothing is;
            records are made when they are asked for, which takes less of the training thread.
        log_to: Gets the metrics of :meth:`Summary.as_metrics` under ``dataparallel/``, about the
            steps since the last time: a ``SummaryWriter`` of TensorBoard, a run of wandb, or a
            logger of Lightning. The step is the record's number; wandb drops what has a lower
            one than it has seen. Default: nobody.
        log_every: Steps between two times. Default: 50.

    Raises:
        TypeError: ``model`` is neither a module nor an optimizer, or ``log_to`` takes no metrics.
        ValueError: ``keep`` or ``log_every`` is less than 1.
        RuntimeError: It is entered a second time.
    """

    def __init__(
        self,
        model: nn.Module | Optimizer,
        *,
        keep: int = 1000,
        publish: bool = True,
        on_step: Callable[[StepRecord], None] | None = None,
        log_to: object = None,
        log_every: int = 50,
    ) -> None:
        if not isinstance(model, (nn.Module, Optimizer)):
            raise TypeError(
                "a StepMonitor watches a torch.nn.Module, with or without a wrapper, or a "
                f"torch.optim.Optimizer, but got {type(model).__name__}"
            )
        if keep < 1:
            raise ValueError(f"keep is the number of steps to keep, at least 1, but got {keep}")
        self._model = model
        self._timeline = (
            model.timeline if isinstance(model, DataParallel) else Timeline([device_of(model)])
        )
        self._logger = None if log_to is None else MetricsLogger(log_to, log_every)
        self._publish = publish
        self._number = next(_numbers)
        self._on_step = on_step
        self._lock = threading.Lock()
        self._steps: deque[StepRecord] = deque(maxlen=keep)
        # The end of a collected monitor holds these; they may not hold the monitor.
        self._listener = Listener(
            on_call=None if self._logger is None else _weakly(self._log),
            on_devices=_weakly(self._on_devices),
        )
        self._assembler = StepAssembler(
            self._timeline, None if on_step is None else _weakly(self._tell), keep=keep
        )
        self._end: weakref.finalize[..., Any] | None = None
        self._stopped: float | None = None
        self._publisher: Publisher | None = None
        self._module_spans: ModuleSpans | None = None
        self._optimizers: OptimizerSpans | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._started = time.time()
        self._last_number = 0
        devices = self._devices = self._timeline.devices
        self._kinds: dict[Kind, StepTotals] = {}
        self._retries = [memory_of(device).retries for device in devices]
        self._seconds_before = self._seconds()

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> StepMonitor:
        if self._end is not None:
            raise RuntimeError(
                "this StepMonitor is watching already; leave its with block first, or make another"
            )
        timeline = self._timeline
        if self._devices != timeline.devices:
            # They have changed since it watched last.
            self._on_devices(())
        self._assembler.start()
        timeline.subscribe(self._listener)
        self._optimizers = OptimizerSpans(timeline, self._model)
        ends = [self._optimizers.remove]
        if not isinstance(self._model, DataParallel):
            self._module_spans = ModuleSpans(timeline, self._model)
            ends.append(self._module_spans.remove)
        self._publisher = Publisher(_weakly(self.state)) if self._publish else None
        # Nobody may have left the with block that a notebook has entered by hand.
        unsubscribe = functools.partial(timeline.unsubscribe, self._listener)
        ends += [unsubscribe, self._assembler.stop]
        self._stopped = None
        self._end = weakref.finalize(self, _end, self._publisher, *ends)
        _watching.add(self)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        end, self._end = self._end, None
        _watching.discard(self)
        if end is not None:
            end()
            self._assembler.finish()
            self._stopped = time.time()
            if self._logger is not None:
                self._log_steps(self._logger)

    def step(self) -> None:
        """Say that a step ends here; from then on steps end nowhere else.

        For loops in which the optimizer does not show it: several optimizers that take turns, or
        one that does not step each time.
        """
        self._assembler.end_step()

    # --- what is known ---------------------------------------------------------------------------

    def _keep(self, records: Sequence[StepRecord]) -> None:
        if not records:
            return
        # Steps that were forgotten before anybody asked count like the others.
        count = records[-1].number - self._last_number
        self._last_number += count
        for i, record in enumerate(records):
            self._steps.append(record)
            before = self._kinds.get(record.kind) or StepTotals.none(len(record.replicas))
            times = (i + 1) * count // len(records) - i * count // len(records)
            self._kinds[record.kind] = before.plus(record, times)

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        """Replicas were dropped or added: what is kept is about those that there are now."""
        with self._lock:
            self._steps.clear()
            self._begin_anew()
            if self._logger is not None:
                self._logger.begin_anew()

    def _tell(self, record: StepRecord) -> None:
        with self._lock:
            self._keep([record])
        if self._on_step is not None:
            self._on_step(record)

    def _log(self, sizes: Sequence[int], trains: bool) -> None:
        if self._logger is not None and self._assembler.num_steps >= self._logger.next_step:
            self._log_steps(self._logger)

    def _log_steps(self, logger: MetricsLogger) -> None:
        logger.log([one for one in self.steps if one.number > logger.last_step], self._summarize)

    @property
    def steps(self) -> list[StepRecord]:
        """The records of the steps that are kept, the oldest first; a new list."""
        with self._lock:
            if self._on_step is None:
                self._keep(self._assembler.drain())
            return list(self._steps)

    def summary(self) -> Summary:
        """Summarize the steps that are kept: shares of phases, stragglers, changes to make."""
        return self._summarize(self.steps)

    def _summarize(self, steps: Sequence[StepRecord]) -> Summary:
        state = self.state()
        return summarize([StepWindow.of(step) for step in steps], state.info, state=state)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the timelines of all replicas, for https://ui.perfetto.dev or chrome://tracing.

        Example::

            monitor.export_chrome_trace("timeline.json.gz")

        Args:
            path: The path of the file; compressed if the name ends with ``.gz``.

        Returns:
            The file.

        Raises:
            ValueError: No step has been recorded.
            OSError: The file cannot be written.
        """
        info = describe_run(self._model, self._timeline)
        return write_timeline(self.steps, info, path, rank_of_process())

    def state(self) -> RunState:
        """Return the run as it is now, as it is published."""
        steps = self.steps
        with self._lock:
            kinds, retries = dict(self._kinds), tuple(self._retries)
        timeline = self._timeline
        memory = [memory_of(device) for device in timeline.devices]
        # In this order: what has begun by now has begun before.
        phases, now = list(timeline.now), time.perf_counter_ns()
        if all(phase == "idle" for phase, _ in phases) and self._assembler.is_between_steps:
            phases = [("input", since) for _, since in phases]
        return RunState(
            job=name_of_job(),
            rank=rank_of_process(),
            host=socket.gethostname(),
            pid=os.getpid(),
            number=self._number,
            time=self._stopped or time.time(),
            started=self._started,
            info=describe_run(
                self._model,
                timeline,
                "" if self._optimizers is None else self._optimizers.faster_option,
            ),
            now=tuple((phase, (now - since) / 1e9 if since else 0.0) for phase, since in phases),
            kinds=kinds,
            memory=tuple(memory_allocated(device) for device in timeline.devices),
            last=steps[-1] if steps else None,
            monitor_seconds=self._seconds() - self._seconds_before,
            memory_peak=tuple(one.peak for one in memory),
            memory_total=tuple(one.total for one in memory),
            memory_retries=tuple(
                one.retries - before for one, before in zip(memory, retries, strict=True)
            ),
        )

    def _seconds(self) -> float:
        """Processor seconds of spans, hooks, records, logs and answers to watchers so far."""
        others = (self._assembler, self._module_spans, self._publisher, self._logger)
        return self._timeline.seconds + sum(one.seconds for one in others if one is not None)


def _weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return a method that does not keep its object alive, and then does nothing."""
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
