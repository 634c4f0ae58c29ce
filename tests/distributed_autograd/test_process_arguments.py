"""Objects of all kinds go to a worker and back, their tensors connected."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_async, rpc_sync
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import Call, compare_all, leaf, own_gradients, workers
from tests.distributed_autograd.rpc_workers import scenarios

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    inputs: Tensor
    extras: dict[str, Any] = field(default_factory=dict)


class Slotted:
    __slots__ = ("label", "tensor")

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor = tensor
        self.label = label


class Reduced:
    """Pickled by a function of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.doubled = tensor * 2

    def __reduce__(self) -> Any:
        return Reduced, (self.tensor,)


def regrouped(batch: Batch, /, *rest: Any, scale: float, **named: Any) -> dict[str, Any]:
    pair: Pair = batch.extras["pair"]
    return {
        "pair": Pair(pair.second * scale, [pair.first, (batch.inputs,)]),
        "slotted": Slotted(rest[0]["deep"][0][1].tensor * 2, "answer"),
        "reduced": Reduced(named["reduced"].doubled),
        "ordered": OrderedDict(a=named["many"][0], b=None, c="text", d=[1, 2.5, True]),
    }


def containers(call: Call) -> list[Tensor]:
    x, y, z = leaf("x"), leaf("y"), leaf("z", 2, 2)
    batch = Batch(x, {"pair": Pair(y * 1.0, z)})
    rest = {"deep": [(0, Slotted(y, "argument")), {"set": {1, 2}}]}
    named: dict[str, Any] = {
        "reduced": Reduced(x * y),
        "many": [z * i for i in range(5)],
        "scale": 3.0,
    }
    if call.__name__ == "here":
        answer = regrouped(batch, rest, **named)
    else:
        answer = rpc_sync("worker1", regrouped, (batch, rest), named)
    assert answer["slotted"].label == "answer"
    assert answer["ordered"]["d"] == [1, 2.5, True]
    second, (first, (inputs,)) = answer["pair"]
    sums = second.sum() + first.prod() + inputs.sin().sum() + answer["ordered"]["a"].sum()
    return [sums, answer["slotted"].tensor.sum(), answer["reduced"].doubled.exp().sum()]


def as_they_are(*tensors: Tensor) -> list[Tensor]:
    return list(tensors)


def shapes_and_layouts(call: Call) -> list[Tensor]:
    x = leaf("x", 4, 6)
    sent = [
        x.t(),
        x[::2, 1::3],
        x.sum(),
        x[0, :1].expand(5),
        x[:0],
        x.view(2, 2, 2, 3).permute(3, 0, 2, 1),
        x.to(memory_format=torch.contiguous_format),
    ]
    back = call("worker1", as_they_are, *sent)
    assert [tensor.shape for tensor in back] == [tensor.shape for tensor in sent]
    return [(tensor * (index + 1)).sin().sum() for index, tensor in enumerate(back)]


def of_several_types(call: Call) -> list[Tensor]:
    x = leaf("x")
    sent = [x, x.float(), x.to(torch.complex128), x.half(), x.bfloat16(), x.to(torch.complex64)]
    back = call("worker1", as_they_are, *sent)
    assert [tensor.dtype for tensor in back] == [tensor.dtype for tensor in sent]
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in back]
    return [tensor.double().square().sum() for tensor in real]


def first_of(x: Tensor, y: Tensor, same: bool) -> Tensor:
    assert (x is y) is same
    return x * 2 + y * leaf("w")


def one_tensor_twice(call: Call) -> list[Tensor]:
    x = leaf("x") * 1.0
    return [call("worker1", first_of, x, x, True).sum()]


def test_objects(cluster: Cluster) -> None:
    compare_all(cluster, 2, containers, one_tensor_twice, torch_too=False)


def test_shapes_and_types(cluster: Cluster) -> None:
    compare_all(cluster, 2, shapes_and_layouts, of_several_types)


# --- nothing to connect ----------------------------------------------------------------------


def check_alone(*tensors: Tensor) -> list[Tensor]:
    assert not any(tensor.requires_grad for tensor in tensors)
    return [tensor.clone() for tensor in tensors]


def without_gradients() -> None:
    tensors = [
        torch.tensor([True, False]),
        torch.arange(3),
        torch.tensor(2.5),
        torch.empty(0),
        torch.tensor([1], dtype=torch.uint8),
        torch.tensor(3, dtype=torch.int16),
        torch.tensor(1j),
    ]
    with context() as context_id:
        back = rpc_sync("worker1", check_alone, tensors)
        for sent, received in zip(tensors, back, strict=True):
            assert received.dtype == sent.dtype
            assert received.shape == sent.shape
            assert torch.equal(received, sent)
        assert get_gradients(context_id) == {}


def mixed(x: Tensor, indices: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, None, int]:
    return x[indices] * mask, mask, None, 3


def some_with_gradients() -> None:
    x = torch.arange(4.0, requires_grad=True)
    with context() as context_id:
        y, mask, nothing, number = rpc_sync(
            "worker1", mixed, (x, torch.tensor([1, 1, 3]), torch.tensor([True, True, False]))
        )
        assert not mask.requires_grad
        assert (nothing, number) == (None, 3)
        backward(context_id, [y.sum()])
        assert get_gradients(context_id)[x].tolist() == [0, 2, 0, 0]


def no_grad_caller() -> None:
    """What is sent under no_grad is not connected, as in a local call."""
    x = torch.ones(2, requires_grad=True)
    with context() as context_id:
        with torch.no_grad():
            y = rpc_sync("worker1", torch.mul, (x, 3))
            future = rpc_async("worker1", torch.mul, (x, 4))
        assert not y.requires_grad
        assert not future.wait().requires_grad
        with torch.inference_mode():
            assert rpc_sync("worker1", torch.mul, (torch.ones(2), 3)).tolist() == [3, 3]
        backward(context_id, [(y * x).sum()])
        assert get_gradients(context_id)[x].tolist() == [3, 3]


@torch.no_grad()
def without_recording(x: Tensor) -> Tensor:
    return x * leaf("w")


def no_grad_callee() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        assert not rpc_sync("worker1", without_recording, (x,)).requires_grad
        loss = (x * rpc_sync("worker1", without_recording, (x,))).sum()
        backward(context_id, [loss])
        assert list(get_gradients(context_id)) == [x]


def made_there() -> Tensor:
    return leaf("made there") * 2


def remote_leaf_only() -> None:
    """Nothing that requires grad goes there, but it comes back."""
    with context() as context_id:
        loss = rpc_sync("worker1", made_there).sum()
        backward(context_id, [loss])
        assert get_gradients(context_id) == {}
        assert rpc_sync("worker1", own_gradients, (context_id,))["made there"].tolist() == [2] * 3


def the_leaf_itself() -> Tensor:
    return leaf("itself")


def remote_leaf_itself() -> None:
    with context() as context_id:
        received = rpc_sync("worker1", the_leaf_itself)
        assert received.requires_grad
        backward(context_id, [(received * 3).sum()])
        assert get_gradients(context_id) == {}
        assert rpc_sync("worker1", own_gradients, (context_id,))["itself"].tolist() == [3] * 3


def test_tensors_without_gradients(cluster: Cluster) -> None:
    scenarios(cluster, 2, without_gradients, some_with_gradients, remote_leaf_only)


def test_gradients_that_are_not_wanted(cluster: Cluster) -> None:
    scenarios(cluster, 2, no_grad_caller, no_grad_callee, remote_leaf_itself)


# --- parameters and modules ------------------------------------------------------------------


def is_parameter(weight: Tensor, x: Tensor) -> tuple[bool, Tensor]:
    return isinstance(weight, torch.nn.Parameter), torch.nn.functional.linear(x, weight)


def parameter_argument() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    x = torch.ones(1, 3)
    with context() as context_id:
        _, y = rpc_sync("worker1", is_parameter, (weight, x))
        backward(context_id, [(y * 2).sum()])
        assert get_gradients(context_id)[weight].tolist() == [[2, 2, 2]] * 2
        assert weight.grad is None


def applied(model: torch.nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    assert isinstance(out, Tensor)
    return out


def module_argument() -> None:
    """A module is run there with the parameters from here, which get the gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    applied(model, x).square().sum().backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", applied, (model, x)).square().sum()])
        found = get_gradients(context_id)
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[value], expected[name])
            assert value.grad is None


def test_parameters_and_modules(cluster: Cluster) -> None:
    scenarios(cluster, 2, parameter_argument, module_argument)


# --- functions and workers -------------------------------------------------------------------


class Scale:
    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))

    @classmethod
    def by_two(cls, x: Tensor) -> Tensor:
        return cls(torch.tensor(2.0))(x)


def callables() -> None:
    """Built-in functions, methods and objects, with gradients for what a method is bound to."""
    x = torch.ones(2, requires_grad=True)
    factor = torch.tensor(3.0, requires_grad=True)
    scale = Scale(factor)
    with context() as context_id:
        total = rpc_sync("worker1", scale, (x,)).sum()
        total = total + rpc_sync("worker1", scale.twice, (x,)).sum()
        total = total + rpc_sync("worker1", Scale.by_two, (x,)).sum()
        total = total + rpc_sync("worker1", torch.mul, (x, 5.0)).sum()
        total = total + rpc_sync("worker1", torch.clamp, (x,), {"max": 0.5}).sum()
        backward(context_id, [total])
        found = get_gradients(context_id)
        assert found[x].tolist() == [3 + 9 + 2 + 5] * 2
        assert found[factor].item() == 2 + 2 * 6


def how_workers_are_named() -> None:
    x = torch.ones(2, requires_grad=True)
    assert workers() == ["worker0", "worker1"]
    with context() as context_id:
        named = ["worker1", 1, torch_rpc.get_worker_info("worker1"), torch_rpc.get_worker_info()]
        losses = [rpc_sync(to, torch.sin, (x,)).sum() for to in named]
        backward(context_id, losses)
        torch.testing.assert_close(get_gradients(context_id)[x], 4 * x.cos())


def workers_that_are_not_there() -> None:
    with context():
        with pytest.raises(ValueError, match=r"no worker 'elsewhere'.*'worker0', 'worker1'"):
            rpc_sync("elsewhere", torch.sin, (torch.ones(1),))
        with pytest.raises(ValueError, match=r"no worker 7.*'worker0', 'worker1'"):
            rpc_sync(7, torch.sin, (torch.ones(1),))
        with pytest.raises(TypeError, match="callable"):
            rpc_sync("worker1", 3, (torch.ones(1),))  # type: ignore[arg-type]


def what_cannot_be_pickled() -> None:
    x = torch.ones(1, requires_grad=True)
    with context() as context_id:
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            rpc_sync("worker1", torch.sin, (x, lambda: None))
        with pytest.raises(Exception, match="pickle"):
            rpc_sync("worker1", unpicklable_result, (x,))
        loss = rpc_sync("worker1", torch.sin, (x,)).sum()
        backward(context_id, [loss])
        assert get_gradients(context_id)[x].equal(x.cos())


def unpicklable_result(x: Tensor) -> Any:
    return x * 2, lambda: None


def test_functions_and_workers(cluster: Cluster) -> None:
    scenarios(cluster, 2, callables, how_workers_are_named)


def test_calls_that_cannot_be_made(cluster: Cluster) -> None:
    scenarios(cluster, 2, workers_that_are_not_there, what_cannot_be_pickled)
