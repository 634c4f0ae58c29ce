"""Kernels on the host: what the emulation of CUDA's words does, and which mistakes it shows."""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest
import torch

from dataparallel.kernels import compiler
from tests.kernels.guarded import exit_status
from tests.kernels.host_backend import library_of
from tests.kernels.values import assert_same_bits

THREADS = 256
SCHEDULES = [0, 1, 5]

_DECLARATIONS = (
    (compiler.FOLDER / "kernel.cuh")
    .read_text(encoding="utf-8")
    .replace("#pragma once", "struct Test { const void* from; void* to; long long size; };")
)


class _Parameters(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("size", ctypes.c_longlong))


def _kernel(body: str) -> ctypes.CDLL:
    """A library with the kernel `test`, in which t is the thread and `to` points to ints."""
    start = "[[maybe_unused]] const int t = threadIdx.x;"
    start += "[[maybe_unused]] int* to = static_cast<int*>(p.to);"
    return library_of(_DECLARATIONS + f"KERNEL(test, Test) {{ {start} {body} }}", "test")


def _status(
    library: ctypes.CDLL,
    to: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    schedule: int = 0,
    blocks: int = 1,
) -> int:
    size = to.numel() if source is None else source.numel()
    address = 0 if source is None else source.data_ptr()
    parameters = _Parameters(address, to.data_ptr(), size)
    status = library.test(blocks, schedule, ctypes.byref(parameters))
    assert isinstance(status, int)
    return status


def _ints(body: str, *, schedule: int = 0, blocks: int = 1, count: int = THREADS) -> list[int]:
    """What a kernel that ends well has written."""
    to = torch.full((count,), -7, dtype=torch.int32)
    assert _status(_kernel(body), to, schedule=schedule, blocks=blocks) == 0
    return to.tolist()


_REVERSED = """
  __shared__ int values[THREADS];
  values[t] = t;
  BARRIER
  to[t] = values[THREADS - 1 - t];
"""


def test_results_depend_on_the_schedule_where_a_barrier_is_missing() -> None:
    body = _REVERSED.replace("BARRIER", "__syncthreads();")
    assert all(_ints(body, schedule=n) == list(range(THREADS))[::-1] for n in SCHEDULES)
    found = [_ints(_REVERSED.replace("BARRIER", ""), schedule=n) for n in SCHEDULES]
    assert all(one != other for one, other in itertools.combinations(found, 2))
    # What no thread has written yet is what shared memory is poisoned with.
    assert all(-1 in values for values in found)


def test_a_missing_barrier_before_memory_is_used_anew_shows() -> None:
    body = """
      __shared__ int values[THREADS];
      for (int i = 0; i < 3; ++i) {
        values[t] = i;
        __syncthreads();
        to[t] += values[(t + 128) % THREADS];
        BARRIER
      }
    """
    good = [_ints(body.replace("BARRIER", "__syncthreads();"), schedule=n) for n in SCHEDULES]
    assert good == [[-7 + 0 + 1 + 2] * THREADS] * 3
    bad = [_ints(body.replace("BARRIER", ""), schedule=n) for n in SCHEDULES]
    assert all(one != other for one, other in itertools.combinations(bad, 2))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param("if (t < 100) { __syncthreads(); } to[t] = 1;", id="some threads end"),
        pytest.param("if (t == 255) { return; } __syncthreads();", id="one thread ends"),
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
def test_a_barrier_that_not_all_reach_is_an_error(body: str, schedule: int) -> None:
    library = _kernel(body)
    to = torch.zeros(THREADS, dtype=torch.int32)
    assert _status(library, to, schedule=schedule, blocks=2) == 1
    # The next launch finds nothing of it.
    found = _ints(_REVERSED.replace("BARRIER", "__syncthreads();"), schedule=schedule)
    assert found == list(range(THREADS))[::-1]
    assert _status(library, to, schedule=schedule) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warp_waits_for_itself_alone(schedule: int) -> None:
    body = """
      __shared__ int values[THREADS];
      if (t / 32 % 2) { to[t] = -1; return; }
      values[t] = t;
      __syncwarp();
      to[t] = values[t ^ 31];
    """
    expected = [-1 if t // 32 % 2 else t ^ 31 for t in range(THREADS)]
    assert _ints(body, schedule=schedule) == expected
    body = "for (int i = 0; i < p.size % 7; ++i) { __syncthreads(); __syncwarp(); } to[t] = t;"
    assert _ints(body, schedule=schedule) == list(range(THREADS)), "branches that all take"


def test_shared_memory_holds_nothing_of_earlier_blocks_and_launches() -> None:
    body = """
      __shared__ float number;
      __shared__ int values[THREADS];
      to[blockIdx.x * THREADS + t] = number != number ? values[t] : 0;
      __syncthreads();
      number = 1;
      values[t] = 5;
    """
    for _ in range(2):
        assert _ints(body, blocks=2, count=2 * THREADS) == [-1] * (2 * THREADS)


def test_shared_memory_of_two_sources_is_not_the_same() -> None:
    text = """
      inline int* values() { __shared__ int values[COUNT]; return values; }
      KERNEL(test, Test) { values()[threadIdx.x * (COUNT / THREADS)] = COUNT;
        static_cast<int*>(p.to)[threadIdx.x] = values()[threadIdx.x * (COUNT / THREADS)]; }
    """
    for count in (256, 65536, 256):
        library = library_of(_DECLARATIONS + text.replace("COUNT", str(count)), "test")
        to = torch.zeros(THREADS, dtype=torch.int32)
        assert _status(library, to) == 0
        assert to.tolist() == [count] * THREADS


def test_threads_of_the_system_launch_at_the_same_time() -> None:
    body = """
      __shared__ int values[THREADS];
      for (int i = 0; i < 20; ++i) {
        values[t] = to[t];
        __syncthreads();
        to[t] = values[(t + 1) % THREADS] + 1;
        __syncthreads();
      }
    """
    library = _kernel(body)
    diverging = _kernel("if (t) { __syncthreads(); }")
    begin, failed = threading.Barrier(4, timeout=30), list[str]()

    def work(schedule: int) -> None:
        begin.wait()
        for number in range(40):
            values = torch.arange(THREADS, dtype=torch.int32) * (schedule + 1) + number
            to = values.clone()
            status = _status(library, to, schedule=schedule)
            error = _status(diverging, to, schedule=schedule)
            if (status, error) != (0, 1) or not torch.equal(to, values.roll(-20) + 20):
                failed.append(f"{schedule}: {status}, {error}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []


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


def test_local_memory_does_not_begin_as_zeros() -> None:
    # Through a pointer, or the compiler would refuse it.
    body = "int local[4]; int* volatile at = local; to[t] = at[t % 4] == 0;"
    assert _ints(body) == [0] * THREADS


# --- numbers of 16 bits ------------------------------------------------------------------------

_TEXT = """
template <typename From, typename To, typename Convert>
void convert(const Test& p, Convert one) {
  for (i64 i = threadIdx.x; i < p.size; i += THREADS) {
    static_cast<To*>(p.to)[i] = one(static_cast<const From*>(p.from)[i]);
  }
}

KERNEL(widen_f16, Test) { convert<Half, float>(p, [](Half x) { return widen(x); }); }
KERNEL(widen_bf16, Test) { convert<BFloat, float>(p, [](BFloat x) { return widen(x); }); }
KERNEL(narrow_f16, Test) { convert<float, Half>(p, [](float x) { return to_half(x); }); }
KERNEL(narrow_bf16, Test) { convert<float, BFloat>(p, [](float x) { return to_bfloat(x); }); }
"""

DTYPES = [("f16", torch.float16), ("bf16", torch.bfloat16)]


def _converted(kernel: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    library = library_of(_DECLARATIONS + _TEXT, "numbers")
    result = torch.zeros(values.shape, dtype=dtype)
    parameters = _Parameters(values.data_ptr(), result.data_ptr(), values.numel())
    assert getattr(library, kernel)(1, 0, ctypes.byref(parameters)) == 0
    return result


def _all_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def _floats() -> torch.Tensor:
    """Floats around every number of 16 bits and half way between two, and of all exponents."""
    steps = torch.tensor([-2, -1, 0, 1, 2])
    places = [_all_of(dtype).float().view(torch.int32).long() for _, dtype in DTYPES]
    halfway = [places[0] + 2**12, places[1] + 2**15]
    # Between subnormal halves lie those with exponents of their own.
    small = (torch.arange(4096).double() * 2.0**-25).float()
    small_places = torch.cat([small, -small]).view(torch.int32).long()
    near = torch.cat([*places, *halfway, small_places])[:, None] + steps
    exponents = torch.arange(512)[:, None] << 23
    fractions = torch.cat([torch.tensor([0, 1, 2**22, 2**23 - 1]), torch.randint(2**23, (300,))])
    bits = torch.cat([near.flatten(), (exponents + fractions).flatten()])
    bits = bits & 0xFFFFFFFF
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_numbers_of_16_bits_are_widened_and_rounded_as_torch_does(
    name: str, dtype: torch.dtype
) -> None:
    values = _all_of(dtype)
    assert len(values.view(torch.int16).unique()) == 65536
    assert_same_bits(_converted(f"widen_{name}", values, torch.float32), values.float())
    assert_same_bits(_converted(f"narrow_{name}", values.float(), dtype), values)
    floats = _floats()
    assert_same_bits(_converted(f"narrow_{name}", floats, dtype), floats.to(dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "value", "expected"),
    [
        ("f16", torch.float16, 65519.996, 65504.0),
        ("f16", torch.float16, 65520.0, float("inf")),
        ("f16", torch.float16, 2.0**-25, 0.0),
        ("f16", torch.float16, 2.0**-25 * 1.0001, 2.0**-24),
        ("f16", torch.float16, 1 + 2.0**-11, 1.0),
        ("f16", torch.float16, 1 + 3 * 2.0**-11, 1 + 2.0**-9),
        ("bf16", torch.bfloat16, 3.4e38, float("inf")),
        ("bf16", torch.bfloat16, 1 + 2.0**-8, 1.0),
        ("bf16", torch.bfloat16, 1 + 3 * 2.0**-8, 1 + 2.0**-6),
    ],
)
def test_ties_and_borders(name: str, dtype: torch.dtype, value: float, expected: float) -> None:
    found = _converted(f"narrow_{name}", torch.tensor([value, -value]), dtype)
    assert found.tolist() == [expected, -expected]
    assert found.signbit().tolist() == [False, True]
