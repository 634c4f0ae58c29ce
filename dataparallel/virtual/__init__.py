"""Several accelerators in host memory, to run and test code for several GPUs on any machine.

``enable(4)`` adds the devices ``virtual:0`` to ``virtual:3``. Their tensors lie in host memory, and
the CPU's kernels compute them. Otherwise they behave like tensors on GPUs. An operation on tensors
of two devices is an error. Each device has its own random generator, streams and autograd thread,
and ``torch.accelerator`` drives it.

A side stream defers its work until somebody waits for it, so a forgotten wait gives wrong values
here too. In strict mode the default streams defer their work as well, and what no wait orders is an
error wherever it happens to go well.
"""

from dataparallel.virtual.backend import (
    device_count,
    enable,
    enable_from_environment,
    is_enabled,
    set_schedule,
)
from dataparallel.virtual.controls import (
    check_races,
    checks_races,
    counters,
    is_strict,
    pending,
    reset_counters,
    routes,
    set_check_races,
    set_memory_limit,
    set_strict,
    strict_mode,
)
from dataparallel.virtual.trace import (
    Trace,
    TraceEntry,
    dry_mode,
    is_dry,
    record_trace,
    set_dry,
)

__all__ = [
    "Trace",
    "TraceEntry",
    "check_races",
    "checks_races",
    "counters",
    "device_count",
    "dry_mode",
    "enable",
    "enable_from_environment",
    "is_dry",
    "is_enabled",
    "is_strict",
    "pending",
    "record_trace",
    "reset_counters",
    "routes",
    "set_check_races",
    "set_dry",
    "set_memory_limit",
    "set_schedule",
    "set_strict",
    "strict_mode",
]
