"""What the reducer's options and failures are in a context is what they are elsewhere."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from dataparallel.distributed_autograd import backward, context
from tests.cluster import Cluster
from tests.distributed_autograd.reducer_cases import (
    Grads,
    Net,
    as_trainer,
    expect,
    fresh_table,
    in_context,
    look_up,
    remote_words,
    sum_of,
    words,
    wrap,
)
from tests.distributed_autograd.rpc_workers import rpc_world

NO_GRADS: Grads = [None] * len(list(Net().parameters()))


@pytest.fixture
def meeting(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "trainers")


def bare(step: int, num_trainers: int, unused_in: tuple[int, ...] = ()) -> Grads:
    """The mean over all trainers, some of which do not use a layer."""
    total = NO_GRADS
    for rank in range(num_trainers):
        net = Net()
        vectors = fresh_table().detach()[words(step, rank)]
        net(vectors, use_rare=rank not in unused_in).pow(2).mean().backward()
        total = sum_of(total, [p.grad for p in net.parameters()], 1 / num_trainers)
    return total


def loss_of(model: nn.Module, rank: int, trainers: int, step: int, **kwargs: Any) -> Tensor:
    vectors = remote_words(trainers + 1, step, rank)
    loss: Tensor = model(vectors, **kwargs).pow(2).mean()
    return loss


# --- parameters that are not used -----------------------------------------------------------------


def _unused(rank: int, trainers: int, replicas: int, view: bool, find: bool | None) -> None:
    net = Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view, find_unused_parameters=find)
    for step, unused_in in enumerate([(), (0,), (0, 1), ()]):
        with context() as context_id:
            backward(
                context_id,
                [loss_of(model, rank, trainers, step, use_rare=rank not in unused_in)],
            )
            expect(in_context(context_id, net), bare(step, trainers, unused_in), step)
    model.close()


@pytest.mark.parametrize(
    ("replicas", "view", "find"), [(1, False, None), (2, True, None), (1, True, True)]
)
def test_parameters_that_some_or_all_do_not_use(
    cluster: Cluster, meeting: str, replicas: int, view: bool, find: bool | None
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _unused, replicas, view, find)


def _refused(rank: int, trainers: int, options: dict[str, Any], message: str) -> None:
    net = Net()
    model = wrap(net, 1, **options)
    with context() as context_id:
        backward(context_id, [loss_of(model, rank, trainers, 0)])
    with context() as context_id:
        loss = loss_of(model, rank, trainers, 1, use_rare=False)
        with pytest.raises(RuntimeError, match=message):
            backward(context_id, [loss])
        assert in_context(context_id, net) == NO_GRADS
    with context() as context_id:
        backward(context_id, [loss_of(model, rank, trainers, 2)])
        expect(in_context(context_id, net), bare(2, trainers), "afterwards")
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameters": False}, "2 parameters got no gradient in this backward"),
        ({"static_graph": True}, "training graph has changed in this iteration"),
        (
            {"static_graph": True, "gradient_as_bucket_view": True},
            "training graph has changed in this iteration",
        ),
    ],
)
def test_flags_that_do_not_hold_are_errors(
    cluster: Cluster, meeting: str, options: dict[str, Any], message: str
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _refused, options, message)


# --- failures ------------------------------------------------------------------------------------


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


class _FailingNet(Net):
    fails = False

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        if self.fails:
            x = _Failing.apply(x)
        return super().forward(x, use_rare)


def _fail(rank: int, trainers: int, replicas: int, view: bool) -> None:
    net = _FailingNet()
    model = wrap(net, replicas, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    for step in range(3):
        net.fails = step == 1 and rank == 0
        with context() as context_id:
            loss = loss_of(model, rank, trainers, step)
            if step != 1:
                backward(context_id, [loss])
                expect(in_context(context_id, net), bare(step, trainers), step)
                continue
            message = "on purpose" if rank == 0 else "rank 0 .* failed in backward"
            with pytest.raises((ZeroDivisionError, RuntimeError), match=message):
                backward(context_id, [loss])
            assert in_context(context_id, net) == NO_GRADS
    model.close()


@pytest.mark.parametrize(("replicas", "view"), [(1, True), (2, False)])
def test_a_failure_in_one_trainer_reaches_all(
    cluster: Cluster, meeting: str, replicas: int, view: bool
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _fail, replicas, view)


# --- other ways to send --------------------------------------------------------------------------


def _triple(state: Any, bucket: Any) -> torch.futures.Future[Any]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0] * state)


def _hooked(rank: int, trainers: int, view: bool) -> None:
    net = Net()
    model = wrap(net, 1, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    model.register_comm_hook(3.0 / trainers, _triple)
    for step in range(2):
        with context() as context_id:
            backward(context_id, [loss_of(model, rank, trainers, step)])
            tripled = sum_of(NO_GRADS, bare(step, trainers), 3.0)
            expect(in_context(context_id, net), tripled, step)
    model.close()


@pytest.mark.parametrize("view", [False, True])
def test_communication_hooks(cluster: Cluster, meeting: str, view: bool) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _hooked, view)


def _joined(rank: int, trainers: int, view: bool) -> None:
    net = Net()
    model = wrap(net, 2, gradient_as_bucket_view=view)
    with model.join():
        for step in range(2 + 2 * rank):
            with context() as context_id:
                backward(context_id, [loss_of(model, rank, trainers, step)])
                active = [0, 1] if step < 2 else [1]
                expected = NO_GRADS
                for one in active:
                    own = Net()
                    vectors = fresh_table().detach()[words(step, one)]
                    own(vectors).pow(2).mean().backward()
                    mine = [p.grad for p in own.parameters()]
                    expected = sum_of(expected, mine, 1 / trainers)
                expect(in_context(context_id, net), expected, step)
                assert [p.grad for p in net.parameters()] == NO_GRADS
    assert [p.grad for p in net.parameters()] == NO_GRADS
    model.close()


@pytest.mark.parametrize("view", [False, True])
def test_a_trainer_without_data_takes_part(cluster: Cluster, meeting: str, view: bool) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _joined, view)


# --- torch ---------------------------------------------------------------------------------------


def _like_torchs(rank: int, trainers: int, options: dict[str, Any]) -> None:
    net, torchs = Net(), Net()
    own = wrap(net, 1, **options)
    other = nn.parallel.DistributedDataParallel(torchs, **options)
    if options.get("gradient_as_bucket_view"):
        # Rounding on the way has to be the same, too.
        own.register_comm_hook(None, fp16_compress_hook)
        other.register_comm_hook(None, fp16_compress_hook)
    server = f"worker{trainers}"
    torch_autograd: Any = torch.distributed.autograd
    for step in range(3):
        with torch_autograd.context() as context_id:
            vectors = torch_rpc.rpc_sync(server, look_up, (words(step, rank),))
            torch_autograd.backward(context_id, [other(vectors).pow(2).mean()])
            found = torch_autograd.get_gradients(context_id)
            expected = [found[parameter].clone() for parameter in torchs.parameters()]
        with context() as context_id:
            backward(context_id, [loss_of(own, rank, trainers, step)])
            expect(in_context(context_id, net), expected, step)
        assert [p.grad for p in torchs.parameters()] == NO_GRADS
        assert [p.grad for p in net.parameters()] == NO_GRADS
    own.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["default", "view and hook", "find unused"],
)
def test_torchs_wrapper_in_torchs_contexts_has_the_same(
    cluster: Cluster, meeting: str, options: dict[str, Any]
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _like_torchs, options)
