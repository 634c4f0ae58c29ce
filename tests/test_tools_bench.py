"""`dataparallel bench train`: its plan, its conclusions, and small runs of the real thing."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from rich.console import Console

from dataparallel.tools import cli
from dataparallel.tools.bench import processes, report, rounds, summary
from dataparallel.tools.bench.cases import CASES, criterion
from dataparallel.tools.bench.contestants import Contestant, Task, plan_contestants
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.summary import Measured, Spread
from dataparallel.tools.bench.trainer import Trainer

# --- plan --------------------------------------------------------------------------------------


def plan(devices: list[str], peers: list[str], batch: int = 64) -> tuple[Contestant, ...]:
    return plan_contestants(
        "deep",
        batch,
        devices,
        peers,
        threads=1,
        mode="step",
        loss="gathered",
        meeting_point="/nowhere/meeting-point",
    )


def test_ddp_has_one_process_per_device_and_all_see_one_batch() -> None:
    contestants = plan(["cpu", "cpu", "cpu"], ["ddp", "bare"])
    assert [each.name for each in contestants] == ["ours", "ddp", "bare"]
    tasks = [
        (task.kind, task.batch, task.rank, task.world_size)
        for contestant in contestants
        for task in contestant.tasks
    ]
    assert tasks == [
        ("ours", 63, 0, 1),
        ("ddp", 63, 0, 3),
        ("ddp", 63, 1, 3),
        ("ddp", 63, 2, 3),
        ("bare", 63, 0, 1),
    ]


def test_a_batch_smaller_than_the_number_of_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="'deep' has 1 samples, but there are 2 devices"):
        plan(["cpu", "cpu"], [], batch=1)


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


class FakeRunner:
    """Keeps a diary instead of training."""

    def __init__(self, name: str, diary: list[str], seconds: float = 0.1) -> None:
        self.name, self.diary, self.seconds = name, diary, seconds

    def start(self) -> None:
        self.diary.append(f"{self.name} start")

    def check(self, steps: int) -> tuple[list[float], list[float]]:
        return [1.0] * steps, [2.0] * steps

    def run(self, steps: int) -> list[float]:
        self.diary.append(f"{self.name} {steps}")
        if steps == 13:
            raise processes.WorkerError("broken")
        return [self.seconds] * steps

    def finish(self) -> tuple[int, int]:
        return 1, 0

    def close(self) -> None:
        self.diary.append(f"{self.name} close")


def fake_measure(steps: int | None, seconds: float = 0.1) -> tuple[list[str], int]:
    diary: list[str] = []

    def team(contestant: Contestant) -> rounds.Runner:
        return FakeRunner(contestant.name, diary, seconds)

    try:
        contestants = plan(["cpu", "cpu"], ["bare", "ddp"])
        _, steps = rounds.measure(contestants, 2, steps, team=team)
    except processes.WorkerError:
        return diary, 0
    return diary, steps


def test_contestants_take_turns_round_by_round() -> None:
    diary, _ = fake_measure(7)
    turns = [entry for entry in diary if entry.endswith(" 7")]
    assert turns == ["ours 7", "bare 7", "ddp 7", "ours 7", "bare 7", "ddp 7"]
    assert diary[-3:] == ["ddp close", "bare close", "ours close"]


def test_workers_are_ended_after_a_failure() -> None:
    diary, _ = fake_measure(13)
    assert diary[-3:] == ["ddp close", "bare close", "ours close"]


@pytest.mark.parametrize(("seconds", "steps"), [(10.0, 3), (0.1, 5), (1e-5, 200)])
def test_a_turn_takes_about_half_a_second(seconds: float, steps: int) -> None:
    assert fake_measure(None, seconds)[1] == steps


# --- conclusions -------------------------------------------------------------------------------


def measured(name: str, *seconds: float, loss: float = 2.0, norm: float = 1.0) -> Measured:
    return Measured(name, name, seconds, (3.0, loss), (1.5, norm), 2**20, 0)


def test_ratios_are_taken_within_each_round() -> None:
    ours, bare = measured("ours", 1.0, 10.0, 2.0), measured("bare", 2.0, 20.0, 3.0)
    first, second = summary.summarise([ours, bare])
    assert first.seconds == Spread(2.0, 1.0, 10.0)
    assert first.speedup == Spread(2.0, 1.5, 2.0)
    assert second.ours_over_this == Spread(0.5, 0.5, 2.0 / 3.0)


def test_without_the_bare_module_there_is_no_speedup() -> None:
    rows = summary.summarise([measured("ours", 1.0), measured("ddp", 2.0)])
    assert [row.speedup for row in rows] == [None, None]
    assert all(row.agrees for row in rows)


@pytest.mark.parametrize(
    ("loss", "norm", "agrees"),
    [(2.0001, 1.0, True), (2.001, 1.0, False), (2.0, 1.01, False), (math.nan, 1.0, False)],
)
def test_other_losses_or_gradients_are_seen(loss: float, norm: float, agrees: bool) -> None:
    ours = measured("ours", 1.0, loss=loss, norm=norm)
    first, second = summary.summarise([ours, measured("bare", 1.0)])
    assert (first.agrees, second.agrees) == (agrees, True)


def table(*entries: Measured) -> str:
    console = Console(file=io.StringIO(), width=80)
    rows = summary.summarise(entries)
    report.print_results({"transformer (16)": rows}, "title", ["a note"], console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_fits_into_80_columns() -> None:
    ours = dataclasses.replace(
        measured("ours", 1.0, 1.2), title="DataParallel x16", host_bytes=2**34, device_bytes=2**35
    )
    text = table(ours, measured("bare", 2.0, 2.4))
    assert "…" not in text
    assert "1000..1200" in text
    assert "2.00" in text
    assert "32768" in text
    assert "2.0000 ✓" in text


def test_the_table_marks_a_contestant_that_trains_otherwise() -> None:
    assert "9.0000 ✗" in table(measured("ours", 1.0, loss=9.0), measured("bare", 2.0))


# --- one process -------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[Callable[[Task], Trainer]]:
    threads = torch.get_num_threads()
    made: list[Trainer] = []

    def make(task: Task) -> Trainer:
        made.append(Trainer(task))
        return made[-1]

    yield make
    for each in made:
        each.close()
    torch.set_num_threads(threads)


def test_the_check_agrees_on_batch_norm_and_sees_a_wrong_gradient(
    trainer: Callable[[Task], Trainer],
) -> None:
    figures = []
    for kind, scale in (("bare", 1.0), ("ours", 1.0), ("ours", 1.01)):
        one = trainer(Task(kind, "conv", 4, ("cpu", "cpu")))  # type: ignore[arg-type]
        last = list(one.model.parameters())[-1]
        last.register_hook(lambda grad, by=scale: grad * by)
        losses, norms = one.check(2)
        figures.append(Measured(kind, kind, (1.0,), tuple(losses), tuple(norms), 0, 0))
    assert summary.agree(figures[1], figures[0], 1e-4)
    assert not summary.agree(figures[2], figures[0], 1e-4)


@pytest.mark.parametrize("mode", ["step", "forward-backward", "forward", "inference"])
def test_each_mode_does_what_it_says(mode: str, trainer: Callable[[Task], Trainer]) -> None:
    one = trainer(Task("bare", "deep", 2, ("cpu",), mode=mode))  # type: ignore[arg-type]
    graphs = []
    one.model.register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    weight = next(one.model.parameters())
    before = weight.detach().clone()
    assert len(one.run(2)) == 2
    assert graphs == [mode != "inference"] * 2
    assert (weight.grad is not None) == (mode in ("step", "forward-backward"))
    assert torch.equal(weight, before) == (mode != "step")


def test_memory_that_came_and_went_is_in_the_peak() -> None:
    gauge = MemoryGauge([torch.device("cpu")])
    del_me = torch.ones(64 * 2**20 // 4)
    del del_me
    assert 60 * 2**20 < gauge.host_peak() < 100 * 2**20
    assert gauge.device_peak() == 0


def test_memory_on_devices_counts_from_when_the_gauge_was_made() -> None:
    device = torch.device("virtual:0")
    earlier = torch.ones(4 * 2**20, device=device)
    del earlier
    kept = torch.ones(2**20, device=device)
    gauge = MemoryGauge([device, device])
    more = torch.ones(2**20, device=device)
    del more
    assert 4 * 2**20 <= gauge.device_peak() < 5 * 2**20
    assert kept.sum().item() == 2**20


# --- worker processes --------------------------------------------------------------------------


def test_a_worker_that_fails_tells_why() -> None:
    worker = processes.Worker(Task("bare", "no-such-case", 2, ("cpu",)), "bare")
    try:
        worker.ask("start", task=dataclasses.asdict(worker.task))
        with pytest.raises(processes.WorkerError, match=r"(?s)worker bare ended.*no-such-case"):
            worker.answer(60)
    finally:
        worker.close()


_TALKATIVE = """
import os, sys, types

class Trainer:
    def __init__(self, task):
        print("made")
    def run(self, steps):
        os.system("echo ran")
        return [1.0] * steps

module = types.ModuleType("dataparallel.tools.bench.trainer")
module.Trainer = Trainer
sys.modules[module.__name__] = module
from dataparallel.tools.bench import worker
worker.main()
"""


def test_what_libraries_print_does_not_mix_with_the_answers() -> None:
    start = {"do": "start", "task": dataclasses.asdict(Task("bare", "deep", 2, ("cpu",)))}
    requests = [json.dumps(start), json.dumps({"do": "run", "steps": 2})]
    finished = subprocess.run(
        [sys.executable, "-c", _TALKATIVE],
        input="".join(f"{request}\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.stdout.splitlines() == ["{}", '{"seconds": [1.0, 1.0]}']
    assert "made" in finished.stderr
    assert "ran" in finished.stderr


def test_a_worker_that_is_silent_is_named() -> None:
    worker = processes.Worker(Task("ddp", "deep", 2, ("cpu", "cpu")), "ddp (process 1)")
    try:
        with pytest.raises(processes.WorkerError, match=r"ddp \(process 1\) did not answer within"):
            worker.answer(0.05)
    finally:
        worker.close()


def test_a_small_run_beside_both_peers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "train", "--cases", "deep", "--rounds", "2", "--steps", "1", "--json", "-"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["setting"]["devices"] == ["cpu", "cpu"]
    (case,) = result["cases"]
    assert case["steps_per_round"] == 1
    assert [row["contestant"] for row in case["rows"]] == ["ours", "bare", "ddp"]
    assert all(row["agrees"] for row in case["rows"])
    assert all(len(each["seconds"]) == 2 for each in case["measured"])


def test_a_small_run_on_virtual_devices(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    words = ["bench", "train", "--cases", "deep", "--rounds", "1", "--steps", "1"]
    options = ["--devices", "virtual:0,virtual:1", "--mode", "forward", "--json", str(target)]
    assert cli.main([*words, *options]) == 0
    assert "replicas on virtual:0, virtual:1" in capsys.readouterr().out
    (case,) = json.loads(target.read_text())["cases"]
    assert [row["contestant"] for row in case["rows"]] == ["ours", "bare"]
    assert all(row["agrees"] and row["device_bytes"] > 0 for row in case["rows"])
    assert list(tmp_path.iterdir()) == [target]
