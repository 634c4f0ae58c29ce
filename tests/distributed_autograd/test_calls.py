"""What calls take, return and raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_async, rpc_sync
from dataparallel.distributed_autograd.calls import current_context
from tests.distributed_autograd.rpc_workers import (
    World,
    expect_clean_everywhere,
    leaf,
    open_gate,
    own_gradients,
    pass_gate,
    workers,
)


def ones(**options: Any) -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True, **options)


# --- arguments and results -----------------------------------------------------------------------


def check_alone(*tensors: Tensor) -> list[Tensor]:
    assert not any(tensor.requires_grad for tensor in tensors)
    return [tensor.clone() for tensor in tensors]


def tensors_without_gradients() -> None:
    tensors = [
        torch.tensor([True, False]),
        torch.arange(3),
        torch.tensor(2.5),
        torch.empty(0),
        torch.tensor([1], dtype=torch.uint8),
        torch.tensor(1j),
    ]
    with context() as context_id:
        back = rpc_sync("worker1", check_alone, tensors)
        for sent, received in zip(tensors, back, strict=True):
            assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
            assert torch.equal(received, sent)
        assert get_gradients(context_id) == {}


def mixed(x: Tensor, indices: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, None, int]:
    return x[indices] * mask, mask, None, 3


def some_with_gradients() -> None:
    x = torch.arange(4.0, requires_grad=True)
    with context() as context_id:
        arguments = (x, torch.tensor([1, 1, 3]), torch.tensor([True, True, False]))
        y, mask, nothing, number = rpc_sync("worker1", mixed, arguments)
        assert (mask.requires_grad, nothing, number) == (False, None, 3)
        backward(context_id, [y.sum()])
        assert get_gradients(context_id)[x].tolist() == [0, 2, 0, 0]


@torch.no_grad()
def without_recording(x: Tensor) -> Tensor:
    return x * leaf("w")


def nothing_is_recorded_under_no_grad() -> None:
    x = ones()
    with context() as context_id:
        with torch.no_grad():
            y = rpc_sync("worker1", torch.mul, (x, 3))
            future = rpc_async("worker1", torch.mul, (x, 4))
        assert not y.requires_grad and not future.wait().requires_grad
        with torch.inference_mode():
            assert rpc_sync("worker1", torch.mul, (torch.ones(2), 3)).tolist() == [3, 3]
        assert not rpc_sync("worker1", without_recording, (x,)).requires_grad
        backward(context_id, [(y * x).sum()])
        assert get_gradients(context_id)[x].tolist() == [3] * 3


def remote_leaves() -> None:
    """Nothing that requires grad goes there, but it comes back: computed, or the leaf itself."""
    with context() as context_id:
        computed = rpc_sync("worker1", torch.mul, (rpc_sync("worker1", leaf, ("there",)), 2))
        backward(context_id, [computed.sum() + rpc_sync("worker1", leaf, ("itself",)).sum() * 3])
        assert get_gradients(context_id) == {}
        found = rpc_sync("worker1", own_gradients, (context_id,))
        assert found["there"].tolist() == [2] * 3 and found["itself"].tolist() == [3] * 3


def is_parameter(weight: Tensor, x: Tensor) -> tuple[bool, Tensor]:
    return isinstance(weight, torch.nn.Parameter), torch.nn.functional.linear(x, weight)


def applied(model: torch.nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    assert isinstance(out, Tensor)
    return out


def parameters_and_modules() -> None:
    """A module is run there with the parameters from here, which get the gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    applied(model, x).square().sum().backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with context() as context_id:
        _, y = rpc_sync("worker1", is_parameter, (weight, torch.ones(1, 3)))
        loss = (y * 2).sum() + rpc_sync("worker1", applied, (model, x)).square().sum()
        backward(context_id, [loss])
        found = get_gradients(context_id)
        assert found[weight].tolist() == [[2, 2, 2]] * 2
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[value], expected[name])
            assert value.grad is None


def where_it_is(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), x * 2


def tensors_of_devices() -> None:
    """They travel through the host, and arrive on a device of that name."""
    x = torch.ones(3, device="virtual:1", requires_grad=True)
    with context() as context_id:
        where, y = rpc_sync("worker1", where_it_is, (x,))
        assert where == "virtual:1" and str(y.device) == "virtual:1"
        backward(context_id, [(y * 3).sum()])
        gradient = get_gradients(context_id)[x]
        assert str(gradient.device) == "virtual:1" and gradient.tolist() == [6] * 3


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
    x, factor = ones(), torch.tensor(3.0, requires_grad=True)
    scale = Scale(factor)
    with context() as context_id:
        calls: list[Any] = [scale, scale.twice, Scale.by_two]
        total = sum(rpc_sync("worker1", call, (x,)).sum() for call in calls)
        total = total + rpc_sync("worker1", torch.mul, (x, 5.0)).sum()
        total = total + rpc_sync("worker1", torch.clamp, (x,), {"max": 0.5}).sum()
        backward(context_id, [total])
        found = get_gradients(context_id)
        assert found[x].tolist() == [3 + 9 + 2 + 5] * 3
        assert found[factor].item() == 3 + 3 * 6


def names_of_workers() -> None:
    x = ones()
    assert sorted(workers()) == [f"worker{rank}" for rank in range(4)]
    with context() as context_id:
        named = ["worker1", 1, torch_rpc.get_worker_info("worker1"), torch_rpc.get_worker_info()]
        backward(context_id, [rpc_sync(to, torch.sin, (x,)).sum() for to in named])
        torch.testing.assert_close(get_gradients(context_id)[x], 4 * x.cos())


# --- calls that do not wait ----------------------------------------------------------------------


def futures() -> None:
    """What follows a future is a part of the graph."""
    x = ones()
    with context() as context_id:
        many = [rpc_async(f"worker{index % 3}", torch.mul, (x, index)) for index in range(30)]
        future = rpc_async("worker1", torch.mul, (x, 2)).then(lambda done: done.value() * 3)
        both = torch.futures.collect_all([future, rpc_async("worker2", torch.mul, (x, 5))])
        total = torch.stack([each.wait() for each in many]).sum()
        backward(context_id, [total + sum(part.value() for part in both.wait()).sum()])
        assert get_gradients(context_id)[x].tolist() == [sum(range(30)) + 11] * 3


@async_execution  # type: ignore[untyped-decorator]
def added_later(to: str, x: Tensor) -> torch.futures.Future[Tensor]:
    y = x * leaf("w")
    future = rpc_async(to, torch.mul, (y, 2.0))
    return future.then(lambda done: done.value() + y)


@async_execution  # type: ignore[untyped-decorator]
def fails_later(to: str, x: Tensor) -> torch.futures.Future[Tensor]:
    future = rpc_async(to, torch.mul, (x, 2.0))
    return future.then(lambda done: done.value() / "text")


@async_execution  # type: ignore[untyped-decorator]
def no_future(x: Tensor) -> Tensor:
    return x


def asynchronous_functions() -> None:
    x = ones()
    with context() as context_id:
        with pytest.raises(RuntimeError, match="unsupported operand"):
            rpc_sync("worker1", fails_later, ("worker2", x))
        with pytest.raises(Exception, match=r"no_future is marked .* must return .*Future"):
            rpc_sync("worker1", no_future, (x,))
        z = rpc_sync("worker1", added_later, ("worker0", rpc_sync("worker1", added_later, (2, x))))
        backward(context_id, [z.sum()])
        weight = rpc_sync("worker1", leaf, ("w",)).detach()
        torch.testing.assert_close(get_gradients(context_id)[x], 9 * weight * weight)


# --- errors --------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


class NeedsTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_one(kind: type[Exception], x: Tensor) -> Tensor:
    raise kind("from the function\nwith two lines")


def raise_awkward(x: Tensor) -> Tensor:
    raise NeedsTwo(1, 2)


def call_on(to: str, function: Any, *args: Any) -> Any:
    return rpc_sync(to, function, args)


def errors_of_functions() -> None:
    x = ones()
    for kind in (ValueError, TypeError, KeyError, OwnError, TimeoutError, StopIteration):
        # torch's calls keep these two types, and write the others into the text.
        expected = kind if kind in (ValueError, TypeError) else RuntimeError
        text = rf"{kind.__name__}(.|\n)*worker1(.|\n)*in raise_one(.|\n)*from the function"
        with context() as context_id:
            with pytest.raises(expected, match=text):
                rpc_sync("worker1", raise_one, (kind, x))
            future = rpc_async("worker1", raise_one, (kind, x))
            with pytest.raises(expected, match=text):
                future.wait()
            # Through a nested call.
            with pytest.raises(expected, match=r"worker2(.|\n)*from the function"):
                rpc_sync("worker1", call_on, ("worker2", raise_one, kind, x))
            # And the context goes on.
            backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
            assert get_gradients(context_id)[x].tolist() == [2] * 3
    with context(), pytest.raises(Exception, match="1 and 2"):
        rpc_sync("worker1", raise_awkward, (x,))
    with context(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        rpc_sync("worker1", torch.matmul, (torch.rand(3, 3, requires_grad=True), torch.rand(6, 6)))
    with pytest.raises(OwnError, match="in the block"), context():
        rpc_sync("worker1", call_on, ("worker2", torch.mul, x, 2.0))
        raise OwnError("in the block")
    expect_clean_everywhere()


def unpicklable_result(x: Tensor) -> Any:
    return x * 2, lambda: None


def vmapped(x: Tensor) -> Tensor:
    result: Tensor = rpc_sync("worker1", torch.mul, (x, 2))
    return result


def calls_that_cannot_be_made() -> None:
    x = ones()
    with context() as context_id:
        with pytest.raises(ValueError, match=r"no worker 'elsewhere'.*'worker0', 'worker1'"):
            rpc_sync("elsewhere", torch.sin, (x,))
        with pytest.raises(ValueError, match=r"no worker 7.*'worker0', 'worker1'"):
            rpc_sync(7, torch.sin, (x,))
        with pytest.raises(TypeError, match="func must be callable, not int"):
            rpc_async("worker1", 3)  # type: ignore[arg-type]
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="must be at least 0"):
                rpc_async("worker1", torch.sin, (x,), timeout=wrong)
        with pytest.raises((AttributeError, TypeError), match="pickle"):
            rpc_sync("worker1", torch.sin, (x, lambda: None))
        with pytest.raises(Exception, match="pickle"):
            rpc_sync("worker1", unpicklable_result, (x,))
        with pytest.raises(TypeError, match=r"torch\.func.*outside of the transform"):
            torch.func.vmap(vmapped)(torch.ones(3))
        backward(context_id, [rpc_sync("worker1", torch.sin, (x,), timeout=1e12).sum()])
        assert get_gradients(context_id)[x].equal(x.cos())


def held(x: Tensor) -> Tensor:
    pass_gate("held")
    return x * leaf("w")


def a_call_that_takes_too_long() -> None:
    x = ones()
    with context() as context_id:
        with pytest.raises(RuntimeError, match=r"worker1.*more than set timeout \(300 ms\)"):
            rpc_sync("worker1", held, (x,), timeout=0.3)
        rpc_sync("worker1", open_gate, ("held",))
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


CALLS = 200


def tenth(x: Tensor) -> Tensor:
    return x * 0.1


def a_long_chain() -> None:
    """What a call tells of the graph does not grow with the calls before it."""
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        state: Tensor = w
        for _ in range(CALLS):
            state = state + rpc_sync("worker1", tenth, (state,))
        native = current_context()
        assert native is not None
        # A peer that was told nothing yet: all that is known. What was computed from consecutive
        # messages is one run of them.
        sent = native.send([], 99)
        assert sent is not None and len(sent[1]) <= CALLS * (4 + 4)
        backward(context_id, [state.sum()])
        expected = torch.full((2,), 1.1**CALLS, dtype=torch.float64)
        torch.testing.assert_close(get_gradients(context_id)[w], expected)


@pytest.mark.parametrize(
    "case",
    [
        tensors_without_gradients,
        some_with_gradients,
        nothing_is_recorded_under_no_grad,
        remote_leaves,
        parameters_and_modules,
        tensors_of_devices,
        callables,
        names_of_workers,
        futures,
        asynchronous_functions,
        errors_of_functions,
        calls_that_cannot_be_made,
        a_call_that_takes_too_long,
        a_long_chain,
    ],
)
def test_calls(world: World, case: Any) -> None:
    world.run(case)
