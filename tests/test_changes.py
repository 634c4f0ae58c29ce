"""Parameters that somebody changes between two forwards, and what it costs to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, virtual

DEVICES = ["virtual:0", "virtual:1"]
WRAPPERS = pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])

Wrapper = Callable[..., nn.Module]


def build(
    wrapper: Wrapper, devices: list[str] = DEVICES, norm: type[nn.Module] = nn.BatchNorm1d
) -> tuple[nn.Module, nn.Module, Tensor]:
    module = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 2)).to(devices[0])
    return module, wrapper(module, devices), torch.randn(6, 3, device=devices[0])


def write(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(1.5)


def assert_current(model: nn.Module, module: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(model(x), module(x))


@WRAPPERS
@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_never_waits_for_a_device(wrapper: Wrapper, grad: bool) -> None:
    _, model, x = build(wrapper)
    model.eval()
    with torch.set_grad_enabled(grad):
        for _ in range(12):
            model(x)
        torch.accelerator.synchronize(torch.device(DEVICES[0]))
        virtual.reset_counters()
        for _ in range(5):
            model(x)
    assert virtual.counters()["host_waits"] == 0


@WRAPPERS
def test_accumulation_never_waits_for_a_device(wrapper: Wrapper) -> None:
    _, model, x = build(wrapper)
    for _ in range(12):
        model(x).sum().backward()
    virtual.reset_counters()
    for _ in range(4):
        model(x).sum()
    assert virtual.counters()["host_waits"] == 0


@WRAPPERS
def test_a_write_without_a_trace_is_told_of_a_forward_late(wrapper: Wrapper) -> None:
    module, model, x = build(wrapper)
    model.eval()
    for _ in range(12):
        model(x)
    write(module)
    model(x)
    torch.accelerator.synchronize(torch.device(DEVICES[0]))
    with pytest.warns(UserWarning, match=r"written through \.data.*in one forward or more"):
        assert_current(model, module, x)
    assert_current(model, module, x)


@WRAPPERS
@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_is_forgotten_by_the_next_forward(wrapper: Wrapper) -> None:
    module, model, x = build(wrapper)
    model.eval()
    for _ in range(12):
        model(x)
    write(module)
    model(x)
    torch.accelerator.synchronize(torch.device(DEVICES[0]))
    with pytest.raises(UserWarning, match=r"written through \.data"):
        model(x)
    assert_current(model, module, x)


@WRAPPERS
def test_weights_swapped_in_for_evaluation_are_seen_at_once(wrapper: Wrapper) -> None:
    module, model, x = build(wrapper, norm=nn.LayerNorm)
    for _ in range(12):
        model(x)
    for training in (False, True, False):
        write(module)
        model.train(training)
        assert_current(model, module, x)


@WRAPPERS
@pytest.mark.parametrize("looks_before", [1, 12])
def test_originals_on_the_cpu_are_compared_at_once(wrapper: Any, looks_before: int) -> None:
    module, model, x = build(wrapper, ["cpu", "virtual:0"])
    model.eval()
    for _ in range(looks_before):
        model(x)
    write(module)
    assert_current(model, module, x)


@WRAPPERS
def test_statistics_of_batch_norm_are_current_in_evaluation(wrapper: Wrapper) -> None:
    module, model, x = build(wrapper)
    for _ in range(12):
        model(x)
    assert_current(model.eval(), module, x)


@WRAPPERS
def test_a_step_that_failed_hides_no_write_of_a_forward(wrapper: Wrapper, slots: list[str]) -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.add_(1)
            return super().forward(x)

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("too large")

    module = Writes(3, 2).to(slots[0])
    model = wrapper(module, slots[:2])
    with pytest.raises(ArithmeticError, match="too large"):
        Fails(module.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="changed parameters in place"):
        model(torch.ones(4, 3, device=slots[0]))
