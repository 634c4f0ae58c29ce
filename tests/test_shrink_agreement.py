"""Steps of several processes that fail in one of them, with any number of rounds."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import virtual
from dataparallel.reducer import buckets
from dataparallel.shrinking import survive_device_loss
from tests.cluster import Cluster

_PLACES = ("backward", "forward")


class _Step(NamedTuple):
    """So many rounds; a rank fails before the round ``at``, or after the last one."""

    rounds: int
    rank: int = -1
    at: int = -1


class _Failing(nn.Linear):
    """Fails in forward or in backward, where that is wanted."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise ValueError("in forward")
        result: Tensor = super().forward(x)
        if self.where == "backward":
            result.register_hook(_refuse)
        return result


def _refuse(_: Tensor) -> None:
    raise ValueError("in backward")


def _ones(device: str = "cpu") -> Tensor:
    return torch.ones(2, 3, device=device)


def _steps(
    rank: int, world_size: int, steps: list[_Step], average: Any, *, has_buffer: bool = False
) -> list[str]:
    """What each step raises; its time limit would come after that of the test."""
    net = nn.Linear(3, 1)
    if has_buffer:
        net.register_buffer("buffer", torch.tensor(float(rank)))
    model = dataparallel.DistributedDataParallel(net, ["cpu", "cpu"], timeout=60, average=average)
    found = []
    with survive_device_loss(model) as keeper:
        for step in steps:

            def closure(step: _Step = step) -> None:
                for i in range(step.rounds + 1):
                    if rank == step.rank and i == step.at:
                        raise ValueError("no such file")
                    if i < step.rounds:
                        model(_ones()).sum().backward()

            model.zero_grad()
            try:
                keeper.step(closure)
            except Exception as error:
                found.append(type(error).__name__)
            else:
                assert model.module.weight.grad is not None
                each = 2 * step.rounds * (world_size if average == "none" else 1)
                assert model.module.weight.grad.tolist() == [[each] * 3]
                assert not has_buffer or float(net.get_buffer("buffer")) == 0
                found.append("")
    return found


@pytest.mark.parametrize("average", ["processes", "samples"])
def test_any_number_of_rounds(cluster: Cluster, average: str) -> None:
    """Whoever fails cannot know whether the others are in a round or have done their step."""
    steps = [
        _Step(1, 0, 0),
        _Step(2, 1, 1),
        _Step(2),
        _Step(1, 1, 1),
        _Step(1),
        _Step(2, 0, 1),
        _Step(3, 0, 0),
        _Step(1, 1, 0),
        _Step(3, 0, 3),
        _Step(1),
    ]
    results = cluster.run(_steps, 2, steps, average, timeout=40)
    for rank, result in enumerate(results):
        for step, raised in zip(steps, result, strict=True):
            theirs = "OtherRanksFailed" if step.at < step.rounds else "RuntimeError"
            expected = "ValueError" if step.rank == rank else theirs
            assert raised == ("" if step.rank < 0 else expected)


def _with_buffer(rank: int, world_size: int, steps: list[_Step]) -> list[str]:
    return _steps(rank, world_size, steps, "processes", has_buffer=True)


def test_buffers_that_come_from_rank_0(cluster: Cluster) -> None:
    """A process that fails before its forward sends them, or gets them, all the same."""
    steps = [_Step(1, 0, 0), _Step(1), _Step(1, 1, 0), _Step(1), _Step(1, 1, 1), _Step(1)]
    first, second = cluster.run(_with_buffer, 2, steps, timeout=40)
    assert first == ["ValueError", "", "OtherRanksFailed", "", "RuntimeError", ""]
    assert second == ["OtherRanksFailed", "", "ValueError", "", "ValueError", ""]


def _in_the_module(rank: int, world_size: int) -> list[tuple[str, list[Any]]]:
    model = dataparallel.DistributedDataParallel(
        _Failing(3, 1), ["cpu", "cpu"], timeout=60, average="samples"
    )
    found = []
    where = ""

    def closure() -> None:
        # The others have no part in a round under no_sync(), and go on.
        with model.no_sync() if where == "backward" else contextlib.nullcontext():
            model(_ones()).sum().backward()
        model(_ones()).sum().backward()

    with survive_device_loss(model) as keeper:
        for where in _PLACES:
            if rank == 1:
                model.module.where = where
            model.zero_grad()
            with pytest.raises(Exception, match=f"in {where}") as caught:
                keeper.step(closure)
            model.module.where = ""
            model.zero_grad()
            keeper.step(closure)
            assert model.module.weight.grad is not None
            found.append((type(caught.value).__name__, model.module.weight.grad.tolist()))
    return found


def test_errors_of_the_module_itself(cluster: Cluster) -> None:
    """In backward under no_sync(), and in forward, where all links break."""
    first, second = cluster.run(_in_the_module, 2, timeout=40)
    four = [[4.0] * 3]
    assert first == [("OtherRanksFailed", four), ("CollectiveError", four)]
    assert second == [("ValueError", four)] * 2


def _lost_at_the_end(rank: int, world_size: int) -> tuple[list[Any], int]:
    home, other = f"virtual:{2 * rank}", f"virtual:{2 * rank + 1}"
    model = dataparallel.DistributedDataParallel(
        nn.Linear(3, 1).to(home), [home, other], timeout=60
    )
    calls = 0

    def closure(rounds: int) -> None:
        nonlocal calls
        calls += 1
        for _ in range(rounds):
            model(_ones(home)).sum().backward()
        if rank == 1 and calls == 2:
            virtual.lose_device(other)

    try:
        with survive_device_loss(model) as keeper:
            keeper.step(lambda: closure(2))
            model.zero_grad()
            keeper.step(lambda: closure(1))
    finally:
        virtual.restore_device(other)
    assert model.module.weight.grad is not None
    return model.module.weight.grad.tolist(), calls


def test_a_device_is_lost_when_the_rounds_are_over(cluster: Cluster) -> None:
    results = cluster.run(_lost_at_the_end, 2, virtual=True, timeout=40)
    assert results == [([[2.0] * 3], 3)] * 2


def _no_memory(rank: int, world_size: int, keeps: bool) -> tuple[list[str], int, list[Any]]:
    """Rank 1 cannot make its buckets in the order that was agreed on after the first round."""
    home, other = f"virtual:{2 * rank}", f"virtual:{2 * rank + 1}"
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(home)
    model = dataparallel.DistributedDataParallel(
        net, [home, other], timeout=60, bucket_cap_mb=0.00001
    )
    storage: Any = vars(buckets)["BucketStorage"]
    failures = 0

    def failing(*arguments: Any) -> Any:
        nonlocal failures
        if rank == 1 and failures == 0:
            failures = 1
            if keeps:
                virtual.lose_device(other)
            raise torch.OutOfMemoryError("too little memory")
        return storage(*arguments)

    found = []
    setattr(buckets, "BucketStorage", failing)  # noqa: B010
    try:
        with survive_device_loss(model) if keeps else contextlib.nullcontext() as keeper:
            for _ in range(3):
                model.zero_grad()

                def closure() -> None:
                    # The others go on to a second round.
                    for _ in range(1 + keeps):
                        model(_ones(home)).sum().backward()

                try:
                    closure() if keeper is None else keeper.step(closure)
                    found.append("")
                except torch.OutOfMemoryError as error:
                    found.append(str(error))
    finally:
        setattr(buckets, "BucketStorage", storage)  # noqa: B010
        virtual.restore_device(other)
    grads = [p.grad.tolist() for p in net.parameters() if p.grad is not None]
    return found, len(model.reducer.buckets.plan), grads


@pytest.mark.parametrize("keeps", [False, True])
def test_no_memory_for_buckets_in_the_agreed_order(cluster: Cluster, keeps: bool) -> None:
    first, second = cluster.run(_no_memory, 2, keeps, virtual=True, timeout=40)
    assert first[0] == [""] * 3
    assert second[0] == ["" if keeps else "too little memory", "", ""]
    assert first[1:] == second[1:]
    assert first[1] > 1
