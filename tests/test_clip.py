"""Clipping by the wrapper gives what torch's function gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.parallel.distributed import DistributedDataParallel
from tests.cluster import Cluster
from tests.nonfinite_cases import Net, make_net


def _backward(model: nn.Module, seed: int, device: str = "cpu") -> None:
    torch.manual_seed(seed)
    model(torch.randn(6, 4, device=device)).square().sum().backward()


def _compare(model: DistributedDataParallel[Net], **options: Any) -> tuple[Tensor, Tensor]:
    """Clip, and compare gradients with what torch makes of copies of them."""
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for copy, parameter in zip(copies, model.parameters(), strict=True):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    theirs = torch.nn.utils.clip_grad_norm_(copies, **options)
    ours = model.clip_grad_norm(**options)
    torch.testing.assert_close(ours, theirs)
    for copy, parameter in zip(copies, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad)
    return ours, theirs


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("action", ["ignore", "skip"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_torchs(slots: list[str], replicas: int, action: Any, view: bool) -> None:
    model = DistributedDataParallel(
        make_net(slots[0]),
        slots[:replicas],
        nonfinite=action,
        gradient_as_bucket_view=view,
    )
    for step, norm_type in enumerate((2.0, 2.0, 1.0, float("inf"), 2.0)):
        _backward(model, step, slots[0])
        ours, theirs = _compare(model, max_norm=0.5, norm_type=norm_type)
        assert torch.equal(ours, theirs)
        model.zero_grad()
    model.close()


def _scale(model: Any) -> None:
    model.module.b.weight.grad.mul_(7)


def _replace(model: Any) -> None:
    for _ in range(2):
        # The second may be where the first was.
        model.module.b.weight.grad = model.module.b.weight.grad * 3


def _drop(model: Any) -> None:
    model.module.a.bias.grad = None


def _data(model: Any) -> None:
    """Nothing tells of this write: not even ``_version``."""
    model.module.b.weight.grad.data.mul_(1000)


def _again(model: Any) -> None:
    _backward(model, 5)


def _bare(model: Any) -> None:
    _backward(model.module, 6)


def _unscale(model: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("change", [_scale, _replace, _drop, _data, _again, _bare, _unscale])
def test_what_is_in_grad_is_clipped(change: Any, view: bool) -> None:
    model = DistributedDataParallel(
        make_net(), ["cpu"], nonfinite="skip", gradient_as_bucket_view=view
    )
    model.clip_grad_norm(1.0)
    for step in range(3):
        _backward(model, step)
        change(model)
        _compare(model, max_norm=0.1)
        # Clipping has changed them too.
        _compare(model, max_norm=0.01)
        model.zero_grad()
    model.close()


def test_parameters_that_are_not_used() -> None:
    net = make_net()
    unused = nn.Parameter(torch.ones(3))
    net.unused = unused
    model = DistributedDataParallel(net, ["cpu"], nonfinite="skip")
    for step in range(3):
        _backward(model, step)
        _compare(model, max_norm=0.1)
        assert unused.grad is None
        model.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0
    model.close()


@pytest.mark.parametrize("action", ["ignore", "skip"])
def test_a_norm_that_is_not_finite(action: Any) -> None:
    """Though each gradient is."""
    net = nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(net, ["cpu"], nonfinite=action)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 1e30)).sum().backward()
        assert model.clip_grad_norm(1.0) == float("inf")
        model.zero_grad()
        model(torch.full((1, 2), 1e30)).sum().backward()
        with pytest.raises(RuntimeError, match=r"norm of order 2.0 .* (non-finite|is inf)"):
            model.clip_grad_norm(1.0, error_if_nonfinite=True)
    model.close()


def _processes(rank: int, world_size: int, view: bool) -> float:
    model = DistributedDataParallel(
        make_net(), ["cpu"], nonfinite="raise", gradient_as_bucket_view=view
    )
    bare = make_net()
    for step in range(3):
        _backward(model, 2 * step + rank)
        for other in range(world_size):
            torch.manual_seed(2 * step + other)
            (bare(torch.randn(6, 4)).square().sum() / world_size).backward()
        ours = model.clip_grad_norm(0.1)
        theirs = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
        torch.testing.assert_close(ours, theirs)
        for p, q in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        model.zero_grad()
        bare.zero_grad()
    model.close()
    return float(ours)


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_all_processes_clip_alike(cluster: Cluster, view: bool) -> None:
    first, second = cluster.run(_processes, 2, view)
    assert first == second
