"""The description of a wrapper and of its reducer, under the names of torch's logging data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.reducer.buckets import make_plan
from dataparallel.reducer.reducer import Reducer

LoggingValue: TypeAlias = int | str

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
    options = reducer.options
    *places, output = [torch.device(device).index for device in devices]
    parameters = reducer.trained.parameters[: reducer.trained.num_reduced]
    return {
        **more,
        "module_name": type(module).__name__,
        "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
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
    cap = reducer.buckets.limit

    def sizes(plan: list[list[int]]) -> str:
        parameters = reducer.trained.parameters
        reduced = (bucket for bucket in plan if bucket[0] < count)
        return _text(sum(parameters[i].nbytes for i in bucket) for bucket in reduced)

    found: dict[str, LoggingValue] = {
        "bucket_cap_bytes": cap if isinstance(cap, int) else _text(cap),
        "bucket_sizes": sizes(make_plan(reducer.trained, options, None, cap, sends=sends)),
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
