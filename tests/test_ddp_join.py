"""Training with uneven inputs: against torch's wrapper, and what goes beyond it."""

from __future__ import annotations

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
from tests.ddp_cases import FailInBackward, Net, batch
from tests.ddp_cases import wrap as wrap_module
from tests.models import assert_all_close

State: TypeAlias = list[Tensor]


def _forward(net: Any, x: Tensor, use_branch: bool = True) -> Tensor:
    """Has a branch that only some steps use, and a buffer that every forward in training writes."""
    first, branch, last = net.layers
    if net.training:
        net.mean.mul_(0.5).add_(net.push)
    x = torch.tanh(first(x - 0.1 * net.mean))
    if use_branch:
        x = x + branch(x)
    output: Tensor = last(x) * net.scale
    return output


def make_net() -> Any:
    net: Any = Net("cpu", _forward)
    net.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
    # Different in each process.
    net.push = dist.get_rank() + 1.0
    made: nn.Module = net
    return made


def wrap(replicas: int, **options: Any) -> Any:
    return wrap_module(make_net(), replicas, **options)


def backward(model: Any, step: int, rank: int, **options: Any) -> None:
    device = str(next(model.parameters()).device)
    model(batch(device, 100 * step + rank, 4), **options).sin().mean().backward()


def train(model: Any, rank: int, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(count):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any) -> State:
    module = getattr(model, "module", model)
    return [tensor.detach().cpu().clone() for tensor in module.state_dict().values()]


# --- against torch's wrapper ---------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Blocks of `join()`, and what the training loop in them does.

    Attributes:
        counts: How many steps each rank has, in each of some blocks.
        theirs: The differences with torch's wrapper.
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
    """Return the state after all blocks, and for each step whether the branch had a gradient."""
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
                had.append(model.module.layers[1].weight.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
    assert not ours or not model._join_config.enable
    return state_of(model), had


_TWO = ("cpu", "cpu")
_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}
#: Momentum would count torch's zeros for what nobody uses: a joined process does not forget there
#: which parameters were used once.
_SOME: dict[str, Any] = {
    **{"branch": False, "momentum": 0.0},
    "theirs": {"options": {"find_unused_parameters": True}},
}
_PLAIN: dict[str, Any] = {"theirs": {"options": {}}}

BLOCKS = {
    "two": Block([(4, 2)], options=_SMALL),
    "nothing": Block([(0, 3)], _TWO, _SMALL),
    "three, divided by those left": Block([(3, 1, 3)], _TWO, divide=False),
    # With equal batches it is the mean over samples that are left.
    "samples": Block(
        [(3, 1, 2)], _TWO, {"average": "samples"}, theirs={"options": {}, "divide": False}
    ),
    "unused by three": Block([(1, 3, 0)], _TWO, **_SOME),
    "no_sync of three": Block([(6, 2, 5)], _TWO, unsynced=(0, 2, 3)),
    "hook": Block([(4, 2)], _TWO, hook=True),
    # Torch's hooks divide by the number of all processes nevertheless.
    "hook, divided by those left": Block([(4, 2)], hook=True, divide=False, theirs={"hook": False}),
    "static": Block([(1, 3)], options={"static_graph": True, "deterministic": True}, **_PLAIN),
    "all used": Block([(1, 3)], options={"find_unused_parameters": False}),
    "Join": Block([(1, 3)], generic=True, divide=False),
    # One that was joined trains in the second block with what it got.
    "devices": Block([(3, 1)] * 2, ("virtual:0", "virtual:1")),
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
        assert_all_close(mine, other, rtol=1e-5, atol=1e-6)
        assert_all_close(mine, ours[0][0], rtol=0.0, atol=0.0)
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
    return message, state, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("counts", "replicas"), [((4, 2, 3), 2), ((2, 2), 1)])
def test_all_processes_raise_when_one_has_no_more(
    cluster: Cluster, counts: tuple[int, ...], replicas: int
) -> None:
    ours = cluster.run(_throw, len(counts), replicas, counts)
    theirs = cluster.run(_throw, len(counts), 0, counts)
    assert bool(ours[1][0]) == (len(counts) == 3)
    for (message, mine, parameters), (text, other, _) in zip(ours, theirs, strict=True):
        assert message == text
        assert_all_close(mine, other, rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, parameters, ours[0][2]))


# --- what goes beyond it -------------------------------------------------------------------------


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
    # Gradients that were not reduced before the block are reduced after it.
    backward(model, 5, rank)
    return kept, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
def test_a_joined_process_keeps_its_gradients(cluster: Cluster, view: bool) -> None:
    (kept, first), (_, second) = cluster.run(_grads_after, 2, view)
    assert kept
    assert all(map(torch.equal, first, second))


def _epochs(
    rank: int, world_size: int, kind: Any, generic: bool, options: dict[str, Any]
) -> list[Tensor]:
    model = wrap(1 + rank, **options)
    optimizer = kind(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()

    def look(size: int) -> None:
        """A forward without gradients has no round."""
        with torch.no_grad():
            model(batch(size=size))

    def run(count: int) -> None:
        for number in range(count):
            look(4)
            with model.no_sync():
                backward(model, number, rank)
            backward(model, number, rank)
            step()
            optimizer.zero_grad()

    for counts in ((3, 0), (1, 4), (2, 2)):
        with Join([model], step=step) if generic else model.join(step=step):
            run(counts[rank])
        model.require_forward_param_sync = False
        if rank == 0:
            # Alone: after the block nothing is told to others any more.
            look(2)
        model.require_forward_param_sync = True
    run(1)
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [*model.module.parameters(), *state, torch.tensor(scheduler.get_last_lr())]


@pytest.mark.parametrize(
    ("kind", "generic", "options"),
    [
        (torch.optim.RMSprop, False, {"gradient_as_bucket_view": True}),
        (torch.optim.Adam, False, {"buffers": "mean"}),
        (torch.optim.Adam, False, {"buffers": "sync"}),
        (torch.optim.Adam, True, {"gradient_as_bucket_view": True}),
    ],
)
def test_steps_of_a_joined_process_keep_the_state_of_its_optimizer(
    cluster: Cluster, kind: Any, generic: bool, options: dict[str, Any]
) -> None:
    """Through several blocks and after them."""
    first, second = cluster.run(_epochs, 2, kind, generic, options)
    assert len(first) == len(second) > 6
    assert all(map(torch.equal, first, second))


# --- failures ------------------------------------------------------------------------------------


def _fails_elsewhere(rank: int, world_size: int) -> str:
    model = wrap(1)
    error = ArithmeticError("no gradient")
    model.module.register_forward_hook(lambda module, args, y: FailInBackward.apply(y, error))
    with pytest.raises((ArithmeticError, RuntimeError)) as caught, model.join():
        if rank == 1:
            model(batch()).sum().backward()
    return str(caught.value)


def test_failure_of_a_backward_reaches_those_that_have_joined(cluster: Cluster) -> None:
    joined, failed = cluster.run(_fails_elsewhere, 2)
    assert "no gradient" in failed
    assert "failed in backward: " in joined


def _replaced(rank: int, world_size: int, how: str, generic: bool) -> None:
    """A parameter is replaced in the block: by rank 1 when rank 0 has joined, or by all at once."""
    net = nn.Linear(2, 1, bias=False)
    model = wrap_module(net, 2, timeout=90.0)
    context: Any = Join([model]) if generic else model.join()
    text = (
        r"within a block of join\(\), and processes that have joined cannot do the same. Replace "
        r"parameters before the block, .*; p.data.copy_\(...\) changes values at any time"
    )
    with pytest.raises(RuntimeError, match=text), context:
        for step in range(1 if how == "by all" else 1 + 2 * rank):
            if how == "other dtype" and step == 1:
                net.weight.data = torch.ones(1, 2).double()
            elif how == "by all" or step == 1:
                net.weight = nn.Parameter(torch.ones(1, 2))
            model(torch.ones(2, 2, dtype=net.weight.dtype)).sum().backward()
    # A parameter that is replaced in all processes is trained.
    net.weight = nn.Parameter(torch.full((1, 2), 2.0))
    model(torch.full((2, 2), rank + 1.0)).sum().backward()
    assert net.weight.grad is not None and net.weight.grad.tolist() == [[3.0, 3.0]]
    model.close()


@pytest.mark.parametrize(
    ("how", "generic"),
    [("by one", False), ("by one", True), ("other dtype", False), ("by all", False)],
)
def test_parameters_replaced_within_the_block(cluster: Cluster, how: str, generic: bool) -> None:
    cluster.run(_replaced, 2, how, generic)
