"""Modules compiled with torch.compile, in replicas.

Oracle: the same module bare and not compiled. Nothing is compiled twice, and nothing at all when
calls go on as before.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from dataparallel import DataParallel
from tests.compiled.cases import (
    HOW,
    WRAPPERS,
    Net,
    Wrapper,
    compare,
    compile_in_place,
    compile_nested,
    compile_parts,
    compile_whole,
    twins,
)
from tests.models import assert_all_close


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("how, backend", HOW)
@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_outputs_and_gradients(
    kind: str,
    how: Callable[..., nn.Module],
    backend: str,
    wrapper: Wrapper,
    started: list[tuple[str, str]],
) -> None:
    slots = ["cpu"] * 3 if kind == "cpu" else [f"virtual:{i}" for i in range(3)]
    bare, net = twins(slots[0])
    model = wrapper(how(net, backend=backend), slots)
    for batch in (14, 9, 20):
        compare(model, bare, batch, 4, device=slots[0])
    assert started
    assert all("replica" in thread for _, thread in started)
    # At the first backward, several devices could come to it at the same time.
    assert {trigger for trigger, _ in started} == {"DYNAMO"}


@pytest.mark.parametrize("how", [compile_in_place, compile_parts])
def test_compiled_after_wrapping(
    how: Callable[..., nn.Module], started: list[tuple[str, str]]
) -> None:
    bare, net = twins()
    model = DataParallel(net, ["cpu", "cpu"])
    compare(model, bare, 7, 4)
    assert not started
    how(net, backend="eager")
    compare(model, bare, 7, 4)
    assert started


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_nothing_is_compiled_again(
    kind: str, wrapper: Wrapper, started: list[tuple[str, str]]
) -> None:
    slots = ["cpu"] * 2 if kind == "cpu" else ["virtual:0", "virtual:1"]
    bare, net = twins(slots[0])
    model = wrapper(compile_nested(net, backend="aot_eager"), slots)
    for _ in range(2):
        compare(model, bare, 8, 4, device=slots[0])
    # Equal chunks: once for each device.
    assert len(started) == len(set(slots))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(20):
            compare(model, bare, 8, 4, device=slots[0])
    with torch.no_grad():
        model(torch.randn(8, 4, dtype=torch.double, device=slots[0]))
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 4, dtype=torch.double, device=slots[0]))
    assert len(started) <= 3 * len(set(slots))


def test_replicas_on_one_device_share_what_is_compiled(started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend="eager", dynamic=True), ["cpu"] * 3)
    for batch in (14, 9, 20, 33):
        compare(model, bare, batch, 4)
    assert started == [("DYNAMO", "dataparallel-replica-0")]


def test_entries_stay_in_their_order() -> None:
    """An entry that moves while another thread goes through them is not found by that one."""
    _, net = twins()
    model = DataParallel(compile_whole(net, backend="eager", dynamic=False), ["cpu"] * 2)
    entries: Any = torch._dynamo.eval_frame._debug_get_cache_entry_list
    orders = []
    for batch in (8, 12, 16, 8, 12):
        model(torch.randn(batch, 4, dtype=torch.double))
        orders.append([entry.compile_id for entry in entries(Net.forward)])
    assert len(orders[2]) == 3
    assert orders[2] == orders[3] == orders[4]


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_many_shapes(kind: str, started: list[tuple[str, str]]) -> None:
    slots = ["cpu"] * 3 if kind == "cpu" else [f"virtual:{i}" for i in range(3)]
    bare, net = twins(slots[0])
    model = DataParallel(compile_parts(net, backend="aot_eager"), slots)
    shapes = random.Random(0)
    for _ in range(50):
        compare(model, bare, shapes.randint(3, 40), shapes.randint(2, 9), 4, device=slots[0])
    devices = len(set(slots))
    # For each device: one size, any size, size 1 in the batch.
    assert len(started) <= 2 * 4 * devices


def test_a_limit_for_each_device(started: list[tuple[str, str]]) -> None:
    slots = [f"virtual:{i}" for i in range(4)]
    bare, net = twins(slots[0])
    model = DataParallel(compile_whole(net, backend="eager", dynamic=False), slots)
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch in (8, 12, 8, 12):
            compare(model, bare, batch, 4, device=slots[0])
    assert len(started) == 8


def test_the_cache_may_be_emptied() -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, 8, 4)
        compare(model, bare, 8, 4)
        torch._dynamo.reset()


def test_replicas_within_replicas() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(self.first(x))
            return output

    bare, net = twins(build=Outer)
    net.first = compile_whole(net.get_submodule("first"), backend="eager")
    net.inner = DataParallel(
        compile_whole(net.get_submodule("inner"), backend="eager"), ["cpu"] * 2
    )
    model = DataParallel(net, ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, 12, 4)


def test_clones_are_let_go() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    class Noted(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net = Noted()
    net.register_forward_pre_hook(lambda module, _: alive.append(weakref.ref(module)))
    model = DataParallel(compile_in_place(net, backend="eager"), ["cpu"] * 2)
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
    gc.collect()
    assert len(alive) >= 2
    assert not [reference for reference in alive if reference() is not None]


# --- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["replica0", "sync"])
def test_buffers(buffers: Any, started: list[tuple[str, str]]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    plain, net = twins(build=build)
    expected = DataParallel(plain, ["cpu"] * 2, buffers=buffers)
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2, buffers=buffers)
    for batch in (12, 12, 9):
        compare(model, expected, batch, 4)
        assert_all_close(net.buffers(), plain.buffers())
    model.eval(), expected.eval()
    compare(model, expected, 12, 4)
    assert started


def test_mean_of_buffers() -> None:
    class Remembers(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.copy_(x.mean())
            return x * 2

    module = Remembers()
    model = DataParallel(compile_whole(module, backend="aot_eager"), ["cpu"] * 3, buffers="mean")
    for _ in range(2):
        x = torch.randn(8, 4)
        model(x)
        torch.testing.assert_close(module.seen, x.mean())


# --- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout(backend: str) -> None:
    model = DataParallel(compile_whole(nn.Dropout(0.5), backend=backend), ["cpu"] * 3)
    plain = DataParallel(nn.Dropout(0.5), ["cpu"] * 3)
    x = torch.ones(300, requires_grad=True)
    masks = []
    for module in (model, model, plain):
        torch.manual_seed(3)
        output = module(x)
        (grad,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(grad, output)
        masks.append((output, torch.rand(1)))
    for mask, following in masks[1:]:
        # The first call, which compiled, draws the same.
        assert torch.equal(mask, masks[0][0])
        assert torch.equal(following, masks[0][1])
    first, second, third = masks[0][0].chunk(3)
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_what_draws_nothing_leaves_the_generator_alone(started: list[tuple[str, str]]) -> None:
    _, net = twins()
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2)
    x = torch.randn(8, 4, dtype=torch.double)
    before = torch.get_rng_state()
    model(x)
    assert started
    assert torch.equal(torch.get_rng_state(), before)


# --- inductor ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor(started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, dynamic=True), ["cpu"] * 2)
    for batch in (12, 11):
        compare(model, bare, batch, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(5):
            compare(model, bare, 11, 4)
    assert started == [("DYNAMO", "dataparallel-replica-0")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_knows_no_virtual_devices() -> None:
    slots = ["virtual:0", "virtual:1"]
    bare, net = twins(slots[0])
    model = DataParallel(compile_whole(net), slots)
    with pytest.raises(Exception, match=r"(?s)virtual.*in replica 0"):
        model(torch.randn(8, 4, dtype=torch.double, device=slots[0]))
    compare(DataParallel(net, slots), bare, 8, 4, device=slots[0])
