"""Training with uneven inputs: against torch's wrapper, and what goes beyond it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

import dataparallel as dp
from dataparallel.comm.processes import CollectiveTimeout
from tests.cluster import Cluster

State: TypeAlias = dict[str, Tensor]


class Net(nn.Module):
    """Has a branch that only some steps use, and a buffer that every forward in training writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.branch = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)
        self.register_buffer("mean", torch.zeros(6))
        # Different in each process.
        self.push = dist.get_rank() + 1.0 if dist.is_initialized() else 0.0

    def forward(self, x: Tensor, use_branch: bool = True) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(self.push)
        x = torch.tanh(self.first(x - 0.1 * self.mean))
        if use_branch:
            x = x + self.branch(x)
        output: Tensor = self.last(x)
        return output


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def wrap(replicas: int, **options: Any) -> Any:
    """Our wrapper; torch's for 0 replicas."""
    if replicas:
        return dp.DistributedDataParallel(make_net(), ["cpu"] * replicas, **options)
    return nn.parallel.DistributedDataParallel(make_net(), **options)


def state_of(model: Any) -> State:
    module = model.module if hasattr(model, "module") else model
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(
    model: Any,
    rank: int,
    num_batches: int,
    *,
    branch: Callable[[int, int], bool] = lambda step, rank: True,
    unsynced: Sequence[int] = (),
    size: int = 4,
    momentum: float = 0.9,
) -> list[bool]:
    """Train, and tell for each step whether the branch had a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    had = []
    for step in range(num_batches):
        x, y = batch(step, rank, size)
        if step in unsynced:
            with model.no_sync():
                nn.functional.mse_loss(model(x, branch(step, rank)), y).backward()
            continue
        nn.functional.mse_loss(model(x, branch(step, rank)), y).backward()
        had.append(model.module.branch.weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    return had


def _located(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def assert_same(ours: Sequence[State], theirs: Sequence[State]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, tensor in mine.items():
            torch.testing.assert_close(
                tensor, other[name], rtol=1e-5, atol=1e-6, msg=_located(name)
            )
            assert torch.equal(tensor, ours[0][name]), f"{name} of rank {rank}"


def same_parameters(states: Sequence[State]) -> bool:
    names = [name for name, _ in make_net().named_parameters()]
    return all(torch.equal(state[name], states[0][name]) for state in states for name in names)


# --- against torch ---------------------------------------------------------------------------


def _join(
    rank: int,
    world_size: int,
    replicas: int,
    counts: Sequence[int],
    divide: bool,
    options: dict[str, Any],
) -> State:
    model = wrap(replicas, **options)
    with model.join(divide_by_initial_world_size=divide):
        train(model, rank, counts[rank])
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("counts", [(4, 2), (0, 3), (1, 4, 2), (3, 1, 3)])
@pytest.mark.parametrize("divide", [True, False])
def test_joined_training_is_that_of_torch(
    cluster: Cluster, counts: tuple[int, ...], divide: bool, replicas: int
) -> None:
    options = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": len(counts) == 2}
    ours = cluster.run(_join, len(counts), replicas, counts, divide, options)
    theirs = cluster.run(_join, len(counts), 0, counts, divide, {})
    assert_same(ours, theirs)


def _early_branch(step: int, rank: int) -> bool:
    return step == 1


def _join_unused(
    rank: int, world_size: int, replicas: int, counts: Sequence[int]
) -> tuple[State, list[bool]]:
    options = {} if replicas else {"find_unused_parameters": True}
    model = wrap(replicas, **options)
    with model.join():
        # With momentum, torch's zeros for what nobody uses would count: a process that has joined
        # does not forget there which parameters were used once.
        had = train(model, rank, counts[rank], branch=_early_branch, momentum=0.0)
    return state_of(model), had


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("counts", [(4, 1), (1, 3, 0), (3, 2)])
def test_unused_parameters(cluster: Cluster, counts: tuple[int, ...], replicas: int) -> None:
    ours = cluster.run(_join_unused, len(counts), replicas, counts)
    theirs = cluster.run(_join_unused, len(counts), 0, counts)
    assert_same([state for state, _ in ours], [state for state, _ in theirs])
    for count, (_, had) in zip(counts, ours, strict=True):
        assert had == [step == 1 for step in range(count)]


def _join_no_sync(rank: int, world_size: int, replicas: int, counts: Sequence[int]) -> State:
    model = wrap(replicas)
    with model.join():
        train(model, rank, counts[rank], unsynced=(0, 2, 3))
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("counts", [(5, 2), (6, 2, 5)])
def test_accumulation_without_synchronisation(
    cluster: Cluster, counts: tuple[int, ...], replicas: int
) -> None:
    ours = cluster.run(_join_no_sync, len(counts), replicas, counts)
    theirs = cluster.run(_join_no_sync, len(counts), 0, counts)
    assert_same(ours, theirs)


def _join_hook(rank: int, world_size: int, replicas: int, divide: bool, hooked: bool) -> State:
    model = wrap(replicas)
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    with model.join(divide_by_initial_world_size=divide):
        train(model, rank, (4, 2)[rank])
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_communication_hook(cluster: Cluster, replicas: int) -> None:
    ours = cluster.run(_join_hook, 2, replicas, True, True)
    assert_same(ours, cluster.run(_join_hook, 2, 0, True, True))


def test_number_of_divided_processes_counts_with_hook(cluster: Cluster) -> None:
    # In torch it does not: its hooks divide by the number of all processes.
    ours = cluster.run(_join_hook, 2, 1, False, True)
    assert_same(ours, cluster.run(_join_hook, 2, 1, False, False))
    assert_same(ours, cluster.run(_join_hook, 2, 0, False, False))


def _join_devices(rank: int, world_size: int, generic: bool, counts: Sequence[int]) -> State:
    devices = ["virtual:0", "virtual:1"]
    model = dp.DistributedDataParallel(make_net().to(devices[0]), devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with Join([model]) if generic else model.join():
            for step in range(counts[rank]):
                x, y = (tensor.to(devices[0]) for tensor in batch(step, rank))
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    model.check_replicas()
    return {name: tensor.cpu() for name, tensor in state_of(model).items()}


def _join_twice(rank: int, world_size: int, counts: Sequence[int]) -> State:
    model = wrap(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with model.join():
            for step in range(counts[rank]):
                x, y = batch(step, rank)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("generic", [False, True])
def test_replicas_on_several_devices(cluster: Cluster, generic: bool) -> None:
    # In the second block one that was joined trains with what it got.
    ours = cluster.run(_join_devices, 2, generic, (3, 1), virtual=True)
    assert_same(ours, cluster.run(_join_twice, 2, (3, 1)))


# --- early termination -----------------------------------------------------------------------


def _throw(
    rank: int, world_size: int, replicas: int, counts: Sequence[int]
) -> tuple[str, State, State]:
    model = wrap(replicas)
    message = ""
    try:
        with model.join(throw_on_early_termination=True):
            train(model, rank, counts[rank])
    except RuntimeError as error:
        message = str(error)
    state = state_of(model)
    train(model, rank, 2)
    return message, state, state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_processes_raise_when_one_has_no_more(cluster: Cluster, replicas: int) -> None:
    counts = (4, 2, 3)
    ours = cluster.run(_throw, 3, replicas, counts)
    theirs = cluster.run(_throw, 3, 0, counts)
    assert [message for message, _, _ in ours] == [message for message, _, _ in theirs]
    assert ours[1][0] == "Rank 1 exhausted all inputs."
    assert ours[0][0].startswith("Detected at least one rank that exhausted inputs.")
    for mine, other in zip(ours, theirs, strict=True):
        assert_same([mine[1]], [other[1]])
    assert same_parameters([state for _, _, state in ours])


def _throw_together(rank: int, world_size: int) -> State:
    model = wrap(1)
    with model.join(throw_on_early_termination=True):
        train(model, rank, 2)
    return state_of(model)


def test_nobody_raises_where_all_have_the_same(cluster: Cluster) -> None:
    ours = cluster.run(_throw_together, 2)
    assert_same(ours, cluster.run(_join, 2, 0, (2, 2), True, {}))


# --- with other joinables --------------------------------------------------------------------


def _join_zero(rank: int, world_size: int, replicas: int, counts: Sequence[int]) -> State:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrap(replicas)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([model, optimizer]):
        for step in range(counts[rank]):
            x, y = batch(step, rank)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not model._join_config.enable
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_that_joins_makes_its_part_of_the_steps(
    cluster: Cluster, replicas: int
) -> None:
    counts = (2, 5)
    ours = cluster.run(_join_zero, 2, replicas, counts)
    # Each process steps everything by itself there.
    theirs = cluster.run(_join, 2, 0, counts, True, {})
    assert_same(ours, theirs)


def _join_divided(rank: int, world_size: int) -> State:
    model = wrap(1)
    with Join([model], divide_by_initial_world_size=False):
        train(model, rank, (1, 3)[rank])
    return state_of(model)


def test_context_manager_of_torch_gives_its_arguments(cluster: Cluster) -> None:
    ours = cluster.run(_join_divided, 2)
    assert_same(ours, cluster.run(_join, 2, 0, (1, 3), False, {}))


# --- what torch does not have ----------------------------------------------------------------


def _join_samples(rank: int, world_size: int, counts: Sequence[int]) -> State:
    model = dp.DistributedDataParallel(
        make_net(), ["cpu"] * (rank + 1), average="samples", broadcast_buffers=False
    )
    model.eval()
    with model.join():
        train(model, rank, counts[rank], size=3 + rank)
    return state_of(model)


def test_average_over_samples_is_that_of_the_samples_that_are_left(cluster: Cluster) -> None:
    counts = (4, 2, 1)
    ours = cluster.run(_join_samples, 3, counts)
    bare = make_net().eval()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(counts)):
        batches = [batch(step, r, 3 + r) for r in range(3) if step < counts[r]]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.mse_loss(bare(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(ours, [state_of(bare)] * 3)


@pytest.mark.parametrize("flag", [{"static_graph": True}, {"find_unused_parameters": False}])
def test_who_has_no_gradients_breaks_no_promise(cluster: Cluster, flag: dict[str, bool]) -> None:
    options = {"deterministic": True, **flag}
    ours = cluster.run(_join, 2, 1, (1, 3), True, options)
    assert_same(ours, cluster.run(_join, 2, 0, (1, 3), True, {}))


def _collectives(rank: int, world_size: int) -> tuple[int, int]:
    model = wrap(1)
    control = model._reduction.processes.control
    at_first = control.launched["all_reduce"]
    with model.join():
        train(model, rank, 2 + rank)
    return control.launched["all_reduce"] - at_first, control.launched["broadcast"]


def test_number_of_small_collectives(cluster: Cluster) -> None:
    # Per iteration the count, whose buffers, whether gradients are reduced, and the end of the
    # round; no map of used parameters. Then a last count, and whose parameters.
    assert cluster.run(_collectives, 2) == [(3 * 4 + 2, 1)] * 2


def _grads_after(rank: int, world_size: int, view: bool) -> tuple[bool, list[Tensor]]:
    model = wrap(1, gradient_as_bucket_view=view)

    def backward(step: int) -> None:
        x, y = batch(step, rank)
        nn.functional.mse_loss(model(x), y).backward()

    backward(0)
    model.zero_grad()
    with model.no_sync():
        backward(1)
    before = [p.grad.clone() for p in model.parameters()]
    with model.join():
        for step in range(2, 2 + 2 * rank):
            model.zero_grad()
            backward(step)
    kept = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    if rank == 1:
        model.zero_grad()
    # What was not reduced before the block is reduced after it.
    backward(5)
    return kept, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
def test_a_joined_process_keeps_its_gradients(cluster: Cluster, view: bool) -> None:
    (kept, first), (_, second) = cluster.run(_grads_after, 2, view)
    assert kept
    for grad, other in zip(first, second, strict=True):
        assert torch.equal(grad, other)


def _two_epochs(rank: int, world_size: int, replicas: int) -> State:
    model = wrap(replicas)
    for counts in ((3, 1), (1, 2)):
        with model.join():
            train(model, rank, counts[rank])
        if rank == 0 and replicas:
            # Alone: after the block nothing is told to others any more.
            model.require_forward_param_sync = False
            with torch.no_grad():
                model(torch.ones(2, 6))
        model.require_forward_param_sync = True
    train(model, rank, 1)
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_goes_on_after_the_block(cluster: Cluster, replicas: int) -> None:
    assert same_parameters(cluster.run(_two_epochs, 2, replicas))


def _filters(rank: int, world_size: int) -> bool:
    model = wrap(1)
    before = list(warnings.filters)
    with model.join():
        train(model, rank, rank)
    return warnings.filters == before


def test_filters_for_warnings_are_left_alone(cluster: Cluster) -> None:
    assert cluster.run(_filters, 2) == [True, True]


def _evaluate_in_block(rank: int, world_size: int) -> State:
    model = wrap(1)
    with model.join():
        for step in range((1, 3)[rank]):
            x, y = batch(step, rank)
            with torch.no_grad():
                model(x)
            nn.functional.mse_loss(model(x), y).backward()
    return state_of(model)


def test_forward_without_gradients_has_no_round(cluster: Cluster) -> None:
    first, second = cluster.run(_evaluate_in_block, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _same_block_again(rank: int, world_size: int) -> State:
    model = wrap(1)
    block = model.join()
    assert not model._join_config.enable
    for counts in ((2, 1), (1, 2)):
        with block:
            train(model, rank, counts[rank])
    return state_of(model)


def test_a_block_may_be_entered_again(cluster: Cluster) -> None:
    first, second = cluster.run(_same_block_again, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _never_joins(rank: int, world_size: int) -> str:
    model = wrap(1, timeout=0.5)
    if rank == 1:
        dist.barrier()
        return ""
    try:
        with pytest.raises(CollectiveTimeout, match=r"rank 1") as caught, model.join():
            train(model, 0, 0)
    finally:
        dist.barrier()
    return str(caught.value)


def test_waiting_for_others_ends(cluster: Cluster) -> None:
    message, _ = cluster.run(_never_joins, 2)
    assert "how many processes have inputs left" in message


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("no gradient")


def _fails_elsewhere(rank: int, world_size: int) -> str:
    model = wrap(1)
    model.module.register_forward_hook(lambda module, args, output: _Fails.apply(output))
    with pytest.raises((ArithmeticError, RuntimeError)) as caught, model.join():
        if rank == 1:
            model(batch(0, rank)[0]).sum().backward()
    return str(caught.value)


def test_failure_of_a_backward_reaches_those_that_have_joined(cluster: Cluster) -> None:
    joined, failed = cluster.run(_fails_elsewhere, 2)
    assert "no gradient" in failed
    assert "the backward of rank 1 failed" in joined
