"""Communication hooks that are known by name.

The simple ones are here. The names of the others are those of torch's ``DDPCommHookType``, in any
case: ``"power_sgd"``, ``"quantize_per_tensor"`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from dataparallel.reducer.grad_bucket import GradBucket

#: Called with a state of the user's and a bucket; the future's value is the bucket's new content.
CommHook: TypeAlias = Callable[[Any, Any], "torch.futures.Future[Any]"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def world_size(process_group: dist.ProcessGroup | None) -> int:
    """How many processes a hook reduces over.

    Args:
        process_group: The processes. Default: the default group; this process alone if there is
            none.

    Raises:
        ValueError: This process is not in the group.
    """
    if process_group is None and not dist.is_initialized():
        return 1
    size = dist.get_world_size(process_group)
    if size < 1:
        raise _not_in_group()
    return size


def _not_in_group() -> ValueError:
    return ValueError(
        "this process is not in the group of the communication hook; register the hook with a "
        "group that has all processes of the wrapper"
    )


def _for_torch(hook: _Hook) -> _Hook:
    """A hook that torch's wrapper takes too.

    It compares annotations with ``dist.GradBucket``, from which their texts differ.
    """
    hook.__annotations__.clear()
    return hook


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
        raise _not_in_group()
    # The value of the work's own future is a list, and real where the tensor is complex.
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: (done.value(), tensor)[1]
    )
    return future


@_for_torch
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
    # divided, does not become infinite. On a GPU ``out`` saves a pass over memory: torch rounds
    # the products as it writes them.
    small = torch.empty_like(numbers, dtype=dtype)
    torch.mul(numbers.float(), 1 / world_size(process_group), out=small)
    future: torch.futures.Future[torch.Tensor] = sum_over_processes(process_group, small).then(
        lambda done: (numbers.copy_(done.value()), buffer)[1]
    )
    return future


@_for_torch
def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as ``torch.float16``.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _compress(torch.float16, process_group, bucket)


@_for_torch
def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean over the processes, sent as ``torch.bfloat16``.

    Args:
        process_group: The processes. Default: the default group.
        bucket: What is averaged, in place.
    """
    return _compress(torch.bfloat16, process_group, bucket)


@_for_torch
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


class _Recorder:
    """Stands for a wrapper with which one of torch's hook types registers its hook."""

    registered: tuple[CommHook, Any]

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        self.registered = (hook, state)


def names() -> list[str]:
    """The names of all hooks, in lower case."""
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

    torchs = (name.lower() for name in DDPCommHookType.__members__)
    return sorted({*BUILTIN, *torchs})


def hook_by_name(name: str, state: Any) -> tuple[CommHook, Any]:
    """A hook and the state that it is to be called with.

    Args:
        name: One of :func:`names`, in any case.
        state: The process group, or None for the default group. Torch's PowerSGD hooks get a
            ``PowerSGDState`` with torch's defaults; for other settings pass the hook itself.

    Raises:
        ValueError: There is no hook of that name.
    """
    if name.lower() in BUILTIN:
        return BUILTIN[name.lower()], state
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
