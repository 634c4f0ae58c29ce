"""A wrapper of one process inside distributed autograd contexts: as the bare module outside."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from tests.cluster import Cluster
from tests.distributed_autograd.reducer_cases import (
    WIDTH,
    Grads,
    Net,
    expect,
    fresh_table,
    in_context,
    look_up,
    table_gradient,
    words,
    wrap,
)
from tests.distributed_autograd.rpc_workers import scenarios
from tests.optimizer_cases import apply_torchs

SERVER = "worker1"
REFUSED = r"calls other workers in its forward.*call the workers outside of the wrapper.*\.module"


def grads(module: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def batch(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, WIDTH, dtype=torch.double, generator=generator)


# --- which gradients ------------------------------------------------------------------------------


def parameters_and_inputs(make: Callable[[Net], Any], device: str = "cpu") -> None:
    net, bare = Net().to(device), Net()
    model = make(net)
    for step in range(3):
        bare.zero_grad()
        table = fresh_table()
        (bare(table[words(step, 0)]).pow(2).sum() + bare.scale.sin()).backward()
        with context() as context_id:
            vectors = rpc_sync(SERVER, look_up, (words(step, 0),)).to(device)
            backward(context_id, [model(vectors).pow(2).sum() + net.scale.sin()])
            found = [g if g is None else g.cpu() for g in in_context(context_id, net)]
            expect(found, grads(bare), step)
            # Nothing else is there: not the leaves of the replicas.
            assert len(get_gradients(context_id)) == len(list(net.parameters()))
            found_table = rpc_sync(SERVER, table_gradient, (context_id,))
            torch.testing.assert_close(found_table, table.grad)
        assert grads(net) == [None] * len(list(net.parameters()))
    model.close()


def wrapped(net: Net, devices: list[str], view: bool) -> Any:
    return dp.DistributedDataParallel(net, devices, gradient_as_bucket_view=view)


def stateless(net: Net) -> Any:
    return dp.DataParallel(net, ["cpu", "cpu"])


def test_gradients_of_parameters_and_inputs(cluster: Cluster) -> None:
    places = (["cpu"], ["cpu"] * 2, ["cpu"] * 3, ["virtual:0"], ["virtual:1", "virtual:0"])
    cases = [
        functools.partial(
            parameters_and_inputs,
            functools.partial(wrapped, devices=devices, view=view),
            devices[0],
        )
        for devices in places
        for view in (False, True)
    ]
    stateless_case = functools.partial(parameters_and_inputs, stateless)
    scenarios(cluster, 2, *cases, stateless_case, virtual=True)


def retained_graph(replicas: int, view: bool) -> None:
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    bare(batch()).pow(2).sum().backward()
    once = grads(bare)
    with context() as context_id:
        loss = model(batch()).pow(2).sum()
        backward(context_id, [loss], retain_graph=True)
        expect(in_context(context_id, net), once, "once")
        backward(context_id, [loss])
        twice = [None if grad is None else 2 * grad for grad in once]
        expect(in_context(context_id, net), twice, "twice")
    model.close()


def views_in_grad_are_left_alone(replicas: int, view: bool) -> None:
    net = Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
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


def several_forwards(replicas: int, view: bool) -> None:
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)

    def total(module: nn.Module) -> Tensor:
        first: Tensor = module(batch(1)).pow(2).sum()
        second: Tensor = module(batch(2), use_rare=False).sin().sum()
        return first + second

    total(bare).backward()
    with context() as context_id:
        backward(context_id, [total(model)])
        expect(in_context(context_id, net), grads(bare), "several forwards")
    model.close()


def hooks_on_parameters(replicas: int, view: bool) -> None:
    net, bare = Net(), Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    got, expected = record_hooks(net), record_hooks(bare)
    for step in range(3):
        bare.zero_grad()
        bare(batch(step), use_rare=step == 1).pow(2).sum().backward()
        with context() as context_id:
            backward(context_id, [model(batch(step), use_rare=step == 1).pow(2).sum()])
            expect(in_context(context_id, net), grads(bare), step)
    for name in expected:
        expect(sorted(got[name], key=_size), sorted(expected[name], key=_size), name)
    model.close()


def record_hooks(net: Net) -> dict[str, list[Tensor]]:
    """What hooks see, which change the gradient before it is added."""
    seen: dict[str, list[Tensor]] = {"before": []}

    def before(grad: Tensor) -> Tensor:
        seen["before"].append(grad.clone())
        return grad * 3

    net.scale.register_hook(before)
    net.rare.weight.register_hook(before)
    return seen


def _size(tensor: Tensor | None) -> tuple[int, float]:
    assert tensor is not None
    return tensor.numel(), float(tensor.sum())


@pytest.mark.parametrize(
    "case",
    [retained_graph, views_in_grad_are_left_alone, several_forwards, hooks_on_parameters],
)
def test_a_wrapper_in_a_context(cluster: Cluster, case: Callable[[int, bool], None]) -> None:
    options = [(replicas, view) for replicas in (1, 2) for view in (False, True)]
    scenarios(cluster, 1, *(functools.partial(case, *option) for option in options))


class _Scaled(Net):
    factor: Tensor

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        output: Tensor = super().forward(x, use_rare) * type(self).factor
        return output


def a_tensor_from_outside_gets_its_gradient_once() -> None:
    seen: list[Tensor] = []

    def double(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 2

    def fresh() -> tuple[Tensor, Net]:
        factor = torch.full((), 0.7, dtype=torch.double, requires_grad=True)
        factor.register_hook(double)
        _Scaled.factor = factor
        return factor, _Scaled()

    factor, net = fresh()
    (net(batch()).pow(2).sum() + factor).backward()
    expected = [factor.grad, *grads(net)]
    factor, net = fresh()
    model = wrap(net, 2)
    with context() as context_id:
        backward(context_id, [model(batch()).pow(2).sum() + factor])
        found = [get_gradients(context_id)[factor], *in_context(context_id, net)]
        assert factor.grad is None
    expect(found, expected, "the factor and the net")
    torch.testing.assert_close(*seen)
    model.close()


# --- calls in the forward of a wrapped module -----------------------------------------------------


class Caller(nn.Module):
    """Looks words up on another worker in its forward, or in a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, indices: Tensor, calls: str = "none") -> Tensor:
        vectors = fresh_table().detach()[indices]
        if calls != "none":
            vectors = rpc_sync(SERVER, look_up, (indices,))
        if calls == "detached":
            vectors = vectors.detach()
        output: Tensor = self.net(vectors)
        return output


def calls_are_refused(replicas: int, nonfinite: str) -> None:
    module, bare = Caller(), Caller()
    model = wrap(module, replicas, nonfinite=nonfinite)
    for step in range(2):
        bare.zero_grad()
        bare(words(step, 0)).pow(2).mean().backward()
        with context() as context_id:
            with pytest.raises(RuntimeError, match=REFUSED):
                model(words(step, 0), calls="all")
            # The wrapper goes on, in the same context, too.
            backward(context_id, [model(words(step, 0)).pow(2).mean()])
            expect(in_context(context_id, module), grads(bare), step)
        with context() as context_id:
            # What needs no gradient of another worker is right.
            backward(context_id, [model(words(step, 0), calls="detached").pow(2).mean()])
            expect(in_context(context_id, module), grads(bare), step)
            assert not rpc_sync(SERVER, get_gradients, (context_id,))
    model.close()


class _Closure(Net):
    held: Tensor

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        return super().forward(x + type(self).held, use_rare)


def results_that_are_no_arguments_are_refused() -> None:
    model = wrap(_Closure(), 2)
    with context():
        _Closure.held = rpc_sync(SERVER, look_up, (words(1, 0),)).mean()
        with pytest.raises(RuntimeError, match="results of such calls that are not among its arg"):
            model(fresh_table().detach()[words(0, 0)])
    model.close()


def one_replica_in_one_process_is_the_bare_module() -> None:
    module = Caller()
    model = wrap(module, 1)
    table, bare = fresh_table(), Net()
    bare(table[words(0, 0)]).pow(2).mean().backward()
    with context() as context_id:
        backward(context_id, [model(words(0, 0), calls="all").pow(2).mean()])
        expect(in_context(context_id, module), grads(bare), "the module")
        found = rpc_sync(SERVER, table_gradient, (context_id,))
        torch.testing.assert_close(found, table.grad)
    model.close()


def test_calls_in_forward(cluster: Cluster) -> None:
    options = ((1, "raise"), (2, "ignore"), (3, "skip"))
    refused = [functools.partial(calls_are_refused, *each) for each in options]
    others = (
        results_that_are_no_arguments_are_refused,
        a_tensor_from_outside_gets_its_gradient_once,
    )
    scenarios(cluster, 2, *refused, *others, one_replica_in_one_process_is_the_bare_module)


# --- what cannot be -------------------------------------------------------------------------------


def an_optimizer_in_backward_is_refused() -> None:
    net = Net()
    apply_torchs(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = wrap(net, 2)
    before = [p.detach().clone() for p in net.parameters()]
    with context() as context_id:
        with pytest.raises(RuntimeError, match=r"distributed autograd backward .* into \.grad"):
            backward(context_id, [model(batch()).sum()])
        assert not any(grad is not None for grad in in_context(context_id, net))
    expect([p.detach() for p in net.parameters()], before, "nothing was stepped")
    model(batch()).sum().backward()
    assert not any(map(torch.equal, before[:2], net.parameters()))
    model.close()


class _Calls(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class _Calling(Net):
    call: Callable[[], None] | None = None

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        y = super().forward(x, use_rare)
        call = type(self).call
        result: Tensor = y if call is None else _Calls.apply(y, call)
        return result


def backwards_of_two_contexts_at_the_same_time() -> None:
    """An error in the second."""
    net, bare = _Calling(), Net()
    model = wrap(net, 1, nonfinite="raise")
    errors: list[str] = []

    def other() -> None:
        with context() as context_id:
            try:
                backward(context_id, [model(batch(1)).sum()])
            except RuntimeError as error:
                errors.append(str(error))

    def pause() -> None:
        _Calling.call = None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)

    bare(batch()).pow(2).sum().backward()
    with context() as context_id:
        _Calling.call = pause
        backward(context_id, [model(batch()).pow(2).sum()])
        expect(in_context(context_id, net), grads(bare), "the first")
    (error,) = errors
    assert "another backward of the same wrapper is running" in error
    model.close()


def contexts_of_several_threads_take_turns() -> None:
    net, bare = Net(), Net()
    model = wrap(net, 2, gradient_as_bucket_view=True)
    turn, results = threading.Lock(), {}
    barrier = threading.Barrier(2)

    def train(number: int) -> None:
        with context() as context_id:
            for step in range(3):
                with turn:
                    backward(context_id, [model(batch(10 * number + step)).pow(2).sum()])
                barrier.wait(20)
            results[number] = in_context(context_id, net)

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
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


def _fail() -> None:
    raise ZeroDivisionError("on purpose")


def an_error_in_backward_leaves_the_wrapper_usable() -> None:
    net, bare = _Calling(), Net()
    model = wrap(net, 2, gradient_as_bucket_view=True)
    with context() as context_id:
        _Calling.call = _fail
        loss = model(batch())
        _Calling.call = None
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            backward(context_id, [loss.sum()])
        assert not any(grad is not None for grad in in_context(context_id, net))
    bare(batch(1)).pow(2).sum().backward()
    with context() as context_id:
        backward(context_id, [model(batch(1)).pow(2).sum()])
        expect(in_context(context_id, net), grads(bare), "the next one")
    model.close()


def gradients_that_are_not_finite_leave_nothing() -> None:
    model = wrap(nn.Linear(3, 1), 2, nonfinite="skip")
    with context() as context_id:
        with model.no_sync():
            spoiled = model(torch.full((2, 3), float("nan"))).sum()
        backward(context_id, [spoiled])
        backward(context_id, [model(torch.ones(2, 3)).sum()])
        found = get_gradients(context_id)
        assert all(bool(grad.isfinite().all()) for grad in found.values())
    assert model.num_skipped == 1
    model.close()


def test_what_cannot_be(cluster: Cluster) -> None:
    scenarios(
        cluster,
        1,
        an_optimizer_in_backward_is_refused,
        backwards_of_two_contexts_at_the_same_time,
        contexts_of_several_threads_take_turns,
        an_error_in_backward_leaves_the_wrapper_usable,
        gradients_that_are_not_finite_leave_nothing,
    )
