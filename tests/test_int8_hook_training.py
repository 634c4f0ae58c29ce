"""Training with the hook that sends int8, under our wrapper and under torch's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel, kernels
from dataparallel.reducer.int8_hook import Int8CompressState, int8_compress_hook
from tests.cluster import Cluster
from tests.comm_hook_cases import keep_group
from tests.comm_hook_training_cases import SMALL, batch, net, train


def state_of(hook: str | None) -> Int8CompressState:
    return Int8CompressState(error_feedback=hook == "int8")


def trained(rank: int, world_size: int, hook: str | None, replicas: int) -> tuple[float, Any]:
    """The loss after some steps, and the parameters and gradients then."""
    keep_group()
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
    if hook is not None:
        model.register_comm_hook(state_of(hook), int8_compress_hook)
    results = train(model, rank, 30, step_here=True)
    losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(0, 0), batch(0, 1))]
    model.close()
    return sum(losses).item(), results  # type: ignore[union-attr]


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_is_nearly_as_without(cluster: Cluster, replicas: int) -> None:
    expected = cluster.run(trained, 2, None, replicas)
    ours = cluster.run(trained, 2, "int8", replicas)
    for (loss, results), (expected_loss, expected_results) in zip(ours, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=0.02)
        assert not torch.equal(results[0], expected_results[0])
        for one, other in zip(results, ours[0][1], strict=True):
            assert torch.equal(one, other), "the ranks have different results"


class Loud(nn.Module):
    """One weight has large gradients that cancel out, and the others small ones that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(256))

    def forward(self, sign: float, target: float) -> Tensor:
        quiet: Tensor = 0.5 * (self.weights[1:] - target).square().sum()
        return quiet + 500 * sign * self.weights[0]


def loud(rank: int, world_size: int, hook: str | None) -> float:
    """How far the small ones get; the processes have different targets with the mean 1."""
    keep_group()
    model = DistributedDataParallel(Loud(), ["cpu"])
    if hook is not None:
        model.register_comm_hook(state_of(hook), int8_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(300):
        optimizer.zero_grad()
        model((-1.0) ** step, 0.5 + rank).backward()
        optimizer.step()
    model.close()
    return (model.module.weights[1:] - 1).square().mean().item()


def test_small_gradients_beside_a_large_one(cluster: Cluster) -> None:
    """Without feedback they are lost: nothing is learned."""
    without_hook = cluster.run(loud, 2, None)[0]
    feedback = cluster.run(loud, 2, "int8")[0]
    forgetful = cluster.run(loud, 2, "forgetful")[0]
    assert without_hook < 1e-4
    assert feedback < 0.02
    assert forgetful == pytest.approx(1.0)


# --- torch's wrapper -------------------------------------------------------------------------


def under_torchs(rank: int, world_size: int, hook: bool) -> list[Tensor]:
    keep_group()
    model = TorchsDDP(net())
    if hook:
        model.register_comm_hook(Int8CompressState(), int8_compress_hook)
    return train(model, rank, 20, step_here=True)


def test_torchs_wrapper_with_one_bucket(cluster: Cluster) -> None:
    expected = cluster.run(under_torchs, 2, False)[0]
    first, second = cluster.run(under_torchs, 2, True)
    for one, other, exact in zip(first, second, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(first[0], expected[0])


# --- failures --------------------------------------------------------------------------------


class Broken(Exception):
    pass


def recovers(
    rank: int, world_size: int, function: str, ranks: tuple[int, ...]
) -> tuple[str, list[Tensor]]:
    """A kernel fails once, in the second step and on some ranks."""
    keep_group()
    model = DistributedDataParallel(net(), ["cpu"], bucket_cap_mb=SMALL, timeout=20.0)
    model.register_comm_hook(None, "int8_compress")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = {"count": 0, "fail at": -1}

    def broken(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls["count"] += 1
        if calls["count"] == calls["fail at"]:
            raise Broken("no")
        return original(*args, **kwargs)

    text = ""
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(kernels, function, functools.partial(broken, getattr(kernels, function)))
        for step in range(5):
            if step == 1 and rank in ranks:
                # Of the second bucket: it has so many calls with two processes.
                calls["fail at"] = calls["count"] + {"compress": 4, "decompress": 5}[function]
            x, y = batch(step, rank)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            try:
                loss.backward()
            except Exception as error:
                assert step == 1, f"{type(error)} {error}"
                text = f"{type(error).__name__}: {error}"
                continue
            optimizer.step()
    model.close()
    return text, [p.detach().clone() for p in model.parameters()]


def without_second_step(rank: int, world_size: int) -> list[Tensor]:
    model = TorchsDDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 2, 3, 4):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["both", "one"])
@pytest.mark.parametrize("function", ["compress", "decompress"])
def test_a_step_after_a_failure(cluster: Cluster, function: str, ranks: tuple[int, ...]) -> None:
    """In the hook itself, and in a callback."""
    expected = cluster.run(without_second_step, 2)
    results = cluster.run(recovers, 2, function, ranks)
    assert "Broken: no\nin the communication hook for bucket 1 (" in results[1][0]
    if 0 not in ranks:
        assert "rank 1" in results[0][0], "the others are not told who has failed"
    for _, found in results:
        torch.testing.assert_close(found, expected[0], rtol=0, atol=0.02)
        assert all(map(torch.equal, found, results[0][1]))
