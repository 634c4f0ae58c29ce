"""Process groups of torch, typed alike by all versions of it, and futures."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.futures import Future


def new_group(*args: Any, **options: Any) -> dist.ProcessGroup:
    """``dist.new_group``; from 2.14 on, its type has a number for those outside of the group."""
    group: Any = dist.new_group(*args, **options)
    made: dist.ProcessGroup = group
    return made


_kept: list[object] = []


def keep_group() -> None:
    """Let the default group live until the next test of this process.

    Callbacks that run in gloo's threads hold the group. If one of them lets go of it last, the
    thread frees the group, waits for itself, and the process aborts.
    """
    _kept[:] = [dist.group.WORLD]


def completed(value: object) -> Future[Any]:
    """Return a future with a result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
