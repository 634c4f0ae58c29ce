"""The results of `bench autograd` as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from dataparallel.tools.bench.autograd_summary import AutogradRow
from dataparallel.tools.bench.collectives_report import duration
from dataparallel.tools.bench.report import agreement, new_table, ratio_range
from dataparallel.tools.bench.summary import Spread


def build_backward(rows: Sequence[AutogradRow], title: str) -> Table:
    """The time of a backward, one line per case; 80 columns wide.

    Args:
        rows: Of one number of workers.
        title: Stands above the table.
    """
    return _build(rows, title, lambda row: (row.ours, row.torch, row.ratio))


def build_calls(rows: Sequence[AutogradRow], title: str) -> Table:
    """The time of one call in the forward, one line per case; 80 columns wide.

    Args:
        rows: Of one number of workers.
        title: Stands above the table.
    """
    return _build(rows, title, lambda row: (row.ours_call, row.torch_call, row.call_ratio))


def build_rates(rows: Sequence[AutogradRow], title: str) -> Table:
    """The gradients that a backward carries per second, one line per number of workers and case.

    Args:
        rows: Of large tensors.
        title: Stands above the table.
    """
    table = new_table(title)
    table.add_column("", no_wrap=True)
    for heading in ("ours\nMiB/s", "min..max", "torch\nMiB/s", "min..max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        name = f"{row.workers} workers, {row.case}"
        table.add_row(name, *_rate(row.ours_rate), *_rate(row.torch_rate))
    return table


def _build(
    rows: Sequence[AutogradRow],
    title: str,
    choose: Callable[[AutogradRow], tuple[Spread, Spread, Spread]],
) -> Table:
    table = new_table(title)
    table.add_column("", no_wrap=True)
    for heading in ("ours", "min..max", "torch", "min..max", "ours\n/torch", "min..max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ours, torch, ratio = choose(row)
        table.add_row(
            agreement(row.case, row.agrees),
            *duration(ours),
            *duration(torch),
            f"{ratio.median:.2f}",
            ratio_range(ratio),
        )
    return table


def _rate(bytes_per_second: Spread) -> tuple[str, str]:
    median, low, high = (
        f"{each / 2**20:.0f}"
        for each in (bytes_per_second.median, bytes_per_second.low, bytes_per_second.high)
    )
    return median, f"{low}..{high}"
