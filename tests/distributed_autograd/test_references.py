"""Values that stay on other workers: references to them, and gradients through them."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd import (
    RRef,
    backward,
    context,
    get_gradients,
    remote,
    rpc_async,
    rpc_sync,
)
from tests.distributed_autograd.rpc_workers import note, open_gate, pass_gate, take_notes

pytestmark = pytest.mark.on_worker0

OTHER, THIRD = "worker1", "worker2"


class NoValue(Exception):
    """An error of the functions below."""


class Layer:
    """A value with a parameter and methods."""

    def __init__(self, scale: float) -> None:
        self.weight = torch.full((3,), scale, requires_grad=True)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return (x * self.weight).sin() + shift

    @async_execution  # type: ignore[untyped-decorator]
    def forward_later(self, x: Tensor) -> torch.futures.Future[Tensor]:
        return rpc_async(THIRD, double, (x,)).then(lambda done: self.forward(done.value() / 2))

    @async_execution  # type: ignore[untyped-decorator]
    def not_later(self) -> int:
        return 3

    def refuse(self, kind: type[Exception] = NoValue) -> None:
        raise kind("this method refuses")

    def weight_rref(self) -> RRef[Tensor]:
        return RRef(self.weight)

    def own_gradient(self, context_id: int) -> Tensor:
        return get_gradients(context_id)[self.weight]


def double(x: Tensor) -> Tensor:
    return x * 2


def fail(text: str) -> None:
    raise NoValue(text)


def behind_gate(x: Tensor, name: str) -> Tensor:
    pass_gate(name)
    return x * 3


@async_execution  # type: ignore[untyped-decorator]
def double_later(x: Tensor) -> torch.futures.Future[Tensor]:
    return rpc_async(THIRD, double, (x,))


@async_execution  # type: ignore[untyped-decorator]
def fail_later() -> torch.futures.Future[None]:
    return rpc_async(THIRD, fail, ("later",))


def add_of(first: RRef[Tensor], second: RRef[Tensor]) -> Tensor:
    return first.to_here() + second.to_here()


def weight() -> Tensor:
    return torch.ones(3, requires_grad=True)


def gradient_on_owner(rref: RRef[Tensor], context_id: int) -> Tensor:
    return get_gradients(context_id)[rref.local_value()]


def multiply_torchs(rref: Any, w: Tensor) -> Tensor:
    return w * torch.as_tensor(rref.local_value())


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def gradients_of(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """By ordinary autograd."""
    return list(torch.autograd.grad(function(*leaves).sum(), leaves))


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_through_references() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    owned, theirs = remote(OTHER, weight), torch_rpc.remote(OTHER, weight)
    with context() as context_id:
        doubled = remote(OTHER, torch.mul, (a,), {"other": 2})
        # Used here twice, and on its owner.
        total = doubled.to_here() * doubled.to_here() + rpc_sync(
            OTHER, RRef.local_value, (doubled,)
        )
        # By a third worker, with a value of this one.
        cosine, mine = remote("worker0", torch.cos, (b,)), RRef(b * 3)
        there = remote(THIRD, add_of, (remote(OTHER, torch.sin, (a,)), cosine))
        total = total + there.to_here() + rpc_sync(THIRD, add_of, (mine, there))
        total = total + remote(OTHER, double_later, (a,)).to_here()
        total = total + owned.to_here() * 5 + rpc_sync(OTHER, multiply_torchs, (theirs, b))
        backward(context_id, [total.sum()])
        expected = gradients_of(
            lambda a, b: (2 * a) ** 2 + 4 * a + 2 * (a.sin() + b.cos()) + 3 * b + b, a, b
        )
        close(get_gradients(context_id), dict(zip((a, b), expected, strict=True)))
        close(rpc_sync(OTHER, gradient_on_owner, (owned, context_id)), torch.full((3,), 5.0))
        assert a.grad is None


def test_methods_of_a_value() -> None:
    x = torch.randn(3, requires_grad=True)
    layer = remote(OTHER, Layer, (2.0,))
    for name in ("forward", "forward_later"):
        with context() as context_id:
            results = [
                getattr(layer.rpc_sync(), name)(x),
                getattr(layer.rpc_async(), name)(x).wait(),
                getattr(layer.remote(), name)(x).to_here(),
            ]
            backward(context_id, [sum(results).sum()])
            w = torch.full((3,), 2.0, requires_grad=True)
            expected = gradients_of(lambda x, w: 3 * (x * w).sin(), x, w)
            close(get_gradients(context_id)[x], expected[0])
            close(layer.rpc_sync().own_gradient(context_id), expected[1])
    assert layer.rpc_sync().forward(x, shift=1.0).shape == (3,)


def test_who_owns_a_value() -> None:
    w = torch.randn(3, requires_grad=True)
    rref = RRef(w)
    assert rref.to_here() is w and rref.local_value() is w
    assert rref.is_owner() and rref.owner_name() == "worker0"
    assert rpc_sync(OTHER, RRef.is_owner, (rref,)) is False
    on_self = remote("worker0", double, (w,))
    assert on_self.to_here() is on_self.local_value()
    there = remote(OTHER, Layer, (2.0,)).rpc_sync().weight_rref()
    assert isinstance(there, RRef) and there.owner_name() == OTHER and not there.is_owner()
    with pytest.raises(RuntimeError, match=r"worker 'worker0' does not own .* 'worker1' does"):
        there.local_value()


# --- values that are not there yet ---------------------------------------------------------------


def many_sines(rref: RRef[Tensor], count: int) -> Tensor:
    futures = [rref.rpc_async().sin() for _ in range(count)]
    assert not any(future.done() for future in futures)
    rpc_sync(OTHER, open_gate, ("sines",), timeout=10)
    total: Tensor = sum(future.wait() for future in futures)
    return total


def test_waiters_leave_the_owner_its_threads() -> None:
    """More than the owner has threads; then it can still serve the call that lets them go."""
    w = torch.randn(3, requires_grad=True)
    with context() as context_id:
        rref = remote(OTHER, behind_gate, (w, "sines"))
        backward(context_id, [rpc_sync(THIRD, many_sines, (rref, 80)).sum()])
        expected = gradients_of(lambda w: 80 * (3 * w).sin(), w)
        close(get_gradients(context_id)[w], expected[0])


def test_time_runs_out() -> None:
    x = torch.ones(3, requires_grad=True)
    rref = remote(OTHER, behind_gate, (x, "slow"))
    late = r"more than set timeout \(100 ms\)"
    with pytest.raises(RuntimeError, match=late):
        rref.to_here(timeout=0.1)
    with pytest.raises(RuntimeError, match=late):
        rref.rpc_sync(timeout=0.1).sin()
    with pytest.raises(RuntimeError, match=r"value on worker 'worker1' is not there after 0\.1 s"):
        rpc_sync(OTHER, RRef.local_value, (rref, 0.1))
    never = remote(OTHER, behind_gate, (x, "slow"), timeout=0.1)
    with pytest.raises(RuntimeError, match=r"timeout"):
        never.to_here()
    # Another worker learns that too, although the function has not ended.
    with pytest.raises(RuntimeError, match=r"timeout"):
        rpc_sync(THIRD, RRef.to_here, (never,))
    rpc_sync(OTHER, open_gate, ("slow",))
    close(rref.to_here(timeout=0), torch.full((3,), 3.0))


# --- errors --------------------------------------------------------------------------------------


def test_errors_of_functions_and_methods() -> None:
    """As calls raise them: with the worker, the type and the traceback in their text."""
    layer = remote(OTHER, Layer, (2.0,))
    no_future = r"not_later is marked .* returned 3 of type int"
    refused = r"'worker1'(.|\n)*in refuse(.|\n)*NoValue: this method refuses"
    nothing = r"(?s)'worker1'.*in fail.*NoValue: nothing here"
    failed = remote(OTHER, fail, ("nothing here",))
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (RuntimeError, refused, lambda: layer.remote().refuse().to_here()),
        (ValueError, "this method refuses", lambda: layer.rpc_sync().refuse(ValueError)),
        (TypeError, no_future, lambda: remote(OTHER, Layer.not_later, (layer,)).to_here()),
        (RuntimeError, "AttributeError: .*no_such", lambda: layer.rpc_sync().no_such()),
        (RuntimeError, nothing, lambda: rpc_sync(THIRD, RRef.to_here, (failed,))),
        (RuntimeError, nothing, lambda: failed.rpc_sync().sin()),
        (RuntimeError, "later", lambda: remote(OTHER, fail_later).to_here()),
        (NoValue, "own", lambda: remote("worker0", fail, ("own",)).to_here()),
    ]
    for block in (contextlib.nullcontext, context):
        with block():
            for kind, text, call in cases:
                with pytest.raises(kind, match=text):
                    call()


def test_references_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r"no worker 'nobody'"):
        remote("nobody", double, (torch.ones(1),))
    with pytest.raises(TypeError, match=r"func must be callable, not int"):
        remote(OTHER, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"timeout is -1 s"):
        RRef(1).to_here(timeout=-1)


# --- how long values live ------------------------------------------------------------------------


def make_watched() -> Layer:
    layer = Layer(1.0)
    note(weakref.ref(layer))
    return layer


def watched_is_alive() -> bool:
    gc.collect()
    (watched,) = take_notes()
    note(watched)
    return watched() is not None


def use_kept() -> None:
    (kept,) = take_notes()
    assert kept.rpc_sync().forward(torch.ones(3)).shape == (3,)


def test_a_value_lives_as_long_as_its_references() -> None:
    rref = remote(OTHER, make_watched)
    rpc_sync(THIRD, note, (rref,))
    del rref
    assert rpc_sync(OTHER, watched_is_alive)
    rpc_sync(THIRD, use_kept)
    deadline = time.monotonic() + 10
    while rpc_sync(OTHER, watched_is_alive):
        assert time.monotonic() < deadline, "the value is still alive"
