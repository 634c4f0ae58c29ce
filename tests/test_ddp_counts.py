"""What a step of DistributedDataParallel costs, counted: collectives, copies, memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from dataparallel import kernels
from dataparallel.reducer import buckets
from tests.cluster import Cluster


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.spare = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, with_spare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.spare(x) if with_spare else x


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def _collectives(
    rank: int, world_size: int, replicas: int, spare: list[bool]
) -> tuple[int, int, int]:
    model = dp.DistributedDataParallel(make_net(), ["cpu"] * replicas, bucket_cap_mb=0.001)
    processes = model._training.processes
    assert processes is not None
    for _ in range(3):
        model(torch.randn(6, 16), spare[rank]).sum().backward()
    sent, said = processes.buckets.launched.total(), processes.control.launched.total()
    model(torch.randn(6, 16), spare[rank]).sum().backward()
    return (
        processes.buckets.launched.total() - sent,
        processes.control.launched.total() - said,
        len(model.reducer.buckets.all),
    )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("spare", [[True, True], [False, True], [False, False]])
def test_collectives_of_a_step(cluster: Cluster, replicas: int, spare: list[bool]) -> None:
    """The vote is the only message of a round, whatever parameters anybody has used."""
    for sent, said, num_buckets in cluster.run(_collectives, 2, replicas, spare):
        assert num_buckets > 2
        assert sent == num_buckets
        assert said == 1


class UsedTwice(Net):
    """Autograd's engine accumulates the first layer's gradients twice in one backward."""

    def forward(self, x: torch.Tensor, with_spare: bool = False) -> torch.Tensor:
        x = checkpoint(self.layers[0], self.layers[1](x), use_reentrant=True)
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        y: torch.Tensor = self.spare(checkpoint(self.layers[0], x, use_reentrant=True))
        return y


def _collectives_of_late_gradients(rank: int, world_size: int) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = dp.DistributedDataParallel(UsedTwice(), ["cpu"] * 2, bucket_cap_mb=0.001)
    processes = model._training.processes
    assert processes is not None
    for _ in range(3):
        model(torch.randn(6, 16)).sum().backward()
    sent, said = processes.buckets.launched.total(), processes.control.launched.total()
    model(torch.randn(6, 16)).sum().backward()
    return (
        processes.buckets.launched.total() - sent,
        processes.control.launched.total() - said,
        len(model.reducer.buckets.all),
    )


def test_gradients_that_were_late_once_cost_nothing_later(cluster: Cluster) -> None:
    for sent, said, num_buckets in cluster.run(_collectives_of_late_gradients, 2):
        assert (sent, said) == (num_buckets, 1)


def _copies(rank: int, world_size: int, replicas: int, view: bool) -> tuple[int, bool]:
    net = make_net()
    model = dp.DistributedDataParallel(net, ["cpu"] * replicas, gradient_as_bucket_view=view)
    copied = 0
    unflatten = kernels.unflatten

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal copied
        copied += 1
        unflatten(*args, **kwargs)

    with mock.patch.object(kernels, "unflatten", counting):
        for _ in range(4):
            net.zero_grad()
            model(torch.randn(6, 16), True).sum().backward()
    storages = [bucket.storage for bucket in model.reducer.buckets.all]
    flats = {s.flat.untyped_storage().data_ptr() for s in storages if s}
    grads = [p.grad for p in net.parameters()]
    assert all(grad is not None for grad in grads)
    in_bucket = [g.untyped_storage().data_ptr() in flats for g in grads if g is not None]
    assert all(in_bucket) or not any(in_bucket)
    return copied, all(in_bucket)


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_out_of_buckets(cluster: Cluster, replicas: int) -> None:
    for copied, in_bucket in cluster.run(_copies, 2, replicas, True):
        assert copied == 0
        assert in_bucket
    for copied, in_bucket in cluster.run(_copies, 2, replicas, False):
        assert copied > 0
        assert not in_bucket


class _Sizes(TorchDispatchMode):
    """Notes how many elements each new tensor of an operation has."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if isinstance(result, torch.Tensor) and ("empty" in name or "zeros" in name):
            self.made.append((name, result.numel()))
        return result


def _allocations(rank: int, world_size: int, replicas: int, view: bool) -> tuple[int, int]:
    net = make_net()
    made = 0
    original = buckets.BucketStorage.__init__

    def counting(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        original(self, *args, **kwargs)

    buckets.BucketStorage.__init__ = counting  # type: ignore[method-assign]
    try:
        model = dp.DistributedDataParallel(net, ["cpu"] * replicas, gradient_as_bucket_view=view)
        for _ in range(3):
            net.zero_grad()
            model(torch.randn(6, 16), True).sum().backward()
        before = made
        sizes = _Sizes()
        for _ in range(2):
            net.zero_grad()
            output = model(torch.randn(6, 16), True).sum()
            with sizes:
                output.backward()
    finally:
        buckets.BucketStorage.__init__ = original  # type: ignore[method-assign]
    # Numbers of messages are small; anything of the size of a parameter is not.
    large = [entry for entry in sizes.made if entry[1] >= 16]
    return made - before, len(large)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_reducer_allocates_nothing_after_the_third_step(
    cluster: Cluster, replicas: int, view: bool
) -> None:
    for storages, large in cluster.run(_allocations, 2, replicas, view):
        assert storages == 0
        assert large == 0


def _views_that_stay(rank: int, world_size: int, average: Any) -> tuple[bool, int]:
    """Whether references to ``.grad`` show the later gradients, and how much memory was made."""
    net = make_net()
    model = dp.DistributedDataParallel(net, ["cpu"], gradient_as_bucket_view=True, average=average)
    x = torch.randn(6, 16)
    for _ in range(3):
        net.zero_grad(set_to_none=False)
        model(x, True).sum().backward()
    kept = [p.grad for p in net.parameters()]
    before = [grad.clone() for grad in kept if grad is not None]
    net.zero_grad(set_to_none=False)
    sizes = _Sizes()
    for _ in range(2):
        output = model(x, True).sum()
        with sizes:
            output.backward()
    stays = all(p.grad is grad for p, grad in zip(net.parameters(), kept, strict=True))
    for grad, first in zip(kept, before, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, 2 * first)
    return stays, len([entry for entry in sizes.made if entry[1] >= 16 and "like" not in entry[0]])


@pytest.mark.parametrize("average", ["processes", "none"])
def test_bucket_views_that_were_not_set_to_none_stay(cluster: Cluster, average: str) -> None:
    """An optimizer, or a captured graph, may hold what ``.grad`` is."""
    assert cluster.run(_views_that_stay, 2, average) == [(True, 0)] * 2
