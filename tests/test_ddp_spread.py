"""A module whose layers are on several devices is one replica, and stays where it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dataparallel as dp
from tests.cluster import Cluster


class Spread(nn.Module):
    def __init__(self, *devices: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)]
        places = (devices[0], devices[-1], devices[-1])
        self.layers = nn.ModuleList(
            [_on(layer, place) for layer, place in zip(layers, places, strict=True)]
        )
        self.devices = devices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layers[0](x.to(self.devices[0])))
        x = x.to(self.devices[-1])
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def _on(layer: nn.Module, place: str) -> nn.Module:
    with torch.device(place):
        new: nn.Module = type(layer)(*([6] if isinstance(layer, nn.BatchNorm1d) else _sizes(layer)))
    new.load_state_dict(layer.state_dict())
    return new


def _sizes(layer: nn.Module) -> list[int]:
    assert isinstance(layer, nn.Linear)
    return [layer.in_features, layer.out_features]


def trained(model: nn.Module, net: nn.Module, seed: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed + step))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in net.state_dict().values()]


DEVICES = ("virtual:0", "virtual:1")


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("devices", [DEVICES, ("cpu", "virtual:1")])
def test_training_in_one_process(devices: tuple[str, str], view: bool) -> None:
    net = Spread(*devices)
    model = dp.DistributedDataParallel(net, gradient_as_bucket_view=view)
    assert {str(p.device) for p in net.parameters()} == set(devices)
    bare = Spread("cpu")
    for mine, other in zip(trained(model, net, 0), trained(bare, bare, 0), strict=True):
        torch.testing.assert_close(mine, other)


def _process(rank: int, world_size: int, ours: bool, view: bool) -> list[torch.Tensor]:
    if not ours:
        bare = Spread("cpu")
        return trained(nn.parallel.DistributedDataParallel(bare), bare, 100 * rank)
    net = Spread(*DEVICES)
    model = dp.DistributedDataParallel(net, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    return trained(model, net, 100 * rank)


@pytest.mark.parametrize("view", [False, True])
def test_training_in_two_processes(cluster: Cluster, view: bool) -> None:
    ours = cluster.run(_process, 2, True, view, virtual=True)
    theirs = cluster.run(_process, 2, False, view)
    for rank in range(2):
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            torch.testing.assert_close(mine, other)


def test_markers_are_taken_off() -> None:
    net = Spread(*DEVICES)
    model = dp.DistributedDataParallel(net)
    x = torch.randn(5, 6)
    net.eval()
    assert torch.equal(model(dp.Replicate(x)).cpu(), net(x).cpu())
