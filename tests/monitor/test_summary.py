"""Summaries of steps whose times are made up, and of a real run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import dataparallel
from dataparallel.monitor.findings import Part
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.summary import Summary, summarize

from .step_cases import BUSY, SLOW, Seconds, make_info, make_step, make_steps


def sum_up(steps: Sequence[StepRecord], info: RunInfo | None = None) -> Summary:
    return summarize([Part.of(step) for step in steps], info or make_info(2))


def test_no_step_says_so() -> None:
    summary = sum_up([])
    assert (summary.num_steps, summary.times, summary.advice.kind) == (0, None, "unknown")
    assert str(summary).startswith("No step has ended yet")
    assert "no step has ended" in summary._repr_html_().lower()
    assert summary.as_metrics() == {"num_steps": 0.0}


def test_throughput_and_percentiles() -> None:
    steps = [make_step([{"forward": one}] * 2) for one in (1.0, 2.0, 3.0, 4.0, 10.0)]
    summary = sum_up(steps)
    assert summary.step_seconds == 4.0
    assert summary.steps_per_second == pytest.approx(0.25)
    assert summary.samples_per_second == pytest.approx(4.0)
    assert summary.times is not None
    assert dataclasses.astuple(summary.times) == pytest.approx((3.0, 7.6, 10.0))
    assert sum_up(steps[:1]).times is None


def test_the_first_step_and_inference_are_left_out() -> None:
    warm_up = make_step([{"forward": 99.0}] * 2, number=1)
    inference = make_step([{"forward": 50.0}] * 2, number=9, kind="inference")
    summary = sum_up([warm_up, *make_steps(5, [BUSY, BUSY]), inference])
    assert (summary.num_steps, summary.kind, summary.num_left_out) == (5, "train", 2)
    assert summary.step_seconds == pytest.approx(1.0)
    assert "(2 others left out)" in str(summary)
    # It stays where there are few, and inference where there is nothing else.
    few = sum_up([warm_up, *make_steps(2, [BUSY, BUSY])])
    assert (few.num_steps, few.num_left_out) == (3, 0)
    alone = sum_up([inference] * 4)
    assert (alone.num_steps, alone.kind) == (4, "inference")
    assert "4 inference steps of 50 s" in str(alone)


@pytest.mark.parametrize(("often", "kind"), [(1, "nothing"), (3, "slow replica")])
def test_a_step_that_takes_long_once_does_not_tell_what_to_change(often: int, kind: str) -> None:
    steps = make_steps(20, [BUSY, BUSY]) + make_steps(often, [BUSY, {"forward": 60.0}])
    summary = sum_up(steps)
    assert summary.num_steps == 20 + often
    assert summary.num_not_advised == (often if kind == "nothing" else 0)
    # It counts for the times.
    assert summary.times is not None and summary.times.longest == pytest.approx(60.0)
    assert (summary.straggler is None) == (kind == "nothing")
    assert summary.advice.kind == kind
    assert ("left out of the advice: 1 of 21 steps" in str(summary)) == (kind == "nothing")


def test_the_text_has_a_column_per_replica_and_ends_with_the_advice() -> None:
    text = str(sum_up(make_steps(20, [BUSY, SLOW])))
    lines = text.splitlines()
    assert lines[0] == "20 training steps of 2 s: 0.5 steps/s, 8 samples/s"
    begin = next(i for i, line in enumerate(lines) if line.startswith("replica "))
    assert [" ".join(line.split()) for line in lines[begin : begin + 9]] == [
        "replica 0 1",
        "device virtual:0 virtual:1",
        "samples per step 8 8",
        "forward 400 ms 20 % 800 ms 40 %",
        "backward 600 ms 30 % 1.2 s 60 %",
        "idle 1 s 50 % 0 %",
        "computing 1 s 2 s",
        "score 1.00 0.50",
        "score per sample 1.00 0.50",
    ]
    assert "Change first: Replica 1 on virtual:1 takes 2.0 times" in text
    assert max(map(len, lines)) <= 100


def test_a_notebook_shows_the_same_as_a_table_and_a_list_one_line() -> None:
    summary = sum_up(make_steps(20, [BUSY, SLOW]))
    rows = [
        " ".join(" ".join(cell.text or "" for cell in row).split())
        for row in ElementTree.fromstring(f"<x>{summary._repr_html_()}</x>").iter("tr")
    ]
    assert rows[:2] == ["replica 0 1", "device virtual:0 virtual:1"]
    text = [" ".join(line.split()) for line in str(summary).splitlines()]
    assert [line for line in text if line in rows] == rows
    assert repr([summary]) == "[<Summary: 20 steps, 2 s each>]"
    named = [dataclasses.replace(one, device="<i>&") for one in summary.replicas]
    shown = dataclasses.replace(summary, replicas=tuple(named))._repr_html_()
    assert "&lt;i&gt;&amp;" in shown and "<i>" not in shown


def test_many_replicas_are_in_several_tables() -> None:
    lines = str(sum_up(make_steps(2, [BUSY] * 16), make_info(16))).splitlines()
    assert sum(line.startswith("replica ") for line in lines) > 1
    assert max(map(len, lines)) <= 100


def test_metrics_are_flat_numbers() -> None:
    phases: Seconds = {**SLOW, "scatter": 0.25, "gather": 0.25, "reduce across processes": 0.5}
    metrics = sum_up(make_steps(4, [BUSY, phases])).as_metrics()
    assert metrics["step_seconds"] == pytest.approx(3.0)
    assert metrics["samples_per_second"] == pytest.approx(16 / 3)
    assert metrics["exposed_communication_share"] == pytest.approx(0.5 / 3)
    assert metrics["straggler_score"] == metrics["replica1/score"] == pytest.approx(0.5)
    assert metrics["replica1/reduce_across_processes_share"] == pytest.approx(0.5 / 3)
    assert all(type(value) is float for value in metrics.values())
    # What is unknown is left out.
    alone = sum_up(make_steps(2, [BUSY]), make_info(1))
    assert alone.imbalance is None
    assert "imbalance" not in str(alone) and "imbalance" not in alone.as_metrics()


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
