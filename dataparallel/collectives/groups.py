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
        _check_exists(group)
    # Also read for other groups: compiled code has ranks and sizes in it, and the guard for this
    # has torch compile it again after `torch.distributed` was initialized again.
    default = dist.group.WORLD
    if group is None:
        group = default
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, str):
        return group
    if isinstance(group, tuple):
        return _name_in_mesh(*_mesh_and_dim(group))
    if isinstance(group, Sequence):
        return _name_of_ranks(group, tag)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a mesh as a group has one dimension, but this one has {group.ndim}; pass "
                "(mesh, dim)"
            )
        return _name_in_mesh(group, 0)
    raise TypeError(
        "group is a ProcessGroup, the name of one, a list of ranks, a list of such lists, a "
        "DeviceMesh of one dimension, (DeviceMesh, dim), a LocalGroup, a HybridGroup, 'local' or "
        f"'hybrid', but got {type(group).__name__}"
    )


def _refuse_in_replicas() -> None:
    replica = current_replica()
    if replica is not None and replica.num_replicas > 1:
        raise RuntimeError(
            f"a collective over processes was called in replica {replica.index} of "
            f"{replica.num_replicas}: every replica would take part for the whole process; pass "
            "group='hybrid' for all replicas of all processes, or 'local' for those of this one"
        )


def _check_exists(group: Group) -> None:
    """Raise if a group was destroyed, has no place for this process, or can't exist at all."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "a collective over processes needs torch.distributed; call "
            "torch.distributed.init_process_group() first, or pass group='local' for the replicas "
            f"of this process (group is {group!r})"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group (new_group has returned "
            "GroupMember.NON_GROUP_MEMBER here); call the collective in the processes of the "
            "group only"
        )
    if isinstance(group, dist.ProcessGroup) and not torch_internals.is_registered(group):
        raise ValueError(
            f"the process group {group.group_name!r} was destroyed, or not made by "
            "torch.distributed; pass one from new_group() or init_device_mesh()"
        )


# --- meshes ----------------------------------------------------------------------------------


def _mesh_and_dim(group: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group[0], group[1]
    kinds = ", ".join(type(entry).__name__ for entry in group)
    raise ValueError(
        f"a tuple as a group is (DeviceMesh, dim), but got ({kinds}); ranks come in a list"
    )


def _name_in_mesh(mesh: Any, dim: Any) -> str:
    if not torch.compiler.is_compiling():
        names: tuple[str, ...] = mesh.mesh_dim_names or ()
        # Counted from the front only, as by DeviceMesh itself.
        if not (dim in names if isinstance(dim, str) else dim in range(mesh.ndim)):
            called = f" called {', '.join(map(repr, names))}" if names else ""
            raise ValueError(
                f"dim is one of the {mesh.ndim} dimensions of the mesh{called}, but got {dim!r}"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}; call "
                "the collective in the processes of the mesh only"
            )
    name: str = mesh.get_group(dim).group_name
    return name


# --- ranks -----------------------------------------------------------------------------------


def _name_of_ranks(given: Sequence[Any], tag: str) -> str:
    ranks = _list_of_this_process(given)
    # Torch marks tags that users have given.
    marked = tag if not tag or tag.startswith(("ptd:", "user:")) else f"user:{tag}"
    for group in torch_internals.world().tags_to_pg.get(marked, []):
        same = sorted(dist.get_process_group_ranks(group)) == sorted(ranks)
        if same and not _is_ours(group.group_name):
            name: str = group.group_name
            return name
    tagged = f" with the tag {tag!r}" if tag else ""
    raise ValueError(
        f"there is no process group over the ranks {sorted(ranks)}{tagged}; make it once, in "
        f"every process, with torch.distributed.new_group({sorted(ranks)}), and pass that or the "
        "ranks"
    )


@torch_internals.mark_constant
def _is_ours(name: str) -> bool:
    """Whether the package has made the group for itself; torch 2.11 compiles no description."""
    return bool(torch_internals.group_named(name).group_desc.startswith(_OURS))


def _list_of_this_process(given: Sequence[Any]) -> list[int]:
    """The ranks with which this process communicates, out of one list or several."""
    nested = [isinstance(entry, Sequence) and not isinstance(entry, str) for entry in given]
    if any(nested) and not all(nested):
        raise ValueError(f"a group is a list of ranks, or a list of such lists, not {given!r}")
    lists = [list(entry) for entry in given] if all(nested) and given else [list(given)]
    every = [rank for ranks in lists for rank in ranks]
    wrong = [rank for rank in every if not isinstance(rank, int) or isinstance(rank, bool)]
    if wrong:
        raise TypeError(f"a group in a list consists of ranks, but got {wrong[0]!r} in {given!r}")
    world_size, here = dist.get_world_size(), dist.get_rank()
    if (
        len(set(every)) < len(every)
        or len({len(ranks) for ranks in lists}) > 1
        or here not in every
        or not set(every) <= set(range(world_size))
    ):
        raise ValueError(
            f"{given!r} is no group: one has different ranks from 0 to {world_size - 1}, in lists "
            f"of one length, and this process, rank {here}, is among them"
        )
    return next(ranks for ranks in lists if here in ranks)


# --- names -----------------------------------------------------------------------------------


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
