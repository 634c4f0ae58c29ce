"""Wrapped modules that call other workers in their forward."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests.cluster import Cluster
from tests.distributed_autograd.reducer_cases import (
    Grads,
    Net,
    as_trainer,
    expect,
    fresh_table,
    in_context,
    look_up,
    sum_of,
    table_gradient,
    words,
    wrap,
)
from tests.distributed_autograd.rpc_workers import rpc_world


def stretch(x: Tensor, factor: Tensor) -> Tensor:
    return torch.tanh(x) * factor


class Caller(nn.Module):
    """Looks words up, and sends a part of its own graph away and back."""

    def __init__(self, server: str, call: Any = rpc_sync) -> None:
        super().__init__()
        self.net = Net()
        self.factor = nn.Parameter(torch.tensor(0.7, dtype=torch.double))
        self.server = server
        self.call = call

    def forward(self, indices: Tensor, *, calls: bool = True, use_rare: bool = True) -> Tensor:
        if not calls:
            vectors = fresh_table().detach().to(indices.device)[indices]
            output: Tensor = stretch(self.net(vectors, use_rare), self.factor)
            return output
        vectors = self.call(self.server, look_up, (indices,)).to(indices.device)
        output = self.net(vectors, use_rare)
        output = self.call(self.server, stretch, (output, self.factor))
        return output.to(indices.device) + self.factor


def bare(step: int, rank: int, **kwargs: Any) -> tuple[Grads, Tensor | None]:
    """The gradients of the module, and of the table."""
    table = fresh_table()
    module = Caller("nobody", lambda _, function, args: _here(function, args, table))
    module(words(step, rank), **kwargs).pow(2).mean().backward()
    return [p.grad for p in module.parameters()], table.grad


def _here(function: Any, args: tuple[Any, ...], table: Tensor) -> Any:
    return table[args[0]] if function is look_up else function(*args)


# --- one process ---------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[str]:
    with LocalWorkers({"server": "cpu"}, timeout=20.0):
        yield "server"


def loss_of(model: nn.Module, step: int, **kwargs: Any) -> Tensor:
    loss: Tensor = model(words(step, 0), **kwargs).pow(2).mean()
    return loss


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_gradients_are_those_of_one_process(server: str, replicas: int, view: bool) -> None:
    module = Caller(server)
    model = wrap(module, replicas, gradient_as_bucket_view=view)
    for step, use_rare in enumerate([True, False, True]):
        expected, table = bare(step, 0, use_rare=use_rare)
        with context() as context_id:
            loss = loss_of(model, step, use_rare=use_rare)
            for times in (1, 2):
                backward(context_id, [loss], retain_graph=times == 1)
                nothing: Grads = [None] * len(expected)
                total = sum_of(nothing, expected, times)
                expect(in_context(context_id, module), total, (step, times))
                used = [grad for grad in total if grad is not None]
                assert len(get_gradients(context_id)) == len(used)
                (found,) = rpc_sync(server, get_gradients, (context_id,)).values()
                assert table is not None
                torch.testing.assert_close(found, table * times)
        assert [p.grad for p in module.parameters()] == [None] * len(expected)
        assert not model.reducer.unfinished
    model.close()


@pytest.mark.parametrize("view", [False, True])
def test_forwards_with_and_without_calls(server: str, view: bool) -> None:
    module = Caller(server)
    model = wrap(module, 2, gradient_as_bucket_view=view)
    for order in [(True, False), (False, True), (False, False), (True, True)]:
        nothing: Grads = [None] * len(list(module.parameters()))
        expected = nothing
        with context() as context_id:
            loss = torch.zeros((), dtype=torch.double)
            for step, calls in enumerate(order):
                loss = loss + loss_of(model, step, calls=calls)
                expected = sum_of(expected, bare(step, 0, calls=calls)[0])
            backward(context_id, [loss])
            expect(in_context(context_id, module), expected, order)
    loss_of(model, 5, calls=False).backward()
    expect([p.grad for p in module.parameters()], bare(5, 0, calls=False)[0], "outside")
    model.close()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("devices", [["virtual:0"], ["virtual:1", "virtual:0"]], ids=len)
def test_replicas_on_accelerators(devices: list[str], view: bool) -> None:
    with LocalWorkers({"server": "virtual:2"}, timeout=20.0):
        module = Caller("server").to(devices[0])
        model = dp.DistributedDataParallel(module, devices, gradient_as_bucket_view=view)
        for step, calls in enumerate([True, False, False, True]):
            expected, _ = bare(step, 0, calls=calls)
            with context() as context_id:
                loss = model(words(step, 0).to(devices[0]), calls=calls).pow(2).mean()
                backward(context_id, [loss])
                found = in_context(context_id, module)
                expect([g if g is None else g.cpu() for g in found], expected, step)
        model.close()


@pytest.mark.parametrize("view", [False, True])
def test_hooks_on_parameters(server: str, view: bool) -> None:
    module = Caller(server)
    model = wrap(module, 2, gradient_as_bucket_view=view)
    calls: list[tuple[str, Tensor]] = []

    def before(grad: Tensor) -> Tensor:
        calls.append(("before", grad.clone()))
        return grad * 3

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        calls.append(("after", parameter.grad.clone()))

    for parameter in (module.factor, module.net.rare.bias):
        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)
    for step, use_rare in enumerate([True, False, True]):
        expected, _ = bare(step, 0, use_rare=use_rare)
        calls.clear()
        with context() as context_id:
            backward(context_id, [loss_of(model, step, use_rare=use_rare)])
        names = [name for name, _ in module.named_parameters()]
        hooked = ("net.rare.bias", "factor") if use_rare else ("factor",)
        wanted = [grad for n, g in zip(names, expected, strict=True) if n in hooked
                  for grad in [g] if grad is not None]  # fmt: skip
        seen = sorted((grad.numel(), grad) for name, grad in calls if name == "before")
        assert len(seen) == len(wanted) == sum(name == "after" for name, _ in calls)
        for grad in wanted:
            assert any(g.shape == grad.shape and g.allclose(grad) for _, g in seen)
            assert any(
                n == "after" and g.shape == grad.shape and g.allclose(3 * grad) for n, g in calls
            )
    model.close()


def test_an_error_leaves_nothing_behind(server: str) -> None:
    fails = True

    def fail(grad: Tensor) -> None:
        if fails:
            raise ZeroDivisionError("on purpose")

    class Failing(Caller):
        def forward(self, indices: Tensor, **kwargs: Any) -> Tensor:
            # Parameters behind it have their gradients when it fails.
            hook = self.net.first.register_forward_pre_hook(
                lambda _, args: [arg.register_hook(fail) for arg in args] and None
            )
            output = super().forward(indices, **kwargs)
            hook.remove()
            return output

    module = Failing(server)
    model = wrap(module, 2)
    with context() as context_id:
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            backward(context_id, [loss_of(model, 0)])
        assert model.reducer.unfinished
        fails = False
        backward(context_id, [loss_of(model, 1)])
        expect(in_context(context_id, module), bare(1, 0)[0], "in the same context")
    model.close()


def test_inputs_that_require_grad_are_refused(server: str) -> None:
    class Scaled(Caller):
        def forward(self, indices: Tensor, **kwargs: Any) -> Tensor:
            return super().forward(indices[0].long()) * indices[1].mean()

    model = wrap(Scaled(server), 2)
    given = torch.stack([words(0, 0).double()] * 2).requires_grad_()
    with (
        context(),
        pytest.raises(RuntimeError, match="1 of the tensors that it was given require grad"),
    ):
        model((given, given))
    model.close()


def test_an_ordinary_backward_is_refused(server: str) -> None:
    model = wrap(Caller(server), 2)
    with (
        context(),
        pytest.raises(RuntimeError, match=r"instead of loss\.backward"),
    ):
        loss_of(model, 0).backward()
    model.close()


# --- several processes ---------------------------------------------------------------------------


def _train(rank: int, trainers: int, replicas: int, options: dict[str, Any]) -> None:
    server = f"worker{trainers}"
    module = Caller(server)
    model = wrap(module, replicas, bucket_cap_mb=0.0001, **options)
    for step, unused_in in enumerate([(), (), (1,)]):
        expected: Grads = [None] * len(list(module.parameters()))
        for one in range(trainers):
            grads, _ = bare(step, one, use_rare=one not in unused_in)
            expected = sum_of(expected, grads, 1 / trainers)
        with context() as context_id:
            loss = model(words(step, rank), use_rare=rank not in unused_in).pow(2).mean()
            backward(context_id, [loss])
            expect(in_context(context_id, module), expected, step)
            _, table = bare(step, rank, use_rare=rank not in unused_in)
            assert table is not None
            got = rpc_sync(server, table_gradient, (context_id,))
            torch.testing.assert_close(got, table)
    model.close()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_trainers(cluster: Cluster, tmp_path: pathlib.Path, replicas: int, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    rpc_world(cluster, as_trainer, 3, str(tmp_path / "trainers"), _train, replicas, options)


def _like_torchs(rank: int, trainers: int) -> None:
    torch_autograd: Any = torch.distributed.autograd
    server = f"worker{trainers}"
    torchs, module = Caller(server, torch_rpc.rpc_sync), Caller(server)
    other = nn.parallel.DistributedDataParallel(torchs)
    own = wrap(module, 1)
    for step in range(3):
        with torch_autograd.context() as context_id:
            torch_autograd.backward(context_id, [other(words(step, rank)).pow(2).mean()])
            found = torch_autograd.get_gradients(context_id)
            expected: Grads = [found[parameter].clone() for parameter in torchs.net.parameters()]
        with context() as context_id:
            backward(context_id, [own(words(step, rank)).pow(2).mean()])
            # Torch reduces a parameter when the first part of its gradient is there, so it has no
            # right one for the parameter that is used both here and on the other worker.
            expect(in_context(context_id, module.net), expected, step)
    own.close()


def test_torchs_wrapper_has_the_same(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    rpc_world(cluster, as_trainer, 3, str(tmp_path / "trainers"), _like_torchs)
