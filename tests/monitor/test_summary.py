"""Summaries of steps whose times are made up, and of a real run."""

from __future__ import annotations

import dataclasses
import time
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import dataparallel
from dataparallel.monitor.summary import percentile, summarize

from .step_cases import BUSY, Seconds, make_info, make_step, make_steps

DDP = make_info(2)
SLOW: Seconds = {"forward": 0.8, "backward": 1.2}


def test_no_step_says_so() -> None:
    summary = summarize([], DDP)
    assert summary.num_steps == 0
    assert summary.times is None
    assert summary.advice.kind == "unknown"
    assert str(summary).startswith("No step has ended yet")
    assert summary.as_metrics() == {"num_steps": 0.0}


def test_throughput_and_percentiles() -> None:
    steps = [make_step([{"forward": seconds}] * 2) for seconds in (1.0, 2.0, 3.0, 4.0, 10.0)]
    summary = summarize(steps, DDP)
    assert summary.step_seconds == 4.0
    assert summary.steps_per_second == pytest.approx(0.25)
    assert summary.samples_per_second == pytest.approx(4.0)
    assert summary.times is not None
    assert dataclasses.astuple(summary.times) == pytest.approx((3.0, 7.6, 10.0, 6.2 / 3))


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_percentiles_lie_between_the_values(share: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(value)


def test_the_first_step_and_inference_are_left_out() -> None:
    warm_up = make_step([{"forward": 99.0}] * 2, number=1)
    inference = make_step([{"forward": 50.0}] * 2, number=9, kind="inference")
    summary = summarize([warm_up, *make_steps(5, [BUSY, BUSY]), inference], DDP)
    assert (summary.num_steps, summary.kind, summary.num_left_out) == (5, "train", 2)
    assert summary.step_seconds == pytest.approx(1.0)
    assert "(2 others left out)" in str(summary)


def test_a_step_that_takes_long_once_does_not_tell_what_to_change() -> None:
    long: Seconds = {"forward": 60.0}
    steps = [*make_steps(29, [BUSY, BUSY]), make_step([BUSY, long], number=40)]
    summary = summarize(steps, DDP)
    # It counts for the times, but not for the straggler and the advice.
    assert (summary.num_steps, summary.num_not_advised) == (30, 1)
    assert summary.times is not None and summary.times.longest == pytest.approx(60.0)
    assert summary.straggler is None
    assert summary.advice.kind == "nothing"
    assert "left out of the advice: 1 of 30 steps" in str(summary)


def test_steps_that_take_long_again_and_again_do_tell() -> None:
    steps = make_steps(8, [BUSY, BUSY]) + make_steps(3, [BUSY, {"forward": 60.0}])
    summary = summarize(steps, DDP)
    assert summary.num_not_advised == 0
    assert summary.straggler is not None and summary.advice.kind == "slow replica"
    assert "left out" not in str(summary)


def test_the_first_step_stays_where_there_are_few() -> None:
    summary = summarize([make_step([BUSY, BUSY], number=1)], DDP)
    assert (summary.num_steps, summary.num_left_out) == (1, 0)


def test_inference_alone_is_summed_up_too() -> None:
    steps = [make_step([{"forward": 1.0}] * 2, kind="inference", number=i) for i in range(2, 6)]
    summary = summarize(steps, DDP)
    assert (summary.num_steps, summary.kind) == (4, "inference")
    assert "4 inference steps of 1 s" in str(summary)


def test_exposed_communication() -> None:
    seconds: Seconds = {**BUSY, "scatter": 0.25, "gather": 0.25, "reduce across processes": 0.5}
    assert summarize(make_steps(2, [seconds] * 2), DDP).exposed_communication == 0.5


def test_the_text_has_a_column_per_replica_and_ends_with_the_advice() -> None:
    text = str(summarize(make_steps(20, [BUSY, SLOW]), DDP))
    lines = text.splitlines()
    assert lines[0] == "20 training steps of 2 s: 0.5 steps/s, 8 samples/s"
    begin = next(i for i, line in enumerate(lines) if line.startswith("replica "))
    assert [" ".join(line.split()) for line in lines[begin : begin + 10]] == [
        "replica 0 1",
        "device virtual:0 virtual:1",
        "samples per step 8 8",
        "forward 400 ms 20 % 800 ms 40 %",
        "backward 600 ms 30 % 1.2 s 60 %",
        "idle 1 s 50 % 0 %",
        "computing 1 s 2 s",
        "score 1.00 0.50",
        "score per sample 1.00 0.50",
        "score to own best 1.00 1.00",
    ]
    assert "Replica 1 on virtual:1 is the slowest, in 100 % of the steps" in text
    assert "Change first: Replica 1 on virtual:1 takes 2.0 times" in text
    assert max(map(len, lines)) <= 100


def test_a_notebook_shows_a_table_and_a_list_one_line() -> None:
    summary = summarize(make_steps(20, [BUSY, SLOW]), DDP)
    rows = [
        [cell.text for cell in row]
        for row in ElementTree.fromstring(f"<x>{summary._repr_html_()}</x>").iter("tr")
    ]
    assert rows[:2] == [["replica", "0", "1"], ["device", "virtual:0", "virtual:1"]]
    # Row by row what the text says.
    lines = [" ".join(" ".join(map(str, row)).split()) for row in rows]
    text = [" ".join(line.split()) for line in str(summary).splitlines()]
    assert [line for line in text if line in lines] == lines
    assert repr([summary]) == "[<Summary: 20 steps, 2 s each>]"
    assert "no step has ended" in summarize([], DDP)._repr_html_().lower()


def test_a_notebook_shows_names_as_they_are() -> None:
    summary = summarize(make_steps(20, [BUSY, SLOW]), DDP)
    named = [dataclasses.replace(one, device="<b>&") for one in summary.replicas]
    shown = dataclasses.replace(summary, replicas=tuple(named))._repr_html_()
    assert "&lt;b&gt;&amp;" in shown and "<b>" not in shown


def test_many_replicas_are_in_several_tables() -> None:
    lines = str(summarize(make_steps(2, [BUSY] * 16), make_info(16))).splitlines()
    assert sum(line.startswith("replica ") for line in lines) > 1
    assert max(map(len, lines)) <= 100


def test_metrics_are_flat_numbers() -> None:
    metrics = summarize(make_steps(4, [BUSY, SLOW]), DDP).as_metrics()
    assert metrics["step_seconds"] == pytest.approx(2.0)
    assert metrics["samples_per_second"] == pytest.approx(8.0)
    assert metrics["straggler_score"] == pytest.approx(0.5)
    assert metrics["replica0/forward_share"] == pytest.approx(0.2)
    assert metrics["replica1/score"] == pytest.approx(0.5)
    # Too few steps for a history: left out, not 0 or None.
    assert "replica0/score_individual" not in metrics
    assert all(type(value) is float for value in metrics.values())
    assert not any(" " in name for name in metrics)


def test_one_replica_has_no_imbalance() -> None:
    summary = summarize(make_steps(2, [BUSY]), make_info(1))
    assert summary.imbalance is None
    assert "imbalance" not in str(summary)
    assert "imbalance" not in summary.as_metrics()


class Slow(nn.Module):
    """Takes 40 ms longer in the second replica.

    It sleeps: two replicas that compute hold each other up, as they share an interpreter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica = dataparallel.current_replica()
        assert replica is not None
        if replica.index == 1:
            time.sleep(0.04)
        return torch.as_tensor(self.linear(x))


def test_a_replica_that_is_slowed_is_found_in_a_real_run() -> None:
    model = dataparallel.DistributedDataParallel(Slow(), ["cpu", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dataparallel.monitor.StepMonitor(model, publish=False) as monitor:
        for _ in range(6):
            model(torch.randn(16, 32)).sum().backward()
            optimizer.step()
    summary = monitor.summary()
    assert (summary.num_steps, summary.num_left_out) == (5, 1)
    assert summary.straggler is not None
    assert (summary.straggler.index, summary.straggler.moves) == (1, False)
    slow = summary.replicas[1]
    assert slow.per_sample is not None and slow.per_sample < 0.5
    assert summary.advice.kind == "slow replica"
    assert "Replica 1 on cpu" in str(summary)
