"""`dataparallel bench collectives`: plan, conclusions, and small runs of the real thing."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import math
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from dataparallel.tools import cli
from dataparallel.tools.bench import (
    collectives,
    collectives_report,
    collectives_summary,
    collectives_tasks,
    collectives_timing,
    collectives_values,
)
from dataparallel.tools.bench.collectives_summary import CollectiveRow, MemoryRow
from dataparallel.tools.bench.collectives_tasks import CollectivesTask
from dataparallel.tools.bench.contestants import Contestant
from dataparallel.tools.bench.rounds import Outcome
from dataparallel.tools.bench.summary import Spread
from dataparallel.tools.bench.verdict import Verdict

# --- plan --------------------------------------------------------------------------------------


def task(*sizes: int, **fields: Any) -> CollectivesTask:
    return CollectivesTask("ours", (), sizes=sizes or (1024,), meeting_point="/nowhere/m", **fields)


def test_sizes_are_bytes_with_or_without_a_unit() -> None:
    assert collectives_tasks.sizes("64MiB, 1KiB,512,1KiB,2B") == [2, 512, 2**10, 2**26]
    assert collectives_tasks.sizes(collectives_tasks.SIZES) == [2**p for p in range(10, 27, 2)]
    for text in ("", "0", "1KB", "KiB", "-4", "1.5MiB"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size; say for example"):
            collectives_tasks.sizes(text)
    names = [collectives_tasks.size_name(size) for size in (12, 2**10, 1536, 2**28)]
    assert names == ["12 B", "1 KiB", "1536 B", "256 MiB"]


def test_small_sizes_are_repeated_more_often() -> None:
    sizes = [2**10, 2**20, 2**22]
    assert [collectives_tasks.repetitions(size, sizes, 3) for size in sizes] == [200, 12, 3]
    assert [collectives_tasks.repetitions(size, sizes, 500) for size in sizes] == [500] * 3


def test_inputs_can_be_divided_and_an_all_reduce_moves_each_twice() -> None:
    assert [collectives_tasks.elements(1024, members) for members in (2, 3)] == [256, 255]
    assert collectives_tasks.moved(1024, 2) == 2 * 2 * 1024
    assert collectives_tasks.moved(1024, 3) == 3 * 2 * 255 * 4


def plan(devices: list[str], *forms: str, size: int = 1024) -> tuple[Contestant, ...]:
    return collectives_tasks.plan_members(task(size, forms=forms), devices)


def test_replicas_meet_as_many_processes_and_threads() -> None:
    contestants = plan(["virtual:0", "virtual:1", "cpu"], "process", "local")
    assert [each.name for each in contestants] == ["local", "processes", "memory"]
    places = [[(t.kind, t.devices, t.rank, t.world_size) for t in c.tasks] for c in contestants]
    devices = ("virtual:0", "virtual:1", "cpu")
    assert places == [
        [("ours", devices, 0, 1)],
        [("ddp", ("cpu",), rank, 3) for rank in range(3)],
        [("bare", devices, 0, 1)],
    ]
    assert {t.replicas for c in contestants for t in c.tasks} == {3}


def test_only_what_is_compared_takes_part() -> None:
    assert [each.name for each in plan(["cpu", "cpu"], "process")] == ["processes"]
    contestants = plan(["cpu", "cpu"], "process", "hybrid")
    assert [each.name for each in contestants] == ["processes", "hybrid", "hybrid peers"]
    tasks = [each.tasks for each in contestants]
    assert [[t.rank for t in each] for each in tasks] == [[0, 1], [0, 1], [0, 1, 2, 3]]
    assert [each[0].replicas for each in tasks] == [2, 4, 4]
    # Contestants that are alive at the same time must not meet each other.
    assert len({each[0].meeting_point for each in tasks}) == 3
    assert all(t.joins for each in tasks for t in each)
    forms = [t.forms for each in tasks for t in each if isinstance(t, CollectivesTask)]
    assert [forms[0], forms[-1]] == [("process",), ("hybrid",)]


@pytest.mark.parametrize(
    ("devices", "form", "size", "message"),
    [
        (["cpu"], "local", 1024, "needs two members or more, but got --devices cpu"),
        (["cpu"] * 3, "local", 8, "8 bytes are too few for 3 members, which need at least 12"),
        (["cpu"] * 2, "hybrid", 8, "8 bytes are too few for 4 members"),
        (["0", "1"], "hybrid", 1024, "2 processes the same devices 0, 1; only the CPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    devices: list[str], form: str, size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(devices, form, size=size)


# --- values ------------------------------------------------------------------------------------


def test_known_results_are_those_of_plain_sums_and_pieces() -> None:
    inputs = [collectives_values.known_input(600, member) for member in range(3)]
    total = inputs[0] + inputs[1] + inputs[2]
    assert [each.unique().numel() for each in inputs] == [251] * 3
    for rank in range(3):
        mine = slice(rank * 200, rank * 200 + 200)
        expected = {
            "all_reduce": total,
            "all_gather_tensor": torch.cat(inputs),
            "reduce_scatter_tensor": total[mine],
            "all_to_all_single": torch.cat([each[mine] for each in inputs]),
        }
        assert list(expected) == list(collectives_tasks.OPERATIONS)
        for operation, result in expected.items():
            known = collectives_values.known_result(operation, 600, rank, 3)
            assert torch.equal(known, result), operation
    with pytest.raises(ValueError, match="no result is known for 'reduce'"):
        collectives_values.known_result("reduce", 600, 0, 3)


def test_errors_of_results_are_seen() -> None:
    expected = torch.tensor([1.0, 2.0])
    wrong = torch.tensor([1.0, 2.5])
    assert collectives_values.largest_error(expected.clone(), expected) == 0.0
    assert collectives_values.largest_error(wrong, expected) == 0.5
    assert collectives_values.largest_error(wrong[:1], expected) == math.inf
    assert math.isnan(collectives_values.largest_error(wrong * math.nan, expected))


# --- timing ------------------------------------------------------------------------------------


def test_threads_repeat_at_the_same_time_and_the_slowest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = threading.Barrier(2)
    done = {0: 0, 1: 0}

    def call(thread: int) -> None:
        # Nobody gets past this alone.
        meeting.wait(60)
        done[thread] += 1

    def seconds_of(call: Any, wait: Any) -> float:
        call()
        return 1.0 + call.args[0] if done[call.args[0]] == 2 else 0.5

    monkeypatch.setattr(collectives_timing, "seconds_of", seconds_of)
    calls = [functools.partial(call, thread) for thread in range(2)]
    found = collectives_timing.time_together(calls, [torch.device("cpu")] * 2, 3)
    assert found == [0.5, 2.0, 0.5]
    assert done == {0: 3, 1: 3}


def test_a_call_ends_when_the_device_has_finished() -> None:
    said: list[str] = []
    seconds = collectives_timing.seconds_of(
        lambda: said.append("call"), lambda: said.append("wait")
    )
    assert seconds > 0.0
    assert said == ["call", "wait"]
    assert collectives_timing.wait_for(torch.device("cpu")) is None
    assert collectives_timing.wait_for(torch.device("virtual:0")) is not None


# --- conclusions -------------------------------------------------------------------------------


def outcome(
    name: str, seconds: Mapping[str, tuple[float, ...]], *errors: float, members: int = 2
) -> Outcome:
    said = [{"errors": dict.fromkeys(seconds, error)} for error in errors or (0.0, 0.0)]
    tasks = (dataclasses.replace(task(), replicas=members),)
    return Outcome(Contestant(name, name, tasks), said[:1], seconds, said[1:])


def test_replicas_are_compared_with_their_own_peers() -> None:
    key = "all_reduce 1024"
    outcomes = {
        "local": outcome("local", {f"local {key}": (1.0, 3.0)}),
        "processes": outcome("processes", {f"gloo {key}": (2.0, 2.0)}),
        "hybrid": outcome("hybrid", {f"hybrid {key}": (1.0, 1.0)}),
        "hybrid peers": outcome("hybrid peers", {f"gloo {key}": (4.0, 4.0)}),
    }
    (row,) = collectives_summary.summarize_replicas(task(), "local", outcomes)
    assert row.agrees
    assert (row.ours, row.torch) == (Spread(2.0, 1.0, 3.0), Spread(2.0, 2.0, 2.0))
    assert row.ratio == Spread(1.0, 0.5, 1.5)
    (row,) = collectives_summary.summarize_replicas(task(), "hybrid", outcomes)
    assert row.ratio == Spread(0.25, 0.25, 0.25)


@pytest.mark.parametrize("errors", [(1.0, 0.0), (0.0, math.nan), (math.inf, 0.0)])
@pytest.mark.parametrize("wrong", ["local", "processes"])
def test_a_wrong_result_of_any_member_is_seen(errors: tuple[float, ...], wrong: str) -> None:
    forms = {"local": "local", "processes": "gloo"}
    outcomes = {
        name: outcome(name, {f"{form} all_reduce 1024": (1.0,)}, *(errors * (name == wrong)))
        for name, form in forms.items()
    }
    (row,) = collectives_summary.summarize_replicas(task(), "local", outcomes)
    assert not row.agrees


def test_operations_of_processes_are_compared_size_by_size() -> None:
    operations = "all_reduce", "all_to_all_single"
    seconds = {
        f"{form} {operation} {size}": (value * size,)
        for form, value in (("ours", 3.0), ("torch", 2.0))
        for operation in operations
        for size in (8, 16)
    }
    given = task(8, 16, operations=operations), outcome("processes", seconds)
    rows = collectives_summary.summarize_process(*given)
    assert [(row.operation, row.size) for row in rows] == [
        (operation, size) for operation in operations for size in (8, 16)
    ]
    assert [row.ours.median for row in rows] == [24.0, 48.0] * 2
    assert {row.ratio.median for row in rows} == {1.5}


def test_an_all_reduce_uses_a_share_of_the_better_of_copy_and_sum() -> None:
    # Three members with 1020 bytes each: 6120 bytes for a copy, half as much again for a sum.
    memory = {"memory copy 1024": (1.0, 6.0), "memory sum 1024": (3.0, 3.0)}
    outcomes = {
        "local": outcome("local", {"local all_reduce 1024": (2.0, 12.0)}),
        "processes": outcome("processes", {"gloo all_reduce 1024": (10.0, 20.0)}),
        "memory": outcome("memory", memory, members=3),
    }
    (row,) = collectives_summary.summarize_memory(task(), outcomes)
    assert row.copy == Spread(3570.0, 1020.0, 6120.0)
    assert row.sum == Spread(3060.0, 3060.0, 3060.0)
    # First round: 3060 of 6120 (the copy); second: 510 of 3060 (the sum).
    assert row.ours == Spread((1 / 2 + 1 / 6) / 2, 1 / 6, 1 / 2)
    assert row.torch == Spread(0.1, 0.1, 0.1)


def collective(operation: str, size: int, *ratio: float) -> CollectiveRow:
    slow = Spread(1.1e-3, 1.0e-3, 1.2e-3)
    return CollectiveRow(operation, size, slow, slow, Spread(*ratio), 0.0)


def test_each_operation_has_a_geometric_mean_and_a_bar() -> None:
    rows = [
        collective("all_reduce", 1, 0.1, 0.1, 0.4),
        collective("all_reduce", 2, 0.4, 0.1, 0.4),
        collective("all_gather_tensor", 1, 3.0, 2.0, 4.0),
    ]
    first, second = collectives_summary.judge(rows, 0.5)
    assert (first.value, first.low, first.high) == pytest.approx((0.2, 0.1, 0.4))
    assert (second.case, first.met, second.met) == ("all_gather_tensor", True, False)
    assert [each.met for each in collectives_summary.judge(rows, None)] == [None, None]


# --- tables ------------------------------------------------------------------------------------


def shown(table: Table) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=80).print(table)
    text = stream.getvalue()
    assert "…" not in text
    return [line.split() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((4.56e-7, 1e-7, 1e-6), ("0.46 µs", "0.10..1.00")),
        ((4.56e-5, 1e-5, 1e-4), ("45.6 µs", "10.0..100.0")),
        ((1.234e-3, 0.99e-3, 2e-3), ("1.23 ms", "0.99..2.00")),
        ((0.123, 0.1, 1.0), ("123 ms", "100..1000")),
        ((1.5, 1.0, 2.0), ("1.50 s", "1.00..2.00")),
    ],
)
def test_a_range_has_the_unit_of_the_median(
    seconds: tuple[float, ...], words: tuple[str, str]
) -> None:
    assert collectives_report.duration(Spread(*seconds)) == words


def test_comparisons_fit_into_80_columns() -> None:
    wrong = dataclasses.replace(collective("all_reduce", 2**10, 10.0, 9.0, 11.0), error=1.0)
    wide = Spread(0.1234, 0.1, 1.0)
    rows = [dataclasses.replace(collective("x", 2**28, 0.5, 0.4, 0.6), ours=wide), wrong]
    *_, first, second = shown(collectives_report.build_comparison(rows, "title"))
    times = ["1.10", "ms", "1.00..1.20"]
    assert first == ["256", "MiB", "✓", "123", "ms", "100..1000", *times, "0.50", "0.40..0.60"]
    assert second == ["1", "KiB", "✗", *times, *times, "10.00", "9.00..11.00"]


def test_memory_fits_into_80_columns() -> None:
    fast, share = Spread(123.4e9, 100e9, 150e9), Spread(0.25, 0.017, 1.0)
    row = MemoryRow(2**28, fast, fast, share, share)
    *_, line = shown(collectives_report.build_memory([row], "title"))
    rate = ["123.4", "100.0..150.0"]
    assert line == ["256", "MiB", *rate, *rate, "25%", "1.7%..100%", "25%"]


def test_conclusions_say_whether_a_bar_is_met() -> None:
    mean = "geometric mean of ours / torch: 0.499 (0.40..0.60)"
    for bar, words in ((None, ""), (0.5, "  bar 0.50 met"), (0.4, "  bar 0.40 missed")):
        verdict = Verdict("all_reduce", 0.499, 0.4, 0.6, bar)
        assert collectives_report.conclusion(verdict).plain == mean + words


# --- runs --------------------------------------------------------------------------------------

SMALL = ["bench", "collectives", "--sizes", "128KiB,512KiB", "--rounds", "1", "--steps", "2"]


@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_of_all_operations(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results.json"
    words = ["--operations", ",".join(collectives_tasks.OPERATIONS), "--json", str(target)]
    # One that is missed, and does not count without --check.
    assert cli.main([*SMALL, *words, "--bar", "1000", "--bar-process", "1e-9"]) == 0
    result = json.loads(target.read_text())
    assert result["setting"]["sizes"] == [2**17, 2**19]
    local, process = result["comparisons"]
    assert [len(each["rows"]) for each in (local, process)] == [2, 8]
    assert all(row["agrees"] for each in (local, process) for row in each["rows"])
    assert [verdict["met"] for verdict in local["verdicts"]] == [True]
    assert [verdict["met"] for verdict in process["verdicts"]] == [False] * 4
    assert all(row["ours"]["median"] > 0.0 for row in result["memory"])
    measured = {each["contestant"]: len(each["checked"]) for each in result["measured"]}
    assert measured == {"local": 1, "processes": 2, "memory": 1}
    text = capsys.readouterr().out
    assert text.count("512 KiB ✓") == 5
    assert "bar 1000.00 met" in text
    assert text.count("missed") == 4


@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_of_replicas_of_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--forms", "hybrid", "--bar", "1e-9", "--check", "--json", "-"]
    assert cli.main([*SMALL, *words]) == 1
    (hybrid,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (hybrid["form"], [row["agrees"] for row in hybrid["rows"]]) == ("hybrid", [True] * 2)


def test_a_small_run_on_virtual_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--devices", "virtual:0,virtual:1"]) == 0
    text = capsys.readouterr().out
    assert "replicas on 1 x (virtual:0, virtual:1)" in text
    assert text.count("KiB ✓") == 4


def test_a_wrong_result_is_a_negative_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*arguments: object) -> tuple[list[Outcome], int]:
        seconds = {f"{form} all_reduce 1024": (1.0,) for form in ("ours", "torch")}
        return [outcome("processes", seconds, 0.0, 1.0)], 3

    monkeypatch.setattr(collectives, "measure", measure)
    assert cli.main(["bench", "collectives", "--forms", "process", "--sizes", "1KiB"]) == 1
    assert "1 KiB ✗" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check"], "--check needs a bar to check"),
        (["--forms", "local", "--bar-process", "1"], "--bar-process is for the form process"),
        (["--forms", "process", "--bar", "1"], "--bar is for the form local or hybrid"),
    ],
)
def test_wrong_usage_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "collectives", *words]) == 2
    assert message in capsys.readouterr().err


def test_examples_in_the_help_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["bench", "collectives", "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) == 6
    for example in examples:
        assert callable(parser.parse_args(example.split()[1:]).run)
