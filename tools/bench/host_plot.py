"""The picture of `bench host`: cost over parameters, and cost over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter, StrMethodFormatter

from dataparallel.tools.monitor.palette import LINE_COLORS

if TYPE_CHECKING:
    from dataparallel.tools.bench.results import Row

_MARKERS = "osD^vP*X"


def draw(results: Mapping[int, Sequence[Row]], device: str, target: str) -> None:
    """Draw the medians, with the range over the rounds, and write the picture."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"Host time of a training step on {device}", fontweight="bold")
    left, right = figure.subplots(1, 2)
    _over_parameters(left, results)
    middle = list(results)[len(results) // 2]
    _over_replicas(right, results[middle], middle)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        # Below the axes, where no line can be.
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    figure.savefig(target, dpi=120)


def _over_parameters(axes: Axes, results: Mapping[int, Sequence[Row]]) -> None:
    first = next(iter(results.values()))
    # Our rows are those with the number of replicas nearest to two: a line each is told apart.
    nearest = min((row.replicas for row in first if _is_ours(row)), key=lambda n: abs(n - 2))
    shown = [i for i, row in enumerate(first) if not _is_ours(row) or row.replicas == nearest]
    for place, index in enumerate(shown):
        rows = {number: each[index] for number, each in results.items()}
        _line(axes, rows, place, per=list(rows))
    axes.set_xscale("log")
    axes.set_xticks(list(results))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set_title(f"Per parameter; ours with {nearest} replicas", loc="left")
    axes.set_xlabel("parameters of the model (log scale)")
    axes.set_ylabel("microseconds per step and parameter")


def _over_replicas(axes: Axes, rows: Sequence[Row], parameters: int) -> None:
    bare = rows[0].seconds["step wall"].median * 1e6
    wrappers = list(dict.fromkeys(row.title.rsplit(" ", 1)[0] for row in rows if _is_ours(row)))
    peers = sum(not _is_ours(row) for row in rows)
    for place, wrapper in enumerate(wrappers, start=peers):
        own = {row.replicas: row for row in rows if row.title.startswith(f"{wrapper} ")}
        _line(axes, own, place, per=[1] * len(own), label=wrapper)
    numbers = sorted({row.replicas for row in rows if _is_ours(row)})
    times = [bare * number for number in numbers]
    axes.plot(numbers, times, ":", color="#555555", label="bare module, times the replicas")
    axes.set_xticks(numbers)
    axes.set_title(f"With {parameters} parameters", loc="left")
    axes.set_xlabel("replicas")
    axes.set_ylabel("microseconds per step")


def _line(
    axes: Axes, rows: Mapping[int, Row], place: int, per: Sequence[int], label: str | None = None
) -> None:
    """Draw a contestant's steps; its place gives color and marker, alike in both parts."""
    spreads = [row.seconds["step wall"] for row in rows.values()]
    scaled = [
        (s.median / n, (s.median - s.low) / n, (s.high - s.median) / n)
        for s, n in zip(spreads, per, strict=True)
    ]
    middles, below, above = (
        [1e6 * value for value in column] for column in zip(*scaled, strict=True)
    )
    axes.errorbar(
        list(rows),
        middles,
        yerr=[below, above],
        color=LINE_COLORS[place],
        marker=_MARKERS[place],
        markersize=5,
        linewidth=1.2,
        capsize=3,
        label=label or next(iter(rows.values())).title,
    )


def _is_ours(row: Row) -> bool:
    return row.contestant not in ("bare", "halves", "ddp")
