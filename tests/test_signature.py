"""The wrapper's ``forward`` shows which arguments the module takes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.models import assert_all_close, grads_of

WRAPPERS: tuple[Any, ...] = (dp.DataParallel, dp.DistributedDataParallel)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, ids: Tensor, /, mask: Tensor | None = None, *, scale: float = 1) -> Tensor:
        y: Tensor = self.layer(ids) * scale
        return y if mask is None else y * mask


class Open(Named):
    def forward(self, *ids: Any, **more: Any) -> Tensor:
        return super().forward(*ids)


def same(model: nn.Module, module: nn.Module) -> bool:
    return inspect.signature(model.forward) == inspect.signature(module.forward)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=["one", "two"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_is_the_modules(wrapper: Any, devices: list[str]) -> None:
    model = wrapper(Named(), devices)
    assert same(model, model.module)
    assert list(inspect.signature(model.forward).parameters) == ["ids", "mask", "scale"]
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(other, model.module)
    model.module = Open()
    assert same(model, Open())
    # What the module's own forward was replaced by, as libraries do.
    model.module.forward = Named().forward
    assert same(model, Named())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_is_a_method_like_others(wrapper: Any) -> None:
    model = wrapper(Named(), ["cpu", "cpu"])
    x = torch.randn(4, 3)
    expected = model.module(x)
    forward = model.forward
    assert "Split the inputs" in str(wrapper.forward.__doc__)
    torch.testing.assert_close(forward(x), expected)
    torch.testing.assert_close(wrapper.forward(model, x), expected)
    again = pickle.loads(pickle.dumps(forward))
    assert inspect.signature(again) == inspect.signature(forward)
    torch.testing.assert_close(again(x), expected)

    class Own(wrapper):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + 1

    own = Own(Named(), ["cpu", "cpu"])
    assert list(inspect.signature(own.forward).parameters) == ["x"]
    torch.testing.assert_close(own(x), own.module(x) + 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("hooks", [False, True], ids=["no hooks", "hooks"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_may_be_compiled(wrapper: Any, hooks: bool) -> None:
    model = wrapper(Named(), ["cpu", "cpu"])
    bare = copy.deepcopy(model.module)
    seen: list[nn.Module] = []
    if hooks:
        model.register_forward_hook(lambda module, inputs, output: seen.append(module))
    compiled: Any = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 3)
    for module in (compiled, bare):
        module(x, scale=2.0).pow(2).sum().backward()
    assert_all_close(grads_of(model), grads_of(bare))
    assert len(seen) == hooks

    def of_sines(x: Tensor) -> Any:
        return model.forward(torch.sin(x)) * 2

    step: Any = torch.compile(of_sines, backend="aot_eager")
    torch.testing.assert_close(step(x), bare(torch.sin(x)) * 2)


@pytest.mark.usefixtures("accelerate_anew")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_accelerate_keeps_it(wrapper: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inner = wrapper(Named(), ["cpu", "cpu"])
    model = accelerator.prepare(inner)
    assert same(model, inner.module)
    assert model(torch.ones(4, 3)).shape == (4, 2)
    accelerator.unwrap_model(model)
    assert same(inner, inner.module)
