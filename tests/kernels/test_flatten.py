"""Many tensors to one bucket and back: reference and kernel against a loop, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.kernels import BucketLayout, backend, flatten, flatten_plans, unflatten
from dataparallel.kernels.copy_plans import Way
from tests.kernels.flatten_cases import (
    ALL_FLOATS,
    FLOATS,
    Item,
    bucket_of,
    converted,
    in_each_way,
    items,
    tensor_of,
    views_of,
)
from tests.kernels.host_backend import HostBackend
from tests.kernels.test_reduce_add import (
    MARGIN,
    assert_around_is_untouched,
    assert_same_bits,
)

SCALES = st.sampled_from([1.0, 1 / 3, -2.0, 0.0, 1e-3])


def assert_rest_is_untouched(tensor: torch.Tensor, value: float) -> None:
    """All memory of a tensor but its elements."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    rest = torch.ones(len(whole), dtype=torch.bool)
    rest.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    assert (whole[rest] == value).all()


@settings(deadline=None, max_examples=60)
@given(
    chosen=st.sampled_from(ALL_FLOATS).flatmap(
        lambda dtype: st.lists(items([dtype, *ALL_FLOATS]), min_size=1, max_size=6)
    ),
    dtype=st.sampled_from(ALL_FLOATS),
    scale=SCALES,
    offset=st.integers(0, 9),
    schedule=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_in_turn(
    chosen: list[Item], dtype: torch.dtype, scale: float, offset: int, schedule: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tensors = [tensor_of(item) for item in chosen]
    parts = [converted(tensor, dtype, scale).reshape(-1) for tensor in tensors]
    expected = torch.cat(parts)
    for backends in in_each_way(schedule):
        bucket = bucket_of(len(expected), dtype, offset)
        targets = [tensor_of(item, writable=True).fill_(5) for item in chosen]
        with backend.registered(backends):
            assert flatten(tensors, bucket, scale) is bucket
            unflatten(bucket, targets, scale)
        assert_same_bits(bucket, expected)
        assert_around_is_untouched(bucket)
        for part, target in zip(parts, targets, strict=True):
            assert_same_bits(target, converted(part.view(target.shape), target.dtype, scale))
            assert_rest_is_untouched(target, 77)


@settings(deadline=None, max_examples=60)
@given(
    chosen=st.lists(items(FLOATS, missing=True), min_size=1, max_size=6),
    dtype=st.sampled_from(FLOATS),
    scale=SCALES,
    gap=st.integers(0, 3),
    schedule=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_views(
    chosen: list[Item], dtype: torch.dtype, scale: float, gap: int, schedule: int, seed: int
) -> None:
    torch.manual_seed(seed)
    shapes = [torch.Size(item.shape) for item in chosen]
    size = sum(shape.numel() + gap for shape in shapes) + gap
    for backends in in_each_way(schedule):
        bucket = bucket_of(size, dtype, 1)
        views = views_of(bucket, shapes, gap)
        layout = BucketLayout(bucket, views)
        tensors = [None if item.missing else tensor_of(item) for item in chosen]
        targets = [
            None if item.missing else tensor_of(item, writable=True).fill_(5) for item in chosen
        ]
        with backend.registered(backends):
            flatten(tensors, bucket, scale, views=layout)
            between = bucket.clone()
            for view in views_of(between, shapes, gap):
                view.fill_(55)
            unflatten(bucket, targets, scale, views=views)
        assert (between == 55).all(), "written between the views"
        assert_around_is_untouched(bucket)
        for view, tensor, target in zip(views, tensors, targets, strict=True):
            if tensor is None or target is None:
                assert not view.any()
            else:
                assert_same_bits(view, converted(tensor, dtype, scale))
                assert_same_bits(target, converted(view, target.dtype, scale))
                assert_rest_is_untouched(target, 77)


@settings(deadline=None, max_examples=30)
@given(
    chosen=st.sampled_from(
        [torch.int32, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64]
    ).flatmap(lambda dtype: st.lists(items([dtype]), min_size=1, max_size=4)),
    schedule=st.integers(0, 3),
)
def test_other_types_are_copied(chosen: list[Item], schedule: int) -> None:
    dtype = chosen[0].dtype
    tensors = [_numbers(item) for item in chosen]
    for backends in in_each_way(schedule):
        bucket = torch.zeros(sum(t.numel() for t in tensors), dtype=dtype)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        with backend.registered(backends):
            flatten(tensors, bucket)
            unflatten(bucket, targets)
        assert torch.equal(bucket, torch.cat([tensor.reshape(-1) for tensor in tensors]))
        assert all(map(torch.equal, targets, tensors))


def _numbers(item: Item) -> torch.Tensor:
    """A tensor in the layout of an item, of small numbers that every type has."""
    like = tensor_of(item._replace(dtype=torch.float32), writable=True)
    return torch.empty_like(like, dtype=item.dtype).copy_(torch.randint(0, 2, like.shape))


# Shape, strides of the tensor, strides of its place.
LAID_OUT = {
    Way.RUN: ((70, 130), (1, 70), (1, 70)),
    Way.STRIDED: ((9, 95, 11), (3135, 33, 3), (1, 9, 855)),
    Way.TILED: ((70, 130), (1, 70), (130, 1)),
}


@pytest.mark.parametrize("schedule", range(4))
@pytest.mark.parametrize("way", LAID_OUT)
def test_each_way_is_taken(way: Way, schedule: int) -> None:
    shape, strides, place = LAID_OUT[way]
    size = torch.Size(shape).numel()
    for dtype in FLOATS:
        for other in FLOATS:
            host = HostBackend(schedule)
            source = torch.empty_strided(shape, strides, dtype=other)
            source.copy_(torch.arange(size).remainder(1999).view(shape))
            bucket = torch.zeros(size + 1, dtype=dtype)
            view = bucket.as_strided(shape, place, 1)
            target = torch.empty_strided(shape, strides, dtype=other)
            with backend.registered([host]):
                flatten([source], bucket, 0.5, views=[view])
                unflatten(bucket, [target], 2.0, views=[view])
            assert_same_bits(view, (source.float() * 0.5).to(dtype))
            assert_same_bits(target, (view.float() * 2).to(other))
            assert len(host.launches) == 2
            key = (1, size + 1, dtype, bucket.device)
            plan = flatten_plans._plans[key][0].plan
            assert [copy.way for copy in plan.copies if copy is not None] == [way]


@pytest.mark.parametrize("dtype", ALL_FLOATS)
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


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_value_is_scaled_in_float32_and_then_rounded(
    source: torch.dtype, target: torch.dtype, by_kernel: bool
) -> None:
    values = torch.randn(20000).to(source)
    expected = (values.double() * torch.tensor(1 / 3).double()).float().to(target)
    for size in (5, 20000):
        bucket = torch.zeros(size, dtype=target)
        with backend.registered([HostBackend()] if by_kernel else []):
            flatten([values[:size]], bucket, 1 / 3)
            assert_same_bits(bucket, expected[:size])
            bucket = values[:size].clone()
            out = torch.zeros(size, dtype=target)
            unflatten(bucket, [out], 1 / 3)
        assert_same_bits(out, expected[:size])


@pytest.mark.parametrize("num", [480, 481, 1000])
def test_long_lists(host_kernels: HostBackend, num: int) -> None:
    tensors: list[torch.Tensor | None] = [torch.full((i % 5,), float(i)) for i in range(1, num + 1)]
    expected = torch.cat([tensor for tensor in tensors if tensor is not None])
    bucket = torch.zeros(len(expected))
    views = list(bucket.split([i % 5 for i in range(1, num + 1)]))
    assert torch.equal(flatten(tensors, bucket), expected)
    assert host_kernels.launches == ["flatten_bits_4"] * -(-num // 480)
    targets = [torch.zeros_like(view) for view in views]
    unflatten(bucket, targets, 2.0)
    assert torch.equal(torch.cat(targets), 2 * expected)
    tensors[num - 1] = tensors[3] = None
    flatten(tensors, bucket, views=views)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, torch.zeros_like(view) if tensor is None else tensor)


@pytest.mark.parametrize("way", LAID_OUT)
def test_zeros_for_a_large_tensor_of_any_plan(host_kernels: HostBackend, way: Way) -> None:
    shape, strides, place = LAID_OUT[way]
    size = torch.Size(shape).numel()
    bucket = torch.ones(size + 2)
    views: Sequence[torch.Tensor] = [bucket.as_strided(shape, place, 1)]
    flatten([torch.empty_strided(shape, strides).fill_(3)], bucket, views=views)
    assert bucket.tolist() == [1, *[3] * size, 1]
    flatten([None], bucket, views=views)
    assert bucket.tolist() == [1, *[0] * size, 1]
    assert host_kernels.launches == ["flatten_bits_4"] * 2


def test_nothing_to_copy(host_kernels: HostBackend) -> None:
    flatten([], torch.empty(0))
    unflatten(torch.empty(0), [])
    flatten([torch.empty(0, 3)], torch.empty(0), 2.0)
    bucket = torch.ones(MARGIN)
    unflatten(bucket, [None], views=[bucket])
    flatten([None], bucket, views=[bucket])
    assert not bucket.any()
