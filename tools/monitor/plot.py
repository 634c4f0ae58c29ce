"""A recording as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.device_rows import DEVICE_ROWS, MAX_LINES, DeviceRow, draw_devices
from dataparallel.tools.monitor.phase_rows import draw_imbalance, draw_shares
from dataparallel.tools.monitor.plot_series import Curve, device_curves, intervals
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.recorded_time import times_of
from dataparallel.tools.monitor.run_period import RunPeriod, find_periods, group_periods
from dataparallel.tools.monitor.step_picture import draw_legend, draw_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What a picture may be called.
SUFFIXES = (".png", ".svg", ".pdf")
#: More replicas would be too thin.
MAX_REPLICAS = 16
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class _Row:
    """A part of the picture: its height in inches, and what draws it."""

    height: float
    draw: Callable[[Axes], None]
    has_time: bool = True


def check_target(path: Path) -> None:
    """Find out whether a picture can be written there.

    Args:
        path: Of the picture.

    Raises:
        ValueError: It has another ending, or its folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path} ends in {path.suffix or 'nothing'}, but a picture ends in one of "
            f"{', '.join(SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{path} is in a folder that does not exist; make {path.parent} first")


def write_plot(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Draw a recording into a file, which is replaced when the picture is done.

    Example::

        write_plot(Path("run.png"), read_recording("run.jsonl").samples, "run")

    Args:
        path: Of the picture, see :func:`check_target`.
        samples: The oldest first.
        title: Stands above it.

    Raises:
        ValueError: There is nothing to draw, or it cannot be written there.
        ImportError: There is no matplotlib.
    """
    check_target(path)
    figure = draw(samples, title)
    try:
        figure.savefig(path, dpi=120, format=path.suffix[1:].lower())
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error


def draw(samples: Sequence[Sample], title: str) -> Figure:
    """Draw a recording.

    Args:
        samples: The oldest first.
        title: Stands above it.

    Raises:
        ValueError: There is no sample.
        ImportError: There is no matplotlib.
    """
    with needs_extra("monitor"):
        from matplotlib.figure import Figure
    if not samples:
        raise ValueError("the recording holds no sample, so there is nothing to draw")
    times = times_of(samples)
    factor, unit = next((f, u) for f, u in _UNITS if times[-1] >= 2 * f or f == 1.0)
    rows = [*_device_rows(samples, times, factor), *_run_rows(samples, times, factor)]
    if not rows:
        raise ValueError("the recording holds neither readings of devices nor a run")
    height = sum(row.height for row in rows) + 1.0
    figure = Figure(figsize=(12, height), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    grid = figure.subplots(
        len(rows), squeeze=False, gridspec_kw={"height_ratios": [row.height for row in rows]}
    ).flatten()
    timed = [axes for axes, row in zip(grid, rows, strict=True) if row.has_time]
    for axes, row in zip(grid, rows, strict=True):
        row.draw(axes)
        legend = axes.get_legend()
        if legend is not None and row.has_time and axes is not grid[0]:
            # The colors of devices are the same in all rows.
            legend.remove()
    margin = times[-1] / factor * 0.005 or 0.5
    for axes in timed:
        axes.set_xlim(-margin, times[-1] / factor + margin)
        axes.tick_params(labelbottom=axes is timed[-1])
    if timed:
        timed[-1].set_xlabel(f"{unit} since the recording began")
    return figure


def _device_rows(samples: Sequence[Sample], times: Sequence[float], factor: float) -> list[_Row]:
    slowed = device_curves(samples, times, lambda reading: float(bool(reading.throttle)))
    return [
        row
        for kind in DEVICE_ROWS
        if (row := _device_row(kind, device_curves(samples, times, kind.value), slowed, factor))
    ]


def _device_row(
    kind: DeviceRow, curves: dict[str, Curve], slowed: dict[str, Curve], factor: float
) -> _Row | None:
    known = {name: curve for name, curve in curves.items() if not curve.is_empty}
    if not known:
        return None
    height = 1.9 if len(known) <= MAX_LINES else 0.4 + 0.16 * len(known)
    return _Row(height, lambda axes: draw_devices(axes, kind, known, slowed, factor))


def _run_rows(samples: Sequence[Sample], times: Sequence[float], factor: float) -> list[_Row]:
    groups = group_periods(find_periods(samples))
    if not groups:
        return []
    periods = max(groups, key=lambda group: sum(one.states[-1].num_steps for one in group))
    return _rows_of_run(periods, times, factor)


def _rows_of_run(periods: list[RunPeriod], times: Sequence[float], factor: float) -> list[_Row]:
    stretches = intervals(periods, times)
    devices = periods[-1].info.devices
    shown = min(len(devices), MAX_REPLICAS)
    rows = []
    if stretches:
        for i in range(shown):

            def paint(axes: Axes, i: int = i) -> None:
                draw_shares(axes, stretches, i, f"replica {i}\n{devices[i]}", factor)
                if i == 0:
                    rest = f" (the first {shown} of {len(devices)})" if shown < len(devices) else ""
                    axes.set_title(f"Share of the time in each phase{rest}", loc="left")

            rows.append(_Row(0.75 if shown <= 8 else 0.5, paint))
        if any(one.imbalance is not None for stretch in stretches for one in stretch):
            rows.append(_Row(1.5, lambda axes: draw_imbalance(axes, stretches, factor)))
    last = next((state.last for state in reversed(periods[-1].states) if state.last), None)
    if last is not None:
        used = {one.phase for replica in last.replicas for one in replica.segments}
        used |= {p for stretch in stretches for one in stretch for s in one.shares for p in s}

        def paint_step(axes: Axes) -> None:
            draw_step(axes, last, legend=False)
            draw_legend(axes, used)

        rows.append(_Row(0.9 + 0.3 * len(last.replicas), paint_step, has_time=False))
    return rows
