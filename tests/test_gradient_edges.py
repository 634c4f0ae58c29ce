"""Autograd's nodes between the caller and the replicas: values, derivatives, what moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dataparallel import comm, virtual
from dataparallel.comm.local import sums_of
from dataparallel.graph import functions
from dataparallel.graph.functions import (
    Broadcast,
    Gather,
    Scatter,
    connect,
    plan_buckets,
)

KIB = 256  # float32 elements
MIB = 1024 * KIB
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def apply(function: type[torch.autograd.Function], place: str | Sequence[str], *args: Any) -> Any:
    """Applies it to devices, as its callers do."""
    if isinstance(place, str):
        return functions.apply_function(function, torch.device(place), *args)
    return functions.apply_function(function, [torch.device(slot) for slot in place], *args)


def leaf(slot: str, *shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=dtype).to(slot).requires_grad_()


def test_a_step_over_streams_that_defer() -> None:
    """Values and gradients are those of the CPU where nothing happens before it is waited for."""

    def step(on: list[str], home: str) -> list[Tensor]:
        torch.manual_seed(1)
        # In double precision: the engine adds what its device threads bring in no fixed order.
        batch, weight, bias = (leaf(home, *shape) for shape in ((16, 8), (8, 8), (8,)))
        chunks = apply(Scatter, on, [16 // len(on)] * len(on), 0, batch * 2)
        flat = apply(Broadcast, on, weight * 2, bias * 2)
        outputs = [
            (chunk @ w + b).tanh()
            for chunk, w, b in zip(chunks, flat[::2], flat[1::2], strict=True)
        ]
        loss = apply(Gather, home, 0, *outputs).square().sum()
        first = torch.autograd.grad(loss, (batch, weight, bias), create_graph=True)
        penalty = sum((gradient.square().sum() for gradient in first), loss)
        return [t.cpu() for t in torch.autograd.grad(penalty, (batch, weight, bias))]

    expected = step(["cpu"], "cpu")
    devices = [f"virtual:{i}" for i in range(4)]
    for home in ("virtual:0", "virtual:2", "cpu"):
        with virtual.strict_mode():
            found = step(devices, home)
        torch.testing.assert_close(found, expected)


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


# --- the buckets of the edges --------------------------------------------------------------------


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


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
def test_plan_buckets(
    sizes: list[tuple[int, torch.dtype]], buckets: tuple[tuple[int, ...], ...]
) -> None:
    assert plan_buckets([empty(*size) for size in sizes]) == buckets


def test_a_bucket_is_reduced_at_once_and_alone(slots: list[str]) -> None:
    originals = [leaf(slots[0], size, dtype=F32) for size in (MIB, 5, 6)]
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
    shapes = [(300,), (7, 5), (512, 1024), (3, MIB), (11,), (12,)]
    originals = [leaf(places[0], *shape, dtype=F32) for shape in shapes]
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
    # before, and their sum takes the memory of a pack.
    assert counted["allocated_bytes"] == 2 * num_bytes + small_bytes
    assert all(o.grad is not None and bool((o.grad == 2).all()) for o in originals)
