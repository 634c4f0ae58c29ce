"""The names under which other code knows torch's wrapper, for ours.

Libraries, and torch's own hooks and optimizers, reach into ``DistributedDataParallel`` by names
with and without an underscore. Here they lead to what does the same. What torch's wrapper has for
itself alone has no name here: our reducer works in another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dataparallel import torch_internals
from dataparallel.batch.scatter_gather import move
from dataparallel.parallel.join import UnevenInputs
from dataparallel.parallel.reduction_methods import ReductionMethods
from dataparallel.reducer.comm_hooks import check_hook
from dataparallel.reducer.debug import describe_names
from dataparallel.reducer.statistics import LoggingValue, logging_data
from dataparallel.reducer.trained import trained_parameters

# The wrapper whose forward runs here; replicas' threads see it, too.
_active: ContextVar[Any] = ContextVar("active_wrapper", default=None)


class JoinConfig(NamedTuple):
    """How inputs may be uneven, under the names of older versions of torch."""

    ddp_join_enabled: bool
    ddp_join_divide_by_initial_world_size: bool
    ddp_join_throw_on_early_termination: bool


class TorchNames(UnevenInputs, ReductionMethods):
    """The names of torch's wrapper; see each method for what it means here."""

    find_unused_parameters: bool | None
    static_graph: bool
    output_device: Any
    _delayed: frozenset[str]

    # --- the reducer -----------------------------------------------------------------------------

    def set_static_graph(self) -> None:
        """Say that every backward uses the same parameters; every process calls it.

        It is what ``static_graph=True`` is at construction.

        Example::

            model.set_static_graph()

        Raises:
            RuntimeError: There was a backward already.
        """
        if not self.static_graph and self.reducer.num_rounds:
            raise RuntimeError(
                "set_static_graph() must come before the first backward, but there were "
                f"{self.reducer.num_rounds}; pass static_graph=True to the wrapper"
            )
        if not self.static_graph:
            self.static_graph = True
            self._rebuild()

    _set_static_graph = set_static_graph

    def register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Let one of torch's hooks reduce the buckets; see :meth:`register_comm_hook`.

        Example::

            model.register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)

        Args:
            comm_hook_type: Torch's ``BuiltinCommHookType``, or a name.
        """
        self.register_comm_hook(self.process_group, comm_hook_type)

    _register_builtin_comm_hook = register_builtin_comm_hook

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Take an optimizer's steps in a hook; see :meth:`step_in_backward` for another way."""
        overlapped = torch_internals.overlapped_optimizer(optim, optim_params, *args, **kwargs)
        overlapped.register_ddp(self)

    def _check_comm_hook(self, hook: Any) -> None:
        check_hook(hook)

    def _update_process_group(self, new_process_group: Any) -> None:
        """As :meth:`update_process_group`; nothing in a process that is not in the group."""
        if isinstance(new_process_group, dist.ProcessGroup):
            self.update_process_group(new_process_group)

    def remove_autograd_hooks(self) -> None:
        """Remove the hooks that notice gradients of the replicas.

        The module's own parameters have none, so it can be wrapped again without this. A backward
        through this wrapper still reduces, but sends nothing before its end.

        Example::

            model.remove_autograd_hooks()
        """
        self.reducer.remove_hooks()

    _remove_autograd_hooks = remove_autograd_hooks

    def check_reducer_finalized(self) -> None:
        """Check that the last backward has come to its end.

        Example::

            model.check_reducer_finalized()

        Raises:
            RuntimeError: It has not: it failed outside of the replicas.
        """
        if self.reducer.unfinished:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one: the last backward began a round and did not end it, since it failed outside "
                "of the replicas; call reset_state() and repeat it"
            )

    _check_reducer_finalized = check_reducer_finalized

    def set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Say which rows of sparse gradients there will be. Checked, and not needed here.

        In torch all processes then send these rows as a dense tensor. Our processes find out by
        themselves which rows there are, and send those; the result is the same.

        Args:
            global_unique_ids: Per name of a parameter, the rows that have a gradient somewhere:
                integers, of shape ``(num_rows,)``.

        Raises:
            ValueError: There is no parameter of that name, or the rows are no list of integers.
        """
        for name, rows in global_unique_ids.items():
            if name not in self.reducer.reduced_names:
                raise ValueError(
                    f"there is no parameter {name!r} to be reduced; there are "
                    f"{describe_names(self.reducer.reduced_names)}"
                )
            if rows.dim() != 1 or rows.is_floating_point() or rows.is_complex():
                raise ValueError(
                    f"the rows of {name!r} are integers of shape (num_rows,), but got "
                    f"{rows.dtype} of shape {tuple(rows.shape)}"
                )

    _set_sparse_metadata = set_sparse_metadata

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.buckets.ordered

    @property
    def _comm_hooks(self) -> list[tuple[Any, Any]]:
        return [] if self._hook is None else [(self._hook.function, self._hook.state)]

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest limit of a bucket, in bytes."""
        limits = self.reducer.options.bucket_bytes
        return limits if isinstance(limits, int) else max(limits)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """One limit for each bucket, if such a list was passed; in bytes."""
        limits = self.reducer.options.bucket_bytes
        return [] if isinstance(limits, int) else list(limits)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the first bucket has a limit that is smaller than the others'."""
        return self.reducer.options.first_bucket_bytes < self.bucket_bytes_cap

    # --- parameters and devices ------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next(iter(self._module_parameters)).device

    @property
    def device_type(self) -> str:
        """The type of that device, for example ``"cpu"``."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module itself is on several devices."""
        return len({parameter.device for parameter in self._module_parameters}) > 1

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        ignored = self.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if name in self._delayed]

    @property
    def _delay_all_reduce_all_params(self) -> bool:
        return self._delayed.issuperset(self.reducer.reduced_names)

    @staticmethod
    def get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of a module that are not left to each process.

        Example::

            optimizer = torch.optim.SGD(model.get_data_parallel_params(model.module), lr=0.1)

        Args:
            module: Any module.
            named_params: Whether to give pairs of name and parameter. Default: False.
        """
        for name, parameter in module.named_parameters():
            if not torch_internals.is_ignored(parameter):
                yield (name, parameter) if named_params else parameter

    _get_data_parallel_params = get_data_parallel_params

    @staticmethod
    def set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Leave parameters and buffers to each process: they are neither reduced nor sent.

        Example::

            DistributedDataParallel.set_params_and_buffers_to_ignore_for_model(net, ["table"])
            model = DistributedDataParallel(net)

        Args:
            module: The module, before it is wrapped.
            params_and_buffers_to_ignore: Names as in ``named_parameters()``, ``named_buffers()``.
        """
        torch_internals.ignore_names(module, params_and_buffers_to_ignore)

    _set_params_and_buffers_to_ignore_for_model = set_params_and_buffers_to_ignore_for_model

    # --- logging data ----------------------------------------------------------------------------

    def get_ddp_logging_data(self) -> dict[str, LoggingValue]:
        """How the wrapper was made, what has become of its buckets, and what was measured.

        The names are torch's. Lists are joined by ``", "``, truth values are 0 and 1, sizes are in
        bytes and times in nanoseconds. An index of -1 is the CPU. Accelerators are waited for, as
        far as something is measured there.

        Example::

            model.get_ddp_logging_data()["avg_backward_compute_comm_overlap_time"]
        """
        return logging_data(
            self.reducer,
            self.module,
            trained_parameters(self.module, without=self.parameters_to_ignore),
            group=self.process_group,
            devices=[*self.device_ids, self.output_device],
            broadcast_buffers=int(self.forward_sync_buffers),
            join_uneven_inputs=int(self._has_joined),
            comm_hook="" if self._hook is None else self._hook.name,
        )

    _get_ddp_logging_data = get_ddp_logging_data

    def set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure more or fewer iterations from the next one on.

        Example::

            model.set_ddp_runtime_logging_sample_rate(10)

        Args:
            sample_rate: After the first ten, one iteration in so many; 1 or more.

        Raises:
            ValueError: It is no such number.
        """
        self.reducer.statistics.set_sample_rate(sample_rate)

    _set_ddp_runtime_logging_sample_rate = set_ddp_runtime_logging_sample_rate

    # --- forward ---------------------------------------------------------------------------------

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """The wrapper whose forward runs in this thread, or for which a replica runs in it."""
        return _active.get()

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> tuple[list[Any], list[Any]]:
        """The arguments on one device, each in a list, as older versions of torch want them.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments.
            device_id: Where their tensors shall be.
        """
        return [move(inputs, device_id)], [move(kwargs, device_id)]

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Whether torch copies outputs, so that they may be changed in place. Not done here.

        Outputs are those of the replicas, so autograd notices a change that would be wrong.
        """

    @property
    def ddp_uneven_inputs_config(self) -> JoinConfig:
        """How inputs may be uneven now; see :meth:`join`."""
        config = self._join_config
        return JoinConfig(
            config.enable, self._divide_by_initial_world_size, config.throw_on_early_termination
        )
