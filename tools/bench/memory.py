"""Peak memory of a process and of its accelerators since a starting point.

Note [Private peak]
~~~~~~~~~~~~~~~~~~~
The resident size counts pages of shared libraries, in each process again. What a process takes
from others is its unique set (USS), but the kernel keeps a high-water mark for the resident size
only. The pages that come and go while a model trains are private ones, so the peak of the unique
set is its size now plus what the resident size has come down from its own high-water mark.
Sampling instead would miss short peaks and disturb the measurement.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence

import psutil
import torch

from dataparallel import devices

_SELF = pathlib.Path("/proc/self")


class MemoryGauge:
    """The level of memory when it was made, and the peak since. See Note [Private peak].

    Args:
        slots: The devices of this process.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self._process = psutil.Process()
        self._accelerators = [slot for slot in dict.fromkeys(slots) if devices.is_accelerator(slot)]
        for device in self._accelerators:
            torch.accelerator.reset_peak_memory_stats(device)
        self._device_start = [devices.memory_allocated(slot) for slot in self._accelerators]
        _reset_high_water_mark()
        self._host_start = self._private()

    def _private(self) -> int:
        return int(self._process.memory_full_info().uss)

    def host_peak(self) -> int:
        """Bytes of host memory that this process had at its peak beyond the starting level."""
        marks = _resident_now_and_peak()
        if marks is None:
            return max(0, self._private() - self._host_start)
        now, peak = marks
        return max(0, self._private() + peak - now - self._host_start)

    def device_peak(self) -> int:
        """Bytes that tensors had at their peak on all accelerators beyond the starting level."""
        return sum(
            int(torch.accelerator.max_memory_allocated(device)) - start
            for device, start in zip(self._accelerators, self._device_start, strict=True)
        )


def _reset_high_water_mark() -> None:
    if (_SELF / "clear_refs").exists():
        (_SELF / "clear_refs").write_text("5")


def _resident_now_and_peak() -> tuple[int, int] | None:
    """Resident size now and at its peak in bytes; None where the system does not tell."""
    if not os.path.exists(_SELF / "status"):
        return None
    text = (_SELF / "status").read_text()
    kibibytes = {name: int(size) for name, size in re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", text)}
    if len(kibibytes) != 2:
        return None
    return kibibytes["VmRSS"] * 1024, kibibytes["VmHWM"] * 1024
