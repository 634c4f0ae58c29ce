"""The sum of several tensors: kernel and reference against plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel import kernels
from dataparallel.kernels import backend, reference
from dataparallel.kernels.memory import SUFFIXES
from tests.kernels.host_backend import HostBackend
from tests.kernels.values import (
    FLOATS,
    assert_rest_is_untouched,
    assert_same_bits,
    at_offset,
    values_of,
)

DTYPES = [*FLOATS, torch.int32, torch.int64]
# Around the borders of packs of 2, 4 and 8 elements, of a block's packs, and of three blocks'.
SIZES = sorted(
    {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33}
    | {256 * pack + more for pack in (2, 4, 8) for more in (-1, 0, 1)}
    | {3 * 256 * pack + more for pack in (2, 4, 8) for more in (-1, 1, pack + 1)}
)


def sum_in_order(terms: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    if scale != 1:
        total = total * torch.tensor(scale, dtype=wide)
    return total.to(dtype)


def kernel_name(dtype: torch.dtype, count: int) -> str:
    return f"reduce_add_{SUFFIXES[dtype]}_{2 if count <= 2 else 4 if count <= 4 else 8}"


Case = tuple[list[torch.Tensor], torch.Tensor, float, HostBackend]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
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
    if out is not None and draw(st.booleans()):
        # One tensor twice.
        terms[-1] = terms[0]
        total = terms[min(out, count - 1)]
    host = HostBackend(draw(st.sampled_from([0, 1, 5])), draw(st.integers(1, 4)))
    return terms, total, scale if dtype.is_floating_point else 1.0, host


@given(cases())
@settings(max_examples=350, deadline=None)
def test_kernel_and_reference_give_the_sum_in_order(case: Case) -> None:
    terms, out, scale, host = case
    expected = sum_in_order(terms, scale)
    inputs = [term.clone() for term in terms]
    reference.reduce_add(inputs, scale, plain := torch.empty_like(out))
    assert_same_bits(plain, expected)
    with backend.registered([host]):
        assert kernels.reduce_add(terms, scale, out) is out
    assert_same_bits(out, expected)
    for term, before in zip(terms, inputs, strict=True):
        assert_rest_is_untouched(term)
        if term is not out:
            assert_same_bits(term, before)
    assert_rest_is_untouched(out)
    served = len(terms) <= 64 and out.numel() > 0
    assert host.launches == [kernel_name(out.dtype, len(terms))] * served


def test_long_sums_of_small_floats_are_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_CHUNK", 7)
    terms = [values_of(torch.bfloat16, 30).view(5, 6).t() for _ in range(3)]
    assert_same_bits(kernels.reduce_add(terms, 0.3), sum_in_order(terms, 0.3))


# --- layouts and types -----------------------------------------------------------------------

Lay = Callable[[torch.Tensor], torch.Tensor]
#: And whether the kernel serves it.
LAYOUTS: dict[str, tuple[Lay, bool]] = {
    "contiguous": (lambda x: x, True),
    "permuted": (lambda x: x.permute(2, 0, 1), True),
    "of no dimension": (lambda x: x[1, 1, 1], True),
    "every other": (lambda x: x[::2], False),
    "a column": (lambda x: x[:, :, 1], False),
    "expanded": (lambda x: x[:1].expand(4, 5, 6), False),
    "complex": (lambda x: x.to(torch.complex64), False),
    "conjugate": (lambda x: x.to(torch.complex64).conj(), False),
    "negative": (lambda x: torch.complex(x, x).conj().imag, False),
    "bytes": (lambda x: (x * 100).to(torch.int64).to(torch.uint8), False),
    "truth values": (lambda x: x > 0, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(layout: str, host_kernels: HostBackend) -> None:
    lay, is_served = LAYOUTS[layout]
    terms = [lay(torch.randn(4, 5, 6)) for _ in range(3)]
    expected = terms[0] + terms[1] + terms[2]
    total = kernels.reduce_add(terms)
    assert_same_bits(total, expected)
    if is_served:
        assert total.stride() == terms[0].stride()
    out = torch.zeros_like(expected)
    assert kernels.reduce_add(terms, out=out) is out
    assert_same_bits(out, expected)
    assert host_kernels.launches == [kernel_name(torch.float32, 3)] * 2 * is_served


def test_inputs_of_different_strides(host_kernels: HostBackend) -> None:
    first, second = torch.randn(6, 6), torch.randn(6, 6).t()
    for terms in ([first, second], [second, first], [first, first, second]):
        assert_same_bits(kernels.reduce_add(terms), sum_in_order(terms))
    askew = torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1)
    assert kernels.reduce_add([askew, torch.ones(2)]).tolist() == [1.0, 1.0]
    transformed = torch.func.vmap(lambda x: kernels.reduce_add([x, x, x]))(first)
    assert torch.equal(transformed, first + first + first)
    assert host_kernels.launches == []
    # The stride of one element says nothing.
    first, second = torch.randn(7, 1, 2), torch.randn(14).as_strided((7, 1, 2), (2, 999, 1))
    assert_same_bits(kernels.reduce_add([first, second]), sum_in_order([first, second]))
    assert len(host_kernels.launches) == 1


# --- autograd --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_autograd_sees_what_is_written_and_records_nothing(
    step: int, host_kernels: HostBackend
) -> None:
    terms = [torch.ones(6 * step, requires_grad=True)[::step] for _ in range(2)]
    assert not kernels.reduce_add(terms).requires_grad
    saved = torch.ones(6)
    loss = (terms[0] * saved).sum()
    kernels.reduce_add(terms, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        total = kernels.reduce_add([torch.ones(3 * step)[::step]] * 2)
    assert total.is_inference() and total.tolist() == [2] * 3
    assert len(host_kernels.launches) == (3 if step == 1 else 0)


# --- what is refused -------------------------------------------------------------------------

ONES, TWOS = torch.ones(4), torch.full((4,), 2.0)
ROOM = torch.zeros(9)
COUNTS = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("inputs", "others", "message"),
    [
        ([], {}, "needs at least one tensor, got none"),
        ([ONES, torch.ones(5)], {}, r"input 0 is .*32 \[4\] and input 1 is torch\.float32 \[5\]"),
        ([ONES, ONES.to_sparse()], {}, r"strided, but input 1 is torch\.sparse_coo; .*to_dense"),
        ([COUNTS, COUNTS], {"scale": 0.5}, r"int32 cannot be scaled by 0\.5, .*convert the inputs"),
        ([ONES, TWOS], {"out": torch.zeros(5)}, r"out is .*float32 \[5\], but .*float32 \[4\]"),
        ([ONES, ROOM[:4]], {"out": ROOM[3:7]}, "out overlaps input 1 .*other memory"),
        ([ROOM[1:5], ONES], {"out": ROOM[:4]}, "out overlaps input 0"),
        ([ROOM[::2], ONES[:1].expand(5)], {"out": ROOM[1:6]}, "out overlaps input 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    inputs: list[torch.Tensor], others: dict[str, Any], message: str, host_kernels: HostBackend
) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.reduce_add(inputs, **others)
    assert host_kernels.launches == []
    assert not ROOM.any()
    # Neighbors do not overlap.
    room = torch.arange(12.0)
    out = kernels.reduce_add([room[:4], room[8:]], out=room[4:8])
    assert out.tolist() == [8.0, 10.0, 12.0, 14.0]
    assert kernels.reduce_add([room[:0]] * 2, out=room[3:3]).shape == (0,)
