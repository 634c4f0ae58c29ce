"""`dataparallel bench autograd`: plan, conclusions, and small runs of the real thing."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from dataparallel.tools import cli
from dataparallel.tools.bench import (
    autograd,
    autograd_report,
    autograd_summary,
    autograd_tasks,
)
from dataparallel.tools.bench.autograd_summary import AutogradRow
from dataparallel.tools.bench.autograd_tasks import FORMS, PARTS, AutogradTask, Case
from dataparallel.tools.bench.contestants import Contestant
from dataparallel.tools.bench.rounds import CHECK_STEPS, Outcome
from dataparallel.tools.bench.summary import Spread

# --- plan --------------------------------------------------------------------------------------


def task(**fields: Any) -> AutogradTask:
    fields = {"calls": (1, 4), "sizes": (2**10,), "meeting_point": "/nowhere/m", **fields}
    return AutogradTask("ours", ("cpu",), **fields)


def test_chains_a_nested_one_and_large_tensors_are_measured() -> None:
    cases = autograd_tasks.plan_cases(task(sizes=(2**10, 2**20)))
    assert [(each.name, each.calls, each.elements, each.nested) for each in cases] == [
        ("chain of 1", 1, 4, False),
        ("chain of 4", 4, 4, False),
        ("nested, 3", 3, 4, True),
        ("4 x 1 KiB", 4, 2**8, False),
        ("4 x 1 MiB", 4, 2**18, False),
    ]
    # Of each call the gradient of the argument and that of the result.
    assert cases[-1].carried == 8 * 2**20


def test_calls_go_round_the_other_workers() -> None:
    chain, nested = Case("", 5, 4), Case("", 3, 4, nested=True)
    assert autograd_tasks.route(chain, 2) == [1, 1, 1, 1, 1]
    assert autograd_tasks.route(chain, 4) == [1, 2, 3, 1, 2]
    # One after the other, and back to the first where there are no more.
    assert autograd_tasks.route(nested, 2) == [1, 0, 1]
    assert autograd_tasks.route(nested, 4) == [1, 2, 3]


def test_workers_of_one_number_meet_each_other_alone() -> None:
    two, four = (autograd_tasks.plan_workers(task(), workers) for workers in (2, 4))
    assert [(each.rank, each.world_size) for each in two.tasks] == [(0, 2), (1, 2)]
    assert [each.rank for each in four.tasks] == [0, 1, 2, 3]
    assert len({each.meeting_point for each in two.tasks}) == 1
    assert two.tasks[0].meeting_point != four.tasks[0].meeting_point


def test_short_chains_are_repeated_more_often() -> None:
    cases = [Case(str(calls), calls, 4) for calls in (1, 4, 64)]
    repeated = [autograd_tasks.repetitions(case, cases, 3) for case in cases]
    assert repeated == [50, 48, 3]
    assert autograd_tasks.repetitions(cases[0], cases, 70) == 70


# --- conclusions -------------------------------------------------------------------------------


def outcome(
    seconds: Mapping[str, tuple[float, ...]], *errors: float, served: int = 5, workers: int = 2
) -> Outcome:
    contestant = autograd_tasks.plan_workers(task(), workers)
    said = [
        {"errors": {f"{form} backward chain of 4": error for form in FORMS}}
        for error in errors or (0.0, 0.0)
    ]
    counts = {"made": {"ours": 5, "torch": 5}, "served": {"ours": 2, "torch": 5}}
    others = {"made": {"ours": 0, "torch": 0}, "served": {"ours": served - 2, "torch": 0}}
    finished: list[dict[str, Any]] = [{**said[1], **counts}, {"errors": {}, **others}]
    return Outcome(contestant, [said[0], {"errors": {}}], seconds, finished)


SECONDS = {
    "ours forward chain of 4": (4.0, 8.0),
    "torch forward chain of 4": (2.0, 2.0),
    "ours backward chain of 4": (1.0, 3.0),
    "torch backward chain of 4": (2.0, 2.0),
}


def summarize(made: Outcome) -> AutogradRow:
    (row,) = autograd_summary.summarize([Case("chain of 4", 4, 16)], made)
    return row


def test_ours_is_compared_with_torchs_round_by_round() -> None:
    row = summarize(outcome(SECONDS))
    assert row.agrees
    assert (row.workers, row.case, row.calls, row.size) == (2, "chain of 4", 4, 16)
    assert (row.ours, row.torch) == (Spread(2.0, 1.0, 3.0), Spread(2.0, 2.0, 2.0))
    assert row.ratio == Spread(1.0, 0.5, 1.5)
    # Eight gradients of 16 bytes.
    assert row.torch_rate == Spread(64.0, 64.0, 64.0)
    assert (row.ours_rate.low, row.ours_rate.high) == (128 / 3, 128.0)
    assert (row.ours_call, row.torch_call) == (Spread(1.5, 1.0, 2.0), Spread(0.5, 0.5, 0.5))
    assert row.call_ratio == Spread(3.0, 2.0, 4.0)


@pytest.mark.parametrize("errors", [(1.0, 0.0), (0.0, math.nan), (math.inf, 0.0)])
def test_a_wrong_gradient_at_the_beginning_or_the_end_counts(errors: tuple[float, ...]) -> None:
    assert not summarize(outcome(SECONDS, *errors)).agrees


def test_calls_that_did_not_arrive_are_seen() -> None:
    calls = autograd_summary.count_calls(outcome(SECONDS))
    assert calls == {"ours": (5, 5), "torch": (5, 5)}
    assert autograd_summary.all_called(calls)
    calls = autograd_summary.count_calls(outcome(SECONDS, served=4))
    assert calls == {"ours": (5, 4), "torch": (5, 5)}
    assert not autograd_summary.all_called(calls)
    # One form that makes fewer calls than the other measures something else.
    assert not autograd_summary.all_called({"ours": (4, 4), "torch": (5, 5)})


def row(case: str, *ratio: float, size: int = 16) -> AutogradRow:
    time, wide = Spread(1.1e-3, 1.0e-3, 1.2e-3), Spread(0.1234, 0.1, 1.0)
    rate = Spread(2048.4 * 2**20, 1e9, 3e9)
    ratios = Spread(*ratio)
    return AutogradRow(4, case, 4, size, time, wide, ratios, rate, rate, wide, time, ratios, 0.0)


def test_the_mean_and_the_largest_ratio_have_bars() -> None:
    rows = [row("a", 1.0, 0.5, 2.0), row("b", 1.44, 0.5, 2.0)]
    mean = autograd_summary.judge_mean(rows, 1.2)
    assert (mean.value, mean.low, mean.high) == pytest.approx((1.2, 0.5, 2.0))
    assert autograd_summary.judge_mean(rows, 1.19).met is False
    assert autograd_summary.judge_mean(rows, None).met is None
    worst = autograd_summary.judge_worst(rows, 1.44)
    assert (worst.case, worst.value, worst.met) == ("b", 1.44, True)
    assert autograd_summary.judge_worst(rows, 1.43).met is False


# --- tables ------------------------------------------------------------------------------------


def shown(table: Table) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=80).print(table)
    text = stream.getvalue()
    assert "…" not in text
    return [line.split() for line in text.splitlines() if line.strip()]


def test_tables_fit_into_80_columns() -> None:
    good = row("chain of 64", 10.0, 9.0, 11.0)
    rows = [good, dataclasses.replace(good, error=1.0)]
    slow, fast = ["123", "ms", "100..1000"], ["1.10", "ms", "1.00..1.20"]
    *_, first, second = shown(autograd_report.build_backward(rows, "title"))
    assert first == ["chain", "of", "64", "✓", *fast, *slow, "10.00", "9.00..11.00"]
    assert second[:4] == ["chain", "of", "64", "✗"]
    *_, first, _ = shown(autograd_report.build_calls(rows, "title"))
    assert first == ["chain", "of", "64", "✓", *slow, *fast, "10.00", "9.00..11.00"]
    *_, line = shown(autograd_report.build_rates([row("4 x 16 MiB", 1.0, 1.0, 1.0)], "title"))
    rate = ["2048", "954..2861"]
    assert line == ["4", "workers,", "4", "x", "16", "MiB", *rate, *rate]


# --- runs --------------------------------------------------------------------------------------

# TCP: with shared memory, workers that wait would take the cores from other tests.
SMALL = ["bench", "autograd", "--calls", "1,2", "--sizes", "64KiB", "--transport", "uv",
         "--rounds", "1", "--steps", "1"]  # fmt: skip


def calls_of_a_small_run() -> int:
    chosen = autograd_tasks.plan_cases(task(calls=(1, 2), sizes=(2**16,)))
    warm_up, turn = (
        sum(each.calls * autograd_tasks.repetitions(each, chosen, steps) for each in chosen)
        for steps in (5, 1)
    )
    return warm_up + turn + (CHECK_STEPS + 1) * sum(each.calls for each in chosen)


def test_a_small_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results.json"
    # One bar that is missed, and does not count without --check.
    words = ["--workers", "2", "--bar", "1000", "--bar-worst", "1e-9", "--json", str(target)]
    assert cli.main([*SMALL, *words]) == 0
    result = json.loads(target.read_text())
    assert result["setting"]["workers"] == [2]
    (compared,) = result["comparisons"]
    assert (compared["workers"], compared["steps_per_round"], compared["right"]) == (2, 1, True)
    names = ["chain of 1", "chain of 2", "nested, 3", "4 x 64 KiB"]
    assert [(each["case"], each["agrees"]) for each in compared["rows"]] == [
        (name, True) for name in names
    ]
    assert all(each["ours"]["median"] > 0.0 for each in compared["rows"])
    calls = calls_of_a_small_run()
    assert compared["calls"] == {form: {"made": calls, "served": calls} for form in FORMS}
    assert (compared["mean"]["met"], compared["worst"]["met"]) == (True, False)
    assert len(compared["seconds"]) == 4 * len(names)
    text = capsys.readouterr().out
    assert text.count("chain of 2 ✓") == 2
    assert "bar 1000.00 met" in text
    assert "bar 0.00 missed" in text
    assert f"calls, 2 workers: ours {calls} made, {calls} served" in text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_small_run_of_four_workers_misses_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "4", "--bar", "1e-9", "--check", "--json", "-"]
    assert cli.main([*SMALL, *words]) == 1
    (compared,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (compared["workers"], compared["right"]) == (4, True)


def measure_nothing(
    contestants: list[Contestant], rounds: int, steps: int | None, *rest: object
) -> tuple[list[Outcome], int]:
    """Instead of a measurement: nothing wrong, all in one second."""
    (contestant,) = contestants
    own = [each for each in contestant.tasks if isinstance(each, AutogradTask)]
    names = [case.name for case in autograd_tasks.plan_cases(own[0])]
    seconds = {
        f"{form} {part} {name}": (1.0,) * rounds
        for form, part, name in itertools.product(FORMS, PARTS, names)
    }
    said = {"errors": {f"{form} backward {name}": 0.0 for form in FORMS for name in names}}
    counts = dict.fromkeys(FORMS, 5)
    finished = [{**said, "made": counts, "served": counts}]
    return [Outcome(contestant, [said], seconds, finished)], steps or 9


@pytest.mark.parametrize(
    ("words", "rounds", "steps"),
    [([], 11, 9), (["--quick"], 3, 2), (["--quick", "--rounds", "4", "--steps", "1"], 4, 1)],
)
def test_a_quick_run_is_one_of_few_rounds(
    words: list[str],
    rounds: int,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(autograd, "measure", measure_nothing)
    assert cli.main(["bench", "autograd", *words, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["setting"]["rounds"] == rounds
    assert [each["workers"] for each in result["comparisons"]] == [2, 4]
    for each in result["comparisons"]:
        assert each["steps_per_round"] == steps
        assert {len(own) for own in each["seconds"].values()} == {rounds}
        assert [own["calls"] for own in each["rows"]] == [1, 4, 16, 64, 3, 4]


@pytest.mark.parametrize("what", ["errors", "served"])
def test_a_wrong_result_is_a_negative_one(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*arguments: Any) -> tuple[list[Outcome], int]:
        (made,), steps = measure_nothing(*arguments)
        answer = made.finished[0]
        key = "torch backward chain of 4" if what == "errors" else "torch"
        changed = {**answer, what: {**answer[what], key: 4}}
        return [dataclasses.replace(made, finished=[changed])], steps

    monkeypatch.setattr(autograd, "measure", measure)
    assert cli.main(["bench", "autograd", "--workers", "2"]) == 1
    text = capsys.readouterr().out
    assert ("chain of 4 ✗" in text) == (what == "errors")
    assert ("torch 5 made, 4 served" in text) == (what == "served")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check"], "--check needs a bar to check"),
        (
            ["--workers", "1,2"],
            "--workers needs 2 or more, one of which calls the others, but got 1,2",
        ),
    ],
)
def test_wrong_usage_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "autograd", *words]) == 2
    assert message in capsys.readouterr().err


def test_examples_in_the_help_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["bench", "autograd", "--help"])
    examples = capsys.readouterr().out.split("examples:\n")[1].splitlines()
    assert len(examples) == 5
    for example in examples:
        assert callable(parser.parse_args(example.split()[1:]).run)
