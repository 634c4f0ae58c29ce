"""Numbers of 16 bits on the host: each conversion is that of torch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from dataparallel.kernels import sources
from tests.kernels.host_backend import library_of

_TEXT = """
struct Numbers { const void* from; void* to; long long size; };

template <typename From, typename To, typename Convert>
void convert(const Numbers& p, Convert one) {
  for (i64 i = threadIdx.x; i < p.size; i += THREADS) {
    static_cast<To*>(p.to)[i] = one(static_cast<const From*>(p.from)[i]);
  }
}

KERNEL(widen_f16, Numbers) { convert<Half, float>(p, [](Half x) { return widen(x); }); }
KERNEL(widen_bf16, Numbers) { convert<BFloat, float>(p, [](BFloat x) { return widen(x); }); }
KERNEL(narrow_f16, Numbers) { convert<float, Half>(p, [](float x) { return to_half(x); }); }
KERNEL(narrow_bf16, Numbers) { convert<float, BFloat>(p, [](float x) { return to_bfloat(x); }); }
"""

DTYPES = [("f16", torch.float16), ("bf16", torch.bfloat16)]


class _Numbers(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("size", ctypes.c_longlong))


def _converted(kernel: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    header = (sources.FOLDER / "kernel.cuh").read_text(encoding="utf-8")
    library = library_of(header.replace("#pragma once", "") + _TEXT, "numbers")
    result = torch.zeros(values.shape, dtype=dtype)
    parameters = _Numbers(values.data_ptr(), result.data_ptr(), values.numel())
    assert getattr(library, kernel)(1, 0, ctypes.byref(parameters)) == 0
    return result


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN is NaN, whatever its other bits are: devices do not agree on them."""
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.isnan(), expected.isnan())
    different = (found.view(bits) != expected.view(bits)) & ~found.isnan()
    assert not different.any(), (found[different][:9], expected[different][:9])


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
def test_every_number_of_16_bits_is_widened(name: str, dtype: torch.dtype) -> None:
    values = _all_of(dtype)
    assert len(values.view(torch.int16).unique()) == 65536
    _assert_same_bits(_converted(f"widen_{name}", values, torch.float32), values.float())


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_every_number_of_16_bits_comes_back(name: str, dtype: torch.dtype) -> None:
    values = _all_of(dtype)
    _assert_same_bits(_converted(f"narrow_{name}", values.float(), dtype), values)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_floats_are_rounded(name: str, dtype: torch.dtype) -> None:
    values = _floats()
    _assert_same_bits(_converted(f"narrow_{name}", values, dtype), values.to(dtype))


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
