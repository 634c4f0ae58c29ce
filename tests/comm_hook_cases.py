"""Buckets, and how a test runs a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dataparallel.reducer.grad_bucket import GradBucket
from dataparallel.reducer.hooks import resolve_hook
from dataparallel.reducer.pending_hook import PendingHook, run_hook
from dataparallel.reducer.storage import BucketStorage

Hook = Callable[[Any, GradBucket], Any]


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One contiguous, one with channels last, and one that is transposed."""
    weight = torch.zeros(2, 3, dtype=dtype)
    images = torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
    return [weight, images, torch.zeros(4, 2, dtype=dtype).t()]


NAMES = ["weight", "images", "turned"]


def a_bucket(
    dtype: torch.dtype = torch.float32, index: int = 0, *, is_last: bool = True
) -> GradBucket:
    """A bucket with the numbers 0, 1, 2 and so on in the order of memory."""
    storage = BucketStorage(parameters(dtype))
    storage.flat.copy_(torch.arange(storage.flat.numel()))
    return GradBucket(index, storage.flat, storage.views, parameters(dtype), NAMES, is_last=is_last)


def completed(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def run(hook: Hook, bucket: GradBucket | None = None, state: Any = None) -> PendingHook:
    return run_hook(resolve_hook(hook, state), bucket or a_bucket())


def result_of(hook: Hook, bucket: GradBucket | None = None) -> Tensor:
    return run(hook, bucket).wait(5.0, "the test")


_kept: list[object] = []


def keep_group() -> None:
    """Let the default group live until the next test of this process.

    Callbacks that run in gloo's threads hold the group. If one of them lets go of it last, the
    thread frees the group, waits for itself, and the process aborts.
    """
    _kept[:] = [dist.group.WORLD]
