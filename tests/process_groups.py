"""Process groups of torch, typed alike by all versions of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def new_group(*args: Any, **options: Any) -> dist.ProcessGroup:
    """``dist.new_group``; from 2.14 on, its type has a number for those outside of the group."""
    group: Any = dist.new_group(*args, **options)
    made: dist.ProcessGroup = group
    return made
