"""The results of `bench kernels` as a picture: bytes per second over bytes moved."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from dataparallel.tools.bench.collectives_tasks import size_name
from dataparallel.tools.bench.kernels_summary import KernelRow
from dataparallel.tools.extras import needs_extra

_COLUMNS = 2


def check_plot(path: str) -> None:
    """Find out before a long measurement whether its picture can be written.

    Args:
        path: Of the picture.

    Raises:
        ImportError: There is no matplotlib.
        ValueError: It cannot write this kind of file, or the folder does not exist.
    """
    with needs_extra("examples"):
        from matplotlib.figure import Figure
    kinds = Figure().canvas.get_supported_filetypes()
    target = pathlib.Path(path)
    if target.suffix.removeprefix(".") not in kinds:
        raise ValueError(
            f"--plot {path} has no ending of a picture; take one of {', '.join(sorted(kinds))}"
        )
    if not target.parent.is_dir():
        raise ValueError(f"--plot {path} is in a folder that does not exist; make it first")


def write_plot(path: str, rows: Sequence[KernelRow], title: str) -> None:
    """Draw one field per kernel: its lines, and the copy's as the roof.

    Args:
        path: Of the picture, see :func:`check_plot`.
        rows: All that was measured.
        title: Stands above all fields.
    """
    with needs_extra("examples"):
        from matplotlib.figure import Figure
    names = list(dict.fromkeys(row.case.kernel for row in rows))
    columns = min(_COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(6 * columns, 3.6 * lines + 0.5), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    fields = grid.flatten()
    copies = roof(rows)
    for field, name in zip(fields, names, strict=False):
        own = [row for row in rows if row.case.kernel == name]
        for variant, dtype in dict.fromkeys((row.case.variant, row.case.dtype) for row in own):
            curve = [row for row in own if (row.case.variant, row.case.dtype) == (variant, dtype)]
            style = "-" if dtype == "float32" else "--"
            _draw(field, curve, label=f"{variant}, {dtype}", linestyle=style, marker="o", ms=3)
        rates = [each * 1e-9 for each in copies.values()]
        field.plot(copies.keys(), rates, color="black", linewidth=2, label="copy")
        field.set(xscale="log", yscale="log", title=name, ylabel="GB/s")
        ticks = ticks_between(min(copies), max(copies))
        field.set_xticks(ticks, [size_name(tick) for tick in ticks], fontsize="small")
        field.tick_params(labelbottom=True)
        field.minorticks_off()
        field.set_xlabel("bytes moved")
        field.legend(fontsize="x-small", loc="lower right")
    for field in fields[len(names) :]:
        field.remove()
    figure.savefig(path, dpi=120)


def roof(rows: Sequence[KernelRow]) -> dict[int, float]:
    """The copy's bytes per second by bytes moved: the median where it was measured often.

    Args:
        rows: All that was measured.
    """
    found: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.moved):
        found.setdefault(row.moved, []).append(row.copy_rate.median)
    return {moved: statistics.median(rates) for moved, rates in found.items()}


def ticks_between(least: int, most: int) -> list[int]:
    """Powers of 2 from below one size to above another, at most eight."""
    first, last = least.bit_length() - 1, (most - 1).bit_length()
    return [2**power for power in range(first, last + 1, 1 + (last - first) // 8)]


def _draw(field: object, curve: Sequence[KernelRow], **style: Any) -> None:
    from matplotlib.axes import Axes

    assert isinstance(field, Axes)
    sizes = [row.moved for row in curve]
    field.plot(sizes, [row.rate.median * 1e-9 for row in curve], **style)
    low, high = ([getattr(row.rate, end) * 1e-9 for row in curve] for end in ("low", "high"))
    field.fill_between(sizes, low, high, alpha=0.15)
