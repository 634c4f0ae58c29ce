"""Backward passes over workers that are threads: several, at once, failing, and what they leave."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    debug_info,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from dataparallel.distributed_autograd.endpoint import current_endpoint
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests.distributed_autograd.local_cases import (
    PATIENCE,
    Leaves,
    compare,
    expect_clean,
    expected_gradients,
    gradients_of,
    make_modules,
    parameters,
    until,
)
from tests.distributed_autograd.test_local_gradients import residuals, run_here

backward_module = sys.modules[backward.__module__]


@pytest.fixture
def workers(slots: list[str]) -> Iterator[LocalWorkers]:
    with LocalWorkers(slots, timeout=PATIENCE) as workers:
        yield workers
        expect_clean(workers)


def double(x: Tensor) -> Tensor:
    return x * 2


def test_a_retained_graph_adds_up_and_a_freed_one_is_an_error(workers: LocalWorkers) -> None:
    module = make_modules(["cpu"])[0]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    leaves = Leaves([*parameters([module]), x])
    expected, _ = expected_gradients(residuals, [module, module], x)
    with context() as context_id:
        roots = residuals([module, module], x)
        for times in (1, 2, 3):
            backward(context_id, roots, retain_graph=times < 3)
            wanted = [None if each is None else each * times for each in expected]
            compare(gradients_of(context_id, leaves), wanted)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            backward(context_id, roots)
    with context() as context_id:
        backward(context_id, residuals([module, module], x))
        compare(gradients_of(context_id, leaves), expected)


def test_answers_tell_which_messages_they_were_computed_from(workers: LocalWorkers) -> None:
    module = make_modules(["cpu"])[0]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    asked = AssertionError("a worker was asked for what it has told before")
    with context() as context_id:
        roots = residuals([module, module], x)
        with mock.patch.object(backward_module, "_origins", side_effect=asked):
            backward(context_id, roots)


def test_two_losses_of_one_context(workers: LocalWorkers) -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        first = rpc_sync("worker0", double, args=(x,)).sum()
        second = rpc_sync("worker1", double, args=(x * 2,)).sum()
        backward(context_id, [first])
        assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 2.0))
        backward(context_id, [second])
        assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 6.0))


def train(workers: LocalWorkers, seed: int) -> None:
    """One context, compared with ordinary autograd; the modules are of this thread alone."""
    torch.manual_seed(seed)
    places = [str(device) for device in workers.devices[1:]]
    modules = make_modules(places)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    leaves = Leaves([*parameters(modules), x])
    expected, _ = expected_gradients(residuals, modules, x)
    for _ in range(5):
        with context() as context_id:
            backward(context_id, residuals(modules, x))
            compare(gradients_of(context_id, leaves), expected)


def test_several_contexts_at_once(workers: LocalWorkers) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(train, workers, seed) for seed in range(8)]:
            done.result(PATIENCE * 2)


class Meet(torch.autograd.Function):
    """In backward, waits until the other one is in backward too."""

    barrier = threading.Barrier(2)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Meet.barrier.wait(PATIENCE)
        return gradient


def meet(x: Tensor) -> Tensor:
    return Meet.apply(x)  # type: ignore[no-any-return]


def test_two_workers_run_their_parts_at_the_same_time() -> None:
    x = torch.ones(3, requires_grad=True)
    with LocalWorkers(["cpu", "cpu"], timeout=PATIENCE) as workers:
        with context() as context_id:
            futures = [rpc_async(name, meet, args=(x,)) for name in ("worker0", "worker1")]
            backward(context_id, [(futures[0].wait() + futures[1].wait()).sum()])
            assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 2.0))
        expect_clean(workers)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise LookupError("no such thing")


def broken(x: Tensor) -> Tensor:
    return Broken.apply(x)  # type: ignore[no-any-return]


def test_an_error_in_backward_names_its_worker(workers: LocalWorkers) -> None:
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        with context() as context_id:
            hidden = rpc_sync("worker1", double, args=(x,))
            hidden = rpc_sync("worker2", broken, args=(hidden,))
            loss = rpc_sync("worker3", double, args=(hidden,)).sum()
            with pytest.raises(WorkerError, match="LookupError: no such thing") as caught:
                backward(context_id, [loss])
            assert caught.value.worker == "worker2"
            assert 'raise LookupError("no such thing")' in str(caught.value)
        expect_clean(workers)
        with context() as context_id:
            backward(context_id, [rpc_sync("worker2", double, args=(x,)).sum()])
            assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 2.0))


def test_an_error_in_forward_leaves_the_context_usable(workers: LocalWorkers) -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        with pytest.raises(RuntimeError, match="size of tensor a"):
            rpc_sync("worker0", torch.add, args=(x, torch.ones(2)))
        backward(context_id, [rpc_sync("worker0", double, args=(x,)).sum()])
        assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 2.0))


def test_hooks_run_at_the_worker_and_see_the_gradient(workers: LocalWorkers) -> None:
    seen: list[tuple[str, Any]] = []
    module = make_modules(["cpu"])[0]
    bias = list(module.parameters())[1]
    bias.register_hook(lambda gradient: gradient * 10)

    def note(parameter: Tensor) -> None:
        seen.append((current_endpoint().worker.name(), parameter.grad))

    bias.register_post_accumulate_grad_hook(note)
    with context() as context_id:
        x = torch.zeros(1, 3, dtype=torch.float64)
        result = rpc_sync("worker1", run_affine, args=(module, x))
        backward(context_id, [result.sum()])
        found = gradients_of(context_id, Leaves([bias]))[0]
    assert found is not None
    assert torch.equal(found, torch.full((3,), 10.0, dtype=torch.float64))
    assert [name for name, _ in seen] == ["worker1"]
    assert torch.equal(seen[0][1], found)
    assert bias.grad is None


def run_affine(module: nn.Module, x: Tensor) -> Any:
    return module(x.cpu())


def test_calls_without_a_context_are_not_recorded(workers: LocalWorkers) -> None:
    x = torch.ones(3, requires_grad=True)
    assert not rpc_sync("worker0", double, args=(x,)).requires_grad


def test_a_context_that_ends_while_a_call_runs(workers: LocalWorkers) -> None:
    go_on = threading.Event()

    def slow(x: Tensor) -> Tensor:
        assert go_on.wait(PATIENCE)
        return x * 2

    x = torch.ones(3, requires_grad=True)
    with context():
        future = rpc_async("worker0", slow, args=(x,))
    assert debug_info()["num_outstanding_calls"] == 1
    go_on.set()
    result = future.wait()
    assert debug_info()["num_outstanding_calls"] == 0
    assert result.tolist() == [2.0] * 3
    assert not result.requires_grad


def test_nothing_is_kept(workers: LocalWorkers) -> None:
    kept: list[weakref.ref[Any]] = []

    def note(module: nn.Module, x: Tensor) -> Any:
        hidden = run_here(module, x)
        kept.extend(weakref.ref(tensor) for tensor in (x, hidden))
        return hidden

    def step() -> None:
        module = make_modules(["cpu"])[0]
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        with context() as context_id:
            result = rpc_sync("worker0", note, args=(module, x))
            result = rpc_sync("worker1", note, args=(module, result))
            backward(context_id, [result.sum()])
            gradients = [*get_gradients(context_id).values()]
            kept.extend(weakref.ref(each) for each in (module, x, result, *gradients))

    step()
    assert len(kept) == 8

    def gone() -> bool:
        gc.collect()
        return not any(each() is not None for each in kept)

    # The thread that brought the last result lets go of it a moment later.
    until(gone, lambda: [each() for each in kept])
