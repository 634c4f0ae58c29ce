"""Memory between pages that may not be touched: a kernel that leaves a tensor ends its process."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
from collections.abc import Callable
from typing import Any, Literal

import torch

from dataparallel.kernels import backend
from tests import forkserver
from tests.kernels.host_backend import HostBackend

#: The exit status of a process that has touched memory which it may not touch.
OUT_OF_BOUNDS = -11

_PROT_NONE, _PROT_READ = 0, 1


def guarded(
    values: torch.Tensor,
    side: Literal["begin", "end"] = "end",
    offset: int = 0,
    *,
    read_only: bool = False,
) -> torch.Tensor:
    """A copy that lies directly at a page which may neither be read nor written.

    Args:
        values: A dense tensor; the copy has its strides.
        side: Whether the copy ends at such a page or begins at one. At an end its alignment is that
            of its size.
        offset: How many elements from the page it lies, to have all alignments at a begin.
        read_only: Whether writes to the copy are caught too.
    """
    page, size = mmap.PAGESIZE, values.element_size()
    distance = offset * size
    length = -(-(values.nbytes + distance) // page) * page or page
    memory = mmap.mmap(-1, length + 2 * page)
    room = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(room)
    del room
    begin = page + distance if side == "begin" else page + length - distance - values.nbytes
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    copy = whole[begin : begin + values.nbytes].view(values.dtype)
    copy = copy.as_strided(values.shape, values.stride())
    copy.copy_(values)
    _protect(address, page, _PROT_NONE)
    _protect(address + page + length, page, _PROT_NONE)
    if read_only:
        _protect(address + page, length, _PROT_READ)
    return copy


def _protect(address: int, length: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), protection)
    assert status == 0, ctypes.get_errno()


def exit_status(cases: Callable[..., None], *args: Any, timeout: float = 200) -> int | None:
    """Run a function of a module in a process of its own, in which kernels serve CPU tensors.

    Returns 0 if it has returned, :data:`OUT_OF_BOUNDS`, or the status of another failure.
    """
    process = forkserver.context().Process(target=_child, args=(cases, args))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _child(cases: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    with backend.registered([HostBackend()]):
        cases(*args)
