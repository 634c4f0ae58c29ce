"""A step that is run again starts from all that the one before it has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dataparallel
from tests.cluster import Cluster
from tests.test_balance_memory import Narrow

PAIR = ["virtual:0", "virtual:1"]


def _after_no_sync(
    rank: int, world_size: int, average: Any, options: dict[str, Any]
) -> tuple[list[Any] | None, int, int]:
    """A step runs out of memory after its first round, which has reduced what no_sync() left."""
    layer = nn.Linear(3, 1, bias=False)
    model = dataparallel.DistributedDataParallel(
        nn.Sequential(layer, Narrow({1: 15}, backward=True)),
        ["cpu", "cpu"],
        average=average,
        timeout=20,
        **options,
    )
    # With a hook a single process reduces, too.
    model.register_comm_hook(None, allreduce_hook)
    begun = []

    def backward(value: float, samples: int = 4) -> None:
        model(torch.full((samples, 3), value)).sum().backward()

    def closure() -> None:
        begun.append(1)
        backward(100.0)
        backward(100.0, samples=40)

    with dataparallel.balance(model) as balancer:
        # What is reduced already is not to be sent again.
        backward(1.0)
        with model.no_sync():
            backward(float("nan") if options else 10.0)
        balancer.step(closure)
    grad = None if layer.weight.grad is None else layer.weight.grad.tolist()
    return grad, model.num_skipped, len(begun)


@pytest.mark.parametrize("average", ["processes", "none"])
def test_gradients_that_are_not_reduced_yet(cluster: Cluster, average: str) -> None:
    (found,) = cluster.run(_after_no_sync, 1, average, {})
    assert found == ([[4444.0] * 3], 0, 2)


def test_gradients_that_are_skipped(cluster: Cluster) -> None:
    """They are found each time, and counted once."""
    options = {"nonfinite": "skip"}
    (found,) = cluster.run(_after_no_sync, 1, "processes", options)
    assert found == ([[4000.0] * 3], 1, 2)


class _Averaging(nn.Module):
    """Its buffers are written in place, replaced, and made."""

    written: Tensor
    replaced: Tensor
    made: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("made", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written.mul_(0.5).add_(1)
        self.replaced = self.replaced * 0.5 + 1
        self.made = torch.ones_like(self.written) if self.made is None else self.made + 1
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize(
    "wrapper", [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
)
def test_buffers_that_are_assigned(wrapper: Any) -> None:
    net = _Averaging().to("virtual:0")
    model = wrapper(net, PAIR)
    balancer = dataparallel.balance(model)
    for values in ([1.0, 1.0, 1.0], [1.5, 1.5, 2.0]):
        objects = list(net._buffers.values())
        seen: list[Any] = []

        def closure(objects: list[Tensor | None] = objects, seen: list[Any] = seen) -> None:
            seen.append([a is b for a, b in zip(net._buffers.values(), objects, strict=True)])
            model(torch.ones(40, 3, device="virtual:0")).sum().backward()
            if len(seen) < 3:
                raise torch.OutOfMemoryError("virtual:1 is out of memory")

        balancer.step(closure)
        assert seen == [[True] * 3] * 3
        assert [float(b) for b in (net.written, net.replaced, net.made) if b is not None] == values
