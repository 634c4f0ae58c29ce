"""Changes of chunks for speed, with times that are given rather than measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from dataparallel.extras.balancing.speeds import Change, Cost, SplitDecisions, divide, measure
from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord

BATCH = 60


def record(
    samples: Sequence[int],
    seconds: Sequence[float],
    common: float | None = None,
    kind: Literal["train", "inference"] = "train",
    calls: int = 1,
) -> StepRecord:
    """A step in which replicas computed for so long; ``common`` is one backward for all."""
    replicas = []
    end = max(seconds)
    for i, (n, t) in enumerate(zip(samples, seconds, strict=True)):
        if common is None:
            segments: tuple[Segment, ...] = (
                Segment("forward", 0, t / 2),
                Segment("idle", t / 2, end),
                Segment("backward", end, end + t / 2),
                Segment("reduce local", end + t / 2, 2 * end),
            )
        else:
            segments = (
                Segment("forward", 0, t),
                Segment("idle", t, end),
                Segment("backward", end, end + common),
            )
        replicas.append(ReplicaStep(i, "cpu", n, segments))
    return StepRecord(1, kind, 0.0, 2 * end, sum(samples), tuple(replicas), calls)


def run(
    decisions: SplitDecisions,
    true: Callable[[int], Sequence[Cost]],
    steps: int,
    *,
    noise: float = 0.0,
    limits: Sequence[int | None] | None = None,
    common: float | None = None,
) -> list[tuple[int, Change]]:
    """Feed steps whose costs are ``true(step)``; returns what was decided, and when."""
    generator = random.Random(7)
    found = []
    for step in range(steps):
        costs = true(step)
        bounds = limits or [None] * len(costs)
        sizes = divide(BATCH, decisions.costs, bounds)
        seconds = [
            cost.seconds(n) * generator.lognormvariate(0, noise)
            for cost, n in zip(costs, sizes, strict=True)
        ]
        decision = decisions.observe(record(sizes, seconds, common), bounds)
        if decision is not None:
            found.append((step, decision))
    return found


def make(**options: Any) -> SplitDecisions:
    return SplitDecisions(**{"every": 10, "threshold": 0.03, "warmup": 5, "window": 30, **options})


def sizes(decisions: SplitDecisions) -> tuple[int, ...]:
    return divide(BATCH, decisions.costs, [None, None])


def constant(*costs: tuple[float, float]) -> Callable[[int], Sequence[Cost]]:
    return lambda step: [Cost(*cost) for cost in costs]


EVEN, TWICE = constant((0, 1.0), (0, 1.0)), constant((0, 1.0), (0, 2.0))


# --- what is measured ------------------------------------------------------------------------


@pytest.mark.parametrize("common", [None, 7.0])
def test_what_each_replica_computes_counts(common: float | None) -> None:
    step = measure(record((4, 8), (2.0, 3.0), common=common))
    assert step is not None
    assert (step.samples, step.seconds) == ((4, 8), (2.0, 3.0))
    assert step.common == pytest.approx(common or 0.0)
    assert measure(record((4, 0), (2.0, 1.0))) is None


def test_a_criterion_counts_where_the_replica_runs_it() -> None:
    inside = (Segment("forward", 0, 1), Segment("loss", 1, 1.5), Segment("gather", 1.5, 2))
    outside = (Segment("forward", 0, 1), Segment("gather", 1, 2), Segment("loss", 2, 9))
    replicas = (ReplicaStep(0, "cpu", 1, inside), ReplicaStep(1, "cpu", 1, outside))
    step = measure(StepRecord(1, "train", 0.0, 9.0, 2, replicas))
    assert step is not None
    assert step.seconds == (1.5, 1.0)


# --- what is decided -------------------------------------------------------------------------


def test_the_faster_replica_gets_more_and_then_nothing_changes() -> None:
    decisions = make()
    changes = run(decisions, TWICE, 200)
    assert [(step, d.reason, d.before, d.after) for step, d in changes] == [
        (14, "speed", (30, 30), (40, 20))
    ]
    assert changes[0][1].gain == pytest.approx(1 / 3)
    assert "a sample takes replica 1 2.00 times as long" in changes[0][1].why
    assert "33% less time" in changes[0][1].why


def outliers(step: int) -> Sequence[Cost]:
    return [Cost(0, 1.0), Cost(0, 50.0 if step % 7 == 0 else 1.0)]


@pytest.mark.parametrize(
    ("options", "costs", "about"),
    [
        ({}, constant(*[(0.1, 1.0)] * 4), {"noise": 0.3}),
        ({}, outliers, {}),
        ({"threshold": 0.2}, constant((0, 1.0), (0, 1.3)), {}),
        ({}, TWICE, {"common": 6000.0}),
    ],
    ids=["noise", "outliers", "small gain", "small part of a step"],
)
def test_what_moves_nothing(options: Any, costs: Any, about: Any) -> None:
    assert run(make(**options), costs, 300, **about) == []


@pytest.mark.parametrize(
    ("costs", "about", "after"),
    [
        # 30 + n == 60 - n.
        (constant((30.0, 1.0), (0.0, 1.0)), {}, (15, 45)),
        (constant((0, 1.0), (0, 1.3)), {}, (34, 26)),
        (TWICE, {"limits": [33, None]}, (33, 27)),
    ],
    ids=["time that does not depend on samples", "a gain of an eighth", "limits"],
)
def test_what_moves_chunks(costs: Any, about: Any, after: tuple[int, ...]) -> None:
    assert run(make(), costs, 100, **about)[-1][1].after == after


def test_noise_does_not_hide_a_straggler_nor_move_chunks_to_and_fro() -> None:
    changes = run(make(), TWICE, 600, noise=0.2)
    assert 1 <= len(changes) <= 3
    assert changes[-1][1].after[0] == pytest.approx(40, abs=4)


def test_a_throttled_device_gets_less_and_gets_it_back() -> None:
    decisions = make()
    assert run(decisions, EVEN, 100) == []
    run(decisions, constant((0, 1.0), (0, 3.0)), 100)
    assert sizes(decisions) == (45, 15)
    run(decisions, EVEN, 100)
    assert sizes(decisions) == (30, 30)


def test_a_change_that_made_steps_longer_is_taken_back() -> None:
    decisions = make()
    waits = []
    for step in range(300):
        before = sizes(decisions)
        # A replica with more than half gets slower than linearly, as memory traffic would make it.
        times = [n * (1.0 if n <= 30 else n / 10) for n in before]
        times[1] *= 1.3
        found = decisions.observe(record(before, times), [None, None])
        if found is not None:
            waits.append((step, found))
    reasons = [change.reason for _, change in waits]
    assert reasons[:2] == ["speed", "worse"]
    assert waits[1][1].after == waits[0][1].before
    distances = [b - a for (a, _), (b, _) in itertools.pairwise(waits)]
    assert len(reasons) < 12, "it tries again less and less often"
    assert max(distances) > 40


def test_a_common_backward_makes_the_gain_smaller() -> None:
    changes = run(make(), TWICE, 60, common=60.0)
    assert changes[0][1].gain == pytest.approx(20 / 120)
    assert changes[0][1].after == (40, 20)


def test_evaluation_between_training_steps_is_not_measured() -> None:
    decisions = make()
    for _ in range(40):
        assert decisions.observe(record((30, 30), (1.0, 1.0)), [None, None]) is None
        fast = record((30, 30), (0.1, 5.0), kind="inference")
        assert decisions.observe(fast, [None, None]) is None


def test_a_run_without_training_is_balanced_by_its_forwards() -> None:
    decisions = make()
    found = [
        decisions.observe(record((30, 30), (1.0, 2.0), kind="inference"), [None, None])
        for _ in range(15)
    ]
    assert found[-1] is not None and found[-1].after == (40, 20)


def test_accumulated_forwards_count_as_one() -> None:
    decisions = make()
    for _ in range(15):
        found = decisions.observe(record((120, 120), (124.0, 244.0), calls=4), [None, None])
    assert found is not None
    assert found.before == (30, 30)
    assert decisions.latest is not None
    assert decisions.latest.samples == 60
