"""Kernels on the host: which mistakes of a kernel the emulation of CUDA shows."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from dataparallel.kernels import compiler
from tests.kernels.guarded import exit_status
from tests.kernels.host_backend import library_of

THREADS = 256
SCHEDULES = [0, 1, 5]

_DECLARATIONS = (
    (compiler.FOLDER / "kernel.cuh")
    .read_text(encoding="utf-8")
    .replace("#pragma once", "struct Test { int* to; long long size; };")
)


class _Parameters(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("size", ctypes.c_longlong))


def _kernel(body: str) -> ctypes.CDLL:
    """A library with the kernel `test`, in which t is the thread and `to` points to ints."""
    start = "[[maybe_unused]] const int t = threadIdx.x; [[maybe_unused]] int* to = p.to;"
    return library_of(_DECLARATIONS + f"KERNEL(test, Test) {{ {start} {body} }}", "test")


def _status(library: ctypes.CDLL, to: torch.Tensor, schedule: int = 0, blocks: int = 1) -> int:
    parameters = _Parameters(to.data_ptr(), to.numel())
    status = library.test(blocks, schedule, ctypes.byref(parameters))
    assert isinstance(status, int)
    return status


def _ints(body: str, *, schedule: int = 0, blocks: int = 1) -> list[int]:
    """What a kernel that ends well has written."""
    to = torch.full((blocks * THREADS,), -7, dtype=torch.int32)
    assert _status(_kernel(body), to, schedule, blocks) == 0
    return to.tolist()


_REVERSED = """
  __shared__ int values[THREADS];
  values[t] = t;
  BARRIER
  to[t] = values[THREADS - 1 - t];
"""


def test_results_depend_on_the_schedule_where_a_barrier_is_missing() -> None:
    good = _REVERSED.replace("BARRIER", "__syncthreads();")
    assert all(_ints(good, schedule=n) == [*range(THREADS)][::-1] for n in SCHEDULES)
    found = [_ints(_REVERSED.replace("BARRIER", ""), schedule=n) for n in SCHEDULES]
    assert all(one != other for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("if (t < 100) { __syncthreads(); } to[t] = 1;", id="some threads end"),
        pytest.param(
            "if (t < 32) { __syncthreads(); } else { __syncwarp(); } __syncthreads();",
            id="another kind of barrier",
        ),
        pytest.param("if (t != 40) { __syncwarp(); }", id="one thread misses its warp"),
        pytest.param(
            "if (t < 128) {\n __syncthreads();\n } else {\n __syncthreads();\n }",
            id="barriers in two branches",
        ),
        pytest.param(
            "if (t % 2) {\n to[t] = __shfl_xor_sync(~0u, t, 1);\n } else {\n __syncwarp();\n }",
            id="half a warp exchanges",
        ),
    ],
)
def test_a_barrier_that_not_all_reach_is_an_error(body: str) -> None:
    library = _kernel(body)
    to = torch.zeros(THREADS, dtype=torch.int32)
    for schedule in SCHEDULES:
        assert _status(library, to, schedule, blocks=2) == 1
        # The next launch finds nothing of it.
        found = _ints(_REVERSED.replace("BARRIER", "__syncthreads();"), schedule=schedule)
        assert found == list(range(THREADS))[::-1]


def test_a_warp_waits_for_itself_alone() -> None:
    body = """
      __shared__ int values[THREADS];
      if (t / 32 % 2) { to[t] = -1; return; }
      values[t] = t;
      __syncwarp();
      to[t] = values[t ^ 31];
    """
    expected = [-1 if t // 32 % 2 else t ^ 31 for t in range(THREADS)]
    assert all(_ints(body, schedule=n) == expected for n in SCHEDULES)


def test_memory_holds_nothing_of_earlier_blocks_and_launches() -> None:
    """Shared memory; and local memory, through a pointer, or the compiler would refuse it."""
    body = """
      __shared__ float number;
      __shared__ int values[THREADS];
      int local[4];
      int* volatile at = local;
      to[blockIdx.x * THREADS + t] = number != number && at[t % 4] ? values[t] : 0;
      __syncthreads();
      number = 1;
      values[t] = 5;
    """
    for _ in range(2):
        assert _ints(body, blocks=2) == [-1] * (2 * THREADS)


def _undefined(body: str) -> None:
    _ints(body)


_SIGILL, _SIGSEGV = -4, -11


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            "to[t] = load_aligned(to + 1).at[0];", _SIGILL, id="16 bytes from another address"
        ),
        pytest.param("to[0] = to[t] << (t + 31);", _SIGILL, id="a shift by too much"),
        pytest.param("to[0] = 2147483647 + t;", _SIGILL, id="a signed sum that overflows"),
        pytest.param(
            "float nothing = t; to[0] = int(nothing / nothing);", _SIGILL, id="NaN as an integer"
        ),
        pytest.param(
            "int many[8] = {}; many[t % 8] = t; to[0] = many[t];", _SIGILL, id="an array's end"
        ),
        pytest.param(
            "volatile char much[80000]; for (volatile char& c : much) { c = t; } to[0] = much[t];",
            _SIGSEGV,
            id="more local memory than a stack has",
        ),
    ],
)
def test_what_is_not_defined_ends_the_process(body: str, expected: int) -> None:
    assert exit_status(_undefined, body) == expected
