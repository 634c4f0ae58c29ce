"""Process groups by their names."""

from __future__ import annotations

import torch.distributed as dist

from dataparallel import torch_internals


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name.

    Raises:
        ValueError: There is none.
    """
    try:
        group: dist.ProcessGroup = torch_internals.group_named(name)
    except RuntimeError as error:
        names = torch_internals.world().pg_names.values()
        known = ", ".join(repr(each) for each in sorted(names)) or "none"
        raise ValueError(
            f"there is no process group {name!r} in this process, or it was destroyed; pass a "
            f"ProcessGroup, a name of one (group.group_name; here: {known}), 'local' or 'hybrid'"
        ) from error
    return group
