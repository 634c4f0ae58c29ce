"""When a plan of copies is used again, and when not; and what is refused."""

from __future__ import annotations

import concurrent.futures
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dataparallel.kernels import BucketLayout, backend, flatten, flatten_plans, unflatten
from tests.kernels.host_backend import HostBackend


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each table was made for."""
    made: list[int] = []
    make = flatten_plans._launches

    def noting(copies: Sequence[Any], *args: Any) -> Any:
        made.append(len(copies))
        return make(copies, *args)

    monkeypatch.setattr(flatten_plans, "_launches", noting)
    flatten_plans._plans.clear()
    return made


def parts() -> list[torch.Tensor]:
    return [torch.randn(3, 4), torch.randn(5), torch.randn(2, 3)]


def assert_copied(tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    bucket = torch.full((23,), 9.0)
    flatten(tensors, bucket, scale)
    assert torch.equal(bucket, torch.cat([t.reshape(-1).float() for t in tensors]) * scale)


def test_the_second_call_uploads_nothing(host_kernels: HostBackend, uploads: list[int]) -> None:
    for scale in (1.0, 0.5, 1.0):
        # New addresses each time.
        assert_copied(parts(), scale)
    assert uploads == [3]
    assert host_kernels.launches == ["flatten_bits_4", "flatten_f32", "flatten_bits_4"]
    bucket = torch.randn(23)
    targets = parts()
    unflatten(bucket, targets)
    assert torch.equal(torch.cat([t.reshape(-1) for t in targets]), bucket)
    assert uploads == [3], "the plan is the same in both directions"


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: [tensors[0].t().contiguous().t(), *tensors[1:]],
        lambda tensors: [tensors[0].bfloat16(), *tensors[1:]],
        lambda tensors: [tensors[0].t(), *tensors[1:]],
        lambda tensors: [tensors[1], tensors[0], tensors[2]],
        lambda tensors: [tensors[0], tensors[1].repeat_interleave(2)[::2], tensors[2]],
        lambda tensors: [tensors[0], tensors[1][:1].expand(5), tensors[2]],
    ],
)
def test_a_changed_tensor_has_another_plan(
    host_kernels: HostBackend,
    uploads: list[int],
    change: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> None:
    for _ in range(2):
        assert_copied(parts())
        assert_copied(change(parts()))
    assert uploads == [3, 3]
    assert len(host_kernels.launches) == 4


def test_missing_tensors_need_no_plan_of_their_own(
    host_kernels: HostBackend, uploads: list[int]
) -> None:
    bucket = torch.zeros(23)
    views = [bucket[:12].view(4, 3).t(), bucket[12:17], bucket[17:].view(2, 3)]
    layout = BucketLayout(bucket, views)
    for missing in ({0}, set(), {1, 2}, {0, 1, 2}, {1}):
        tensors = [None if i in missing else torch.randn_like(view) for i, view in enumerate(views)]
        flatten(tensors, bucket, views=layout)
        for view, tensor in zip(views, tensors, strict=True):
            assert torch.equal(view, torch.zeros_like(view) if tensor is None else tensor)
    assert uploads == [3]
    # Where it lies otherwise than was thought.
    flatten([torch.ones(3, 4), None, None], bucket, views=layout)
    assert bucket.tolist() == [1] * 12 + [0] * 11
    assert uploads == [3, 3]


def test_a_layout_serves_other_buckets(host_kernels: HostBackend, uploads: list[int]) -> None:
    first = torch.zeros(13)[1:]
    layout = BucketLayout(first, [first[:6].view(3, 2).t(), first[7:]])
    tensors = [torch.randn(2, 3), torch.randn(5)]
    other = torch.zeros(15)[3:]
    flatten(tensors, other, views=layout)
    assert not first.any()
    for view, tensor in zip(layout.views_of(other), tensors, strict=True):
        assert torch.equal(view, tensor)
    with backend.registered([]):
        flatten(tensors, other, 2.0, views=layout)
    assert torch.equal(layout.views_of(other)[0], 2 * tensors[0])
    assert torch.equal(other[7:], 2 * tensors[1])
    assert layout.views_of(other.double())[1].dtype == torch.float64
    again = BucketLayout(other, layout.views_of(other))
    flatten(tensors, other, views=again)
    assert uploads == [2], "layouts that are equal have the same plans"


def test_plans_are_limited(
    host_kernels: HostBackend, uploads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flatten_plans, "_MOST_PLANS", 7)
    for size in range(1, 30):
        flatten([torch.ones(size)], torch.zeros(size))
        assert sum(map(len, flatten_plans._plans.values())) <= 7
    for step in range(1, 30):
        bucket = torch.zeros(3)
        flatten([torch.arange(99.0)[: 3 * step : step]], bucket)
        assert bucket.tolist() == [0, step, 2 * step]
        assert sum(map(len, flatten_plans._plans.values())) <= 7


def test_many_threads(host_kernels: HostBackend) -> None:
    def one(i: int) -> None:
        for size in range(1, 20):
            bucket = torch.zeros(3 * size)
            flatten([torch.full((size,), float(i)), torch.ones(2, size).t()], bucket)
            assert bucket.tolist() == [i] * size + [1] * 2 * size

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(8), timeout=100))


@pytest.mark.parametrize("by_kernel", [False, True])
def test_what_is_not_plain_memory(by_kernel: bool) -> None:
    with backend.registered([HostBackend()] if by_kernel else []):
        complex_one = torch.randn(4, dtype=torch.complex64)
        negative = complex_one.conj().imag
        assert negative.is_neg()
        bucket = torch.zeros(4)
        assert torch.equal(flatten([negative], bucket), -complex_one.imag)
        pair = torch.zeros(4, dtype=torch.complex64)
        assert torch.equal(flatten([complex_one.conj()], pair), complex_one.conj().resolve_conj())
        assert torch.equal(flatten([complex_one], pair, 0.5), complex_one * 0.5)
        leaf = torch.nn.Parameter(torch.randn(4))
        assert torch.equal(flatten([leaf], bucket), leaf)
        assert not bucket.requires_grad
        unflatten(torch.ones(4), [leaf])
        assert leaf.tolist() == [1] * 4
        sparse = torch.tensor([0.0, 3.0, 0.0, 5.0]).to_sparse()
        with pytest.raises((RuntimeError, NotImplementedError), match=r"[Ss]parse"):
            unflatten(bucket, [sparse])
        assert flatten([torch.arange(4)], bucket).tolist() == [0, 1, 2, 3]
        assert (
            flatten([torch.ones(4).double()], bucket, 1 / 3).tolist()
            == [torch.tensor(1 / 3).item()] * 4
        )


def _overlapping(bucket: torch.Tensor) -> None:
    BucketLayout(bucket, [bucket[:4], bucket[3:]])


BAD: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda b: flatten([b[:5]], b.view(2, 3)), r"one dimension.*\[2, 3\].*view\(-1\)"),
    (lambda b: flatten([b[:3]], b[::2]), "strides .2."),
    (lambda b: flatten([torch.ones(5)], b), "tensors have 5 elements, but the bucket has 6"),
    (lambda b: unflatten(b, [torch.ones(7)]), "tensors have 7 elements, but the bucket has 6"),
    (lambda b: flatten([None, torch.ones(6)], b), "is None.*give views"),
    (lambda b: unflatten(b, [None, torch.ones(6)]), "is None.*give views"),
    (lambda b: flatten([torch.ones(6)], b, views=[b[:3], b[3:]]), "1 tensors, but 2 views"),
    (
        lambda b: flatten([torch.ones(3), torch.ones(3, 1)], b, views=[b[:3], b[3:]]),
        r"tensor 1 is \[3, 1\], but its view of the bucket is \[3\]",
    ),
    (lambda b: flatten([None], b, views=[torch.ones(6)]), "view 0 .* is not a part of the bucket"),
    (lambda b: flatten([None], b[:3], views=[b[2:5]]), "view 0 .* is not a part of the bucket"),
    (lambda b: flatten([None], b, views=[b.view(torch.int32)]), "view 0 .* not a part"),
    (lambda b: flatten([None], b, views=[b[::2]]), "view 0 .* leave gaps or overlap"),
    (lambda b: flatten([None], b, views=[b[:1].expand(3)]), "view 0 .* leave gaps or overlap"),
    (_overlapping, "views 0 and 1 overlap.*ends at element 4.*begins at 3"),
    (lambda b: flatten([b], torch.ones(7), views=BucketLayout(b, [b])), "of 6 elements.* has 7"),
    (lambda b: flatten([b], torch.ones(6, dtype=torch.int32), 0.5), "int32 cannot be scaled"),
    (lambda b: flatten([torch.arange(6)], b, 0.5), "a tensor of torch.int64 cannot be scaled"),
    (lambda b: unflatten(b, [torch.arange(6)], 0.5), "a tensor of torch.int64 cannot be scaled"),
    (lambda b: flatten([torch.ones(6).to(torch.complex64)], b), "complex numbers and real ones"),
    (lambda b: unflatten(b, [torch.ones(1).expand(6)]), "tensor 0 .*strides .0.*share memory"),
]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_is_refused(
    call: Callable[[torch.Tensor], Any], message: str, by_kernel: bool
) -> None:
    bucket = torch.ones(6)
    with backend.registered([HostBackend()] if by_kernel else []):
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                call(bucket)
            assert bucket.tolist() == [1] * 6


def test_no_bucket_is_kept_alive(host_kernels: HostBackend, uploads: list[int]) -> None:
    bucket = torch.zeros(6)
    layout = BucketLayout(bucket, [bucket[:4].view(2, 2).t(), bucket[4:]])
    flatten([torch.ones(2, 2), torch.ones(2)], bucket, views=layout)
    gone: list[weakref.ref[Any]] = [weakref.ref(bucket), weakref.ref(layout)]
    del bucket, layout
    gc.collect()
    assert uploads == [2]
    assert [reference() for reference in gone] == [None, None]


def test_what_is_written_has_a_new_version(host_kernels: HostBackend) -> None:
    bucket, tensors = torch.zeros(23), parts()
    flatten(tensors, bucket)
    assert bucket._version == 1
    before = [tensor._version for tensor in tensors]
    unflatten(bucket, tensors)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]
    assert len(host_kernels.launches) == 2


@pytest.mark.parametrize("askew", ["tensor", "tensor of several dtypes", "bucket"])
def test_elements_between_their_places_are_not_for_a_kernel(
    host_kernels: HostBackend, askew: str
) -> None:
    memory = bytearray(41)
    wrong = torch.frombuffer(memory, dtype=torch.float32, count=10, offset=1)
    assert wrong.data_ptr() % 4
    if askew == "bucket":
        flatten([torch.arange(10.0)], wrong)
        assert wrong.tolist() == list(range(10))
    else:
        wrong.copy_(torch.arange(10.0))
        other = torch.ones(2, dtype=torch.bfloat16 if "several" in askew else torch.float32)
        bucket = flatten([wrong, other], torch.zeros(12))
        assert bucket.tolist() == [*range(10), 1, 1]
    assert host_kernels.launches == []


def test_a_part_of_the_bucket_is_refused(host_kernels: HostBackend) -> None:
    bucket = torch.arange(12.0)
    with pytest.raises(ValueError, match=r"tensor 0 .* within the memory of the bucket"):
        flatten([bucket.view(3, 4).t()], bucket)
    with pytest.raises(ValueError, match=r"tensor 1 .* 48 bytes.* give a copy"):
        unflatten(bucket, [torch.empty(2), bucket[2:]])
    assert bucket.tolist() == list(range(12))
    assert host_kernels.launches == []
