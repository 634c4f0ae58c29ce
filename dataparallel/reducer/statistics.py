"""How long forward, backward and communication take, under the names of torch's logging data.

Note [What is measured]
~~~~~~~~~~~~~~~~~~~~~~~
The first ten iterations are sampled, and then one in ``sample_rate``. An iteration begins with a
forward; of several backwards that follow it, the first one counts. What is measured are spans of
the timeline, see Note [Phases of a replica]:

    |- forward -|   (loss)   |--------- backward ---------|
                                      |- reduce local -| ... |- reduce across processes -|
                                      '- overlap ---------'
                                      '- communication ----------------------------------'

Torch takes the loss for a part of backward compute, since its reducer doesn't see where backward
begins. Where spans have events of accelerators, these tell the time; of several replicas, the one
for which a measure is longest counts. Events are read when they have happened; only :meth:`read`
waits.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.comm.bucket_plan import BucketPlan
from dataparallel.reducer.buckets import make_plan
from dataparallel.threads.timeline import Span, Timeline

if TYPE_CHECKING:
    from dataparallel.reducer.reducer import Reducer

LoggingValue: TypeAlias = int | str

_ALWAYS_SAMPLED = 10

# What torch calls some dtypes here.
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_OF_NCCL = ("SOCKET_IFNAME", "BLOCKING_WAIT", "DEBUG", "NTHREADS", "IB_TIMEOUT")
_BACKEND_ENVIRONMENT = {
    "nccl": (*(f"NCCL_{name}" for name in _OF_NCCL), "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
}


class Statistics:
    """Measures some iterations of one reducer. See Note [What is measured]."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._sample_rate = 100
        #: The number of each iteration is taken from here, and it begins here from ``due`` on.
        self.numbers = itertools.count(1)
        self.due = 1
        #: Whether spans are recorded, until the round ends here.
        self.measures = False
        #: What torch calls the iteration: the last that was sampled before the current one.
        self.reported = 0
        self._sampled = 0
        self._sample: list[Span] = []
        self._unread: deque[list[Span]] = deque()
        self._latest: dict[str, int] = {}
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._num_read = 0

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sample one in so many iterations, from the next one on and after the first ten."""
        if type(sample_rate) is not int or sample_rate < 1:
            raise ValueError(
                f"the sample rate is a number of iterations, 1 or more, but got {sample_rate!r}; "
                "1 samples every iteration, and a large number none after the first ten"
            )
        self._sample_rate, self.due = sample_rate, 0

    def begin(self, number: int) -> None:
        """An iteration begins that may be sampled, or follows one that was."""
        self.reported = self._sampled
        # If there was no backward, what is known of the forward counts.
        self.end()
        self._read(wait=False)
        if number <= _ALWAYS_SAMPLED or number % self._sample_rate == 0:
            self._sampled, self.due = number, number + 1
            self._timeline.subscribe(self._listen)
            self.measures = True
        else:
            self.due = number + self._sample_rate - number % self._sample_rate

    def _listen(self, span: Span) -> None:
        self._sample.append(span)

    def end(self) -> None:
        """The round has ended; nothing more is measured in this iteration."""
        if self.measures:
            self._unread.append(self._sample)
            self.abandon()

    def abandon(self) -> None:
        """Forget the current iteration, which has failed."""
        self.measures, self._sample = False, []
        self._timeline.unsubscribe(self._listen)

    def read(self) -> dict[str, int]:
        """What was measured, in nanoseconds; waits until the accelerators have come that far."""
        self._read(wait=True)
        means = {f"avg_{name}": total // self._counts[name] for name, total in self._sums.items()}
        return {**self._latest, **means, "num_sampled": self._num_read}

    def _read(self, *, wait: bool) -> None:
        while self._unread:
            for span in self._unread[0]:
                for event in (*span.begin_events, *span.end_events):
                    if event is not None and wait:
                        event.synchronize()
                    elif event is not None and not event.query():
                        return
            measures, times = _measures(self._unread.popleft())
            self._sums.update(measures)
            self._counts.update(measures.keys())
            self._num_read += 1
            self._latest = {**measures, **times}


def _until(first: Span, last: Span) -> int:
    """Nanoseconds from the begin of a span to the end of one, for the slowest of the replicas."""
    ends = dict(zip(last.replicas, last.end_events, strict=False))
    both = [(a, ends.get(r)) for r, a in zip(first.replicas, first.begin_events, strict=False)]
    # Events tell milliseconds.
    on_devices = [int(a.elapsed_time(b) * 1e6) for a, b in both if a is not None and b is not None]
    return max(on_devices) if on_devices else last.end - first.begin


def _measures(spans: Sequence[Span]) -> tuple[dict[str, int], dict[str, int]]:
    """How long the phases of an iteration took, and when they were, in ns since 1970."""
    phases: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        phases.setdefault(span.phase, []).append(span)
    forward, backward = phases.get("forward", []), phases.get("backward", [])
    local, across = phases.get("reduce local", []), phases.get("reduce across processes", [])
    # The first bucket is sent when it was summed up; the last is waited for at the end.
    communication = [local[0], *across] if local and across else local
    took, when = {}, {}
    if forward:
        took["forward_compute_time"] = max(_until(span, span) for span in forward)
        when["forward_compute_time_start"] = forward[0].begin
    if backward:
        firsts = {span.replicas: span for span in reversed(backward)}
        took["backward_compute_time"] = max(_until(firsts[s.replicas], s) for s in backward)
    for name, found in (("backward_compute", backward), ("backward_comm", communication)):
        if found:
            when[f"{name}_time_start"] = found[0].begin
            when[f"{name}_time_end"] = max(span.end for span in found)
    if backward and communication:
        first = communication[0]
        # An event of one device tells nothing of another one.
        near = [s for s in backward if not s.end_events or {*s.replicas} & {*first.replicas}]
        total = max(_until(first, span) for span in communication)
        computed = max((_until(first, span) for span in near), default=0)
        took["backward_comm_time"] = total
        took["backward_compute_comm_overlap_time"] = min(max(computed, 0), total)
    offset = time.time_ns() - time.perf_counter_ns()
    return took, {name: at + offset for name, at in when.items()}


# --- torch's logging data --------------------------------------------------------------------


def logging_data(
    reducer: Reducer,
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None,
    devices: Sequence[Any],
    **more: LoggingValue,
) -> dict[str, LoggingValue]:
    """What a wrapper is, what became of its buckets and what was measured, in torch's names.

    ``devices`` are those of the replicas, and the one of the output.
    """
    options, plan, sends = reducer.options, reducer.buckets.plan, reducer.processes is not None
    *places, output = [torch.device(device).index for device in devices]
    count = reducer.trained.num_reduced
    parameters = reducer.trained.parameters[:count]
    cap = options.bucket_bytes(sends=sends)

    def sizes(plan: BucketPlan) -> str:
        pairs = zip(plan.buckets, plan.bytes, strict=True)
        return _text(size for bucket, size in pairs if bucket[0] < count)

    found: dict[str, LoggingValue] = {
        **_facts(module, parameters, group),
        **more,
        "num_replicas": len(places),
        "device_ids": _text(index for index in places if index is not None),
        "output_device": -1 if output is None else output,
        "find_unused_parameters": int(bool(options.find_unused_parameters)),
        "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
        "static_graph": int(options.static_graph),
        "bucket_cap_bytes": cap if isinstance(cap, int) else _text(cap),
        "bucket_sizes": sizes(make_plan(reducer.trained, options, None, sends=sends)),
        "has_rebuilt_buckets": int(reducer.buckets.ordered),
        # Torch looks when a forward begins, and so does not count the iteration after that.
        "iteration": reducer.statistics.reported,
        **reducer.statistics.read(),
    }
    if reducer.buckets.ordered:
        rebuilt = [" ".join(map(str, bucket)) for bucket in plan.buckets if bucket[0] < count]
        found |= {
            "prev_iteration_grad_ready_order_indices": _text(i for i in reducer.order if i < count),
            "rebuilt_bucket_sizes": sizes(plan),
            "rebuilt_per_bucket_param_indices": _text(rebuilt),
        }
    if reducer.num_rounds:
        pairs = zip(parameters, reducer.used, strict=False)
        found["num_buckets_reduced"] = sum(bucket[0] < count for bucket in plan.buckets)
        found["unused_parameter_size"] = sum(p.nbytes for p, used in pairs if not used)
    if reducer.can_set_static_graph is not None:
        found["can_set_static_graph"] = int(reducer.can_set_static_graph)
    if reducer.last_error:
        found |= {"has_error": 1, "error": reducer.last_error}
    return found


def _facts(
    module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None
) -> dict[str, LoggingValue]:
    backend = "" if group is None else dist.get_backend(group)
    variables = (*_ENVIRONMENT, *_BACKEND_ENVIRONMENT.get(backend, ()))
    batch_norms = nn.SyncBatchNorm, SyncBatchNorm
    return {
        "module_name": type(module).__name__,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
        "has_sync_bn": int(any(isinstance(part, batch_norms) for part in module.modules())),
        "dtypes": _text(sorted({_CPP_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "world_size": 1 if group is None else dist.get_world_size(group),
        "rank": 0 if group is None else dist.get_rank(group),
        "backend_name": backend,
        **{name.lower(): os.environ.get(name, "N/A") for name in variables},
    }


def _text(entries: Iterable[object]) -> str:
    return ", ".join(map(str, entries))
