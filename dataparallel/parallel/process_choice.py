"""What a wrapper takes where the user says it in one of several ways, or not at all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.devices import DeviceLike
from dataparallel.parallel.training import Options, default_group
from dataparallel.replicas.replicate import is_spread


def chosen_group(
    group: dist.ProcessGroup | Literal[False, -100] | None, mesh: Any
) -> dist.ProcessGroup | None:
    """The group that was passed, that of a mesh of one dimension, or the default one, if any."""
    no_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is no_member:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group that was passed; make "
            "the wrapper in the processes of the group only"
        )
    if not (group is None or group is False or isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            "process_group is a torch.distributed.ProcessGroup (such as that of "
            "torch.distributed.new_group()), None for the default group, or False for none, but "
            f"got {group!r} of type {type(group).__name__}"
        )
    if mesh is None:
        chosen = default_group() if group is None else group or None
        Options(process_group=chosen, separate=group is False).check_alone()
        return chosen
    if group is not None:
        raise ValueError("pass process_group or device_mesh, not both")
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh must have one dimension, but has {mesh.ndim}; pass the part of it over "
            "which gradients are to be reduced, such as mesh['dp']"
        )
    of_mesh: dist.ProcessGroup = mesh.get_group()
    return of_mesh


def chosen_devices(
    device_ids: Sequence[DeviceLike] | None, module: nn.Module, group: dist.ProcessGroup | None
) -> Sequence[DeviceLike] | None:
    """The devices; the module's own if others use the machine or it has several; None for all."""
    if device_ids is not None:
        return device_ids
    if not is_spread(module) and (group is None or not _shares_machine(group)):
        return None
    first = next(module.parameters(), None)
    return [torch.device("cpu") if first is None else first.device]


def chosen_caps(
    cap: float | Sequence[float] | None, caps: Sequence[float] | None
) -> float | Sequence[float] | None:
    """The bucket size, or sizes, that were passed in one way or the other, in MiB."""
    if cap is not None and caps is not None:
        raise ValueError("pass bucket_cap_mb or bucket_cap_mb_list, not both")
    chosen = cap if caps is None else caps
    sizes = [] if chosen is None else chosen if isinstance(chosen, Sequence) else [chosen]
    if chosen is not None and (not sizes or min(sizes) < 0):
        raise ValueError(f"bucket_cap_mb is one size or several, in MiB, but got {chosen!r}")
    return chosen


def chosen_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether buffers are sent before forwards; warns where both arguments were passed."""
    if forward_sync_buffers is not None and broadcast_buffers is not None:
        warnings.warn(
            "both broadcast_buffers and forward_sync_buffers were passed; forward_sync_buffers "
            f"counts, which is {forward_sync_buffers}. Pass one of them",
            FutureWarning,
            stacklevel=5,
        )
    chosen = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    return chosen is not False


def _shares_machine(group: dist.ProcessGroup) -> bool:
    """Whether other processes of the group are, or may be, on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return int(local) > 1 if local else dist.get_world_size(group) > 1
