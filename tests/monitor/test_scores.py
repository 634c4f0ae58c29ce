"""Straggler scores of steps whose times are made up."""

from __future__ import annotations

import pytest

from dataparallel.monitor.scores import (
    find_straggler,
    imbalance,
    individual_score,
    score_replicas,
)
from dataparallel.monitor.totals import total_steps

from .step_cases import BUSY, Seconds, make_info, make_step, make_steps

SLOW: Seconds = {"forward": 0.8, "backward": 1.2}


def test_twice_as_slow_is_a_half() -> None:
    steps = make_steps(3, [BUSY, SLOW, BUSY])
    scores = score_replicas(total_steps(steps, make_info(3)))
    assert [one.relative for one in scores] == pytest.approx([1.0, 0.5, 1.0])
    assert [one.per_sample for one in scores] == pytest.approx([1.0, 0.5, 1.0])
    assert [one.compute for one in scores] == pytest.approx([1.0, 2.0, 1.0])
    assert [one.idle_share for one in scores] == pytest.approx([0.5, 0.0, 0.5])


def test_a_larger_chunk_is_no_slower_device() -> None:
    steps = make_steps(3, [BUSY, SLOW], samples=[8, 16])
    scores = score_replicas(total_steps(steps, make_info(2)))
    assert [one.relative for one in scores] == pytest.approx([1.0, 0.5])
    assert [one.per_sample for one in scores] == pytest.approx([1.0, 1.0])
    assert [one.samples for one in scores] == [8, 16]


def test_seconds_and_shares_are_per_step_and_add_up() -> None:
    steps = [make_step([{"input": 1.0, "forward": 1.0}]), make_step([{"forward": 2.0}])]
    (score,) = score_replicas(total_steps(steps, make_info(1)))
    assert score.seconds == {"input": 0.5, "forward": 1.5}
    assert score.shares == {"input": 0.25, "forward": 0.75}


@pytest.mark.parametrize("phase", ["optimizer", "loss", "scatter"])
def test_what_the_first_replica_does_for_all_makes_no_straggler(phase: str) -> None:
    first: Seconds = {**BUSY, phase: 1.0}  # type: ignore[dict-item]
    totals = total_steps(make_steps(3, [first, BUSY]), make_info(2))
    assert [one.relative for one in score_replicas(totals)] == pytest.approx([1.0, 1.0])
    assert imbalance(totals) == pytest.approx(1.0)
    assert find_straggler(totals) is None


def test_a_loss_in_every_replica_counts() -> None:
    steps = make_steps(3, [{**BUSY, "loss": 1.0}, {**SLOW, "loss": 2.0}])
    scores = score_replicas(total_steps(steps, make_info(2)))
    assert [one.relative for one in scores] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("buckets", [0, 4])
def test_a_backward_that_is_one_for_all_tells_nothing(buckets: int) -> None:
    common: list[Seconds] = [
        {"forward": 1.0, "backward": 3.0},
        {"forward": 2.0, "backward": 3.0 if buckets else 3.1},
    ]
    scores = score_replicas(total_steps(make_steps(2, common), make_info(2, buckets=buckets)))
    assert scores[1].relative == pytest.approx(0.5)


def test_a_replica_without_samples_has_no_score() -> None:
    steps = make_steps(3, [BUSY, BUSY, {}], samples=[8, 8, 0])
    totals = total_steps(steps, make_info(3))
    scores = score_replicas(totals, steps)
    assert (scores[2].relative, scores[2].per_sample, scores[2].individual) == (None,) * 3
    assert scores[0].relative == pytest.approx(1.0)
    assert imbalance(totals, steps) == pytest.approx(1.0)


# --- beside its own past -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0] * 10 + [2.0] * 10, 0.5),
        ([2.0] * 10 + [1.0] * 10, 1.0),
        ([1.0] * 19, None),
        ([None, 1.0] * 20, 1.0),
        # One step of ten is an accident, no slower device.
        ([1.0] * 19 + [9.0], 1.0),
        ([], None),
    ],
)
def test_a_replica_beside_its_own_past(values: list[float | None], expected: float | None) -> None:
    assert individual_score(values, window=10) == pytest.approx(expected)


def test_a_larger_chunk_is_no_worse_than_the_past() -> None:
    steps = [*make_steps(10, [BUSY], samples=[8]), *make_steps(10, [SLOW], samples=[16])]
    (score,) = score_replicas(total_steps(steps, make_info(1)), steps)
    assert score.individual == pytest.approx(1.0)
    steps = [*make_steps(10, [BUSY]), *make_steps(10, [SLOW])]
    (score,) = score_replicas(total_steps(steps, make_info(1)), steps)
    assert score.individual == pytest.approx(0.5)


# --- which one it is ---------------------------------------------------------------------------


def test_the_straggler_that_stays() -> None:
    steps = make_steps(8, [BUSY, SLOW])
    totals = total_steps(steps, make_info(2))
    for known in (steps, []):
        found = find_straggler(totals, known)
        assert found is not None
        assert (found.index, found.device, found.moves) == (1, "virtual:1", False)
        assert found.share == (1.0 if known else None)
        assert found.excess == pytest.approx(1 / 3)
        assert found.waste == pytest.approx(0.5)
        assert imbalance(totals, known) == pytest.approx(4 / 3)


def test_the_straggler_that_moves() -> None:
    steps = make_steps(4, [BUSY, SLOW]) + make_steps(4, [SLOW, BUSY])
    totals = total_steps(steps, make_info(2))
    found = find_straggler(totals, steps)
    assert found is not None
    assert found.moves
    assert found.share == 0.5
    assert imbalance(totals, steps) == pytest.approx(4 / 3)
    # The totals alone cannot show it.
    assert find_straggler(totals) is None
    assert imbalance(totals) == pytest.approx(1.0)


def test_two_devices_that_are_slow_take_turns_but_stay() -> None:
    slower: Seconds = {"forward": 0.8, "backward": 1.3}
    steps = make_steps(4, [BUSY, BUSY, SLOW, slower]) + make_steps(4, [BUSY, BUSY, slower, SLOW])
    found = find_straggler(total_steps(steps, make_info(4)), steps)
    assert found is not None
    assert not found.moves


def test_small_differences_make_no_straggler() -> None:
    steps = make_steps(4, [BUSY, {"forward": 0.45, "backward": 0.65}])
    assert find_straggler(total_steps(steps, make_info(2)), steps) is None


def test_one_replica_or_no_step_has_no_straggler() -> None:
    for totals in (total_steps([], make_info(2)), total_steps(make_steps(2, [BUSY]), make_info(1))):
        assert find_straggler(totals) is None
        assert imbalance(totals) is None
    assert score_replicas(total_steps([], make_info(2)))[1].relative is None
