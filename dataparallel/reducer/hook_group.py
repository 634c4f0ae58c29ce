"""What communication hooks share: how many processes there are, and a signature for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

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
        raise not_in_group()
    return size


def not_in_group() -> ValueError:
    """The error of a hook in a process that is not in its group."""
    return ValueError(
        "this process is not in the group of the communication hook; register the hook with a "
        "group that has all processes of the wrapper"
    )


def for_torch(hook: _Hook) -> _Hook:
    """A hook that torch's wrapper takes too.

    It compares annotations with ``dist.GradBucket``, from which their texts differ.
    """
    hook.__annotations__.clear()
    return hook
