"""The arguments, results and errors of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_async, rpc_sync
from dataparallel.distributed_autograd.calls import current_context
from tests.distributed_autograd.rpc_workers import leaf, ones, open_gate, pass_gate

pytestmark = pytest.mark.on_worker0

# --- arguments and results -----------------------------------------------------------------------


@torch.no_grad()
def without_recording(x: Tensor) -> Tensor:
    return x * leaf("w")


def test_nothing_is_recorded_under_no_grad() -> None:
    x = ones()
    with context() as context_id:
        with torch.no_grad():
            y = rpc_sync("worker1", torch.mul, (x, 3))
            future = rpc_async("worker1", torch.mul, (x, 4))
        assert not y.requires_grad and not future.wait().requires_grad
        assert not rpc_sync("worker1", without_recording, (x,)).requires_grad
        backward(context_id, [(y * x).sum()])
        assert get_gradients(context_id)[x].tolist() == [3] * 3


def where_it_is(x: Tensor) -> tuple[str, Tensor]:
    return str(x.device), x * 2


def test_tensors_of_devices() -> None:
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


def test_callables() -> None:
    """Objects and methods have gradients for what they hold; workers are named in three ways."""
    x, factor = ones(), torch.nn.Parameter(torch.tensor(3.0))
    scale = Scale(factor)
    with context() as context_id:
        calls: list[Callable[..., Tensor]] = [scale, scale.twice]
        workers = [1, torch_rpc.get_worker_info("worker0")]
        pairs = zip(workers, calls, strict=True)
        total = sum(rpc_sync(worker, call, (x,)).sum() for worker, call in pairs)
        total = total + rpc_sync("worker1", torch.clamp, (x,), {"max": 0.5}).sum()
        backward(context_id, [total])
        found = get_gradients(context_id)
        assert found[x].tolist() == [3 + 9] * 3
        assert found[factor].item() == 3 + 3 * 6


# --- calls that do not wait ----------------------------------------------------------------------


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


def test_asynchronous_functions() -> None:
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


def raises(kind: type[Exception], *args: Any) -> None:
    raise kind(*args)


def test_errors_of_functions() -> None:
    """From a call, and through a nested call; the context goes on."""
    x = ones()
    for kind in (ValueError, TypeError, OwnError, TimeoutError, StopIteration):
        # torch's calls keep these two types, and write the others into the text.
        expected = kind if kind in (ValueError, TypeError) else RuntimeError
        text = rf"{kind.__name__}(.|\n)*worker1(.|\n)*in raises(.|\n)*two\nlines"
        with context() as context_id:
            with pytest.raises(expected, match=text):
                rpc_sync("worker1", raises, (kind, "two\nlines"))
            with pytest.raises(expected, match=r"worker2(.|\n)*two\nlines"):
                rpc_sync("worker1", rpc_sync, ("worker2", raises, (kind, "two\nlines")))
            backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
            assert get_gradients(context_id)[x].tolist() == [2] * 3
    with context(), pytest.raises(Exception, match="1 and 2"):
        rpc_sync("worker1", raises, (NeedsTwo, 1, 2))


def unpicklable_result(x: Tensor) -> Any:
    return x * 2, lambda: None


def vmapped(x: Tensor) -> Tensor:
    result: Tensor = rpc_sync("worker1", torch.mul, (x, 2))
    return result


def test_calls_that_cannot_be_made() -> None:
    x = ones()
    known = "'worker0', 'worker1', 'worker2', 'worker3'"
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, f"no worker 'no'.*{known}", lambda: rpc_sync("no", torch.sin, (x,))),
        (ValueError, f"no worker 7.*{known}", lambda: rpc_sync(7, torch.sin, (x,))),
        (TypeError, "func must be callable, not int", lambda: rpc_async("worker1", 3)),  # type: ignore[arg-type]
        (ValueError, "must be at least 0", lambda: rpc_sync("worker1", torch.sin, (x,), {}, -1.0)),
        (Exception, "pickle", lambda: rpc_sync("worker1", torch.sin, (x, lambda: None))),
        (Exception, "pickle", lambda: rpc_sync("worker1", unpicklable_result, (x,))),
        (TypeError, "outside of the transform", lambda: torch.func.vmap(vmapped)(torch.ones(3))),
    ]
    with context() as context_id:
        for kind, text, call in cases:
            with pytest.raises(kind, match=text):
                call()
        backward(context_id, [rpc_sync("worker1", torch.sin, (x,), timeout=1e12).sum()])
        assert get_gradients(context_id)[x].equal(x.cos())


def held(x: Tensor) -> Tensor:
    pass_gate("held")
    return x * leaf("w")


def test_a_call_that_takes_too_long() -> None:
    x = ones()
    with context() as context_id:
        with pytest.raises(RuntimeError, match=r"worker1.*more than set timeout \(200 ms\)"):
            rpc_sync("worker1", held, (x,), timeout=0.2)
        rpc_sync("worker1", open_gate, ("held",))
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


CALLS = 200


def tenth(x: Tensor) -> Tensor:
    return x * 0.1


def test_a_long_chain() -> None:
    """The graph's description in a call does not grow with the calls before it."""
    w = ones(2)
    with context() as context_id:
        state: Tensor = w
        for _ in range(CALLS):
            state = state + rpc_sync("worker1", tenth, (state,))
        native = current_context()
        assert native is not None
        # A peer that was told nothing yet: all that is known. The results of consecutive messages
        # are one run of them.
        sent = native.send([], 99)
        assert sent is not None and len(sent[1]) <= CALLS * (4 + 4)
        backward(context_id, [state.sum()])
        expected = torch.full((2,), 1.1**CALLS, dtype=torch.float64)
        torch.testing.assert_close(get_gradients(context_id)[w], expected)


# --- torch's own calls ---------------------------------------------------------------------------


def weight() -> Tensor:
    return torch.full((3,), 2.0, requires_grad=True)


def scaled(x: Tensor) -> Tensor:
    return x * weight()


def by_module(x: Tensor) -> Tensor:
    layer: Any = RemoteModule("worker1", torch.nn.Linear, (3, 2), {"dtype": torch.float64})
    output: Tensor = layer.forward(x)
    return output


CUT: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda x: torch_rpc.rpc_sync("worker1", torch.mul, (x, 2.0)),
    "a function": lambda x: torch_rpc.rpc_async("worker1", scaled, (x,)).wait(),
    "a module": by_module,
    "remote of an operator": lambda x: torch_rpc.remote("worker1", torch.mul, (x, 2)).to_here(),
    "remote": lambda x: torch_rpc.remote("worker1", scaled, (x,)).to_here(),
    "a reference": lambda x: torch_rpc.remote("worker1", weight).rpc_sync().mul(x),
}


def cut(name: str, x: Tensor) -> Any:
    return CUT[name](x)


@pytest.mark.parametrize("name", CUT)
def test_calls_of_torch_that_would_cut_the_graph_are_refused(name: str) -> None:
    call, plain = CUT[name], torch.ones(3, dtype=torch.float64)
    with context():
        with pytest.raises(RuntimeError, match=r"requires grad as an argument, in.*Use rpc_sync"):
            call(ones())
        if "operator" not in name:
            # The other worker's trained tensor comes back.
            with pytest.raises(RuntimeError, match="that requires grad as a result, in"):
                call(plain)
        with torch.no_grad():
            expected = call(ones()).shape
        # Within a call the other worker is in the context, too.
        with pytest.raises(RuntimeError, match="that requires grad as an argument, in"):
            rpc_sync("worker2", cut, (name, ones()))
    assert call(ones()).shape == expected


def fail(kind: type[Exception]) -> None:
    raise kind("as it was")


def test_other_calls_of_torch_in_a_context_are_torchs() -> None:
    with context():
        assert torch_rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
        assert torch_rpc.remote("worker1", len, ("two",)).to_here() == 3
        assert torch_rpc.rpc_async("worker1", scaled, (torch.ones(3),)) is not None
        for kind in (ValueError, TypeError):
            with pytest.raises(kind, match="as it was"):
                torch_rpc.rpc_sync("worker1", fail, (kind,))
