"""What may be added, in which layouts, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel import kernels
from dataparallel.kernels import backend
from tests.kernels.host_backend import HostBackend
from tests.kernels.test_reduce_add import assert_same_bits, kernel_name, sum_in_order

DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "of no dimension": lambda x: x[1, 1, 1],
    "empty": lambda x: x[:, :0],
}
NOT_DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every other": lambda x: x[::2],
    "a column": lambda x: x[:, :, 1],
    "expanded": lambda x: x[:1].expand(4, 5, 6),
}


def _terms(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(4, 5, 6).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("layout", DENSE)
def test_dense_tensors_alike_are_added_by_the_kernel(
    layout: str, host_kernels: HostBackend
) -> None:
    terms = [DENSE[layout](term) for term in _terms()]
    total = kernels.reduce_add(terms, 0.5)
    assert_same_bits(total, sum_in_order(terms, 0.5))
    if layout != "empty":
        assert total.stride() == terms[0].stride()
        assert host_kernels.launches == [kernel_name(torch.float32, 3)]
    else:
        assert host_kernels.launches == []


@pytest.mark.parametrize("layout", NOT_DENSE)
def test_other_layouts_are_added_by_the_reference(layout: str, host_kernels: HostBackend) -> None:
    terms = [NOT_DENSE[layout](term) for term in _terms()]
    assert_same_bits(kernels.reduce_add(terms, 0.5), sum_in_order(terms, 0.5))
    out = NOT_DENSE[layout](torch.zeros(4, 5, 6)) if layout != "expanded" else torch.zeros(4, 5, 6)
    assert kernels.reduce_add(terms, 0.5, out) is out
    assert_same_bits(out, sum_in_order(terms, 0.5))
    assert host_kernels.launches == []


def test_inputs_of_different_strides_are_added_by_the_reference(host_kernels: HostBackend) -> None:
    first, second = torch.randn(6, 6), torch.randn(6, 6).t()
    for terms in ([first, second], [second, first], [first, first, second]):
        assert_same_bits(kernels.reduce_add(terms), sum_in_order(terms))
    out = torch.zeros(6, 6).t()
    kernels.reduce_add([first, first], out=out)
    assert_same_bits(out, sum_in_order([first, first]))
    assert host_kernels.launches == []


def test_the_stride_of_one_element_says_nothing(host_kernels: HostBackend) -> None:
    first = torch.randn(7, 1, 2)
    second = torch.randn(14).as_strided((7, 1, 2), (2, 999, 1))
    total = kernels.reduce_add([first, second])
    assert_same_bits(total, sum_in_order([first, second]))
    assert kernels.reduce_add([second, first], out=second) is second
    assert_same_bits(second, total)
    assert host_kernels.launches == [kernel_name(torch.float32, 2)] * 2


def test_out_may_be_any_input(host_kernels: HostBackend) -> None:
    for count in (2, 3, 9):
        for place in range(count):
            terms = _terms(count)
            expected = sum_in_order(terms)
            assert kernels.reduce_add(terms, out=terms[place]) is terms[place]
            assert_same_bits(terms[place], expected)
    assert len(host_kernels.launches) == 2 + 3 + 9


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_an_input_may_be_given_twice(how: str, host_kernels: HostBackend) -> None:
    first, second = (term if how == "kernel" else term[::2] for term in _terms(2))
    for terms in ([first, first], [first, second, first], [second, second, second]):
        expected = sum_in_order(terms)
        out = terms[0].clone()
        same = [out if term is terms[0] else term for term in terms]
        assert_same_bits(kernels.reduce_add(same, out=out), expected)


def test_every_number_of_inputs_has_its_kernel(host_kernels: HostBackend) -> None:
    for count in [*range(1, 10), 64, 65]:
        terms = _terms(count, torch.float64)
        assert_same_bits(kernels.reduce_add(terms), sum_in_order(terms))
    groups = [2, 2, 4, 4, 8, 8, 8, 8, 8, 8]
    assert host_kernels.launches == [f"reduce_add_f64_{group}" for group in groups]


class _Grids(HostBackend):
    """Keeps how many blocks each launch has."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks)
        self.grids: list[int] = []

    def launch(
        self,
        device: torch.device,
        source: str,
        kernel: str,
        blocks: int,
        parameters: ctypes.Structure,
    ) -> None:
        self.grids.append(blocks)
        super().launch(device, source, kernel, blocks, parameters)


@pytest.mark.parametrize("most", [1, 3])
def test_a_launch_has_as_many_blocks_as_it_can_use(most: int) -> None:
    host = _Grids(most)
    with backend.registered([host]):
        # Of 256 threads with 4 elements each.
        for size in (1, 1024, 1025, 10_000):
            values = torch.randn(size)
            assert_same_bits(kernels.reduce_add([values]), values)
        statistics = torch.zeros(2, dtype=torch.float64)
        kernels.reduce_add([values], statistics=statistics)
    assert host.grids == [1, 1, min(2, most), most, most, 1]


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.complex64, torch.complex128, torch.bool]
)
def test_other_dtypes_are_added_by_the_reference(
    dtype: torch.dtype, host_kernels: HostBackend
) -> None:
    terms = [(torch.randn(9) * 300).to(torch.int64).to(dtype) for _ in range(5)]
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    assert torch.equal(kernels.reduce_add(terms), expected)
    assert host_kernels.launches == []


def test_statistics_of_complex_sums(host_kernels: HostBackend) -> None:
    terms = [torch.tensor([3 + 4j, complex("nan"), complex(0, float("inf"))])]
    statistics = torch.zeros(2, dtype=torch.float64)
    kernels.reduce_add(terms, statistics=statistics)
    # Real and imaginary parts are numbers of their own.
    assert statistics[1] == 2
    kernels.reduce_add([terms[0][:1]] * 2, 0.5, statistics=statistics)
    assert statistics.tolist() == [25.0, 0.0]


def test_lazy_conjugates_and_negatives(host_kernels: HostBackend) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(kernels.reduce_add([values.conj()] * 3), 3 * values.conj())
    negative = values.conj().imag
    assert negative.is_neg()
    assert kernels.reduce_add([negative, negative, negative]).tolist() == [-6.0, 3.0]
    assert host_kernels.launches == []


@pytest.mark.parametrize("strided", [False, True])
def test_nothing_is_recorded_for_autograd(strided: bool, host_kernels: HostBackend) -> None:
    terms = [term.requires_grad_() for term in _terms()]
    views = [term[::2] for term in terms] if strided else terms
    total = kernels.reduce_add(views)
    assert not total.requires_grad
    assert_same_bits(total, sum_in_order([view.detach() for view in views]))
    parameter = torch.nn.Parameter(torch.zeros_like(total))
    kernels.reduce_add(views, out=parameter)
    assert parameter.requires_grad and parameter.is_leaf
    assert len(host_kernels.launches) == (0 if strided else 2)


@pytest.mark.parametrize("strided", [False, True])
def test_autograd_notices_that_a_saved_value_was_overwritten(
    strided: bool, host_kernels: HostBackend
) -> None:
    x = torch.ones(6, requires_grad=True)
    saved = torch.ones(6)
    loss = (x * saved).sum()
    terms = [torch.ones(6), torch.ones(6)]
    kernels.reduce_add(terms if not strided else [torch.ones(12)[::2]] * 2, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_inference_mode(host_kernels: HostBackend) -> None:
    ordinary = _terms()
    with torch.inference_mode():
        terms = _terms()
        statistics = torch.zeros(2, dtype=torch.float64)
        total = kernels.reduce_add(terms, statistics=statistics)
        kernels.reduce_add(ordinary, out=ordinary[0])
    assert total.is_inference()
    assert_same_bits(total, sum_in_order(terms))
    assert_same_bits(kernels.reduce_add(terms), total)
    assert len(host_kernels.launches) == 4


ONES, TWOS = torch.ones(4), torch.full((4,), 2.0)
ROOM = torch.zeros(9)
COUNTS = torch.ones(4, dtype=torch.int32)
NUMBERS = torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("inputs", "others", "message"),
    [
        pytest.param([], {}, "needs at least one tensor, got none", id="none"),
        pytest.param(
            [ONES, torch.ones(5)],
            {},
            r"input 0 is torch\.float32 \[4\] and input 1 is torch\.float32 \[5\]",
            id="shapes",
        ),
        pytest.param(
            [ONES, ONES, COUNTS], {}, r"input 0 .* input 2 is torch\.int32 \[4\]", id="dtypes"
        ),
        pytest.param(
            [ONES, ONES.to_sparse()],
            {},
            r"must be strided, but input 1 is torch\.sparse_coo; .*to_dense",
            id="sparse",
        ),
        pytest.param(
            [COUNTS, COUNTS],
            {"scale": 0.5},
            r"torch\.int32 cannot be scaled by 0\.5, .*convert the inputs",
            id="scaled integers",
        ),
        pytest.param(
            [ONES, TWOS],
            {"out": torch.zeros(5)},
            r"out is torch\.float32 \[5\], but the inputs are torch\.float32 \[4\]",
            id="shape of out",
        ),
        pytest.param(
            [ONES, TWOS],
            {"out": torch.zeros(4).double()},
            r"out is torch\.float64 \[4\], but",
            id="dtype of out",
        ),
        pytest.param(
            [ONES, ROOM[:4]],
            {"out": ROOM[3:7]},
            "out overlaps input 1 .*other memory",
            id="overlap",
        ),
        pytest.param(
            [ROOM[1:5], ONES], {"out": ROOM[:4]}, "out overlaps input 0", id="overlap before"
        ),
        pytest.param(
            [ROOM.view(3, 3), torch.ones(3, 3)],
            {"out": ROOM.view(3, 3).t()},
            "out overlaps input 0",
            id="transposed overlap",
        ),
        pytest.param(
            [COUNTS, COUNTS],
            {"statistics": NUMBERS},
            r"statistics are of floating-point sums, but the inputs are torch\.int32",
            id="statistics of integers",
        ),
        pytest.param(
            [ONES],
            {"statistics": NUMBERS.float()},
            r"must be contiguous float64 \[2\] on cpu, but is torch\.float32 \[2\] on cpu",
            id="dtype of statistics",
        ),
        pytest.param(
            [ONES],
            {"statistics": torch.zeros(3, dtype=torch.float64)},
            r"but is torch\.float64 \[3\]",
            id="shape of statistics",
        ),
        pytest.param(
            [ONES],
            {"statistics": torch.zeros(4, dtype=torch.float64)[::2]},
            "must be contiguous",
            id="strides of statistics",
        ),
        pytest.param(
            [ONES],
            {"statistics": NUMBERS.to("meta")},
            r"on cpu, but is torch\.float64 \[2\] on meta",
            id="device of statistics",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    inputs: list[torch.Tensor],
    others: dict[str, Any],
    message: str,
    host_kernels: HostBackend,
) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.reduce_add(inputs, **others)
    assert host_kernels.launches == []
    assert not ROOM.any() and not NUMBERS.any()
    assert kernels.reduce_add([ONES, TWOS]).tolist() == [3.0] * 4


def test_neighbors_do_not_overlap(host_kernels: HostBackend) -> None:
    room = torch.arange(12.0)
    out = kernels.reduce_add([room[:4], room[8:]], out=room[4:8])
    assert out.tolist() == [8.0, 10.0, 12.0, 14.0]
    assert room[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    empty = room[:0]
    assert kernels.reduce_add([empty, empty], out=room[3:3]).shape == (0,)
