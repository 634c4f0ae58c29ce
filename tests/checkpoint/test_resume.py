"""A training that goes on from a checkpoint equals one that was never interrupted, bit for bit."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from dataparallel import DataParallel, DistributedDataParallel, ShardedOptimizer, checkpoint


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


def build_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2)
    )


@dataclass
class Training:
    """A model with all that trains it."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: Any = None

    def steps(self, count: int) -> None:
        for _ in range(count):
            # Draws from all generators, whose states therefore matter.
            x = torch.rand(8, 4) + random.random() + float(numpy.random.rand())
            self.model(x).square().sum().backward()
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()

    def save(self, directory: pathlib.Path, **options: Any) -> checkpoint.Saving:
        return checkpoint.save(
            directory, self.model, self.optimizer, self.scheduler, step=3, **options
        )

    def load(self, directory: pathlib.Path, **options: Any) -> checkpoint.Loaded:
        return checkpoint.load(directory, self.model, self.optimizer, self.scheduler, **options)

    def result(self) -> dict[str, Tensor]:
        return {
            **{name: value.clone() for name, value in self.model.state_dict().items()},
            "drawn": torch.rand(4),
            "python": torch.tensor(random.random()),
            "numpy": torch.tensor(float(numpy.random.rand())),
        }


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(value.isfinite().all() for value in expected.values())
    different = [k for k in expected if not torch.equal(got[k].cpu(), expected[k].cpu())]
    assert not different
    assert got.keys() == expected.keys()


def check_resume(make: Callable[[], Training], directory: pathlib.Path, **options: Any) -> None:
    """Three steps, a checkpoint, three more; and the same from the checkpoint."""
    torch.manual_seed(5)
    training = make()
    training.steps(3)
    training.save(directory, **options).wait()
    training.steps(3)
    expected = training.result()
    other = make()
    other.steps(1)
    loaded = other.load(directory)
    assert (loaded.step, loaded.number, loaded.rejected) == (3, 0, ())
    other.steps(3)
    assert_equal(other.result(), expected)


class _OnLoss(lr_scheduler.ReduceLROnPlateau):
    """Steps with a loss that does not fall."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, patience=1)

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:  # type: ignore[override]
        super().step(metrics)


def with_optimizer(make: Callable[[Any], Optimizer]) -> Training:
    model = DataParallel(build_net(), ["cpu", "cpu"])
    return Training(model, make(model.parameters()))


def with_scheduler(make: Callable[[Optimizer], Any]) -> Training:
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.5)
    return Training(net, optimizer, make(optimizer))


def of_replicas(device: str) -> Training:
    slots = ["cpu"] * 4 if device == "cpu" else [f"virtual:{i}" for i in range(4)]
    model = DistributedDataParallel(build_net().to(slots[0]), slots)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def sharded() -> Training:
    model = DataParallel(build_net().to("virtual:0"), ["virtual:0", "virtual:1"])
    return Training(model, ShardedOptimizer(torch.optim.AdamW, model, lr=0.01))


TRAININGS: dict[str, Callable[[], Training]] = {
    "amsgrad": lambda: with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)),
    "capturable": lambda: with_optimizer(
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False)
    ),
    "momentum": lambda: with_optimizer(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "adafactor": lambda: with_optimizer(lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "rprop": lambda: with_optimizer(lambda p: torch.optim.Rprop(p, lr=0.01)),
    "one cycle": lambda: with_scheduler(lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=20)),
    "milestones": lambda: with_scheduler(lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4])),
    "lambda": lambda: with_scheduler(lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "plateau": lambda: with_scheduler(_OnLoss),
    "sequential": lambda: with_scheduler(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.PolynomialLR(o)], milestones=[4]
        )
    ),
    "CPU replicas": lambda: of_replicas("cpu"),
    "virtual replicas": lambda: of_replicas("virtual"),
    "sharded": sharded,
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on(name: str, tmp_path: pathlib.Path) -> None:
    check_resume(TRAININGS[name], tmp_path, asynchronous="replicas" in name)


def test_with_optimizers_in_backward(tmp_path: pathlib.Path) -> None:
    found: dict[int, Any] = {}

    def make() -> Training:
        model = DistributedDataParallel(build_net(), ["cpu", "cpu"])
        found[id(model)] = model.step_in_backward(torch.optim.AdamW, lr=0.01)
        return Training(model, None)

    torch.manual_seed(5)
    training, other = make(), make()
    training.steps(3)
    checkpoint.save(tmp_path, training.model, found[id(training.model)], step=3)
    training.steps(2)
    expected = training.result()
    checkpoint.load(tmp_path, other.model, found[id(other.model)])
    other.steps(2)
    assert_equal(other.result(), expected)


def test_a_plain_optimizer_goes_on_from_a_sharded_one(tmp_path: pathlib.Path) -> None:
    net = build_net().eval()
    model = DataParallel(net, ["cpu", "cpu"])
    training = Training(model, ShardedOptimizer(torch.optim.AdamW, model, lr=0.01))
    training.steps(3)
    training.save(tmp_path)
    training.steps(3)
    plain = build_net().eval()
    # With another number of replicas, and a module that was never in a wrapper.
    other = Training(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    other.load(tmp_path)
    other.steps(3)
    for got, expected in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_parameters_in_another_order(tmp_path: pathlib.Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam([net.weight, net.bias])
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, net, optimizer, step=1)
    turned = torch.optim.Adam([net.bias, net.weight])
    checkpoint.load(tmp_path, net, turned)
    for parameter in (net.weight, net.bias):
        ours, theirs = turned.state[parameter], optimizer.state[parameter]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_tied_weights_are_saved_once(tmp_path: pathlib.Path) -> None:
    net: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].weight = net[0].weight
    checkpoint.save(tmp_path, net, step=0)
    size = checkpoint.generations(tmp_path)[0].bytes
    assert 64 * 64 * 4 < size < 2 * 64 * 64 * 4
    expected = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.zero_()
    checkpoint.load(tmp_path, net)
    assert net[1].weight is net[0].weight and torch.equal(net[0].weight, expected)


def test_accelerators_that_were_not_there(tmp_path: pathlib.Path) -> None:
    def draws(devices: list[str]) -> list[Tensor]:
        model = DataParallel(nn.Linear(2, 2).to(devices[0]), devices)
        checkpoint.load(tmp_path, model)
        return [torch.rand(4, device=device).cpu() for device in devices]

    model = DataParallel(nn.Linear(2, 2).to("virtual:0"), ["virtual:0", "virtual:1"])
    torch.rand(3, device="virtual:1")
    checkpoint.save(tmp_path, model, step=0)
    expected = [torch.rand(4, device=f"virtual:{i}").cpu() for i in range(2)]
    first = draws([f"virtual:{i}" for i in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=False))
    again = draws([f"virtual:{i}" for i in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(each.tolist()) for each in first}) == 4


def test_random_states_once_more(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, step=0)
    expected = torch.rand(3)
    loaded = checkpoint.load(tmp_path)
    torch.rand(7)
    loaded.restore_rng()
    assert torch.equal(torch.rand(3), expected)
    checkpoint.save(tmp_path, step=1, rng=False)
    with pytest.raises(checkpoint.CheckpointError, match="save with rng=True"):
        checkpoint.load(tmp_path).restore_rng()


def test_objects_of_the_user(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    other = nn.Linear(2, 2)
    states = {"generator": generator, "scaler": scaler, "other": other}
    data = {"best": 0.5, "names": ("a", "b"), 3: torch.arange(3)}
    checkpoint.save(tmp_path, step=7, epoch=2, user=data, states=states)
    expected = torch.rand(2, generator=generator), other.weight.detach().clone()
    scaler.update(2.0)
    with torch.no_grad():
        other.weight.zero_()
    loaded = checkpoint.load(tmp_path, states=states)
    assert (loaded.step, loaded.epoch, loaded.processes) == (7, 2, 1)
    assert loaded.user["names"] == ("a", "b") and torch.equal(loaded.user[3], torch.arange(3))
    assert torch.equal(torch.rand(2, generator=generator), expected[0])
    assert torch.equal(other.weight, expected[1]) and scaler.get_scale() == 8.0
