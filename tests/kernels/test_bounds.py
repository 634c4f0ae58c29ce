"""Kernels stay within their tensors, at any size and alignment; and mistakes of one are seen.

Tensors lie between pages that may not be touched: a kernel that leaves one ends its process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataparallel import kernels
from dataparallel.kernels import backend, compiler
from dataparallel.kernels.memory import SUFFIXES
from tests import forkserver
from tests.kernels.host_backend import HostBackend, library_of

# Exit statuses of a process that touches forbidden memory, does undefined things, or raises.
OUT_OF_BOUNDS, UNDEFINED, FAILED = -11, -4, 1

SIZES = [0, 1, 3, 7, 8, 9, 17, 255, 257, 2051, 8191, 8205]
_PROT_NONE, _PROT_READ = 0, 1


def guarded(
    values: torch.Tensor, side: str = "end", offset: int = 0, *, read_only: bool = False
) -> torch.Tensor:
    """Copy a dense tensor, with its strides, directly to a page that may not be touched.

    Args:
        side: True if the copy ends at such a page, not if it begins at one. At an end its alignment
            is that of its size.
        offset: How many elements from the page it lies, to have all alignments at a begin.
        read_only: True to catch writes to the copy too.
    """
    page, size = mmap.PAGESIZE, values.element_size()
    distance = offset * size
    length = -(-(values.nbytes + distance) // page) * page or page
    memory = mmap.mmap(-1, length + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
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


def exit_status(function: Callable[..., object], *args: Any) -> int | None:
    """Run a function in its own process, with kernels for CPU tensors; return the exit status."""
    process = forkserver.context().Process(target=_child, args=(function, args))
    process.start()
    process.join(200)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _child(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    with backend.registered([HostBackend()]):
        function(*args)


# --- the kernels -------------------------------------------------------------------------------


def _places(values: torch.Tensor, *, read_only: bool = False) -> Iterator[torch.Tensor]:
    """Copies at both guards; those at an end have the alignment of their size."""
    yield guarded(values, "end", read_only=read_only)
    yield guarded(values, "begin", read_only=read_only)
    yield guarded(values, "begin", 1, read_only=read_only)


def _values(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(size) * 9).to(dtype)


def _launched(kernel: str, count: int) -> None:
    """Look whether the kernel was tested, and not a reference."""
    (host,) = backend._backends
    assert isinstance(host, HostBackend)
    assert sum(name.startswith(kernel) for name in host.launches) >= count, host.launches[:9]


def _flatten() -> None:
    shapes = [(0,), (1,), (7, 3), (33, 65), (5, 9, 17), (8205,), (3,)]
    pairs = [(dtype, dtype) for dtype in SUFFIXES]
    pairs += [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
    for (dtype, other), count in itertools.product(pairs, range(1, len(shapes) + 1)):
        values = [_values(torch.Size(s).numel(), dtype).view(s) for s in shapes[-count:]]
        values = [value.transpose(0, -1) if i % 2 else value for i, value in enumerate(values)]
        sources = [guarded(value, read_only=True) for value in values]
        # Gaps between the elements of one.
        sources.append(guarded(_values(181, dtype), read_only=True)[::2])
        values.append(sources[-1].clone())
        expected = torch.cat([value.reshape(-1) for value in values]).to(other)
        for bucket in _places(torch.zeros_like(expected)):
            kernels.flatten(sources, bucket)
            assert torch.equal(bucket, expected)
        for place in (guarded, functools.partial(guarded, side="begin")):
            targets = [place(torch.zeros_like(value)) for value in values]
            kernels.unflatten(guarded(expected, read_only=True), targets)
            for target, value in zip(targets, values, strict=True):
                assert torch.equal(target, value.to(other).to(dtype))
    _launched("flatten", 100)


def _fingerprint() -> None:
    for dtype, size in itertools.product((torch.uint8, *SUFFIXES), SIZES):
        values = _values(size, dtype) if dtype != torch.uint8 else torch.arange(size).byte()
        expected = kernels.fingerprint([values])
        further = (guarded(values, "begin", offset, read_only=True) for offset in (2, 4))
        for place in (*_places(values, read_only=True), *further):
            assert torch.equal(kernels.fingerprint([place]), expected)
    _launched("fingerprint", 100)


@pytest.mark.parametrize("function", [_flatten, _fingerprint])
def test_kernels_stay_within_their_tensors(function: Callable[[], None]) -> None:
    assert exit_status(function) == 0


# --- mistakes of a kernel ----------------------------------------------------------------------

THREADS = 256
_DECLARATIONS = (
    (compiler.FOLDER / "kernel.cuh")
    .read_text(encoding="utf-8")
    .replace("#pragma once", "struct Test { int* from; int* to; };")
)


class _Parameters(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("target", ctypes.c_void_p))


def _run(body: str, schedule: int = 0) -> list[int]:
    """Return the page that a kernel fills: it is ``to``, ``from`` is read-only, t the thread."""
    start = "[[maybe_unused]] const int t = threadIdx.x; [[maybe_unused]] int* to = p.to;"
    text = _DECLARATIONS + f"KERNEL(test, Test) {{ {start} {body} }}"
    to = guarded(torch.zeros(mmap.PAGESIZE // 4, dtype=torch.int32))
    given = guarded(to, read_only=True)
    parameters = _Parameters(given.data_ptr(), to.data_ptr())
    status = library_of(text, "test").test(1, schedule, ctypes.byref(parameters))
    assert status == 0, "not all threads have reached a barrier"
    return to[:THREADS].tolist()


def _exchange(between: str) -> str:
    return f"""
      __shared__ int values[THREADS];
      values[t] = t;
      {between}
      to[t] = values[THREADS - 1 - t];
    """


def test_results_depend_on_the_schedule_where_a_barrier_is_missing() -> None:
    schedules = [0, 1, 5]
    good = [_run(_exchange("__syncthreads();"), schedule) for schedule in schedules]
    assert good == [list(range(THREADS))[::-1]] * 3
    found = [_run(_exchange(""), schedule) for schedule in schedules]
    assert all(one != other for one, other in itertools.combinations(found, 2))


MISTAKES = {
    "none": ("to[1023 - t] = p.from[1023 - t] + to[t];", 0),
    "reads behind the end": ("to[t] = to[769 + t];", OUT_OF_BOUNDS),
    "writes behind the end": ("to[769 + t] = 1;", OUT_OF_BOUNDS),
    "writes before the begin": ("to[t - 1] = 1;", OUT_OF_BOUNDS),
    "writes to an input": ("p.from[t] = 1;", OUT_OF_BOUNDS),
    "more local memory than a stack has": (
        "volatile char much[80000]; for (volatile char& c : much) { c = t; } to[0] = much[t];",
        OUT_OF_BOUNDS,
    ),
    "16 bytes from another address": ("to[t] = load_aligned(to + 1).at[0];", UNDEFINED),
    "a sum that overflows": ("to[0] = 2147483647 + t;", UNDEFINED),
    "NaN as an integer": ("float zero = t; to[0] = int(zero / zero);", UNDEFINED),
    "an array's end": ("int many[8] = {}; many[t % 8] = t; to[0] = many[t];", UNDEFINED),
    "some threads end": ("if (t < 100) { __syncthreads(); } to[t] = 1;", FAILED),
    "one thread misses its warp": ("if (t != 40) { __syncwarp(); }", FAILED),
    "barriers in two branches": (
        "if (t < 128) {\n __syncthreads();\n } else {\n __syncthreads();\n }",
        FAILED,
    ),
    "shared memory that nobody wrote": ("__shared__ float x; to[t] = int(x); x = t;", UNDEFINED),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str) -> None:
    body, status = MISTAKES[mistake]
    assert exit_status(_run, body) == status
