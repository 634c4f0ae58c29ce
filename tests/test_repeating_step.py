"""A step that is run again starts from all that the one before it has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.repeating.rollback import Rollback
from dataparallel.repeating.step import StepRollback
from tests.cluster import Cluster


def _after_no_sync(
    rank: int, world_size: int, average: Any, options: dict[str, Any]
) -> tuple[list[Any], list[Any], int]:
    """A round that reduces what no_sync() has left, twice; before it, and after it."""
    net = nn.Linear(3, 1, bias=False)
    model = dataparallel.DistributedDataParallel(
        net, ["cpu", "cpu"], average=average, timeout=20, **options
    )

    def backward(value: float) -> None:
        model(torch.full((4, 3), value * (rank + 1.0))).sum().backward()

    # What is reduced already is not to be sent again.
    backward(1.0)
    with model.no_sync():
        backward(float("nan") if options and rank == 1 else 10.0)
    before = StepRollback(model)
    found: list[Any] = []
    for _ in range(3):
        backward(100.0)
        found.append(None if net.weight.grad is None else net.weight.grad.tolist())
        before.undo()
    assert net.weight.grad is not None
    return found, net.weight.grad.tolist(), model.num_skipped


@pytest.mark.parametrize("average", ["processes", "none"])
def test_gradients_that_are_not_reduced_yet(cluster: Cluster, average: str) -> None:
    results = cluster.run(_after_no_sync, 2, average, {})
    scale = 2 if average == "none" else 1
    for rank, (found, before, _) in enumerate(results):
        assert found == [[[666.0 * scale] * 3]] * 3
        assert before == [[6.0 * scale + 40.0 * (rank + 1)] * 3]


def test_gradients_that_are_skipped(cluster: Cluster) -> None:
    """Each time they are found, in all processes, and counted once at most."""
    for found, _, skipped in cluster.run(_after_no_sync, 2, "processes", {"nonfinite": "skip"}):
        assert found == [None] * 3
        assert skipped == 0


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
        self.made = torch.ones(()) if self.made is None else self.made + 1
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize(
    "wrapper", [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
)
def test_buffers_that_are_assigned(wrapper: Any) -> None:
    net = _Averaging()
    model = wrapper(net, ["cpu", "cpu"])
    for values in ([1.0, 1.0, 1.0], [1.5, 1.5, 2.0]):
        before, objects = StepRollback(model), list(net._buffers.values())
        for _ in range(2):
            model(torch.ones(4, 3)).sum().backward()
            before.undo()
            assert all(map(lambda a, b: a is b, net._buffers.values(), objects))
        model(torch.ones(4, 3)).sum().backward()
        assert [float(b) for b in (net.written, net.replaced, net.made) if b is not None] == values


def test_buffers_that_come_and_go() -> None:
    net = nn.BatchNorm1d(2)
    names, mean = list(net._buffers), net.running_mean
    rollback = Rollback([torch.device("cpu")])
    rollback.take([net])
    del net.running_mean
    net.register_buffer("new", torch.zeros(2))
    rollback.undo()
    assert list(net._buffers) == names
    assert net.running_mean is mean
    # What is right is left alone, whoever looks at it meanwhile.
    live = net._buffers
    rollback.undo()
    assert net._buffers is live
