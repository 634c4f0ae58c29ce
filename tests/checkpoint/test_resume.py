"""A training that goes on from a checkpoint equals one that was never interrupted, bit for bit."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from dataparallel import DataParallel, DistributedDataParallel, ShardedOptimizer, checkpoint


def build_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2)
    )


@dataclass
class Training:
    """A model with all that trains it."""

    model: nn.Module
    optimizer: Any
    scheduler: Any = None
    in_backward: bool = False

    def steps(self, count: int) -> None:
        for _ in range(count):
            # Draws from all generators, whose states therefore matter.
            x = torch.rand(8, 4) + random.random() + float(numpy.random.rand())
            self.model(x).square().sum().backward()
            if not self.in_backward:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()

    def state(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler

    def result(self) -> dict[str, Tensor]:
        return {
            **{name: value.clone() for name, value in self.model.state_dict().items()},
            "drawn": torch.rand(4),
            "python": torch.tensor(random.random()),
            "numpy": torch.tensor(float(numpy.random.rand())),
        }


def with_optimizer(make: Callable[[Any], Optimizer]) -> Training:
    model = DataParallel(build_net(), ["cpu", "cpu"])
    return Training(model, make(model.parameters()))


def with_scheduler(make: Callable[[Optimizer], Any]) -> Training:
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.5)
    return Training(net, optimizer, make(optimizer))


def of_replicas(device: str, in_backward: bool = False) -> Training:
    slots = ["cpu"] * 4 if device == "cpu" else [f"virtual:{i}" for i in range(4)]
    model = DistributedDataParallel(build_net().to(slots[0]), slots)
    if in_backward:
        optimizer: Any = model.step_in_backward(torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Training(model, optimizer, in_backward=in_backward)


def sharded() -> Training:
    model = DataParallel(build_net().to("virtual:0"), ["virtual:0", "virtual:1"])
    return Training(model, ShardedOptimizer(torch.optim.AdamW, model, lr=0.01))


TRAININGS: dict[str, Callable[[], Training]] = {
    "amsgrad": lambda: with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)),
    "capturable": lambda: with_optimizer(
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False)
    ),
    "adafactor": lambda: with_optimizer(lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "one cycle": lambda: with_scheduler(lambda o: lr_scheduler.OneCycleLR(o, 1e-3, total_steps=20)),
    "milestones": lambda: with_scheduler(lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4])),
    "lambda": lambda: with_scheduler(lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "sequential": lambda: with_scheduler(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.PolynomialLR(o)], milestones=[4]
        )
    ),
    "CPU replicas": lambda: of_replicas("cpu"),
    "virtual replicas": lambda: of_replicas("virtual"),
    "in backward": lambda: of_replicas("cpu", in_backward=True),
    "sharded": sharded,
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_goes_on(name: str, tmp_path: pathlib.Path) -> None:
    """Three steps, a checkpoint, three more; and the same from the checkpoint."""
    make, is_asynchronous = TRAININGS[name], "replicas" in name
    torch.manual_seed(5)
    training = make()
    training.steps(3)
    checkpoint.save(tmp_path, *training.state(), step=3, asynchronous=is_asynchronous).wait()
    training.steps(3)
    expected = training.result()
    other = make()
    other.steps(1)
    loaded = checkpoint.load(tmp_path, *other.state())
    assert (loaded.step, loaded.number, loaded.rejected) == (3, 0, ())
    other.steps(3)
    got = other.result()
    assert got.keys() == expected.keys()
    assert all(value.isfinite().all() for value in expected.values())
    assert not [name for name, value in expected.items() if not torch.equal(got[name], value)]


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
