"""What a distributed wrapper tells about itself, under torch's names."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.collectives.sync_batch_norm import SyncBatchNorm
from dataparallel.parallel.join import UnevenInputs
from dataparallel.parallel.reduction_methods import ReductionMethods
from dataparallel.reducer.buckets import make_plan
from dataparallel.reducer.logging_data import LoggingData, LoggingValue, environment
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.trained import TrainedParameters, trained_parameters

_log = logging.getLogger("dataparallel")

_SYNCHRONIZED = (nn.SyncBatchNorm, SyncBatchNorm)


class TorchData(NamedTuple):
    """Logging data in the two parts in which torch has them."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class WrapperLogger:
    """Stands for torch's logger of a wrapper: keeps what it is told for the logging data.

    Args:
        wrapper: The wrapper.
    """

    def __init__(self, wrapper: LoggedState) -> None:
        self._wrapper = wrapper

    def set_error_and_log(self, error: str) -> None:
        """Keep an error, and log it."""
        self._wrapper._logged_error = error
        _log.error("%s", error)

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._wrapper._logged_hook = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._wrapper._has_joined = True

    def _get_ddp_logging_data(self) -> TorchData:
        flat = self._wrapper._get_ddp_logging_data()
        return TorchData(
            {name: value for name, value in flat.items() if isinstance(value, str)},
            {name: value for name, value in flat.items() if not isinstance(value, str)},
        )


class LoggedState(UnevenInputs, ReductionMethods):
    """What a wrapper keeps and computes for the logging data."""

    output_device: Any
    _logged_error = ""
    _logged_hook = ""

    @property
    def logger(self) -> WrapperLogger:
        """What torch's hooks tell things for the logging data."""
        return WrapperLogger(self)

    def get_ddp_logging_data(self) -> LoggingData:
        """How the wrapper was made, what has become of its buckets, and what was measured.

        Accelerators are waited for, as far as something is measured there.

        Example::

            print(model.get_ddp_logging_data())
            model.get_ddp_logging_data().timings.avg_backward_comm_time

        Returns:
            A frozen record; ``as_dict()`` has torch's names, ``to_json()`` is text.
        """
        group = self.process_group
        reducer, module = self.reducer, self.module
        options, statistics = reducer.options, reducer.statistics
        backend = "" if group is None else dist.get_backend(group)
        trained = trained_parameters(module, without=self.parameters_to_ignore)
        limits = options.bucket_bytes
        hook = self._hook
        return LoggingData(
            module_name=type(module).__name__,
            world_size=1 if group is None else dist.get_world_size(group),
            rank=self._distributed_rank,
            num_replicas=len(self.device_ids),
            backend_name=backend,
            devices=tuple(map(str, self.device_ids)),
            output_device=str(self.output_device),
            is_multi_device_module=len({p.device for p in trained.parameters}) > 1,
            broadcast_buffers=self.forward_sync_buffers,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            average=options.average,
            bucket_cap_bytes=(limits,) if isinstance(limits, int) else limits,
            has_sync_bn=any(isinstance(part, _SYNCHRONIZED) for part in module.modules()),
            dtypes=tuple(sorted({_name(p.dtype) for p in trained.parameters})),
            num_parameter_tensors=len(trained.parameters),
            total_parameter_size_bytes=sum(p.nbytes for p in trained.parameters),
            **_of_buckets(reducer, trained),
            join_uneven_inputs=self._has_joined,
            comm_hook=self._logged_hook or ("" if hook is None else hook.name),
            error=self._logged_error or reducer.last_error,
            sample_rate=statistics.sample_rate,
            timings=statistics.snapshot(),
            environment=environment(backend),
        )

    def _get_ddp_logging_data(self) -> dict[str, LoggingValue]:
        """The same as torch has it: a dictionary of numbers and strings."""
        flat = self.get_ddp_logging_data().as_dict()
        # Torch looks when a forward begins, and so does not count the iteration after that.
        return {**flat, "iteration": self.reducer.statistics.reported}

    def set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure more or fewer iterations from the next one on.

        Example::

            model.set_ddp_runtime_logging_sample_rate(10)

        Args:
            sample_rate: After the first ten, one iteration in so many; 1 or more.

        Raises:
            TypeError, ValueError: It is no such number.
        """
        self.reducer.statistics.set_sample_rate(sample_rate)

    _set_ddp_runtime_logging_sample_rate = set_ddp_runtime_logging_sample_rate

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)


def _of_buckets(reducer: Reducer, trained: TrainedParameters) -> dict[str, Any]:
    """The entries about buckets, and about what became of them in the last round."""
    initial = make_plan(trained.parameters, reducer.options, trained.sparse, None)
    now = reducer.buckets.plan
    entries: dict[str, Any] = {
        "bucket_sizes": initial.bytes,
        "initial_bucket_size_limits": initial.limits,
        "has_rebuilt_buckets": reducer.buckets.ordered,
        "prev_iteration_grad_ready_order_indices": tuple(reducer.order),
        "can_set_static_graph": reducer.usage.can_set_static_graph,
    }
    if reducer.buckets.ordered:
        entries["rebuilt_bucket_sizes"] = now.bytes
        entries["rebuilt_bucket_size_limits"] = now.limits
        entries["rebuilt_per_bucket_param_indices"] = now.buckets
    if reducer.num_rounds:
        uses = zip(trained.parameters, reducer.usage.used, strict=True)
        entries["num_buckets_reduced"] = len(now)
        entries["unused_parameter_size"] = sum(p.nbytes for p, used in uses if not used)
    return entries


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
