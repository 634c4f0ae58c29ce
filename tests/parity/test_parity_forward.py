"""What torch promises of a data-parallel forward: which inputs, which outputs, on which device."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, data_parallel


def linear(device: str, dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(10, 5).to(device, dtype)


def batch(device: str, dtype: torch.dtype = torch.float64, samples: int = 20) -> Tensor:
    return torch.randn(samples, 10, device=device, dtype=dtype)


# --- one tensor in, one tensor out -----------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (3, 2, 1, 0), (2,)])
def test_data_parallel(slots: list[str], order: tuple[int, ...]) -> None:
    devices = [slots[i] for i in order]
    net = linear(devices[0])
    x = batch(slots[1])  # not on the device of the module
    expected = net(x.to(devices[0]))
    expected.sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()

    out = data_parallel(net, x, devices)
    out.sum().backward()

    assert out.device == torch.device(devices[0])
    torch.testing.assert_close(out, expected)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_data_parallel_without_device_ids() -> None:
    net, x = linear("cpu"), batch("cpu")
    found = torch.accelerator.current_accelerator()
    home = torch.device("cpu") if found is None else torch.device(found.type, 0)
    out = data_parallel(net.to(home), x)
    assert out.device == home
    torch.testing.assert_close(out, net(x.to(home)))


def test_data_parallel_small_back(slots: list[str]) -> None:
    net, x = linear(slots[0], torch.float32), batch(slots[0], torch.float32)
    torch.testing.assert_close(data_parallel(net, x, slots[:2]), net(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_data_parallel_module(slots: list[str], dtype: torch.dtype) -> None:
    net, x = linear(slots[0], dtype), batch(slots[0], dtype)
    out = DataParallel(net, slots)(x)
    assert out.dtype == dtype
    assert out.device == torch.device(slots[0])
    torch.testing.assert_close(out, net(x))


def test_data_parallel_complex(slots: list[str]) -> None:
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.turn

    net = Rotate().to(slots[0])
    x = torch.randn(6, 3, dtype=torch.complex128, device=slots[0])
    expected = net(x)
    expected.abs().sum().backward()
    assert net.turn.grad is not None
    grad, net.turn.grad = net.turn.grad, None
    out = DataParallel(net, slots)(x)
    out.abs().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(net.turn.grad, grad)


def test_data_parallel_no_grad(slots: list[str]) -> None:
    seen: list[bool] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return x

    x = batch(slots[0])
    with torch.no_grad():
        data_parallel(Layer(), x, slots[:2])
    data_parallel(Layer(), x, slots[:2])
    assert seen == [False, False, True, True]


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_batches_smaller_than_the_devices(slots: list[str], samples: int) -> None:
    net, x = linear(slots[0]), batch(slots[0], samples=samples)
    torch.testing.assert_close(DataParallel(net, slots)(x), net(x))


def test_dim(slots: list[str]) -> None:
    """With the batch second, as a recurrent network has it by default."""

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    x = torch.randn(3, 7, 2, device=slots[0], dtype=torch.float64)
    torch.testing.assert_close(DataParallel(Shift(), slots, dim=1)(x), x.cumsum(0))
    torch.testing.assert_close(data_parallel(Shift(), x, slots, dim=1), x.cumsum(0))


# --- arguments -------------------------------------------------------------------------------


class ManyArguments(nn.Module):
    def forward(self, a: Tensor, b: Tensor, factor: float, c: Tensor | None = None) -> Tensor:
        return factor * (a * b if c is None else a * b + c)


@pytest.mark.parametrize("with_keyword", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)])
def test_data_parallel_multiple_input(
    slots: list[str], order: tuple[int, ...], with_keyword: bool
) -> None:
    devices = [slots[i] for i in order]
    a = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    keywords = {"c": torch.randn(5, 5, dtype=torch.float64)} if with_keyword else {}
    net = ManyArguments()
    expected = net(a, b, 0.7, **keywords)
    grads = torch.autograd.grad(expected.sum(), (a, b))

    for out in (
        data_parallel(net, (a, b, 0.7), devices, module_kwargs=keywords),
        DataParallel(net, devices)(a, b, 0.7, **keywords),
    ):
        torch.testing.assert_close(out.cpu(), expected)
        found = torch.autograd.grad(out.sum(), (a, b))
        torch.testing.assert_close(found, grads)


def test_data_parallel_nested_input(slots: list[str]) -> None:
    class Pick(nn.Module):
        def forward(self, *args: Any) -> Tensor:
            picked: Tensor = args[1][0]
            return picked

    x = batch(slots[1])
    out = data_parallel(Pick(), (x.cos(), (x.sin(), x), x.sin()), slots)
    torch.testing.assert_close(out, x.sin().to(slots[0]))


def test_data_parallel_nested_output(slots: list[str]) -> None:
    def nest(x: Tensor) -> list[Any]:
        return [x, (x.sin(), x.cos(), [x.add(1)]), x, OrderedDict(a=x, b=[x.sin()])]

    class Nest(nn.Module):
        def forward(self, x: Tensor) -> list[Any]:
            return nest(x)

    x = torch.randn(6, 2, device=slots[0])
    out = data_parallel(Nest(), x, slots)
    torch.testing.assert_close(out, nest(x))
    assert type(out) is list
    assert type(out[1]) is tuple
    assert type(out[1][2]) is list
    assert type(out[3]) is OrderedDict
    assert list(out[3]) == ["a", "b"]
    assert type(out[3]["b"]) is list


class ByKeyword(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Any) -> Tensor:
        found: Tensor = self.inner(input["data"] if isinstance(input, dict) else input)
        return found


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("unused", ["no leaf", [], {}, ()])
def test_data_parallel_module_kwargs_only(slots: list[str], count: int, unused: Any) -> None:
    net = ByKeyword(linear(slots[0]))
    x = batch(slots[0])
    given = x if unused == "no leaf" else {"data": x, "unused": unused}
    out = DataParallel(net, slots[:count])(input=given)
    assert out.device == torch.device(slots[0])
    torch.testing.assert_close(out, net(x))


def test_empty_containers_reach_each_replica_in_their_own_type(slots: list[str]) -> None:
    seen: list[Any] = []

    class Look(nn.Module):
        def forward(self, x: Tensor, *rest: Any) -> Tensor:
            seen.append(rest)
            return x

    DataParallel(Look(), slots)(batch("cpu"), [], (), {}, None, "text", {"a": []})
    assert seen == [([], (), {}, None, "text", {"a": []})] * 4


def test_data_parallel_module_zero_inputs(slots: list[str]) -> None:
    calls: list[None] = []

    class NoInput(nn.Module):
        def forward(self) -> None:
            calls.append(None)

    assert data_parallel(NoInput(), None, slots[:2]) is None
    assert DataParallel(NoInput(), slots)() is None
    assert len(calls) == 2, "without an input there is nothing to split: one replica runs"


def test_data_parallel_unscatterable_arguments_are_given_to_each_replica(slots: list[str]) -> None:
    marker = object()
    seen: list[Any] = []

    class Look(nn.Module):
        def forward(self, x: Tensor, what: Any, *, how: Any) -> Tensor:
            seen.append((what, how))
            return x

    DataParallel(Look(), slots[:2])(batch("cpu"), marker, how={"marker": marker})
    assert seen == [(marker, {"marker": marker})] * 2


# --- devices ---------------------------------------------------------------------------------


def test_data_parallel_device_args(slots: list[str]) -> None:
    net = linear(slots[0])
    x = batch(slots[0]).requires_grad_()
    first, second = (torch.device(slot) for slot in slots[:2])
    for device_ids in ((slots[0], slots[1]), [first, second], (first, slots[1])):
        for output_device in (None, slots[0], first, second, -1, "cpu"):
            out = data_parallel(net, x, device_ids, output_device)
            wanted = torch.device("cpu") if output_device in (-1, "cpu") else first
            assert out.device == (second if output_device == second else wanted)
            torch.testing.assert_close(out.cpu(), net(x).cpu())


def test_integers_name_accelerators() -> None:
    net = linear("virtual:1")
    x = batch("cpu")
    out = data_parallel(net, x, (1, 0), output_device=2)
    assert out.device == torch.device("virtual:2")
    torch.testing.assert_close(out.cpu(), net(x.to("virtual:1")).cpu())


def test_attributes_that_torchs_users_read(slots: list[str]) -> None:
    net = linear(slots[0])
    model = DataParallel(net, slots, output_device=slots[1])
    assert isinstance(model, nn.DataParallel)
    assert model.module is net
    assert model.device_ids == [torch.device(slot) for slot in slots]
    assert model.output_device == torch.device(slots[1])
    assert model.src_device_obj == torch.device(slots[0])
    assert model.dim == 0


def test_subclasses_override_the_four_steps(slots: list[str]) -> None:
    """torch's DataParallel is customized by overriding its steps, with these arguments."""
    steps: list[str] = []

    class Traced(DataParallel[nn.Linear]):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            steps.append("replicate")
            return super().replicate(module, device_ids)

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            steps.append("scatter")
            return super().scatter(inputs, kwargs, device_ids)

        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            steps.append("parallel_apply")
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs: Any, output_device: Any) -> Any:
            steps.append("gather")
            return super().gather(outputs, output_device)

    net, x = linear(slots[0]), batch(slots[0])
    torch.testing.assert_close(Traced(net, slots)(x), net(x))
    assert steps == ["scatter", "replicate", "parallel_apply", "gather"]


def test_a_step_may_return_plain_lists(slots: list[str]) -> None:
    """An override written for torch makes lists and tuples of its own."""

    class Own(DataParallel[nn.Linear]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            parts = inputs[0].tensor_split(len(device_ids))
            chunks = [(part.to(device),) for part, device in zip(parts, device_ids, strict=True)]
            return chunks, [{} for _ in chunks]

        def gather(self, outputs: Any, output_device: Any) -> Any:
            return torch.cat([output.to(output_device) for output in outputs])

    net, x = linear(slots[0]), batch(slots[0], samples=7)
    torch.testing.assert_close(Own(net, slots)(x), net(x))
