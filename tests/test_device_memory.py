"""The bytes on devices at the peak of a step, beside the bare module on one chunk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.virtual import device_module as virtual
from tests.cluster import Cluster
from tests.free_threading import settle
from tests.models import WRAPPERS

SLOTS = [f"virtual:{i}" for i in range(3)]
#: No device may hold more than this times the memory of the bare module with one chunk. That, and
#: the copies of a bucket that are on their way.
MOST = 1.1


def of_parameters() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(60)]), torch.randn(6, 128)


def of_logits() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 512)), torch.randn(384, 16)


def peaks(
    devices: Sequence[str], make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], adam: bool
) -> list[int]:
    """Bytes at the peak of a step on each device, once the first steps are over."""
    gc.collect()
    before = [virtual.memory_allocated(device) for device in devices]
    model, loss = make()
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(4):
        for device in devices:
            virtual.synchronize(device)
            virtual.reset_peak_memory_stats(device)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return [virtual.max_memory_allocated(d) - b for d, b in zip(devices, before, strict=True)]


@pytest.mark.parametrize(
    ("build", "wrap", "adam"),
    [
        (of_parameters, lambda net: DistributedDataParallel(net, SLOTS, bucket_cap_mb=0.1), True),
        (of_parameters, lambda net: DistributedDataParallel(net, SLOTS, bucket_cap_mb=0.1), False),
        (of_logits, lambda net: DistributedDataParallel(net, SLOTS), True),
        (of_logits, lambda net: DataParallel(net, SLOTS), False),
    ],
)
def test_no_device_holds_more_than_the_bare_module_on_one_chunk(
    build: Callable[[], tuple[nn.Module, Tensor]], wrap: Callable[[nn.Module], Any], adam: bool
) -> None:
    """The home device has the optimizer's state, too, as the bare module's has."""
    criterion = nn.CrossEntropyLoss()

    def bare() -> tuple[nn.Module, Callable[[], Tensor]]:
        net, x = build()
        x = x.chunk(len(SLOTS))[0].to(SLOTS[0])
        y = torch.zeros(len(x), dtype=torch.long, device=SLOTS[0])
        return net.to(SLOTS[0]), lambda: criterion(net(x), y)

    def ours() -> tuple[nn.Module, Callable[[], Tensor]]:
        net, x = build()
        model, y = wrap(net), torch.zeros(len(x), dtype=torch.long)
        return model, lambda: model.loss(criterion, x, y)

    (alone,) = peaks(SLOTS[:1], bare, adam)
    (stateless,) = peaks(SLOTS[:1], bare, False)
    home, *others = peaks(SLOTS, ours, adam)
    assert home <= MOST * alone
    assert max(others) <= MOST * stateless


@WRAPPERS
def test_the_outputs_of_replicas_are_gone_once_they_are_gathered(wrapper: Any) -> None:
    net = nn.Linear(4, 4096)
    model = wrapper(net.to(SLOTS[0]), SLOTS)
    x = torch.randn(96, 4)
    model(x).sum().backward()
    gc.collect()
    before = [virtual.memory_allocated(device) for device in SLOTS]
    output = model(x)
    settle()
    for device in SLOTS:
        virtual.synchronize(device)
    rise = [virtual.memory_allocated(d) - b for d, b in zip(SLOTS, before, strict=True)]
    # Home has the gathered output, and each replica its chunk of the input.
    small = output.nbytes // 100
    assert rise[0] - output.nbytes < small and max(rise[1:]) < small


def _peaks_with_views(rank: int, world_size: int) -> tuple[int, int]:
    """Return the peaks of the bare module, and of a replica whose buckets are sent."""
    criterion = nn.CrossEntropyLoss()
    y = torch.zeros(6, dtype=torch.long, device=SLOTS[0])

    def make(wraps: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
        net, x = of_parameters()
        model, x = net.to(SLOTS[0]), x.to(SLOTS[0])
        if wraps:
            options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.1}
            model = DistributedDataParallel(model, SLOTS[:1], **options)
        return model, lambda: criterion(model(x), y)

    (bare,), (ours,) = (peaks(SLOTS[:1], partial(make, wraps), False) for wraps in (False, True))
    return bare, ours


def test_gradients_are_gone_once_they_are_in_a_bucket(cluster: Cluster) -> None:
    for bare, ours in cluster.run(_peaks_with_views, 2, virtual=True):
        assert ours <= MOST * bare
