"""What `monitor plot` does: draw a recording as devices and phases over time, and its last step."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dataparallel.monitor.findings import RunTotals, add_up, imbalance
from dataparallel.monitor.readings.reading import Sample
from dataparallel.monitor.record import StepRecord
from dataparallel.threads.timeline import PHASES
from dataparallel.tools.monitor.command import SUFFIXES
from dataparallel.tools.monitor.palette import LINE_COLORS, PHASE_COLORS
from dataparallel.tools.monitor.recording import longest_step, read_recording, times_of
from dataparallel.tools.monitor.run_period import (
    RunPeriod,
    find_periods,
    group_periods,
    part_between,
)

#: More replicas would be too thin.
MAX_REPLICAS = 16
#: More points than that are not to be told apart in a picture.
MAX_POINTS = 800
MAX_INTERVALS = 300
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
#: What is drawn of each device: title, metric, and how many base units are one of the title's.
_DEVICE_ROWS = (
    ("Utilization (%)", "utilization", 0.01),
    ("Memory in use (GiB)", "memory_used", 2.0**30),
    ("Power (W)", "power", 1.0),
)


@dataclass(frozen=True)
class _Row:
    """A part of the picture: its height in inches, and what draws it."""

    height: float
    draw: Callable[[Axes], None]


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    target: Path = arguments.picture
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{target}: a picture ends in one of {', '.join(SUFFIXES)}")
    recording = read_recording(arguments.file)
    for problem in recording.problems:
        print(f"dataparallel: {problem}", file=sys.stderr)
    figure = draw(recording.samples, arguments.title or arguments.file.name)
    try:
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}") from error
    print(f"{target}: {len(recording.samples)} samples")
    return 0


def draw(samples: Sequence[Sample], title: str) -> Figure:
    """Draw a recording.

    Args:
        samples: The oldest first.
        title: Stands above it.

    Raises:
        ValueError: There is nothing to draw.
    """
    times = times_of(samples)
    length = times[-1] if times else 0.0
    factor, unit = next((f, u) for f, u in _UNITS if length >= 2 * f or f == 1.0)
    axis = [time / factor for time in times]
    last, periods = None, _longest_run(samples)
    if periods:
        last = next((state.last for state in reversed(periods[-1].states) if state.last), None)
    rows = [*_device_rows(samples, axis), *_phase_rows(periods, axis)]
    timed = len(rows)
    if last is not None:
        rows.append(_Row(0.9 + 0.3 * len(last.replicas), lambda axes: draw_step(axes, last)))
    if not rows:
        raise ValueError("the recording holds neither readings of devices nor a run")
    heights = [row.height for row in rows]
    figure = Figure(figsize=(12, sum(heights) + 1.0), layout="constrained")
    figure.suptitle(title, fontweight="bold")
    grid = figure.subplots(len(rows), squeeze=False, height_ratios=heights).flatten()
    for axes, row in zip(grid, rows, strict=True):
        row.draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    margin = axis[-1] * 0.005 or 0.5
    for axes in grid[:timed]:
        axes.set_xlim(-margin, axis[-1] + margin)
        axes.tick_params(labelbottom=axes is grid[timed - 1])
    if timed:
        grid[timed - 1].set_xlabel(f"{unit} since the recording began")
    return figure


# --- devices -------------------------------------------------------------------------------------


def _device_rows(samples: Sequence[Sample], axis: Sequence[float]) -> Iterator[_Row]:
    names = list(dict.fromkeys(device.device for one in samples for device in one.devices))
    colors = dict(zip(names, cycle(LINE_COLORS), strict=False))
    is_first = True
    for title, metric, unit in _DEVICE_ROWS:
        columns = {name: _column(samples, name, metric, unit) for name in names}
        known = {name: one for name, one in columns.items() if any(v is not None for v in one)}
        if not known:
            continue

        def paint(
            axes: Axes,
            title: str = title,
            columns: dict[str, list[float | None]] = known,
            has_legend: bool = is_first,
        ) -> None:
            for name, values in columns.items():
                x, y = curve(axis, values)
                # Eight colors: what follows them is dashed.
                style = "--" if names.index(name) >= len(LINE_COLORS) else "-"
                marker = "." if len(x) < 60 else ""
                axes.plot(x, y, style, color=colors[name], linewidth=1.2, marker=marker, label=name)
                slow = _while_slowed(samples, name, values)
                if title.startswith("Utilization") and any(v is not None for v in slow):
                    axes.plot(*curve(axis, slow), color=colors[name], linewidth=5, alpha=0.4)
                    title += "; thick while slowed down" if "thick" not in title else ""
            axes.set_title(title, loc="left")
            axes.set_ylim(bottom=0.0)
            axes.grid(alpha=0.3)
            if has_legend:
                axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

        is_first = False
        yield _Row(1.9, paint)


def _column(samples: Sequence[Sample], name: str, metric: str, unit: float) -> list[float | None]:
    found: list[float | None] = []
    for sample in samples:
        reading = next((one for one in sample.devices if one.device == name), None)
        value = None if reading is None or reading.error is not None else reading.value(metric)
        found.append(None if value is None else value / unit)
    return found


def _while_slowed(
    samples: Sequence[Sample], name: str, values: Sequence[float | None]
) -> list[float | None]:
    slowed = [{one.device for one in sample.devices if one.throttle} for sample in samples]
    return [value if name in some else None for value, some in zip(values, slowed, strict=True)]


def curve(axis: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """A line of at most so many means, with NaN where nothing is known, and in each gap."""
    limit, size = longest_step(axis), max(1, -(-len(axis) // MAX_POINTS))
    x, y = [], []
    for i in range(0, len(axis), size):
        if i and axis[i] - axis[i - 1] > limit:
            x.append((axis[i] + axis[i - 1]) / 2)
            y.append(math.nan)
        known = [value for value in values[i : i + size] if value is not None]
        x.append(axis[i])
        y.append(sum(known) / len(known) if known else math.nan)
    return x, y


# --- the run -------------------------------------------------------------------------------------


def _longest_run(samples: Sequence[Sample]) -> list[RunPeriod]:
    groups = group_periods(find_periods(samples))
    return max(groups, key=lambda group: sum(one.states[-1].num_steps for one in group), default=[])


def intervals(
    periods: Sequence[RunPeriod], axis: Sequence[float]
) -> list[tuple[float, float, RunTotals | None]]:
    """What the replicas did over time: begin, end and totals; None in a gap between two others.

    Args:
        periods: Of one run, or of what it was started again as.
        axis: When each sample was taken.
    """
    width, limit = axis[-1] / MAX_INTERVALS, longest_step(axis)
    found: list[tuple[float, float, RunTotals | None]] = []
    for period in periods:
        times = [axis[place] for place in period.places]
        first = 0
        for i in range(1, len(times)):
            if times[i] - times[i - 1] > limit:
                first = i
                continue
            before, now = period.states[first], period.states[i]
            is_due = times[i] - times[first] >= width or i == len(times) - 1
            if before.num_steps < now.num_steps and is_due:
                if found and found[-1][1] < times[first]:
                    found.append((found[-1][1], times[first], None))
                totals = add_up([part_between(before, now, None)], period.info)
                found.append((times[first], times[i], totals))
                first = i
    return found


def _phase_rows(periods: Sequence[RunPeriod], axis: Sequence[float]) -> Iterator[_Row]:
    parts = intervals(periods, axis) if periods else []
    if not parts:
        return
    edges = [parts[0][0], *(end for _, end, _ in parts)]
    devices = periods[-1].info.devices
    shown = devices[:MAX_REPLICAS]

    def paint_shares(replica: int, axes: Axes) -> None:
        rows = []
        for phase in PHASES:
            shares = [
                0.0 if one is None else one.replicas[replica].shares.get(phase, 0.0)
                for *_, one in parts
            ]
            # Each share holds from its edge to the next one.
            rows.append([*shares, shares[-1]])
        colors = [PHASE_COLORS[phase] for phase in PHASES]
        axes.stackplot(edges, *rows, colors=colors, step="post", linewidth=0)
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        name = f"replica {replica}\n{devices[replica]}"
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize="small")
        if replica == 0:
            rest = f" (the first {len(shown)} of {len(devices)})" if shown != devices else ""
            axes.set_title(f"Share of the time in each phase{rest}", loc="left")

    def paint_imbalance(axes: Axes) -> None:
        values = [None if one is None else imbalance(one) for *_, one in parts]
        heights = [math.nan if value is None else value for value in values]
        axes.step(edges, [*heights, heights[-1]], where="post", color=LINE_COLORS[0])
        axes.axhline(1.0, color="#777777", linestyle="--", linewidth=1)
        axes.set_title("Imbalance: computing time of the slowest replica over the mean", loc="left")
        axes.grid(alpha=0.3)

    for i in range(len(shown)):
        yield _Row(0.75 if len(shown) <= 8 else 0.5, partial(paint_shares, i))
    if len(devices) > 1:
        yield _Row(1.5, paint_imbalance)


def draw_step(axes: Axes, record: StepRecord) -> None:
    """Draw a step: one row per replica, one bar per segment, and the names of the phases below.

    Example::

        figure, axes = plt.subplots()
        draw_step(axes, monitor.steps[-1])

    Args:
        axes: Where.
        record: The step.
    """
    longest = max((r.segments[-1].end for r in record.replicas if r.segments), default=0.0)
    factor, unit = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
    for row, replica in enumerate(record.replicas):
        for one in replica.segments:
            # Idle time is thinner: the row's eye-catchers are the phases.
            height = 0.25 if one.phase == "idle" else 0.7
            bar = (one.begin * factor, (one.end - one.begin) * factor)
            color = PHASE_COLORS[one.phase]
            axes.broken_barh([bar], (row - height / 2, height), color=color, linewidth=0)
    names = [f"replica {one.index} ({one.device})" for one in record.replicas]
    axes.set_yticks(range(len(names)), names, fontsize="medium" if len(names) <= 8 else "x-small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, longest * factor or 1)
    axes.set_xlabel(f"{unit} since the step began")
    kind = "Training" if record.kind == "train" else "Inference"
    axes.set_title(f"{kind} step {record.number}: {record.samples} samples", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        handles=[Patch(color=PHASE_COLORS[phase], label=phase) for phase in PHASES],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        handlelength=1,
        fontsize="small",
    )
