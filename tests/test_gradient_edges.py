"""The autograd edges between the parameters of the replicas and the originals."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import comm, virtual
from dataparallel.comm.local import sums_of
from dataparallel.graph import functions
from dataparallel.graph.functions import connect, plan_buckets

KIB = 256  # float32 elements
MIB = 1024 * KIB
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(params=["cpu", "virtual"])
def places(request: pytest.FixtureRequest) -> list[str]:
    """Where three copies are; the originals are on the first."""
    return ["cpu"] * 3 if request.param == "cpu" else [f"virtual:{i}" for i in range(3)]


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


# --- the plan --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], ()),
        ([(3, F32)], ((0,),)),
        ([(3, F32), (5, F32), (7, F32)], ((0, 1, 2),)),
        # The first bucket is full with 1 MiB, the others with 4 MiB.
        ([(MIB // 2, F32)] * 4, ((0, 1), (2, 3))),
        ([(KIB, F32)] * 1025, (tuple(range(1024)), (1024,))),
        ([(MIB, F32), (3 * MIB, F32), (MIB, F32), (3, F32)], ((0,), (1, 2), (3,))),
        # The tensor that fills a bucket belongs to it, however large it is.
        ([(3, F32), (90 * MIB, F32), (3, F32)], ((0, 1), (2,))),
        # A bucket has one dtype; those of another dtype in between do not close it.
        ([(3, F32), (3, BF16), (3, F32), (3, BF16)], ((0, 2), (1, 3))),
        ([(3, F32), (MIB, F64), (3, F32), (30 * MIB, F32)], ((1,), (0, 2, 3))),
        # Bytes are counted, not elements.
        ([(MIB // 2, F64), (3, F64)], ((0,), (1,))),
        ([(MIB, BF16), (MIB, BF16), (3, BF16)], ((0, 1), (2,))),
        # What has no elements has a place too.
        ([(0, F32), (MIB, F32), (0, F32)], ((0, 1), (2,))),
    ],
)
def test_plan_buckets(
    sizes: list[tuple[int, torch.dtype]], buckets: tuple[tuple[int, ...], ...]
) -> None:
    assert plan_buckets([empty(*size) for size in sizes]) == buckets


@given(
    st.lists(
        st.tuples(st.integers(0, 40 * MIB), st.sampled_from([F32, F64, BF16, torch.complex64]))
    )
)
def test_properties_of_a_plan(sizes: list[tuple[int, torch.dtype]]) -> None:
    tensors = [empty(*size) for size in sizes]
    buckets = plan_buckets(tensors)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(tensors)))
    for number, bucket in enumerate(buckets):
        assert list(bucket) == sorted(bucket)
        assert len({tensors[i].dtype for i in bucket}) == 1
        # Full only with its last tensor.
        limit = functions.BUCKET_BYTES if number else functions.FIRST_BUCKET_BYTES
        assert sum(tensors[i].nbytes for i in bucket[:-1]) < limit


# --- edges -----------------------------------------------------------------------------------


def leaves(place: str, *shapes: tuple[int, ...], dtype: torch.dtype = F64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=place).requires_grad_(True) for shape in shapes]


def connected(originals: list[Tensor], places: list[str]) -> list[list[Tensor]]:
    return connect(comm.broadcast_coalesced(originals, places), originals)


def backward(loss: Tensor) -> None:
    loss.backward()


def test_aliases_share_memory_and_version_with_the_copies(places: list[str]) -> None:
    originals = leaves(places[0], (2, 3), (4,))
    copies = comm.broadcast_coalesced(originals, places)
    aliases = connect(copies, originals)
    assert [len(replica) for replica in aliases] == [2, 2, 2]
    for replica, values in zip(aliases, copies, strict=True):
        for alias, copy in zip(replica, values, strict=True):
            assert alias.data_ptr() == copy.data_ptr()
            assert alias.requires_grad and not copy.requires_grad
            before = copy._version
            alias.detach().add_(1)
            assert copy._version == before + 1


def test_gradients_are_summed_over_the_replicas(places: list[str]) -> None:
    w, b = leaves(places[0], (2, 3), (3,))
    aliases = connected([w, b], places)
    for i, (weight, bias) in enumerate(aliases):
        backward(((i + 1) * weight.sum() + bias.sum() * 10).to(places[0]))
    torch.testing.assert_close(w.grad, torch.full_like(w, 6.0))
    torch.testing.assert_close(b.grad, torch.full_like(b, 30.0))


def test_the_sum_goes_in_replica_order() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, and 1 in another order."""
    original = torch.zeros(1, requires_grad=True)
    aliases = connected([original], ["cpu"] * 3)
    factors = (1e8, 1.0, -1e8)
    backward(sum((f * a[0] for f, a in zip(factors, aliases, strict=True)), torch.zeros(1)).sum())
    assert original.grad is not None
    assert original.grad.item() == (torch.tensor(1e8) + 1 - 1e8).item() == 0.0


def test_what_nobody_used_has_no_gradient(places: list[str]) -> None:
    w, b, unused = leaves(places[0], (2,), (2,), (2,))
    aliases = connected([w, b, unused], places)
    # `w` is used by the second replica alone, `b` by all but the second.
    loss = aliases[1][0].sum().to(places[0])
    loss = loss + aliases[0][1].sum() + aliases[2][1].sum().to(places[0])
    backward(loss)
    assert w.grad is not None and b.grad is not None
    assert w.grad.tolist() == [1, 1]
    assert b.grad.tolist() == [2, 2]
    assert unused.grad is None


def test_hooks_on_the_originals_run_once_on_the_sum(places: list[str]) -> None:
    w, b = leaves(places[0], (2,), (2,))
    seen: list[list[float]] = []
    after: list[Tensor] = []
    w.register_hook(lambda grad: seen.append(grad.tolist()))
    w.register_post_accumulate_grad_hook(after.append)
    aliases = connected([w, b], places)
    backward(
        torch.stack([(a * (i + 1)).sum().to(places[0]) for i, (a, _) in enumerate(aliases)]).sum()
    )
    assert seen == [[6.0, 6.0]]
    assert len(after) == 1 and after[0] is w


def test_a_bucket_is_reduced_at_once_and_alone(places: list[str]) -> None:
    originals = leaves(places[0], (MIB,), (5,), (6,), dtype=F32)
    aliases = connected(originals, places)
    nodes = [[alias.grad_fn for alias in replica] for replica in aliases]
    assert all(replica == nodes[0] for replica in nodes)
    first, second, third = nodes[0]
    assert first is not second and second is third
    with mock.patch("dataparallel.graph.functions.sums_of", wraps=sums_of) as sums:
        backward(torch.stack([r[1].sum().to(places[0]) for r in aliases]).sum())
        assert sums.call_count == 1
        backward(torch.stack([a.sum().to(places[0]) for r in aliases for a in r]).sum())
        assert sums.call_count == 3


def function_of(places: list[str]) -> Callable[[Tensor, Tensor], Tensor]:
    """What three replicas compute with a weight and a bias that came over edges."""

    def compute(w: Tensor, b: Tensor) -> Tensor:
        copies = comm.broadcast_coalesced([w, b], places)
        outputs = [
            torch.sin(weight * (i + 1)) * bias**2
            for i, (weight, bias) in enumerate(connect(copies, [w, b]))
        ]
        return torch.stack([output.to(places[0]) for output in outputs]).sum(0)

    return compute


def test_gradients_of_first_and_second_order(places: list[str]) -> None:
    inputs = leaves(places[0], (2, 2), (2,))
    assert torch.autograd.gradcheck(function_of(places), inputs)
    assert torch.autograd.gradgradcheck(function_of(places), inputs)


def test_third_order_equals_that_without_edges(places: list[str]) -> None:
    w, b = leaves(places[0], (2,), (2,))
    bare = sum((torch.sin(w * (i + 1)) * b**2 for i in range(3)), torch.zeros_like(w))
    results = []
    for value in (function_of(places)(w, b), bare):
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), w, create_graph=True)
        results.append(value)
    torch.testing.assert_close(results[0], results[1])


def test_the_bytes_of_the_gradients_move_once() -> None:
    places = ["virtual:0", "virtual:1"]
    # Two buckets, each of one large tensor and two small ones.
    shapes = [(300,), (7, 5), (512, 1024), (3, MIB), (11,), (12,)]
    originals = leaves(places[0], *shapes, dtype=F32)
    num_bytes = sum(original.nbytes for original in originals)
    small_bytes = sum(original.nbytes for original in originals if original.nbytes < MIB)
    aliases = connected(originals, places)
    gradients = [[torch.ones_like(alias) for alias in replica] for replica in aliases]
    outputs = [alias for replica in aliases for alias in replica]
    given = [gradient for replica in gradients for gradient in replica]
    virtual.reset_counters()
    torch.autograd.backward(outputs, given)
    counted = virtual.counters()
    assert counted["bytes_device_to_device"] == num_bytes
    # The two large ones, and the small ones of each bucket together.
    assert counted["copies_device_to_device"] == 2 + 2
    # A copy and a sum, which becomes the gradient itself. Small ones are packed on each device
    # before, and their sum takes the memory of a pack.
    assert counted["allocated_bytes"] == 2 * num_bytes + small_bytes
    assert all(o.grad is not None and bool((o.grad == 2).all()) for o in originals)


def test_a_gradient_that_nobody_wants_is_not_reduced(places: list[str]) -> None:
    w, b = leaves(places[0], (2,), (2,))
    aliases = connected([w, b], places)
    loss = torch.stack([(x * y).sum().to(places[0]) for x, y in aliases]).sum()
    (grad,) = torch.autograd.grad(loss, w)
    torch.testing.assert_close(grad, 3 * b.detach())
    assert w.grad is None and b.grad is None


def test_nothing_to_connect() -> None:
    assert connect([[], []], []) == [[], []]
