"""The tensor that waits for itself under autograd, transforms, compilation and other subclasses."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.collectives import pending
from dataparallel.collectives.async_tensor import (
    AsyncCollectiveTensor,
    can_wrap,
    wrap,
)
from dataparallel.collectives.tracing import is_tracing
from dataparallel.virtual import strict_mode
from tests.test_collectives_pending import Fill, OnStream

Function = Callable[[Any], Any]
LEAF = torch.arange(1.0, 7.0, dtype=torch.double).view(2, 3)


def asynchronous(value: Tensor) -> tuple[Any, Fill]:
    """A result that a work is to fill with ``value``, in whose history it comes after."""
    raw = value.clone()
    work = Fill(raw, raw.detach().clone())
    work.finished = True
    raw.data.fill_(77)
    pending.register(raw, work)
    x = wrap(raw)
    assert type(x) is AsyncCollectiveTensor
    return x, work


def waited(x: Any) -> Tensor:
    tensor: Tensor = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
    return tensor


@pytest.fixture(autouse=True)
def _ends_empty() -> Iterator[None]:
    yield
    if pending.count() or pending._registry._entries:
        gc.collect()
    left = pending.count(), dict(pending._registry._entries)
    pending._registry._entries.clear()
    assert left == (0, {})


# --- gradients -------------------------------------------------------------------------------


def in_place(x: Any) -> Any:
    return x.add_(1).mul_(x.detach() + 1) * x


def in_place_on_a_view(x: Any) -> Any:
    x.view(-1)[1:].mul_(3)
    return x * x


def view_of_what_changes(x: Any) -> Any:
    row = x[0]
    x.mul_(3)
    return row * x


def item_assigned(x: Any) -> Any:
    x[0] = x[1] * 2
    return x * x


def into_another(x: Any) -> Any:
    y = torch.zeros_like(x).copy_(x)
    y[0].mul_(x[1]).add_(waited(x)[0])
    return y * x


def waited_and_changed(x: Any) -> Any:
    waited(x).mul_(3)
    return x * x


def waited_without_grad_and_changed(x: Any) -> Any:
    with torch.no_grad():
        plain = waited(x)
    plain.mul_(3)
    return x * plain


def changed_and_waited(x: Any) -> Any:
    x.mul_(3)
    return waited(x) * x


def parts(x: Any) -> Any:
    a, b = x.unbind(0)
    c, d = x.split([1, 2], 1)
    return a * b + c.sum() + d.pow(2).sum()


def change_through_detach(x: Any) -> Any:
    x.detach().mul_(2)
    return x * x


def saved_and_changed(x: Any) -> Any:
    y = x * x
    x.add_(1)
    return y


def saved_and_changed_by_waited(x: Any) -> Any:
    y = x * x
    waited(x).add_(1)
    return y


def waited_saved_and_changed(x: Any) -> Any:
    y = waited(x).exp() * waited(x)
    x.view(-1).add_(1)
    return y


def saved_and_changed_by_detached(x: Any) -> Any:
    y = x * x
    x.detach()[0].zero_()
    return y


def unbound_and_changed(x: Any) -> Any:
    x.unbind(0)[0].add_(1)
    return x * x


def checkpointed(x: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(
        lambda y: y.view(-1).sin().pow(2), x, use_reentrant=False
    )


GRADIENTS: list[Function] = [
    in_place,
    in_place_on_a_view,
    view_of_what_changes,
    item_assigned,
    lambda x: (x[0].copy_(x[1].exp()), x.sin())[1],
    into_another,
    waited_and_changed,
    waited_without_grad_and_changed,
    changed_and_waited,
    parts,
    change_through_detach,
    checkpointed,
    lambda x: x.pow(3),
    lambda x: x.t().reshape(-1).exp(),
    lambda x: waited(x) * x.view(-1).view(2, 3),
    lambda x: torch.complex(x, x).real * x,
    lambda x: x.float().double() * x.to("cpu"),
]

ERRORS: list[Function] = [
    saved_and_changed,
    saved_and_changed_by_waited,
    waited_saved_and_changed,
    saved_and_changed_by_detached,
    unbound_and_changed,
]


def derivatives(function: Function, make: Function) -> list[Tensor | None]:
    leaf = LEAF.clone().requires_grad_()
    y = function(make(leaf * 2))
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    second: Tensor | None = None
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf, allow_unused=True)
    return [y.detach(), first.detach(), second]


@pytest.mark.parametrize("function", GRADIENTS)
def test_derivatives_are_those_of_the_plain_tensor(function: Function) -> None:
    expected = derivatives(function, lambda x: x)
    got = derivatives(function, lambda x: asynchronous(x)[0])
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(b) and (a is None or b is None or torch.equal(a, b))


@pytest.mark.parametrize("function", ERRORS)
def test_what_autograd_rejects_is_rejected(function: Function) -> None:
    for make in (lambda x: x, lambda x: asynchronous(x)[0]):
        with pytest.raises(RuntimeError, match=r"modified by an inplace|is being modified inplace"):
            derivatives(function, make)


def test_a_result_that_its_own_backward_saved_is_not_changed_unseen() -> None:
    leaf = LEAF.clone().requires_grad_()
    for change in (lambda x: x.add_(1), lambda x: x.wait().add_(1), lambda x: x[0].add_(1)):
        # Saves its result, which a work then writes.
        raw = leaf.exp()
        pending.register(raw, Fill(raw, raw.detach().clone()))
        x = wrap(raw)
        change(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.sum().backward()


def test_gradcheck_of_the_edge() -> None:
    leaf = LEAF.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: asynchronous(t * 1)[0].view(-1).sin(), leaf)
    assert torch.autograd.gradgradcheck(lambda t: asynchronous(t * 1)[0].view(-1).sin(), leaf)


def test_as_a_leaf() -> None:
    x, work = asynchronous(LEAF)
    assert x.requires_grad_() is x and x.is_leaf and work.waits == 0
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    (x.view(-1) * 3).sum().backward()
    assert work.waits == 1 and torch.equal(x.grad, torch.full_like(LEAF, 3))
    assert torch.equal(seen[0], x.grad)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    with torch.no_grad():
        x.sub_(x.grad)
    assert torch.equal(x.detach(), LEAF - 3)


def test_hooks_and_retained_gradients_of_a_result() -> None:
    leaf = LEAF.clone().requires_grad_()
    x, _ = asynchronous(leaf)
    x.retain_grad()
    x.register_hook(lambda grad: grad * 2)
    (x * x).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, 4 * LEAF)
    assert torch.equal(x.grad, 4 * LEAF)


def test_as_a_gradient() -> None:
    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return asynchronous(grad * 2)[0]

    model = nn.Linear(3, 2).double()
    bias = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(2):
        # Into .grad twice: taken over, then added to.
        loss = sum(Collective.apply(p).pow(2).sum() for p in model.parameters())
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    torch.testing.assert_close(norm, torch.cat([8 * p.view(-1) for p in bias]).norm())
    for new, old in zip(model.parameters(), bias, strict=True):
        torch.testing.assert_close(new.detach(), old - 0.5 * 8 * old)


@pytest.mark.parametrize("completed", [False, True])
def test_as_a_parameter(completed: bool) -> None:
    x, work = asynchronous(LEAF)
    assert not completed or x.wait() is not None
    module = nn.Module()
    module.weight = nn.Parameter(x)
    assert isinstance(module.weight, nn.Parameter) and work.waits == completed
    twin = copy.deepcopy(module)
    assert type(twin.weight) is nn.Parameter and torch.equal(twin.weight, LEAF)
    assert work.waits == 1 and twin.weight.requires_grad


def test_a_deep_copy_has_the_gradient_and_only_leaves_have_one() -> None:
    x, _ = asynchronous(LEAF)
    x.requires_grad_().sum().backward()
    twin, again = copy.deepcopy([x, x])
    assert twin is again and type(twin) is Tensor and twin.requires_grad
    assert (
        twin.grad is not None
        and torch.equal(twin.grad, torch.ones_like(LEAF))
        and twin.grad is not x.grad
    )
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(asynchronous(LEAF.clone().requires_grad_())[0])


# --- other machinery of torch ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_of_functions() -> None:
    def square(t: Tensor) -> Tensor:
        assert is_tracing() and not can_wrap(t)
        return (t * t).sum()

    assert not is_tracing() and can_wrap(LEAF)
    for transform in (torch.vmap, torch.func.grad, torch.func.hessian):
        x, work = asynchronous(LEAF)
        assert torch.equal(transform(square)(x), transform(square)(LEAF))
        assert work.waits == 1
    x, _ = asynchronous(LEAF)
    assert torch.func.jvp(square, (x,), (x,))[1].item() == 2 * LEAF.pow(2).sum().item()


def test_other_subclasses() -> None:
    x, first = asynchronous(LEAF)
    y, second = asynchronous(-LEAF)
    assert not can_wrap(TwoTensor(LEAF, LEAF))
    view: Any = TwoTensor(x, y).view(-1)
    assert first.waits == second.waits == 0
    assert torch.equal((view * 2).a, 2 * LEAF.view(-1))
    assert torch.equal((view * 2).b, -2 * LEAF.view(-1))
    assert first.waits == second.waits == 1
    mixed: Any = asynchronous(LEAF)[0] + TwoTensor(LEAF, -LEAF)
    assert type(mixed) is TwoTensor
    assert torch.equal(mixed.a, 2 * LEAF) and torch.equal(mixed.b, 0 * LEAF)
    mixed = TwoTensor(LEAF, -LEAF) * asynchronous(LEAF)[0]
    assert torch.equal(mixed.a, LEAF * LEAF) and torch.equal(mixed.b, -LEAF * LEAF)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_nothing_is_wrapped_while_tracing(mode: Any) -> None:
    def function(t: Tensor) -> Tensor:
        assert is_tracing() and wrap(t) is t
        return t + 1

    make_fx(function, tracing_mode=mode)(LEAF)
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: t + is_tracing(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(LEAF), LEAF + 1)


# --- threads and streams ---------------------------------------------------------------------


def test_two_threads_use_it_at_once() -> None:
    x, work = asynchronous(LEAF)
    both = threading.Barrier(2, timeout=30)

    def use(view: Any) -> Tensor:
        both.wait()
        result: Tensor = view + 1
        return result

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(use, [x, x.t()]))
    assert torch.equal(results[0], LEAF + 1) and torch.equal(results[1], LEAF.t() + 1)
    assert work.waits == 1


def test_each_stream_waits() -> None:
    with strict_mode():
        raw = torch.zeros(3, device="virtual:2")
        work = OnStream(raw)
        pending.register(raw, work)
        x: Any = wrap(raw)
        view = x[1:]
        side = torch.Stream("virtual:2")
        with side:
            plus = view + 1
            assert x.completed
        assert not x.completed
        assert (x * 2).cpu().tolist() == [14.0] * 3 and type(x[0]) is Tensor
        with side:
            assert plus.cpu().tolist() == [8.0] * 2
        assert work.waits == 1
    torch.accelerator.synchronize(torch.device("virtual:2"))
