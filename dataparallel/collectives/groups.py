"""Which members take part: everything that users may pass as ``group``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataparallel import torch_internals
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.threads.apply import current_replica

#: What functions take as ``group``: a process group (None: the default one), its name, a list of
#: the ranks of a process group, lists of such ranks, a mesh of one dimension, a mesh and one of its
#: dimensions, a group of replicas, or ``"local"`` or ``"hybrid"``.
Group: TypeAlias = Any

_BY_NAME = {"local": LocalGroup(), "hybrid": HybridGroup()}

# How the process groups that this package makes for itself are described; nobody else may use them.
_OURS = "dataparallel/"


def resolve(group: Group, tag: str = "") -> str | LocalGroup:
    """The name of a process group, or the group of replicas, that ``group`` stands for.

    Ranks are those of the default group. Lists of ranks stand for a group that exists: the one over
    the list with this process. ``tag`` tells groups over the same ranks apart, as in torch.
    """
    if isinstance(group, LocalGroup):
        return group
    if isinstance(group, str) and group in _BY_NAME:
        return _BY_NAME[group]
    if not torch.compiler.is_compiling():
        _refuse_in_replicas()
    # Also read for other groups: compiled code has ranks and sizes in it, and the guard for this
    # has torch compile it again after `torch.distributed` was initialized again.
    default = dist.group.WORLD if dist.is_available() else None
    if default is None:
        raise RuntimeError(
            "a collective over processes needs torch.distributed; call "
            "torch.distributed.init_process_group() first, or pass group='local' for the replicas "
            f"of this process (group is {group!r})"
        )
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    elif isinstance(group, tuple) and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        group = mesh.get_group(dim)
    elif isinstance(group, Sequence):
        return _name_of_ranks(group, tag)
    elif group is None:
        group = default
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group is a ProcessGroup with this process in it, the name of one, a list of ranks, a "
            "list of such lists, a DeviceMesh of one dimension, (DeviceMesh, dim), a LocalGroup, a "
            f"HybridGroup, 'local' or 'hybrid', but got {group!r}"
        )
    if not torch.compiler.is_compiling() and not torch_internals.is_registered(group):
        raise ValueError(
            f"the process group {group.group_name!r} was destroyed, or not made by "
            "torch.distributed; pass one from new_group() or init_device_mesh()"
        )
    return group.group_name


def _refuse_in_replicas() -> None:
    replica = current_replica()
    if replica is not None and replica.num_replicas > 1:
        raise RuntimeError(
            f"a collective over processes was called in replica {replica.index} of "
            f"{replica.num_replicas}: every replica would take part for the whole process; pass "
            "group='hybrid' for all replicas of all processes, or 'local' for those of this one"
        )


def _name_of_ranks(given: Sequence[Any], tag: str) -> str:
    here = dist.get_rank()
    lists = [entry for entry in given if isinstance(entry, Sequence)] or [given]
    mine = [ranks for ranks in lists if here in ranks]
    ranks = sorted(mine[0] if mine else given)
    # Torch marks tags that users have given.
    marked = tag if not tag or tag.startswith(("ptd:", "user:")) else f"user:{tag}"
    for group in torch_internals.world().tags_to_pg.get(marked, []):
        same = sorted(dist.get_process_group_ranks(group)) == ranks
        if same and not _is_ours(group.group_name):
            name: str = group.group_name
            return name
    tagged = f" with the tag {tag!r}" if tag else ""
    raise ValueError(
        f"there is no process group over the ranks {ranks}{tagged} in rank {here}; make it once, "
        "in every process, with torch.distributed.new_group(), and pass that or the ranks"
    )


@torch_internals.mark_constant
def _is_ours(name: str) -> bool:
    """Whether the package has made the group for itself; torch 2.11 compiles no description."""
    return bool(torch_internals.group_named(name).group_desc.startswith(_OURS))


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name; a ValueError if there is none."""
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
