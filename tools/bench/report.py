"""The results of `bench train` as tables in the terminal, 80 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench.harness import Spread
from dataparallel.tools.bench.output import agreement, met, new_table, span, three_digits
from dataparallel.tools.bench.summary import Comparison, Row


def build_table(results: Mapping[str, Sequence[Row]], title: str) -> Table:
    """One section per case, whose heading is the key, one line per contestant."""
    on_devices = any(row.device_bytes for rows in results.values() for row in rows)
    memory = ["host\nMiB", "device\nMiB"][: 1 + on_devices]
    table = new_table(title, "ms", "min..max", "speed-\nup", "ours\n/this", *memory, "loss")
    for case, rows in results.items():
        table.add_section()
        table.add_row(Text(case, style="bold"))
        for row in rows:
            table.add_row(
                Text(f"  {row.title}", style="cyan" if row.contestant == "ours" else ""),
                three_digits(row.seconds.median * 1e3),
                f"{three_digits(row.seconds.low * 1e3)}..{three_digits(row.seconds.high * 1e3)}",
                _ratio(row.speedup if row.contestant != "bare" else None),
                _ratio(row.ours_over_this if row.contestant != "ours" else None),
                *(
                    f"{size / 2**20:.0f}"
                    for size in (row.host_bytes, row.device_bytes)[: len(memory)]
                ),
                agreement(f"{row.losses[-1]:.4f}", row.agrees),
            )
    return table


def build_comparison(comparison: Comparison) -> Table:
    """One line per case, then the geometric mean and the worst case beside their bars."""
    with_bars = any(verdict.bar is not None for verdict in comparison.verdicts.values())
    bar = ["bar"] if with_bars else []
    table = new_table(f"ours / {comparison.title}", "time", "min..max", *bar, "memory", *bar)
    blank = [""] if with_bars else []
    for case, time in comparison.times.items():
        memory = comparison.memory[case]
        table.add_row(case, _ratio(time), span(time), *blank, _number(memory), *blank)
    table.add_section()
    for name, key in (("geometric mean", "mean"), ("worst", "worst")):
        cells: list[str | Text] = []
        for what in ("time", "memory"):
            verdict = comparison.verdicts[f"{what}_{key}"]
            # One digit more, to be seen on which side of a bar it is.
            cells.append(_number(verdict.value, 3))
            if what == "time":
                cells.append(f"{_number(verdict.low)}..{_number(verdict.high)}")
            if with_bars:
                shown = verdict.bar is not None
                cells.append(met(verdict.bar or 0.0, bool(verdict.met)) if shown else "")
        table.add_row(Text(name, style="bold"), *cells)
    return table


def _ratio(value: Spread | None) -> str:
    return _number(value.median) if value else ""


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
