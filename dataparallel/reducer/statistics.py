"""Times of forward, backward and communication, under the names of torch's logging data.

Note [What is measured]
~~~~~~~~~~~~~~~~~~~~~~~
The first ten iterations are sampled, and then one in ``sample_rate``. An iteration begins with a
forward; of several backwards that follow it, the first one counts. The measurements are spans of
the timeline, see Note [Phases of a replica], from the first begin to the last end:

    |- forward -|   (loss)   |--------- backward ---------|
                                      |- reduce local -| ... |- reduce across processes -|
                                      '- overlap ---------'
                                      '- communication ----------------------------------'

Torch takes the loss for a part of backward compute, since its reducer doesn't see where backward
begins. If spans have events of accelerators, these tell the time, and the slowest device counts;
only :meth:`Statistics.read` waits for them.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.reducer.buckets import make_plan
from dataparallel.threads.timeline import Listener, Span, Timeline

if TYPE_CHECKING:
    from dataparallel.reducer.reducer import Reducer

LoggingValue: TypeAlias = int | str

_ALWAYS_SAMPLED = 10
# Means are over so many iterations, the last that were sampled.
_KEPT = 100


class Statistics:
    """A measurement of some iterations of one reducer. See Note [What is measured]."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._sample_rate = 100
        #: True if spans are recorded, until the round ends here.
        self.measures = False
        # The numbers of the current iteration and of the last that was sampled.
        self._number = self._sampled = 0
        #: The iteration, in torch's words: the last that was sampled before the current one.
        self.reported = 0
        self._num_sampled = 0
        self._spans: list[Span] = []
        self._samples: deque[list[Span]] = deque(maxlen=_KEPT)

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sample one in so many iterations, from the next one on and after the first ten."""
        if sample_rate < 1:
            raise ValueError(f"one in 1 iterations is sampled, or in more, but got {sample_rate}")
        self._sample_rate = sample_rate

    def begin(self) -> None:
        """Begin an iteration."""
        if self.measures:
            # There was no backward: what is known of the forward counts.
            self.end()
        self._number += 1
        self.reported = self._sampled
        if self._number <= _ALWAYS_SAMPLED or self._number % self._sample_rate == 0:
            self._sampled, self.measures, self._spans = self._number, True, []
            self._timeline.subscribe(Listener(self._spans.append))

    def end(self) -> None:
        """End the round; nothing more is measured in this iteration."""
        self._num_sampled += 1
        self._samples.append(self._spans)
        self.abandon()

    def abandon(self) -> None:
        """Forget the current iteration, which has failed."""
        self.measures = False
        self._timeline.unsubscribe(Listener(self._spans.append))

    def read(self) -> dict[str, int]:
        """Return the measured times, in nanoseconds, once the accelerators have come that far."""
        latest: dict[str, int] = {}
        lengths: defaultdict[str, list[int]] = defaultdict(list)
        for spans in self._samples:
            latest = _measures(spans)
            for name, value in latest.items():
                if name.endswith("_time"):
                    lengths[f"avg_{name}"].append(value)
        means = {name: sum(values) // len(values) for name, values in lengths.items()}
        return {**latest, **means, "num_sampled": self._num_sampled}


def _measures(spans: Sequence[Span]) -> dict[str, int]:
    """Return the lengths of an iteration's phases, and their times since 1970, in nanoseconds."""
    phases: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        phases[span.phase].append(span)
    backward = phases["backward"]
    local, across = phases["reduce local"], phases["reduce across processes"]
    # The first bucket is sent when it was summed up; the last is waited for at the end.
    communication = [*local[:1], *across] if across else local
    named = {
        "forward_compute": phases["forward"],
        "backward_compute": backward,
        "backward_comm": communication,
    }
    since = time.time_ns() - time.perf_counter_ns()
    found = {}
    for name, part in named.items():
        if part:
            found[f"{name}_time"] = _length(part, part)
            found[f"{name}_time_start"] = since + part[0].begin
            found[f"{name}_time_end"] = since + max(span.end for span in part)
    if backward and communication:
        overlap = max(_length(communication[:1], backward), 0)
        found["backward_compute_comm_overlap_time"] = min(overlap, found["backward_comm_time"])
    return found


def _length(begins: Sequence[Span], ends: Sequence[Span]) -> int:
    """Nanoseconds from the first begin to the last end, on the device where these are longest."""
    firsts = {span.replicas: span for span in reversed(begins)}
    lasts = {span.replicas: span for span in ends}
    on_devices = []
    for first, last in itertools.product(firsts.values(), lasts.values()):
        events = dict(zip(last.replicas, last.end_events, strict=False))
        for replica, begin in zip(first.replicas, first.begin_events, strict=False):
            end = events.get(replica)
            if begin is not None and end is not None:
                begin.synchronize()
                end.synchronize()
                # Events tell milliseconds.
                on_devices.append(int(begin.elapsed_time(end) * 1e6))
    return max(on_devices, default=max(span.end for span in ends) - begins[0].begin)


# --- torch's logging data --------------------------------------------------------------------

# The names of dtypes in torch's logging data.
_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def logging_data(
    reducer: Reducer,
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None,
    devices: Sequence[Any],
    **more: LoggingValue,
) -> dict[str, LoggingValue]:
    """Return the wrapper's description, the state of its buckets, and times, under torch's names.

    ``devices`` are those of the replicas, and the one of the output.
    """
    from dataparallel.collectives.batch_norm import SyncBatchNorm

    options = reducer.options
    *places, output = [torch.device(device).index for device in devices]
    parameters = reducer.trained.parameters[: reducer.trained.num_reduced]
    batch_norms = nn.SyncBatchNorm, SyncBatchNorm
    return {
        **more,
        "module_name": type(module).__name__,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
        "has_sync_bn": int(any(isinstance(part, batch_norms) for part in module.modules())),
        "dtypes": _text(sorted({_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "world_size": 1 if group is None else dist.get_world_size(group),
        "rank": 0 if group is None else dist.get_rank(group),
        "backend_name": "" if group is None else dist.get_backend(group),
        "num_replicas": len(places),
        "device_ids": _text(index for index in places if index is not None),
        "output_device": -1 if output is None else output,
        "find_unused_parameters": int(bool(options.find_unused_parameters)),
        "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
        "static_graph": int(options.static_graph),
        # Torch looks when a forward begins, and so does not count the iteration after that.
        "iteration": reducer.statistics.reported,
        **reducer.statistics.read(),
        **_buckets(reducer),
    }


def _buckets(reducer: Reducer) -> dict[str, LoggingValue]:
    """Describe the state of a reducer's buckets."""
    options, plan, sends = reducer.options, reducer.buckets.plan, reducer.processes is not None
    count = reducer.trained.num_reduced
    cap = options.bucket_bytes(sends=sends)

    def sizes(plan: list[list[int]]) -> str:
        parameters = reducer.trained.parameters
        reduced = (bucket for bucket in plan if bucket[0] < count)
        return _text(sum(parameters[i].nbytes for i in bucket) for bucket in reduced)

    found: dict[str, LoggingValue] = {
        "bucket_cap_bytes": cap if isinstance(cap, int) else _text(cap),
        "bucket_sizes": sizes(make_plan(reducer.trained, options, None, sends=sends)),
        "has_rebuilt_buckets": int(reducer.buckets.ordered),
    }
    if reducer.buckets.ordered:
        rebuilt = [" ".join(map(str, bucket)) for bucket in plan if bucket[0] < count]
        found |= {
            "prev_iteration_grad_ready_order_indices": _text(i for i in reducer.order if i < count),
            "rebuilt_bucket_sizes": sizes(plan),
            "rebuilt_per_bucket_param_indices": _text(rebuilt),
        }
    if reducer.num_rounds:
        pairs = zip(reducer.trained.parameters[:count], reducer.used, strict=False)
        found["num_buckets_reduced"] = sum(bucket[0] < count for bucket in plan)
        found["unused_parameter_size"] = sum(p.nbytes for p, used in pairs if not used)
    if reducer.can_set_static_graph is not None:
        found["can_set_static_graph"] = int(reducer.can_set_static_graph)
    if reducer.last_error:
        found |= {"has_error": 1, "error": reducer.last_error}
    return found


def _text(entries: Iterable[object]) -> str:
    return ", ".join(map(str, entries))
