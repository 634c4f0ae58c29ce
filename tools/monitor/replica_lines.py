"""The runs that are watched: how fast each is, and what its replicas do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from dataparallel.monitor.readings.reading import HostReading
from dataparallel.monitor.run import RunState
from dataparallel.threads import PHASES, Phase
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.bars import (
    bar,
    clean,
    column,
    heading,
    joined,
    share_bar,
    step_bar,
)
from dataparallel.tools.monitor.history import RunHistory
from dataparallel.tools.monitor.palette import PHASE_STYLES
from dataparallel.tools.monitor.ranks import model_name, speed_of_ranks

#: Device, phase, for how long, chunk, idle; before them stands the number, or rank and number.
_WIDTHS = (10, 12, 10, 7, 6)
_SHORT = {"reduce across processes": "reduce X", "reduce local": "reduce R"}


def replica_lines(
    runs: Sequence[RunHistory], host: HostReading | None, width: int
) -> tuple[list[Text], list[Text]]:
    """Return all lines of runs, with their speed, and of replicas, and only those that change."""
    states = [run.state for run in runs]
    groups: dict[object, list[RunHistory]] = {}
    for run in runs:
        same = run.state.job, model_name(run.state, states)
        groups.setdefault(same, []).append(run)
    long: list[Text] = []
    short: list[Text] = []
    for group in groups.values():
        before, lines, after = _job_lines(group, width)
        long += [*before, *lines, after]
        short += lines
    if runs and host is not None and host.threads:
        long.append(_threads(host.threads))
    return long, short


def _job_lines(runs: Sequence[RunHistory], width: int) -> tuple[list[Text], list[Text], Text]:
    """Return the lines of the ranks that train one module together, and those around them."""
    number = "rank.#  " if len(runs) > 1 else "#  "
    room = width - len(number) - sum(_WIDTHS) - 3
    half = room // 2
    shares: list[list[Mapping[Phase, float]]] = [
        [one.shares for one in run.scores] or [{} for _ in run.state.now] for run in runs
    ]
    rows = []
    for run, each in zip(runs, shares, strict=True):
        for i, share in enumerate(each):
            name = f"{run.state.rank}.{i}" if len(runs) > 1 else f"{i}"
            row = _replica_line(run.state, i, name.ljust(len(number)), share, half, room)
            if run.gone_for is not None:
                row.stylize("dim")
            rows.append(row)
    first = runs[0]
    last = first.state.last
    step = "last step" if last is None else f"last {units.seconds_text(last.seconds)}"
    seconds = first.seconds
    lately = f"last {units.seconds_text(max(1, round(seconds)))}" if seconds else "all steps"
    names = ("device", "in phase", "for", "  chunk", "  idle")
    head = _columns(number, [Text(name) for name in names])
    head.append_text(column(f"  {lately}", half + 2)).append(f" {step}")
    head.stylize("dim")
    is_there = any(run.gone_for is None for run in runs)
    title = heading("replicas" if is_there else "replicas, as they were last", width)
    legend = _legend([share for each in shares for share in each])
    return [title, _about(runs)], [_speed(runs), head, *rows], legend


def _about(runs: Sequence[RunHistory]) -> Text:
    state, info = runs[0].state, runs[0].state.info
    told = [clean(info.wrapper)]
    if len(runs) == 1:
        told.insert(0, f"pid {state.pid}")
    if info.world_size > 1:
        ranks = ", ".join(str(run.state.rank) for run in runs)
        told.append(f"rank{'s' * (len(runs) > 1)} {ranks} of {info.world_size}")
    told.append(f"{units.count_text(info.num_parameters)} parameters")
    if info.num_buckets:
        buckets = "1 bucket of" if info.num_buckets == 1 else f"{info.num_buckets} buckets up to"
        told.append(f"{buckets} {units.bytes_text(info.bucket_bytes)}")
    told.append(f"watched for {units.seconds_text(max(0.0, state.time - state.started))}")
    return Text(" · ".join(told))


def _speed(runs: Sequence[RunHistory]) -> Text:
    there = [run for run in runs if run.gone_for is None] or list(runs)
    speed = speed_of_ranks((run.state.rank, run.samples_per_second) for run in there)
    told = [
        clean(runs[0].state.info.model),
        f"{units.frequency_text(there[0].steps_per_second)} steps/s",
        f"{units.frequency_text(speed)} samples/s" + (" of all ranks" if len(there) > 1 else ""),
        f"step {max(run.state.main.steps for run in runs):,}",
    ]
    return Text(" · ".join(told), "bold")


def _replica_line(
    state: RunState, index: int, name: str, shares: Mapping[Phase, float], half: int, room: int
) -> Text:
    phase, seconds = state.now[index]
    style = PHASE_STYLES[phase]
    steps = {} if state.last is None else {one.index: one for one in state.last.replicas}
    step = steps.get(index)
    line = _columns(
        name,
        [
            Text(clean(state.info.devices[index])),
            Text(f" {_SHORT.get(phase, phase)} ", f"{style.ink} on {style.color}"),
            Text(units.seconds_text(seconds) if seconds else "", "dim"),
            Text(str(step.samples) if step is not None else units.NOT_AVAILABLE),
            Text(units.percent_text(shares.get("idle", 0.0) if shares else None)),
        ],
    )
    if half < 5:
        return line
    line.append("  ").append_text(share_bar(shares, half)).append(" ")
    if step is None or state.last is None:
        return line.append_text(bar(None, room - half, ""))
    # On an accelerator each replica has a length of its own.
    length = max([state.last.seconds, *(segment.end for segment in step.segments)]) or 1.0
    return line.append_text(step_bar(step.segments, length, room - half))


def _columns(number: str, cells: list[Text]) -> Text:
    line = Text.assemble((number, "bold"))
    for place, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True)):
        line.append_text(column(cell, width, right=place > 2))
    return line


def _legend(shares: Sequence[Mapping[Phase, float]]) -> Text:
    entries = []
    for phase in PHASES:
        if any(phase in share for share in shares):
            style = PHASE_STYLES[phase]
            mark = (style.letter, f"{style.ink} on {style.color}")
            entries.append(Text.assemble(mark, f" {phase}"))
    return joined(entries, "  ")


def _threads(threads: Mapping[str, float]) -> Text:
    """Return the load of the run's threads, the busiest ones first."""
    busiest = sorted(threads.items(), key=lambda item: -item[1])
    told = [f"{clean(name)} {units.percent_text(load)}" for name, load in busiest]
    return Text(f"threads  {'   '.join(told)}")
