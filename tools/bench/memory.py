"""Peak memory of a process and of its accelerators since a starting point.

Note [Private peak]
~~~~~~~~~~~~~~~~~~~
A model takes anonymous memory. The resident size has pages of shared libraries in it too, in each
process again. The unique set (USS) has them for as long as no other process uses the library, so it
falls when another contestant starts. But the kernel keeps a high-water mark for the resident size
only. The pages that come and go while a model trains are anonymous ones. So their peak is their
present size plus the distance of the resident size from its own high-water mark. Sampling instead
would miss short peaks and disturb the measurement.

Memory that the allocator has kept from before the starting point would be used by the model without
being seen, so it is given back first.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
from collections.abc import Sequence

import psutil
import torch

from dataparallel import devices

_SELF = pathlib.Path("/proc/self")


class MemoryGauge:
    """The level of memory when it was made, and the peak since. See Note [Private peak]."""

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self._process = psutil.Process()
        self._accelerators = [slot for slot in dict.fromkeys(slots) if devices.is_accelerator(slot)]
        for device in self._accelerators:
            torch.accelerator.reset_peak_memory_stats(device)
        self._device_start = [devices.memory_allocated(slot) for slot in self._accelerators]
        _give_back_free_memory()
        if (_SELF / "clear_refs").exists():
            (_SELF / "clear_refs").write_text("5")
        self._host_start = self._private()

    def _private(self) -> int:
        anonymous = _sizes("smaps_rollup", "Anonymous")
        # Without the kernel's help, the nearest there is.
        return anonymous[0] if anonymous else int(self._process.memory_full_info().uss)

    def host_peak(self) -> int:
        """Bytes of host memory that this process had at its peak beyond the starting level."""
        come_down = 0
        if marks := _sizes("status", "VmRSS", "VmHWM"):
            now, peak = marks
            come_down = max(0, peak - now)
        return max(0, self._private() + come_down - self._host_start)

    def device_peak(self) -> int:
        """Bytes that tensors had at their peak on all accelerators beyond the starting level."""
        return sum(
            int(torch.accelerator.max_memory_allocated(device)) - start
            for device, start in zip(self._accelerators, self._device_start, strict=True)
        )


def _give_back_free_memory() -> None:
    gc.collect()
    library = ctypes.CDLL(None)
    # Only glibc has it; without it the level is a little too high for all contestants.
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _sizes(file: str, *names: str) -> list[int] | None:
    """Some figures of this process in bytes; None where the system does not tell them all."""
    if not (_SELF / file).exists():
        return None
    lines = re.findall(r"(\w+):\s+(\d+) kB", (_SELF / file).read_text())
    found = {name: int(size) * 1024 for name, size in lines}
    return [found[name] for name in names] if found.keys() >= set(names) else None
