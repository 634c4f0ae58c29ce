"""Gradients that come from outside of the wrapper's forward, against torch's wrapper."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.cluster import Cluster
from tests.models import assert_all_close, grads_of

Loss: TypeAlias = Callable[[nn.Module, Any, Tensor], None]


class Net(nn.Module):
    """Small integers in double precision: sums are exact in every order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.relu(self.first(x)))
        return output


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-3, 4, (4, 3), generator=generator).double()


# --- losses: the wrapper, its module, the input ----------------------------------------------


def head(m: nn.Module, net: Any, x: Tensor) -> None:
    net.head(m(x)).sum().backward()


def head_and_encoder(m: nn.Module, net: Any, x: Tensor) -> None:
    """The first layer is used before the wrapper, too, and gets the rest after the cut."""
    net.head(m(torch.relu(net.first(x))[:, :3])).sum().backward()


def penalty(m: nn.Module, net: Any, x: Tensor) -> None:
    early = net.first.weight.pow(2).sum()
    (m(x).sum() + early + net.second.weight.pow(2).sum() * (1 + dist.get_rank())).backward()


def bare_backward_before(m: nn.Module, net: Any, x: Tensor) -> None:
    net(x).sum().backward()
    m(x).sum().backward()


def written_by_hand(m: nn.Module, net: Any, x: Tensor) -> None:
    for parameter in net.first.parameters():
        parameter.grad = torch.full_like(parameter, 4.0 * (1 + dist.get_rank()))
    m(x).sum().backward()


def two_rounds(m: nn.Module, net: Any, x: Tensor) -> None:
    net.head(m(x)).sum().backward()
    net.head(m(x + 1)).sum().backward()


def only_outside_in_one_rank(m: nn.Module, net: Any, x: Tensor) -> None:
    output = m(x)
    (net.head(output) if dist.get_rank() == 0 else output).sum().backward()


def another_one_later(m: nn.Module, net: Any, x: Tensor) -> None:
    """The other ranks do not use the head, so they wait, and one may have a late gradient."""
    net.step = getattr(net, "step", -1) + 1
    output = m(x).sum()
    if dist.get_rank() == 0:
        output = output + (net.head if net.step < 2 else net.second).weight.pow(2).sum()
    output.backward()


def retained(m: nn.Module, net: Any, x: Tensor) -> None:
    loss = net.head(m(x)).sum()
    m.zero_grad()
    loss.backward(retain_graph=True)
    m(x).sum().backward()


def chosen(m: nn.Module, net: Any, x: Tensor) -> None:
    loss = net.head(m(x)).sum() + net.first.weight.sum() * 2
    loss.backward(inputs=[*net.first.parameters(), *net.head.parameters()])


def through_no_sync(m: Any, net: Any, x: Tensor) -> None:
    with m.no_sync():
        net.head(m(x)).sum().backward()
    net.head(m(x + 2)).sum().backward()


def under_a_checkpoint(m: nn.Module, net: Any, x: Tensor) -> None:
    """The wrapper's backward is one inside of that of the encoder and the head."""
    inner = torch.relu(net.first(x))[:, :3]
    output: Any = checkpoint(m, inner, use_reentrant=True)
    net.head(output).sum().backward()


def around_a_checkpoint(m: nn.Module, net: Any, x: Tensor) -> None:
    inner: Any = checkpoint(net.first, x, use_reentrant=False)
    net.head(m(torch.relu(inner)[:, :3])).sum().backward()


CASES: list[Loss] = [
    head,
    head_and_encoder,
    penalty,
    bare_backward_before,
    written_by_hand,
    two_rounds,
    only_outside_in_one_rank,
    another_one_later,
    retained,
    chosen,
    through_no_sync,
    under_a_checkpoint,
    around_a_checkpoint,
]
#: Torch's wrapper wants every parameter to be used.
TORCHS: list[Loss] = [head, head_and_encoder, two_rounds, around_a_checkpoint]


class Bare(nn.Module):
    """A wrapper that does nothing; gradients are averaged after the step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.forward = module.forward

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def average(self) -> None:
        for parameter in self.module.parameters():
            used = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(used)
            if used:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(total)
                parameter.grad = total / dist.get_world_size()


def gradients_of(wrap: Callable[[nn.Module], nn.Module], loss: Loss, rank: int) -> list[Any]:
    """The gradients after each of four steps."""
    net = Net()
    model = wrap(net)
    found = []
    for step in range(4):
        loss(model, net, batch(rank, step))
        if isinstance(model, Bare):
            model.average()
        found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        # Twice they stay and are zeros.
        net.zero_grad(set_to_none=step < 2)
    _close(model)
    return found


def _close(model: nn.Module) -> None:
    if isinstance(model, dp.DistributedDataParallel):
        model.close()


def _ours(net: nn.Module, replicas: int, options: dict[str, Any]) -> nn.Module:
    return dp.DistributedDataParallel(net, ["cpu"] * replicas, **options)


def _compare(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[str]:
    """The names of the cases that differ."""
    wrong = []
    wrap = functools.partial(_ours, replicas=replicas, options=options)
    oracles = [(Bare, CASES), (nn.parallel.DistributedDataParallel, TORCHS)]
    for oracle, cases in oracles:
        for loss in cases:
            ours = gradients_of(wrap, loss, rank)
            theirs = gradients_of(oracle, loss, rank)
            for mine, other in zip(ours, theirs, strict=True):
                if mine is None or other is None:
                    same = mine is other
                else:
                    same = torch.allclose(mine, other, rtol=1e-12)
                if not same:
                    wrong.append(f"{loss.__name__} {oracle.__name__}: {mine}, not {other}")
                    break
    return wrong


@pytest.mark.parametrize(
    ("world_size", "replicas", "view"), [(2, 1, True), (2, 2, False), (3, 1, False)]
)
def test_is_reduced_as_torch_does(
    cluster: Cluster, world_size: int, replicas: int, view: bool
) -> None:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.0001}
    wrong = cluster.run(_compare, world_size, replicas, options)
    assert wrong == [[]] * world_size


# --- hooks -----------------------------------------------------------------------------------


def _hooked(wrap: Callable[[nn.Module], Any], loss: Loss, rank: int) -> list[Any]:
    """How often each hook has run, and the gradients; hooks are not linear."""
    net = Net()
    calls = {"before": 0, "after": 0}

    def before(grad: Tensor) -> Tensor:
        calls["before"] += 1
        return grad.clamp(-20, 20)

    def after(parameter: Tensor) -> None:
        calls["after"] += 1

    net.head.weight.register_hook(before)
    net.first.weight.register_hook(before)
    net.second.weight.register_post_accumulate_grad_hook(after)
    net.head.weight.register_post_accumulate_grad_hook(after)
    model = wrap(net)
    found: list[Any] = []
    for step in range(3):
        loss(model, net, batch(rank, step))
        if isinstance(model, Bare):
            model.average()
        found += [dict(calls), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]
        net.zero_grad(set_to_none=step < 1)
    _close(model)
    return found


def _compare_hooks(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[str]:
    wrong = []
    wrap = functools.partial(_ours, replicas=replicas, options=options)
    for loss in (head, head_and_encoder, through_no_sync):
        ours, theirs = _hooked(wrap, loss, rank), _hooked(Bare, loss, rank)
        for mine, other in zip(ours, theirs, strict=True):
            same = mine == other if isinstance(mine, dict) else torch.allclose(mine, other)
            if not same:
                wrong.append(f"{loss.__name__}: {mine}, not {other}")
                break
    return wrong


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"nonfinite": "raise"}])
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_hooks_run_once_with_everything(
    cluster: Cluster, world_size: int, replicas: int, options: dict[str, Any]
) -> None:
    options = {**options, "bucket_cap_mb": 0.0001}
    wrong = cluster.run(_compare_hooks, world_size, replicas, options)
    assert wrong == [[]] * world_size


def _count_after(rank: int, world_size: int) -> int:
    """How often a hook runs where its parameter is used in the first of two steps alone."""
    net = Net()
    model = dp.DistributedDataParallel(net, ["cpu"] * 2)
    calls: list[Tensor] = []
    net.head.weight.register_post_accumulate_grad_hook(calls.append)
    head(model, net, batch(rank, 0))
    model(batch(rank, 1)).sum().backward()
    assert net.head.weight.grad is not None
    _close(model)
    return len(calls)


def test_hooks_do_not_run_for_a_gradient_from_before(cluster: Cluster) -> None:
    assert cluster.run(_count_after, 2) == [1, 1]


# --- sums and failures -----------------------------------------------------------------------


def _sums(rank: int, world_size: int) -> None:
    def total(net: nn.Module, loss: Loss, model: Any) -> list[Tensor]:
        loss(model, net, batch(rank, 0))
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]

    for loss in (head, head_and_encoder, penalty, through_no_sync, only_outside_in_one_rank):
        net, bare = Net(), Net()
        model = dp.DistributedDataParallel(net, ["cpu"] * 2, average="none")
        expected = total(bare, loss, Bare(bare))
        for grad in expected:
            dist.all_reduce(grad)
        for mine, other in zip(total(net, loss, model), expected, strict=True):
            assert torch.allclose(mine, other, rtol=1e-12), loss.__name__
        # Nobody knows what of it is reduced already.
        text = r"have changed since they were reduced: first\.weight.*average='none'.*Zero the gr"
        with pytest.raises(
            RuntimeError, match=text if rank == 0 else r"rank 0 .* failed in backward"
        ):
            if rank == 0:
                net(batch(rank, 1)).sum().backward()
            model(batch(rank, 1)).sum().backward()
        net.zero_grad(set_to_none=rank == 0)
        model(batch(rank, 1)).sum().backward()
        model.close()


def test_of_a_sum_nothing_is_lost(cluster: Cluster) -> None:
    cluster.run(_sums, 2)


def _views_added_outside(rank: int, world_size: int) -> None:
    """The engine gives both one gradient, in one memory; another rank uses only one of them."""
    net = Net()
    net.a, net.b = (nn.Parameter(torch.ones(6).double()) for _ in range(2))
    model = dp.DistributedDataParallel(net, ["cpu"] * 2)
    scale = torch.arange(6.0).double()
    for step in range(3):
        net.zero_grad()
        views = [net.a.view(2, 3), net.b.view(2, 3)]
        outside = views[0] + views[1] if rank == 0 else views[0]
        (model(batch(rank, step)).sum() + (outside * scale.view(2, 3)).sum()).backward()
        torch.testing.assert_close(net.a.grad, scale)
        torch.testing.assert_close(net.b.grad, scale / 2)
    model.close()


def test_views_that_are_added_outside(cluster: Cluster) -> None:
    cluster.run(_views_added_outside, 2)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("the encoder says no")


def _fails_after_the_cut(rank: int, world_size: int, view: bool) -> None:
    net = Net()
    model = dp.DistributedDataParallel(net, ["cpu"] * 2, gradient_as_bucket_view=view)
    # After the first backward the buckets are made anew.
    for _ in range(2):
        net.zero_grad()
        model(batch(rank, 0)).sum().backward()
    before = [p.grad.clone() for p in net.first.parameters() if p.grad is not None]
    kept = net.first.weight.grad
    encoder = nn.Linear(3, 3).double()
    x = encoder(batch(rank, 1))
    with pytest.raises(
        *((ValueError,) if rank == 1 else (RuntimeError,)),
        match="the encoder says no" if rank == 1 else "rank 1 .* failed.*outside of the wrapper",
    ):
        (model(_Refuse.apply(x) if rank == 1 else x) + net.head.bias[0]).sum().backward()
    after = [p.grad for p in net.first.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after)) and net.first.weight.grad is kept
    net.zero_grad()
    model(batch(rank, 0)).sum().backward()
    again = [p.grad for p in net.first.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, again))
    model.close()


@pytest.mark.parametrize("view", [False, True])
def test_an_error_outside_is_told_and_nothing_is_lost(cluster: Cluster, view: bool) -> None:
    cluster.run(_fails_after_the_cut, 2, view)


def _hook_says_no(rank: int, world_size: int) -> None:
    net = Net()
    model = dp.DistributedDataParallel(net, ["cpu"] * 2)
    model(batch(rank, 0)).sum().backward()

    def refuse(grad: Tensor) -> Tensor:
        raise ValueError("a hook says no")

    handle = net.first.weight.register_hook(refuse) if rank == 1 else None
    kind, text = (ValueError, "") if rank == 1 else (RuntimeError, "rank 1 .* failed.*ValueError: ")
    with pytest.raises(kind, match=f"(?s){text}a hook says no"):
        model(batch(rank, 1)).sum().backward()
    if handle is not None:
        handle.remove()
    net.zero_grad()
    model(batch(rank, 0)).sum().backward()
    model.close()


def test_what_a_hook_says_is_told(cluster: Cluster) -> None:
    cluster.run(_hook_says_no, 2)


@pytest.mark.parametrize("view", [False, True])
def test_after_a_hook_that_raised_nothing_keeps_the_module(view: bool) -> None:
    def refuse(grad: Tensor) -> Tensor:
        raise ValueError("a hook says no")

    net = Net()
    net.first.weight.register_hook(refuse)
    model = dp.DistributedDataParallel(net, ["cpu"] * 2, gradient_as_bucket_view=view)
    with pytest.raises(ValueError, match="a hook says no"):
        model(batch(0, 0)).sum().backward()
    model.close()
    left = weakref.ref(net)
    del model, net
    gc.collect()
    assert left() is None


def _torchs_wrapper_around(rank: int, world_size: int) -> None:
    """The other's wrapper would set what this one has delivered to zero."""
    net = Net()
    for group in (None, False):
        inner = dp.DistributedDataParallel(net, ["cpu", "cpu"], process_group=group)
        outer = nn.parallel.DistributedDataParallel(nn.Sequential(inner))
        with pytest.raises(RuntimeError, match=r"would set all gradients to zero.*prepare_model"):
            outer(batch(rank, 0))
        with torch.no_grad():
            torch.testing.assert_close(outer(batch(rank, 0)), net(batch(rank, 0)))
        inner.close()
    # DataParallel leaves gradients to autograd, where torch's wrapper sees them.
    outer = nn.parallel.DistributedDataParallel(dp.DataParallel(net, ["cpu", "cpu"]))
    outer(batch(rank, 0)).sum().backward()
    both = torch.cat([batch(each, 0) for each in range(world_size)])
    bare = Net()
    (bare(both).sum() / world_size).backward()
    # The last two are the head's, which is not used.
    assert_all_close(grads_of(net)[:4], grads_of(bare)[:4])


def test_torchs_wrapper_around_this_one(cluster: Cluster) -> None:
    cluster.run(_torchs_wrapper_around, 2)


def test_torchs_wrapper_in_a_single_process(cluster: Cluster) -> None:
    cluster.run(_alone_in_torchs_wrapper, 1)


def _alone_in_torchs_wrapper(rank: int, world_size: int) -> None:
    net, bare = Net(), Net()
    inner = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    nn.parallel.DistributedDataParallel(inner)(batch(0, 0)).sum().backward()
    bare(batch(0, 0)).sum().backward()
    assert_all_close(grads_of(net), grads_of(bare))


# --- past the outputs of the wrapper -------------------------------------------------------------


class Keeps(Net):
    """Keeps results of its layers where the wrapper does not see them."""

    kept: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        Keeps.kept.append(self.second(torch.ones(1, 4).double()))
        Keeps.kept.append(self.first(torch.ones(1, 3).double()))
        return super().forward(x)


def _past_the_outputs(
    rank: int, world_size: int, layer: int, only: int | None = None
) -> tuple[str, bool]:
    bare, net = Keeps(), Keeps()
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], average="none")
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    net.zero_grad()
    Keeps.kept.clear()
    found = ""
    try:
        output = model(batch(rank, 2)).sum()
        if only in (None, rank):
            Keeps.kept[layer].sum().backward()
        output.backward()
    except RuntimeError as error:
        found = str(error)
    assert all(p.grad is None for p in net.parameters())
    model(batch(rank, 3)).sum().backward()
    for member in range(world_size):
        bare(batch(member, 3)).sum().backward()
    equal = [torch.equal(*pair) for pair in zip(grads(net), grads(bare), strict=True)]
    return found, all(equal)


def grads(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_gradient_past_the_outputs_raises_in_all_ranks(cluster: Cluster, layer: int) -> None:
    """Whether it reaches a parameter whose gradients end a bucket (the first layer's) or not."""
    for found, equal in cluster.run(_past_the_outputs, 2, layer):
        assert "got a gradient outside of the wrapper's backward" in found
        assert equal


def test_a_gradient_past_the_outputs_of_one_rank_is_told_to_the_other(cluster: Cluster) -> None:
    (mine, mine_equal), (other, other_equal) = cluster.run(_past_the_outputs, 2, 0, 0)
    assert "got a gradient outside of the wrapper's backward" in mine
    assert "failed in backward: " in other
    assert mine_equal and other_equal
