"""Several processes with one to three replicas each, against the bare module on all data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dataparallel as dp
from dataparallel.comm.failures import CollectiveError
from dataparallel.reducer import buckets
from tests.cluster import Cluster
from tests.test_ddp_graphs import Net, backward, batch, grads, two_layers
from tests.test_ddp_local import FailInBackward

Loss = Callable[[nn.Module, int, int], Tensor]


def squares(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(batch("cpu", 10 * step + rank, 4 + rank)).pow(2).mean()
    return loss


def compare(net: nn.Module, bare: nn.Module, where: object) -> None:
    for name, mine, expected in zip(
        dict(net.named_parameters()), grads(net), grads(bare), strict=True
    ):
        assert (mine is None) == (expected is None), (name, where)
        if mine is not None and expected is not None:
            torch.testing.assert_close(mine, expected, msg=f"{name} at {where}")


def make(function: Callable[..., Any], replicas: int, **options: Any) -> tuple[Any, Net, Net]:
    net, bare = Net("cpu", function), Net("cpu", function)
    model = dp.DistributedDataParallel(net, ["cpu"] * replicas, timeout=20.0, **options)
    return model, net, bare


# --- accumulation --------------------------------------------------------------------------------

# Whether a step is reduced over processes, and how gradients are zeroed after it.
_STEPS = [
    (True, "zero"),
    (True, None),
    (False, None),
    (True, None),
    (False, None),
    (False, None),
    (True, "none"),
    (False, "zero"),
    (True, None),
    (False, "none"),
    (False, None),
    (True, None),
]


def _accumulate(rank: int, world_size: int, average: Any, view: bool) -> None:
    options = {"average": average, "gradient_as_bucket_view": view, "bucket_cap_mb": 0.0001}
    model, net, bare = make(two_layers, 2, **options)
    samples = [4 + k for k in range(world_size)]
    weights = {"processes": world_size, "none": 1}
    for step, (sync, zero) in enumerate(_STEPS):
        if sync:
            backward(squares(model, rank, step))
        else:
            with model.no_sync():
                backward(squares(model, rank, step))
        for k in range(world_size):
            share = samples[k] / sum(samples) if average == "samples" else 1 / weights[average]
            backward(squares(bare, k, step) * share)
        if sync:
            compare(net, bare, step)
        if zero is not None:
            net.zero_grad(set_to_none=zero == "none")
            bare.zero_grad(set_to_none=zero == "none")


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("average", ["processes", "samples", "none"])
def test_accumulated_gradients(cluster: Cluster, average: str, view: bool) -> None:
    cluster.run(_accumulate, 2, average, view)


# --- what is used --------------------------------------------------------------------------------


def _other_sets(rank: int, world_size: int, replicas: int, view: bool) -> None:
    model, net, bare = make(
        lambda net, x, k: net.layers[k](x), replicas, gradient_as_bucket_view=view
    )
    plan = [((0, 1, 2), True), ((1, 1, 1), True), ((0, 1, 2), False), ((2, 2, 2), True)]
    for step, (used, sync) in enumerate([*plan, ((0, 0, 0), True), ((1, 0, 2), True)]):
        x = batch("cpu", step)
        if sync:
            backward(model(x, used[rank]).sum())
        else:
            with model.no_sync():
                backward(model(x, used[rank]).sum())
        for k in range(world_size):
            backward(bare(x, used[k]).sum() / world_size)
        if sync:
            compare(net, bare, step)
        if step == 1:
            net.zero_grad()
            bare.zero_grad()


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_process_uses_other_parameters(cluster: Cluster, replicas: int, view: bool) -> None:
    cluster.run(_other_sets, 3, replicas, view)


def _checkpoints(net: Any, x: Tensor) -> Any:
    x = checkpoint(net.layers[0], x, use_reentrant=True)
    x = checkpoint(lambda t: net.layers[1](t.tanh()), x, use_reentrant=True)
    return checkpoint(net.layers[0], x, use_reentrant=True) * net.scale


def _run_again(rank: int, world_size: int, replicas: int, view: bool) -> None:
    model, net, bare = make(two_layers, replicas, gradient_as_bucket_view=view)
    for step in range(3):
        x = batch("cpu", 10 * step + rank, grad=True)
        backward(checkpoint(model, x, use_reentrant=False).sum())
        for k in range(world_size):
            backward(bare(batch("cpu", 10 * step + k, grad=True)).sum() / world_size)
        compare(net, bare, step)


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_checkpoint_around_the_wrapper(cluster: Cluster, replicas: int, view: bool) -> None:
    """It ends the second forward by an exception, which is no failure of this process."""
    cluster.run(_run_again, 2, replicas, view)


def _late(rank: int, world_size: int, replicas: int, view: bool) -> None:
    model, net, bare = make(
        _checkpoints, replicas, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
    )
    for step in range(3):
        backward(model(batch("cpu", 10 * step + rank, grad=True)).sum())
        for k in range(world_size):
            backward(bare(batch("cpu", 10 * step + k, grad=True)).sum() / world_size)
        compare(net, bare, step)


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_that_come_after_their_bucket(
    cluster: Cluster, replicas: int, view: bool
) -> None:
    cluster.run(_late, 2, replicas, view)


def _penalty(rank: int, world_size: int) -> None:
    model, net, bare = make(two_layers, 2)

    def loss(model: nn.Module, k: int, step: int) -> Tensor:
        x = batch("cpu", 10 * step + k, grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        result: Tensor = y.pow(2).sum() + slope.pow(2).sum()
        return result

    for step in range(2):
        backward(loss(model, rank, step))
        for k in range(world_size):
            backward(loss(bare, k, step) / world_size)
        compare(net, bare, step)
    with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
        torch.autograd.grad(squares(model, rank, 0), list(net.layers[0].parameters()))


def test_gradient_penalties(cluster: Cluster) -> None:
    cluster.run(_penalty, 2)


def _uneven_replicas(rank: int, world_size: int) -> None:
    model, net, bare = make(two_layers, rank + 1)
    for step in range(3):
        backward(squares(model, rank, step))
        for k in range(world_size):
            backward(squares(bare, k, step) / world_size)
        compare(net, bare, step)


def test_processes_with_different_numbers_of_replicas(cluster: Cluster) -> None:
    cluster.run(_uneven_replicas, 3)


# --- changes and hooks ---------------------------------------------------------------------------


def _changes(rank: int, world_size: int) -> None:
    model, net, bare = make(two_layers, 2)

    def check(where: str) -> None:
        net.zero_grad()
        bare.zero_grad()
        backward(squares(model, rank, 0))
        for k in range(world_size):
            backward(squares(bare, k, 0) / world_size)
        compare(net, bare, where)

    for module in (net, bare):
        module.layers[0].requires_grad_(False)
    check("frozen")
    for module in (net, bare):
        module.requires_grad_(True)
        for parameter in module.parameters():
            parameter.data = parameter.data * 2
    check("other memory")
    state = {name: value * 1.5 for name, value in net.state_dict().items()}
    model.load_state_dict(state, assign=True)
    bare.load_state_dict(state)
    check("assigned")
    check("again")


def test_parameters_change_between_steps(cluster: Cluster) -> None:
    cluster.run(_changes, 2)


def _hooked(rank: int, world_size: int, view: bool, ours: bool) -> list[Any]:
    net = Net("cpu", two_layers)
    net.layers[2].requires_grad_(False)
    parameters = list(net.layers[0].parameters())
    parameters[0].register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    parameters[1].register_hook(lambda grad: grad * 3)
    kind = dp.DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
    model: Any = kind(net, gradient_as_bucket_view=view)
    results = []
    for step in range(4):
        if step == 2:
            with model.no_sync():
                backward(squares(model, rank, 9))
        backward(squares(model, rank, step))
        results += grads(net)
    return results


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_hooks_run_on_the_gradient_of_the_process(cluster: Cluster, view: bool) -> None:
    ours = cluster.run(_hooked, 2, view, True)
    theirs = cluster.run(_hooked, 2, False, False)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


# --- errors --------------------------------------------------------------------------------------


def _fails(rank: int, world_size: int, view: bool) -> float:
    failing: dict[str, bool] = {"here": False}

    def forward(net: Any, x: Tensor) -> Any:
        error = ArithmeticError if failing["here"] else None
        return net.layers[1](FailInBackward.apply(net.layers[0](x), error))

    model, net, bare = make(forward, 2, gradient_as_bucket_view=view)
    longest = 0.0
    # The first round, an ordinary one, and one in which two ranks fail.
    for step, bad in enumerate([(1,), (), (0,), (), (0, 1), ()]):
        failing["here"] = rank in bad
        if not bad:
            net.zero_grad()
        before = grads(net)
        loss = squares(model, rank, step)
        if bad:
            began = time.monotonic()
            own = rank in bad
            error = ArithmeticError if own else RuntimeError
            # Of several the first is named.
            match = "on purpose" if own else rf"rank [{bad}] .* failed in backward: "
            with pytest.raises(error, match=match):
                backward(loss)
            for was, now in zip(before, grads(net), strict=True):
                assert now is was is None or torch.equal(now, was)  # type: ignore[arg-type]
            longest = max(longest, time.monotonic() - began)
            continue
        backward(loss)
        bare.zero_grad()
        for k in range(world_size):
            backward(squares(bare, k, step) / world_size)
        compare(net, bare, step)
    return longest


@pytest.mark.parametrize("view", [False, True], ids=["steal", "view"])
def test_all_ranks_learn_of_a_failure_and_go_on(cluster: Cluster, view: bool) -> None:
    # The time limit of the wrapper is 20 s.
    assert max(cluster.run(_fails, 3, view)) < 10


# --- the order of sums ---------------------------------------------------------------------------


def _trained(rank: int, world_size: int, cap: float) -> bytes:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    model = dp.DistributedDataParallel(
        net, ["cpu", "cpu"], deterministic=True, bucket_cap_mb=cap, timeout=20.0
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        backward(model(batch("cpu", 10 * step + rank).float()).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    return flat.numpy().tobytes()


def test_deterministic_sums_do_not_depend_on_the_size_of_buckets(cluster: Cluster) -> None:
    results = [cluster.run(_trained, 3, cap) for cap in (0.001, 1.0, 25.0)]
    assert len({result for ranks in results for result in ranks}) == 1


# --- an error at the beginning of the second round -----------------------------------------------


def _no_memory(rank: int, world_size: int) -> tuple[list[str], int, list[Any]]:
    """Rank 1 cannot make its buckets in the order that was agreed on after the first round."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], timeout=20, bucket_cap_mb=0.00001)
    storage: Any = vars(buckets)["BucketStorage"]
    fails = rank == 1

    def failing(*arguments: Any) -> Any:
        nonlocal fails
        if fails:
            fails = False
            raise torch.OutOfMemoryError("too little memory")
        return storage(*arguments)

    found = []
    setattr(buckets, "BucketStorage", failing)  # noqa: B010
    try:
        for _ in range(4):
            model.zero_grad()
            try:
                model(torch.ones(2, 3)).sum().backward()
                found.append("")
            except (torch.OutOfMemoryError, CollectiveError) as error:
                found.append(str(error))
    finally:
        setattr(buckets, "BucketStorage", storage)  # noqa: B010
    grads_now = [p.grad.tolist() for p in net.parameters() if p.grad is not None]
    return found, len(model.reducer.buckets.all), grads_now


def test_no_memory_for_buckets_in_the_agreed_order(cluster: Cluster) -> None:
    first, second = cluster.run(_no_memory, 2, timeout=40)
    assert "failed in backward: torch.OutOfMemoryError" in first[0].pop(1)
    assert first[0] == [""] * 3
    assert second[0] == ["", "too little memory", "", ""]
    assert first[1:] == second[1:]
    assert first[1] > 1
