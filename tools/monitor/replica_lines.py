"""The runs that are watched: how fast each is, and what its replicas do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from dataparallel.monitor.readings.reading import HostReading
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import PHASES, Phase
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

#: Number, device, phase, for how long, chunk, idle.
_WIDTHS = (3, 10, 12, 10, 7, 6)
_SHORT = {"reduce across processes": "reduce X", "reduce local": "reduce R"}


def replica_lines(
    runs: Sequence[RunHistory], host: HostReading | None, width: int, *, full: bool
) -> list[Text]:
    """What each run is and how fast, and a line per replica.

    Args:
        runs: The runs.
        host: Tells the threads of the first one.
        width: Of the terminal, in cells.
        full: Whether all is told; else only what changes.
    """
    lines: list[Text] = []
    for run in runs:
        lines += _run_lines(run, width, full=full)
    if full and runs and host is not None and host.threads:
        lines.append(_threads(host.threads))
    return lines


def _run_lines(run: RunHistory, width: int, *, full: bool) -> list[Text]:
    state = run.state
    room = width - sum(_WIDTHS) - 3
    half = room // 2
    shares = run.shares or [{} for _ in state.now]
    rows = [_replica_line(state, i, share, half, room) for i, share in enumerate(shares)]
    if not full:
        return [_speed(run, state), *rows]
    last = "last step" if state.last is None else f"last {units.seconds_text(state.last.seconds)}"
    lately = (
        f"last {units.seconds_text(max(1, round(run.seconds)))}" if run.seconds else "all steps"
    )
    names = ("#", "device", "in phase", "for", "  chunk", "  idle")
    head = _columns([Text(name) for name in names])
    head.append_text(column(f"  {lately}", half + 2)).append(f" {last}")
    head.stylize("dim")
    return [
        heading("replicas" if run.gone_for is None else "replicas, as they were last", width),
        _about(state),
        _speed(run, state),
        head,
        *rows,
        _legend(shares),
    ]


def _about(state: RunState) -> Text:
    info = state.info
    told = [f"pid {state.pid}", clean(info.wrapper)]
    if info.world_size > 1:
        told.append(f"rank {state.rank} of {info.world_size}")
    told.append(f"{units.count_text(info.num_parameters)} parameters")
    if info.num_buckets:
        told.append(f"{info.num_buckets} buckets up to {units.bytes_text(info.bucket_bytes)}")
    told.append(f"watched for {units.seconds_text(max(0.0, state.time - state.started))}")
    return Text(" · ".join(told))


def _speed(run: RunHistory, state: RunState) -> Text:
    told = [
        clean(state.info.model),
        f"{units.frequency_text(run.steps_per_second)} steps/s",
        f"{units.frequency_text(run.samples_per_second)} samples/s",
        f"step {state.num_steps:,}",
    ]
    return Text(" · ".join(told), "bold")


def _replica_line(
    state: RunState, index: int, shares: Mapping[Phase, float], half: int, room: int
) -> Text:
    phase, seconds = state.now[index]
    style = PHASE_STYLES[phase]
    steps = {} if state.last is None else {one.index: one for one in state.last.replicas}
    step = steps.get(index)
    line = _columns(
        [
            Text(str(index), "bold"),
            Text(clean(state.info.devices[index])),
            Text(f" {_SHORT.get(phase, phase)} ", f"{style.ink} on {style.color}"),
            Text(units.seconds_text(seconds) if seconds else "", "dim"),
            Text(str(step.samples) if step is not None else units.NOT_AVAILABLE),
            Text(units.percent_text(shares.get("idle", 0.0) if shares else None)),
        ]
    )
    if half < 5:
        return line
    line.append("  ").append_text(share_bar(shares, half)).append(" ")
    if step is None or state.last is None:
        return line.append_text(bar(None, room - half, ""))
    # On an accelerator each replica has a length of its own.
    length = max([state.last.seconds, *(segment.end for segment in step.segments)]) or 1.0
    return line.append_text(step_bar(step.segments, length, room - half))


def _columns(cells: list[Text]) -> Text:
    line = Text()
    for place, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True)):
        line.append_text(column(cell, width, right=place > 3))
    return line


def _legend(shares: list[dict[Phase, float]]) -> Text:
    entries = []
    for phase in PHASES:
        if any(phase in share for share in shares):
            style = PHASE_STYLES[phase]
            mark = (style.letter, f"{style.ink} on {style.color}")
            entries.append(Text.assemble(mark, f" {phase}"))
    return joined(entries, "  ")


def _threads(threads: Mapping[str, float]) -> Text:
    """How busy the threads of the run are, the busiest ones first."""
    busiest = sorted(threads.items(), key=lambda item: -item[1])
    told = [f"{clean(name)} {units.percent_text(load)}" for name, load in busiest]
    return Text(f"threads  {'   '.join(told)}")
