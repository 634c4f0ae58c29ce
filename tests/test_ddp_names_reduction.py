"""The names of torch's wrapper for the reduction: hooks, optimizers, groups, and its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.cluster import Cluster
from tests.ddp_name_cases import make_net, step, wrap


def _builtin(rank: int, world_size: int, replicas: int) -> list[Tensor]:
    model = wrap(replicas)
    kinds: Any = getattr(dist, "BuiltinCommHookType")  # noqa: B009 (torch does not declare it)
    model._register_builtin_comm_hook(kinds.FP16_COMPRESS)
    return step(model, rank)


def test_builtin_hooks(cluster: Cluster) -> None:
    ours, theirs = cluster.run(_builtin, 2, 1), cluster.run(_builtin, 2, 0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


class Twice(nn.Module):
    """Gets gradients for a layer twice in one backward, the second time too late for its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.before = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x


def _late(rank: int, world_size: int, hooked: bool) -> list[list[Any]]:
    model = dp.DistributedDataParallel(Twice(), ["cpu"], bucket_cap_mb=1e-5)
    if hooked:
        model._register_builtin_comm_hook("allreduce")
    found = []
    for number in range(3):
        model.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found


def test_a_hook_changes_nothing_for_gradients_that_come_late(cluster: Cluster) -> None:
    torch.testing.assert_close(cluster.run(_late, 2, True), cluster.run(_late, 2, False))


def test_what_is_no_hook() -> None:
    with pytest.raises(TypeError, match="there is no communication hook 3"):
        wrap(2).register_comm_hook(None, 3)


def _regrouped(rank: int, world_size: int) -> list[Tensor]:
    model = wrap(1)
    step(model, rank)
    model.zero_grad()
    pair = dist.new_group([0, 1])
    model._update_process_group(pair)
    if rank == 2:
        model.close()
        return []
    return step(model, rank)


def test_processes_that_are_not_in_a_new_group_keep_the_old_one(cluster: Cluster) -> None:
    first, second, third = cluster.run(_regrouped, 3)
    whole = make_net()
    x = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    # In eval mode for batch norm the halves would not matter; here each has its own statistics.
    sum(whole(each).square().mean() / 2 for each in x).backward()
    assert third == []
    for mine, other, p in zip(first, second, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad)
        torch.testing.assert_close(other, p.grad)


def _accumulated_over_two_groups(rank: int, world_size: int, first: Any) -> list[float]:
    net = nn.Linear(2, 1, bias=False)
    model = dp.DistributedDataParallel(net, ["cpu"], average="none", process_group=first)
    for group in (dist.group.WORLD, dist.new_group([0, 1])):
        model.update_process_group(group)
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert net.weight.grad is not None
    found: list[float] = net.weight.grad[0].tolist()
    return found


@pytest.mark.parametrize("first", [None, False])
def test_what_was_reduced_is_not_reduced_again_in_another_group(
    cluster: Cluster, first: Any
) -> None:
    assert cluster.run(_accumulated_over_two_groups, 2, first) == [[6.0, 6.0]] * 2


def _without_hooks(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    model = wrap(2)
    step(model, rank)
    model.zero_grad()
    model.reducer.remove_hooks()
    assert len(model.reducer._hooks) == 0
    first = step(model, rank)
    other = wrap(2)
    step(other, rank)
    other.zero_grad()
    return first, step(other, rank)


def test_gradients_are_reduced_without_hooks_too(cluster: Cluster) -> None:
    for without, usual in cluster.run(_without_hooks, 2):
        torch.testing.assert_close(without, usual)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ArithmeticError("between two forwards")


def test_a_backward_that_did_not_end_is_forgotten() -> None:
    model = dp.DistributedDataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    # The second forward runs backward first; the error comes before the first one's turn.
    inner = _Fails.apply(model(torch.ones(2, 2)))
    with pytest.raises(ArithmeticError, match="between two forwards"):
        model(inner).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad, torch.full_like(p, 2))
