"""Autocast and gradient scaling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dataparallel.virtual
from dataparallel.virtual import device_module as virtual
from tests.virtual.oracle import DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lists_of_operators(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 4, device=DEVICE), torch.randn(4, 4, device=DEVICE)
    image, kernel = torch.randn(1, 2, 5, 5, device=DEVICE), torch.randn(3, 2, 3, 3, device=DEVICE)
    heads = torch.randn(1, 2, 3, 4, device=DEVICE)
    target = torch.tensor([0, 1, 2, 3], device=DEVICE)
    with torch.autocast("virtual", dtype=dtype):
        assert torch.get_autocast_dtype("virtual") == dtype
        lower = x @ w
        for result in (
            lower,
            F.linear(x, w),
            F.conv2d(image, kernel),
            torch.bmm(x[None], w[None]),
            F.scaled_dot_product_attention(heads, heads, heads),
        ):
            assert result.dtype == dtype
        for result in (
            F.softmax(lower, 1),
            F.cross_entropy(lower, target),
            F.layer_norm(lower, (4,)),
            lower.norm(),
            lower.exp(),
            lower.sum(),
            F.mse_loss(lower, x),
        ):
            assert result.dtype == torch.float32
        assert F.relu(lower).dtype == dtype
        assert torch.addcmul(x, lower, lower).dtype == torch.float32
        assert torch.cat([x, lower]).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_what_autocast_refuses_and_does_not_concern() -> None:
    x = torch.rand(4, 4, device=DEVICE)
    with (
        torch.autocast("virtual"),
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        F.binary_cross_entropy(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32, "that of the CPU does not concern the device"
    assert virtual.get_amp_supported_dtype() == [torch.bfloat16, torch.float16]
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        torch.autocast("virtual", dtype=torch.float64)


@pytest.mark.parametrize("strict", [False, True])
def test_scaler(strict: bool) -> None:
    with dataparallel.virtual.strict_mode(strict):
        network = nn.Linear(4, 2).to(DEVICE)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("virtual", init_scale=4.0)
        x = torch.randn(3, 4, device=DEVICE)
        for bad in (False, True):
            before = network.weight.detach().clone()
            with torch.autocast("virtual", dtype=torch.float16):
                loss = network(x).square().mean()
            if bad:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(before, network.weight) is bad
        assert scaler.get_scale() == 2.0
