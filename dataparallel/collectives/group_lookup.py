"""Process groups by their names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name.

    Raises:
        ValueError: There is none.
    """
    import torch.distributed.distributed_c10d as c10d

    find: Any = vars(c10d)["_resolve_process_group"]
    try:
        group: dist.ProcessGroup = find(name)
    except RuntimeError as error:
        known = ", ".join(repr(each) for each in sorted(c10d._world.pg_names.values())) or "none"
        raise ValueError(
            f"there is no process group {name!r} in this process, or it was destroyed; pass a "
            f"ProcessGroup, a name of one (group.group_name; here: {known}), 'local' or 'hybrid'"
        ) from error
    return group
