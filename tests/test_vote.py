"""The vote of a round: what it costs, who waits for it, and what errors that come late do."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.comm.errors import CollectiveError
from dataparallel.comm.link import Pending
from dataparallel.reducer.verify import ReplicaMismatch
from tests.cluster import Cluster
from tests.models import assert_all_close, grads_of
from tests.process_groups import new_group


class Net(nn.Module):
    """Two layers, and one that is used when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        x = self.second(self.first(x))
        y: Tensor = self.spare(x) if with_spare else x
        return y


def make(replicas: int = 1, **options: Any) -> Any:
    options = {"bucket_cap_mb": 0.00001, "timeout": 8.0, **options}
    return dp.DistributedDataParallel(Net(), ["cpu"] * replicas, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 4, generator=generator)


def warm(model: Any, rank: int) -> None:
    """Two steps: the first is one in which all ranks wait for each other."""
    for step in range(2):
        model.zero_grad()
        model(batch(rank, step)).sum().backward()


def assert_mean(model: Any, *losses: Callable[[Net], Any], world_size: int) -> None:
    """The gradients are those of the mean of what all ranks had as a loss."""
    bare = Net()
    for loss in losses:
        (loss(bare) / world_size).backward()
    assert_all_close(grads_of(model), grads_of(bare))


# --- what a step costs ---------------------------------------------------------------------------


@contextlib.contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Counts for what the host waits."""
    found: Counter[str] = Counter()
    wait = Pending.wait

    def counting(self: Pending) -> None:
        what = self.where.split(" of ")[1]
        found[" ".join(what.split(" ")[: 1 + what.startswith("the ")])] += 1
        wait(self)

    with mock.patch.object(Pending, "wait", counting):
        yield found


def count(rank: int, world_size: int, replicas: int, spare: list[bool]) -> tuple[Any, ...]:
    model = make(replicas)
    warm(model, rank)
    links = model._training.processes.buckets, model._training.processes.control
    before = [link.launched.total() for link in links]
    loss = model(batch(rank), spare[rank]).sum()
    with counted_waits() as waits:
        loss.backward()
    launched = [link.launched.total() - b for link, b in zip(links, before, strict=True)]
    with counted_waits() as later:
        model(batch(rank))
    return launched, dict(waits), dict(later), len(model.reducer.buckets.all)


@pytest.mark.parametrize(
    ("replicas", "spare"), [(1, [True, True]), (2, [True, False]), (1, [False, False])]
)
def test_a_steady_step_waits_for_buckets_alone(
    cluster: Cluster, replicas: int, spare: list[bool]
) -> None:
    for uses_all, found in zip(spare, cluster.run(count, 2, replicas, spare), strict=True):
        launched, waits, later, num_buckets = found
        assert num_buckets == 6
        assert launched == [num_buckets, 2]
        # Launched before the buckets, it has come when they have.
        waits_for = {"bucket": num_buckets, "the begin": 1}
        assert waits == waits_for | ({} if uses_all else {"the vote": 1})
        assert later == {"the vote": 1}, "the next forward reads the vote"


def leave_for_a_barrier(rank: int, world_size: int) -> None:
    """Rank 0 has unused parameters, and rank 1 waits elsewhere for rank 0."""
    model = make()
    warm(model, rank)
    model.zero_grad()
    model(batch(rank), rank == 1).sum().backward()
    dist.barrier()
    losses: list[Any] = [lambda net, r=r: net(batch(r), r == 1).sum() for r in range(2)]
    assert_mean(model, *losses, world_size=2)


def test_who_needs_no_answer_may_wait_elsewhere_for_who_does(cluster: Cluster) -> None:
    cluster.run(leave_for_a_barrier, 2, timeout=20)


# --- gradients that come late or from outside ----------------------------------------------------


def penalty_of_rank_0(rank: int, world_size: int) -> None:
    """From the third step on, a parameter is used outside of the wrapper, too, now and then."""

    def loss_of(net: Any, who: int, step: int) -> Any:
        has_penalty = who == 0 and step % 2 == 0
        early = net.second.weight.pow(2).sum() if has_penalty else 0.0
        return (model if net is model.module else net)(batch(who, step)).sum() + early

    model = make()
    warm(model, rank)
    model.zero_grad()
    loss = loss_of(model.module, rank, 2)
    text = "and not in all processes: second.weight"
    with pytest.raises(RuntimeError, match=text) if rank == 0 else contextlib.nullcontext():
        loss.backward()
    with pytest.raises(RuntimeError, match="failed in it"):
        model(batch(rank, 3))
    model.check_replicas()
    # From now on its bucket waits for the end of the backward.
    for step in range(4, 9):
        model.zero_grad()
        with counted_waits() as waits:
            loss_of(model.module, rank, step).backward()
        assert waits["bucket"] == 6
        losses: list[Any] = [
            lambda net, r=r, step=step: loss_of(net, r, step) for r in range(world_size)
        ]
        assert_mean(model, *losses, world_size=world_size)


def test_late_gradients_that_some_ranks_do_not_wait_for_raise_in_all(cluster: Cluster) -> None:
    cluster.run(penalty_of_rank_0, 3)


# --- errors --------------------------------------------------------------------------------------


def fail_when_delivered(model: Any, rank: int, before: Callable[[], object]) -> None:
    """A backward in which a hook fails that runs when the gradient is delivered."""

    def refuse(parameter: Tensor) -> None:
        before()
        raise ValueError("a hook says no")

    weight = model.module.first.weight
    handle = weight.register_post_accumulate_grad_hook(refuse)
    with pytest.raises(ValueError, match="a hook says no"):
        model(batch(rank)).sum().backward()
    handle.remove()
    assert weight.grad is not None, "it delivers first"


def fail_late(rank: int, world_size: int, repair: str, steps: bool, unused: bool) -> None:
    """Rank 1 fails, and the others learn of it later, or if they have unused parameters at once."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm(model, rank)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    # Rank 0 waits for the vote if it has unused parameters, and learns of the failure in backward.
    behind = {0, 1} if unused else {1}
    group = new_group([each for each in range(world_size) if each == 1 or each not in behind])
    optimizer.zero_grad()
    if rank == 1:
        # Those that do not wait are done with their backward.
        fail_when_delivered(model, rank, lambda: dist.barrier(group))
    elif rank in behind:
        with pytest.raises(CollectiveError, match=r"rank 1 .* after its last bucket was sent"):
            model(batch(rank), False).sum().backward()
    else:
        model(batch(rank)).sum().backward()
        dist.barrier(group)
        if steps:
            optimizer.step()
    ahead = [str(each) for each in range(world_size) if each not in behind]
    text = f"of step 3 were reduced in ranks? {', '.join(ahead)}, which may have .* failed in it"
    # If nobody is ahead, nobody has taken the step, and all go on.
    for _ in range(2 if ahead else 0):
        with pytest.raises(RuntimeError, match=text):
            model(batch(rank))
    if repair == "load":
        model.load_state_dict(start)
    elif repair == "compare" and steps:
        with pytest.raises(ReplicaMismatch):
            model.check_replicas()
        with pytest.raises(RuntimeError, match=text):
            model(batch(rank))
        return
    elif repair == "compare":
        model.check_replicas()
    optimizer.zero_grad()
    model(batch(rank)).sum().backward()
    optimizer.step()
    model.check_replicas()


@pytest.mark.parametrize(
    ("world_size", "repair", "steps", "unused"),
    [
        (2, "compare", False, False),
        (2, "load", True, False),
        (4, "compare", True, False),
        (2, "none", True, True),
        (4, "load", True, True),
    ],
)
def test_who_fails_after_its_last_bucket_leaves_a_doubt(
    cluster: Cluster, world_size: int, repair: str, steps: bool, unused: bool
) -> None:
    cluster.run(fail_late, world_size, repair, steps, unused)


NEXT: dict[str, Callable[[Any], object]] = {
    "a forward without gradients": torch.no_grad()(lambda model: model(batch(0))),
    "an evaluation": torch.no_grad()(lambda model: model.eval()(batch(0))),
    "state_dict": lambda model: model.state_dict(),
    "no_sync": lambda model: model.no_sync().__enter__(),
}


def read_elsewhere(rank: int, world_size: int, how: str) -> None:
    model = make()
    warm(model, rank)
    if rank == 1:
        fail_when_delivered(model, rank, dist.barrier)
    else:
        model(batch(rank)).sum().backward()
        dist.barrier()
        with pytest.raises(CollectiveError, match=r"rank 1 .* after its last .*a hook says no"):
            NEXT[how](model)
    model.train()
    with pytest.raises(RuntimeError, match="step 3 were reduced in rank 0"):
        model(batch(rank))


@pytest.mark.parametrize("how", NEXT)
def test_whatever_comes_next_reads_the_vote(cluster: Cluster, how: str) -> None:
    cluster.run(read_elsewhere, 2, how)
