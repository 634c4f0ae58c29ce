"""What a distributed wrapper tells about itself: how it was made, and what was measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dataparallel.reducer.statistics import Timings

LoggingValue: TypeAlias = int | str

# What torch calls dtypes here.
_CPP_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}

_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_BACKEND_ENVIRONMENT = {
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
}


def environment(backend: str) -> dict[str, str]:
    """The environment variables that bear on a process group.

    Args:
        backend: Name of the group's backend, for example ``"gloo"``; ``""`` without processes.

    Returns:
        The variables by name, in lower case; ``"N/A"`` for those that are not set.
    """
    names = (*_ENVIRONMENT, *_BACKEND_ENVIRONMENT.get(backend, ()))
    return {name.lower(): os.environ.get(name, "N/A") for name in names}


@dataclass(frozen=True, kw_only=True)
class LoggingData:
    """How a wrapper was made, what has become of its buckets, and what was measured.

    The names are those of the dictionary that torch's ``_get_ddp_logging_data`` returns, where it
    has the same thing. Sizes are in bytes.

    Example::

        data = model.get_ddp_logging_data()
        data.timings.avg_backward_comm_time
        data.to_json()

    Attributes:
        module_name: The class of the wrapped module.
        world_size: Number of processes.
        rank: Number of this process.
        num_replicas: Number of replicas in this process.
        backend_name: Of the process group; ``""`` without one.
        devices: The device of each replica.
        output_device: Where outputs are gathered.
        is_multi_device_module: Whether the module itself is spread over several devices.
        broadcast_buffers: As passed; so are the next four.
        find_unused_parameters: ``None`` if it was not passed.
        gradient_as_bucket_view: As passed.
        static_graph: As passed.
        average: The way of averaging over processes.
        bucket_cap_bytes: One limit, or one for each bucket.
        has_sync_bn: Whether the module has synchronized batch norm.
        dtypes: Of the parameters, for example ``("float32",)``.
        num_parameter_tensors: Number of parameters that are reduced.
        total_parameter_size_bytes: Their size.
        bucket_sizes: Per bucket, as planned at construction.
        initial_bucket_size_limits: Per bucket, as planned at construction.
        has_rebuilt_buckets: Whether the buckets now are in the order of arrival.
        rebuilt_bucket_sizes: Per bucket, after that.
        rebuilt_bucket_size_limits: Per bucket, after that.
        rebuilt_per_bucket_param_indices: Per bucket, the indices of its parameters, after that.
        prev_iteration_grad_ready_order_indices: Parameters, in the order in which their gradients
            arrived in the last backward.
        num_buckets_reduced: How many buckets were reduced in the last backward.
        unused_parameter_size: Size of the parameters without gradient in the last backward.
        can_set_static_graph: Whether the same parameters were used in every backward; ``None`` as
            long as that is not known.
        join_uneven_inputs: Whether the wrapper was used within ``join()``.
        comm_hook: Name of the communication hook; ``""`` without one.
        error: The last error; ``""`` if there was none.
        sample_rate: One in so many iterations is measured.
        timings: What was measured.
        environment: See :func:`environment`.
    """

    module_name: str
    world_size: int
    rank: int
    num_replicas: int
    backend_name: str
    devices: tuple[str, ...]
    output_device: str
    is_multi_device_module: bool = False
    broadcast_buffers: bool = True
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    average: str = "processes"
    bucket_cap_bytes: tuple[int, ...] = ()
    has_sync_bn: bool = False
    dtypes: tuple[str, ...] = ()
    num_parameter_tensors: int = 0
    total_parameter_size_bytes: int = 0
    bucket_sizes: tuple[int, ...] = ()
    initial_bucket_size_limits: tuple[int, ...] = ()
    has_rebuilt_buckets: bool = False
    rebuilt_bucket_sizes: tuple[int, ...] = ()
    rebuilt_bucket_size_limits: tuple[int, ...] = ()
    rebuilt_per_bucket_param_indices: tuple[tuple[int, ...], ...] = ()
    prev_iteration_grad_ready_order_indices: tuple[int, ...] = ()
    num_buckets_reduced: int = 0
    unused_parameter_size: int = 0
    can_set_static_graph: bool | None = None
    join_uneven_inputs: bool = False
    comm_hook: str = ""
    error: str = ""
    sample_rate: int = 0
    timings: Timings = field(default_factory=Timings)
    environment: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, LoggingValue]:
        """All of it as one flat dictionary of numbers and strings, with torch's names and forms.

        Lists are joined by ``", "``, truth values are 0 and 1, and what is not there has no entry.
        ``device_ids`` and ``output_device`` are indices, and -1 stands for the CPU; what torch
        does not have is added under the names of the attributes.
        """
        flat: dict[str, LoggingValue] = {}
        for name in _fields(self):
            value = getattr(self, name)
            if name not in ("timings", "environment", "bucket_cap_bytes"):
                _put(flat, name, value)
        for name in _fields(self.timings):
            _put(flat, name, getattr(self.timings, name))
        flat["find_unused_parameters"] = int(bool(self.find_unused_parameters))
        flat["dtypes"] = ", ".join(sorted({_CPP_NAMES.get(name, name) for name in self.dtypes}))
        flat["device_ids"] = ", ".join(str(i) for i in map(_index, self.devices) if i >= 0)
        flat["output_device"] = _index(self.output_device)
        if self.bucket_cap_bytes:
            one = len(self.bucket_cap_bytes) == 1
            flat["bucket_cap_bytes"] = (
                self.bucket_cap_bytes[0] if one else _text(self.bucket_cap_bytes)
            )
        if self.error:
            flat["has_error"] = 1
        flat.update(self.environment)
        return flat

    def to_json(self, indent: int | None = None) -> str:
        """All of it as JSON; lists and truth values stay what they are.

        Args:
            indent: Spaces per level. Default: everything is on one line.
        """
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        """A short report, with times in milliseconds."""
        times = self.timings
        lines = [
            f"rank {self.rank} of {self.world_size}, {self.num_replicas} replicas, "
            f"{self.module_name}, iteration {times.iteration}",
            f"mean of {times.num_sampled} iterations: forward "
            f"{_ms(times.avg_forward_compute_time)}, backward "
            f"{_ms(times.avg_backward_compute_time)}, communication "
            f"{_ms(times.avg_backward_comm_time)}, of which hidden "
            f"{_ms(times.avg_backward_compute_comm_overlap_time)}",
            f"parameters without gradient: {self.unused_parameter_size} bytes",
        ]
        if self.comm_hook:
            lines.append(f"communication hook: {self.comm_hook}")
        if self.join_uneven_inputs:
            lines.append("uneven inputs are joined")
        return "\n".join(lines)


def _fields(record: LoggingData | Timings) -> list[str]:
    return [entry.name for entry in dataclasses.fields(record)]


def _put(flat: dict[str, LoggingValue], name: str, value: object) -> None:
    if isinstance(value, (bool, int)):
        flat[name] = int(value)
    elif isinstance(value, str) and value:
        flat[name] = value
    elif isinstance(value, tuple) and value:
        flat[name] = _text(value)


def _text(entries: Sequence[object]) -> str:
    """Joined as torch does it: a list in a list has no commas of its own."""
    return ", ".join(
        " ".join(map(str, entry)) if isinstance(entry, tuple) else str(entry) for entry in entries
    )


def _index(device: str) -> int:
    _, _, index = device.partition(":")
    return int(index) if index else -1


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.2f} ms"
