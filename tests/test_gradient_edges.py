"""Gradients on their way to the originals: in which order they are added, and what moves."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from dataparallel import comm, virtual
from dataparallel.comm.bucket_plan import fill
from dataparallel.comm.local import sums_of
from dataparallel.graph.functions import connect

KIB = 256  # float32 elements
MIB = 1024 * KIB
F32, F64 = torch.float32, torch.float64


def leaf(slot: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(slot).requires_grad_()


def test_sums_go_in_replica_order(slots: list[str]) -> None:
    weight = torch.zeros(100).to(slots[0]).requires_grad_()
    shares = [torch.randn(100) * 10.0**i for i in range(4)]
    expected = ((shares[0] + shares[1]) + shares[2]) + shares[3]
    aliases = connect(comm.broadcast_coalesced([weight], slots), [weight])
    for used_first in (0, 2):
        order = [*range(used_first, 4), *range(used_first)]
        outputs = [(aliases[i][0] * shares[i].to(slots[i])).sum() for i in order]
        (gradient,) = torch.autograd.grad(outputs, weight, retain_graph=True)
        assert torch.equal(gradient.cpu(), expected)


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], ()),
        # The first bucket is full with 1 MiB, the others with 4 MiB.
        ([(MIB // 2, F32)] * 4, ((0, 1), (2, 3))),
        ([(MIB, F32), (3 * MIB, F32), (MIB, F32), (3, F32)], ((0,), (1, 2), (3,))),
        # The tensor that fills a bucket belongs to it, however large it is.
        ([(3, F32), (90 * MIB, F32), (3, F32)], ((0, 1), (2,))),
        # A bucket has one dtype; those of another dtype in between do not close it.
        ([(3, F32), (MIB, F64), (3, F32), (30 * MIB, F32)], ((1,), (0, 2, 3))),
    ],
)
def test_buckets_within_a_process(
    sizes: list[tuple[int, torch.dtype]], buckets: tuple[tuple[int, ...], ...]
) -> None:
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in sizes]
    assert tuple(tuple(bucket.indices) for bucket in fill(enumerate(tensors))) == buckets


def test_a_bucket_is_reduced_at_once_and_alone(slots: list[str]) -> None:
    originals = [leaf(slots[0], size) for size in (MIB, 5, 6)]
    aliases = connect(comm.broadcast_coalesced(originals, slots[:3]), originals)
    seen: list[list[float]] = []
    originals[1].register_hook(lambda grad: seen.append(grad.tolist()))
    with mock.patch("dataparallel.graph.functions.sums_of", wraps=sums_of) as sums:
        torch.stack([r[1].sum().to(slots[0]) for r in aliases]).sum().backward()
        assert sums.call_count == 1
        torch.stack([a.sum().to(slots[0]) for r in aliases for a in r]).sum().backward()
        assert sums.call_count == 3
    # Hooks on the originals run once on the sum.
    assert seen == [[3.0] * 5] * 2


def test_the_bytes_of_the_gradients_move_once() -> None:
    places = ["virtual:0", "virtual:1"]
    # Two buckets, each of one large tensor and two small ones.
    shapes = [(300,), (7, 5), (1100, 1024), (5, MIB), (11,), (12,)]
    originals = [leaf(places[0], *shape) for shape in shapes]
    num_bytes = sum(original.nbytes for original in originals)
    small_bytes = sum(original.nbytes for original in originals if original.nbytes < MIB)
    aliases = connect(comm.broadcast_coalesced(originals, places), originals)
    outputs = [alias for replica in aliases for alias in replica]
    given = [torch.ones_like(alias) for alias in outputs]
    virtual.reset_counters()
    torch.autograd.backward(outputs, given)
    counted = virtual.counters()
    assert counted["bytes_device_to_device"] == num_bytes
    # The two large ones, and the small ones of each bucket together.
    assert counted["copies_device_to_device"] == 2 + 2
    # A copy and a sum, which becomes the gradient itself. Small ones are packed on each device
    # before.
    assert counted["allocated_bytes"] == 2 * (num_bytes + small_bytes)
    assert all(o.grad is not None and bool((o.grad == 2).all()) for o in originals)
