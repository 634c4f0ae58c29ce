"""One process with several replicas: failed backwards, threads, memory, and what is refused."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.reducer import round as reducer_round
from dataparallel.reducer.buckets import local_sum
from tests.ddp_cases import FailInBackward, Net, backward, batch, grads, two_layers
from tests.models import assert_all_close

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])

# --- backwards that fail -------------------------------------------------------------------------


@pytest.mark.in_pairs
@VIEWS
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["replica 0", "replica 1", "between", "a hook"])
def test_after_a_failed_backward(view: bool, error: type[BaseException], where: str) -> None:
    """The next step is right. Between two forwards, the backward of the second has ended before."""
    failing: list[BaseException | None] = [None]

    def forward(net: Any, x: Tensor) -> Any:
        replica = dp.current_replica()
        mine = replica is not None and where == f"replica {replica.index}"
        return net.layers[1](FailInBackward.apply(net.layers[0](x), failing[0] if mine else None))

    def refuse(grad: Tensor) -> None:
        if where == "a hook" and failing[0] is not None:
            raise failing[0]

    def run(model: nn.Module, seed: int) -> None:
        hidden = FailInBackward.apply(
            model(batch(seed=seed)), failing[0] if where == "between" else None
        )
        backward(model(hidden).pow(2).sum())

    net = Net("cpu", forward)
    net.layers[0].weight.register_hook(refuse)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], gradient_as_bucket_view=view)
    for seed in range(2):
        run(model, seed)
    failing[0] = error("on purpose")
    with pytest.raises(error, match="on purpose"):
        run(model, 2)
    failing[0] = None
    found = []
    for module in (model, net):
        net.zero_grad()
        run(module, 3)
        found.append(grads(net))
    assert_all_close(*found)
    model.close()
    left = weakref.ref(net)
    del model, net, module
    gc.collect()
    # The node that has raised refers to its error, and this to what was called.
    assert left() is None or where != "a hook"


# --- threads -------------------------------------------------------------------------------------


class Wait(torch.autograd.Function):
    """Tells in backward that it has come there, and goes on when an event is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, came: threading.Event, event: threading.Event) -> Tensor:
        ctx.came, ctx.event = came, event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.came.set()
        assert ctx.event.wait(20)
        return grad, None, None


def test_backward_in_another_thread_while_one_runs_is_an_error() -> None:
    came, go_on = threading.Event(), threading.Event()

    def forward(net: Any, x: Tensor, waits: bool) -> Any:
        hidden = net.layers[0](x)
        return Wait.apply(hidden, came, go_on) if waits else hidden

    net = Net("cpu", forward)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    slow, quick = model(batch(), True).sum(), model(batch(), False).sum()
    thread = threading.Thread(target=slow.backward)
    thread.start()
    assert came.wait(20)
    with pytest.raises(RuntimeError, match="another backward of the same wrapper is running"):
        quick.backward()
    go_on.set()
    thread.join(20)
    got = grads(net)
    net.zero_grad()
    backward(net(batch(), False).sum())
    assert_all_close(got, grads(net))


def test_buckets_are_summed_in_order_by_one_thread_at_a_time() -> None:
    summing, seen = threading.Event(), list[str]()
    summing.set()

    def forward(net: Any, x: Tensor) -> Any:
        return net.layers[1](Wait.apply(net.layers[0](x), threading.Event(), summing))

    def slowly(*given: Any) -> Any:
        summing.set()
        seen.append("begin")
        # The replica that has waited comes to the next buckets meanwhile.
        time.sleep(0.1)
        seen.append("end")
        return local_sum(*given)

    net, bare = Net("cpu", forward), Net("cpu", forward)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], bucket_cap_mb=0.0001)
    # The first backward tells the order.
    backward(model(batch()).sum())
    net.zero_grad()
    backward(bare(batch(seed=1)).sum())
    summing.clear()
    with mock.patch.object(reducer_round, "local_sum", slowly):
        backward(model(batch(seed=1)).sum())
    assert seen == ["begin", "end"] * len(model.reducer.buckets.all)
    assert_all_close(grads(net), grads(bare))


# --- sums ----------------------------------------------------------------------------------------


def _added(net: Any, x: Tensor) -> Tensor:
    """Adds views of two parameters; a chunk that begins with 0 uses neither."""
    if x[0, 0] == 0:
        return x.detach().requires_grad_()
    first, second = (layer.weight.view(4, 9) for layer in net.layers[:2])
    output: Tensor = x @ (first + second).view(6, 6)
    return output


@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused on the first replica"])
@pytest.mark.parametrize("cap", [25, 1e-6], ids=["one bucket", "two buckets"])
def test_parameters_whose_views_are_added(cap: float, unused: bool) -> None:
    """The engine gives both one gradient, in one memory."""
    bare, net = Net("cpu", _added), Net("cpu", _added)
    model = dp.DistributedDataParallel(net, ["cpu"] * 3, bucket_cap_mb=cap)
    x = batch()
    x[0, 0] *= not unused
    for _ in range(3):
        backward(model(x).pow(2).sum())
        # The first of three chunks.
        backward(bare(x[3:] if unused else x).pow(2).sum())
        assert_all_close(grads(net), grads(bare))
        net.zero_grad()
        bare.zero_grad()


# --- memory --------------------------------------------------------------------------------------


@VIEWS
def test_nothing_is_left_of_a_step_and_of_a_wrapper(slots: list[str], view: bool) -> None:
    net = Net(slots[0], two_layers)
    model = dp.DistributedDataParallel(net, slots[:2], gradient_as_bucket_view=view)

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(obj), Tensor) for obj in gc.get_objects())

    counts = []
    for seed in range(20):
        output = model(batch(slots[0], seed))
        alive = weakref.ref(output.grad_fn)
        backward(output.pow(2).sum() + model(batch(slots[0])).sum())
        net.zero_grad()
        del output
        assert alive() is None
        if seed in (10, 19):
            counts.append(count())
    assert counts[1] <= counts[0]
    objects: list[Any] = [model, model.reducer, model._training.leaves.rows[1][0]]
    gone = list(map(weakref.ref, objects))
    objects.clear()
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


# --- what others do, and what is refused ---------------------------------------------------------


# The compiler itself warns of what it does.
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd() -> None:
    net, bare = Net("cpu", two_layers), Net("cpu", two_layers)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    backward(bare(batch()).pow(2).sum())
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(torch.compile(backend="eager")):
        for _ in range(2):
            net.zero_grad()
            backward(model(batch()).pow(2).sum())
    assert_all_close(grads(net), grads(bare))


class ReplacesAParameter(dp.DistributedDataParallel[nn.Linear]):
    """Does at the last moment what belongs between two forwards."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.module.weight = nn.Parameter(torch.ones(1, 2))
        return super().scatter(inputs, kwargs, device_ids)


def test_parameters_that_come_or_go_in_a_forward_are_refused() -> None:
    with pytest.raises(ValueError, match="uninitialized parameter"):
        dp.DistributedDataParallel(nn.LazyLinear(3), ["cpu", "cpu"])
    model = ReplacesAParameter(nn.Linear(2, 1), ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="replaced while its forward was being prepared"):
        model(torch.ones(4, 2))
