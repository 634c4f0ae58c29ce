"""Go on training on the devices that are left when one is lost."""

from dataparallel.shrinking.device_loss import DeviceLost as DeviceLost
from dataparallel.shrinking.keeper import ReplicaKeeper as ReplicaKeeper
from dataparallel.shrinking.keeper import survive_device_loss as survive_device_loss
from dataparallel.shrinking.lost_replica import LostReplica as LostReplica

__all__ = ["DeviceLost", "LostReplica", "ReplicaKeeper", "survive_device_loss"]
