"""Ten thousand collectives: no hang, nothing left behind, and every number right."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import torch
from torch import Tensor

from dataparallel.collectives.collective import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Reduce,
    ReduceScatter,
)
from dataparallel.threads.apply import apply_replicas
from tests.replica_cases import GROUP, expected, index

COUNT = 10_000
#: One in so many is large enough that the replicas divide the work.
LARGE = 400
REPLICAS = 4


def plan(count: int) -> list[tuple[Collective, int]]:
    """Collectives and sizes, the same at all replicas, in an order that nothing repeats."""
    draw = random.Random(5)
    found: list[tuple[Collective, int]] = []
    for number in range(count):
        kinds: list[Collective] = [
            AllReduce(draw.choice(["sum", "avg", "min", "max", "product"])),
            Reduce("sum", draw.randrange(REPLICAS)),
            ReduceScatter("max", 0),
            Broadcast(draw.randrange(REPLICAS)),
            AllGather(0),
        ]
        size = 70_000 if number % LARGE == LARGE - 1 else 4 * draw.randrange(1, 30)
        found.append((draw.choice(kinds), size))
    return found


def replay(steps: list[tuple[Collective, int]]) -> list[list[float]]:
    """Run them in replica threads; per replica the sums of its results."""

    def call() -> list[float]:
        inputs: dict[int, Tensor] = {}
        found = []
        for collective, size in steps:
            x = inputs.setdefault(size, torch.full((size,), float(index() + 1)))
            y = GROUP.run(collective, x)
            found.append(float(y[0]) + y.numel())
            # By every replica, in the memory that is its own.
            y.fill_(-1)
        return found

    return apply_replicas([call] * REPLICAS, [torch.device("cpu")] * REPLICAS)


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_ten_thousand_collectives() -> None:
    steps = plan(COUNT)
    replay(steps[:10])
    threads, tensors = threading.active_count(), count_tensors()
    found = replay(steps)
    # Threads of earlier tests may have ended meanwhile.
    assert threading.active_count() <= threads
    assert count_tensors() <= tensors
    inputs = [torch.full((1,), float(i + 1)) for i in range(REPLICAS)]
    for number, (collective, size) in enumerate(steps):
        wide = [x.expand(4) for x in inputs]
        for replica, y in enumerate(expected(collective, wide)):
            length = y.numel() * size // 4
            assert found[replica][number] == float(y[0]) + length, (collective, size)


def test_nothing_is_left_of_meetings_with_gradients() -> None:
    leaves = [torch.ones(size, requires_grad=True) for size in (4, 90_000) for _ in range(2)]
    seen: list[weakref.ref[object]] = []

    def call(first: Tensor, second: Tensor) -> list[Tensor]:
        outputs = [GROUP.run(AllReduce("product"), x * 2) for x in (first, second)]
        seen.extend(weakref.ref(y) for y in outputs)
        seen.extend(weakref.ref(y.grad_fn) for y in outputs)
        return outputs

    for _ in range(3):
        calls = [lambda i=i: call(leaves[i], leaves[2 + i]) for i in range(2)]
        outputs = apply_replicas(calls, [torch.device("cpu")] * 2)
        torch.autograd.backward([y.sum() for replica in outputs for y in replica])
        del outputs, calls
    gc.collect()
    alive = [kept for kept in (reference() for reference in seen) if kept is not None]
    assert not alive, "graphs or results of meetings are kept"
    for x in leaves:
        # Two outputs, each of them four times the other member's one.
        torch.testing.assert_close(x.grad, torch.full_like(x, 3 * 8.0))
