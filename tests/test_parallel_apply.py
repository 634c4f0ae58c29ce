"""parallel_apply against calling the modules one by one; and in turn, where that is faster."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.threads import apply, workers
from dataparallel.threads.apply import Replica, apply_replicas, current_replica, parallel_apply

CPU = torch.device("cpu")


def here(*_: Any, **__: Any) -> Replica | None:
    return current_replica()


def test_what_is_an_argument(slots: list[str]) -> None:
    for container in (tuple, list):
        several = [container((7, 2)), container((9, 4))]
        assert parallel_apply([divmod, divmod], several) == [(3, 1), (2, 1)]
    assert parallel_apply([len, len], [{"a": 1}, "text"]) == [1, 4]
    assert parallel_apply([dict, dict], [(), ()], [{"a": 1}, None]) == [{"a": 1}, {}]
    assert parallel_apply([], []) == []
    # The device is that of the first tensor, or the CPU.
    nested = [{"deep": [1, torch.ones(1).to(slot)]} for slot in slots]
    expected = [Replica(i, torch.device(slot), 4) for i, slot in enumerate(slots)]
    assert parallel_apply([here] * 4, nested) == expected
    assert parallel_apply([here] * 4, [()] * 4, nested) == expected
    assert parallel_apply([here] * 2, [(), "text"]) == [Replica(i, CPU, 2) for i in range(2)]
    found = parallel_apply([here] * 4, [()] * 4, devices=[*slots[:3], None])
    assert found == [*expected[:3], Replica(3, CPU, 4)]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ([[[1, 2, 3]], [[1, 2], [{}]], [[1, 2], None, ["cpu"] * 4]][i], r"is (longer|shorter) than")
        for i in range(3)
    ]
    + [([["1", "2"], None, ["cpu", "nowhere"]], "'nowhere' is not a device")],
)
def test_what_is_refused(args: list[Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parallel_apply([int, int], *args)


def test_an_error_names_the_replica_and_its_device(slots: list[str]) -> None:
    modules = [nn.Linear(size, 3).to(slot) for size, slot in zip((3, 4), slots, strict=False)]
    inputs = [torch.ones(1, 3).to(slot) for slot in slots[:2]]
    where = re.escape(f"in replica 1 on device {slots[1]}")
    with pytest.raises(RuntimeError, match=f"(?s)shapes cannot be multiplied.*{where}"):
        parallel_apply(modules, inputs)
    modules[1] = nn.Linear(3, 3).to(slots[1])
    for module, x, y in zip(modules, inputs, parallel_apply(modules, inputs), strict=True):
        torch.testing.assert_close(y, module(x))
    with pytest.raises(ZeroDivisionError, match="in replica 0 on device cpu"):
        parallel_apply([lambda _: 1 / 0], [1])
    assert current_replica() is None


def test_current_replica_is_that_of_the_innermost_call() -> None:
    def outer(count: int) -> Any:
        return here(), apply_replicas([here] * count, [CPU] * count), here()

    for count in (1, 2):
        results = apply_replicas([lambda count=count: outer(count)] * 2, [CPU] * 2)  # type: ignore[misc]
        for i, (before, inner, after) in enumerate(results):
            assert before == after == Replica(i, CPU, 2)
            assert inner == [Replica(k, CPU, count) for k in range(count)]
    # A single module runs in the calling thread.
    (found,) = parallel_apply([lambda _: (threading.current_thread(), here())], [1])
    assert found == (threading.current_thread(), Replica(0, CPU, 1))
    assert current_replica() is None


# --- in turn ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("at_once", "in_turn", "kept"), [(2.0, 1.0, True), (1.0, 2.0, False), (300.0, 1.0, False)]
)
def test_both_ways_are_tried_and_the_faster_one_is_kept(
    monkeypatch: pytest.MonkeyPatch, at_once: float, in_turn: float, kept: bool
) -> None:
    model = dp.DistributedDataParallel(nn.Linear(4, 4), ["cpu"] * 2, process_group=False)
    clock = Clock(at_once / 1000, in_turn / 1000)
    monkeypatch.setattr(apply, "time", clock)
    monkeypatch.setattr(apply, "Turns", clock.make_turns)
    ways = []
    for _ in range(35):
        clock.restart()
        model(torch.randn(4, 4))
        ways.append(bool(clock.turns))
    # The first call may run in turn where an earlier test has compiled something.
    assert any(ways[1:]) == (at_once < 250) and ways[-3:] == [kept] * 3


def test_a_replica_that_fails_in_its_turn_lets_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply.Pace, "is_in_turn", lambda self: True)
    ran: list[int] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            assert replica is not None
            ran.append(replica.index)
            return x / 0 if replica.index else x.reshape(5)

    with pytest.raises(RuntimeError, match=r"(?s)invalid for input.*in replica 0 on device cpu"):
        dp.DataParallel(Fails(), ["cpu"] * 2)(torch.ones(4, 3))
    assert ran == [0, 1]
