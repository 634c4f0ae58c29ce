"""The ranks of a job beside each other: live, in recordings of several machines, and for real."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from dataparallel import DistributedDataParallel
from dataparallel.monitor import StepMonitor, attach
from dataparallel.monitor.run import RunState
from dataparallel.monitor.summary import Summary
from dataparallel.tools.cli import main
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.ranks import find_in_job, find_slow_rank, run_name
from dataparallel.tools.monitor.recorder import SampleRecorder
from dataparallel.tools.monitor.recording import Recording
from dataparallel.tools.monitor.replica_lines import replica_lines
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.report_command import print_report
from dataparallel.tools.monitor.run_period import RunPeriod, summarize_periods
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.server import Request
from dataparallel.tools.monitor.site import routes
from tests.cluster import Cluster
from tests.monitor.cases import (
    BEGIN,
    BUSY,
    FakeRun,
    Seconds,
    device,
    history_of,
    make_info,
    opened,
    recording,
    sample,
    write_recording,
)
from tests.monitor.cases import run_folder as run_folder
from tests.monitor.golden import Golden
from tests.monitor.test_serve import exposed


def rank(place: int, *replicas: Seconds, steps: int = 10, **changes: Any) -> FakeRun:
    """Return a rank of four, two on each machine, after some steps."""
    info = make_info(len(replicas), device="cuda", world_size=4)
    host = f"node{place // 2}"
    found: dict[str, Any] = {"pid": 100 + place % 2, "rank": place, "host": host, **changes}
    run = FakeRun(info, **found)
    run.steps(steps, replicas)
    return run


def waits(seconds: float, **more: float) -> Seconds:
    return cast(Seconds, {**BUSY, "reduce across processes": seconds, **more})


def summary(run: FakeRun) -> Summary:
    return summarize_periods([RunPeriod((0,), (run.state(),), is_whole=True)])


# --- names ---------------------------------------------------------------------------------------


def test_names_tell_runs_from_each_other() -> None:
    def named(*runs: FakeRun) -> list[str]:
        states = [run.state() for run in runs]
        return [run_name(state, states) for state in states]

    first, second = rank(0, BUSY), rank(1, BUSY)
    alone = FakeRun(pid=7, job="b")
    again = rank(0, BUSY, number=1)
    critic = FakeRun(dataclasses.replace(first.info, model="Critic"), pid=100, number=2)
    assert named(first) == [""]
    assert named(first, second) == ["rank 0", "rank 1"]
    assert named(first, second, alone) == [
        "rank 0 of node0:29500",
        "rank 1 of node0:29500",
        "process 7",
    ]
    critic.changes["host"] = "node0"
    assert named(first, again, critic) == ["Net 1", "Net 2", "Critic"]
    assert named(first, again, second) == ["rank 0, Net 1", "rank 0, Net 2", "rank 1"]


# --- which rank is slow --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # All wait for the fourth: to compute, for its input, or for one of its replicas.
        ([[waits(1.0)]] * 3 + [[{"forward": 1.4, "backward": 0.6}]], (3, "forward", 0.5)),
        ([[waits(2.1)]] * 2 + [[waits(0.1, input=2.0)], [waits(2.0)]], (2, "input", 0.645)),
        ([[waits(0.6)] * 2, [BUSY, {**BUSY, "loss": 0.6}]], (1, "loss", 0.375)),
        # They are even, or nearly, or there is one.
        ([[waits(0.5)]] * 4, None),
        ([[waits(0.52)], [waits(0.5, optimizer=0.02)]], None),
        ([[waits(0.5)]], None),
        # A device that is slow in everything.
        ([[waits(1.2, optimizer=0.2)], [{"forward": 0.8, "backward": 1.2}]], (1, "backward", 0.4)),
        # The phases do not account for it: by chance they are late now here, now there.
        ([[waits(0.5)], [{**BUSY, "idle": 0.5}]], None),
        # If nobody tells its waiting, that is within the backward.
        (
            [[{"forward": 0.4, "backward": 1.6}], [{"forward": 1.4, "backward": 0.6}]],
            (1, "forward", 0.5),
        ),
    ],
)
def test_which_rank_is_slow_and_in_what(
    ranks: Sequence[Sequence[Seconds]], expected: tuple[int, str, float] | None
) -> None:
    found = find_slow_rank({i: summary(rank(i, *seconds)) for i, seconds in enumerate(ranks)})
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        number, phase, gain = expected
        assert found.text.startswith(f"Rank {number} is slow in '{phase}': ")
        assert found.gain == pytest.approx(gain, abs=0.01)


@pytest.mark.parametrize(("seconds", "expected"), [(1.5, "nothing"), (3.0, "input")])
def test_the_time_of_another_module_is_no_waiting_for_input(seconds: float, expected: str) -> None:
    """As of a generator and its critic: a step of the one lies between the steps of the other."""
    runs = [rank(0, {**BUSY, "input": seconds}, number=i) for i in range(2)]
    states = [run.state() for run in runs]
    (found,) = find_in_job([(run.state(), summary(run)) for run in runs], states)
    assert found.kind == expected and not found.text.startswith("All ranks")


def live(*samples: Sequence[RunState]) -> History:
    looks = enumerate(samples)
    return history_of(*(dataclasses.replace(sample(float(i)), runs=tuple(s)) for i, s in looks))


def test_a_job_is_shown_as_one_and_what_its_ranks_share_is_told_once(golden: Golden) -> None:
    late: Seconds = {**BUSY, "input": 2.0}
    runs = [rank(0, waits(2.0), waits(2.0)), rank(1, late, late), FakeRun(pid=7, job="z")]
    looks = []
    for _ in range(3):
        for run in runs[:2]:
            run.steps(5, [waits(2.0, input=0.6)] * 2 if run is runs[0] else [late] * 2)
        looks.append([run.state() for run in runs])
    history = live(*looks)
    kinds = {one.kind: one.text for one in find_alerts(history)}
    job = "node0:29500"
    assert kinds["slow rank"].startswith(
        f"Rank 1 of {job} is slow in 'input': its own work takes 3 s"
    )
    assert kinds["input"].startswith("All ranks: 17 % of each step")
    # A message that the others wait for is not sent too slowly.
    assert "communication hook" not in kinds
    # Five steps a second of 16 samples, on each of two ranks.
    lines = [line.plain for line in replica_lines(history.runs, None, 120)[0]]
    golden("ranks_in_top", {"two ranks of a job, and another job": "\n".join(lines)})


def test_modules_of_one_rank_are_given_the_same_samples() -> None:
    runs = [rank(0, BUSY), rank(0, BUSY, number=1), rank(1, BUSY)]
    store, samples = SampleStore(), []
    for i in range(3):
        for run in runs:
            run.steps(1, [BUSY])
        states = tuple(run.state(BEGIN + i) for run in runs)
        samples.append(dataclasses.replace(sample(float(i)), runs=states))
        store.add(samples[-1])
    # Each of two ranks has 8 in a second.
    (job,) = make_report(recording(samples)).jobs
    assert job.samples_per_second == pytest.approx(16.0)
    point = json.loads(store.after(0.0))["points"][-1]
    assert point["jobs"] == {"node0:29500": [16.0, 1.0]}


@pytest.mark.parametrize(
    ("second", "left"),
    [
        # It is missed where its job goes on without it, or where there is nothing else.
        ([], [(0, 1.0), (1, 1.0)]),
        ([rank(0, BUSY)], [(0, None), (1, 1.0)]),
        # Another process has taken its place.
        ([rank(0, BUSY), rank(1, BUSY, pid=7)], [(0, None), (1, None)]),
        # Another job goes on.
        ([FakeRun(job="b", rank=5)], [(5, None)]),
    ],
)
def test_which_runs_are_shown_when_they_are_gone(
    second: Sequence[FakeRun], left: list[tuple[int, float | None]]
) -> None:
    first = [rank(0, BUSY).state(), rank(1, BUSY).state()]
    history = live(first, [run.state() for run in second])
    assert [(run.state.rank, run.gone_for) for run in history.runs] == left
    told = [one for one in find_alerts(history) if one.kind == "run gone"]
    assert len(told) == sum(gone is not None for _, gone in left)
    if len(left) == 2 and left[0][1] is None and told:
        assert told[0].text.startswith("rank 1 (process 101) has been gone for 1 s")
        assert told[0].severity == "error"
    # All have ended, of several jobs, which is no fault.
    both = live([*first, FakeRun(job="b").state()], [])
    alerts = {(one.kind, one.severity) for one in find_alerts(both)}
    assert alerts == {("run gone", "info")} and len(both.runs) == 3


# --- recordings ----------------------------------------------------------------------------------


def recorded(*places: int) -> Recording:
    """Return one machine's recording of some ranks, of which the last of all is slow."""
    found = []
    runs = [rank(i, waits(1.0) if i < 3 else {**BUSY, "forward": 1.4}, steps=1) for i in places]
    for i in range(5):
        for run in runs:
            run.steps(4, [waits(1.0) if run.changes["rank"] != 3 else {**BUSY, "forward": 1.4}])
        states = tuple(run.state(BEGIN + i) for run in runs)
        found.append(dataclasses.replace(sample(float(i)), runs=states))
    return recording(found, f"node{places[0] // 2}")


def test_a_report_puts_the_ranks_of_several_machines_together(golden: Golden) -> None:
    report = make_report(recorded(2, 3), recorded(0, 1))
    assert [(one.rank, one.host) for one in report.runs] == [(i, f"node{i // 2}") for i in range(4)]
    (job,) = report.jobs
    assert (job.ranks, job.world_size) == ((0, 1, 2, 3), 4)
    # Four ranks of 8 samples in 2 s.
    assert job.samples_per_second == pytest.approx(16.0)
    assert report.advice == job.findings[0]
    out = io.StringIO()
    print_report(report, Console(file=out, width=120, color_system=None))
    golden("ranks_in_report", {"four ranks on two machines": out.getvalue()})
    # Jobs that look alike, at the same time.
    states = [FakeRun(pid=i, job=f"job {i}").state() for i in range(2)]
    samples = [dataclasses.replace(sample(float(i)), runs=tuple(states)) for i in range(2)]
    assert [one.job for one in make_report(recording(samples)).jobs] == ["job 0", "job 1"]
    # A part of them.
    (job,) = make_report(recorded(0, 1)).jobs
    assert (job.ranks, [one.kind for one in job.findings]) == ((0, 1), ["communication hook"])
    with pytest.raises(ValueError, match="the same recording is given twice"):
        make_report(recorded(0, 1), recorded(0, 1))


def test_the_commands_take_a_recording_of_each_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for i in range(2):
        part = recorded(2 * i, 2 * i + 1)
        readings = [dataclasses.replace(s, devices=(device(0, power=9.0),)) for s in part.samples]
        path = tmp_path / f"node{i}.jsonl"
        files.append(str(write_recording(path, readings, host=f"node{i}", recording=f"{i}")))
    assert main(["monitor", "report", *files]) == 0
    out = capsys.readouterr().out
    assert "node0 cuda:0" in out and "node1 cuda:0" in out and "4 of 4 ranks" in out


# --- metrics -------------------------------------------------------------------------------------


def test_series_of_ranks_modules_and_jobs_are_told_apart() -> None:
    """After two jobs, series keep the label of the job."""
    pair = [rank(0, BUSY).state(), rank(1, BUSY).state()]
    twice = [*pair, rank(1, BUSY, number=1).state()]
    several = [*pair, FakeRun(pid=7, job="b").state()]
    a, b = 'job="node0:29500",model="Net",rank=', 'job="b",model="Net",rank='
    for looks, expected in (
        ([pair], {'job="",model="Net",rank="0"': 1.0, 'job="",model="Net",rank="1"': 1.0}),
        (
            [twice],
            {f'job="",model="Net{n}",rank="{r}"': 1.0 for n, r in (("", 0), (" 1", 1), (" 2", 1))},
        ),
        (
            [pair, pair[:1]],
            {'job="",model="Net",rank="0"': 1.0, 'job="",model="Net",rank="1"': 0.0},
        ),
        ([several], {f'{a}"0"': 1.0, f'{a}"1"': 1.0, f'{b}"0"': 1.0}),
        ([several, pair], {f'{a}"0"': 1.0, f'{a}"1"': 1.0}),
    ):
        text = exposed(
            *(dataclasses.replace(sample(float(i)), runs=tuple(s)) for i, s in enumerate(looks))
        )
        found = re.findall(r"dataparallel_run_up{(.*)} (.*)", text)
        assert {labels: float(value) for labels, value in found} == expected


# --- a real job ----------------------------------------------------------------------------------


class Late(torch.nn.Module):
    """Its buffers are sent before each forward: already there the others wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def train(rank: int, world_size: int, folder: str) -> None:
    """Until there is a file "stop"; rank 0 says before which step, for both go in step.

    Rank 0 is late, by several times what its steps take beside, however busy the machine is.
    """
    os.environ[attach.VARIABLE] = folder
    model = DistributedDataParallel(Late(), ["cpu", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seconds = [0.01]
    with StepMonitor(model):
        for step in range(100_000):
            if (Path(folder) / f"end{step}").exists():
                return
            if rank == 0:
                if (Path(folder) / "stop").exists():
                    (Path(folder) / f"end{step + 1}").touch()
                time.sleep(4 * statistics.median(seconds))
            began = time.perf_counter()
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)


def test_a_job_of_two_processes_is_watched_by_everything_at_once(
    cluster: Cluster, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = threading.Thread(target=cluster.run, args=(train, 2, str(run_folder)))
    job.start()
    store, path = SampleStore(), run_folder / "run.jsonl"
    watch = ["--attach", "auto", "--source", "cpu"]
    shown: dict[str, Any] = {"runs": []}
    begin = 0
    try:
        # Their threads are there from the first step on.
        while sum(state.num_steps > 0 for state in attach.ask().states) < 2:
            assert job.is_alive()
            time.sleep(0.05)
        with opened(*watch, "--interval", "0.2") as sampler, SampleRecorder(path) as recorder:
            for one in sampler.samples():
                store.add(one)
                recorder.record(one)
                steps = [run.num_steps for run in one.runs if run.answers]
                begin = begin or max(steps, default=0)
                if len(shown["runs"]) < 2:
                    assert main(["monitor", "top", "--once", "--json", *watch]) == 0
                    shown = json.loads(capsys.readouterr().out)
                elif len(steps) == 2 and min(steps) > begin + 10:
                    break
    finally:
        (run_folder / "stop").touch()
        job.join()
    assert [(one["rank"], len(one["now"])) for one in shown["runs"]] == [(0, 2), (1, 2)]
    assert len({one["job"] for one in shown["runs"]}) == 1
    assert {"rank 0 main", "rank 1 replica-1"} <= set(shown["host"]["threads"])
    assert len({one["pid"] for one in shown["processes"]}) == 2
    capsys.readouterr()
    assert main(["monitor", "report", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    slow = report["jobs"][0]["findings"][0]
    assert (slow["kind"], slow["numbers"]["rank"]) == ("slow rank", 0)
    assert "Rank 0 is slow in 'input'" in slow["text"] and report["advice"] == slow
    page = json.loads(store.after(0.0))["sample"]
    assert page["advice"].startswith("Rank 0 is slow in 'input'")
    metrics = routes(store, 0.2)["/metrics"].answer(Request({}, {})).body.decode()
    for rank in "01":
        assert re.search(
            rf'run_steps_total{{job="",kind="train",model="Late",rank="{rank}"}} \d', metrics
        )
        for replica in "01":
            labels = (
                f'device="cpu",job="",model="Late",phase="input",rank="{rank}",replica="{replica}"'
            )
            assert f"replica_phase_seconds_total{{{labels}}}" in metrics
