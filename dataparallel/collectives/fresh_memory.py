"""Memory for large results on the CPU.

The C library keeps the memory of smaller tensors and gives it to the next ones. Large ones get
theirs from the system each time, page by page when it is first written to; with pages of 4 KiB that
takes several times as long as the sum that is written, so the system is asked for huge pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# From here on glibc gets memory from the system each time.
_LARGE = 32 * 1024 * 1024
# The size of a huge page; where it is another one, nothing is lost but the gain.
_HUGE = 2 * 1024 * 1024


def fresh_like(tensor: Tensor) -> Tensor:
    """An uninitialized tensor of the shape, strides and dtype of a CPU tensor."""
    result = torch.empty_like(tensor)
    size = result.numel() * result.element_size()
    if size >= _LARGE and (advise := _advise()) is not None:
        begin = -(-result.data_ptr() // _HUGE) * _HUGE
        end = (result.data_ptr() + size) // _HUGE * _HUGE
        # Without success the memory is as good as any other.
        advise(begin, end - begin)
    return result


@functools.cache
def _advise() -> Callable[[int, int], Any] | None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return None
    madvise = ctypes.CDLL(None).madvise
    # With their types: ctypes passes a plain number as an int, which cuts addresses.
    return lambda begin, length: madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
