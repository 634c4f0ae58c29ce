"""`dataparallel bench train`: its plan, its conclusions, and small runs of the real thing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from dataparallel.tools import arguments, cli
from dataparallel.tools.bench import harness, train
from dataparallel.tools.bench.cases import CASES, criterion, whole_batch
from dataparallel.tools.bench.harness import Contestant, Outcome, plan_contestants
from dataparallel.tools.bench.trainer import TrainTask

# --- plan --------------------------------------------------------------------------------------


def plan(devices: list[list[str]], peers: list[str], **fields: Any) -> tuple[Contestant, ...]:
    task = TrainTask("ours", (), case="deep", batch=64, meeting_point="/nowhere/point", **fields)
    return plan_contestants(task, devices, peers)


def places(contestants: tuple[Contestant, ...]) -> list[tuple[str, tuple[str, ...], int, int, int]]:
    return [
        (task.kind, task.devices, task.replicas, task.rank, task.world_size)
        for contestant in contestants
        for task in contestant.tasks
    ]


def test_torch_ddp_has_one_process_per_replica() -> None:
    contestants = plan([["cpu", "cpu", "cpu"]], ["ddp", "bare"])
    assert [each.name for each in contestants] == ["ours", "ddp", "bare"]
    assert [each.title for each in contestants] == ["our DDP 1x3", "torch DDP 3x1", "bare module"]
    assert places(contestants) == [
        ("ours", ("cpu", "cpu", "cpu"), 3, 0, 1),
        ("ddp", ("cpu",), 3, 0, 3),
        ("ddp", ("cpu",), 3, 1, 3),
        ("ddp", ("cpu",), 3, 2, 3),
        ("bare", ("cpu",), 3, 0, 1),
    ]


def test_processes_of_ours_have_their_own_devices_and_meeting_point() -> None:
    ours, ddp = plan([["a", "b"], ["c", "d"]], ["ddp"])
    assert places((ours,)) == [("ours", ("a", "b"), 4, 0, 2), ("ours", ("c", "d"), 4, 1, 2)]
    assert [task.devices for task in ddp.tasks] == [("a",), ("b",), ("c",), ("d",)]
    points = [{task.meeting_point for task in each.tasks} for each in (ours, ddp)]
    assert points == [{"/nowhere/point-ours"}, {"/nowhere/point-ddp"}]


def test_only_ddp_and_several_processes_form_a_group() -> None:
    one = plan([["cpu"]], ["ddp", "bare"])
    assert [task.joins for each in one for task in each.tasks] == [False, True, False]
    assert all(task.joins for task in plan([["cpu"], ["cpu"]], [])[0].tasks)


def test_the_batch_is_rounded_down_to_equal_parts() -> None:
    assert whole_batch("deep", 3) == 63
    with pytest.raises(ValueError, match="'deep' has 64 samples, but there are 65 replicas"):
        whole_batch("deep", 65)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("mlp", 8 * (1024 * 1024 + 1024) + 10 * 1025, 18),
        ("wide", 8 * (2048 * 2048 + 2048) + 10 * 2049, 18),
        ("deep", 200 * (64 * 64 + 64) + 10 * 65, 402),
        ("conv", 3 * 9 * 64 + 64 + 6 * (64 * 9 * 64 + 64) + 7 * 128 + 10 * 65, 30),
        ("transformer", 1000 * 256 + 4 * (12 * 256**2 + 13 * 256) + 1000 * 257, 51),
    ],
)
def test_cases_have_the_sizes_they_are_known_by(name: str, parameters: int, tensors: int) -> None:
    model = CASES[name].build()
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
    inputs, targets = CASES[name].data(2)
    assert criterion(model(inputs), targets).isfinite()


# --- rounds ------------------------------------------------------------------------------------


def fake_measure(
    monkeypatch: pytest.MonkeyPatch, steps: int | None, seconds: float = 0.1
) -> tuple[list[str], list[Outcome], int]:
    """What is measured by teams that keep a diary instead of training."""
    diary: list[str] = []

    class FakeTeam:
        def __init__(self, contestant: Contestant) -> None:
            self.name = contestant.name

        def start(self) -> None:
            diary.append(f"{self.name} start")

        def ask(self, do: str, steps: int = 0) -> list[dict[str, Any]]:
            if do != "run":
                return [{do: self.name}]
            diary.append(f"{self.name} {steps}")
            if steps == 13:
                raise harness.WorkerError("broken")
            # Two processes, of which the second is slower, but for one repetition.
            return [
                {"step": [seconds / 2] * (steps - 1) + [100.0]},
                {"step": [seconds] * steps},
            ]

        def close(self) -> None:
            diary.append(f"{self.name} close")

    monkeypatch.setattr(harness, "Team", FakeTeam)
    try:
        contestants = plan([["cpu", "cpu"]], ["bare", "ddp"])
        return diary, *harness.measure("deep", contestants, 2, steps)
    except harness.WorkerError:
        return diary, [], 0


def test_contestants_take_turns_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    diary, outcomes, _ = fake_measure(monkeypatch, 7)
    turns = [entry for entry in diary if entry.endswith(" 7")]
    assert turns == ["ours 7", "bare 7", "ddp 7", "ours 7", "bare 7", "ddp 7"]
    assert diary[-3:] == ["ddp close", "bare close", "ours close"]
    # The median of repetitions, each as slow as its slowest process.
    assert [each.seconds for each in outcomes] == [{"step": (0.1, 0.1)}] * 3
    assert [each.checked for each in outcomes] == [[{"check": n}] for n in ("ours", "bare", "ddp")]
    assert [each.finished[0]["finish"] for each in outcomes] == ["ours", "bare", "ddp"]


def test_workers_are_ended_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    diary, _, _ = fake_measure(monkeypatch, 13)
    assert diary[-3:] == ["ddp close", "bare close", "ours close"]


@pytest.mark.parametrize(("seconds", "steps"), [(10.0, 3), (0.1, 5), (1e-5, 200)])
def test_a_turn_takes_about_half_a_second(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fake_measure(monkeypatch, None, seconds)[2] == steps


# --- worker processes --------------------------------------------------------------------------


def test_a_worker_that_fails_tells_why() -> None:
    task = TrainTask("bare", ("cpu",), case="no-such-case", batch=2)
    worker = harness.Worker(task, "bare")
    try:
        worker.ask("start", module=task.module, task=dataclasses.asdict(task))
        with pytest.raises(harness.WorkerError, match=r"(?s)worker bare ended.*no-such-case"):
            worker.answer(60)
    finally:
        worker.close()


_TALKATIVE = """
import os, sys, types

class Talkative:
    def run(self, steps):
        os.system("echo ran")
        return {"step": [1.0] * steps}

def begin(task):
    print("made")
    return Talkative()

module = types.ModuleType("talkative")
module.begin = begin
sys.modules["talkative"] = module
from dataparallel.tools.bench import worker
worker.main()
"""


def test_what_libraries_print_does_not_mix_with_the_answers() -> None:
    start = {"do": "start", "module": "talkative", "task": {}}
    requests = [json.dumps(start), json.dumps({"do": "run", "steps": 2})]
    finished = subprocess.run(
        [sys.executable, "-c", _TALKATIVE],
        input="".join(f"{request}\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.stdout.splitlines() == ["{}", '{"step": [1.0, 1.0]}']
    assert "made" in finished.stderr
    assert "ran" in finished.stderr


def test_a_worker_that_is_silent_is_named() -> None:
    task = TrainTask("ddp", ("cpu",), case="deep", batch=2)
    worker = harness.Worker(task, "ddp (process 1)")
    try:
        with pytest.raises(harness.WorkerError, match=r"ddp \(process 1\) did not answer within"):
            worker.answer(0.05)
    finally:
        worker.close()


SMALL = ["bench", "train", "--cases", "deep", "--steps", "1"]
# One that is met, and one that is missed but does not count without --check.
BARS = ["--bar", "1000", "--bar-worst", "1e-6"]


@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_beside_both_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--rounds", "2", "--json", "-", *BARS]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["setting"]["devices"] == ["cpu", "cpu"]
    assert result["setting"]["bucket_view"] is False
    (case,) = result["cases"]
    assert case["steps_per_round"] == 1
    assert [row["contestant"] for row in case["rows"]] == ["ours", "bare", "ddp"]
    assert all(row["agrees"] for row in case["rows"])
    assert all(row["parameter_error"] < 1e-2 for row in case["rows"])
    assert all(len(row["rounds"]) == 2 for row in case["rows"])
    bare, ddp = result["comparisons"]
    assert (bare["peer"], bare["met"]["time_mean"]) == ("bare", None)
    assert (ddp["peer"], ddp["met"]["time_mean"]) == ("ddp", True)
    assert ddp["met"]["time_worst"] is False


@pytest.mark.usefixtures("forked_workers")
def test_two_processes_of_ours_miss_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--processes", "2", "--devices", "cpu", "--peers", "ddp", "--rounds", "1"]
    assert cli.main([*SMALL, *words, "--bar", "1e-6", "--check"]) == 1
    text = capsys.readouterr().out
    assert "our DDP 2x1" in text
    assert "✗" not in text
    assert "missed" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "2", "--wrapper", "dp"], "DataParallel is for one process"),
        (["--processes", "2", "--devices", "0,1"], "only the CPU can be shared so"),
        (["--check"], "--check needs a bar to check"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "train", *words]) == 2
    assert message in capsys.readouterr().err


def test_gradients_are_views_of_buckets_where_they_are_sent() -> None:
    assert [train.bucket_view(None, processes) for processes in (1, 2)] == [False, True]
    assert [train.bucket_view(given, 1) for given in ("on", "off")] == [True, False]


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "two"])
def test_a_bar_is_a_number_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0"):
        arguments.above_zero(text)


def test_a_small_run_on_virtual_devices(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    options = [
        "--rounds",
        "1",
        "--devices",
        "virtual:0,virtual:1",
        "--mode",
        "forward",
        "--json",
        str(target),
    ]
    assert cli.main([*SMALL, *options]) == 0
    assert "replicas on 1 x (virtual:0, virtual:1)" in capsys.readouterr().out
    (case,) = json.loads(target.read_text())["cases"]
    assert [row["contestant"] for row in case["rows"]] == ["ours", "bare"]
    assert all(row["agrees"] and row["device_bytes"] > 0 for row in case["rows"])
    assert list(tmp_path.iterdir()) == [target]
