"""Buffers are kept from replica 0, averaged, or synchronized. Oracle: the bare module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel, current_replica
from tests.models import assert_all_close


class Net(nn.Module):
    """Batch norm in the middle, in each of its three ranks."""

    def __init__(self, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3, momentum=momentum, affine=affine)
        self.out = nn.Linear(3, 4)
        self.norm1 = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        output: torch.Tensor = self.norm1(self.out(hidden))
        return output


def pair(slots: list[str], **options: Any) -> tuple[nn.Module, DataParallel[nn.Module]]:
    bare = Net().double().to(slots[0])
    return bare, DataParallel(copy.deepcopy(bare), slots, **options)


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    assert list(left.state_dict()) == list(right.state_dict())
    assert_all_close(right.state_dict().values(), left.state_dict().values())


@pytest.mark.parametrize("batch", [4, 7, 9])
def test_sync_equals_the_bare_module_on_the_whole_batch(slots: list[str], batch: int) -> None:
    bare, model = pair(slots, buffers="sync")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for _ in range(3):
        x = torch.randn(batch, 2, 5, 5, dtype=torch.double, device=slots[0])
        y = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
        for module, optimizer in zip((bare, model), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
        for p, q in zip(bare.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(bare, model)


def test_sync_has_second_derivatives(slots: list[str]) -> None:
    bare, model = pair(slots[:2], buffers="sync")
    x = torch.randn(5, 2, 4, 4, dtype=torch.double, device=slots[0])
    results = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(leaf).pow(3).sum(), leaf, create_graph=True)
        grad.pow(2).sum().backward()
        results.append([leaf.grad, *[p.grad for p in module.parameters()]])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("momentum", [None, 0.3])
@pytest.mark.parametrize("affine", [True, False])
def test_sync_with_other_options(slots: list[str], momentum: float | None, affine: bool) -> None:
    bare = Net(momentum, affine).double().to(slots[0])
    model = DataParallel(copy.deepcopy(bare), slots[:3], buffers="sync")
    for _ in range(2):
        x = torch.randn(8, 2, 5, 5, dtype=torch.double, device=slots[0])
        torch.testing.assert_close(model(x), bare(x))
    assert_same_state(bare, model)


def test_sync_leaves_evaluation_alone(slots: list[str]) -> None:
    bare, model = pair(slots, buffers="sync")
    x = torch.randn(6, 2, 5, 5, dtype=torch.double, device=slots[0])
    bare.eval(), model.eval()
    torch.testing.assert_close(model(x), bare(x))
    assert_same_state(bare, model)


def test_sync_keeps_precision_when_the_mean_is_large(slots: list[str]) -> None:
    bare = nn.BatchNorm1d(3).to(slots[0])
    model = DataParallel(copy.deepcopy(bare), slots[:2], buffers="sync")
    x = torch.randn(64, 3, device=slots[0]) + 1000.0
    torch.testing.assert_close(model(x), bare(x), rtol=1e-3, atol=1e-3)


def test_sync_under_a_checkpoint_is_a_clear_error(slots: list[str]) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return result

    model = DataParallel(Checkpointed().to(slots[0]), slots[:2], buffers="sync")
    x = torch.randn(6, 2, 5, 5, device=slots[0])
    with pytest.raises(RuntimeError, match=r"batch norm 'norm'.*activation checkpointing"):
        model(x)
    assert model.eval()(x).shape == (6, 4)


def test_a_synchronized_layer_outside_of_its_forward_is_a_clear_error(slots: list[str]) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.norm)
            output: torch.Tensor = self.norm(x)
            return output

    kept: list[nn.Module] = []
    x = torch.randn(4, 3, device=slots[0])
    DataParallel(Keeps().to(slots[0]), slots[:2], buffers="sync")(x)
    with pytest.raises(RuntimeError, match=r"batch norm 'norm' .* called outside of their forward"):
        kept[0](x)


def test_sync_of_a_single_value_is_refused_as_torch_refuses_it(slots: list[str]) -> None:
    model = DataParallel(nn.BatchNorm1d(3).to(slots[0]), slots[:2], buffers="sync")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, device=slots[0]))
    # One sample per replica is enough, since statistics are over the batch.
    assert model(torch.randn(2, 3, device=slots[0])).shape == (2, 3)


def test_a_replica_that_skips_the_layer_does_not_leave_the_others_waiting(
    slots: list[str],
) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = current_replica()
            return x if replica is not None and replica.index == 1 else self.norm(x)

    model = DataParallel(Skips().to(slots[0]), slots[:3], buffers="sync")
    with pytest.raises(RuntimeError, match="replica 1"):
        model(torch.randn(6, 3, device=slots[0]))


def test_by_default_the_buffers_of_replica_0_are_kept(slots: list[str]) -> None:
    bare, model = pair(slots)
    x = torch.randn(8, 2, 5, 5, dtype=torch.double, device=slots[0])
    model(x)
    bare(x[:2])
    assert_same_state(bare, model)


def test_mean_is_weighted_by_samples(slots: list[str]) -> None:
    class Remembers(nn.Module):
        seen: torch.Tensor
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.copy_(x.mean())
            self.calls += 1
            return x

    model = DataParallel(Remembers().to(slots[0]), slots[:3], buffers="mean")
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0], device=slots[0]).unsqueeze(1)
    model(x)
    torch.testing.assert_close(model.module.seen, x.mean())
    assert model.module.calls.item() == 1


def test_a_buffer_that_is_assigned_anew_is_kept(slots: list[str]) -> None:
    class Grows(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table = torch.cat([self.table, x.sum().reshape(1)])
            return x + self.table.sum()

    bare = Grows().to(slots[0])
    model = DataParallel(copy.deepcopy(bare), slots[:2])
    x = torch.ones(4, 1, device=slots[0])
    model(x), model(x)
    bare(x[:2]), bare(x[:2])
    torch.testing.assert_close(model.module.table, bare.table)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"buffers must be 'replica0', 'mean' or 'sync', but got 'average'$"
    ):
        DataParallel(nn.Linear(1, 1), ["cpu"], buffers="average")  # type: ignore[arg-type]


def test_layers_that_cannot_be_synchronized_are_refused(slots: list[str]) -> None:
    class Frozen(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    x = torch.randn(8, 3, device=slots[0])
    model = DataParallel(nn.Sequential(Frozen(3)).to(slots[0]), slots, buffers="sync")
    with pytest.raises(TypeError, match=r"batch norm '0' \(Frozen\).*a forward of its own"):
        model(x)
    inner = DataParallel(nn.BatchNorm1d(3), ["cpu"], buffers="sync")
    nested = DataParallel(nn.Sequential(inner), ["cpu", "cpu"], buffers="sync")
    with pytest.raises(TypeError, match="over the replicas of '0' within replicas"):
        nested(torch.randn(8, 3))


def test_sync_names_both_numbers_of_channels(slots: list[str]) -> None:
    model = DataParallel(nn.BatchNorm1d(3).to(slots[0]), slots, buffers="sync")
    with pytest.raises(RuntimeError, match=r"for 3 channels.*\(2, 5\) has 5"):
        model(torch.randn(8, 5, device=slots[0]))
    assert model.num_batches_tracked.item() == 0


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_forward_that_failed_leaves_no_statistics_behind(
    slots: list[str], wrapper: Any, failing: int
) -> None:
    class Fails(nn.Module):
        armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = current_replica()
            assert replica is not None
            if self.armed and replica.index == failing:
                raise ValueError("not now")
            return x

    def build() -> tuple[Any, Fails, nn.BatchNorm1d]:
        torch.manual_seed(0)
        fails, norm = Fails(), nn.BatchNorm1d(4)
        net = nn.Sequential(nn.Linear(6, 4), fails, norm).to(slots[0])
        return wrapper(net, slots[:3], buffers="mean"), fails, norm

    x = torch.randn(24, 6, device=slots[0])
    (model, fails, ours), (reference, _, theirs) = build(), build()
    for _ in range(2):
        fails.armed = True
        with pytest.raises(ValueError, match="not now"):
            model(x)
        fails.armed = False
        model(x)
        reference(x)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("buffers", ["replica0", "mean", "sync"])
def test_an_empty_batch(slots: list[str], buffers: Any) -> None:
    bare, model = pair(slots, buffers=buffers)
    x = torch.randn(0, 2, 5, 5, dtype=torch.double, device=slots[0])
    assert model(x).shape == bare(x).shape == (0, 4)
    assert_same_state(bare, model)


def test_mean_of_buffers_that_are_assigned_anew(slots: list[str]) -> None:
    class Assigns(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.mean(0)
            return x

    model = DataParallel(Assigns().to(slots[0]), slots[:3], buffers="mean")
    x = torch.randn(7, 3, device=slots[0])
    model(x)
    torch.testing.assert_close(model.module.mean, x.mean(0))


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_running_statistics_are_merged(slots: list[str], wrapper: Any) -> None:
    with torch.device(slots[0]):
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(8, 3, device=slots[0]) * 3 + 1
    wrapper(net, slots[:2], buffers="mean")(x)
    layers = [nn.BatchNorm1d(3) for _ in range(2)]
    for layer, chunk in zip(layers, x.cpu().chunk(2), strict=True):
        layer(chunk)
    for name in ("running_mean", "running_var"):
        first, second = (getattr(layer, name) for layer in layers)
        torch.testing.assert_close(getattr(net[0], name).cpu(), (first + second) / 2)


def test_means_of_buffers_that_share_memory() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.all: torch.Tensor
            self.some: torch.Tensor
            self.register_buffer("all", torch.zeros(4))
            self.register_buffer("some", self.all[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.all.add_(1)
            output: torch.Tensor = self.layer(x)
            return output

    wrappers: list[Any] = [DataParallel, DistributedDataParallel]
    for wrapper in wrappers:
        module = Counts()
        wrapper(module, ["cpu"] * 2, buffers="mean")(torch.ones(4, 1))
        assert module.all.tolist() == [1] * 4 and module.some.tolist() == [1, 1]
