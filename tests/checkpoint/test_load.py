"""An entry that does not fit is refused with both sides named."""

from __future__ import annotations

import gc
import logging
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, ShardedOptimizer, checkpoint
from tests.checkpoint.helpers import Box, spoil


def build(width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)).to(dtype)


def step(net: Any, optimizer: Any) -> None:
    net(torch.randn(4, 2).to(next(net.parameters()))).sum().backward()
    optimizer.step()


def adam(net: nn.Module) -> tuple[nn.Module, Any]:
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


def other_names(net: nn.Module) -> tuple[nn.Module, Any]:
    parameters = [nn.Parameter(torch.zeros_like(p)) for p in net.parameters()]
    net.register_parameter("extra", parameters[0])
    return net, torch.optim.Adam([*parameters[:1], *list(net.parameters())[1:4]])


def other_groups(net: nn.Module) -> tuple[nn.Module, Any]:
    return net, torch.optim.Adam([{"params": [parameter]} for parameter in net.parameters()])


MISFITS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "wider": (
        lambda: adam(build(4)),
        r"0\.weight: .* shape torch\.Size\(\[3, 2\]\) from .*\[4, 2",
    ),
    "class": (
        lambda: (build(), torch.optim.AdamW(build().parameters())),
        "optimizer: it is Adam in the checkpoint, but AdamW here",
    ),
    "groups": (lambda: other_groups(build()), "different number of parameter groups"),
    "names": (lambda: other_names(build()), r"has 0\.weight, .* in the checkpoint, but extra"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused(misfit: str, tmp_path: pathlib.Path) -> None:
    net, optimizer = adam(build())
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    make, message = MISFITS[misfit]
    other, its_optimizer = make()
    with pytest.raises(checkpoint.CheckpointError, match=f"(?s)does not fit.*{message}"):
        checkpoint.load(tmp_path, other, its_optimizer)
    # And the next load works.
    checkpoint.load(tmp_path, net, optimizer)


def test_not_strict(tmp_path: pathlib.Path) -> None:
    net: Any = build()
    checkpoint.save(tmp_path, net, step=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    message = "holds model, rng, user, but optimizer is to be loaded; .* strict=False"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(tmp_path, net, optimizer)
    assert checkpoint.load(tmp_path, net, optimizer, strict=False).step == 1
    other: Any = nn.Sequential(*build(dtype=torch.float64), nn.Linear(3, 3))
    with pytest.raises(checkpoint.CheckpointError, match=r"Missing key\(s\).*2\.weight"):
        checkpoint.load(tmp_path, other)
    kept = other[2].weight.clone()
    checkpoint.load(tmp_path, other, strict=False)
    assert torch.equal(other[0].weight, net[0].weight.double())
    assert torch.equal(other[2].weight, kept)


def test_an_error_of_an_object_names_it(tmp_path: pathlib.Path) -> None:
    box = Box(5)
    checkpoint.save(tmp_path, step=1, states={"box": box})
    box.error = ZeroDivisionError
    with pytest.raises(checkpoint.CheckpointError, match="box: the user's own") as caught:
        checkpoint.load(tmp_path, states={"box": box})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- which generation ----------------------------------------------------------------------------


def test_the_last_good_generation(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    net = build()
    for number in (10, 20, 30):
        checkpoint.save(tmp_path, net, step=number)
    spoil(tmp_path, 2)
    with caplog.at_level(logging.WARNING, "dataparallel"):
        loaded = checkpoint.load(tmp_path, net, missing_ok=True)
    assert (loaded.step, loaded.number) == (20, 1)
    assert [number for number, _ in loaded.rejected] == [2]
    assert "generation 2" in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match=r"(?s)generation 2 is not good .*damaged"):
        checkpoint.load(tmp_path, net, number=2)
    assert checkpoint.load(tmp_path, net, number=0).step == 10
    spoil(tmp_path, 1)
    spoil(tmp_path, 0)
    # A lost checkpoint is no new beginning.
    with pytest.raises(checkpoint.CheckpointError, match=r"no generation is good"):
        checkpoint.load(tmp_path, net, missing_ok=True)


def test_weights_for_other_programs(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file

    net: Any = build()
    net[0].tied = net[0].weight
    file = tmp_path / "weights.safetensors"
    for number in range(2):
        checkpoint.save(tmp_path, net, step=number)
        checkpoint.export(tmp_path, file)
        weights = load_file(file)
        assert weights.keys() == net.state_dict().keys()
        assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
        net[0].weight.data.zero_()
    spoil(tmp_path, 1)
    for options in ({}, {"number": 0}):
        checkpoint.export(tmp_path, file, **options)
        assert load_file(file)["0.tied"].any()
    checkpoint.save(tmp_path / "without", step=0)
    with pytest.raises(checkpoint.CheckpointError, match="holds no model"):
        checkpoint.export(tmp_path / "without", file)


# --- memory --------------------------------------------------------------------------------------


def test_parts_have_tensors_of_their_own(tmp_path: pathlib.Path) -> None:
    box = Box(torch.ones(3))
    checkpoint.save(tmp_path, step=1, states={"box": box}, user={"x": box.value})
    checkpoint.load(tmp_path, states={"box": box}).user["x"].zero_()
    assert bool(box.value.all())


def test_nothing_is_kept_alive(tmp_path: pathlib.Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    loaded = checkpoint.load(tmp_path, net, optimizer)
    alive = [weakref.ref(each) for each in (net, optimizer)]
    del net, optimizer
    gc.collect()
    assert [each() for each in alive] == [None, None] and loaded.step == 1


# --- optimizers ----------------------------------------------------------------------------------


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


def moments(optimizer: Any) -> list[dict[str, Tensor]]:
    return list(optimizer.state_dict()["state"].values())


def test_state_keeps_a_dtype_of_its_own(tmp_path: pathlib.Path) -> None:
    net, coarse = nn.Linear(2, 3), nn.Linear(2, 3).bfloat16()
    optimizer, its = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(coarse.parameters())
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer, step=1)
    checkpoint.load(tmp_path, coarse, its)
    # The moments' dtype goes with that of the parameter.
    assert [m["exp_avg"].dtype for m in moments(its)] == [torch.bfloat16] * 2
    exact, loaded = Exact(coarse.parameters()), Exact(coarse.parameters())
    step(coarse, exact)
    checkpoint.save(tmp_path, coarse, exact, step=2)
    checkpoint.load(tmp_path, coarse, loaded)
    for got, expected in zip(moments(loaded), moments(exact), strict=True):
        assert torch.equal(got["exact"], expected["exact"])


def test_the_class_is_that_which_steps(tmp_path: pathlib.Path) -> None:
    """A plain optimizer goes on from one that has its state on all devices."""
    net = nn.Linear(2, 3)
    model = DataParallel(net, ["cpu", "cpu"])
    sharded = ShardedOptimizer(torch.optim.AdamW, model)
    step(model, sharded)
    step_in = DistributedDataParallel(nn.Linear(2, 3), ["cpu", "cpu"])
    in_backward = step_in.step_in_backward(torch.optim.AdamW)
    step_in(torch.ones(4, 2)).sum().backward()
    for number, (module, optimizer) in enumerate([(model, sharded), (step_in, in_backward)]):
        checkpoint.save(tmp_path, module, optimizer, step=number)
        plain = torch.optim.AdamW(net.parameters())
        checkpoint.load(tmp_path, net, plain)
        for got, expected in zip(moments(plain), moments(optimizer), strict=True):
            assert torch.equal(got["exp_avg"], expected["exp_avg"]) and expected["exp_avg"].any()
        other = torch.optim.Adam(net.parameters())
        with pytest.raises(checkpoint.CheckpointError, match=r"AdamW in the .*, but Adam here"):
            checkpoint.load(tmp_path, net, other)
        checkpoint.load(tmp_path, net, other, strict=False)
