"""Whether accesses out of bounds are noticed at all."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch

from tests.kernels.guarded import OUT_OF_BOUNDS, exit_status, guarded
from tests.kernels.host_backend import library_of

# Reads `size` elements from `from` and writes them to `to`, both of 1 byte.
_COPY = """
constexpr int THREADS = 256;
struct Copy { const char* from; char* to; long long from_begin, to_begin, size; };
KERNEL(copy, Copy) {
  for (long long i = threadIdx.x; i < p.size; i += THREADS) {
    p.to[p.to_begin + i] = p.from[p.from_begin + i];
  }
}
"""


class _Copy(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("source_begin", ctypes.c_longlong),
        ("target_begin", ctypes.c_longlong),
        ("size", ctypes.c_longlong),
    )


def _copy(source: torch.Tensor, target: torch.Tensor, *numbers: int) -> None:
    parameters = _Copy(source.data_ptr(), target.data_ptr(), *numbers)
    assert library_of(_COPY, "copy").copy(1, 0, ctypes.byref(parameters)) == 0


def _with_numbers(side: str, read_only: bool, numbers: tuple[int, int, int]) -> None:
    make = functools.partial(guarded, torch.arange(9, dtype=torch.uint8))
    assert side in ("begin", "end")
    target = make("begin") if side == "begin" else make("end")
    source = make("begin") if side == "begin" else make("end")
    if read_only:
        target = make("end", read_only=True)
    target_before = target.tolist()
    _copy(source, target, *numbers)
    assert target.tolist() == target_before


def test_what_stays_within_is_allowed() -> None:
    assert exit_status(_with_numbers, "end", False, (0, 0, 9)) == 0


@pytest.mark.parametrize(
    ("side", "read_only", "numbers"),
    [
        pytest.param("end", False, (1, 0, 9), id="one read behind the end"),
        pytest.param("end", False, (0, 1, 9), id="one write behind the end"),
        pytest.param("begin", False, (-1, 0, 1), id="one read before the begin"),
        pytest.param("begin", False, (0, -1, 1), id="one write before the begin"),
        pytest.param("end", True, (0, 0, 9), id="a write to an input"),
    ],
)
def test_one_element_too_far_ends_the_process(
    side: str, read_only: bool, numbers: tuple[int, int, int]
) -> None:
    assert exit_status(_with_numbers, side, read_only, numbers) == OUT_OF_BOUNDS


@pytest.mark.parametrize("side", ["begin", "end"])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 5000])
def test_a_copy_has_values_and_strides(side: str, size: int) -> None:
    values = torch.arange(3.0 * size).view(3, size).t()
    found = guarded(values, "begin" if side == "begin" else "end", offset=1)
    assert found.stride() == values.stride()
    assert torch.equal(found, values)
    found.zero_()


def test_alignment_follows_from_the_offset() -> None:
    values = torch.zeros(4)
    begins = [guarded(values, "begin", offset=n).data_ptr() % 16 for n in range(5)]
    assert begins == [0, 4, 8, 12, 0]
    ends = [guarded(torch.zeros(n)).data_ptr() % 16 for n in range(1, 5)]
    assert ends == [12, 8, 4, 0]
