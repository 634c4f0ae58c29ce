"""The sum of several tensors: kernel and reference against plain torch, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel import kernels
from dataparallel.kernels import backend, reference
from dataparallel.kernels.dtypes import SUFFIXES
from tests.kernels.host_backend import HostBackend

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0]
# Around the borders of packs of 2, 4 and 8 elements, of a block's packs, and of three blocks'.
SIZES = sorted(
    {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33}
    | {256 * pack + more for pack in (2, 4, 8) for more in (-1, 0, 1)}
    | {3 * 256 * pack + more for pack in (2, 4, 8) for more in (-1, 1, pack + 1)}
)
# Another tensor in a buffer begins here.
MARGIN = 16


def values_of(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Numbers of all magnitudes, among them all special ones."""
    if not dtype.is_floating_point:
        range_of = torch.iinfo(dtype)
        return torch.randint(range_of.min, range_of.max, (size,), dtype=dtype)
    limits = torch.finfo(dtype)
    extremes = [limits.max, limits.min, limits.tiny, limits.smallest_normal / 4]
    special = torch.tensor([*SPECIAL, *extremes], dtype=torch.float64)
    chosen = special[torch.randint(len(special), (size,))]
    ordinary = torch.randn(size, dtype=torch.float64) * 10.0 ** torch.randint(-6, 5, (size,))
    return torch.where(torch.rand(size) < 0.2, chosen, ordinary).to(dtype)


def at_offset(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy within a larger buffer, whose other elements are 77."""
    whole = torch.full((values.numel() + 2 * MARGIN,), 77, dtype=values.dtype)
    assert whole.data_ptr() % 16 == 0
    copy = whole[offset : offset + values.numel()]
    copy.copy_(values)
    return copy


def assert_around_is_untouched(copy: torch.Tensor) -> None:
    whole = torch.as_strided(copy, (copy.numel() + 2 * MARGIN,), (1,), storage_offset=0)
    begin = copy.storage_offset()
    assert (whole[:begin] == 77).all(), "written before the begin"
    assert (whole[begin + copy.numel() :] == 77).all(), "written behind the end"


def sum_in_order(terms: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    if scale != 1:
        total = total * torch.tensor(scale, dtype=wide)
    return total.to(dtype)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN is NaN: which one, devices do not agree on."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.is_floating_point():
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())
        found, expected = found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert torch.equal(found, expected)


def kernel_name(dtype: torch.dtype, count: int) -> str:
    return f"reduce_add_{SUFFIXES[dtype]}_{2 if count <= 2 else 4 if count <= 4 else 8}"


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.Tensor, float, HostBackend]:
    dtype = draw(st.sampled_from(FLOATS + INTEGERS))
    count = draw(st.integers(1, 9) | st.sampled_from([16, 17, 64, 65]))
    size = draw(st.sampled_from(SIZES))
    scale = draw(st.sampled_from([1.0, 0.5, 1 / 3, -2.0, 0.0, 1e30, 1 / 7]))
    # Often all alike: else hardly any case takes the way of aligned sources.
    shared = draw(st.none() | st.integers(0, 9))
    place = st.integers(0, 9) if shared is None else st.just(shared)
    torch.manual_seed(draw(st.integers(0, 2**32)))
    terms = [at_offset(values_of(dtype, size), draw(place)) for _ in range(count)]
    out = draw(st.sampled_from([None, *range(min(count, 3))]))
    total = at_offset(torch.zeros(size, dtype=dtype), draw(place)) if out is None else terms[out]
    host = HostBackend(draw(st.sampled_from([0, 1, 5])), draw(st.integers(1, 4)))
    return terms, total, scale if dtype.is_floating_point else 1.0, host


@given(cases())
@settings(max_examples=250, deadline=None)
def test_kernel_and_reference_give_the_sum_in_order(
    case: tuple[list[torch.Tensor], torch.Tensor, float, HostBackend],
) -> None:
    terms, out, scale, host = case
    expected = sum_in_order(terms, scale)
    inputs = [term.clone() for term in terms]
    reference.reduce_add(inputs, scale, plain := torch.empty_like(out))
    assert_same_bits(plain, expected)
    with backend.registered([host]):
        assert kernels.reduce_add(terms, scale, out) is out
    assert_same_bits(out, expected)
    for term, before in zip(terms, inputs, strict=True):
        assert_around_is_untouched(term)
        if term is not out:
            assert_same_bits(term, before)
    assert_around_is_untouched(out)
    served = len(terms) <= 64 and out.numel() > 0
    assert host.launches == [kernel_name(out.dtype, len(terms))] * served


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_every_alignment(dtype: torch.dtype, count: int) -> None:
    pack = 16 // dtype.itemsize
    host = HostBackend()
    for place in range(pack):
        for other in range(pack):
            values = [values_of(dtype, 300 + place) for _ in range(count)]
            terms = [at_offset(term, other) for term in values]
            # The last one lies differently: all sources count, not the first alone.
            terms[-1] = at_offset(values[-1], (other + count - 1) % pack)
            out = at_offset(torch.zeros_like(values[0]), place)
            with backend.registered([host]):
                kernels.reduce_add(terms, out=out)
            assert_same_bits(out, sum_in_order(values))
            assert_around_is_untouched(out)
    assert host.launches == [kernel_name(dtype, count)] * pack**2


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_terms_are_added_in_their_order_and_rounded_once(how: str) -> None:
    with backend.registered([HostBackend()] if how == "kernel" else []):
        big = [1e8, 1.0, -1e8, 1.0, 0.0, 0.0, 0.0, 0.0, 1e8, 1.0, -1e8, 1.0]
        total = kernels.reduce_add([torch.full((40,), x) for x in big])
        assert total.tolist() == [1.0] * 40
        # In half precision each sum on the way would be 2048.
        halves = [torch.full((40,), x, dtype=torch.float16) for x in (2048.0, 1.0, 1.0)]
        assert kernels.reduce_add(halves).tolist() == [2050.0] * 40
        # The sum is infinite as a half, its quarter is not; and it is scaled last.
        largest = [torch.full((40,), 65504.0, dtype=torch.float16)] * 4
        assert kernels.reduce_add(largest, 0.25).tolist() == [65504.0] * 40
        zeros = [torch.full((40,), -0.0)] * 3
        assert kernels.reduce_add(zeros).signbit().all()
        wrapped = [torch.full((40,), 2**31 - 1, dtype=torch.int32)] * 3
        assert kernels.reduce_add(wrapped).tolist() == [2**31 - 3] * 40


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("size", [0, 1, 5, 777, 6151])
def test_statistics_are_those_of_the_sum(dtype: torch.dtype, special: bool, size: int) -> None:
    inputs = [torch.randn(size).to(dtype) * 3 for _ in range(3)]
    inputs = [values_of(dtype, size) for _ in range(3)] if special else inputs
    for offset in (0, 1):
        terms = [at_offset(term, offset) for term in inputs]
        found = []
        for host in [None, *(HostBackend(schedule) for schedule in (0, 0, 1, 5))]:
            statistics = torch.full((2,), -5.0, dtype=torch.float64)
            out = torch.empty(size, dtype=dtype)
            with backend.registered([] if host is None else [host]):
                kernels.reduce_add(terms, 0.3, out, statistics=statistics)
            assert_same_bits(out, sum_in_order(terms, 0.3))
            found.append(statistics)
            if host is not None:
                pass_over_sum = [f"{kernel_name(dtype, 3)}_statistics"] if size else []
                assert host.launches == [*pass_over_sum, "finish_statistics"]
        numbers = out.double()
        squares = math.fsum(numbers.square().tolist()) if numbers.isfinite().all() else math.nan
        for squared, not_finite in (statistics.tolist() for statistics in found):
            assert not_finite == (~numbers.isfinite()).sum()
            if math.isnan(squares):
                assert not math.isfinite(squared)
            else:
                assert math.isclose(squared, squares, rel_tol=1e-12)
        assert len({tuple(statistics.view(torch.int64).tolist()) for statistics in found[1:]}) == 1


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_statistics_of_any_number_of_blocks(blocks: int) -> None:
    values = torch.arange(1.0, 9001.0, dtype=torch.float64)
    values[[0, 4500, 8999]] = torch.tensor([math.inf, math.nan, -math.inf], dtype=torch.float64)
    squares = sum(n * n for n in range(2, 9000) if n != 4501)
    for place in (0, 1):
        statistics = torch.zeros(2, dtype=torch.float64)
        with backend.registered([HostBackend(blocks=blocks)]):
            kernels.reduce_add([at_offset(values, place)], statistics=statistics)
            assert statistics[1] == 3
            finite = at_offset(values.nan_to_num(0.0, 0.0, 0.0), place)
            kernels.reduce_add([finite], statistics=statistics)
        assert statistics.tolist() == [squares, 0.0]


@pytest.mark.parametrize("how", ["kernel", "reference"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_see_what_is_stored(how: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    statistics = torch.zeros(2, dtype=torch.float64)
    with backend.registered([HostBackend()] if how == "kernel" else []):
        total = kernels.reduce_add([torch.full((9,), largest, dtype=dtype)] * 2, out=None)
        assert total.isinf().all()
        kernels.reduce_add([torch.full((9,), largest, dtype=dtype)] * 2, statistics=statistics)
        assert statistics.tolist() == [math.inf, 9.0]
        # Rounded to a half or a bfloat before it is squared.
        kernels.reduce_add(
            [torch.full((9,), 1 + 2.0**-12, dtype=torch.float32).to(dtype)], statistics=statistics
        )
    exact = torch.tensor(1 + 2.0**-12).to(dtype).double() ** 2
    assert statistics.tolist() == [9 * exact, 0.0]
