"""Many calls and backward passes at once, from several threads and several workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd import (
    backward,
    context,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import forget_leaves, leaf, own_gradients, workers
from tests.distributed_autograd.rpc_workers import rpc_world, scenarios

THREADS = 8


def in_threads(function: Callable[[int], None], count: int = THREADS) -> None:
    """Run a function in several threads that begin together."""
    together = threading.Barrier(count)

    def run(index: int) -> None:
        together.wait(20)
        function(index)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, index) for index in range(count)]:
            future.result(60)


def weighted(x: Tensor) -> Tensor:
    return x * leaf("shared")


def relayed(x: Tensor, names: list[str]) -> Tensor:
    x = weighted(x)
    if names:
        x = rpc_sync(names[0], relayed, (x, names[1:])) + x
    return x


# --- from several threads --------------------------------------------------------------------


def contexts_of_threads() -> None:
    """All use one weight at each worker; gradients stay apart."""
    names = ["worker1", "worker2", "worker0", "worker1"]
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def train(index: int) -> None:
        for step in range(5):
            scale = index + 10 * step + 1.0
            with context() as context_id:
                backward(context_id, [(relayed(x, names) * scale).sum()])
                found = [get_gradients(context_id)[x] / scale]
                for worker in workers():
                    there = torch_rpc.rpc_sync(worker, own_gradients, (context_id,))
                    found.append(there["shared"] / scale)
                results.append(found)

    results: list[list[Tensor]] = []
    in_threads(train)
    assert len(results) == 5 * THREADS
    for found in results:
        torch.testing.assert_close(found, results[0])
    assert x.grad is None


def passes_of_one_context() -> None:
    """Several threads run backward in one context: the gradients add up."""
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        losses = [
            rpc_sync(f"worker{1 + index % 2}", torch.mul, (x, 1.0 + index)).sum()
            for index in range(THREADS)
        ]
        in_threads(lambda index: backward(context_id, [losses[index]]))
        assert get_gradients(context_id)[x].tolist() == [sum(range(1, THREADS + 1))] * 3


def passes_over_one_graph() -> None:
    """Several threads run backward through the very same graph, which is retained."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker2", "worker1"]).sum()
        backward(context_id, [loss], retain_graph=True)
        once = get_gradients(context_id)[x].clone()
        in_threads(lambda index: backward(context_id, [loss], retain_graph=True))
        torch.testing.assert_close(get_gradients(context_id)[x], once * (THREADS + 1))


def test_threads(cluster: Cluster) -> None:
    scenarios(cluster, 3, contexts_of_threads, passes_of_one_context, passes_over_one_graph)


def first_use_of_a_leaf() -> None:
    """Passes that begin at the same moment all meet leaves that no pass has seen before."""
    for _ in range(15):
        for worker in workers():
            torch_rpc.rpc_sync(worker, forget_leaves)
        starts = threading.Barrier(THREADS)

        def train(index: int, starts: threading.Barrier = starts) -> None:
            x = torch.ones(3, dtype=torch.float64)
            with context() as context_id:
                losses = [rpc_sync(f"worker{rank}", many_leaves, (x,)).sum() for rank in (1, 2)]
                starts.wait(20)
                backward(context_id, [sum(losses[1:], losses[0])], timeout=20)
                for rank in (1, 2):
                    there = torch_rpc.rpc_sync(f"worker{rank}", own_gradients, (context_id,))
                    assert len(there) == 20
                    assert all(value.tolist() == [1] * 3 for value in there.values())

        in_threads(train)


def many_leaves(x: Tensor) -> Tensor:
    leaves = [leaf(f"leaf {index}") for index in range(20)]
    return torch.stack([x * tensor for tensor in leaves])


def test_first_use_of_a_leaf(cluster: Cluster) -> None:
    scenarios(cluster, 3, first_use_of_a_leaf)


# --- from several workers --------------------------------------------------------------------


def train_everywhere(rank: int, world_size: int) -> None:
    """Every worker is a root, a hop and a server at the same time, in several threads."""
    names = [f"worker{(rank + hop) % world_size}" for hop in range(1, 6)]
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    # All workers have the same weight.
    expected = torch.autograd.grad(local_relay(x, len(names)).sum(), x)[0]

    def train(index: int) -> None:
        for _ in range(4):
            with context() as context_id:
                backward(context_id, [(relayed(x, names) * (index + 1)).sum()])
                torch.testing.assert_close(get_gradients(context_id)[x], expected * (index + 1))

    in_threads(train, 4)
    assert x.grad is None


def local_relay(x: Tensor, hops: int) -> Tensor:
    x = weighted(x)
    return local_relay(x, hops - 1) + x if hops else x


def test_workers_that_are_all_roots(cluster: Cluster) -> None:
    rpc_world(cluster, train_everywhere, 4)


def root_there(context_id: int, x: Tensor, names: list[str]) -> None:
    backward(context_id, [relayed(x, names).sum()])


def roots_of_one_context() -> None:
    """Workers start backward passes in one context at the same time, through common leaves."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        chains = [["worker1", "worker2"], ["worker0", "worker2"], ["worker0", "worker1"]]
        futures = [
            rpc_async(f"worker{rank}", root_there, (context_id, x, chains[rank]))
            for rank in range(3)
        ]
        torch.futures.wait_all(futures)
        expected = torch.autograd.grad(local_relay(x, 2).sum(), x)[0]
        torch.testing.assert_close(get_gradients(context_id)[x], 3 * expected)


# --- calls that do not wait ------------------------------------------------------------------


def asynchronous_calls() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        futures = [rpc_async(f"worker{index % 3}", torch.mul, (x, index)) for index in range(30)]
        backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])
        assert get_gradients(context_id)[x].tolist() == [sum(range(30))] * 3


def future_functions() -> None:
    """What follows a future is a part of the graph."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        future = rpc_async("worker1", torch.mul, (x, 2)).then(lambda done: done.value() * 3)
        both = torch.futures.collect_all([future, rpc_async("worker2", torch.mul, (x, 5))])
        backward(context_id, [sum(part.value() for part in both.wait()).sum()])
        assert get_gradients(context_id)[x].tolist() == [11] * 3


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


def asynchronous_execution() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        y = rpc_sync("worker1", added_later, ("worker2", x))
        z = rpc_sync("worker1", added_later, ("worker0", y))
        backward(context_id, [z.sum()])
        weight = rpc_sync("worker1", leaf, ("w",)).detach()
        torch.testing.assert_close(get_gradients(context_id)[x], 9 * weight * weight)


def asynchronous_execution_fails() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        for function, arguments in ((fails_later, ("worker2", x)), (no_future, (x,))):
            try:
                rpc_sync("worker1", function, arguments)
            except Exception as error:
                assert "unsupported operand" in str(error) or "Future" in str(error)
            else:
                raise AssertionError("it did not fail")
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def test_several_roots_of_one_context(cluster: Cluster) -> None:
    scenarios(cluster, 3, roots_of_one_context)


def test_calls_that_do_not_wait(cluster: Cluster) -> None:
    scenarios(cluster, 3, asynchronous_calls, future_functions, asynchronous_execution)


def test_asynchronous_functions_that_fail(cluster: Cluster) -> None:
    scenarios(cluster, 3, asynchronous_execution_fails)
