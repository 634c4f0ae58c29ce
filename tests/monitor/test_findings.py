"""What is found in steps whose times are made up, and what is advised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dataparallel.monitor.findings import (
    Finding,
    Part,
    Straggler,
    add_up,
    find_changes,
    find_straggler,
    imbalance,
)
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo

from .step_cases import BUSY, SLOW, Seconds, make_info, make_step, make_steps

DDP = make_info(2)
ONE_DEVICE = RunInfo("Net", "DistributedDataParallel", ("cpu", "cpu"), (None, None), num_buckets=4)
MIB = 2**20


def changes(
    replicas: Sequence[Seconds], info: RunInfo = DDP, samples: Sequence[int] | None = None
) -> list[Finding]:
    parts = [Part.of(make_step(replicas, samples))] * 5
    totals = add_up(parts, info)
    return find_changes(totals, info, find_straggler(totals, parts))


# --- what to change --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "info", "kind", "gain", "words"),
    [
        # Three quarters of the step pass before the batch is there.
        ({"input": 3.0}, {"input": 3.0}, DDP, "input", 0.75, "num_workers"),
        # The first does 0.8 s of loss for both; gathering costs 0.2 s: 0.4 + 0.1 of 2.
        ({"gather": 0.2, "loss": 0.8}, {"gather": 0.2}, DDP, "loss", 0.25, "model.loss"),
        ({"gather": 1.0}, {"gather": 1.0}, DDP, "gather", 0.5, 'output_device="each"'),
        ({"gather": 1.0, "loss": 0.5}, {"gather": 1.0, "loss": 0.5}, DDP, "gather", 0.4, "each"),
        ({"scatter": 1.0}, {"scatter": 1.0}, DDP, "scatter", 0.25, "pin_memory"),
        (
            *({"scatter": 1.0}, {"scatter": 1.0}, make_info(2, buckets=0), "scatter", 0.25),
            "DistributedDataParallel",
        ),
        ({"optimizer": 1.0}, {}, DDP, "optimizer", 0.25, "ShardedOptimizer"),
        ({"optimizer": 1.0}, {}, ONE_DEVICE, "optimizer", 0.25, "fused=True"),
        (
            *({"reduce across processes": 1.0},) * 2,
            *(make_info(2, num_parameters=MIB), "communication hook", 0.25, "about 4 MiB) with"),
        ),
        # Each piece is small, together they are most of the step.
        (
            *({"scatter": 0.6, "gather": 0.3, "reduce local": 0.6, "idle": 1.5},) * 2,
            *(DDP, "overhead", 0.375, "larger batch than 16"),
        ),
    ],
)
def test_the_cause_that_costs_most_is_named_with_its_price(
    first: Seconds, second: Seconds, info: RunInfo, kind: str, gain: float, words: str
) -> None:
    found = changes([{**BUSY, **first}, {**BUSY, **second}], info)[0]
    assert (found.kind, found.severity) == (kind, "warning")
    assert found.gain == pytest.approx(gain)
    assert words in found.text


@pytest.mark.parametrize(
    ("replicas", "samples", "slowed", "kind", "gain", "words"),
    [
        # 16 samples at 8/s and 4/s take 4/3 s in the best split, in place of 2 s.
        ([BUSY, SLOW], [8, 8], {}, "slow replica", 1 / 3, "takes 2.0 times as long per sample"),
        ([BUSY, SLOW], [8, 16], {}, "uneven split", 0.25, "gets 16 of 24 samples"),
        ([BUSY, SLOW], [8, 8], {"virtual:1": "heat"}, "slowed device", 1 / 3, "slowed down: heat"),
        # Another device's reasons are no cause.
        ([BUSY, SLOW], [8, 8], {"virtual:0": "heat"}, "slow replica", 1 / 3, "balance(model)"),
        # It has its smaller chunk already.
        ([BUSY, BUSY], [16, 8], {}, "nothing", 0.0, "Nothing stands out"),
        ([BUSY, {"forward": 0.4, "backward": 0.61}], [8, 8], {}, "nothing", 0.0, "100 % of each"),
        # Waiting for it is no overhead.
        ([BUSY, {"forward": 4.0}], [8, 8], {}, "slow replica", 0.75, "balance(model)"),
    ],
)
def test_a_replica_for_which_the_others_wait(
    replicas: list[Seconds],
    samples: list[int],
    slowed: dict[str, str],
    kind: str,
    gain: float,
    words: str,
) -> None:
    totals = add_up([Part.of(one) for one in make_steps(3, replicas, samples=samples)], DDP)
    (found,) = find_changes(totals, DDP, find_straggler(totals), slowed)
    assert found.kind == kind and words in found.text
    assert found.gain == pytest.approx(gain)
    if gain:
        assert found.text.startswith("Replica 1 on virtual:1 ")
        assert f"Estimated: steps up to {100 * gain:.0f} % shorter, " in str(found)


@pytest.mark.parametrize(
    ("replicas", "kinds", "gains"),
    [
        # The others idle for 1.5 s: 0.5 s for the loss, 1 s for the optimizer.
        (
            [{**BUSY, "loss": 0.5, "optimizer": 1.0}, BUSY, BUSY, BUSY],
            ["optimizer", "loss"],
            [0.75 / 2.5, 0.375 / 2.5],
        ),
        # The first waits for the slow one, which then waits for the loss and the optimizer.
        (
            [
                {**BUSY, "loss": 0.5, "optimizer": 2.0, "idle": 3.0},
                {"forward": 1.6, "backward": 2.4, "idle": 2.5},
            ],
            ["slow replica", "optimizer", "loss"],
            [2.4 / 6.5, 1.0 / 6.5, 0.25 / 6.5],
        ),
    ],
)
def test_waiting_for_each_other_is_priced_once(
    replicas: list[Seconds], kinds: list[str], gains: list[float]
) -> None:
    found = changes(replicas, make_info(len(replicas)))
    assert [one.kind for one in found] == kinds
    assert [one.gain for one in found] == pytest.approx(gains)


def test_without_steps_or_other_replicas_nothing_is_advised() -> None:
    (found,) = find_changes(add_up([], DDP), DDP, None)
    assert (found.kind, found.gain) == ("unknown", 0.0)
    alone: Seconds = {**BUSY, "loss": 1.0, "gather": 1.0, "idle": 2.0}
    assert changes([alone], make_info(1))[0].kind == "nothing"


# --- how fast each replica is ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "more", "relative", "per_sample"),
    [
        ([BUSY, SLOW, BUSY], {}, [1.0, 0.5, 1.0], [1.0, 0.5, 1.0]),
        # A larger chunk is no slower device.
        ([BUSY, SLOW], {"samples": [8, 16]}, [1.0, 0.5], [1.0, 1.0]),
        ([BUSY, BUSY, {}], {"samples": [8, 8, 0]}, [1.0, 1.0, None], [1.0, 1.0, None]),
        # What the first one does for all is not its own speed; a loss in every replica is.
        ([{**BUSY, "optimizer": 1.0}, BUSY], {}, [1.0, 1.0], [1.0, 1.0]),
        ([{**BUSY, "loss": 1.0}, BUSY], {}, [1.0, 1.0], [1.0, 1.0]),
        ([{**BUSY, "scatter": 1.0}, BUSY], {}, [1.0, 1.0], [1.0, 1.0]),
        ([{**BUSY, "loss": 1.0}, {**SLOW, "loss": 2.0}], {}, [1.0, 0.5], [1.0, 0.5]),
        # A backward that is one for all of them tells nothing.
        (
            [{"forward": 1.0, "backward": 3.0}, {"forward": 2.0, "backward": 3.0}],
            {},
            [1, 0.5],
            None,
        ),
        (
            [{"forward": 1.0, "backward": 3.0}, {"forward": 2.0, "backward": 3.1}],
            {"buckets": 0},
            [1.0, 0.5],
            None,
        ),
    ],
)
def test_scores(
    replicas: list[Seconds],
    more: dict[str, Any],
    relative: list[float | None],
    per_sample: list[float | None] | None,
) -> None:
    info = make_info(len(replicas), buckets=more.pop("buckets", 4))
    totals = add_up([Part.of(step) for step in make_steps(3, replicas, **more)], info)
    scores = totals.replicas
    assert [one.relative for one in scores] == pytest.approx(relative)
    assert [one.per_sample for one in scores] == pytest.approx(per_sample or relative)
    if relative == [1.0, 1.0]:
        assert imbalance(totals) == pytest.approx(1.0) and find_straggler(totals) is None


def test_seconds_and_shares_are_per_step_and_add_up() -> None:
    steps = [make_step([{"input": 1.0, "forward": 1.0}]), make_step([{"forward": 2.0}])]
    (score,) = add_up([Part.of(step) for step in steps], make_info(1)).replicas
    assert score.seconds == {"input": 0.5, "forward": 1.5}
    assert score.shares == {"input": 0.25, "forward": 0.75}
    assert (score.samples, score.compute) == (8, 1.5)


STEADY = make_steps(8, [BUSY, SLOW])
IN_TURNS = [*make_steps(4, [BUSY, SLOW]), *make_steps(5, [SLOW, BUSY])]
NOW_AND_THEN = [
    *make_steps(4, [BUSY, SLOW]),
    *make_steps(2, [{"forward": 0.5, "backward": 0.6}, BUSY]),
]
SLOWER: Seconds = {"forward": 0.8, "backward": 1.3}
TWO_OF_FOUR = [
    *make_steps(4, [BUSY, BUSY, SLOW, SLOWER]),
    *make_steps(4, [BUSY, BUSY, SLOWER, SLOW]),
]


@pytest.mark.parametrize(
    ("steps", "info", "known", "expected"),
    [
        (STEADY, DDP, True, Straggler(1, False, 1 / 3, 0.5)),
        (STEADY, DDP, False, Straggler(1, False, 1 / 3, 0.5)),
        (IN_TURNS, DDP, True, Straggler(0, True, 1 / 3, 0.5)),
        # The totals alone cannot show it.
        (IN_TURNS, DDP, False, None),
        # On one device replicas take turns on the processors: two of three times say nothing.
        (NOW_AND_THEN, DDP, True, Straggler(1, False, 0.26, 0.35)),
        (NOW_AND_THEN, ONE_DEVICE, True, Straggler(1, True, 0.26, 0.35)),
        (TWO_OF_FOUR, make_info(4), True, Straggler(2, False, 0.377, 0.575)),
        # Small differences, one replica, no step.
        (make_steps(4, [BUSY, {"forward": 0.45, "backward": 0.65}]), DDP, True, None),
        (make_steps(2, [BUSY]), make_info(1), True, None),
        ([], DDP, True, None),
    ],
)
def test_stragglers(
    steps: list[StepRecord], info: RunInfo, known: bool, expected: Straggler | None
) -> None:
    parts = [Part.of(step) for step in steps]
    totals = add_up(parts, info)
    found = find_straggler(totals, parts if known else [])
    if found is None or expected is None:
        assert found == expected
        return
    assert (found.index, found.moves) == (expected.index, expected.moves)
    assert found.excess == pytest.approx(expected.excess, abs=0.01)
    assert found.waste == pytest.approx(expected.waste, abs=0.01)
    change = find_changes(totals, info, found)[0]
    assert (change.kind == "moving straggler") == found.moves
    assert ("balance" in change.text) == (not found.moves)


def test_waiting_in_turns_is_no_overhead() -> None:
    fast: Seconds = {"forward": 1.0}
    late: Seconds = {"forward": 4.0}
    parts = [Part.of(one) for one in make_steps(4, [fast, late]) + make_steps(4, [late, fast])]
    totals = add_up(parts, DDP)
    (found,) = find_changes(totals, DDP, find_straggler(totals, parts))
    assert found.kind == "moving straggler" and found.gain == pytest.approx(1.5 / 4)


def test_the_imbalance_of_steps_and_of_their_sum() -> None:
    parts = [Part.of(step) for step in IN_TURNS]
    totals = add_up(parts, DDP)
    assert imbalance(totals, parts) == pytest.approx(4 / 3)
    assert imbalance(totals) == pytest.approx(28 / 27)
    assert imbalance(add_up([], DDP)) is None
