"""The present state of this machine's devices: one reading for all callers.

Note [One reading]
~~~~~~~~~~~~~~~~~~
All callers in a process share one session of NVML. A caller within 0.1 seconds gets the same
reading again: the driver's own counters are not newer. Rates need two readings. So the first call,
and one after a long time without any, takes two and waits 0.1 seconds between them. Else the rate
of now would be the mean of the last hour.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import threading
import time

from dataparallel.monitor.readings.cpu import CpuSource
from dataparallel.monitor.readings.nvml import NvmlSource
from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading
from dataparallel.monitor.readings.source import SHORTEST_SPAN
from dataparallel.monitor.readings.visible_devices import named_by_run
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler

_log = logging.getLogger(__name__)

#: For so many seconds a reading is as good as another one.
_NEW = SHORTEST_SPAN
#: Seconds after which rates since the last reading say nothing about now.
_OLD = 60.0


def devices() -> list[DeviceReading]:
    """Return the present state of every device: NVIDIA's, with their MIG instances, and the CPU.

    Cheap when it is called often, see Note [One reading]; the first call takes 0.1 seconds. It
    creates no context of CUDA, and never raises for what can happen to a machine. An unavailable
    value is None, and a lost device has the reason in ``error``. The log tells, at the level INFO,
    why there are none of NVIDIA's.

    Example::

        for device in dataparallel.monitor.devices():
            print(device.device, device.value("utilization"), device.value("memory_used"))

    Returns:
        One reading per device, in NVIDIA's order and under torch's names: ``"cuda:0"`` for what
        ``torch.device("cuda", 0)`` is in this process, ``"nvml:3"`` for what CUDA_VISIBLE_DEVICES
        hides, and at the end ``"cpu"``. Values are in base units: ratios from 0 to 1, bytes, watts.

    Raises:
        ImportError: The extra ``monitor`` is not installed.
    """
    return list(_machine().read().devices)


def processes() -> list[ProcessReading]:
    """Return the processes on the devices of :func:`devices`: of NVIDIA's all, of the CPU this one.

    Example::

        for process in dataparallel.monitor.processes():
            print(process.device, process.pid, process.user, process.command, process.memory)

    Returns:
        One reading per process and device. In a container that does not see the host's processes
        they have no names.

    Raises:
        ImportError: The extra ``monitor`` is not installed.
    """
    return list(_machine().read().processes)


class Machine:
    """A reader of all devices, which reads no more often than there is something new."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        sources = NvmlSource(names=_names_of_torch), CpuSource(lambda: (os.getpid(),))
        self._sampler = Sampler(sources)
        self._sample: Sample | None = None
        self._at = -math.inf
        self._told: set[str] = set()

    def read(self) -> Sample:
        """Return a reading of all devices and processes that is at most a moment old."""
        with self._lock:
            age = time.monotonic() - self._at
            if age >= _OLD:
                self._sampler.warm_up()
            if self._sample is None or age >= _NEW:
                self._sample = self._sampler.sample()
                self._at = time.monotonic()
                for note in self._sample.notes:
                    if note not in self._told:
                        self._told.add(note)
                        _log.info("%s", note)
            return self._sample


@functools.cache
def _machine() -> Machine:
    return Machine()


if hasattr(os, "register_at_fork"):
    # Somebody may be reading while the process is forked: the child begins with its own lock.
    os.register_at_fork(after_in_child=_machine.cache_clear)


def _names_of_torch() -> dict[str, str]:
    """By identity, how torch calls the devices in this process; nothing before it has used them."""
    if "torch" not in sys.modules:
        return {}
    # Whoever reads devices without torch shall not load it.
    import torch

    from dataparallel.devices import accelerators, device_uuid

    there = accelerators()
    if not there or not getattr(torch.get_device_module(there[0]), "is_initialized", bool)():
        return {}
    return named_by_run([str(device) for device in there], [device_uuid(one) for one in there])
