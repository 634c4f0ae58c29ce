"""Whether replicas run in turn or at the same time is tried, and the faster way is kept."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.threads import apply, workers
from dataparallel.threads.meeting import current_rendezvous

# Forwards after which both ways have been tried.
TRIED = 32


class Clock:
    """Stands for the module ``time``: calls in turn take so long, and others so long."""

    def __init__(self, at_once: float, in_turn: float) -> None:
        self.at_once, self.in_turn = at_once, in_turn
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.turns = 0
        self._begins = itertools.cycle([True, False])

    def make_turns(self, num_replicas: int) -> workers.Turns:
        self.turns += 1
        return workers.Turns(num_replicas)

    def perf_counter(self) -> float:
        if not next(self._begins):
            self.now += self.in_turn if self.turns else self.at_once
        return self.now


def test_both_ways_are_tried_and_the_faster_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_once, in_turn, kept in ((2.0, 1.0, True), (1.0, 2.0, False), (300.0, 1.0, False)):
        model = dp.DistributedDataParallel(nn.Linear(4, 4), ["cpu"] * 2, process_group=False)
        clock = Clock(at_once / 1000, in_turn / 1000)
        monkeypatch.setattr(apply, "time", clock)
        monkeypatch.setattr(apply, "Turns", clock.make_turns)
        ways = []
        for _ in range(TRIED + 3):
            clock.restart()
            model(torch.randn(4, 4))
            ways.append(bool(clock.turns))
        assert ways[-3:] == [kept] * 3


@pytest.fixture
def always_in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(apply.Pace, "is_in_turn", lambda self: True)
    yield


@pytest.mark.usefixtures("always_in_turn")
def test_replicas_that_meet_have_the_same_results_in_turn() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    bare = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    bare.load_state_dict(module.state_dict())
    model = dp.DistributedDataParallel(module, ["cpu"] * 3, process_group=False, buffers="sync")
    for _ in range(3):
        x = torch.randn(9, 4)
        output, expected = model(x), bare(x)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        expected.sum().backward()
    for ours, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.usefixtures("always_in_turn")
def test_a_replica_that_waits_at_a_meeting_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 60.0)

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meeting = current_rendezvous()
            assert meeting is not None
            # The second replica comes before the first one gives up.
            total: Tensor = meeting.exchange(
                "x", x, lambda given: [given[0] + given[1]] * 2, timeout=5.0
            )
            return total

    output = dp.DataParallel(Meets(), ["cpu"] * 2)(torch.ones(4, 3))
    assert output.tolist() == [[2.0] * 3] * 4


@pytest.mark.usefixtures("always_in_turn")
def test_replicas_that_wait_for_each_other_in_their_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0.1)
    barrier = threading.Barrier(2)

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait(20.0)
            return x + 1

    x = torch.randn(4, 3)
    torch.testing.assert_close(dp.DataParallel(Waits(), ["cpu"] * 2)(x), x + 1)


@pytest.mark.usefixtures("always_in_turn")
def test_a_replica_that_fails_in_its_turn_lets_the_others_run() -> None:
    ran: list[int] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            replica = dp.current_replica()
            assert replica is not None
            ran.append(replica.index)
            if replica.index == 0:
                raise ValueError("no")
            return x

    model = dp.DataParallel(Fails(), ["cpu"] * 2)
    with pytest.raises(ValueError, match=r"(?s)no.*in replica 0 on device cpu"):
        model(torch.randn(4, 3))
    assert ran == [0, 1]
