"""What is done with references to values of other workers, in processes and in threads."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from dataparallel.distributed_autograd.references import RRef, remote

OTHER = "worker1"
THIRD = "worker2"

#: Where functions that run on another worker wait for a test to go on.
GATES: dict[str, threading.Event] = {"open": threading.Event()}


class NoValue(Exception):
    """An error of the functions below."""


class Layer:
    """A value with a parameter and methods."""

    def __init__(self, scale: float) -> None:
        self.weight = torch.full((3,), scale, requires_grad=True)

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return (x * self.weight).sin() + shift

    @async_execution  # type: ignore[untyped-decorator]
    def forward_later(self, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        threading.Thread(target=lambda: result.set_result(self.forward(x))).start()
        return result

    @async_execution  # type: ignore[untyped-decorator]
    def not_later(self) -> int:
        return 3

    def refuse(self) -> None:
        raise NoValue("this method refuses")

    def weight_rref(self) -> RRef[torch.Tensor]:
        return RRef(self.weight)

    def own_gradient(self, context_id: int) -> torch.Tensor:
        return get_gradients(context_id)[self.weight]


class Picky(Exception):
    """An error that cannot be made of a text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail(kind: type[Exception], *args: Any) -> None:
    raise kind(*args)


def wait_for_gate(x: torch.Tensor) -> torch.Tensor:
    assert GATES["open"].wait(20)
    return x * 3


def reset_gate() -> None:
    GATES["open"] = threading.Event()


def open_gate() -> None:
    GATES["open"].set()


@async_execution  # type: ignore[untyped-decorator]
def double_later(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Thread(target=lambda: result.set_result(x * 2)).start()
    return result


@async_execution  # type: ignore[untyped-decorator]
def fail_later() -> torch.futures.Future[None]:
    result: torch.futures.Future[Any] = torch.futures.Future()
    threading.Thread(target=lambda: result.set_exception(NoValue("later"))).start()
    return result


def add_of(first: RRef[torch.Tensor], second: RRef[torch.Tensor]) -> torch.Tensor:
    return first.to_here() + second.to_here()


def weight() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def gradient_on_owner(rref: RRef[torch.Tensor], context_id: int) -> torch.Tensor:
    return get_gradients(context_id)[rref.local_value()]


def oracle(function: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    return list(torch.autograd.grad(function(*copies).sum(), copies))


# --- gradients -------------------------------------------------------------------------------


def gradient_through_a_remote_function() -> None:
    w = torch.randn(3, requires_grad=True)
    with context() as context_id:
        rref = remote(OTHER, torch.mul, (w,), {"other": 2})
        backward(context_id, [(rref.to_here() * w).sum()])
        torch.testing.assert_close(get_gradients(context_id), {w: 4 * w.detach()})
        assert w.grad is None


def gradient_reaches_a_value_on_its_owner() -> None:
    rref = remote(OTHER, weight)
    with context() as context_id:
        backward(context_id, [(rref.to_here() * 5).sum()])
        assert not get_gradients(context_id)
        found = rpc_sync(OTHER, gradient_on_owner, (rref, context_id))
        torch.testing.assert_close(found, torch.full((3,), 5.0))


def value_that_is_used_twice() -> None:
    w = torch.randn(3, requires_grad=True)
    with context() as context_id:
        rref = remote(OTHER, double, (w,))
        total = rref.to_here() * rref.to_here() + rpc_sync(OTHER, RRef.local_value, (rref,))
        backward(context_id, [total.sum()])
        expected = oracle(lambda w: (2 * w) ** 2 + 2 * w, w)
        torch.testing.assert_close(get_gradients(context_id)[w], expected[0])


def references_that_a_third_worker_uses() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with context() as context_id:
        first, second = remote(OTHER, torch.sin, (a,)), remote("worker0", torch.cos, (b,))
        mine = RRef(b * 3)
        there = remote(THIRD, add_of, (first, second))
        total = there.to_here() + rpc_sync(THIRD, add_of, (mine, there))
        backward(context_id, [total.sum()])
        expected = oracle(lambda a, b: 2 * (a.sin() + b.cos()) + 3 * b, a, b)
        torch.testing.assert_close(
            get_gradients(context_id), dict(zip((a, b), expected, strict=True))
        )


def reference_in_containers_and_results() -> None:
    layer = remote(OTHER, Layer, (2.0,))
    there = layer.rpc_sync().weight_rref()
    assert isinstance(there, RRef)
    assert there.owner_name() == OTHER and not there.is_owner()
    with context() as context_id:
        again = rpc_sync(THIRD, dict, ({"in": [there]},))["in"][0]
        assert isinstance(again, RRef)
        backward(context_id, [again.to_here().sum()])
        torch.testing.assert_close(layer.rpc_sync().own_gradient(context_id), torch.ones(3))


def own_value_stays_itself() -> None:
    w = torch.randn(3, requires_grad=True)
    rref = RRef(w)
    assert rref.to_here() is w and rref.local_value() is w
    assert rref.is_owner() and rref.confirmed_by_owner() and rref.owner_name() == "worker0"
    assert rpc_sync(OTHER, RRef.is_owner, (rref,)) is False
    on_self = remote("worker0", double, (w,))
    assert on_self.to_here() is on_self.local_value()


def error_of_someone_elses_local_value() -> None:
    rref = remote(OTHER, double, (torch.ones(1),))
    with pytest.raises(RuntimeError, match=r"worker 'worker0' does not own .* 'worker1' does"):
        rref.local_value()


# --- methods ---------------------------------------------------------------------------------


@functools.cache
def _methods() -> tuple[str, ...]:
    return "forward", "forward_later"


def methods_of_a_value() -> None:
    x = torch.randn(3, requires_grad=True)
    layer = remote(OTHER, Layer, (2.0,))
    for name in _methods():
        with context() as context_id:
            results = [
                getattr(layer.rpc_sync(), name)(x),
                getattr(layer.rpc_async(), name)(x).wait(),
                getattr(layer.remote(), name)(x).to_here(),
            ]
            backward(context_id, [sum(results).sum()])
            weight = torch.full((3,), 2.0)
            expected = oracle(lambda x, w: 3 * (x * w).sin(), x, weight)
            torch.testing.assert_close(get_gradients(context_id)[x], expected[0])
            found = layer.rpc_sync().own_gradient(context_id)
            torch.testing.assert_close(found, expected[1])
    assert layer.rpc_sync().forward(x, shift=1.0).shape == (3,)


def methods_of_a_value_that_is_not_there_yet() -> None:
    rpc_sync(OTHER, reset_gate)
    x = torch.randn(3, requires_grad=True)
    with context() as context_id:
        rref = remote(OTHER, wait_for_gate, (x,))
        future = rref.rpc_async().sin()
        assert not future.done()
        rpc_sync(OTHER, open_gate)
        backward(context_id, [future.wait().sum()])
        expected = oracle(lambda x: (3 * x).sin(), x)
        torch.testing.assert_close(get_gradients(context_id)[x], expected[0])


def error_of_a_method() -> None:
    layer = remote(OTHER, Layer, (2.0,))
    for block in (_nothing, context):
        with block():
            with pytest.raises(RuntimeError, match=r"NoValue: this method refuses"):
                layer.rpc_sync().refuse()
            with pytest.raises(RuntimeError, match=r"NoValue: this method refuses"):
                layer.rpc_async().refuse().wait()
            with pytest.raises(RuntimeError, match=r"NoValue: this method refuses"):
                layer.remote().refuse().to_here()
            with pytest.raises(TypeError, match=r"not_later is marked .* returned 3 of type int"):
                layer.rpc_sync().not_later()
            with pytest.raises(TypeError, match=r"not_later is marked .* returned 3 of type int"):
                remote(OTHER, Layer.not_later, (layer,)).to_here()
            with pytest.raises(RuntimeError, match=r"AttributeError: .*no_such"):
                layer.rpc_sync().no_such()


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


# --- errors ----------------------------------------------------------------------------------


def errors_keep_their_type() -> None:
    for block in (_nothing, context):
        with block():
            rref = remote(OTHER, fail, (NoValue, "nothing here"))
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=r"(?s)'worker1'.*in fail.*NoValue: nothing here"
                ):
                    rref.to_here()
            # A call itself keeps the type of few errors, as torch's.
            with pytest.raises(RuntimeError, match=r"worker2(?s:.*)NoValue: nothing here"):
                rpc_sync(THIRD, RRef.to_here, (rref,))
            with pytest.raises(RuntimeError, match=r"NoValue: nothing here"):
                rref.rpc_sync().sin()
            with pytest.raises(RuntimeError, match=r"Picky: \('odd', 7\)"):
                remote(OTHER, fail, (Picky, "odd", 7)).to_here()
            with pytest.raises(RuntimeError, match=r"later"):
                remote(OTHER, fail_later).to_here()
            with pytest.raises(NoValue, match=r"own"):
                remote("worker0", fail, (NoValue, "own")).to_here()


def async_function_makes_a_value() -> None:
    x = torch.randn(3, requires_grad=True)
    with context() as context_id:
        backward(context_id, [remote(OTHER, double_later, (x,)).to_here().sum()])
        torch.testing.assert_close(get_gradients(context_id)[x], torch.full((3,), 2.0))


def bad_input() -> None:
    with pytest.raises(ValueError, match=r"no worker 'nobody'"):
        remote("nobody", double, (torch.ones(1),))
    with pytest.raises(TypeError, match=r"func must be callable, not int"):
        remote(OTHER, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout is -1 s"):
        RRef(1).to_here(timeout=-1)
    # Python 3.13 words it in another way.
    not_sent = r"pickle|local object"
    with pytest.raises(Exception, match=not_sent):
        remote(OTHER, lambda: 1)
    with pytest.raises(Exception, match=not_sent):
        RRef(torch.ones(1)).rpc_sync().apply_(lambda x: x)


def time_runs_out() -> None:
    rpc_sync(OTHER, reset_gate)
    x = torch.ones(3, requires_grad=True)
    rref = remote(OTHER, wait_for_gate, (x,))
    with pytest.raises(RuntimeError, match=r"more than set timeout \(100 ms\)"):
        rref.to_here(timeout=0.1)
    with pytest.raises(RuntimeError, match=r"more than set timeout \(100 ms\)"):
        rref.rpc_sync(timeout=0.1).sin()
    with pytest.raises(RuntimeError, match=r"value on worker 'worker1' is not there after 0\.1 s"):
        rpc_sync(OTHER, RRef.local_value, (rref, 0.1))
    late = remote(OTHER, wait_for_gate, (x,), timeout=0.1)
    with pytest.raises(RuntimeError, match=r"timeout"):
        late.to_here()
    # Another worker learns that too, although the function has not ended.
    with pytest.raises(RuntimeError, match=r"timeout"):
        rpc_sync(THIRD, RRef.to_here, (late,))
    rpc_sync(OTHER, open_gate)
    torch.testing.assert_close(rref.to_here(timeout=0), torch.full((3,), 3.0))


def torchs_reference_as_an_argument() -> None:
    w = torch.randn(3, requires_grad=True)
    theirs = torch_rpc.remote(OTHER, weight)
    with context() as context_id:
        total = rpc_sync(OTHER, multiply_torchs, (theirs, w))
        backward(context_id, [total.sum()])
        torch.testing.assert_close(get_gradients(context_id)[w], torch.ones(3))


def multiply_torchs(rref: Any, w: torch.Tensor) -> torch.Tensor:
    return w * torch.as_tensor(rref.local_value())


GRADIENTS = (
    gradient_through_a_remote_function,
    gradient_reaches_a_value_on_its_owner,
    value_that_is_used_twice,
    references_that_a_third_worker_uses,
    reference_in_containers_and_results,
    own_value_stays_itself,
    torchs_reference_as_an_argument,
)
METHODS = (
    methods_of_a_value,
    methods_of_a_value_that_is_not_there_yet,
    error_of_a_method,
    errors_keep_their_type,
    error_of_someone_elses_local_value,
    async_function_makes_a_value,
    bad_input,
    time_runs_out,
)
