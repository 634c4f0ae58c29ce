"""A virtual accelerator: several devices in host memory, for code that is meant for several GPUs.

``enable(4)`` adds the devices ``virtual:0`` to ``virtual:3``. Tensors on them live in host memory
and are computed by the CPU's kernels, but they behave as tensors on accelerators do: mixing two
devices in one operation is an error, each device has its own random generator, its own streams and
its own autograd thread, and ``torch.accelerator`` drives them.

Work on a side stream is deferred until somebody waits for it, so that a forgotten wait gives wrong
values here too. In strict mode the default streams defer as well.
"""

from dataparallel.virtual.backend import (
    device_count,
    enable,
    enable_from_environment,
    is_enabled,
)
from dataparallel.virtual.device_loss import is_lost, lose_device, restore_device
from dataparallel.virtual.inspection import counters, pending, reset_counters
from dataparallel.virtual.memory_limit import set_memory_limit
from dataparallel.virtual.strictness import is_strict, set_strict, strict_mode

__all__ = [
    "counters",
    "device_count",
    "enable",
    "enable_from_environment",
    "is_enabled",
    "is_lost",
    "is_strict",
    "lose_device",
    "pending",
    "reset_counters",
    "restore_device",
    "set_memory_limit",
    "set_strict",
    "strict_mode",
]
