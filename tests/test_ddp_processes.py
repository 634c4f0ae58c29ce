"""Several processes with one to three replicas each, against the bare module on all data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from tests.cluster import Cluster
from tests.ddp_cases import (
    FailInBackward,
    Net,
    backward,
    batch,
    encoder,
    grads,
    one_layer,
    two_layers,
    wrap,
)
from tests.models import assert_all_close

Forward: TypeAlias = Callable[[Any, Tensor], Any]


def make_net() -> Net:
    """Its caller chooses what the forward does."""
    return Net("cpu", lambda net, x, forward=two_layers: forward(net, x))


class Part:
    """The part of one rank in a step, with the wrapper or with the bare module."""

    def __init__(self, model: Any, net: Net, rank: int, step: int, share: float = 1.0) -> None:
        self.model, self.net, self.rank, self.step = model, net, rank, step
        self.share = share

    def batch(self, more: int = 0, **options: Any) -> Tensor:
        return batch("cpu", 10 * self.step + self.rank + more, 4 + self.rank, **options)

    def backward(self, loss: Tensor, **options: Any) -> None:
        backward(loss * self.share, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = contextlib.nullcontext()
        return context if self.model is self.net else self.model.no_sync()


# --- what a rank does in a step -------------------------------------------------------------------


def squares(part: Part) -> None:
    part.backward(part.model(part.batch()).pow(2).mean())


def through_no_sync(part: Part) -> None:
    with part.no_sync():
        squares(part)
        part.backward(part.model(part.batch(100)).sin().mean())
    part.backward(part.model(part.batch(200)).pow(2).mean())


def one_layer_each(part: Part) -> None:
    """Each process another one, or all the same; in the third step nobody uses the first."""
    number = 1 + part.rank % 2 if part.step == 2 else (part.step // 2 + part.rank * part.step) % 3
    forward = functools.partial(one_layer, number=number)
    part.backward(part.model(part.batch(), forward).sum())


def within_a_checkpoint(part: Part) -> None:
    """It ends the second forward by an exception, which is no failure of this process."""
    x = part.batch(grad=True)
    output: Any = checkpoint(part.model, x, use_reentrant=False)
    part.backward(output.pow(2).sum())


def within_an_older_checkpoint(part: Part) -> None:
    """The wrapper's backward is one inside of that of the encoder and the head."""
    x = torch.relu(part.net.layers[0](part.batch()))
    output: Any = checkpoint(part.model, x, use_reentrant=True)
    part.backward(part.net.layers[2](output).sum())


def late_gradients(part: Part) -> None:
    """They come after their bucket."""

    def forward(net: Any, x: Tensor) -> Any:
        x = checkpoint(net.layers[0], x, use_reentrant=True)
        x = checkpoint(lambda t: net.layers[1](t.tanh()), x, use_reentrant=True)
        return checkpoint(net.layers[0], x, use_reentrant=True) * net.scale

    part.backward(part.model(part.batch(grad=True), forward).sum())


def gradient_penalty(part: Part) -> None:
    x = part.batch(grad=True)
    y = part.model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    part.backward(y.pow(2).sum() + slope.pow(2).sum())


def head_and_encoder(part: Part) -> None:
    """The first layer is used before the wrapper, too, and gets the rest after the cut."""
    hidden = torch.relu(part.net.layers[0](part.batch()))
    part.backward(part.net.layers[2](part.model(hidden)).sum())


def weight_penalty(part: Part) -> None:
    first, second, _ = part.net.layers
    own = first.weight.pow(2).sum() + second.weight.pow(2).sum() * (1 + part.rank)
    part.backward(part.model(part.batch()).sum() + own)


def only_outside_in_one_rank(part: Part) -> None:
    output = part.model(part.batch())
    part.backward((part.net.layers[2](output) if part.rank == 0 else output).sum())


def another_one_later(part: Part) -> None:
    """The other ranks do not use the head, so they wait, and one may have a late gradient."""
    loss = part.model(part.batch()).sum()
    if part.rank == 0:
        loss = loss + part.net.layers[2 if part.step < 2 else 1].weight.pow(2).sum()
    part.backward(loss)


def views_that_are_added_outside(part: Part) -> None:
    """The engine gives both one gradient, in one memory; another rank uses only one of them."""
    first, second, _ = part.net.layers
    views = [first.weight.view(4, 9), second.weight.view(4, 9)]
    outside = views[0] + views[1] if part.rank == 0 else views[0]
    scale = torch.arange(36.0).double().view(4, 9)
    part.backward(part.model(part.batch()).sum() + (outside * scale).sum())


STEPS: list[Callable[[Part], None]] = [
    squares,
    through_no_sync,
    one_layer_each,
    within_a_checkpoint,
    within_an_older_checkpoint,
    late_gradients,
    gradient_penalty,
    head_and_encoder,
    weight_penalty,
    only_outside_in_one_rank,
    another_one_later,
    views_that_are_added_outside,
]
#: Gradients of `no_sync`, and those in `.grad`, are weighed by the samples of one forward.
WEIGHED = [squares, through_no_sync]
#: Nobody knows which part of a sum is reduced already, so nothing comes before the round.
SUMMED = [squares, one_layer_each, late_gradients, head_and_encoder, weight_penalty]


def _train(rank: int, world_size: int, replicas: Sequence[int], options: dict[str, Any]) -> None:
    average = options.get("average", "processes")
    known = {"samples": WEIGHED, "none": SUMMED}
    samples = [4 + k for k in range(world_size)]
    for do in known.get(average, STEPS):
        net, bare = make_net(), make_net()
        model = wrap(net, replicas[rank], timeout=20.0, bucket_cap_mb=0.0001, **options)
        for step in range(5):
            do(Part(model, net, rank, step))
            for k in range(world_size):
                shares = {"processes": 1 / world_size, "none": 1.0}
                share = shares.get(average, samples[k] / sum(samples))
                do(Part(bare, bare, k, step, share))
            for name, p, q in zip(
                dict(net.named_parameters()), grads(net), grads(bare), strict=True
            ):
                where = f"{name} of {do.__name__} in step {step}"
                assert (p is None) == (q is None), where
                if p is not None and q is not None:
                    torch.testing.assert_close(p, q, msg=where)
            if step != 1 or average == "none":
                for each in (net, bare):
                    each.zero_grad(set_to_none=step == 2)
        model.close()


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ([1, 1], {"gradient_as_bucket_view": True}),
        ([1, 2, 3], {}),
        ([1, 2], {"average": "samples", "gradient_as_bucket_view": True}),
        ([1, 2], {"average": "none", "gradient_as_bucket_view": True}),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_bare_module(
    cluster: Cluster, replicas: list[int], options: dict[str, Any]
) -> None:
    cluster.run(_train, len(replicas), replicas, options)


# --- hooks ---------------------------------------------------------------------------------------


def _hooked(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> None:
    """Hooks see the gradient of the process and may change it, which is not linear."""

    def make() -> tuple[Net, list[str]]:
        net, calls = make_net(), list[str]()

        def before(grad: Tensor) -> Tensor:
            calls.append("before")
            return grad.clamp(-0.5, 0.5)

        first, second, last = net.layers
        for hooked in (first.weight, last.weight):
            hooked.register_hook(before)
        for hooked in (second.weight, last.weight):
            hooked.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        return net, calls

    for do in (head_and_encoder, through_no_sync):
        net, calls = make()
        model = wrap(net, replicas, bucket_cap_mb=0.0001, **options)
        for step in range(3):
            net.zero_grad(set_to_none=step < 2)
            calls.clear()
            do(Part(model, net, rank, step))
            each = []
            for k in range(world_size):
                bare, expected = make()
                do(Part(bare, bare, k, step))
                each.append(grads(bare))
                assert sorted(calls) == sorted(expected)
            for found, *parts in zip(grads(net), *each, strict=True):
                right = None if parts[0] is None else sum(parts) / world_size
                torch.testing.assert_close(found, right)
        # A parameter that is no longer used keeps its gradient from before.
        calls.clear()
        model(batch()).sum().backward()
        assert calls.count("after") == 1
        model.close()


@pytest.mark.parametrize(
    ("world_size", "replicas", "options"),
    [
        (1, 2, {"gradient_as_bucket_view": True}),
        (2, 1, {"gradient_as_bucket_view": True}),
        (2, 2, {"nonfinite": "raise"}),
    ],
    ids=str,
)
def test_hooks_run_once_with_everything(
    cluster: Cluster, world_size: int, replicas: int, options: dict[str, Any]
) -> None:
    cluster.run(_hooked, world_size, replicas, options)


def _between_forward_and_backward(
    rank: int, world_size: int, replicas: int, options: dict[str, Any]
) -> None:
    """A layer is frozen there, and a hook that runs after accumulation returns something."""
    net = make_net()
    models = [net, wrap(make_net(), replicas, **options)]
    for frozen, answer in ((True, None), (False, net), (False, 3)):
        for model in models:
            model.zero_grad()
            layers = model.layers if model is net else model.module.layers
            loss = model(batch()).pow(2).sum()
            layers[0].requires_grad_(not frozen)
            hook = layers[1].weight.register_post_accumulate_grad_hook(lambda _, a=answer: a)
            refused = pytest.raises((RuntimeError, TypeError), match="hook")
            with contextlib.nullcontext() if frozen else refused:
                loss.backward()
            hook.remove()
            assert layers[0].weight.grad is None or not frozen
            assert layers[1].weight.grad is not None
            layers[0].requires_grad_(True)
        if world_size > 1:
            # The step was delivered, and was an error.
            models[1].check_replicas()


@pytest.mark.parametrize(
    ("world_size", "replicas", "options"),
    [(1, 1, {"nonfinite": "raise"}), (1, 2, {"nonfinite": "raise"}), (2, 1, {}), (2, 2, {})],
    ids=str,
)
def test_what_happens_between_forward_and_backward(
    cluster: Cluster, world_size: int, replicas: int, options: dict[str, Any]
) -> None:
    cluster.run(_between_forward_and_backward, world_size, replicas, options)


# --- failures ------------------------------------------------------------------------------------


def _in_a_replica(part: Part, error: Exception | None) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        return net.layers[1](FailInBackward.apply(net.layers[0](x), error))

    part.backward(part.model(part.batch(), forward).pow(2).mean())


def _after_the_cut(part: Part, error: Exception | None) -> None:
    x = FailInBackward.apply(encoder("cpu")(part.batch()), error)
    part.backward((part.model(x) + part.net.layers[2].bias).pow(2).mean())


def _in_a_hook(part: Part, error: Exception | None) -> None:
    def refuse(grad: Tensor) -> None:
        if error is not None:
            raise error

    handle = part.net.layers[0].weight.register_hook(refuse)
    try:
        squares(part)
    finally:
        handle.remove()


FAILURES = [_in_a_replica, _after_the_cut, _in_a_hook]


def _fails(rank: int, world_size: int, number: int, view: bool) -> None:
    net, bare, do = make_net(), make_net(), FAILURES[number]
    # Longer than the test may take.
    model = wrap(net, 2, timeout=90.0, gradient_as_bucket_view=view)
    # The first round, an ordinary one, and one in which two ranks fail.
    for step, bad in enumerate([(1,), (), (0,), (), (0, 1), ()]):
        if not bad:
            net.zero_grad()
            bare.zero_grad()
            do(Part(model, net, rank, step), None)
            for k in range(world_size):
                do(Part(bare, bare, k, step, 1 / world_size), None)
            assert_all_close(grads(net), grads(bare))
            continue
        before, kept = grads(net), [p.grad for p in net.parameters()]
        own = rank in bad
        # The first of several is named.
        match = (
            "on purpose"
            if own
            else rf"(?s)rank [{bad}] .* failed in .*(on purpose|outside of the wrapper)"
        )
        with pytest.raises(ArithmeticError if own else RuntimeError, match=match):
            do(Part(model, net, rank, step), ArithmeticError("on purpose") if own else None)
        assert_all_close(grads(net), before, rtol=0.0, atol=0.0)
        assert all(p.grad is old for p, old in zip(net.parameters(), kept, strict=True))
    model.close()


@pytest.mark.parametrize(("number", "view"), [(0, False), (0, True), (1, False), (2, True)])
def test_all_ranks_learn_of_a_failure_and_go_on(cluster: Cluster, number: int, view: bool) -> None:
    cluster.run(_fails, 3, number, view)


def _changed_sums(rank: int, world_size: int) -> None:
    """Nobody knows what of them is reduced already."""
    net = make_net()
    model = wrap(net, 2, average="none")
    squares(Part(model, net, rank, 0))
    text = r"have changed since they were reduced: scale.*average='none'.*Zero the gr"
    with pytest.raises(RuntimeError, match=text if rank == 0 else r"rank 0 .* failed in backward"):
        if rank == 0:
            squares(Part(net, net, rank, 1))
        squares(Part(model, net, rank, 1))
    net.zero_grad(set_to_none=rank == 0)
    squares(Part(model, net, rank, 1))
    model.close()


def test_sums_that_somebody_else_has_added_to(cluster: Cluster) -> None:
    cluster.run(_changed_sums, 2)


class Keeps(Net):
    """Keeps results of its layers where the wrapper does not see them."""

    kept: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        Keeps.kept[:] = [layer(x[:1].detach()) for layer in self.layers[:2]]
        return two_layers(self, x)


def _past_the_outputs(rank: int, world_size: int) -> None:
    """Tell if it reaches a parameter whose gradients end a bucket (the first layer's) or not."""
    bare, net = Keeps("cpu", two_layers), Keeps("cpu", two_layers)
    model = wrap(net, 2, average="none")
    outside, failed = "got a gradient outside of the wrapper's backward", "failed in backward: "
    for seed, (layer, only) in enumerate([(0, None), (0, None), (1, None), (1, 0)]):
        if seed:
            net.zero_grad()
            output = model(batch(seed=seed)).sum()
            with pytest.raises(RuntimeError, match=outside if only in (None, rank) else failed):
                if only in (None, rank):
                    backward(Keeps.kept[layer].sum())
                output.backward()
            assert grads(net) == [None] * 7
        for _ in range(2):
            net.zero_grad()
            bare.zero_grad()
            model(batch(seed=3)).sum().backward()
            (bare(batch(seed=3)).sum() * world_size).backward()
            assert_all_close(grads(net), grads(bare))
    model.close()


def test_a_gradient_past_the_outputs_raises_in_all_ranks(cluster: Cluster) -> None:
    cluster.run(_past_the_outputs, 2)


# --- other wrappers ------------------------------------------------------------------------------


def _torchs_wrapper_around(rank: int, world_size: int) -> None:
    """The other's wrapper would set what this one has delivered to zero."""
    net = make_net()
    for group in (None, False) if world_size > 1 else ():
        inner = wrap(net, 2, process_group=group)
        outer = nn.parallel.DistributedDataParallel(nn.Sequential(inner))
        with pytest.raises(RuntimeError, match=r"would set all gradients to zero.*prepare_model"):
            outer(batch())
        with torch.no_grad():
            torch.testing.assert_close(outer(batch()), net(batch()))
        inner.close()
    # DataParallel leaves gradients to autograd, where torch's wrapper sees them.
    kind: Any = dp.DataParallel if world_size > 1 else dp.DistributedDataParallel
    outer = nn.parallel.DistributedDataParallel(kind(net, ["cpu", "cpu"]))
    outer(batch(seed=rank)).sum().backward()
    bare = make_net()
    (sum(bare(batch(seed=k)).sum() for k in range(world_size)) / world_size).backward()
    # The last two are those of a layer that is not used.
    assert_all_close(grads(net)[:5], grads(bare)[:5])


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_wrapper_around_this_one(cluster: Cluster, world_size: int) -> None:
    cluster.run(_torchs_wrapper_around, world_size)


def _refused(rank: int, world_size: int) -> None:
    net = make_net()
    model = wrap(net, 2)
    with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
        torch.autograd.grad(model(batch()).sum(), list(net.layers[0].parameters()))
    weight = net.layers[0].weight.detach()
    net.layers[0].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    with pytest.raises(ValueError, match="weight are of a subclass that holds tensors, whose"):
        wrap(net, 1)


def test_gradients_that_would_not_be_reduced_are_refused(cluster: Cluster) -> None:
    cluster.run(_refused, 2)
