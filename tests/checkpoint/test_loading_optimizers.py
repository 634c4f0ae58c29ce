"""The state of an optimizer goes to one of its kind, in the types that it can work with."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, ShardedOptimizer, checkpoint


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    checkpoint.close()


class Exact(torch.optim.Optimizer):
    """Keeps accurate values of coarse parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                exact = self.state[p].setdefault("exact", p.detach().double() + 1e-9)
                exact.sub_(p.grad, alpha=0.1)
                p.data.copy_(exact)


def stepped(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    net = nn.Linear(2, 3).to(dtype)
    optimizer = kind(net.parameters(), **options)
    step(net, optimizer)
    return net, optimizer


def step(net: Any, optimizer: Any) -> None:
    net(torch.ones(1, 2, dtype=net.weight.dtype)).sum().backward()
    optimizer.step()


def moments(optimizer: Any) -> list[dict[str, Tensor]]:
    return list(optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("foreach", [False, True])
def test_into_coarser_parameters(foreach: bool, tmp_path: pathlib.Path) -> None:
    net, optimizer = stepped(torch.optim.AdamW, foreach=foreach)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    coarse = nn.Linear(2, 3).bfloat16()
    its = torch.optim.AdamW(coarse.parameters())
    checkpoint.load(tmp_path, coarse, its, strict=False)
    assert [m["exp_avg"].dtype for m in moments(its)] == [torch.bfloat16] * 2
    step(coarse, its)
    # And what was accurate beside coarse parameters stays so.
    net, exact = stepped(Exact, torch.bfloat16)
    checkpoint.save(tmp_path, net, exact, step=2)
    for dtype in (torch.bfloat16, torch.float16):
        other = nn.Linear(2, 3).to(dtype)
        loaded = Exact(other.parameters())
        checkpoint.load(tmp_path, other, loaded, strict=False)
        for got, expected in zip(moments(loaded), moments(exact), strict=True):
            assert torch.equal(got["exact"], expected["exact"])


class LateModule(nn.Linear):
    """Is loaded after the optimizer, and takes no state once."""

    fails = False

    def _load_from_state_dict(self, *arguments: Any) -> None:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        super()._load_from_state_dict(*arguments)


def test_what_is_taken_back_is_not_rounded(tmp_path: pathlib.Path) -> None:
    net, optimizer = stepped(Exact, torch.bfloat16)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    late = LateModule(2, 3).bfloat16()
    its = Exact(late.parameters())
    step(late, its)
    before = [m["exact"].clone() for m in moments(its)]
    late.fails = True
    with pytest.raises(ZeroDivisionError):
        checkpoint.load(tmp_path, late, its)
    for got, expected in zip(moments(its), before, strict=True):
        assert got["exact"].dtype == torch.float64 and torch.equal(got["exact"], expected)


@pytest.mark.parametrize("other", ["Adamax", "AdamW", "RAdam"])
def test_another_class(other: str, tmp_path: pathlib.Path) -> None:
    net, optimizer = stepped(torch.optim.Adam)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    its = getattr(torch.optim, other)(net.parameters())
    with pytest.raises(
        checkpoint.CheckpointError, match=f"optimizer is Adam in the .*, but {other} here"
    ):
        checkpoint.load(tmp_path, net, its)
    assert not its.state
    if other == "AdamW":
        checkpoint.load(tmp_path, net, its, strict=False)
        step(net, its)


def test_the_class_is_that_which_steps(tmp_path: pathlib.Path) -> None:
    net = nn.Linear(2, 3)
    model = DataParallel(net, ["cpu", "cpu"])
    sharded = ShardedOptimizer(torch.optim.AdamW, model)
    step_in = DistributedDataParallel(nn.Linear(2, 3), ["cpu", "cpu"])
    in_backward = step_in.step_in_backward(torch.optim.AdamW)
    for number, (module, optimizer) in enumerate([(model, sharded), (step_in, in_backward)]):
        checkpoint.save(tmp_path, module, optimizer, step=number)
        checkpoint.load(tmp_path, net, torch.optim.AdamW(net.parameters()))
        with pytest.raises(
            checkpoint.CheckpointError, match=r"optimizer is AdamW in the .*, but Adam here"
        ):
            checkpoint.load(tmp_path, net, torch.optim.Adam(net.parameters()))


def test_momentum_may_come_and_go(tmp_path: pathlib.Path) -> None:
    for number, (saved, here) in enumerate([(0.9, 0.0), (0.0, 0.9)]):
        net, optimizer = stepped(torch.optim.SGD, lr=0.1, momentum=saved)
        checkpoint.save(tmp_path, net, optimizer, step=number)
        for again in (False, True):
            its = torch.optim.SGD(net.parameters(), lr=0.1, momentum=here)
            if again:
                step(net, its)
            checkpoint.load(tmp_path, net, its)
            assert its.param_groups[0]["momentum"] == saved
            step(net, its)


class Other(Exact):
    """Keeps state of another shape."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exact"] = torch.zeros(7)


def test_state_of_another_shape(tmp_path: pathlib.Path) -> None:
    net, optimizer = stepped(Exact)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    other, its = stepped(Other)
    message = r"exact of parameter 0 has the shape \[3, 2\] in the checkpoint, but \[7\] here"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(tmp_path, other, its, strict=False)
