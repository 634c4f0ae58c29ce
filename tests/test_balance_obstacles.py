"""Forwards that ran out of memory and must not be run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel
from dataparallel import collectives
from dataparallel.extras.balancing.memory import Rollback
from tests.cluster import Cluster
from tests.process_groups import new_group
from tests.test_balance_memory import Narrow, notes_of


class _Meeting(nn.Module):
    """A collective of processes, in the first replica of each."""

    def forward(self, x: Tensor) -> Tensor:
        replica = dataparallel.current_replica()
        if replica is None or replica.index == 0:
            dist.all_reduce(torch.ones(1))
        return x


def _fails_in_process_1(rank: int, world_size: int, layer: str) -> tuple[str, list[str], Any]:
    torch.manual_seed(0)
    narrow = Narrow({1: 2} if rank == 1 else {})
    first: nn.Module = nn.BatchNorm1d(4) if layer == "batch norm" else _Meeting()
    net = nn.Sequential(nn.Linear(3, 4), first, narrow, nn.Linear(4, 2))
    collectives.SyncBatchNorm.convert(net)
    model = dataparallel.DistributedDataParallel(net, ["cpu", "cpu"], timeout=5.0)
    error: BaseException | None = None
    with dataparallel.balance(model) as balancer:
        try:
            model(torch.randn(8, 3)).sum().backward()
        except RuntimeError as caught:
            error = caught
        limits = balancer.state_dict()["limits"]
    assert error is not None
    return type(error).__name__, notes_of(error), (limits, len(narrow.calls))


@pytest.mark.parametrize("layer", ["batch norm", "collective"])
def test_other_processes_are_ahead(cluster: Cluster, layer: str) -> None:
    (other, _, _), (failed, notes, state) = cluster.run(_fails_in_process_1, 2, layer, timeout=60)
    assert failed == "OutOfMemoryError"
    assert other == "CollectiveError"
    (note,) = [note for note in notes if "ran out of memory with 4 samples" in note]
    assert "The forward has called collectives of several processes, which the others" in note
    # One attempt of two replicas.
    assert state == ([None, 3], 2)


def _collectives_of_groups(rank: int, world_size: int) -> list[str]:
    pair, other = new_group([0, 1]), new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=pair)
    rollback = Rollback([], [])
    found = [rollback.obstacle()]
    dist.destroy_process_group(pair)
    found.append(rollback.obstacle())
    dist.all_reduce(torch.ones(1), group=other)
    return [*found, rollback.obstacle()]


def test_groups_that_are_gone_are_no_obstacle(cluster: Cluster) -> None:
    before, gone, called = cluster.run(_collectives_of_groups, 2)[1]
    assert (before, gone) == ("", "")
    assert "has called collectives of several processes" in called


class _Doubling(nn.Module):
    """Writes an input in place, and then runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.narrow = Narrow({1: 6})

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        replica = dataparallel.current_replica()
        if replica is None or replica.index == 0:
            scale.mul_(2)
        result: Tensor = self.narrow(self.layer(x) * scale)
        return result


@pytest.mark.parametrize("inside", [False, True])
def test_an_input_that_was_written_in_place(inside: bool) -> None:
    net = _Doubling()
    model = dataparallel.DataParallel(net, ["virtual:0", "virtual:1"], in_dims={"scale": None})
    net.to("virtual:0")
    x, y = torch.ones(16, 4, device="virtual:0"), torch.ones(16, 4, device="virtual:0")

    def compute(scale: Tensor) -> Tensor:
        if inside:
            result: Tensor = model.loss(nn.MSELoss(), (x, scale), y)
            return result
        return nn.functional.mse_loss(model(x, scale), y)

    with dataparallel.balance(model) as balancer:
        scale = torch.ones(4, device="virtual:0")
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
            compute(scale)
        assert scale.tolist() == [2.0] * 4, "one attempt"
        note = "\n".join(notes_of(caught.value))
        assert "The forward has written inputs in place (of shape (4,)), so it cannot be" in note
        assert balancer.limits == (None, 6)
        compute(torch.ones(4, device="virtual:0"))
        assert balancer.sizes(16) == (10, 6)


def test_inputs_of_inference_mode_have_no_version() -> None:
    model = dataparallel.DataParallel(Narrow({1: 6}), ["cpu", "cpu"])
    with dataparallel.balance(model), torch.inference_mode():
        x = torch.randn(16, 4)
        assert torch.equal(model(x), x)
