"""`dataparallel bench train`: its plan, its conclusions, and small runs of the real thing."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import mmap
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from dataparallel.tools import cli
from dataparallel.tools.bench import harness, output, results
from dataparallel.tools.bench.cases import CASES, criterion, whole_batch
from dataparallel.tools.bench.harness import Contestant, Outcome, Spread, plan_contestants
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.results import Row
from dataparallel.tools.bench.trainer import Trainer, TrainTask

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


class Talkative:
    """Prints while it measures, and ends its process without a word if it is to repeat 13 times."""

    def run(self, steps: int) -> dict[str, list[float]]:
        print("ran", flush=True)
        if steps == 13:
            os._exit(7)
        return {"step": [1.0] * steps}


def begin(fields: dict[str, Any]) -> Talkative:
    """What a worker of these tests measures with."""
    os.system("echo made")
    if fields["rank"]:
        raise KeyError("no such rank")
    return Talkative()


@dataclasses.dataclass(frozen=True)
class TalkativeTask(harness.Task):
    module = __name__


@pytest.fixture
def worker(
    request: pytest.FixtureRequest, forked_workers: None, capfd: pytest.CaptureFixture[str]
) -> Iterator[harness.Worker]:
    rank = getattr(request, "param", 0)
    one = harness.Worker(TalkativeTask("bare", ("cpu",), rank=rank), "bare (process 1)")
    yield one
    one.close()
    # What libraries print must not mix with results.
    assert capfd.readouterr().out == ""


def test_a_worker_measures_until_it_ends(worker: harness.Worker) -> None:
    assert worker.answer(60) == {}
    worker.ask("run", steps=2)
    assert worker.answer(60) == {"step": [1.0, 1.0]}
    with pytest.raises(harness.WorkerError, match=r"bare \(process 1\) did not answer within 0 s"):
        worker.answer(0.05)
    worker.ask("run", steps=13)
    for _ in range(2):
        with pytest.raises(harness.WorkerError, match=r"\(process 1\) ended with status 7"):
            worker.answer(60)
        worker.ask("run", steps=1)


@pytest.mark.parametrize("worker", [1], indirect=True)
def test_a_worker_that_fails_tells_why(worker: harness.Worker) -> None:
    with pytest.raises(harness.WorkerError, match=r"(?s)bare .* has failed:.*no such rank"):
        worker.answer(60)


# --- conclusions -------------------------------------------------------------------------------


def measured(
    name: str,
    *seconds: float,
    loss: float = 2.0,
    norm: float = 1.0,
    memory: tuple[int, int] = (2**20, 0),
    title: str = "",
) -> Outcome:
    said = {"losses": [3.0, loss], "gradient_norms": [1.5, norm]}
    finished = dict(zip(("host_bytes", "device_bytes"), memory, strict=True))
    return Outcome(Contestant(name, title or name, ()), [said], {"step": seconds}, [finished])


def test_ratios_are_taken_within_each_round() -> None:
    ours, bare = measured("ours", 1.0, 10.0, 2.0), measured("bare", 2.0, 20.0, 3.0)
    first, second = results.summarize([ours, bare])
    assert first.seconds == Spread(2.0, 1.0, 10.0)
    assert first.speedup == Spread(2.0, 1.5, 2.0)
    assert second.ours_over_this == Spread(0.5, 0.5, 2.0 / 3.0)
    assert [row.speedup for row in results.summarize([ours, measured("ddp", 1, 1, 1)])] == [
        None
    ] * 2


@pytest.mark.parametrize(
    ("loss", "norm", "agrees"),
    [(2.0001, 1.0, True), (2.001, 1.0, False), (2.0, 1.01, False), (math.nan, 1.0, False)],
)
def test_other_losses_or_gradients_are_seen(loss: float, norm: float, agrees: bool) -> None:
    ours = measured("ours", 1.0, loss=loss, norm=norm)
    first, second = results.summarize([ours, measured("bare", 1.0)])
    assert (first.agrees, second.agrees) == (agrees, True)
    mark = "✓" if agrees else "✗"
    assert f"{loss:.4f} {mark}" in table(ours, measured("bare", 1.0))


@pytest.mark.parametrize(
    ("host", "device", "ratio"),
    [((3, 4), (0, 0), 0.75), ((3, 4), (8, 4), 2.0), ((3, 0), (0, 0), None)],
)
def test_memory_is_that_of_all_processes_where_the_tensors_are(
    host: tuple[int, int], device: tuple[int, int], ratio: float | None
) -> None:
    each = []
    for name, h, d in zip(("ours", "ddp"), host, device, strict=True):
        one = measured(name, 1.0, memory=(h, d))
        each.append(dataclasses.replace(one, finished=[*one.finished, *one.finished]))
    rows = results.summarize(each)
    assert (rows[0].host_bytes, rows[0].device_bytes) == (2 * host[0], 2 * device[0])
    assert rows[1].memory_ratio == ratio


def test_the_mean_over_the_cases_is_geometric_and_the_worst_case_is_named() -> None:
    def rows(time: float, memory: int) -> list[Row]:
        ours = measured("ours", time, 1.1 * time, memory=(memory, 0))
        return results.summarize([ours, measured("ddp", 1.0, 1.0, memory=(4, 0), title="torch")])

    found = results.compare({"a": rows(0.5, 2), "b": rows(2.0, 8)}, "ddp")
    mean = found.time_mean
    assert (mean.median, mean.low, mean.high) == pytest.approx((1.05, 1.0, 1.1))
    assert found.worst == "b"
    assert (found.time_worst, found.memory_mean) == pytest.approx((2.1, 1.0))
    told = results.describe(found)
    assert told == "ours / torch: time 1.050 (1.00..1.10), worst 2.100 (b); memory 1.000"
    unknown = results.compare({"a": rows(0.5, 0), "b": rows(2.0, 8)}, "ddp")
    assert unknown.memory_mean is None and "memory" not in results.describe(unknown)


def table(*entries: Outcome) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80)
    console.print(results.build_table({"transformer (16)": results.summarize(entries)}, "title"))
    return file.getvalue()


def test_the_table_fits_into_80_columns() -> None:
    ours = measured("ours", 1.0, 1.2, memory=(2**34, 2**35), title="DataParallel 1x16")
    text = table(ours, measured("bare", 2.0, 2.4))
    assert "…" not in text
    for told in ("1000..1200", "2.00", "32768", "2.0000 ✓"):
        assert told in text


def test_a_narrow_terminal_loses_no_digit() -> None:
    wide = output.new_table("times", "second", "third")
    figures = ["123456.78", "0.01..100.12", "98765 4321"]
    wide.add_row(*figures)
    file = io.StringIO()
    console = Console(width=20, file=file)
    output.print_table(wide, console)
    assert all(figure in file.getvalue() for figure in figures) and console.width == 20


# --- one process -------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    threads = torch.get_num_threads()
    made: list[Trainer] = []

    def make(kind: Any, *devices: str, **fields: Any) -> Trainer:
        made.append(Trainer(TrainTask(kind, devices, **fields)))
        return made[-1]

    yield make
    for each in made:
        each.seat.leave(each.model)
    torch.set_num_threads(threads)


def spoil(module: nn.Module, scale: float) -> None:
    """Leave the outputs as they are, and multiply the gradients."""
    module.register_forward_hook(
        lambda module, args, output: scale * output - (scale - 1.0) * output.detach()
    )


@pytest.mark.parametrize("wrapper", ["dp", "ddp"])
def test_the_check_agrees_on_batch_norm_and_sees_a_wrong_gradient(
    wrapper: str, trainer: Callable[..., Trainer]
) -> None:
    figures = []
    for kind, scale in (("bare", 1.0), ("ours", 1.0), ("ours", 1.01)):
        fields = {"replicas": 2, "case": "conv", "batch": 4, "wrapper": wrapper}
        one = trainer(kind, "cpu", "cpu", optimizer="adamw", **fields)
        spoil(one.module, scale)
        figures.append(one.check(2))
    assert results.agree(figures[1], figures[0])
    assert not results.agree(figures[2], figures[0])


@pytest.mark.parametrize("mode", ["step", "forward-backward", "forward", "inference"])
def test_each_mode_does_what_it_says(mode: str, trainer: Callable[..., Trainer]) -> None:
    one = trainer("bare", "cpu", case="deep", batch=2, mode=mode)
    graphs = []
    one.model.register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    weight = next(one.model.parameters())
    before = weight.detach().clone()
    assert len(one.run(2)["step"]) == 2
    assert graphs == [mode != "inference"] * 2
    assert (weight.grad is not None) == (mode in ("step", "forward-backward"))
    assert torch.equal(weight, before) == (mode != "step")
    assert one.finish()["host_bytes"] > 0


def test_memory_that_came_and_went_is_in_the_peak() -> None:
    gauge = MemoryGauge([torch.device("cpu")])
    del_me = torch.ones(64 * 2**20 // 4)
    del del_me
    assert 60 * 2**20 < gauge.host_peak() < 100 * 2**20
    assert gauge.device_peak() == 0


_CHECKED = """
import sys
from dataparallel.tools.bench.trainer import Trainer, TrainTask
one = Trainer(TrainTask(devices=("cpu",), replicas=2, case="mlp", batch=2, kind="ours"))
one.run(2)
before = one.memory.host_peak()
one.check(3)
print(before, one.memory.host_peak())
"""


def test_the_check_takes_no_memory_that_the_step_does_not() -> None:
    # In a process of its own, with an allocator that gives back what is freed: holes that earlier
    # tests left in the heap would decide otherwise.
    finished = subprocess.run(
        [sys.executable, "-c", _CHECKED],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    before, after = map(int, finished.stdout.split())
    # The parameters are 32 MiB.
    assert after < before + 16 * 2**20


def test_libraries_that_other_processes_share_are_no_memory_of_the_model(
    tmp_path: pathlib.Path,
) -> None:
    library = tmp_path / "library"
    library.write_bytes(bytes(64 * 2**20))
    gauge = MemoryGauge([torch.device("cpu")])
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert gauge.host_peak() < 8 * 2**20


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


# --- the command -------------------------------------------------------------------------------

SMALL = ["bench", "train", "--cases", "deep", "--steps", "1"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("words", "contestants"),
    [
        (["--rounds", "2"], ["ours", "bare", "ddp"]),
        (
            ["--processes", "2", "--devices", "cpu", "--peers", "ddp", "--rounds", "2"],
            ["ours", "ddp"],
        ),
        (["--peers", "watched", "--loss", "replicas", "--rounds", "2"], ["ours", "watched"]),
    ],
)
def test_a_small_run(
    words: list[str],
    contestants: list[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "results.json"
    assert cli.main([*SMALL, *words, "--json", str(target)]) == 0
    text = capsys.readouterr().out
    assert "✗" not in text and text.count("), worst ") == len(contestants) - 1
    result = json.loads(target.read_text())
    assert list(tmp_path.iterdir()) == [target]
    (case,) = result["cases"]
    assert case["steps_per_round"] == 1
    assert [row["contestant"] for row in case["rows"]] == contestants
    assert all(row["agrees"] and len(row["rounds"]) == 2 for row in case["rows"])
    assert [each["time_mean"]["median"] > 0 for each in result["comparisons"]] == [True] * (
        len(contestants) - 1
    )


def test_a_small_run_on_virtual_devices_in_processes_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--rounds", "1", "--devices", "virtual:0,virtual:1", "--mode", "forward"]
    assert cli.main([*SMALL, *words, "--json", "-"]) == 0
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    assert [row["contestant"] for row in case["rows"]] == ["ours", "bare"]
    assert all(row["agrees"] and row["device_bytes"] > 0 for row in case["rows"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "2", "--wrapper", "dp"], "DataParallel is for one process"),
        (["--processes", "2", "--devices", "0,1"], "only the CPU can be shared so"),
        (["--devices", "virtual:0", "--peers", "ddp"], "no process group for virtual devices"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "train", *words]) == 2
    assert message in capsys.readouterr().err
