"""`dataparallel bench train`: its plan, its conclusions, and small runs of the real thing."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import mmap
import multiprocessing
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

from dataparallel.tools import cli
from dataparallel.tools.bench import harness, output, results
from dataparallel.tools.bench.cases import CASES, criterion, whole_batch
from dataparallel.tools.bench.harness import Contestant, Outcome, Spread, plan_contestants
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.trainer import Trainer, TrainTask

MIB = 2**20

# --- plan --------------------------------------------------------------------------------------


def plan(devices: list[list[str]], peers: list[str]) -> tuple[Contestant, ...]:
    task = TrainTask("ours", (), case="deep", batch=64, meeting_point="/nowhere")
    return plan_contestants(task, devices, peers)


def test_peers_are_planned_as_torch_has_them() -> None:
    contestants = plan([["a", "b"], ["c", "d"]], ["ddp", "bare", "cores", "watched"])
    cores = len(os.sched_getaffinity(0))
    assert [each.title for each in contestants] == [
        *("our DDP 2x2", "torch DDP 4x1", "bare module"),
        *(f"bare, {cores} threads", "our DDP 2x2, watched"),
    ]
    ours, ddp, bare, all_cores, watched = ([t.devices for t in each.tasks] for each in contestants)
    assert ours == watched == [("a", "b"), ("c", "d")]
    assert ddp == [("a",), ("b",), ("c",), ("d",)] and bare == all_cores == [("a",)]
    assert [each.tasks[0].threads for each in contestants] == [1, 1, 1, cores, 1]
    for each in contestants:
        assert [task.rank for task in each.tasks] == list(range(len(each.tasks)))
        assert {task.world_size for task in each.tasks} == {len(each.tasks)}
        assert {task.replicas for task in each.tasks} == {4}
        # They are alive at the same time and must not meet each other.
        assert {task.meeting_point for task in each.tasks} == {f"/nowhere-{each.name}"}
    alone = plan([["cpu"]], ["ddp", "bare"])
    assert [task.joins for each in alone for task in each.tasks] == [False, True, False]
    assert all(task.joins for task in contestants[0].tasks)


def test_the_batch_is_rounded_down_to_equal_parts() -> None:
    assert whole_batch("deep", 3) == 63
    with pytest.raises(ValueError, match="'deep' has 64 samples, but there are 65 replicas"):
        whole_batch("deep", 65)


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_a_loss(name: str) -> None:
    with torch.device("meta"):
        inputs, targets = CASES[name].data(2)
        assert criterion(CASES[name].build()(inputs), targets).shape == ()


# --- worker processes --------------------------------------------------------------------------


class Talkative:
    """Prints while it measures, and ends its process without a word if it is to repeat 13 times."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self, steps: int) -> dict[str, int]:
        return {"rank": self.rank, "checked": steps}

    def run(self, steps: int) -> dict[str, list[float]]:
        print("ran", flush=True)
        if steps == 13:
            os._exit(7)
        # Process 1 is slower, but for one repetition.
        return {"step": [0.1] * steps if self.rank else [0.05] * (steps - 1) + [100.0]}

    def finish(self) -> dict[str, int]:
        return {"finished": self.rank}


def begin(fields: dict[str, Any]) -> Talkative:
    """What a worker of these tests measures with."""
    os.system("echo made")
    if fields["rank"] == 2:
        raise KeyError("no such rank")
    return Talkative(fields["rank"])


@dataclasses.dataclass(frozen=True)
class TalkativeTask(harness.Task):
    module = __name__


def teams(*names: str) -> list[Contestant]:
    task = TalkativeTask("bare", ("cpu",))
    return [harness.team_of(task, "bare", [["cpu"]] * 2, name, name) for name in names]


@pytest.mark.usefixtures("forked_workers")
def test_contestants_take_turns_round_by_round(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, int]] = []
    tell = lambda what, begun: told.append((what, begun))  # noqa: E731
    outcomes, steps = harness.measure("x", teams("ours", "bare"), 2, 7, tell)
    assert told == [
        *(("x: starting ours", 0), ("x: starting bare", 0)),
        *((f"x: round {i} of 2, {name}", 1) for i in (1, 2) for name in ("ours", "bare")),
        ("x: checking", 0),
    ]
    for outcome in outcomes:
        # The median of repetitions, each as slow as its slowest process.
        assert outcome.seconds == {"step": (0.1, 0.1)}
        assert outcome.checked == [{"rank": rank, "checked": 3} for rank in (0, 1)]
        assert outcome.finished == [{"finished": 0}, {"finished": 1}]
    assert steps == 7
    for turn, expected in ((0.5, 5), (0.01, 3), (1e6, 200)):
        monkeypatch.setattr(harness, "_TURN", turn)
        assert harness.measure("x", teams("ours"), 1, None)[1] == expected
    # What libraries print must not mix with results.
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_fails_ends_the_measurement() -> None:
    before = {*multiprocessing.active_children()}
    with pytest.raises(harness.WorkerError, match=r"worker b \(process 0\) ended with status 7"):
        harness.measure("x", teams("b"), 1, 13)
    assert {*multiprocessing.active_children()} <= before
    failing = harness.Worker(TalkativeTask("bare", ("cpu",), rank=2), "c (process 2)")
    with pytest.raises(harness.WorkerError, match=r"worker c .* did not answer within 0 s"):
        failing.answer(0.0)
    told = r"(?s)worker c \(process 2\) has failed:.*no such rank"
    with pytest.raises(harness.WorkerError, match=told):
        failing.answer(60)
    failing.close()


# --- conclusions -------------------------------------------------------------------------------


def measured(
    name: str,
    *seconds: float,
    loss: float = 2.0,
    norm: float = 1.0,
    memory: tuple[int, int] = (MIB, 0),
    processes: int = 1,
) -> Outcome:
    said = {"losses": [3.0, loss], "gradient_norms": [1.5, norm]}
    finished = dict(zip(("host_bytes", "device_bytes"), memory, strict=True))
    who = Contestant(name, f"the {name}", ())
    return Outcome(who, [said], {"step": seconds}, [finished] * processes)


def table(*entries: Outcome) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80)
    console.print(results.build_table({"transformer (16)": results.summarize(entries)}, "title"))
    return file.getvalue()


def test_ratios_are_taken_within_each_round() -> None:
    ours, bare = measured("ours", 1.0, 10.0, 2.0), measured("bare", 2.0, 20.0, 3.0)
    first, second = results.summarize([ours, bare])
    assert first.seconds == Spread(2.0, 1.0, 10.0)
    assert first.speedup == Spread(2.0, 1.5, 2.0)
    assert second.ours_over_this == Spread(0.5, 0.5, 2.0 / 3.0)
    without_bare = results.summarize([ours, measured("ddp", 1, 1, 1)])
    assert [row.speedup for row in without_bare] == [None, None]


@pytest.mark.parametrize(
    ("loss", "norm", "agrees"),
    [(2.0001, 1.0, True), (2.001, 1.0, False), (2.0, 1.01, False), (math.nan, 1.0, False)],
)
def test_other_losses_or_gradients_are_seen(loss: float, norm: float, agrees: bool) -> None:
    outcomes = measured("ours", 1.0, loss=loss, norm=norm), measured("bare", 1.0)
    assert [row.agrees for row in results.summarize(outcomes)] == [agrees, True]
    assert f"{loss:.4f} {'✓' if agrees else '✗'}" in table(*outcomes)


@pytest.mark.parametrize(
    ("ours", "other", "ratio"),
    [((3, 0), (4, 0), 0.75), ((3, 8), (4, 4), 2.0), ((3, 0), (0, 0), None)],
)
def test_memory_is_that_of_all_processes_where_the_tensors_are(
    ours: tuple[int, int], other: tuple[int, int], ratio: float | None
) -> None:
    pair = ("ours", ours), ("ddp", other)
    rows = results.summarize([measured(n, 1.0, memory=m, processes=2) for n, m in pair])
    assert (rows[0].host_bytes, rows[0].device_bytes) == (2 * ours[0], 2 * ours[1])
    assert rows[1].memory_ratio == ratio


@pytest.mark.parametrize(("memory", "told"), [(2, "; memory 1.000"), (0, "")])
def test_the_mean_over_the_cases_is_geometric_and_the_worst_case_is_named(
    memory: int, told: str
) -> None:
    cases = {}
    for name, time, own in (("a", 0.5, memory), ("b", 2.0, 8)):
        ours = measured("ours", time, 1.1 * time, memory=(own, 0))
        cases[name] = results.summarize([ours, measured("ddp", 1.0, 1.0, memory=(4, 0))])
    expected = f"ours / the ddp: time 1.050 (1.00..1.10), worst 2.100 (b){told}"
    assert results.describe(results.compare(cases, "ddp")) == expected


def test_the_table_fits_into_80_columns_and_a_narrow_terminal_loses_no_digit() -> None:
    text = table(measured("ours", 1.0, 1.2, memory=(2**34, 2**35)), measured("bare", 2.0, 2.4))
    assert "…" not in text
    for told in ("1000..1200", "2.00", "32768", "2.0000 ✓"):
        assert told in text
    wide = output.new_table("times", "second", "third")
    figures = ["123456.78", "0.01..100.12", "98765 4321"]
    wide.add_row(*figures)
    console = Console(width=20, file=io.StringIO())
    output.print_table(wide, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(figure in shown for figure in figures) and console.width == 20


# --- one process -------------------------------------------------------------------------------


@pytest.fixture
def intra_op_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("intra_op_threads")
def test_the_check_agrees_on_batch_norm_and_sees_a_wrong_gradient() -> None:
    figures = []
    options: dict[str, Any] = {"replicas": 2, "case": "conv", "batch": 4, "optimizer": "adamw"}
    for kind, scale in (("bare", 1.0), ("ours", 1.0), ("ours", 1.01)):
        one = Trainer(TrainTask(kind, ("cpu", "cpu"), **options))  # type: ignore[arg-type]
        # The outputs stay as they are, and the gradients are multiplied.
        one.module.register_forward_hook(
            lambda module, args, out, scale=scale: scale * out - (scale - 1.0) * out.detach()
        )
        figures.append(one.check(2))
        assert len(one.run(1)["step"]) == 1
        assert one.finish()["host_bytes"] > 0
    assert results.agree(figures[1], figures[0])
    assert not results.agree(figures[2], figures[0])


def test_memory_that_came_and_went_is_in_the_peak() -> None:
    gauge = MemoryGauge([torch.device("cpu")])
    del_me = torch.ones(64 * MIB // 4)
    del del_me
    assert 60 * MIB < gauge.host_peak() < 100 * MIB
    assert gauge.device_peak() == 0


def test_libraries_that_other_processes_share_are_no_memory_of_the_model(
    tmp_path: pathlib.Path,
) -> None:
    library = tmp_path / "library"
    library.write_bytes(bytes(64 * MIB))
    gauge = MemoryGauge([torch.device("cpu")])
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert gauge.host_peak() < 8 * MIB


# --- the command -------------------------------------------------------------------------------

SMALL = ["bench", "train", "--cases", "deep", "--steps", "1", "--rounds", "2"]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("words", "contestants"),
    [
        ("--processes 2 --devices cpu", ["ours", "bare", "cores", "ddp"]),
        ("--wrapper dp --peers watched --loss replicas", ["ours", "watched"]),
    ],
)
def test_a_small_run(
    words: str, contestants: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    assert cli.main([*SMALL, *words.split(), "--json", str(target)]) == 0
    text = capsys.readouterr().out
    assert "✗" not in text and text.count("), worst ") == len(contestants) - 1
    assert "case (batch): medians of 2 interleaved rounds" in text
    result = json.loads(target.read_text())
    assert list(tmp_path.iterdir()) == [target]
    (case,) = result["cases"]
    assert case["steps_per_round"] == 1
    assert [row["contestant"] for row in case["rows"]] == contestants
    assert all(row["agrees"] and len(row["rounds"]) == 2 for row in case["rows"])
    means = [each["time_mean"]["median"] for each in result["comparisons"]]
    assert len(means) == len(contestants) - 1 and min(means) > 0


@pytest.mark.slow
def test_a_small_run_on_virtual_devices_in_processes_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*SMALL, "--devices", "virtual:0,virtual:1", "--json", "-"]) == 0
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    assert [row["contestant"] for row in case["rows"]] == ["ours", "bare"]
    assert all(row["agrees"] and row["device_bytes"] > 0 for row in case["rows"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--processes 2 --wrapper dp", "DataParallel is for one process"),
        ("--processes 2 --devices 0,1", "only the CPU can be shared so"),
        ("--devices virtual:0 --peers ddp", "no process group for virtual devices"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "train", *words.split()]) == 2
    assert message in capsys.readouterr().err
