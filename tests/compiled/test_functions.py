"""Compiled functions: those that the modules of replicas call, and those that call a wrapper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from dataparallel import DataParallel
from tests.compiled.cases import (
    WRAPPERS,
    Wrapper,
    compare,
    compile_whole,
    twins,
)
from tests.models import assert_all_close, grads_of


@functools.partial(torch.compile, backend="eager", dynamic=True)
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x) * scale


class CallsFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = scaled(self.layer(x), self.layer.bias)
        return output


class HoldsFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = torch.compile(lambda x: torch.tanh(self.layer(x)), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function(x)
        return output


def nested_functions() -> nn.Module:
    return compile_whole(HoldsFunction(), backend="eager")


class DecoratedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @functools.partial(torch.compile, backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
@pytest.mark.parametrize(
    "build", [CallsFunction, HoldsFunction, nested_functions, DecoratedForward]
)
def test_compiled_functions(
    build: Callable[[], nn.Module], kind: str, started: list[tuple[str, str]]
) -> None:
    slots = ["cpu"] * 2 if kind == "cpu" else ["virtual:0", "virtual:1"]
    torch.manual_seed(1)
    bare, module = build().double().to(slots[0]), build().double().to(slots[0])
    module.load_state_dict(bare.state_dict())
    model = DataParallel(module, slots)
    with torch.compiler.set_stance("force_eager"):
        x = torch.randn(8, 4, dtype=torch.double, device=slots[0])
        expected = bare(x)
        expected.pow(2).sum().backward()
    counts = []
    for _ in range(3):
        model.zero_grad()
        output = model(x)
        output.pow(2).sum().backward()
        assert_all_close([output, *grads_of(module)], [expected, *grads_of(bare)])
        counts.append(len(started))
    # Before the first compilation of a process replicas do not run in turn: each may compile.
    assert len(set(slots)) <= counts[0] <= len(slots)
    assert counts == counts[:1] * 3


# --- the wrapper within something that is compiled -----------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_is_compiled(wrapper: Wrapper, started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = wrapper(net, ["cpu"] * 2)
    outer: Any = torch.compile(model, backend="aot_eager")
    for batch in (7, 7, 9):
        compare(outer, bare, batch, 4)
    assert not started


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_training_step_is_compiled(started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2)
    criterion = nn.MSELoss()

    def step(module: nn.Module, x: Tensor) -> Tensor:
        scaled = torch.sin(x) * 2
        if isinstance(module, DataParallel):
            loss = module.loss(criterion, scaled, x)
        else:
            loss = criterion(module(scaled), x)
        result: Tensor = module(scaled).pow(2).mean() + loss
        return result

    compiled_step = torch.compile(step, backend="aot_eager")
    for batch in (7, 7, 9):
        x = torch.randn(batch, 4, dtype=torch.double)
        results = []
        for run, module in ((step, bare), (compiled_step, model)):
            module.zero_grad()
            loss = run(module, x)
            loss.backward()
            results.append([loss, *grads_of(module)])
        assert_all_close(results[1], results[0])
    assert {thread for _, thread in started} >= {"MainThread", "dataparallel-replica-0"}
    torch._dynamo.reset()
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="replicas run in threads"):
        whole(model, x)
