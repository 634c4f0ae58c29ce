"""No kernel reads or writes an element that is not its own, at any size and alignment."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from dataparallel import kernels
from dataparallel.kernels import backend
from dataparallel.kernels.memory import SUFFIXES
from tests.kernels.guarded import OUT_OF_BOUNDS, exit_status, guarded
from tests.kernels.host_backend import HostBackend, library_of

SIZES = [0, 1, 3, 7, 8, 9, 17, 255, 257, 2051, 8191, 8205]


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


def _reduce_add() -> None:
    for dtype, size in itertools.product(SUFFIXES, SIZES):
        values = [_values(size, dtype) for _ in range(3)]
        expected = kernels.reduce_add(values)
        for out in _places(expected.clone()):
            for first in _places(values[0], read_only=True):
                terms = [first, *(guarded(value, read_only=True) for value in values[1:])]
                out.zero_()
                kernels.reduce_add(terms, out=out)
                assert torch.equal(out, expected)
    _launched("reduce_add", 9 * 6 * (len(SIZES) - 1))


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


@pytest.mark.parametrize("cases", [_reduce_add, _flatten, _fingerprint])
def test_kernels_stay_within_their_tensors(cases: Callable[[], None]) -> None:
    assert exit_status(cases) == 0


# --- whether accesses out of bounds are noticed ------------------------------------------------

# Copies one byte from here to there.
_COPY = """
constexpr int THREADS = 256;
struct Copy { const char* from; char* to; };
KERNEL(copy, Copy) { if (threadIdx.x == 0) { *p.to = *p.from; } }
"""


class _Copy(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("target", ctypes.c_void_p))


def _copy(side: str, read_only: bool, source_place: int, target_place: int) -> None:
    source = guarded(torch.ones(9, dtype=torch.uint8), "begin" if side == "begin" else "end")
    target = guarded(source, "begin" if side == "begin" else "end", read_only=read_only)
    parameters = _Copy(source.data_ptr() + source_place, target.data_ptr() + target_place)
    assert library_of(_COPY, "copy").copy(1, 0, ctypes.byref(parameters)) == 0


@pytest.mark.parametrize(
    ("side", "read_only", "places", "status"),
    [
        pytest.param("end", False, (8, 8), 0, id="all within"),
        pytest.param("end", False, (9, 0), OUT_OF_BOUNDS, id="one read behind the end"),
        pytest.param("end", False, (0, 9), OUT_OF_BOUNDS, id="one write behind the end"),
        pytest.param("begin", False, (-1, 0), OUT_OF_BOUNDS, id="one read before the begin"),
        pytest.param("begin", False, (0, -1), OUT_OF_BOUNDS, id="one write before the begin"),
        pytest.param("end", True, (0, 0), OUT_OF_BOUNDS, id="a write to an input"),
    ],
)
def test_one_element_too_far_ends_the_process(
    side: str, read_only: bool, places: tuple[int, int], status: int
) -> None:
    assert exit_status(_copy, side, read_only, *places) == status
