"""Training with uneven inputs: against torch's wrapper, and what goes beyond it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import dataparallel as dp
from dataparallel.comm_hooks import allreduce_hook
from tests.cluster import Cluster
from tests.ddp_cases import FailInBackward
from tests.ddp_cases import wrap as wrap_module
from tests.models import assert_all_close

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


def wrap(replicas: int, **options: Any) -> Any:
    return wrap_module(make_net(), replicas, **options)


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def backward(model: Any, step: int, rank: int, size: int = 4, **options: Any) -> None:
    device = next(model.parameters()).device
    x, y = (tensor.to(device) for tensor in batch(step, rank, size))
    nn.functional.mse_loss(model(x, **options), y).backward()


def train(model: Any, rank: int, count: int, size: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(count):
        backward(model, step, rank, size)
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any) -> State:
    module = getattr(model, "module", model)
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def assert_equal_parameters(states: Sequence[State]) -> None:
    names = [name for name, _ in make_net().named_parameters()]
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in names)


# --- against torch's wrapper ---------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Blocks of `join()`, and what the training loop in them does.

    Attributes:
        counts: How many steps each rank has, in each of some blocks.
        theirs: What is otherwise with torch's wrapper.
    """

    counts: Sequence[Sequence[int]]
    devices: tuple[str, ...] = ("cpu",)
    options: dict[str, Any] = field(default_factory=dict)
    divide: bool = True
    generic: bool = False
    hook: bool = False
    zero: bool = False
    branch: bool = True
    unsynced: Sequence[int] = ()
    momentum: float = 0.9
    theirs: dict[str, Any] = field(default_factory=dict)


def _optimizer(model: Any, block: Block) -> Any:
    options: dict[str, Any] = {"lr": 0.1, "momentum": block.momentum}
    if not block.zero:
        return torch.optim.SGD(model.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)


def _joined(rank: int, world_size: int, block: Block, ours: bool) -> tuple[State, list[bool]]:
    """The state after all blocks, and for each step whether the branch had a gradient."""
    if ours:
        net = make_net().to(block.devices[0])
        model: Any = dp.DistributedDataParallel(net, block.devices, **block.options)
    else:
        block = replace(block, **block.theirs)
        model = nn.parallel.DistributedDataParallel(make_net(), **block.options)
    if block.hook:
        model.register_comm_hook(None, allreduce_hook)
    optimizer, had = _optimizer(model, block), []
    for counts in block.counts:
        joinables = [model, optimizer] if block.zero else [model]
        both = {"divide_by_initial_world_size": block.divide}
        with Join(joinables, **both) if block.generic or block.zero else model.join(**both):
            for step in range(counts[rank]):
                use = {"use_branch": block.branch or step == 1}
                if step in block.unsynced:
                    with model.no_sync():
                        backward(model, step, rank, **use)
                    continue
                backward(model, step, rank, **use)
                had.append(model.module.branch.weight.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
    assert not ours or not model._join_config.enable
    return state_of(model), had


_TWO = ("cpu", "cpu")
_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}
#: Momentum would count torch's zeros for what nobody uses: who has joined does not forget there
#: which parameters were used once.
_SOME: dict[str, Any] = {
    **{"branch": False, "momentum": 0.0},
    "theirs": {"options": {"find_unused_parameters": True}},
}
_PLAIN: dict[str, Any] = {"theirs": {"options": {}}}

BLOCKS = {
    "two": Block([(4, 2)], options=_SMALL),
    "nothing": Block([(0, 3)], _TWO, _SMALL),
    "three": Block([(1, 4, 2)], _TWO),
    "two, divided by those left": Block([(4, 2)], options=_SMALL, divide=False),
    "three, divided by those left": Block([(3, 1, 3)], _TWO, divide=False),
    "unused": Block([(4, 1)], **_SOME),
    "unused by three": Block([(1, 3, 0)], _TWO, **_SOME),
    "no_sync": Block([(5, 2)], unsynced=(0, 2, 3)),
    "no_sync of three": Block([(6, 2, 5)], _TWO, unsynced=(0, 2, 3)),
    "hook": Block([(4, 2)], _TWO, hook=True),
    # Torch's hooks divide by the number of all processes nevertheless.
    "hook, divided by those left": Block([(4, 2)], hook=True, divide=False, theirs={"hook": False}),
    "static": Block([(1, 3)], options={"static_graph": True, "deterministic": True}, **_PLAIN),
    "all used": Block([(1, 3)], options={"find_unused_parameters": False}),
    "Join": Block([(1, 3)], generic=True, divide=False),
    # One that was joined trains in the second block with what it got.
    "devices": Block([(3, 1)] * 2, ("virtual:0", "virtual:1")),
    "Join on devices": Block([(3, 1)] * 2, ("virtual:0", "virtual:1"), generic=True),
    # Each process steps everything by itself there.
    "ZeRO": Block([(2, 5)], _TWO, zero=True, theirs={"zero": False}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_joined_training_is_that_of_torch(cluster: Cluster, name: str) -> None:
    block = BLOCKS[name]
    count = len(block.counts[0])
    on_virtual = block.devices[0] != "cpu"
    ours = cluster.run(_joined, count, block, True, virtual=on_virtual)
    theirs = cluster.run(_joined, count, block, False)
    for (mine, had), (other, _), number in zip(ours, theirs, block.counts[0], strict=True):
        assert_all_close(mine.values(), other.values(), rtol=1e-5, atol=1e-6)
        assert_all_close(mine.values(), ours[0][0].values(), rtol=0.0, atol=0.0)
        if not block.branch:
            assert had == [step == 1 for step in range(number)]


def _throw(
    rank: int, world_size: int, replicas: int, counts: Sequence[int]
) -> tuple[str, State, State]:
    model, message = wrap(replicas), ""
    try:
        with model.join(throw_on_early_termination=True):
            train(model, rank, counts[rank])
    except RuntimeError as error:
        message = str(error)
    state = state_of(model)
    train(model, rank, 2)
    return message, state, state_of(model)


@pytest.mark.parametrize(("counts", "replicas"), [((4, 2, 3), 1), ((4, 2, 3), 2), ((2, 2), 1)])
def test_all_processes_raise_when_one_has_no_more(
    cluster: Cluster, counts: tuple[int, ...], replicas: int
) -> None:
    ours = cluster.run(_throw, len(counts), replicas, counts)
    theirs = cluster.run(_throw, len(counts), 0, counts)
    assert [message for message, _, _ in ours] == [message for message, _, _ in theirs]
    assert bool(ours[1][0]) == (len(counts) == 3)
    for (_, mine, _), (_, other, _) in zip(ours, theirs, strict=True):
        assert_all_close(mine.values(), other.values(), rtol=1e-5, atol=1e-6)
    assert_equal_parameters([state for _, _, state in ours])


# --- what goes beyond it -------------------------------------------------------------------------


def _join_samples(rank: int, world_size: int, counts: Sequence[int]) -> State:
    options: dict[str, Any] = {"average": "samples", "broadcast_buffers": False}
    model = wrap(rank + 1, **options)
    model.eval()
    with model.join():
        train(model, rank, counts[rank], 3 + rank)
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
    for state in ours:
        assert_all_close(state.values(), state_of(bare).values(), rtol=1e-5, atol=1e-6)


def _grads_after(rank: int, world_size: int, view: bool) -> tuple[bool, list[Tensor]]:
    model = wrap(1, gradient_as_bucket_view=view)
    backward(model, 0, rank)
    model.zero_grad()
    with model.no_sync():
        backward(model, 1, rank)
    before = [p.grad.clone() for p in model.parameters()]
    with model.join():
        for step in range(2, 2 + 2 * rank):
            model.zero_grad()
            backward(model, step, rank)
    kept = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    if rank == 1:
        model.zero_grad()
    # What was not reduced before the block is reduced after it.
    backward(model, 5, rank)
    return kept, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
def test_a_joined_process_keeps_its_gradients(cluster: Cluster, view: bool) -> None:
    (kept, first), (_, second) = cluster.run(_grads_after, 2, view)
    assert kept
    assert all(map(torch.equal, first, second))


def _two_epochs(rank: int, world_size: int, replicas: int, buffers: Any) -> State:
    model = wrap(replicas, buffers=buffers)
    for counts in ((3, 1), (1, 2)):
        with model.join():
            for step in range(counts[rank]):
                # A forward without gradients has no round.
                with torch.no_grad():
                    model(batch(step, rank)[0])
                train(model, rank, 1)
        if rank == 0:
            # Alone: after the block nothing is told to others any more.
            model.require_forward_param_sync = False
            with torch.no_grad():
                model(torch.ones(2, 6))
        model.require_forward_param_sync = True
    train(model, rank, 1)
    return state_of(model)


@pytest.mark.parametrize(("replicas", "buffers"), [(1, "replica0"), (2, "mean"), (1, "sync")])
def test_training_goes_on_after_the_block(cluster: Cluster, replicas: int, buffers: str) -> None:
    assert_equal_parameters(cluster.run(_two_epochs, 2, replicas, buffers))


def _epochs(rank: int, world_size: int, kind: Any, generic: bool, view: bool) -> list[Tensor]:
    model = wrap(1 + rank, gradient_as_bucket_view=view)
    optimizer = kind(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()

    for counts in ((3, 0), (1, 4), (2, 2)):
        with Join([model], step=step) if generic else model.join(step=step):
            for number in range(counts[rank]):
                with model.no_sync():
                    backward(model, number, rank)
                backward(model, number, rank)
                step()
                optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [*model.module.parameters(), *state, torch.tensor(scheduler.get_last_lr())]


@pytest.mark.parametrize(
    ("kind", "generic", "view"),
    [
        (torch.optim.RMSprop, False, True),
        (torch.optim.Adam, False, False),
        (torch.optim.Adam, True, True),
    ],
)
def test_steps_of_a_joined_process_keep_the_state_of_its_optimizer(
    cluster: Cluster, kind: Any, generic: bool, view: bool
) -> None:
    first, second = cluster.run(_epochs, 2, kind, generic, view)
    assert len(first) == len(second) > 6
    assert all(map(torch.equal, first, second))


# --- failures ------------------------------------------------------------------------------------


def _fails_elsewhere(rank: int, world_size: int) -> str:
    model = wrap(1)
    error = ArithmeticError("no gradient")
    model.module.register_forward_hook(lambda module, args, y: FailInBackward.apply(y, error))
    with pytest.raises((ArithmeticError, RuntimeError)) as caught, model.join():
        if rank == 1:
            model(batch(0, rank)[0]).sum().backward()
    return str(caught.value)


def test_failure_of_a_backward_reaches_those_that_have_joined(cluster: Cluster) -> None:
    joined, failed = cluster.run(_fails_elsewhere, 2)
    assert "no gradient" in failed
    assert "failed in backward: " in joined


def _replaced(rank: int, world_size: int, how: str, generic: bool) -> list[str]:
    """A parameter is replaced in the block: by rank 1 when rank 0 has joined, or by all at once."""
    net = nn.Linear(2, 1, bias=False)
    model = wrap_module(net, 2, timeout=30.0)
    context: Any = Join([model]) if generic else model.join()
    began = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="Replace parameters before the block") as caught,
        context,
    ):
        for step in range(1 if how == "by all" else 1 + 2 * rank):
            if how == "other dtype" and step == 1:
                net.weight.data = torch.ones(1, 2).double()
            elif how == "by all" or step == 1:
                net.weight = nn.Parameter(torch.ones(1, 2))
            model(torch.ones(2, 2, dtype=net.weight.dtype)).sum().backward()
    assert time.monotonic() - began < 10.0, "it waited for the time limit"
    # What is replaced in all processes is trained.
    net.weight = nn.Parameter(torch.full((1, 2), 2.0))
    model(torch.full((2, 2), rank + 1.0)).sum().backward()
    assert net.weight.grad is not None
    found = [str(caught.value), str(net.weight.grad.tolist())]
    model.close()
    return found


@pytest.mark.parametrize(
    ("how", "generic"),
    [("by one", False), ("by one", True), ("other dtype", False), ("by all", False)],
)
def test_parameters_replaced_within_the_block(cluster: Cluster, how: str, generic: bool) -> None:
    for said, gradient in cluster.run(_replaced, 2, how, generic):
        assert "within a block of join(), and processes that have joined cannot do" in said
        assert "p.data.copy_(...) changes values at any time" in said
        assert gradient == "[[3.0, 3.0]]"
