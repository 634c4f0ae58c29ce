"""Communication hooks that are known by name.

The simple ones are here. The names of the others are those of torch's ``DDPCommHookType``, in any
case: ``"power_sgd"``, ``"quantize_per_tensor"`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dataparallel import kernels
from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hook_group import for_torch, not_in_group, world_size
from dataparallel.reducer.int8_hook import Int8CompressState, int8_compress_hook

#: Called with a state of the user's and a bucket; the future's value is the bucket's new content.
CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]


def sum_over_processes(
    process_group: dist.ProcessGroup | None, tensor: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Begin to add a tensor up over all processes, in place.

    Args:
        process_group: The processes. Default: the default group; this process alone if there is
            none.
        tensor: What is added; it has the sum when the future is done.

    Returns:
        A future of ``tensor``.

    Raises:
        ValueError: This process is not in the group.
    """
    if process_group is None and not dist.is_initialized():
        alone: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        alone.set_result(tensor)
        return alone
    work = dist.all_reduce(tensor, group=process_group, async_op=True)
    if work is None:
        raise not_in_group()
    # The value of the work's own future is a list, and real where the tensor is complex.
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: (done.value(), tensor)[1]
    )
    return future


@for_torch
def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, as without a hook.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    # Divided beforehand, so that a sum of half precision numbers does not overflow.
    tensor = bucket.buffer().div_(world_size(process_group))
    return sum_over_processes(process_group, tensor)


def _compress(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    numbers = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    # Divided before it is rounded, so that what is too large for the dtype, but not when it is
    # divided, does not become infinite.
    small = kernels.compress(numbers, dtype, 1 / world_size(process_group))
    future: torch.futures.Future[torch.Tensor] = sum_over_processes(process_group, small).then(
        lambda done: (kernels.decompress(done.value(), numbers), buffer)[1]
    )
    return future


@for_torch
def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as ``torch.float16``.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _compress(torch.float16, process_group, bucket)


@for_torch
def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as ``torch.bfloat16``.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _compress(torch.bfloat16, process_group, bucket)


@for_torch
def noop_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every process keeps what it has: shows what communication costs, and trains wrongly.

    Args:
        _: Not used.
        bucket: What is kept.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


#: The hooks of this file by name.
BUILTIN: dict[str, CommHook] = {
    "allreduce": allreduce_hook,
    "bf16_compress": bf16_compress_hook,
    "fp16_compress": fp16_compress_hook,
    "noop": noop_hook,
}


#: Those that launch the kernels of compress.cu.
COMPRESSING = (bf16_compress_hook, fp16_compress_hook, int8_compress_hook)

# Its state is not the process group alone.
_INT8 = "int8_compress"


class _Recorder:
    """Stands for a wrapper with which one of torch's hook types registers its hook."""

    registered: tuple[CommHook, Any]

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        self.registered = (hook, state)


def names() -> list[str]:
    """The names of all hooks, in lower case."""
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

    torchs = (name.lower() for name in DDPCommHookType.__members__)
    return sorted({*BUILTIN, _INT8, *torchs})


def hook_by_name(name: str, state: Any) -> tuple[CommHook, Any]:
    """A hook and the state that it is to be called with.

    Args:
        name: One of :func:`names`, in any case.
        state: The process group, or None for the default group. Torch's PowerSGD hooks get a
            ``PowerSGDState`` with torch's defaults, and ``"int8_compress"`` an
            ``Int8CompressState``; for other settings pass the hook itself.

    Raises:
        ValueError: There is no hook of that name.
    """
    if name.lower() in BUILTIN:
        return BUILTIN[name.lower()], state
    if name.lower() == _INT8:
        own = isinstance(state, Int8CompressState)
        return int8_compress_hook, state if own else Int8CompressState(state)
    # Late, since most never need it: it imports torch's optimizers, and NumPy in some versions.
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

    if name.upper() not in DDPCommHookType.__members__:
        raise ValueError(
            f"there is no communication hook {name!r}; pass a function hook(state, bucket) or one "
            f"of {', '.join(map(repr, names()))}"
        )
    recorder = _Recorder()
    register_ddp_comm_hook(DDPCommHookType[name.upper()], recorder, state)
    return recorder.registered
