"""Parameters of subclasses that hold other tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import dataparallel as dp
from tests.cluster import Cluster


def make_layer() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    return layer


@pytest.mark.parametrize("view", [False, True])
def test_gradients_have_the_class_of_the_parameter(view: bool) -> None:
    layer, bare = make_layer(), make_layer()
    model = dp.DistributedDataParallel(layer, ["cpu", "cpu"], gradient_as_bucket_view=view)
    x = torch.randn(6, 4)
    for _ in range(3):
        for one, net in ((model, layer), (bare, bare)):
            net.zero_grad()
            one(x).pow(2).sum().backward()
            torch.optim.SGD(net.parameters(), lr=0.01).step()
    assert isinstance(layer.weight.grad, TwoTensor)
    for name in ("a", "b"):
        torch.testing.assert_close(getattr(layer.weight, name), getattr(bare.weight, name))


def _wrap(rank: int, world_size: int) -> None:
    dp.DistributedDataParallel(make_layer())


def test_they_cannot_be_sent(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="weight are of a subclass that holds tensors, whose"):
        cluster.run(_wrap, 2)
