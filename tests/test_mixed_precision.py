"""Replicas that compute in another dtype than their originals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import dataparallel as dp
from tests.cluster import Cluster

DOUBLE = torch.float64


class Net(nn.Module):
    scale: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(0.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.first.weight.dtype
        y: Tensor = self.last(self.norm(torch.relu(self.first(x)))) * self.scale
        return y


def expected(net: Net, dtype: torch.dtype, x: Tensor, num_chunks: int) -> list[Tensor]:
    """Return the gradients of a mean square when each chunk's are computed in ``dtype``."""
    twin = Net(dtype)
    twin.load_state_dict(net.state_dict())
    parameters = list(twin.parameters())
    total = [torch.zeros_like(p, dtype=DOUBLE) for p in parameters]
    outputs = [twin(chunk.to(dtype)) for chunk in x.chunk(num_chunks)]
    whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
    (slopes,) = torch.autograd.grad(whole.pow(2).mean(), whole)
    for output, grad in zip(outputs, slopes.chunk(num_chunks), strict=True):
        for sum_, each in zip(total, torch.autograd.grad(output, parameters, grad), strict=True):
            sum_ += each
    return total


def assert_grads(net: nn.Module, wanted: Sequence[Tensor], tolerance: float) -> None:
    for parameter, grad in zip(net.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        found = parameter.grad.cpu().double()
        torch.testing.assert_close(found, grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (DOUBLE, 1e-6)])
def test_gradients_are_computed_in_one_dtype_and_kept_in_the_other(
    slots: list[str], num_replicas: int, dtype: torch.dtype, tolerance: float
) -> None:
    net: Any = Net().to(slots[0])
    precision = dp.MixedPrecision(dtype)
    model = dp.DistributedDataParallel(net, slots[:num_replicas], mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 8)
    for _ in range(3):
        outer = x.to(slots[0]).requires_grad_()
        output = model(outer)
        assert output.dtype == dtype
        output.pow(2).mean().backward()
        assert_grads(net, expected(net, dtype, x, num_replicas), tolerance)
        assert outer.grad is not None and outer.grad.dtype == torch.float32
        # The step reaches the replicas.
        optimizer.step()
        optimizer.zero_grad()


def test_buffers_are_converted_where_that_is_asked_for() -> None:
    net = Net()
    precision = dp.MixedPrecision(buffer_dtype=DOUBLE)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], mixed_precision=precision)
    assert net.scale.dtype == DOUBLE
    assert model(torch.randn(4, 8)).dtype == torch.float32


def _step(rank: int, world_size: int) -> None:
    net, batches = Net(), torch.randn(2, 6, 8)
    # torch's own class; torch's wrapper itself cannot use it on the CPU, which has no events.
    config = _MixedPrecision(param_dtype=DOUBLE, reduce_dtype=torch.float32)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], mixed_precision=config)
    sent = {bucket.storage.flat.dtype for bucket in model.reducer.buckets.all if bucket.storage}
    assert sent == {torch.float32}
    model(batches[rank]).pow(2).mean().backward()
    each = [expected(net, DOUBLE, x, 2) for x in batches]
    assert_grads(net, [sum(grads) / 2 for grads in zip(*each, strict=True)], 1e-5)


def test_gradients_are_sent_in_the_reduce_dtype(cluster: Cluster) -> None:
    cluster.run(_step, 2)
