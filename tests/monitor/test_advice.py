"""What is advised for steps whose times are made up."""

from __future__ import annotations

import pytest

from dataparallel.monitor.advice import Advice, advise, candidates
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.scores import find_straggler
from dataparallel.monitor.totals import total_steps

from .step_cases import BUSY, Seconds, make_info, make_step, make_steps

DDP = make_info(2)
ONE_DEVICE = RunInfo("Net", "DistributedDataParallel", ("cpu", "cpu"), (None, None), num_buckets=4)
SLOW: Seconds = {"forward": 0.8, "backward": 1.2}
MIB = 2**20


def advise_on(
    replicas: list[Seconds], info: RunInfo = DDP, samples: list[int] | None = None
) -> Advice:
    steps = [make_step(replicas, samples)] * 5
    totals = total_steps(steps, info)
    return advise(totals, info, straggler=find_straggler(totals, steps))


@pytest.mark.parametrize(
    ("first", "second", "info", "kind", "gain", "words"),
    [
        # Three quarters of the step pass before the batch is there.
        ({"input": 3.0}, {"input": 3.0}, DDP, "input", 0.75, "num_workers"),
        # The first does 0.8 s of loss for both; gathering costs 0.2 s: 0.4 + 0.1 of 2.
        ({"gather": 0.2, "loss": 0.8}, {"gather": 0.2}, DDP, "loss", 0.25, "model.loss"),
        ({"gather": 1.0}, {"gather": 1.0}, DDP, "gather", 0.5, 'output_device="each"'),
        ({"scatter": 1.0}, {"scatter": 1.0}, DDP, "scatter", 0.25, "pin_memory"),
        (
            *({"scatter": 1.0}, {"scatter": 1.0}, make_info(2, buckets=0), "scatter", 0.25),
            "DistributedDataParallel",
        ),
        ({"optimizer": 1.0}, {}, DDP, "optimizer", 0.25, "ShardedOptimizer"),
        ({"optimizer": 1.0}, {}, ONE_DEVICE, "optimizer", 0.25, "fused=True"),
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
    advice = advise_on([{**BUSY, **first}, {**BUSY, **second}], info)
    assert advice.kind == kind
    assert advice.gain == pytest.approx(gain)
    assert words in advice.text


def test_a_slow_replica_is_named_with_what_balancing_saves() -> None:
    advice = advise_on([BUSY, SLOW])
    assert advice.kind == "slow replica"
    assert "Replica 1 on virtual:1 takes 2.0 times as long per sample" in advice.text
    assert "dataparallel.balance(model)" in advice.text
    # 16 samples at 8/s and 4/s take 4/3 s in the best split, in place of 2 s.
    assert advice.gain == pytest.approx(1 / 3)
    assert advice.evidence["saved_seconds"] == pytest.approx(2 / 3)
    assert str(advice).endswith("Estimated: steps up to 33 % shorter, 1.50 times as fast.")


def test_a_slow_replica_that_has_its_smaller_chunk_is_left_alone() -> None:
    advice = advise_on([BUSY, BUSY], samples=[16, 8])
    assert advice.kind == "nothing"


def test_a_larger_chunk_is_an_uneven_split() -> None:
    advice = advise_on([BUSY, SLOW], samples=[8, 16])
    assert advice.kind == "uneven split"
    assert "Replica 1 on virtual:1 gets 16 of 24 samples" in advice.text
    assert advice.gain == pytest.approx(0.25)


def test_a_device_that_is_slowed_down_is_told_with_the_reason() -> None:
    totals = total_steps(make_steps(3, [BUSY, SLOW]), DDP)
    advice = advise(totals, DDP, slowed={"virtual:1": "power cap in 80% of the time"})
    assert advice.kind == "slowed device"
    assert "power cap in 80% of the time" in advice.text
    assert "dataparallel.balance(model)" in advice.text
    # Another device's reasons are no cause.
    assert advise(totals, DDP, slowed={"virtual:0": "power cap"}).kind == "slow replica"


def test_a_straggler_that_moves_is_no_matter_for_balancing() -> None:
    steps = make_steps(4, [BUSY, SLOW]) + make_steps(4, [SLOW, BUSY])
    totals = total_steps(steps, DDP)
    advice = advise(totals, DDP, straggler=find_straggler(totals, steps))
    assert advice.kind == "moving straggler"
    assert "balance" not in advice.text
    assert advice.gain == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("buckets", "size", "kind", "gain", "words"),
    [
        (1, 200 * MIB, "bucket size", 0.4375, "bucket_cap_mb=25"),
        (400, MIB // 4, "bucket size", 0.5, "400 buckets of at most 0.25 MiB"),
        (8, 25 * MIB, "communication hook", 0.25, "bf16_compress"),
        # One small bucket is not too large.
        (1, MIB // 4, "communication hook", 0.25, "bf16_compress"),
    ],
)
def test_waiting_for_other_processes(
    buckets: int, size: int, kind: str, gain: float, words: str
) -> None:
    info = make_info(2, buckets=buckets, world_size=2, bucket_bytes=size, num_parameters=MIB)
    waiting: Seconds = {"backward": 1.0, "reduce across processes": 1.0}
    advice = advise_on([waiting, waiting], info)
    assert advice.kind == kind
    assert advice.gain == pytest.approx(gain)
    assert words in advice.text


def test_what_backward_cannot_hide_is_not_promised() -> None:
    info = make_info(1, buckets=1, world_size=2, bucket_bytes=200 * MIB)
    waiting: Seconds = {"forward": 0.9, "backward": 0.1, "reduce across processes": 1.0}
    assert advise_on([waiting], info).gain == pytest.approx(0.05)


def test_waiting_for_the_first_replica_is_priced_once() -> None:
    # The others idle for 1.5 s: 0.5 s for the loss, 1 s for the optimizer.
    first: Seconds = {**BUSY, "loss": 0.5, "optimizer": 1.0}
    info = make_info(4)
    found = candidates(total_steps(make_steps(3, [first, BUSY, BUSY, BUSY]), info), info)
    assert [one.kind for one in found] == ["optimizer", "loss"]
    assert [one.gain for one in found] == pytest.approx([0.75 / 2.5, 0.375 / 2.5])


def test_waiting_for_a_straggler_is_no_overhead() -> None:
    found = candidates(total_steps(make_steps(3, [BUSY, {"forward": 4.0}]), DDP), DDP)
    assert [one.kind for one in found] == ["slow replica"]


def test_waiting_for_each_other_in_turns_is_no_overhead() -> None:
    # The first waits for the slow one, which then waits for the loss and the optimizer.
    first: Seconds = {**BUSY, "loss": 0.5, "optimizer": 2.0, "idle": 3.0}
    second: Seconds = {"forward": 1.6, "backward": 2.4, "idle": 2.5}
    found = candidates(total_steps(make_steps(3, [first, second]), DDP), DDP)
    assert [one.kind for one in found] == ["slow replica", "optimizer", "loss"]


def test_nothing_stands_out() -> None:
    advice = advise_on([{**BUSY, "scatter": 0.01}, {"forward": 0.4, "backward": 0.61}])
    assert advice.kind == "nothing"
    assert advice.gain == 0
    assert str(advice).startswith("Nothing stands out")
    assert "100 % of each step is forward, loss and backward" in advice.text
    assert "each replica computes for 1 s to 1.01 s" in advice.text


def test_what_is_said_where_nothing_stands_out_is_true() -> None:
    # Most of the step is a backward of all replicas together; the rest is far from even.
    common: Seconds = {"input": 0.02, "forward": 0.02, "backward": 0.9, "idle": 0.06}
    other: Seconds = {**common, "forward": 0.01, "idle": 0.07}
    advice = advise_on([common, other], make_info(2, buckets=0))
    assert advice.kind == "nothing"
    assert "evenly" not in advice.text
    assert "The backward (90 %) is one for all replicas" in advice.text
    assert "computes 33 % longer than the mean, but that is 1 % of the step" in advice.text
    # One fast replica among many makes no straggler, but is not even.
    fast: Seconds = {"forward": 0.6}
    advice = advise_on([BUSY] * 15 + [fast], make_info(16))
    assert advice.kind == "nothing"
    assert "each replica computes for 600 ms to 1 s" in advice.text


def test_without_steps_there_is_no_advice() -> None:
    advice = advise(total_steps([], DDP), DDP)
    assert (advice.kind, advice.gain) == ("unknown", 0.0)


def test_one_replica_gets_no_advice_for_several() -> None:
    alone: Seconds = {**BUSY, "loss": 1.0, "gather": 1.0, "idle": 2.0}
    assert advise_on([alone], make_info(1)).kind == "nothing"
