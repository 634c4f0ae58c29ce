"""What does not fit is refused with both sides named, and nothing is changed then."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import checkpoint
from tests.checkpoint.files import folder, spoil


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


def build(width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)).to(dtype)


def trained(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return optimizer


def wider(net: nn.Module) -> tuple[nn.Module, Any]:
    net = build(4)
    return net, torch.optim.Adam(net.parameters())


def coarser(net: nn.Module) -> tuple[nn.Module, Any]:
    net = build(dtype=torch.float64)
    return net, torch.optim.Adam(net.parameters())


def longer(net: nn.Module) -> tuple[nn.Module, Any]:
    net = nn.Sequential(*build(), nn.Linear(3, 3))
    return net, torch.optim.Adam(net.parameters())


def shorter(net: nn.Module) -> tuple[nn.Module, Any]:
    net = build()[:1]
    return net, torch.optim.Adam(net.parameters())


def other_class(net: nn.Module) -> tuple[nn.Module, Any]:
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def other_groups(net: nn.Module) -> tuple[nn.Module, Any]:
    groups = [{"params": [parameter]} for parameter in net.parameters()]
    return net, torch.optim.Adam(groups)


def other_names(net: nn.Module) -> tuple[nn.Module, Any]:
    parameters = [nn.Parameter(torch.zeros_like(p)) for p in net.parameters()]
    net.register_parameter("extra", parameters[0])
    parameters[1:] = list(net.parameters())[1:4]
    return net, torch.optim.Adam(parameters)


MISFITS: dict[Callable[[nn.Module], tuple[nn.Module, Any]], str] = {
    wider: r"model\.0\.weight has the shape \(3, 2\) in the checkpoint, but \(4, 2\) here",
    coarser: r"model\.0\.weight is float32 in the checkpoint, but float64 here",
    longer: r"model\.2\.weight is in the module only",
    shorter: r"model\.1\.weight is in the checkpoint only",
    other_class: r"optimizer is Adam in the checkpoint, but SGD here",
    other_groups: r"optimizer has 1 parameter groups in the checkpoint, but 4 here",
    other_names: r"model\.extra is in the module only|has 0\.weight in the checkpoint, but extra",
}


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.__name__)
def test_what_does_not_fit_changes_nothing(
    misfit: Callable[[nn.Module], tuple[nn.Module, Any]], tmp_path: pathlib.Path
) -> None:
    net = build()
    optimizer = trained(net)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    other, its_optimizer = misfit(build())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(checkpoint.CheckpointError, match=MISFITS[misfit]):
        checkpoint.load(tmp_path, other, its_optimizer)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    assert not its_optimizer.state and torch.equal(drawn, torch.get_rng_state())
    # And the next load works.
    checkpoint.load(tmp_path, net, optimizer)


def test_a_part_that_was_not_saved(tmp_path: pathlib.Path) -> None:
    net = build()
    checkpoint.save(tmp_path, net, step=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    message = "holds model, rng, user, but optimizer is to be loaded; .* strict=False"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(tmp_path, net, optimizer)
    assert checkpoint.load(tmp_path, net, optimizer, strict=False).step == 1


def test_not_strict(tmp_path: pathlib.Path) -> None:
    net: Any = build()
    checkpoint.save(tmp_path, net, step=1)
    other: Any = nn.Sequential(*build(dtype=torch.float64), nn.Linear(3, 3))
    kept = other[2].weight.clone()
    checkpoint.load(tmp_path, other, strict=False)
    assert torch.equal(other[0].weight, net[0].weight.double())
    assert torch.equal(other[2].weight, kept)
    with pytest.raises(checkpoint.CheckpointError, match=r"shape \(3, 2\).*\(4, 2\) here"):
        checkpoint.load(tmp_path, build(4), strict=False)


def test_a_wrong_scheduler(tmp_path: pathlib.Path) -> None:
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    checkpoint.save(tmp_path, net, optimizer, saved, step=1)
    with pytest.raises(checkpoint.CheckpointError, match="scheduler"):
        checkpoint.load(
            tmp_path, net, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
        )


class Failing:
    """Takes a state, and fails then."""

    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["value"] == 5 and self.value != 5:
            self.value = -1
            raise ZeroDivisionError("the user's own")
        self.value = state["value"]


class LateModule(nn.Module):
    """Fails after torch has loaded a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fails = False

    def set_extra_state(self, state: Any) -> None:
        if self.fails:
            raise ZeroDivisionError("the user's own")

    def get_extra_state(self) -> Any:
        return {"a": (1, 2)}


@pytest.mark.parametrize("which", ["object", "module"])
def test_a_failure_in_the_middle_is_taken_back(which: str, tmp_path: pathlib.Path) -> None:
    net, failing = LateModule(), Failing()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    failing.value = 5
    net.linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, net, optimizer, step=1, states={"failing": failing})
    optimizer.step()
    failing.value = 2 if which == "object" else 5
    net.fails = which == "module"
    before = net.linear.weight.clone()
    moments = {k: v.clone() for k, v in optimizer.state[net.linear.weight].items()}
    drawn = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        checkpoint.load(tmp_path, net, optimizer, states={"failing": failing})
    assert torch.equal(net.linear.weight, before)
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.state[net.linear.weight].items())
    assert failing.value == (2 if which == "object" else 5)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_nothing_to_load(tmp_path: pathlib.Path) -> None:
    net = build()
    with pytest.raises(checkpoint.NoCheckpoint, match=r"nothing was saved in .*missing_ok=True"):
        checkpoint.load(tmp_path / "new", net)
    loaded = checkpoint.load(tmp_path / "new", net, missing_ok=True)
    assert (loaded.step, loaded.number, loaded.user) == (0, None, None)


def test_the_last_good_generation(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    net = build()
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, net, step=step)
    spoil(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "dataparallel"):
        loaded = checkpoint.load(tmp_path, net, missing_ok=True)
    assert (loaded.step, loaded.number) == (20, 1)
    assert [number for number, _ in loaded.rejected] == [2]
    assert "generation 2" in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match=r"generation 2 .* is not good"):
        checkpoint.load(tmp_path, net, number=2)
    assert checkpoint.load(tmp_path, net, number=0).step == 10
    spoil(tmp_path, 1)
    spoil(tmp_path, 0)
    # What was saved and is lost is no new beginning.
    with pytest.raises(checkpoint.CheckpointError, match=r"no generation in .* is good"):
        checkpoint.load(tmp_path, net, missing_ok=True)


def test_what_was_loaded_does_not_go_for_what_is_damaged(tmp_path: pathlib.Path) -> None:
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step=step)
    spoil(tmp_path, 1)
    spoil(tmp_path, 2)
    assert checkpoint.load(tmp_path).number == 0
    checkpoint.save(tmp_path, step=40)
    assert 0 in [info.number for info in checkpoint.generations(tmp_path)]


def test_the_directory_that_was_saved_to_last(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, memory, net = tmp_path / "disk", tmp_path / "memory", build()
    places = [memory, disk]
    assert checkpoint.load(places, net, missing_ok=True).number is None
    checkpoint.save(disk, net, step=10)
    assert checkpoint.load(places, net, missing_ok=True).step == 10
    checkpoint.save(memory, net, step=13)
    assert checkpoint.load(places, net).step == 13
    checkpoint.save(disk, net, step=20)
    assert checkpoint.load(places, net).step == 20
    # After a return to an earlier step what was given up is not found again.
    checkpoint.save(memory, net, step=11)
    assert checkpoint.load(places, net).step == 11
    spoil(memory, 1)
    with caplog.at_level(logging.WARNING, "dataparallel"):
        assert checkpoint.load(places, net).step == 20
    assert "generation 1 in" in caplog.text and "is not used, but 0" in caplog.text
    spoil(memory, 0)
    with caplog.at_level(logging.WARNING, "dataparallel"):
        assert checkpoint.load(places, net).step == 20
    assert "a directory of checkpoints is not used: no generation in" in caplog.text
    with pytest.raises(ValueError, match="2 directories; pass one"):
        checkpoint.load(places, net, number=1)


def test_another_format(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, step=0)
    path = folder(tmp_path, 0) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":7'))
    with pytest.raises(checkpoint.CheckpointError, match="has the format 7, but this version"):
        checkpoint.load(tmp_path)


def test_weights_for_other_programs(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file

    net: Any = build()
    net[0].tied = net[0].weight
    checkpoint.save(tmp_path, net, step=0)
    with torch.no_grad():
        net[0].weight.zero_()
    checkpoint.save(tmp_path, net, step=1)
    checkpoint.export(tmp_path, tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    assert weights.keys() == net.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    checkpoint.export(tmp_path, tmp_path / "weights.safetensors", number=0)
    assert load_file(tmp_path / "weights.safetensors")["0.tied"].any()
    spoil(tmp_path, 1)
    checkpoint.export(tmp_path, tmp_path / "older.safetensors")
    assert load_file(tmp_path / "older.safetensors")["0.weight"].any()
    checkpoint.save(tmp_path / "without", step=0)
    with pytest.raises(checkpoint.CheckpointError, match="holds no model"):
        checkpoint.export(tmp_path / "without", tmp_path / "none.safetensors")
    with pytest.raises(checkpoint.NoCheckpoint, match="nothing was saved"):
        checkpoint.export(tmp_path / "new", tmp_path / "none.safetensors")
