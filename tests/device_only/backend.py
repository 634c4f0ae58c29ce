"""A c10d backend for tensors on virtual devices only, as NCCL is one for those on CUDA devices.

Its habits are NCCL's. It refuses CPU tensors, and takes dense tensors, one device per collective.
The wait for a collective orders streams and does not block the host. An error comes later, in
``work.exception()`` and in the next collective. If the default group is bound to a device, other
groups are split from it, for which all its processes have to come.

A communicator is made at the first collective of a device, when the host waits for all ranks
without a time limit. No two ranks may use one device; devices of one number count as one, see
``set_habits``. A collective whose peer never comes does not end by itself. If the time limit of the
group is over, NCCL's watchdog ends the process. Here that is recorded, and the collective ends.
``Cluster.run`` expects no such record. It also compares the order in which ranks launch collectives
over several communicators: kernels that wait for each other on one device may wait forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from dataparallel import torch_internals
from dataparallel.kernels.native import NativeExtension

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

    def create(options: Any, _: object) -> Any:
        store, rank, size = options.store, options.group_rank, options.group_size
        gloo = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        # For keys that are not gloo's.
        keys = torch_internals.PrefixStore("vccl", store)
        name, parent = options.group_id, _split_source()
        return extension.DeviceOnly(gloo, keys, name, rank, size, options.timeout, parent)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["virtual"])


# --- habits and records ---------------------------------------------------------------------------


class Launch(NamedTuple):
    """A collective that a process has launched."""

    device: int
    communicator: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (number {self.number} of {self.communicator!r})"


class Records(NamedTuple):
    """Deeds of a process since it was last asked."""

    #: Collectives after whose time limit NCCL's watchdog would have ended the process.
    kills: list[str]
    launches: list[Launch]


def set_habits(*, setup: float = 0.0, physical: bool = True) -> None:
    """Choose how backends behave from now on.

    Args:
        setup: Seconds that making a communicator takes at least.
        physical: True if devices of one number are one device in all processes, as those of one
            machine are. Default: True.
    """
    _EXTENSION.load().set_habits(int(1000 * setup), physical)


def take_records() -> Records:
    """Return what was recorded, and forget it."""
    kills, launches = _EXTENSION.load().take_records()
    return Records(kills, [Launch(*each) for each in launches])


def find_difference(ranks: Sequence[Sequence[Launch]]) -> str:
    """Return the first launches of which ranks have another order on one device; empty if none."""
    for rank, launches in enumerate(ranks[1:], 1):
        for device in {each.device for each in ranks[0]}:
            first = [each for each in ranks[0] if each.device == device]
            numbered = {each[1:3] for each in first}
            # Where the same collectives are, there is the device that belongs to it.
            for other in {each.device for each in launches}:
                second = [each for each in launches if each.device == other]
                common = numbered & {each[1:3] for each in second}
                both = [[x for x in xs if x[1:3] in common] for xs in (first, second)]
                # One may have failed before its last.
                pairs = zip(*both, strict=False)
                for one, another in pairs:
                    if one[1:3] != another[1:3]:
                        return f"rank 0 launches {one} where rank {rank} launches {another}"
    return ""
