"""The balancer: each replica gets as many samples as it computes in the time of the others.

Note [Balancing is exact]
~~~~~~~~~~~~~~~~~~~~~~~~~
Outputs are put together in the order of the samples, losses are weighted by their denominators, and
gradients are sums over samples. So the division of a batch changes nothing but rounding. Two things
do depend on it: the statistics of batch norm if each replica takes its own, and which random
numbers meet which sample.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from dataparallel.comm.local import chunk_lengths
from dataparallel.devices import is_out_of_memory
from dataparallel.errors import add_note
from dataparallel.extras.balancing.memory import replicas_named_by
from dataparallel.extras.balancing.speeds import Change, Cost, SplitDecisions, divide, fits
from dataparallel.monitor.assembler import OptimizerSpans, StepAssembler
from dataparallel.monitor.record import StepRecord
from dataparallel.parallel.data_parallel import DataParallel
from dataparallel.threads.timeline import Listener, Span

_log = logging.getLogger("dataparallel")

# Steps whose records are made together: no more, so that it is known soon what has changed.
_MOST_AT_ONCE = 5
# The part of a chunk that a replica keeps after its memory was too small for all of it.
_KEPT = 0.75
# Every forward asks; mostly for the same batch size.
_divide = functools.lru_cache(divide)
# The replicas that ran out of memory in the forward under way.
_failed: ContextVar[set[int] | None] = ContextVar("out_of_memory", default=None)


def balance(
    model: DataParallel[Any],
    *,
    every: int = 10,
    threshold: float = 0.03,
    warmup: int = 5,
    window: int = 30,
) -> Balancer:
    """Let a wrapper divide its batches by the measured speed and memory of its replicas.

    Use it if one device is slower than the others, throttled, or shared with another program.
    Gradients stay those of the bare module. A replica that runs out of memory hands a part of its
    chunk to the others in the next step. See Note [Balancing is exact] and Note [When chunks
    change].

    Example::

        model = dataparallel.DataParallel(net, ["cpu", "cpu"])
        optimizer = torch.optim.AdamW(model.parameters())
        with dataparallel.balance(model) as balancer:
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        print(balancer.shares, balancer.history)

    Keep the Balancer outside the module and the wrapper. It cannot be copied or pickled.

    Args:
        model: The wrapper. With several processes, each process balances its own replicas.
        every: Chunks change at most once in this number of steps. Default: 10.
        threshold: The part of a step's time that a change must save, below 1. Default: 0.03.
        warmup: Number of steps at the beginning that are not measured. Default: 5.
        window: Number of steps over which speeds are medians, at least ``every``. Default: 30.

    Returns:
        A :class:`Balancer`. It works until its ``close()`` or the end of its ``with`` block.

    Raises:
        TypeError: ``model`` is not a wrapper of this package.
        ValueError: A number is out of range.
        RuntimeError: The wrapper is balanced already.
    """
    if not isinstance(model, DataParallel):
        raise TypeError(
            f"a wrapper of this package is balanced, but got {type(model).__name__}; wrap the "
            "module in dataparallel.DataParallel or DistributedDataParallel"
        )
    if model._splitter is not None:
        raise RuntimeError(
            "the wrapper is balanced already; close the Balancer that it has, or go on with it"
        )
    # Also false for NaN.
    if not (1 <= every <= window and warmup >= 0 and 0 <= threshold < 1):
        raise ValueError(
            "every is a number of steps from 1 to window, warmup one of at least 0, and threshold "
            f"a part of the time from 0 to below 1, but got every={every}, window={window}, "
            f"warmup={warmup}, threshold={threshold}"
        )
    return Balancer(model, every, threshold, warmup, window)


class Balancer:
    """A balancer for the batches of one wrapper; see :func:`balance`.

    Attributes:
        history: Each :class:`~dataparallel.extras.balancing.Change` of the division.
    """

    def __init__(
        self, model: DataParallel[Any], every: int, threshold: float, warmup: int, window: int
    ) -> None:
        # Optimizers' hooks are global and lead here: they must not keep the model.
        self._model = weakref.ref(model)
        self._devices = model.timeline.devices
        self.history: list[Change] = []
        self._make_decisions = functools.partial(
            SplitDecisions, every=every, threshold=threshold, warmup=warmup, window=window
        )
        self._decisions = self._make_decisions()
        self._lock = threading.Lock()
        #: The most samples that each replica may get; None for a replica without a limit.
        self.limits: tuple[int | None, ...] = (None,) * len(self._devices)
        # The division of the last batch.
        self._sizes: tuple[int, ...] = ()
        self._steps = 0
        self._timeline = model.timeline
        # To make records of several steps at once costs training less.
        self._at_once = min(every, _MOST_AT_ONCE)
        self._assembler = StepAssembler(model.timeline, self.observe, every=self._at_once)
        self._optimizers = OptimizerSpans(model.timeline, model)
        self._assembler.start()
        self._timeline.subscribe(Listener(self._on_span, on_devices=self._on_devices))
        self._end = weakref.finalize(model, self._optimizers.remove)
        model._divide_by(self)
        if len(self._devices) == 1:
            _log.warning("there is one replica, on %s: nothing to balance", self._devices[0])

    # --- how batches are divided -----------------------------------------------------------------

    def sizes(self, batch_size: int) -> tuple[int, ...]:
        """Return the number of samples for each replica that takes part."""
        return _divide(batch_size, self._decisions.costs, self.limits)

    def chunk_sizes(self, batch_size: int, num_slots: int) -> Sequence[int]:
        """Return the chunk sizes when the wrapper scatters."""
        if num_slots != len(self._devices):
            return chunk_lengths(batch_size, num_slots)
        self._sizes = self.sizes(batch_size)
        return self._sizes

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the last batch that each replica gets. The shares add up to 1."""
        size = sum(self._sizes) or 1000 * len(self._devices)
        sizes = self.sizes(size)
        return tuple(n / size for n in sizes) + (0.0,) * (len(self._devices) - len(sizes))

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Samples per second of each replica with its present chunk; None before measuring."""
        latest = self._decisions.latest
        if latest is None:
            return None
        sizes = self.sizes(max(latest.samples, len(latest.costs)))
        return tuple(n / cost.seconds(n) for n, cost in zip(sizes, latest.costs, strict=False))

    # --- speed -----------------------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Take in the record of a step; the wrapper's own steps arrive by themselves."""
        self._steps += 1
        change = self._decisions.observe(record, self.limits)
        if change is not None:
            self._keep(change)

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        """Replicas were dropped or added: speeds are measured anew."""
        self._assembler.drain()
        self._devices = self._timeline.devices
        self.limits = tuple(None if old is None else self.limits[old] for old in kept)
        self._decisions, self._sizes = self._make_decisions(), ()

    def _keep(self, change: Change) -> None:
        change = change._replace(step=self._steps)
        self.history.append(change)
        _log.info("%s", change)

    # --- memory ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Surround a forward of the wrapper; if memory runs out, chunks are smaller next time."""
        failed: set[int] = set()
        token = _failed.set(failed)
        try:
            yield
        except Exception as error:
            self._lower(error, failed, "with")
            raise
        finally:
            _failed.reset(token)

    def _on_span(self, span: Span) -> None:
        """Listen to a timeline: what has failed, and in which replica."""
        # The span is a context manager, which is left with the exception being handled.
        error = sys.exc_info()[1] if span.failed else None
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return
        failed = _failed.get()
        if span.phase == "backward":
            alone = len(span.replicas) == 1
            named = span.replicas if alone else replicas_named_by(error, self._devices)
            self._lower(error, named, "in backward with")
        elif failed is not None and span.phase == "forward" and len(span.replicas) == 1:
            failed.update(span.replicas)
        elif failed is not None and span.phase == "scatter":
            failed.update(replicas_named_by(error, self._devices))

    def _lower(self, error: Exception, failed: Iterable[int], when: str) -> None:
        """Let replicas have smaller chunks; the error tells which, or why that does not help."""
        sizes = self._sizes
        few = sorted(replica for replica in failed if replica < len(sizes))
        if not few or not is_out_of_memory(error):
            return
        where = " and ".join(
            f"replica {i} on {self._devices[i]} ran out of memory {when} {sizes[i]} samples"
            for i in few
        )
        if any(sizes[i] <= 1 for i in few):
            # It was not the chunks that took the memory.
            add_note(
                error,
                f"{where}. There is not enough memory for a single sample, and each replica gets "
                "at least one: leave the device out of device_ids, or give it more memory",
            )
            return
        with self._lock:
            limits = list(self.limits)
            for i in few:
                limits[i] = min(max(1, int(sizes[i] * _KEPT)), limits[i] or sizes[i])
            self.limits = tuple(limits)
        if not fits(sum(sizes), limits):
            each = ", ".join(
                f"replica {i} {'any number' if limit is None else f'at most {limit}'}"
                for i, limit in enumerate(limits)
            )
            add_note(
                error,
                f"{where}. The others cannot take over a part of its chunk: for a batch of "
                f"{sum(sizes)} there is memory for too few samples ({each}); use a smaller batch",
            )
            return
        # Records of the steps before may still come.
        self._decisions.disturb(self._at_once)
        self._keep(Change("memory", sizes, self.sizes(sum(sizes)), None, where))
        add_note(error, f"{where}; its chunks are smaller from now on. Run the step again")

    def lift_limits(self) -> None:
        """Forget all memory limits, for example after another program has freed its memory."""
        self.limits = (None,) * len(self._devices)

    # --- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop balancing: the wrapper divides batches evenly again. A second call does nothing."""
        if not self._end.alive:
            return
        self._timeline.unsubscribe(Listener(self._on_span, on_devices=self._on_devices))
        self._end()
        self._assembler.stop()
        model = self._model()
        if model is not None and model._splitter is self:
            model._divide_by(None)

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return costs and limits for a checkpoint: lists of numbers and None."""
        costs = self._decisions.costs
        return {
            "costs": None if costs is None else [list(cost) for cost in costs],
            "limits": list(self.limits),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Divide batches as the Balancer of as many replicas did whose ``state_dict()`` this is."""
        costs, limits = state["costs"], state["limits"]
        if not len(limits) == len(limits if costs is None else costs) == len(self._devices):
            raise ValueError(
                f"the state has {len(limits)} replicas, but this wrapper has {len(self._devices)}; "
                "leave it out, and speeds are measured anew"
            )
        self._decisions.use_costs(None if costs is None else tuple(Cost(*cost) for cost in costs))
        self.limits = tuple(limits)
