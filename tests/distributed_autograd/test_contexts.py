"""Contexts of many threads and workers: how they begin, what they keep apart, how they end."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import (
    backward,
    context,
    debug_info,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from tests.distributed_autograd.rpc_workers import (
    everywhere,
    expect_clean_everywhere,
    gated,
    leaf,
    note,
    ones,
    open_gate,
    pass_gate,
    take_notes,
)

pytestmark = pytest.mark.on_worker0

THREADS = 8
#: True if a new thread has the context variables of the one that starts it, as in 3.14t.
INHERITED = bool(getattr(sys.flags, "thread_inherit_context", False))
NOTHING = {"num_current_backward_passes": 0, "num_autograd_contexts": 0}


def in_threads(function: Callable[[int], None], count: int = THREADS) -> None:
    """Run a function in several threads that begin together."""
    together = threading.Barrier(count)

    def run(index: int) -> None:
        together.wait(20)
        function(index)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, index) for index in range(count)]:
            future.result(60)


# --- calls and passes that are under way ---------------------------------------------------------


def behind_gate(x: Tensor, name: str, on: str | None) -> Tensor:
    """Goes on, and perhaps calls on, after the context has ended."""
    open_gate(f"{name} entered")
    pass_gate(name)
    y = x * leaf("w")
    return rpc_sync(on, torch.mul, (y, 2.0)) if on else y


def test_calls_outlive_a_context() -> None:
    """Their results have no connection, and nothing comes to life again."""
    x = ones()
    for name, on in (("late", None), ("nested", "worker2")):
        with context():
            future = rpc_async("worker1", behind_gate, (x, name, on))
            torch_rpc.rpc_sync("worker1", pass_gate, (f"{name} entered",))
        # The release has to be there before the function goes on.
        expect_clean_everywhere()
        torch_rpc.rpc_sync("worker1", open_gate, (name,))
        assert not future.wait().requires_grad
        expect_clean_everywhere()
    with context():
        calls = [rpc_async(f"worker{1 + i % 2}", torch.mul, (x, 2.0)) for i in range(60)]
    # The end overtakes some of the calls: they run all the same.
    assert all(call.wait().tolist() == [2] * 3 for call in calls)


def test_a_context_ends_in_backward() -> None:
    """The block ends in one thread while a backward of its context runs in another."""
    x = ones()
    failed: list[BaseException] = []

    def run(context_id: int, loss: Tensor) -> None:
        try:
            backward(context_id, [loss], timeout=20)
        except RuntimeError as error:
            failed.append(error)

    with context() as context_id:
        loss = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", gated, (x, "pass")), 2.0)).sum()
        thread = threading.Thread(target=run, args=(context_id, loss))
        thread.start()
        torch_rpc.rpc_sync("worker1", pass_gate, ("pass entered",))
        for worker in ("worker0", "worker1"):
            info = torch_rpc.rpc_sync(worker, debug_info)
            assert info == dict.fromkeys(NOTHING, 1)
    thread.join(10)
    assert not thread.is_alive()
    assert "released" in str(failed[0])
    torch_rpc.rpc_sync("worker1", open_gate, ("pass",))
    expect_clean_everywhere()
    assert everywhere(debug_info) == [NOTHING] * 4


# --- who has a context ---------------------------------------------------------------------------


def has_context(context_id: int) -> bool:
    try:
        return get_gradients(context_id) == {}
    except ValueError:
        return False


def test_who_takes_part() -> None:
    """Without tensors, too; in nested calls; not in calls of other threads, or after the block."""
    with context() as context_id:
        assert rpc_sync("worker1", has_context, (context_id,))
        assert rpc_sync("worker1", rpc_sync, ("worker2", has_context, (context_id,)))
        assert not torch_rpc.rpc_sync("worker3", has_context, (context_id,))
        with ThreadPoolExecutor(1) as pool:
            takes_part = pool.submit(rpc_sync, "worker3", has_context, (context_id,)).result(20)
            assert takes_part == INHERITED
    expect_clean_everywhere()
    assert not any(everywhere(has_context, context_id))


def open_block() -> None:
    with context():
        pass


def test_blocks_do_not_nest() -> None:
    with context() as outer:
        with pytest.raises(RuntimeError, match=f"already runs in .* context {outer}"), context():
            pass
        with pytest.raises(RuntimeError, match=f"already runs in .* context {outer}"):
            rpc_sync("worker1", open_block)
        assert get_gradients(outer) == {}
        refused = pytest.raises(RuntimeError, match=f"already runs in .* context {outer}")
        with ThreadPoolExecutor(1) as pool, refused if INHERITED else contextlib.nullcontext():
            pool.submit(open_block).result(20)
    with context() as other:
        assert other != outer


# --- many at once --------------------------------------------------------------------------------


def weighted(x: Tensor) -> Tensor:
    return x * leaf("shared")


def relayed(x: Tensor, names: list[str]) -> Tensor:
    x = weighted(x)
    if names:
        x = rpc_sync(names[0], relayed, (x, names[1:])) + x
    return x


def local_relay(x: Tensor, hops: int) -> Tensor:
    x = weighted(x)
    return local_relay(x, hops - 1) + x if hops else x


def test_passes_of_one_context() -> None:
    """Several threads run backward in one context, through one graph: gradients add up."""
    x = ones()
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker2", "worker1"]).sum()
        backward(context_id, [loss], retain_graph=True)
        once = get_gradients(context_id)[x].clone()
        in_threads(lambda index: backward(context_id, [loss], retain_graph=True))
        torch.testing.assert_close(get_gradients(context_id)[x], once * (THREADS + 1))


def train_here(rank: int) -> None:
    names = [f"worker{(rank + hop) % 4}" for hop in range(1, 6)]
    x = ones()
    # All workers have the same weight.
    expected = torch.autograd.grad(local_relay(x, len(names)).sum(), x)[0]

    def train(index: int) -> None:
        for _ in range(4):
            with context() as context_id:
                backward(context_id, [(relayed(x, names) * (index + 1)).sum()])
                torch.testing.assert_close(get_gradients(context_id)[x], expected * (index + 1))

    in_threads(train, 4)
    assert x.grad is None


def test_workers_that_are_all_roots() -> None:
    """Every worker is a root, a hop and a server at the same time, in several threads."""
    futures = [torch_rpc.rpc_async(f"worker{rank}", train_here, (rank,)) for rank in range(1, 4)]
    train_here(0)
    torch.futures.wait_all(futures)


# --- what is freed -------------------------------------------------------------------------------


class Witness(torch.autograd.Function):
    """Keeps an object in the graph whose end can be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.witness = torch.zeros(1)
        note(weakref.ref(ctx.witness))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def witnessed(x: Tensor) -> Tensor:
    y: Tensor = Witness.apply(x * leaf("w"))
    return y


def note_gradients(context_id: int) -> None:
    for gradient in get_gradients(context_id).values():
        note(weakref.ref(gradient))


def living(collect: bool) -> int:
    if collect:
        gc.collect()
    references = take_notes()
    for reference in references:
        note(reference)
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_and_gradients_are_freed(fails: bool) -> None:
    """The end of the context frees them; without a failure, it needs no collection of garbage."""
    x = ones()
    with context() as context_id:
        y = witnessed(x)
        loss = rpc_sync("worker1", witnessed, (y,)).sum()
        if fails:
            y.register_hook(lambda gradient: 1 / 0)
        with (
            pytest.raises(ZeroDivisionError, match="division")
            if fails
            else contextlib.nullcontext()
        ):
            backward(context_id, [loss], retain_graph=True)
        for worker in ("worker0", "worker1"):
            rpc_sync(worker, note_gradients, (context_id,))
            assert rpc_sync(worker, living, (False,)) >= 1
    del y, loss
    expect_clean_everywhere()
    assert sum(everywhere(living, fails)) == 0


def test_a_gradient_may_outlive_its_context() -> None:
    x = ones()
    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2.0))
        backward(context_id, [y.sum()])
        gradient = get_gradients(context_id)[x]
    assert gradient.tolist() == y.tolist() == [2] * 3
    with pytest.raises(RuntimeError, match="received from another worker"):
        y.sum().backward()
