"""Many tensors to one bucket and back: reference and kernel against a loop, bit for bit."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.kernels import BucketLayout, backend, copy_plans, flatten, unflatten
from tests.kernels.host_backend import HostBackend
from tests.kernels.values import MARGIN, assert_rest_is_untouched, assert_same_bits, values_of

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [torch.int32, torch.int64, torch.int16, torch.uint8]

# All ways of copy_plans.py, and sizes around packs and chunks.
SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (1,), (2,), (3,), (7,), (8,), (9,), (33,), (255,), (1025,), (8191,), (8193,)],
    *[(3, 0), (1, 5), (4, 4), (5, 6, 7), (64, 70), (33, 65), (9, 130), (130, 9), (2, 40, 3, 31)],
    (2, 3, 4, 5),
]


class Item(NamedTuple):
    """One tensor to copy."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    offset: int
    missing: bool


def items(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Item]:
    return st.builds(
        Item,
        st.sampled_from(SHAPES),
        st.sampled_from(["contiguous", "permuted", "sliced", "expanded"]),
        st.sampled_from(dtypes),
        st.integers(0, 9),
        st.booleans(),
    )


def permuted(values: torch.Tensor) -> torch.Tensor:
    """Return the same values with the order of dimensions in memory reversed, or rotated."""
    order = list(range(values.dim()))
    order = order[::-1] if values.dim() % 2 == 0 else [*order[1:], *order[:1]]
    inverse = [order.index(d) for d in range(values.dim())]
    return values.permute(order).contiguous().permute(inverse)


def tensor_of(item: Item, *, writable: bool = False) -> torch.Tensor:
    """Return a tensor with values of all kinds; other elements of its memory are 77."""
    values = values_of(item.dtype, math.prod(item.shape)).view(item.shape)
    layout = item.layout
    if layout == "expanded" and (writable or not item.shape):
        layout = "sliced"
    if layout == "sliced":
        whole = torch.full((*item.shape, 3), 77, dtype=item.dtype)
        whole[..., 1] = values
        return whole[..., 1]
    if layout == "expanded":
        return values[..., :1].expand(values.shape) if values.numel() else values
    laid_out = permuted(values) if layout == "permuted" else values
    memory = torch.full((values.numel() + 2 * MARGIN,), 77, dtype=item.dtype)
    placed = memory[item.offset :].as_strided(item.shape, laid_out.stride(), item.offset)
    return placed.copy_(values)


def views_of(bucket: torch.Tensor, shapes: Sequence[torch.Size], gap: int) -> list[torch.Tensor]:
    """Views that are permuted in turn, with some elements between them that are nobody's."""
    views = []
    offset = gap
    for i, shape in enumerate(shapes):
        empty = torch.empty(shape, device="meta")
        stride = (permuted(empty) if i % 2 else empty).stride()
        views.append(bucket.as_strided(shape, stride, bucket.storage_offset() + offset))
        offset += shape.numel() + gap
    return views


def converted(source: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return the expected values: scaled in the wider type, and rounded once."""
    if scale == 1:
        return source.to(dtype)
    wide = torch.float64 if torch.float64 in (source.dtype, dtype) else torch.float32
    return (source.to(wide) * torch.tensor(scale, dtype=wide)).to(dtype)


# --- values ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=120)
@given(
    bucket=st.sampled_from([*FLOATS, *INTEGERS]).flatmap(
        lambda dtype: st.tuples(
            st.just(dtype),
            st.lists(
                items([dtype, *FLOATS] if dtype in FLOATS else [dtype]), min_size=1, max_size=6
            ),
        )
    ),
    scale=st.sampled_from([1.0, 1 / 3, -2.0, 0.0, 1e-3]),
    gap=st.none() | st.integers(0, 3),
    offset=st.integers(0, 9),
    schedule=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_values_in_the_bucket_are_those_of_the_tensors(
    bucket: tuple[torch.dtype, list[Item]],
    scale: float,
    gap: int | None,
    offset: int,
    schedule: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    dtype, chosen = bucket
    scale = scale if dtype.is_floating_point else 1.0
    shapes = [torch.Size(item.shape) for item in chosen]
    size = sum(shape.numel() + (gap or 0) for shape in shapes) + (gap or 0)
    # In turn, where there are no views, nothing is missing.
    missing = [item.missing and gap is not None for item in chosen]
    for backends in ([], [HostBackend(schedule)]):
        memory = torch.full((size + 2 * MARGIN,), 77, dtype=dtype)
        filled = memory[offset : offset + size].fill_(55)
        if gap is None:
            parts = filled.split([shape.numel() for shape in shapes])
            views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        else:
            views = views_of(filled, shapes, gap)
        tensors, targets = (
            [
                None if gone else tensor_of(item, writable=writable)
                for item, gone in zip(chosen, missing, strict=True)
            ]
            for writable in (False, True)
        )
        with backend.registered(backends):
            layout = None if gap is None else BucketLayout(filled, views)
            assert flatten(tensors, filled, scale, views=layout) is filled
            unflatten(filled, targets, scale, views=None if gap is None else views)
        for view, tensor, target in zip(views, tensors, targets, strict=True):
            if tensor is None or target is None:
                assert not view.any()
            else:
                assert_same_bits(view, converted(tensor, dtype, scale))
                assert_same_bits(target, converted(view, target.dtype, scale))
                assert_rest_is_untouched(target)
            view.fill_(55)
        assert (filled == 55).all(), "written between the views"
        assert_rest_is_untouched(filled)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mixed", [False, True])
def test_bits_are_kept(host_kernels: HostBackend, dtype: torch.dtype, mixed: bool) -> None:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    inf = torch.tensor([torch.inf], dtype=dtype).view(integer)
    # All payloads that differ in the last bits, of signaling ones too, and negative ones.
    nans = torch.cat([inf + 1 + torch.arange(50), -1 - torch.arange(50)]).to(integer)
    tensors = [nans.view(dtype), nans.view(dtype)[1:].clone(), torch.ones(3, dtype=dtype)]
    if mixed:
        tensors.append(torch.ones(1, dtype=torch.float16))
    bucket = torch.zeros(sum(map(len, tensors)), dtype=dtype)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    flatten(tensors, bucket)
    unflatten(bucket, targets)
    assert bucket.view(integer)[:199].tolist() == [*nans.tolist(), *nans[1:].tolist()]
    assert targets[0].view(integer).tolist() == nans.tolist()
    if not mixed:
        bits = f"flatten_bits_{dtype.itemsize}"
        assert host_kernels.launches == [bits, f"un{bits}"]


def test_every_bfloat16_is_widened_and_rounded_as_torch_does(host_kernels: HostBackend) -> None:
    """And float32 around each, and half way to the next."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    places = numbers.float().view(torch.int32)
    near = torch.cat([places, places + 2**15])[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    wide = near.flatten().view(torch.float32)
    for source, dtype in ((numbers, torch.float32), (wide, torch.bfloat16)):
        bucket = flatten([source], torch.zeros(len(source), dtype=dtype))
        assert_same_bits(bucket, source.to(dtype))
    assert len(host_kernels.launches) == 2


@pytest.mark.parametrize("num", [480, 481, 1000])
def test_long_lists(host_kernels: HostBackend, num: int) -> None:
    tensors = [torch.full((i % 5,), float(i)) for i in range(1, num + 1)]
    expected = torch.cat(tensors)
    bucket = torch.zeros(len(expected))
    assert torch.equal(flatten(tensors, bucket), expected)
    assert host_kernels.launches == ["flatten_bits_4"] * -(-num // 480)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    unflatten(bucket, targets, 2.0)
    assert torch.equal(torch.cat(targets), 2 * expected)


def test_nothing_to_copy(either: str) -> None:
    flatten([], torch.empty(0))
    unflatten(torch.empty(0), [])
    flatten([torch.empty(0, 3)], torch.empty(0), 2.0)


# --- plans -----------------------------------------------------------------------------------


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first dimension of each table that was brought to the device."""
    made: list[int] = []

    def noting(table: torch.Tensor, device: torch.device) -> torch.Tensor:
        made.append(len(table))
        return table

    monkeypatch.setattr(copy_plans, "upload", noting)
    return made


def test_a_layout_uploads_each_plan_once(host_kernels: HostBackend, uploads: list[int]) -> None:
    bucket = torch.zeros(23)
    views = [bucket[:12].view(4, 3).t(), bucket[12:17], bucket[17:].view(2, 3)]
    layout = BucketLayout(bucket, views)
    # New addresses each time, and other tensors that are missing: those lie as their places do.
    for missing in ({0}, set(), {1, 2}, {0, 1, 2}):
        tensors = [None if i in missing else torch.randn_like(view) for i, view in enumerate(views)]
        for scale in (1.0, 2.0):
            flatten(tensors, bucket, scale, views=layout)
            for view, tensor in zip(views, tensors, strict=True):
                expected = torch.zeros(view.shape) if tensor is None else tensor * scale
                assert torch.equal(view, expected)
        unflatten(bucket, tensors, views=layout)
    assert uploads == [3]
    assert len(host_kernels.launches) == 12
    for n, dtype in enumerate((torch.float32, torch.bfloat16), start=2):
        for _ in range(2):
            flatten([first := torch.randn(3, 4).to(dtype), None, None], bucket, views=layout)
            assert torch.equal(views[0], first.float())
        assert uploads == [3] * n


def test_a_layout_serves_other_buckets(either: str) -> None:
    first = torch.zeros(13)[1:]
    layout = BucketLayout(first, [first[:6].view(3, 2).t(), first[7:]])
    tensors = [torch.randn(2, 3), torch.randn(5)]

    for other in (torch.zeros(15)[3:], torch.zeros(12).double(), torch.zeros(12)):
        flatten(tensors, other, 2.0, views=layout)
        assert not first.any()
        for view, tensor in zip(layout.views_of(other), tensors, strict=True):
            assert torch.equal(view, 2 * tensor.to(other.dtype))


def test_plans_are_limited_and_die_with_their_layout(
    host_kernels: HostBackend, uploads: list[int]
) -> None:
    bucket = torch.zeros(3)
    layout = BucketLayout(bucket, [bucket])
    for step in range(1, 100):
        flatten([torch.arange(999.0)[: 3 * step : step]], bucket, views=layout)
        assert bucket.tolist() == [0, step, 2 * step]
        assert len(layout._plans) <= 64
    gone: list[weakref.ref[Any]] = [weakref.ref(bucket), weakref.ref(layout)]
    del bucket, layout
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


# --- what is not plain memory, and what is refused -------------------------------------------


def test_what_is_not_plain_memory(either: str) -> None:
    number = torch.randn(4, dtype=torch.complex64)
    askew = torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1)
    leaf = torch.nn.Parameter(torch.randn(4))
    bucket, pair = torch.zeros(4), torch.zeros(4, dtype=torch.complex64)
    assert number.conj().imag.is_neg() and askew.data_ptr() % 4
    cases: list[tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]] = [
        (number.conj().imag, bucket, 1, -number.imag),
        (number.conj(), pair, 1, number.conj().resolve_conj()),
        (number, pair, 0.5, number * 0.5),
        (torch.arange(4), bucket, 0.5, torch.tensor([0, 0.5, 1, 1.5])),
        (torch.ones(4).double(), bucket, 1 / 3, torch.full((4,), 1 / 3)),
        (torch.arange(4.0), askew, 1, torch.arange(4.0)),
        (askew, bucket, 1, torch.arange(4.0)),
        (leaf, bucket, 1, leaf),
    ]
    for tensor, target, scale, expected in cases:
        assert torch.equal(flatten([tensor], target, scale), expected)
    assert not bucket.requires_grad
    before = leaf._version, bucket._version
    unflatten(torch.ones(4), [leaf])
    flatten([leaf], bucket)
    assert leaf.tolist() == [1] * 4
    assert leaf._version > before[0] and bucket._version > before[1]
    with torch.inference_mode():
        inferred = flatten([torch.ones(3)], torch.zeros(3))
    assert inferred.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="outside InferenceMode"):
        flatten([torch.zeros(3)], inferred)


def _overlapping(bucket: torch.Tensor) -> None:
    BucketLayout(bucket, [bucket[:4], bucket[3:]])


BAD: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda b: flatten([b[:5]], b.view(2, 3)), r"one dimension.*\[2, 3\].*view\(-1\)"),
    (lambda b: flatten([b[:3]], b[::2]), "strides .2."),
    (lambda b: unflatten(b, [torch.ones(7)]), "tensors have 7 elements, but the bucket has 6"),
    (lambda b: flatten([None, torch.ones(6)], b), "is None.*give views"),
    (lambda b: flatten([torch.ones(6)], b, views=[b[:3], b[3:]]), "1 tensors, but 2 views"),
    (
        lambda b: flatten([torch.ones(3), torch.ones(3, 1)], b, views=[b[:3], b[3:]]),
        r"tensor 1 is \[3, 1\], but its view of the bucket is \[3\]",
    ),
    (lambda b: flatten([None], b, views=[torch.ones(6)]), "view 0 .* is not a part of the bucket"),
    (lambda b: flatten([None], b[:3], views=[b[2:5]]), "view 0 .* is not a part of the bucket"),
    (lambda b: flatten([None], b, views=[b.view(torch.int32)]), "view 0 .* not a part"),
    (lambda b: flatten([None], b, views=[b[:1].expand(3)]), "view 0 .* leave gaps or overlap"),
    (_overlapping, "views 0 and 1 overlap.*ends at element 4.*begins at 3"),
    (lambda b: flatten([b], torch.ones(7), views=BucketLayout(b, [b])), "of 6 elements.* has 7"),
    (lambda b: flatten([torch.ones(6)], b.int(), 0.5), "can't be cast"),
    (lambda b: flatten([torch.ones(6).to(torch.complex64)], b), "complex numbers and real ones"),
    (lambda b: unflatten(b, [torch.ones(1).expand(6)]), "single memory location"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_tensors_that_do_not_fit_the_bucket_are_refused(
    call: Callable[[torch.Tensor], Any], message: str, either: str
) -> None:
    bucket = torch.ones(6)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call(bucket)
        assert bucket.tolist() == [1] * 6


def test_a_part_of_the_bucket_is_refused(host_kernels: HostBackend) -> None:
    bucket = torch.arange(12.0)
    with pytest.raises(ValueError, match=r"tensor 0 .* within the memory of the bucket"):
        flatten([bucket.view(3, 4).t()], bucket)
    with pytest.raises(ValueError, match=r"tensor 1 .* 48 bytes.* give a copy"):
        unflatten(bucket, [torch.empty(2), bucket[2:]])
    assert bucket.tolist() == list(range(12))
    assert host_kernels.launches == []
