"""One number for the bits of a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import fingerprint as module
from dataparallel.fingerprint import bits_of, fingerprint, fingerprints

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaN included; just 0 and 1 where a dtype has no others."""
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def one(tensor: Tensor) -> int:
    (number,) = fingerprints([tensor]).tolist()
    return int(number)


def reference(words: list[int]) -> int:
    """The same numbers from Python's integers, which have no width."""
    total = 0
    for position, word in enumerate(words, start=1):
        h = (word + position * 0x9E3779B97F4A7C15) % 2**64
        h = (h ^ h >> 32) * 0xFF51AFD7ED558CCD % 2**64
        h = (h ^ h >> 32) * 0xC4CEB9FE1A85EC53 % 2**64
        total += h ^ h >> 32
    return (total + 2**63) % 2**64 - 2**63


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9), st.integers(1, 9))
def test_against_integers_without_width(words: list[int], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", at_once)
        assert one(torch.tensor(words, dtype=torch.int64)) == reference(words)


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_every_bit_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = random(shape, dtype)
    seen = {one(values)}
    flat = bits_of(values).reshape(-1)
    flips = range(1) if dtype == torch.bool else range(8 * flat.element_size())
    for position in range(flat.numel()):
        for bit in flips:
            changed = flat.tolist()
            changed[position] ^= (
                -(2 ** (8 * flat.element_size() - 1))
                if (flat.dtype != torch.uint8 and bit == 8 * flat.element_size() - 1)
                else 1 << bit
            )
            copy = values.clone()
            bits_of(copy).view(-1).copy_(torch.tensor(changed, dtype=flat.dtype))
            seen.add(one(copy))
    assert len(seen) == 1 + flat.numel() * len(flips)


@pytest.mark.parametrize("distance", [1, 2, 1021, 2**17])
def test_places_count(distance: int) -> None:
    values = torch.arange(2**17 + 5, dtype=torch.float32)
    swapped = values.clone()
    swapped[0], swapped[distance] = values[distance], values[0]
    assert one(swapped) != one(values)


def test_two_flipped_signs_count() -> None:
    """The sum of what changes is 0 modulo 2**64 for 64-bit words."""
    values = torch.ones(40, dtype=torch.float64)
    numbers = set()
    for other in range(1, 40):
        flipped = values.clone()
        flipped[0] *= -1
        flipped[other] *= -1
        numbers.add(one(flipped))
    assert len({one(values), *numbers}) == 40


def test_the_number_of_elements_counts() -> None:
    assert len({one(torch.zeros(n)) for n in range(20)}) == 20


def test_no_tensors_and_empty_ones() -> None:
    assert fingerprints([]).tolist() == []
    assert fingerprints([torch.ones(0), torch.ones(3, 0), torch.ones(2)[:0]]).tolist() == [0] * 3


def test_kinds_of_nan_and_zero_are_told_apart() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000, 0x7F800001, 0, -(2**31)])
    numbers = fingerprints(list(bits.to(torch.int32).view(torch.float32))).tolist()
    assert len(set(numbers)) == 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_count_but_the_logical_order_does(dtype: torch.dtype) -> None:
    values = random((6, 8), dtype)
    there_and_back = values.t().contiguous().t()
    assert there_and_back.stride() != values.stride()
    assert one(there_and_back) == one(values) == one(torch.stack([values, values], -1)[..., 0])
    assert one(values.t()) != one(values)


def test_lazy_conjugates_and_negatives() -> None:
    values = torch.randn(5, dtype=torch.complex64)
    assert one(values.conj()) == one(values.conj().resolve_conj()) != one(values)
    imaginary = values.conj().imag
    assert imaginary.is_neg()
    assert one(imaginary) == one(imaginary.resolve_neg()) != one(values.imag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_on_another_device(dtype: torch.dtype) -> None:
    values = [random((3, 50), dtype), random((0,), dtype), random((), dtype)]
    moved = fingerprints([value.to("virtual:1") for value in values])
    assert moved.device == torch.device("virtual:1")
    assert moved.tolist() == fingerprints(values).tolist()


@pytest.mark.parametrize("offset", range(9))
def test_memory_that_begins_anywhere(offset: int) -> None:
    """Parameters of a flat buffer begin at any element; large ones are read where they are."""
    memory = torch.randn(2**17 + 9).bfloat16()
    values = memory[offset : offset + 2**17]
    assert values.nbytes == module._LARGE
    assert one(values) == one(values.clone())
    assert torch.equal(fingerprint([values]), fingerprint([values.clone()]))


@pytest.mark.parametrize("with_grad", [False, True])
def test_tensors_of_inference_and_of_training(with_grad: bool) -> None:
    values = torch.randn(3, requires_grad=with_grad)
    with torch.inference_mode():
        copy = values.clone()
        assert one(copy) == one(values)
    assert one(copy) == one(values)
    assert not fingerprints([values]).requires_grad
