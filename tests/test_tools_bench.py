"""`dataparallel bench train`, and what all benchmarks share: workers, rounds, memory."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch

from dataparallel.tools import cli
from dataparallel.tools.bench import harness, results, runner
from dataparallel.tools.bench.cases import CASES, criterion
from dataparallel.tools.bench.harness import Contestant, Outcome
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.trainer import TrainTask

MIB = 2**20

# --- worker processes --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Talkative(harness.Task):
    """Prints while it measures, and ends its process without a word if it is to repeat 13 times."""

    def begin(self) -> Talkative:
        os.system("echo made")
        if self.kind == "ddp":
            raise KeyError("no such kind")
        return self

    def check(self, steps: int) -> dict[str, Any]:
        return {"place": (self.rank, self.world_size, self.devices), "checked": steps}

    def run(self, steps: int) -> dict[str, list[float]]:
        print("ran", flush=True)
        if steps == 13:
            os._exit(7)
        # Process 1 is slower, but for one repetition.
        return {"step": [0.1] * steps if self.rank else [0.05] * (steps - 1) + [100.0]}

    def finish(self) -> dict[str, Any]:
        return {"met": self.meeting_point, "lock": os.environ.get("PYTHON_GIL")}


def teams(*names: str, kind: harness.Kind = "bare") -> list[Contestant]:
    task = Talkative("ours", ())
    return [harness.team_of(task, kind, [["a"], ["b"]], name, name) for name in names]


@pytest.mark.usefixtures("forked_workers")
def test_contestants_take_turns_round_by_round(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, int]] = []
    tell = lambda what, begun: told.append((what, begun))  # noqa: E731
    outcomes = harness.measure("x", teams("ours", "bare"), 2, 7, tell)
    assert told == [
        *(("x: starting ours", 0), ("x: starting bare", 0)),
        *((f"x: round {i} of 2, {name}", 1) for i in (1, 2) for name in ("ours", "bare")),
        ("x: checking", 0),
    ]
    for outcome in outcomes:
        # The median of repetitions, each as slow as its slowest process.
        assert outcome.seconds == {"step": (0.1, 0.1)} and outcome.steps == 7
        places = [(0, 2, ("a",)), (1, 2, ("b",))]
        assert outcome.checked == [{"place": each, "checked": 3} for each in places]
    # They are alive at the same time, and processes must meet those of their own contestant.
    met = [{each["met"] for each in outcome.finished} for outcome in outcomes]
    assert list(map(len, met)) == [1, 1] and met[0] != met[1]
    for turn, expected in ((1e-9, 3), (1e6, 200)):
        monkeypatch.setattr(harness, "_TURN", turn)
        assert harness.measure("x", teams("ours"), 1, None)[0].steps == expected
    # The output of libraries must not mix with results.
    assert capfd.readouterr().out == ""


def test_only_the_locked_contestant_starts_with_the_interpreters_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    plan = harness.plan_contestants(Talkative("ours", ()), [["cpu"]], ["locked", "bare"])
    outcomes = harness.measure("x", plan, 1, 1)
    assert [each.finished[0]["lock"] for each in outcomes] == [None, "1", None]


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*multiprocessing.active_children()}
    with pytest.raises(harness.ContestantError, match="worker 0 of b ended with status 7"):
        harness.measure("x", teams("b"), 1, 13)
    with pytest.raises(
        harness.ContestantError, match=r"(?s)worker 0 of c has failed:.*no such kind"
    ):
        harness.measure("x", teams("c", kind="ddp"), 1, 1)
    monkeypatch.setattr(harness, "_TIMEOUT", 0.0)
    with pytest.raises(harness.ContestantError, match="worker 0 of d did not answer within 0 s"):
        harness.measure("x", teams("d"), 1, 1)
    assert {*multiprocessing.active_children()} <= before


# --- conclusions -------------------------------------------------------------------------------

Command: TypeAlias = Callable[..., tuple[int, str, dict[str, Any], list[Contestant]]]


@pytest.fixture
def train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command, where measurements are given: status, text, JSON, and who takes part."""

    def call(
        words: str,
        seconds: Callable[[str, str], Sequence[float]] = lambda case, who: (1.0,),
        memory: Callable[[str], tuple[int, int]] = lambda who: (MIB, 0),
        said: tuple[float, float] = (2.0, 1.0),
    ) -> tuple[int, str, dict[str, Any], list[Contestant]]:
        seen: list[Contestant] = []

        def measure(case: str, who: Sequence[Contestant], *_: Any) -> list[Outcome]:
            seen.extend(who)
            return [outcome(case, each) for each in who]

        def outcome(case: str, who: Contestant) -> Outcome:
            loss, norm = said if who.name == "ours" else (2.0, 1.0)
            checked = {case: {"losses": [3.0, loss], "gradient_norms": [1.5, norm]}}
            peaks = dict(zip(("host_bytes", "device_bytes"), memory(who.name), strict=True))
            times = {f"{case} finished": tuple(seconds(case, who.name))}
            return Outcome(who, [checked], times, [peaks] * len(who.tasks))

        monkeypatch.setattr(runner, "measure", measure)
        target = tmp_path / "results.json"
        status = cli.main(["bench", "train", *words.split(), "--json", str(target)])
        return status, capsys.readouterr().out, json.loads(target.read_text()), seen

    return call


def test_peers_are_planned_as_torch_has_them(train: Command) -> None:
    words = "--cases deep --processes 2 --devices cpu,cpu,cpu --peers ddp,bare,cores,watched,locked"
    _, _, result, contestants = train(words)
    cores = len(os.sched_getaffinity(0))
    # The batch of 64 is rounded down to equal parts.
    assert result["cases"][0]["title"] == "deep (60)"
    assert [each.title for each in contestants] == [
        *("our DDP 2x3", "torch DDP 6x1", "bare module"),
        *(f"bare, {cores} threads", "our DDP 2x3, watched", "our DDP 2x3, locked"),
    ]
    assert [[len(t.devices) for t in each.tasks] for each in contestants] == [
        *([3, 3], [1] * 6, [1], [1], [3, 3], [3, 3])
    ]
    assert [each.tasks[0].threads for each in contestants] == [1, 1, 1, cores, 1, 1]
    for each in contestants:
        assert {task.replicas for task in each.tasks} == {6}
        assert [task.rank for task in each.tasks] == list(range(len(each.tasks)))
    (_, alone) = train("--cases deep --devices cpu --peers ddp")[3]
    assert [task.joins for task in alone.tasks] == [True]


def test_ratios_are_taken_within_each_round_and_means_over_cases_are_geometric(
    train: Command,
) -> None:
    times = {
        ("mlp", "ours"): (0.5, 5.0, 1.0),
        ("mlp", "bare"): (1.0, 10.0, 1.5),
        ("deep", "ours"): (2.0, 2.2, 2.4),
    }
    status, text, result, _ = train(
        "--cases mlp,deep --peers bare,ddp",
        lambda case, who: times.get((case, who), (1.0, 1.0, 1.0)),
        lambda who: {"ours": (3, 0), "bare": (4, 0), "ddp": (0, 0)}[who],
    )
    assert status == 0 and "✗" not in text
    bare, ddp = result["comparisons"]
    assert bare["times"]["mlp (256)"] == {"median": 0.5, "low": 0.5, "high": pytest.approx(2 / 3)}
    assert bare["memory"] == {"mlp (256)": 0.75, "deep (64)": 0.75} and ddp["memory"] == {}
    ours = result["cases"][0]["rows"][0]
    assert ours["seconds"]["finished"] == {"median": 1.0, "low": 0.5, "high": 5.0}
    assert ours["rounds"]["finished"] == [0.5, 5.0, 1.0] and ours["over_bare"]["median"] == 0.5
    worst = "worst 2.200 (deep (64))"
    assert f"ours / bare module: time 1.049 (1.00..1.26), {worst}; memory 0.750\n" in text
    assert f"ours / torch DDP 2x1: time 1.483 (1.00..3.46), {worst}\n" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["our", "DDP", "1x2", "1000", "500..5000", "2.00", "0", "2.0000", "✓"] in rows
    assert ["bare", "module", "1500", "1000..10000", "0.50", "0", "2.0000", "✓"] in rows


@pytest.mark.parametrize(
    ("loss", "norm", "agrees"),
    [(2.0001, 1.0, True), (2.001, 1.0, False), (2.0, 1.01, False), (math.nan, 1.0, False)],
)
def test_other_losses_or_gradients_are_seen(
    loss: float, norm: float, agrees: bool, train: Command
) -> None:
    status, text, result, _ = train("--cases mlp --peers bare", said=(loss, norm))
    assert f"{loss:.4f} {'✓' if agrees else '✗'}" in text and status == int(not agrees)
    assert [row["agrees"] for row in result["cases"][0]["rows"]] == [agrees, True]


def test_memory_is_that_of_all_processes_where_the_tensors_are_and_fits_into_the_table(
    train: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    words = "--cases transformer --peers ddp"
    memory: dict[str, tuple[int, int]] = {"ours": (2**34, 2**35), "ddp": (2**34, 2**33)}
    _, text, result, _ = train(words, lambda case, who: (1.0, 1.234), memory.__getitem__)
    assert result["comparisons"][0]["memory_mean"] == 2.0
    ddp = result["cases"][0]["rows"][1]
    assert (ddp["host_bytes"], ddp["device_bytes"]) == (2**35, 2**34)
    # In a terminal that is too narrow no digit is lost, and 80 columns are enough.
    table = text[: text.index("ours / torch")]
    assert max(map(len, table.splitlines())) <= 80
    for told in ("1000..1234", "32768", "16384", "2.0000 ✓"):
        assert told in table


# --- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_a_loss(name: str) -> None:
    with torch.device("meta"):
        inputs, targets = CASES[name].data(2)
        assert criterion(CASES[name].build()(inputs), targets).shape == ()


def test_the_check_agrees_on_batch_norm_and_sees_a_wrong_gradient() -> None:
    threads = torch.get_num_threads()
    figures = []
    options: dict[str, Any] = {"replicas": 2, "batch": 4, "optimizer": "adamw"}
    for kind, scale in (("bare", 1.0), ("ours", 1.0), ("ours", 1.01)):
        one = TrainTask(kind, ("cpu", "cpu"), cases=("conv",), **options).begin()  # type: ignore[arg-type]
        # The outputs stay as they are, and the gradients are multiplied.
        one.steps["conv"].model.register_forward_hook(
            lambda module, args, out, scale=scale: scale * out - (scale - 1.0) * out.detach()
        )
        figures.append(one.check(2)["conv"])
        assert len(one.run(1)["conv finished"]) == 1
        assert one.finish()["host_bytes"] > 0
    assert results.agree(figures[1], figures[0])
    assert not results.agree(figures[2], figures[0])
    torch.set_num_threads(threads)


def test_memory_that_came_and_went_is_in_the_peak_and_shared_libraries_are_not(
    tmp_path: pathlib.Path,
) -> None:
    library = tmp_path / "library"
    library.write_bytes(bytes(64 * MIB))
    gauge = MemoryGauge([torch.device("cpu")])
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert gauge.host_peak() < 8 * MIB
    del_me = torch.ones(64 * MIB // 4)
    del del_me
    assert 60 * MIB < gauge.host_peak() < 100 * MIB
    assert gauge.device_peak() == 0


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
    assert case["steps_per_round"] == 1 and result["setting"]["rounds"] == 2
    assert [row["contestant"] for row in case["rows"]] == contestants
    assert all(row["agrees"] and len(row["rounds"]["finished"]) == 2 for row in case["rows"])


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
        ("train --processes 2 --wrapper dp", "DataParallel is for one process"),
        ("train --processes 2 --devices 0,1", "only the CPU can be shared so"),
        ("train --devices virtual:0 --peers ddp", "no process group for virtual devices"),
        ("train --cases conv --processes 33 --devices cpu", "'conv' has 32 samples, but there are"),
        ("host --parameters 7", "--parameters takes even numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err
