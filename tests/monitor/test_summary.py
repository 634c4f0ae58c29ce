"""The summary of steps, the slow replica, and advice; their times are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from dataparallel.monitor.findings import StepWindow, duration
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.summary import Summary, summarize
from tests.monitor.cases import BUSY, SLOW, FakeRun, Seconds, make_info, make_step, make_steps
from tests.monitor.golden import Golden

ONE_DEVICE = dataclasses.replace(make_info(faster_option="fused"), devices=("cpu", "cpu"))
DATA_PARALLEL = make_info(buckets=0)
SLOWER: Seconds = {"forward": 0.8, "backward": 1.3}
SMALL: Seconds = {"scatter": 0.6, "gather": 0.3, "reduce local": 0.6, "idle": 1.5}
GIB = 2**30
ACROSS: Seconds = {"reduce across processes": 1.0}
ALONE: Seconds = {**BUSY, "loss": 1.0, "gather": 1.0, "idle": 2.0}


def sum_up(
    steps: Sequence[StepRecord], info: RunInfo | None = None, slowed: dict[str, str] | None = None
) -> Summary:
    info = info or make_info(len(steps[0].replicas) if steps else 2)
    return summarize([StepWindow.of(step) for step in steps], info, slowed)


def both(*phases: Seconds) -> list[Seconds]:
    """Two busy replicas with further phases, which are the same for both if there is one."""
    return [{**BUSY, **phases[0]}, {**BUSY, **phases[-1]}]


# --- what to change --------------------------------------------------------------------------

OPTIMIZER = both({"optimizer": 1.0}, {})
SCATTER = both({"scatter": 1.0})

#: Replicas; kinds and gains of all findings, and words of the first.
CHANGES: dict[str, tuple[list[Seconds], dict[str, float], str]] = {
    # Three quarters of the step pass before the batch is there.
    "input": (both({"input": 3.0}), {"input": 0.75}, "num_workers"),
    # The first does 0.8 s of loss for both; gathering costs 0.2 s: 0.4 + 0.1 of 2.
    "loss": (both({"gather": 0.2, "loss": 0.8}, {"gather": 0.2}), {"loss": 0.25}, "model.loss"),
    "gather": (both({"gather": 1.0}), {"gather": 0.5, "overhead": 0.25}, 'output_device="each"'),
    # The replicas compute the loss.
    "outputs": (both({"gather": 1.0, "loss": 0.5}), {"gather": 0.4, "overhead": 0.2}, "each"),
    "scatter": (SCATTER, {"scatter": 0.25, "overhead": 0.25}, "pin_memory"),
    "parameters": (SCATTER, {"scatter": 0.25, "overhead": 0.25}, "DistributedDataParallel keeps"),
    "optimizer": (OPTIMIZER, {"optimizer": 0.25}, "ShardedOptimizer"),
    "optimizer on one device": (OPTIMIZER, {"optimizer": 0.5}, "Give the optimizer fused=True"),
    # Its step is as fast as can be.
    "fused optimizer": ([{"forward": 3.0, "optimizer": 1.0}], {"nothing": 0.0}, "Nothing stands"),
    "processes": (both(ACROSS), {"communication hook": 0.25}, "about 4 MiB) with"),
    "small buckets": (
        both({"reduce local": 1.0}),
        {"small buckets": 0.5 * 15 / 16, "overhead": 0.25},
        "in 16 buckets of about 16 KiB",
    ),
    "many buckets": (both({"reduce local": 1.0}), {"overhead": 0.25}, "is small for 2 replicas"),
    # Each piece is small, together they are most of the step.
    "overhead": (
        both(SMALL),
        {"overhead": 0.375, "gather": 0.075, "scatter": 0.075},
        "batch than 16",
    ),
    # 16 samples at 8/s and 4/s take 4/3 s in the best split, in place of 2 s.
    "slow": ([BUSY, SLOW], {"slow replica": 1 / 3}, "takes 2.0 times as long per sample"),
    "uneven": ([BUSY, SLOW], {"uneven split": 0.25}, "gets 16 of 24 samples"),
    # It has its smaller chunk already.
    "balanced": ([BUSY, BUSY], {"nothing": 0.0}, "Nothing stands out"),
    "even": ([BUSY, {"forward": 0.45, "backward": 0.65}], {"nothing": 0.0}, "95 % of each"),
    # Waiting for it is no overhead.
    "late": ([BUSY, {"forward": 4.0}], {"slow replica": 0.75}, "balance(model)"),
    # The others idle for 1.5 s: 0.5 s for the loss, 1 s for the optimizer.
    "waiting for the first": (
        [{**BUSY, "loss": 0.5, "optimizer": 1.0}, BUSY, BUSY, BUSY],
        {"optimizer": 0.75 / 2.5, "loss": 0.375 / 2.5},
        "ShardedOptimizer",
    ),
    # The first waits for the slow one, which then waits for the loss and the optimizer.
    "waiting for each other": (
        [
            {**BUSY, "loss": 0.5, "optimizer": 2.0, "idle": 3.0},
            {"forward": 1.6, "backward": 2.4, "idle": 2.5},
        ],
        {"slow replica": 2.4 / 6.5, "optimizer": 1.0 / 6.5, "loss": 0.25 / 6.5},
        "Replica 1 on virtual:1 ",
    ),
    "one replica": ([ALONE], {"nothing": 0.0}, "Nothing stands out"),
}
CHUNKS = {"uneven": [8, 16], "balanced": [16, 8]}
RUNS = {
    "parameters": DATA_PARALLEL,
    "optimizer on one device": ONE_DEVICE,
    "fused optimizer": make_info(1, is_hooked=True),
    "processes": make_info(num_parameters=2**20),
    "small buckets": make_info(buckets=16, num_parameters=2**16),
    "many buckets": make_info(buckets=16, num_parameters=2**20),
}


@pytest.mark.parametrize("case", CHANGES)
def test_all_that_costs_much_is_named_once_with_its_price(case: str) -> None:
    replicas, expected, words = CHANGES[case]
    found = sum_up(make_steps(3, replicas, CHUNKS.get(case, [])), RUNS.get(case)).findings
    assert [one.kind for one in found] == list(expected)
    assert [one.gain for one in found] == pytest.approx(list(expected.values()))
    assert words in found[0].text
    assert [one.severity == "warning" for one in found] == [one.gain >= 0.1 for one in found]
    if found[0].gain:
        assert f"Estimated: steps up to {100 * found[0].gain:.0f} % shorter, " in str(found[0])


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        ("virtual:1", "slowed device", "slowed down: heat"),
        # Another device's reasons are no cause.
        ("virtual:0", "slow replica", "balance(model)"),
    ],
)
def test_a_device_that_is_slowed_down_is_a_cause(device: str, kind: str, words: str) -> None:
    (found,) = sum_up(make_steps(3, [BUSY, SLOW]), slowed={device: "heat"}).findings
    assert found.kind == kind and words in found.text


@pytest.mark.parametrize(
    ("changes", "gain", "words"),
    [
        ({"memory_peak": (int(0.95 * GIB), 0)}, 0.0, "95 % of the memory of virtual:0"),
        ({"memory_retries": (0, 5)}, 0.017 * 5 / 10, "give back its cache 5 times"),
        ({"memory_peak": (GIB // 2, GIB // 2)}, None, ""),
        ({"memory_peak": (GIB, GIB), "memory_total": (0, 0)}, None, ""),
    ],
)
def test_memory_that_is_hardly_enough(
    changes: dict[str, Any], gain: float | None, words: str
) -> None:
    run = FakeRun(make_info())
    run.steps(10, [BUSY, BUSY])
    few = {"memory_peak": (0, 0), "memory_total": (GIB, GIB), "memory_retries": (0, 0)}
    state = run.state(**{**few, **changes})
    steps = [make_step([{"forward": 1.0}] * 2) for _ in range(10)]
    found = summarize([StepWindow.of(step) for step in steps], run.info, None, state).findings
    pressed = [one for one in found if one.kind == "memory pressure"]
    assert [one.gain for one in pressed] == pytest.approx([] if gain is None else [gain])
    assert all(words in one.text and one.severity == "warning" for one in pressed)


# --- how fast each replica is ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "samples", "info", "relative", "per_sample"),
    [
        ([BUSY, SLOW, BUSY], [], None, [1.0, 0.5, 1.0], None),
        # A larger chunk is no slower device.
        ([BUSY, SLOW], [8, 16], None, [1.0, 0.5], [1.0, 1.0]),
        ([BUSY, BUSY, {}], [8, 8, 0], None, [1.0, 1.0, None], None),
        # The first replica's work for all is not its own speed; a loss in every replica is.
        ([{**BUSY, "optimizer": 1.0}, BUSY], [], None, [1.0, 1.0], None),
        ([{**BUSY, "loss": 1.0}, BUSY], [], None, [1.0, 1.0], None),
        ([{**BUSY, "scatter": 1.0}, BUSY], [], None, [1.0, 1.0], None),
        ([{**BUSY, "loss": 1.0}, {**SLOW, "loss": 2.0}], [], None, [1.0, 0.5], None),
        # A backward that is one for all of them tells nothing.
        ([{**BUSY, "backward": 3.0}, {**SLOW, "backward": 3.0}], [], None, [1, 0.5], None),
        ([{**BUSY, "backward": 3.0}, {**SLOW, "backward": 3.1}], [], DATA_PARALLEL, [1, 0.5], None),
    ],
)
def test_scores(
    replicas: list[Seconds],
    samples: list[int],
    info: RunInfo | None,
    relative: list[float | None],
    per_sample: list[float | None] | None,
) -> None:
    summary = sum_up(make_steps(3, replicas, samples), info)
    assert [one.relative for one in summary.replicas] == pytest.approx(relative)
    assert [one.per_sample for one in summary.replicas] == pytest.approx(per_sample or relative)
    if 0.5 not in relative:
        assert summary.imbalance == pytest.approx(1.0) and summary.straggler is None


def test_seconds_and_shares_are_per_step_and_add_up() -> None:
    steps = [make_step([{"input": 1.0, "forward": 1.0}]), make_step([{"forward": 2.0}])]
    (score,) = sum_up(steps).replicas
    assert score.seconds == {"input": 0.5, "forward": 1.5}
    assert score.shares == {"input": 0.25, "forward": 0.75}
    assert (score.samples, score.compute) == (8, 1.5)


ONE_AND_OTHER = [*make_steps(4, [BUSY, SLOW]), *make_steps(5, [SLOW, BUSY])]
NOW_AND_THEN = [
    *make_steps(4, [BUSY, SLOW]),
    *make_steps(2, [{"forward": 0.5, "backward": 0.6}, BUSY]),
]
TWO_OF_FOUR = [
    *make_steps(4, [BUSY, BUSY, SLOW, SLOWER]),
    *make_steps(4, [BUSY, BUSY, SLOWER, SLOW]),
]


@pytest.mark.parametrize(
    ("steps", "info", "index", "moves", "excess", "waste"),
    [
        (make_steps(8, [BUSY, SLOW]), None, 1, False, 1 / 3, 0.5),
        (ONE_AND_OTHER, None, 0, True, 1 / 3, 0.5),
        # On one device replicas take turns on the processors: two of three times say nothing.
        (NOW_AND_THEN, None, 1, False, 0.26, 0.35),
        (NOW_AND_THEN, ONE_DEVICE, 1, True, 0.26, 0.35),
        (TWO_OF_FOUR, None, 2, False, 0.377, 0.575),
    ],
)
def test_stragglers(
    steps: list[StepRecord],
    info: RunInfo | None,
    index: int,
    moves: bool,
    excess: float,
    waste: float,
) -> None:
    summary = sum_up(steps, info)
    found = summary.straggler
    assert found is not None and (found.index, found.moves) == (index, moves)
    assert [found.excess, found.waste] == pytest.approx([excess, waste], abs=0.01)
    assert summary.imbalance == pytest.approx(1 + excess, abs=0.01)
    # Waiting in turns is no overhead.
    (change,) = summary.findings
    assert (change.kind == "moving straggler") == moves
    assert ("balance" in change.text) == (not moves)


# --- which steps count -----------------------------------------------------------------------


def test_throughput_and_percentiles() -> None:
    steps = [make_step([{"forward": one}] * 2) for one in (1.0, 2.0, 3.0, 4.0, 10.0)]
    summary = sum_up(steps)
    assert summary.step_seconds == 4.0
    assert summary.steps_per_second == pytest.approx(0.25)
    assert summary.samples_per_second == pytest.approx(4.0)
    assert summary.times is not None
    assert dataclasses.astuple(summary.times) == pytest.approx((3.0, 7.6, 10.0))
    assert sum_up(steps[:1]).times is None


WARM_UP = make_step([{"forward": 99.0}] * 2, number=1)
INFERENCE = make_step([{"forward": 50.0}] * 2, number=9, kind="inference")
FIVE = [WARM_UP, *make_steps(5, [BUSY, BUSY]), INFERENCE]
#: It stays where there are few, and inference where there is nothing else.
TWO = [WARM_UP, *make_steps(2, [BUSY, BUSY])]


@pytest.mark.parametrize(
    ("steps", "number", "kind", "left_out"),
    [(FIVE, 5, "train", 2), (TWO, 3, "train", 0), ([INFERENCE] * 4, 4, "inference", 0)],
)
def test_the_first_step_and_inference_are_left_out(
    steps: list[StepRecord], number: int, kind: str, left_out: int
) -> None:
    summary = sum_up(steps)
    assert (summary.num_steps, summary.kind, summary.num_left_out) == (number, kind, left_out)


@pytest.mark.parametrize(("often", "kind"), [(1, "nothing"), (3, "slow replica")])
def test_a_step_that_takes_long_once_does_not_tell_what_to_change(often: int, kind: str) -> None:
    summary = sum_up(make_steps(20, [BUSY, BUSY]) + make_steps(often, [BUSY, {"forward": 60.0}]))
    assert (summary.num_steps, summary.advice.kind) == (20 + often, kind)
    assert summary.num_not_advised == (often if kind == "nothing" else 0)
    # It counts for the times.
    assert summary.times is not None and summary.times.longest == pytest.approx(60.0)
    assert (summary.straggler is None) == (kind == "nothing")
    assert ("left out of what follows: 1 of 21 steps" in str(summary)) == (kind == "nothing")


# --- text and metrics ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(999.6, "1000 s"), (0.9996, "1 s"), (0.9994, "999 ms"), (0.0009996, "1 ms"), (2e-6, "2 µs")],
)
def test_durations_are_written_without_an_exponent(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_no_step_says_so() -> None:
    summary = sum_up([])
    assert (summary.num_steps, summary.times, summary.advice.kind) == (0, None, "unknown")
    assert summary.as_metrics() == {"num_steps": 0.0}


def test_texts(golden: Golden) -> None:
    two = sum_up(make_steps(20, [BUSY, SLOW]))
    shown = {
        "a column per replica": str(two),
        "in a list": repr([two]),
        "many replicas are in several tables": str(sum_up(make_steps(2, [BUSY] * 16))),
        "one replica has no imbalance": str(sum_up(make_steps(2, [BUSY]))),
        "the first step and inference are left out": str(sum_up(FIVE)),
        "inference alone": str(sum_up([INFERENCE] * 4)),
        "no step": str(sum_up([])),
    }
    golden("summary", shown)


def test_waiting_that_nothing_tells_apart_is_not_said_to_be_none() -> None:
    hooked = make_info(1, is_hooked=True, world_size=2)
    told = sum_up(make_steps(3, [ALONE]), hooked)
    assert told.exposed_communication is None and "exposed" not in str(told)
    assert "exposed_communication_share" not in told.as_metrics()
    assert "look at all ranks" in told.advice.text
    alone = sum_up(make_steps(3, [ALONE]), dataclasses.replace(hooked, world_size=1))
    assert alone.exposed_communication is not None and "ranks" not in alone.advice.text
    assert "exposed" in str(alone)


def test_metrics_are_flat_numbers() -> None:
    phases: Seconds = {**SLOW, "scatter": 0.25, "gather": 0.25, **ACROSS}
    metrics: dict[str, Any] = sum_up(make_steps(4, [BUSY, phases])).as_metrics()
    assert metrics["step_seconds"] == metrics["step_seconds_p90"] == pytest.approx(3.5)
    assert metrics["samples_per_second"] == pytest.approx(16 / 3.5)
    assert metrics["exposed_communication_share"] == pytest.approx(0.75 / 3.5)
    assert metrics["straggler_score"] == metrics["replica1/score"] == pytest.approx(0.5)
    assert metrics["replica1/reduce_across_processes_share"] == pytest.approx(1 / 3.5)
    assert metrics["advice_gain"] > 0
    assert all(type(value) is float for value in metrics.values())
    # Unknown values are left out.
    alone = sum_up(make_steps(2, [BUSY]))
    assert alone.imbalance is None and "imbalance" not in alone.as_metrics()
