"""Replicas that compute in another dtype than their originals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import dataparallel as dp
from tests.cluster import Cluster


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.first.weight.dtype
        y: torch.Tensor = self.last(self.norm(torch.relu(self.first(x)))) * self.scale
        return y


def chunked_in(dtype: torch.dtype, x: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """What the gradients of a mean square are when each chunk's are computed in ``dtype``."""
    net = Net().to(dtype)
    parameters = list(net.parameters())
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    outputs = [net(chunk.to(dtype)) for chunk in x.chunk(num_chunks)]
    whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
    whole.pow(2).mean().backward()
    assert whole.grad is not None
    for output, grad in zip(outputs, whole.grad.chunk(num_chunks), strict=True):
        for sum_, each in zip(total, torch.autograd.grad(output, parameters, grad), strict=True):
            sum_ += each
    return total


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float64, 1e-6)])
def test_gradients_are_computed_in_one_dtype_and_kept_in_the_other(
    slots: list[str], num_replicas: int, dtype: torch.dtype, tolerance: float
) -> None:
    with torch.device(slots[0]):
        net = Net()
    net.load_state_dict(Net().state_dict())
    model = dp.DistributedDataParallel(
        net, slots[:num_replicas], mixed_precision=dp.MixedPrecision(dtype)
    )
    x = torch.randn(6, 8)
    outer = x.to(slots[0]).requires_grad_()
    for _ in range(3):
        net.zero_grad()
        output = model(outer)
        assert output.dtype == dtype
        output.pow(2).mean().backward()
    for parameter, grad in zip(net.parameters(), chunked_in(dtype, x, num_replicas), strict=True):
        assert parameter.grad is not None
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        found = parameter.grad.cpu().double()
        torch.testing.assert_close(found, grad, rtol=tolerance, atol=tolerance)
    assert outer.grad is not None and outer.grad.dtype == torch.float32


def test_an_optimizer_step_reaches_the_replicas() -> None:
    net, x = Net(), torch.randn(6, 8)
    precision = dp.MixedPrecision(torch.float64)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        expected = Net().double()
        expected.load_state_dict(net.state_dict())
        torch.testing.assert_close(model(x), expected(x.double()))


def test_buffers_are_converted_where_that_is_asked_for() -> None:
    net = Net()
    precision = dp.MixedPrecision(buffer_dtype=torch.float64)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], mixed_precision=precision)
    assert net.scale.dtype == torch.float64
    assert model(torch.randn(4, 8)).dtype == torch.float32


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))


def _step(rank: int, world_size: int) -> tuple[list[torch.Tensor | None], str]:
    net = Net()
    # torch's own class; torch's wrapper itself cannot use it on the CPU, which has no events.
    config = _MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float32)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], mixed_precision=config)
    sent = {bucket.storage.flat.dtype for bucket in model.reducer.buckets.all if bucket.storage}
    model(_batch(rank)).pow(2).mean().backward()
    return [p.grad for p in net.parameters()], str(sent)


def test_gradients_are_sent_in_the_reduce_dtype(cluster: Cluster) -> None:
    each = [chunked_in(torch.float64, _batch(rank), 2) for rank in range(2)]
    for grads, sent in cluster.run(_step, 2):
        assert sent == "{torch.float32}"
        for grad, first, second in zip(grads, *each, strict=True):
            assert grad is not None and grad.dtype == torch.float32
            torch.testing.assert_close(grad.double(), (first + second) / 2, rtol=1e-5, atol=1e-6)
