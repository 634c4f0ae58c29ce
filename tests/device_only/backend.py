"""A c10d backend for tensors on virtual devices only, as NCCL is one for those on CUDA devices.

Its habits are NCCL's. It refuses CPU tensors, and takes dense tensors, one device per collective.
The wait for a collective orders streams and does not block the host. An error comes later, in
``work.exception()`` and in the next collective. If the default group is bound to a device, other
groups are split from it, for which all its processes have to come. Other than with NCCL, several
ranks may use devices of one number, since they are not the same memory, and nothing ends the
process.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dataparallel.kernels.native import NativeExtension

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Its name, as in ``dist.init_process_group("vccl")``.
NAME = "vccl"

_EXTENSION = NativeExtension(
    name="dataparallel_tests_device_only",
    label="the process group of virtual devices",
    prefix="device-only",
    sources=Path(__file__).parent / "csrc",
)


def _split_source() -> Any:
    """Return the source of a new communicator, as torch decides it for NCCL; None for none."""
    world: Any = dist.group.WORLD
    if world is None or world.bound_device_id is None:
        return None
    return world._get_backend(world.bound_device_id)


def register() -> None:
    """Let torch know the backend; compile it where that has not been done. May be called again."""
    if NAME in dist.Backend.backend_list:
        return
    extension = _EXTENSION.load()

    def create(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return extension.DeviceOnly(gloo, rank, size, timeout, _split_source())

    dist.Backend.register_backend(NAME, create, devices=["virtual"])
