"""What `dataparallel bench train` concludes from what it measured, and how it shows it."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console
from rich.table import Table

from dataparallel.tools.bench import output, report, summary
from dataparallel.tools.bench.harness import Contestant, Outcome, Spread
from dataparallel.tools.bench.summary import Row

# --- conclusions -------------------------------------------------------------------------------


def measured(
    name: str,
    *seconds: float,
    loss: float = 2.0,
    norm: float = 1.0,
    error: float = 0.0,
    memory: tuple[int, int] = (2**20, 0),
    title: str = "",
) -> Outcome:
    said = {"losses": [3.0, loss], "gradient_norms": [1.5, norm]}
    names = ("host_bytes", "device_bytes", "parameter_error")
    finished = dict(zip(names, (*memory, error), strict=True))
    return Outcome(Contestant(name, title or name, ()), [said], {"step": seconds}, [finished])


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


def test_processes_are_put_together() -> None:
    finished = [
        {"host_bytes": 3, "device_bytes": 5, "parameter_error": error} for error in (1e-7, 1e-6)
    ]
    outcome = dataclasses.replace(measured("ours", 0.5, 0.7), finished=finished)
    (row,) = summary.summarize([outcome])
    assert (row.rounds, row.losses, row.gradient_norms) == ((0.5, 0.7), (3.0, 2.0), (1.5, 1.0))
    assert (row.host_bytes, row.device_bytes, row.parameter_error) == (6, 10, 1e-6)
    finished[1]["parameter_error"] = math.nan
    (row,) = summary.summarize([outcome])
    assert math.isnan(row.parameter_error) and not row.agrees


@pytest.mark.parametrize(
    ("host", "device", "ratio"),
    [((3, 4), (0, 0), 0.75), ((3, 4), (8, 4), 2.0), ((3, 0), (0, 0), None)],
)
def test_memory_is_compared_where_the_tensors_are(
    host: tuple[int, int], device: tuple[int, int], ratio: float | None
) -> None:
    each = [
        measured(name, 1.0, memory=(h, d))
        for name, h, d in zip(("ours", "ddp"), host, device, strict=True)
    ]
    assert summary.summarize(each)[1].memory_ratio == ratio


# --- bars --------------------------------------------------------------------------------------


def results(**ratios: tuple[float, int]) -> dict[str, list[Row]]:
    """By case, the time and the memory (of 4) of ours beside a peer that takes 1.0 and 4 bytes."""
    found = {}
    for case, (time, memory) in ratios.items():
        ours = measured("ours", time, 1.1 * time, memory=(memory, 0))
        peer = measured("ddp", 1.0, 1.0, memory=(4, 0))
        found[case] = summary.summarize([ours, peer])
    return found


def test_the_mean_over_the_cases_is_geometric_and_the_worst_case_is_named() -> None:
    found = summary.compare(results(a=(0.5, 2), b=(2.0, 8)), "ddp", {}).verdicts
    time, worst = found["time_mean"], found["time_worst"]
    assert (time.value, time.low, time.high) == pytest.approx((1.05, 1.0, 1.1))
    assert worst.case == "b"
    assert worst.value == pytest.approx(2.1)
    assert found["memory_mean"].value == pytest.approx(1.0)
    assert (found["memory_worst"].case, found["memory_worst"].value) == ("b", 2.0)
    assert [each.met for each in found.values()] == [None] * 4


def test_each_figure_has_its_own_bar() -> None:
    bars = dict(zip(summary.BARS, (1.06, 2.0, 0.9, 2.0), strict=True))
    both = summary.compare(results(a=(0.5, 2), b=(2.0, 8)), "ddp", bars)
    assert [each.met for each in both.verdicts.values()] == [True, False, False, True]


def test_a_bar_for_what_could_not_be_measured_is_missed() -> None:
    both = summary.compare(results(a=(0.5, 0), b=(0.5, 2)), "ddp", {"memory_mean": 0.9})
    assert both.memory == {"a": None, "b": 0.5}
    assert both.verdicts["memory_mean"].value is None
    assert both.verdicts["memory_mean"].met is False


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_bars_are_shown_as_met_or_missed() -> None:
    bars = {"time_mean": 0.8, "time_worst": 1.0}
    text = shown(report.build_comparison(summary.compare(results(mlp=(0.9, 2)), "ddp", bars)))
    assert "…" not in text
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[-2] == ["geometric", "mean", "0.945", "0.90..0.99", "0.80", "missed", "0.500"]
    assert lines[-1] == ["worst", "0.945", "0.90..0.99", "1.00", "met", "0.500"]
    without = report.build_comparison(summary.compare(results(mlp=(0.9, 2)), "ddp", {}))
    assert "bar" not in shown(without)


# --- table -------------------------------------------------------------------------------------


def table(*entries: Outcome) -> str:
    return shown(report.build_table({"transformer (16)": summary.summarize(entries)}, "title"))


def test_the_table_fits_into_80_columns() -> None:
    ours = measured("ours", 1.0, 1.2, memory=(2**34, 2**35), title="DataParallel 1x16")
    text = table(ours, measured("bare", 2.0, 2.4))
    assert "…" not in text
    assert "1000..1200" in text
    assert "2.00" in text
    assert "32768" in text
    assert "2.0000 ✓" in text


def test_the_table_marks_a_contestant_that_trains_otherwise() -> None:
    assert "9.0000 ✗" in table(measured("ours", 1.0, loss=9.0), measured("bare", 2.0))


def test_a_narrow_terminal_loses_no_digit() -> None:
    table = output.new_table("times", "second", "third")
    figures = ["123456.78", "0.01..100.12", "98765 4321"]
    table.add_row(*figures)
    console = Console(width=20, file=io.StringIO())
    output.print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    assert all(figure in console.file.getvalue() for figure in figures)
    assert console.width == 20
