"""A wrapper of one process inside distributed autograd contexts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.distributed_autograd import (
    backward,
    context,
    get_gradients,
    rpc_sync,
)
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests.distributed_autograd.reducer_cases import (
    WIDTH,
    Grads,
    Net,
    expect,
    fresh_table,
    in_context,
    look_up,
    words,
    wrap,
)
from tests.optimizer_cases import apply_torchs


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    with LocalWorkers({"server": "cpu"}, timeout=20.0):
        yield


def grads(module: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def batch(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, WIDTH, dtype=torch.double, generator=generator)


# --- which gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_of_parameters_and_inputs(replicas: int, view: bool) -> None:
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    for step in range(3):
        bare.zero_grad()
        table = fresh_table()
        (bare(table[words(step, 0)]).pow(2).sum() + bare.scale.sin()).backward()
        with context() as context_id:
            vectors = rpc_sync("server", look_up, (words(step, 0),))
            loss = model(vectors).pow(2).sum() + net.scale.sin()
            backward(context_id, [loss])
            expect(in_context(context_id, net), grads(bare), step)
            # Nothing else is there: not the leaves of the replicas.
            assert len(get_gradients(context_id)) == len(list(net.parameters()))
            (found,) = rpc_sync("server", get_gradients, (context_id,)).values()
            torch.testing.assert_close(found, table.grad)
        assert grads(net) == [None] * len(list(net.parameters()))
    model.close()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("devices", [["virtual:0"], ["virtual:1", "virtual:0"]], ids=len)
def test_replicas_on_accelerators(devices: list[str], view: bool) -> None:
    net, bare = Net().to(devices[0]), Net()
    model = dp.DistributedDataParallel(net, devices, gradient_as_bucket_view=view)
    for step in range(3):
        bare.zero_grad()
        table = fresh_table()
        bare(table[words(step, 0)]).pow(2).mean().backward()
        with context() as context_id:
            vectors = rpc_sync("server", look_up, (words(step, 0),))
            backward(context_id, [model(vectors.to(devices[0])).pow(2).mean()])
            found = in_context(context_id, net)
            expect([g if g is None else g.cpu() for g in found], grads(bare), step)
            (found_table,) = rpc_sync("server", get_gradients, (context_id,)).values()
            torch.testing.assert_close(found_table, table.grad)
    model.close()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_retained_graph_is_gone_through_again(replicas: int, view: bool) -> None:
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    bare(batch()).pow(2).sum().backward()
    with context() as context_id:
        loss = model(batch()).pow(2).sum()
        backward(context_id, [loss], retain_graph=True)
        once = grads(bare)
        expect(in_context(context_id, net), once, "once")
        backward(context_id, [loss])
        twice = [None if grad is None else 2 * grad for grad in once]
        expect(in_context(context_id, net), twice, "twice")
    model.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_bucket_views_in_grad_are_left_alone(replicas: int) -> None:
    net = Net()
    model = wrap(net, replicas, gradient_as_bucket_view=True)
    for step in range(2):
        model(batch(step)).sum().backward()
    before = grads(net)
    with context() as context_id:
        backward(context_id, [model(batch(7)).pow(2).sum()])
        expect(grads(net), before, "in the context")
    bare = Net()
    for step in (0, 1, 3):
        bare(batch(step)).sum().backward()
    model(batch(3)).sum().backward()
    expect(grads(net), grads(bare), "after the context")
    model.close()


def test_several_forwards_make_one_round() -> None:
    net, bare = Net(), Net()
    model = wrap(net, 2)

    def total(module: nn.Module) -> Tensor:
        first: Tensor = module(batch(1)).pow(2).sum()
        second: Tensor = module(batch(2), use_rare=False).sin().sum()
        return first + second

    total(bare).backward()
    with context() as context_id:
        backward(context_id, [total(model)])
        expect(in_context(context_id, net), grads(bare), "several forwards")
    model.close()


def test_a_stateless_wrapper_needs_nothing_special() -> None:
    net, bare = Net(), Net()
    model = dp.DataParallel(net, ["cpu", "cpu"])
    table = fresh_table()
    bare(table[words(0, 0)]).pow(2).sum().backward()
    with context() as context_id:
        vectors = rpc_sync("server", look_up, (words(0, 0),))
        backward(context_id, [model(vectors).pow(2).sum()])
        expect(in_context(context_id, net), grads(bare), "stateless")
        (found,) = rpc_sync("server", get_gradients, (context_id,)).values()
        torch.testing.assert_close(found, table.grad)
    assert grads(net) == [None] * len(list(net.parameters()))
    model.close()


# --- hooks ---------------------------------------------------------------------------------------


def _record(net: Net) -> list[tuple[str, Tensor]]:
    calls: list[tuple[str, Tensor]] = []

    def before(grad: Tensor) -> Tensor:
        calls.append(("before", grad.clone()))
        return grad * 3

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        calls.append(("after", parameter.grad.clone()))

    net.scale.register_hook(before)
    net.scale.register_post_accumulate_grad_hook(after)
    net.rare.weight.register_hook(before)
    return calls


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_hooks_on_parameters_run_once_and_see_the_gradient(replicas: int, view: bool) -> None:
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    got, expected = _record(net), _record(bare)
    for step in range(3):
        bare.zero_grad()
        bare(batch(step), use_rare=step == 1).pow(2).sum().backward()
        with context() as context_id:
            loss = model(batch(step), use_rare=step == 1).pow(2).sum()
            backward(context_id, [loss])
            expect(in_context(context_id, net), grads(bare), step)
    assert sorted(name for name, _ in got) == sorted(name for name, _ in expected)
    for name in ("before", "after"):
        mine = sorted([g for n, g in got if n == name], key=_size)
        theirs = sorted([g for n, g in expected if n == name], key=_size)
        expect(mine, theirs, name)
    model.close()


def _size(tensor: Tensor) -> tuple[int, float]:
    return tensor.numel(), float(tensor.sum())


def test_a_tensor_from_outside_gets_its_gradient_once_through_its_hooks() -> None:
    seen: list[Tensor] = []

    def double(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 2

    class Scaled(Net):
        factor: Any = None

        def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
            output: Tensor = super().forward(x, use_rare) * type(self).factor
            return output

    def run(wrapped: bool) -> tuple[Tensor, Grads]:
        factor = torch.full((), 0.7, dtype=torch.double, requires_grad=True)
        factor.register_hook(double)
        Scaled.factor = factor
        net = Scaled()
        if not wrapped:
            (net(batch()).pow(2).sum() + factor).backward()
            assert factor.grad is not None
            return factor.grad, grads(net)
        model = wrap(net, 2)
        with context() as context_id:
            backward(context_id, [model(batch()).pow(2).sum() + factor])
            found = get_gradients(context_id)
            assert factor.grad is None
            model.close()
            return found[factor], in_context(context_id, net)

    expected, bare = run(wrapped=False)
    got, wrapped = run(wrapped=True)
    torch.testing.assert_close(got, expected)
    expect(wrapped, bare, "the net")
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])


# --- what cannot be ------------------------------------------------------------------------------


def test_an_optimizer_in_backward_is_refused() -> None:
    net = Net()
    apply_torchs(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = wrap(net, 2)
    before = [p.detach().clone() for p in net.parameters()]
    with context() as context_id:
        with pytest.raises(RuntimeError, match=r"step with what is in \.grad; use an ordinary"):
            backward(context_id, [model(batch()).sum()])
        assert not any(grad is not None for grad in in_context(context_id, net))
    expect([p.detach() for p in net.parameters()], before, "nothing was stepped")
    model(batch()).sum().backward()
    assert not any(map(torch.equal, before[:2], net.parameters()))
    model.close()


class _Pause(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class _Pausing(Net):
    call: Callable[[], None] | None = None

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        y = super().forward(x, use_rare)
        call = type(self).call
        result: Tensor = y if call is None else _Pause.apply(y, call)
        return result


def test_backwards_of_two_contexts_at_the_same_time_are_an_error_in_the_second() -> None:
    net, bare = _Pausing(), Net()
    model = wrap(net, 1, gradient_as_bucket_view=True)
    errors: list[BaseException] = []

    def other() -> None:
        with context() as context_id:
            loss = model(batch(1)).sum()
            try:
                backward(context_id, [loss])
            except RuntimeError as error:
                errors.append(error)

    def pause() -> None:
        _Pausing.call = None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)

    bare(batch()).pow(2).sum().backward()
    with context() as context_id:
        _Pausing.call = pause
        backward(context_id, [model(batch()).pow(2).sum()])
        expect(in_context(context_id, net), grads(bare), "the first")
    assert [("another backward of the same wrapper is running" in str(e)) for e in errors] == [True]
    model.close()


def test_contexts_of_several_threads_take_turns() -> None:
    net, bare = Net(), Net()
    model = wrap(net, 2, gradient_as_bucket_view=True)
    turn, results = threading.Lock(), {}

    def train(number: int, before: threading.Barrier) -> None:
        with context() as context_id:
            for step in range(3):
                with turn:
                    backward(context_id, [model(batch(10 * number + step)).pow(2).sum()])
                before.wait(20)
            results[number] = in_context(context_id, net)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=train, args=(n, barrier)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(2):
        bare.zero_grad()
        for step in range(3):
            bare(batch(10 * number + step)).pow(2).sum().backward()
        expect(results[number], grads(bare), f"thread {number}")
    model.close()


def test_an_error_in_backward_leaves_the_wrapper_and_the_contexts_usable() -> None:
    net, bare = _Pausing(), Net()
    model = wrap(net, 2, gradient_as_bucket_view=True)

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with context() as context_id:
        _Pausing.call = fail
        loss = model(batch())
        _Pausing.call = None
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            backward(context_id, [loss.sum()])
        assert not any(grad is not None for grad in in_context(context_id, net))
    bare(batch(1)).pow(2).sum().backward()
    with context() as context_id, contextlib.nullcontext():
        backward(context_id, [model(batch(1)).pow(2).sum()])
        expect(in_context(context_id, net), grads(bare), "the next one")
    model.close()
