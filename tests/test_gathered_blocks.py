"""The trial of parameters gathered per block trains as the bare module does, with less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from benchmarks.prototypes.gathered_blocks import GatheredBlocks
from dataparallel import virtual
from dataparallel.virtual import device_module
from tests.free_threading import FREE_THREADED

DEVICES = [f"virtual:{i}" for i in range(4)]
WIDTH = 256


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(8)]
    ).double()  # AdamW divides by gradients near zero, where rounding of float32 shows


def train(model: Any, parameters: Any, devices: list[str]) -> list[float]:
    """Train three steps; return the losses."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=False)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(3):
        x, y = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        if isinstance(model, GatheredBlocks):
            chunks = [c.to(d) for c, d in zip(x.chunk(len(devices)), devices, strict=True)]
            outputs = model(chunks)
            targets = y.chunk(len(devices))
        else:
            outputs, targets = [model(x.to(devices[0]))], (y,)
        losses: list[Tensor] = [
            (out - target.to(out.device)).square().mean() / len(outputs)
            for out, target in zip(outputs, targets, strict=True)
        ]
        torch.autograd.backward(losses)
        optimizer.step()
        seen.append(sum(loss.item() for loss in losses))
    return seen


def peaks(devices: list[str]) -> list[int]:
    return [device_module.memory_stats(d)["allocated_bytes.all.peak"] for d in devices]


@pytest.mark.parametrize("num_devices", [2, 4])
def test_it_trains_as_the_bare_module_with_less_memory_than_spread(num_devices: int) -> None:
    devices = DEVICES[:num_devices]
    bare, most = make_net(), {}
    expected = train(bare, bare.parameters(), ["cpu"])
    size = sum(p.nbytes for p in bare.parameters())
    for kind in ("spread", "blocks"):
        net = make_net()
        model: Any = (
            GatheredBlocks(net, devices)
            if kind == "blocks"
            else dp.DistributedDataParallel(net, devices, originals="spread")
        )
        parameters = list(model.parameters())
        for device in devices:
            device_module.reset_peak_memory_stats(device)
        virtual.reset_counters()
        with virtual.check_races():
            assert train(model, parameters, devices) == pytest.approx(expected, rel=1e-9)
        most[kind] = max(peaks(devices)) / size
        out = max(sum(n for (i, _), n in virtual.routes().items() if i == k)
                  for k in range(num_devices))  # fmt: skip
        if kind == "blocks":
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, bare.state_dict()[name], rtol=1e-7, atol=1e-9)
            share = (num_devices - 1) / num_devices
            assert out / size / 3 == pytest.approx(3 * share, rel=0.02)
        del model, parameters, net
    # A part that was used is freed late there.
    assert most["blocks"] < most["spread"] or FREE_THREADED


def test_a_parameter_outside_of_its_block_raises() -> None:
    model = GatheredBlocks(copy.deepcopy(make_net()), DEVICES[:2])
    layer: Any = model.replicas[0].modules[0].get_submodule("0")
    with pytest.raises(RuntimeError, match=r"parameter '0\.0\.weight' of the replica on virtual:0"):
        layer.weight.sum()
