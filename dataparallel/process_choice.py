"""What a wrapper takes where the user says it in one of several ways, or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dataparallel.devices import DeviceLike
from dataparallel.replicate import is_spread


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def chosen_group(group: dist.ProcessGroup | None, mesh: Any) -> dist.ProcessGroup | None:
    """The group that was passed, that of a mesh of one dimension, or the default one.

    Raises:
        ValueError: Both were passed, or the mesh has several dimensions.
    """
    if mesh is None:
        return group or default_group()
    if group is not None:
        raise ValueError("pass process_group or device_mesh, not both")
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh must have one dimension, but has {mesh.ndim}; pass the part of it over "
            "which gradients are to be reduced, such as mesh['dp']"
        )
    chosen: dist.ProcessGroup = mesh.get_group()
    return chosen


def chosen_devices(
    device_ids: Sequence[DeviceLike] | None, module: nn.Module, group: dist.ProcessGroup | None
) -> Sequence[DeviceLike] | None:
    """The devices that were passed; the module's own if others use the machine, or it has several.

    Returns:
        None where all accelerators are to be taken.
    """
    if device_ids is not None:
        return device_ids
    if not is_spread(module) and (group is None or not _shares_machine(group)):
        return None
    first = next(module.parameters(), None)
    return [torch.device("cpu") if first is None else first.device]


def chosen_caps(
    cap: float | Sequence[float] | None, caps: Sequence[float] | None
) -> float | Sequence[float] | None:
    """The bucket size, or sizes, that were passed in one way or the other, in MiB.

    Raises:
        ValueError: They were passed in both ways, or one is negative.
    """
    if cap is not None and caps is not None:
        raise ValueError("pass bucket_cap_mb or bucket_cap_mb_list, not both")
    chosen = cap if caps is None else caps
    sizes = [] if chosen is None else chosen if isinstance(chosen, Sequence) else [chosen]
    if chosen is not None and (not sizes or min(sizes) < 0):
        raise ValueError(f"bucket_cap_mb is one size or several, in MiB, but got {chosen!r}")
    return chosen


def _shares_machine(group: dist.ProcessGroup) -> bool:
    """Whether other processes of the group are, or may be, on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return int(local) > 1 if local else dist.get_world_size(group) > 1
