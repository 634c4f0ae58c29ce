"""The command `monitor plot`: draw devices and phases over time."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dataparallel.monitor.findings import RunTotals, add_up
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.threads import PHASES, Phase
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.command import SUFFIXES
from dataparallel.tools.monitor.history import reading_of
from dataparallel.tools.monitor.palette import DARK, LIGHT, Theme
from dataparallel.tools.monitor.ranks import run_name, speed_of_ranks
from dataparallel.tools.monitor.recording import (
    Recording,
    check_different,
    longest_step,
    read_recording,
    times_of,
)
from dataparallel.tools.monitor.run_period import (
    RunPeriod,
    find_runs,
    summarize_periods,
    windows_between,
)

#: More devices or replicas would be too thin.
MAX_STRIPS = 16
#: More points than that are not to be told apart in a picture.
MAX_POINTS = 800
MAX_INTERVALS = 300
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
#: In inches: the width of the picture, its edge, and what stands right of the charts and below.
_WIDTH, _EDGE, _RIGHT, _BOTTOM = 12.0, 0.3, 2.1, 0.6
#: The inches of a letter left of the charts, the letters of a line of the title, and its height.
_LETTER, _MOST_LETTERS, _LINE = 0.075, 90, 0.28


_TIMES = "\N{MULTIPLICATION SIGN}"


class _Metric(NamedTuple):
    """A metric that is drawn for each device."""

    title: str
    name: str
    #: The metric that tells how much there can be; 1 if there is none.
    limit: str | None
    text: Callable[[float], str]


_METRICS = (
    _Metric("Utilization", "utilization", None, units.percent_text),
    _Metric("Memory in use", "memory_used", "memory_total", units.bytes_text),
    _Metric("Power", "power", "power_limit", lambda value: units.watts_of_text(value, None)),
)


@dataclass(frozen=True)
class _Row:
    """A part of the picture: its name, its height and the room above in inches, what draws it."""

    name: str
    height: float
    above: float
    draw: Callable[[Axes], None]
    head: Callable[[Axes], None] | None = None


@dataclass(frozen=True, eq=False)
class _Track:
    """A recording on the time axis of the picture."""

    samples: Sequence[Sample]
    #: The time of each sample, in the unit of the axis.
    axis: Sequence[float]
    #: The samples before which nothing is known.
    gaps: frozenset[int]
    #: Stands before the names of devices; empty for the only recording.
    prefix: str


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    target: Path = arguments.picture
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{target}: a picture ends in one of {', '.join(SUFFIXES)}")
    recordings = [read_recording(file) for file in arguments.files]
    for problem in itertools.chain.from_iterable(one.problems for one in recordings):
        print(f"dataparallel: {problem}", file=sys.stderr)
    theme = DARK if arguments.dark else LIGHT
    figure = draw(*recordings, title=arguments.title, theme=theme)
    try:
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}") from error
    print(f"{target}: {sum(len(one.samples) for one in recordings)} samples")
    return 0


def draw(*recordings: Recording, title: str | None = None, theme: Theme = LIGHT) -> Figure:
    """Draw recordings that were made at the same time, one of each machine."""
    check_different(recordings)
    tracks, unit = _tracks(recordings)
    runs = _runs(tracks)
    rows = [*_device_rows(tracks, theme), *_phase_rows(runs, theme)]
    if not rows:
        raise ValueError("the recording holds neither readings of devices nor steps of a run")
    told, more = _titles(tracks, runs)
    lines = textwrap.wrap(title or told, _MOST_LETTERS)
    head = 0.22 + _LINE * len(lines)
    height = sum(row.height + row.above for row in rows) + head + _BOTTOM
    left = 2 * _EDGE + _LETTER * max(len(row.name) for row in rows)
    end = max(track.axis[-1] for track in tracks if track.samples) or 1
    with matplotlib.rc_context(_style(theme)):
        figure = Figure(figsize=(_WIDTH, height))
        for i, line in enumerate(lines):
            y = 1 - (0.04 + _LINE * (i + 1)) / height
            figure.text(_EDGE / _WIDTH, y, line, fontsize=14, fontweight="bold")
        figure.text(_EDGE / _WIDTH, 1 - (head + 0.08) / height, more, color=theme.soft)
        top = height - head
        for row in rows:
            top -= row.above + row.height
            width = (_WIDTH - left - _RIGHT) / _WIDTH
            axes = figure.add_axes((left / _WIDTH, top / height, width, row.height / height))
            row.draw(axes)
            if row.head is not None:
                row.head(axes)
            # Its name stands left of it.
            axes.text(-0.01, 0.5, row.name, transform=axes.transAxes, ha="right", va="center")
            axes.set_xlim(0, end)
            axes.spines["left"].set_visible(False)
            axes.tick_params(bottom=row is rows[-1], labelbottom=row is rows[-1])
        axes.set_xlabel(f"{unit} since the recording began")
    return figure


def _style(theme: Theme) -> dict[Any, Any]:
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.ground),
        **dict.fromkeys(("text.color", "axes.titlecolor"), theme.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.soft),
        **{"axes.labelcolor": theme.soft, "grid.color": theme.soft, "grid.alpha": 0.25},
        **{"axes.spines.top": False, "axes.spines.right": False, "font.size": 9.0},
        **{"axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left"},
    }


def _tracks(recordings: Sequence[Recording]) -> tuple[list[_Track], str]:
    """Return the recordings on one axis, and its unit."""
    begin = min((one.samples[0].time for one in recordings if one.samples), default=0.0)
    times = []
    for one in recordings:
        offset = one.samples[0].time - begin if one.samples else 0.0
        times.append([offset + each for each in times_of(one.samples)])
    length = max((each[-1] for each in times if each), default=0.0)
    factor, unit = next((f, u) for f, u in _UNITS if length >= 2 * f or f == 1.0)
    tracks = []
    for one, each in zip(recordings, times, strict=True):
        limit = longest_step(each)
        gaps = {
            i + 1
            for i, (a, b) in enumerate(itertools.pairwise(one.samples))
            # A recording was continued if its elapsed time begins anew.
            if b.elapsed < a.elapsed or each[i + 1] - each[i] > limit
        }
        prefix = f"{one.header.get('host', '')} " if len(recordings) > 1 else ""
        axis = [time / factor for time in each]
        tracks.append(_Track(one.samples, axis, frozenset(gaps), prefix))
    return tracks, unit


def _titles(tracks: Sequence[_Track], runs: Sequence[_Run]) -> tuple[str, str]:
    """Return the titles: the model and its devices; and how, when and how fast it was recorded."""
    samples = [(track.prefix, sample) for track in tracks for sample in track.samples]
    names = {(prefix, one.identity): one.name for prefix, each in samples for one in each.devices}
    used = {}
    for run in runs:
        sample = run.track.samples[run.periods[-1].places[-1]]
        for name, uuid in zip(run.info.devices, run.info.uuids, strict=True):
            reading = reading_of(sample, name, uuid)
            used[run.track.prefix, name] = reading.name if reading else name.partition(":")[0]
    counts = Counter((used or names).values())
    where = ", ".join(f"{n} {_TIMES} {name}" if n > 1 else name for name, n in counts.items())
    first, last = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pick(each.time for _, each in samples)))
        for pick in (min, max)
    )
    when = f"{first} to {last.removeprefix(first[:11])}"
    if not runs:
        return where, when
    summaries = [(run.state.rank, summarize_periods(run.periods)) for run in runs]
    speed = speed_of_ranks((rank, one.samples_per_second) for rank, one in summaries) or 0.0
    steps = f"{max(run.num_steps for run in runs):,} steps"
    facts = [runs[0].info.wrapper, when, steps, f"{speed:,.0f} samples/s"]
    models = " and ".join(dict.fromkeys(run.info.model for run in runs))
    number = len({run.state.rank for run in runs})
    ranks = f", {number} ranks" if number > 1 else ""
    return f"{models} on {where}{ranks}", "  ·  ".join(facts)


# --- devices -------------------------------------------------------------------------------------


class _Strip(NamedTuple):
    """A metric of one device."""

    name: str
    track: _Track
    readings: Sequence[DeviceReading | None]
    values: Sequence[float | None]
    #: The upper end of the scale.
    top: float


def _device_rows(tracks: Sequence[_Track], theme: Theme) -> Iterator[_Row]:
    """Per metric a strip for each device, so that equal ones do not hide each other."""
    is_first = True
    for metric in _METRICS:
        strips = _strips(tracks, metric)
        shown = strips[:MAX_STRIPS]
        if not shown:
            continue
        told = {reason: None for one in shown for r in one.readings if r for reason in r.slowdowns}
        reasons = ", ".join(told) if is_first else ""
        is_first = False
        tops = {metric.text(one.top) for one in shown}
        title = f"{metric.title}, each from 0 to {tops.pop() if len(tops) == 1 else 'all there is'}"
        head = partial(_name_devices, theme, title + _rest(shown, strips), reasons)
        for i, strip in enumerate(shown):
            draw_strip = partial(_draw_strip, theme, strip, metric, bool(reasons))
            yield _Row(strip.name, 0.3, 0.07 if i else 0.5, draw_strip, head=None if i else head)


def _rest(shown: Sequence[object], strips: Sequence[object]) -> str:
    return f" (the first {len(shown)} of {len(strips)})" if len(shown) < len(strips) else ""


def _name_devices(theme: Theme, title: str, reasons: str, axes: Axes) -> None:
    axes.set_title(title)
    if reasons:
        text = f"shaded: slowed down ({reasons})"
        axes.set_title(text, loc="right", color=theme.warning, weight="normal", size=9)


def _strips(tracks: Sequence[_Track], metric: _Metric) -> list[_Strip]:
    found = []
    for track in tracks:
        # The last name of each: a run may show only some devices, and number them anew.
        names = {one.identity: one.device for each in track.samples for one in each.devices}
        for identity, name in names.items():
            rows = ({one.identity: one for one in each.devices} for each in track.samples)
            found_in = (row.get(identity) for row in rows)
            readings = [None if one is None or one.error else one for one in found_in]
            values = [None if one is None else one.value(metric.name) for one in readings]
            known = [value for value in values if value is not None]
            if known:
                limits = [one.value(metric.limit) or 0 for one in readings if one and metric.limit]
                top = max([*known, *limits]) if any(limits) else float(metric.limit is None)
                found.append(_Strip(track.prefix + name, track, readings, values, top))
    # Those of which no limit is known have one scale.
    rest = max((v or 0 for one in found if not one.top for v in one.values), default=0) or 1.0
    return [one._replace(top=one.top or rest) for one in found]


def _draw_strip(theme: Theme, strip: _Strip, metric: _Metric, shows_slow: bool, axes: Axes) -> None:
    x, y = curve(strip.track.axis, strip.values, strip.track.gaps)
    axes.fill_between(x, 0, y, color=theme.line, alpha=0.3, linewidth=0)
    axes.plot(x, y, color=theme.line, linewidth=1.2)
    if shows_slow:
        spans = [
            (begin, end - begin)
            for i, (begin, end) in enumerate(itertools.pairwise(strip.track.axis))
            if (reading := strip.readings[i])
            and reading.slowdowns
            and i + 1 not in strip.track.gaps
        ]
        axes.broken_barh(spans, (0, strip.top), color=theme.warning, alpha=0.35, linewidth=0)
    axes.set_ylim(0, strip.top)
    axes.set_yticks([])
    known = [value for value in strip.values if value is not None]
    told = f"mean {metric.text(sum(known) / len(known))}, peak {metric.text(max(known))}"
    axes.text(1.01, 0.5, told, transform=axes.transAxes, va="center", fontsize=8.5)


def curve(
    axis: Sequence[float], values: Sequence[float | None], gaps: frozenset[int] = frozenset()
) -> tuple[list[float], list[float]]:
    """Return a line of at most so many means, with NaN if nothing is known, and in each gap."""
    size = max(1, -(-len(axis) // MAX_POINTS))
    edges = sorted({*range(0, len(axis), size), *gaps})
    x, y = [], []
    for i, end in itertools.pairwise([*edges, len(axis)]):
        if i in gaps:
            x.append((axis[i] + axis[i - 1]) / 2)
            y.append(math.nan)
        known = [value for value in values[i:end] if value is not None]
        x.append(axis[i])
        y.append(sum(known) / len(known) if known else math.nan)
    return x, y


# --- the job -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A run of the job that is drawn: all that was recorded of it."""

    track: _Track
    periods: Sequence[RunPeriod]
    #: Stands before the names of replicas; empty for the only run.
    name: str = ""

    @property
    def state(self) -> RunState:
        return self.periods[-1].states[-1]

    @property
    def info(self) -> RunInfo:
        return self.state.info

    @property
    def num_steps(self) -> int:
        return sum(one.states[-1].main.steps for one in self.periods)


def _runs(tracks: Sequence[_Track]) -> list[_Run]:
    """Return the runs of the job that has done the most steps."""
    found = [_Run(track, periods) for track in tracks for periods in find_runs(track.samples)]
    longest = max(found, key=lambda one: one.num_steps, default=None)
    # A job that was started again has another name, but the same ranks.
    jobs = {one.states[-1].job for one in longest.periods} if longest else set()
    # If a run's replicas became others, the period with most steps counts.
    most: dict[object, _Run] = {}
    for one in sorted(found, key=lambda one: one.num_steps):
        if any(each.states[-1].job in jobs for each in one.periods):
            most[one.state.identity] = one
    chosen = sorted(most.values(), key=lambda one: one.state.order)
    states = [one.state for one in chosen]
    names = [run_name(state, states) for state in states]
    return [
        replace(one, name=f"{name}, " if name else "")
        for one, name in zip(chosen, names, strict=True)
    ]


def intervals(
    periods: Sequence[RunPeriod], axis: Sequence[float], gaps: frozenset[int] = frozenset()
) -> list[tuple[float, float, RunTotals | None]]:
    """Return the replicas' times: begin, end and totals; None in a gap between two others."""
    width = axis[-1] / MAX_INTERVALS
    found: list[tuple[float, float, RunTotals | None]] = []
    for period in periods:
        times = [axis[place] for place in period.places]
        first = 0
        for i in range(1, len(times)):
            if gaps.intersection(range(period.places[i - 1] + 1, period.places[i] + 1)):
                first = i
                continue
            before, now = period.states[first], period.states[i]
            is_due = times[i] - times[first] >= width or i == len(times) - 1
            if before.num_steps < now.num_steps and is_due:
                if found and found[-1][1] < times[first]:
                    found.append((found[-1][1], times[first], None))
                totals = add_up(windows_between(before, now), period.info)
                found.append((times[first], times[i], totals))
                first = i
    return found


def _phase_rows(runs: Sequence[_Run], theme: Theme) -> Iterator[_Row]:
    each = [intervals(one.periods, one.track.axis, one.track.gaps) for one in runs]
    strips = [
        (f"{run.name}replica {i}, {device}", parts, i)
        for run, parts in zip(runs, each, strict=True)
        for i, device in enumerate(run.info.devices)
        if parts
    ]
    shown = strips[:MAX_STRIPS]
    occurring = {
        phase
        for _, parts, i in strips
        for *_, one in parts
        if one
        for phase in one.replicas[i].shares
    }
    title = f"Share of the time in each phase{_rest(shown, strips)}"
    head = partial(_name_phases, theme, title, occurring)
    for i, strip in enumerate(shown):
        name, parts, index = strip
        draw_strip = partial(_draw_shares, theme, parts, index)
        yield _Row(name, 0.42, 0.09 if i else 0.8, draw_strip, head=None if i else head)


def _draw_shares(
    theme: Theme,
    parts: Sequence[tuple[float, float, RunTotals | None]],
    replica: int,
    axes: Axes,
) -> None:
    edges = [parts[0][0], *(end for _, end, _ in parts)]
    rows = []
    for phase in PHASES:
        shares = [
            0.0 if one is None else one.replicas[replica].shares.get(phase, 0.0)
            for *_, one in parts
        ]
        # Each share holds from its edge to the next one.
        rows.append([*shares, shares[-1]])
    colors = [theme.phases[phase].color for phase in PHASES]
    axes.stackplot(edges, *rows, colors=colors, step="post", linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.tick_right()
    axes.set_yticks([0, 1], ["0", "100 %"], fontsize=7.5)
    lower, upper = axes.get_yticklabels()
    lower.set_verticalalignment("bottom")
    upper.set_verticalalignment("top")
    axes.tick_params(right=False)


def _name_phases(theme: Theme, title: str, phases: set[Phase], axes: Axes) -> None:
    """Write a title, and below it the phases that occur."""
    axes.set_title(title, loc="left", pad=24)
    handles = [
        Patch(color=theme.phases[phase].color, label=phase) for phase in PHASES if phase in phases
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.3,
        ncols=len(handles) or 1,
        frameon=False,
        fontsize=8.5,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1.2,
        borderpad=0,
    )
