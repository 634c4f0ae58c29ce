"""What `dataparallel bench train` concludes from what it measured, and how it shows it."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from dataparallel.tools.bench import report, rounds, summary, verdict
from dataparallel.tools.bench.contestants import Contestant, TrainTask
from dataparallel.tools.bench.summary import Measured, Row, Spread
from dataparallel.tools.bench.verdict import Bars

# --- conclusions -------------------------------------------------------------------------------


def measured(
    name: str, *seconds: float, loss: float = 2.0, norm: float = 1.0, error: float = 0.0
) -> Measured:
    return Measured(name, name, seconds, (3.0, loss), (1.5, norm), error, 2**20, 0)


def test_ratios_are_taken_within_each_round() -> None:
    ours, bare = measured("ours", 1.0, 10.0, 2.0), measured("bare", 2.0, 20.0, 3.0)
    first, second = summary.summarize([ours, bare])
    assert first.seconds == Spread(2.0, 1.0, 10.0)
    assert first.speedup == Spread(2.0, 1.5, 2.0)
    assert second.ours_over_this == Spread(0.5, 0.5, 2.0 / 3.0)


def test_without_the_bare_module_there_is_no_speedup() -> None:
    rows = summary.summarize([measured("ours", 1.0), measured("ddp", 2.0)])
    assert [row.speedup for row in rows] == [None, None]
    assert all(row.agrees for row in rows)


@pytest.mark.parametrize(
    ("loss", "norm", "error", "agrees"),
    [
        (2.0001, 1.0, 1e-3, True),
        (2.001, 1.0, 0.0, False),
        (2.0, 1.01, 0.0, False),
        (math.nan, 1.0, 0.0, False),
        (2.0, 1.0, 0.1, False),
        (2.0, 1.0, math.nan, False),
    ],
)
def test_other_losses_gradients_or_parameters_are_seen(
    loss: float, norm: float, error: float, agrees: bool
) -> None:
    ours = measured("ours", 1.0, loss=loss, norm=norm, error=error)
    first, second = summary.summarize([ours, measured("bare", 1.0)])
    assert (first.agrees, second.agrees) == (agrees, True)


def outcome_of(finished: list[dict[str, Any]]) -> rounds.Outcome:
    tasks = tuple(TrainTask("ours", ("cpu",), case="deep", batch=2) for _ in finished)
    said = {"losses": [2.0], "gradient_norms": [1.0]}
    contestant = Contestant("ours", "ours", tasks)
    return rounds.Outcome(contestant, [said for _ in finished], {"step": (0.5, 0.7)}, finished)


def test_processes_are_put_together() -> None:
    finished = [
        {"host_bytes": 3, "device_bytes": 5, "parameter_error": error} for error in (1e-7, 1e-6)
    ]
    outcome = outcome_of(finished)
    both = summary.measured_from(outcome)
    assert (both.seconds, both.losses, both.gradient_norms) == ((0.5, 0.7), (2.0,), (1.0,))
    assert (both.host_bytes, both.device_bytes, both.parameter_error) == (6, 10, 1e-6)
    finished[1]["parameter_error"] = math.nan
    assert math.isnan(summary.measured_from(outcome).parameter_error)


@pytest.mark.parametrize(
    ("host", "device", "ratio"),
    [((3, 4), (0, 0), 0.75), ((3, 4), (8, 4), 2.0), ((3, 0), (0, 0), None)],
)
def test_memory_is_compared_where_the_tensors_are(
    host: tuple[int, int], device: tuple[int, int], ratio: float | None
) -> None:
    each = [
        dataclasses.replace(measured(name, 1.0), host_bytes=h, device_bytes=d)
        for name, h, d in zip(("ours", "ddp"), host, device, strict=True)
    ]
    assert summary.summarize(each)[1].memory_ratio == ratio


# --- bars --------------------------------------------------------------------------------------


def results(**ratios: tuple[float, int]) -> dict[str, list[Row]]:
    """By case, the time and the memory (of 4) of ours beside a peer that takes 1.0 and 4 bytes."""
    found = {}
    for case, (time, memory) in ratios.items():
        ours = dataclasses.replace(measured("ours", time, 1.1 * time), host_bytes=memory)
        peer = dataclasses.replace(measured("ddp", 1.0, 1.0), host_bytes=4)
        found[case] = summary.summarize([ours, peer])
    return found


def test_the_mean_over_the_cases_is_geometric_and_the_worst_case_is_named() -> None:
    both = verdict.compare(results(a=(0.5, 2), b=(2.0, 8)), "ddp", Bars())
    assert both.time_mean.value == pytest.approx(1.05)
    assert (both.time_mean.low, both.time_mean.high) == pytest.approx((1.0, 1.1))
    assert both.time_worst.case == "b"
    assert both.time_worst.value == pytest.approx(2.1)
    assert both.memory_mean.value == pytest.approx(1.0)
    assert (both.memory_worst.case, both.memory_worst.value) == ("b", 2.0)
    assert [each.met for each in both.verdicts] == [None] * 4


def test_each_figure_has_its_own_bar() -> None:
    cases = results(a=(0.5, 2), b=(2.0, 8))
    bars = Bars(time=1.06, time_worst=2.0, memory=0.9, memory_worst=2.0)
    both = verdict.compare(cases, "ddp", bars)
    assert [each.met for each in both.verdicts] == [True, False, False, True]


def test_a_bar_for_what_could_not_be_measured_is_missed() -> None:
    both = verdict.compare(results(a=(0.5, 0), b=(0.5, 2)), "ddp", Bars(memory=0.9))
    assert both.memory == {"a": None, "b": 0.5}
    assert both.memory_mean.value is None
    assert both.memory_mean.met is False


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_bars_are_shown_as_met_or_missed() -> None:
    bars = Bars(time=0.8, time_worst=1.0)
    text = shown(report.build_comparison(verdict.compare(results(mlp=(0.9, 2)), "ddp", bars)))
    assert "…" not in text
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[-2] == ["geometric", "mean", "0.945", "0.90..0.99", "0.80", "missed", "0.500"]
    assert lines[-1] == ["worst", "0.945", "0.90..0.99", "1.00", "met", "0.500"]
    without = report.build_comparison(verdict.compare(results(mlp=(0.9, 2)), "ddp", Bars()))
    assert "bar" not in shown(without)


# --- table -------------------------------------------------------------------------------------


def table(*entries: Measured) -> str:
    return shown(report.build_table({"transformer (16)": summary.summarize(entries)}, "title"))


def test_the_table_fits_into_80_columns() -> None:
    ours = dataclasses.replace(
        measured("ours", 1.0, 1.2), title="DataParallel 1x16", host_bytes=2**34, device_bytes=2**35
    )
    text = table(ours, measured("bare", 2.0, 2.4))
    assert "…" not in text
    assert "1000..1200" in text
    assert "2.00" in text
    assert "32768" in text
    assert "2.0000 ✓" in text


def test_the_table_marks_a_contestant_that_trains_otherwise() -> None:
    assert "9.0000 ✗" in table(measured("ours", 1.0, loss=9.0), measured("bare", 2.0))


def test_a_narrow_terminal_loses_no_digit() -> None:
    table = report.new_table("times")
    for heading in ("first", "second", "third"):
        table.add_column(heading, no_wrap=True)
    figures = ["123456.78", "0.01..100.12", "98765 4321"]
    table.add_row(*figures)
    console = Console(width=20, file=io.StringIO())
    report.print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    assert all(figure in console.file.getvalue() for figure in figures)
    assert console.width == 20
