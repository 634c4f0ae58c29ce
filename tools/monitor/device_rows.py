"""The rows of a plot that show devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataparallel.tools.monitor.palette import LINE_COLORS
from dataparallel.tools.monitor.plot_series import Curve
from dataparallel.tools.monitor.reading import DeviceReading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More lines than that are not to be told apart: then there is a row of colors per device.
MAX_LINES = 8
#: With so few points each has a mark, so that one alone is seen.
_FEW = 60
_GIB = 2.0**30


@dataclass(frozen=True)
class DeviceRow:
    """A quantity that is drawn of each device.

    Attributes:
        title: What it is.
        unit: The unit in which it is drawn.
        value: Takes it from a reading, in that unit.
        top: Where the axis ends; None if the values tell.
        shows_slowing: Whether it is marked when a device is slowed down.
    """

    title: str
    unit: str
    value: Callable[[DeviceReading], float | None]
    top: float | None = None
    shows_slowing: bool = False


def _scaled(metric: str, factor: float) -> Callable[[DeviceReading], float | None]:
    def value(reading: DeviceReading) -> float | None:
        known = reading.value(metric)
        return None if known is None else known * factor

    return value


#: The rows, from the top.
DEVICE_ROWS = (
    DeviceRow("Utilization", "%", _scaled("utilization", 100.0), 100.0, shows_slowing=True),
    DeviceRow("Memory in use", "GiB", _scaled("memory_used", 1 / _GIB)),
    DeviceRow("Power", "W", _scaled("power", 1.0)),
)


def draw_devices(
    axes: Axes,
    row: DeviceRow,
    curves: Mapping[str, Curve],
    slowed: Mapping[str, Curve],
    factor: float,
) -> None:
    """Draw a quantity of all devices, as lines or, for many devices, as colors.

    Args:
        axes: Where.
        row: What it is.
        curves: By the name of a device, the quantity over time.
        slowed: Likewise, the share of the time in which it is slowed down; of all devices, so that
            each has the same color in all rows.
        factor: So many seconds are one unit of the axis.
    """
    axes.set_title(f"{row.title} ({row.unit})", loc="left")
    if len(curves) > MAX_LINES:
        _draw_colors(axes, row, curves, factor)
    else:
        _draw_lines(axes, row, curves, list(slowed), factor)
    if row.shows_slowing and len(curves) <= MAX_LINES:
        _mark_slowing(axes, slowed, factor)


def _draw_lines(
    axes: Axes, row: DeviceRow, curves: Mapping[str, Curve], names: Sequence[str], factor: float
) -> None:
    for name, curve in curves.items():
        axes.plot(
            [time / factor for time in curve.times],
            curve.values,
            color=LINE_COLORS[names.index(name) % len(LINE_COLORS)],
            linewidth=1.2,
            marker="." if len(curve.times) <= _FEW else "",
            label=name,
        )
    highest = max(v for curve in curves.values() for v in curve.values if not math.isnan(v))
    axes.set_ylim(0, 1.05 * (row.top or highest) or 1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")


def _mark_slowing(axes: Axes, slowed: Mapping[str, Curve], factor: float) -> None:
    """Bars above the lines while a device is slowed down, in its color."""
    marked = [name for name, curve in slowed.items() if any(v > 0 for v in curve.values)]
    top = axes.get_ylim()[1]
    for level, name in enumerate(marked):
        curve = slowed[name]
        height = top * (1.04 + 0.07 * level)
        axes.plot(
            [time / factor for time in curve.times],
            [height if value > 0 else math.nan for value in curve.values],
            color=LINE_COLORS[list(slowed).index(name) % len(LINE_COLORS)],
            linewidth=4,
            solid_capstyle="butt",
            marker="s" if len(curve.times) <= _FEW else "",
            markersize=3,
        )
    if marked:
        axes.set_ylim(0, top * (1.08 + 0.07 * len(marked)))
        axes.set_title(f"{axes.get_title(loc='left')}; bars above: slowed down", loc="left")
        axes.set_yticks([0, 25, 50, 75, 100])


def _draw_colors(axes: Axes, row: DeviceRow, curves: Mapping[str, Curve], factor: float) -> None:
    import numpy as np

    names = list(curves)
    times = [time / factor for time in curves[names[0]].times]
    # Each value holds until the next one.
    edges = [*times, 2 * times[-1] - times[-2] if len(times) > 1 else times[-1] + 1.0]
    values = np.ma.masked_invalid([curves[name].values for name in names])
    mesh = axes.pcolormesh(
        edges,
        [i - 0.5 for i in range(len(names) + 1)],
        values,
        cmap="cividis",
        vmin=0.0,
        vmax=row.top,
        rasterized=True,
    )
    axes.set_facecolor("white")
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.invert_yaxis()
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(mesh, ax=axes, label=row.unit, pad=0.01, aspect=12)
