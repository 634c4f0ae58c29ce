"""Replicas whose device is lost, and how they leave a wrapper."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataparallel.data_parallel import DataParallel
from dataparallel.sharded_optimizer import devices_with_shards_of
from dataparallel.shrinking.device_loss import DeviceLost, first_line, settle

_log = logging.getLogger("dataparallel")


@dataclass(frozen=True)
class LostReplica:
    """A replica that was dropped since its device was lost.

    Attributes:
        replica: Its index at that time.
        device: Its device.
        why: The error by which it was noticed, in words.
    """

    replica: int
    device: torch.device
    why: str

    def __str__(self) -> str:
        return f"replica {self.replica} was dropped, since {self.device} is lost: {self.why}"


def drop_lost(
    model: DataParallel[Any], is_lost: Callable[[torch.device], bool], error: BaseException
) -> list[LostReplica]:
    """Drop the replicas whose devices are lost.

    Args:
        model: The wrapper.
        is_lost: Tells of a device.
        error: Why that is looked at.

    Returns:
        Those that were dropped; there may be none.

    Raises:
        DeviceLost: Training cannot go on with those that are left.
    """
    devices = model.timeline.devices
    lost = {device for device in dict.fromkeys(devices) if is_lost(device)}
    if not lost:
        return []
    _check_rest(model, [device for device in dict.fromkeys(devices) if device in lost], error)
    why = first_line(error)
    found = [LostReplica(i, d, why) for i, d in enumerate(devices) if d in lost]
    model._keep_replicas([i for i, device in enumerate(devices) if device not in lost])
    settle(model.timeline.devices)
    for replica in found:
        _log.warning("%s; %d replicas are left", replica, len(model.timeline.devices))
    return found


def _check_rest(
    model: DataParallel[Any], lost: Sequence[torch.device], error: BaseException
) -> None:
    home = model.timeline.devices[0]
    if home in lost:
        raise DeviceLost(
            f"the device of replica 0 is lost, {home}, and with it the module's parameters and the "
            "state of the optimizer. Make the model anew on devices that work, load the last "
            "checkpoint, and go on from there",
            lost,
        ) from error
    if model.output_device in lost:
        raise DeviceLost(
            f"the device on which outputs are gathered is lost, {model.output_device}. Wrap the "
            f"module anew with another output_device; its parameters on {home} are as they were "
            "before the step",
            lost,
        ) from error
    shards = devices_with_shards_of(model.parameters())
    if not shards.isdisjoint(lost):
        names = " and ".join(str(device) for device in lost if device in shards)
        raise DeviceLost(
            f"the device of a shard of the optimizer is lost, {names}, and with it the state of "
            f"some parameters; the parameters on {home} are as they were before the step. Make the "
            "wrapper and the optimizer anew on devices that work, and load the last checkpoint",
            lost,
        ) from error


def names_of(lost: Sequence[LostReplica]) -> str:
    """What is said of replicas that were dropped."""
    where = " and ".join(f"replica {one.replica} on {one.device}" for one in lost)
    return f"{where or 'a replica'} was dropped, since the device is lost"


def devices_of(lost: Sequence[LostReplica]) -> list[torch.device]:
    """The devices of replicas, each once."""
    return list(dict.fromkeys(one.device for one in lost))
