"""The run that is watched: how fast it is, and what each replica does."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from dataparallel.monitor.record import ReplicaStep
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.bars import bar, legend, share_bar, step_bar
from dataparallel.tools.monitor.look import ACCENT, Look, fitted, padded, styled
from dataparallel.tools.monitor.phase_style import PHASE_STYLES
from dataparallel.tools.monitor.run_history import RunHistory


def run_lines(run: RunHistory, width: int, look: Look) -> list[Text]:
    """What the run is and how fast: one line, or several where it is narrow."""
    state = run.state
    assert state is not None
    info = state.info
    speed = [
        styled(f"{units.frequency_text(run.steps_per_second)} steps/s", "bold"),
        styled(f"{units.frequency_text(run.samples_per_second)} samples/s", "bold"),
        Text(f"step {state.num_steps:,}"),
    ]
    if state.last is not None:
        speed.append(Text(f"last {units.seconds_text(state.last.seconds)}"))
    what = [
        styled(look.clean(info.model), f"bold {ACCENT}"),
        Text(f"pid {state.pid}"),
        Text(look.clean(info.wrapper)),
    ]
    if info.world_size > 1:
        what.append(Text(f"rank {state.rank} of {info.world_size}"))
    what.append(Text(f"{units.count_text(info.num_parameters)} parameters"))
    if info.num_buckets:
        what.append(Text(f"{info.num_buckets} buckets up to {units.bytes_text(info.bucket_bytes)}"))
    what.append(Text(f"watched for {units.seconds_text(max(0.0, state.time - state.started))}"))
    if width >= 150:
        return [fitted([*what[:1], *speed, *what[1:]], width, look.dot)]
    return [fitted(what, width, look.dot), fitted(speed, width, look.dot)]


def replica_lines(run: RunHistory, width: int, look: Look, *, tall: bool) -> list[Text]:
    """A line per replica, or two where it is narrow; above them what they mean, below a legend.

    Args:
        run: The run.
        width: Of the lines, in cells.
        look: What the terminal can show.
        tall: Whether there may be more than a line per replica, and a legend.
    """
    state = run.state
    assert state is not None
    shares = run.shares
    steps = {one.index: one for one in state.last.replicas} if state.last is not None else {}
    fixed = _fixed_width(width)
    room = width - fixed
    lines: list[Text] = []
    wide = room >= 50
    if wide:
        lines.append(_head(run, width, fixed))
    for index in range(len(state.info.devices)):
        share = shares[index] if index < len(shares) else {}
        step = steps.get(index)
        line = _columns(state, index, share, step, width, look)
        if wide:
            half = (room - 3) // 2
            line.append(" ").append_text(share_bar(share, half, look))
            line.append("  ").append_text(_step(state, step, room - 3 - half, look))
            lines.append(line)
        elif tall or room < 8:
            lines.append(line)
            if tall:
                lines.append(share_bar(share, width, look))
        else:
            lines.append(line.append(" ").append_text(share_bar(share, room - 1, look)))
    if tall:
        lines.extend(_legend(state, shares, width, look))
    return lines


def _fixed_width(width: int) -> int:
    """The width of all that is no bar."""
    return 54 if width >= 150 else 46 if width >= 76 else 30 if width >= 40 else 18


def _head(run: RunHistory, width: int, fixed: int) -> Text:
    state = run.state
    assert state is not None
    half = (width - fixed - 3) // 2
    names = " #  device     in phase, for" if fixed >= 54 else " #  device   in phase, for"
    head = padded(styled(names, "dim"), fixed - 13)
    head.append_text(padded(styled("chunk  idle", "dim"), 13, right=True))
    lately = (
        f"time by phase, last {units.seconds_text(max(1, round(run.seconds)))}"
        if run.seconds
        else ("time by phase, all steps")
    )
    last = state.last
    step = f"last step, {units.seconds_text(last.seconds)}" if last is not None else "last step"
    head.append(" ").append_text(padded(styled(lately, "dim"), half))
    head.append("  ").append_text(padded(styled(step, "dim"), width - fixed - 3 - half))
    return head


def _columns(
    state: RunState,
    index: int,
    share: Mapping[Phase, float],
    step: ReplicaStep | None,
    width: int,
    look: Look,
) -> Text:
    """All that is no bar, in exactly as many cells as there are for it."""
    fixed = _fixed_width(width)
    phase, seconds = state.now[index] if index < len(state.now) else ("idle", 0.0)
    style = PHASE_STYLES[phase]
    color = f"{style.ink} on {style.color}" if look.color else ""
    device = look.clean(state.info.devices[index])
    chunk = str(step.samples) if step is not None else units.NOT_AVAILABLE
    idle = units.percent_text(share.get("idle", 0.0) if share else None)
    since = units.seconds_text(seconds) if seconds else ""
    if fixed >= 46:
        name, duration = (10, 10) if fixed >= 54 else (8, 9)
        now = fixed - 4 - name - 1 - duration - 13
        line = padded(styled(f"{index:>2}", "bold"), 4)
        line.append_text(padded(Text(device), name)).append(" ")
        line.append_text(padded(_chip(phase, now - 1, color), now))
        line.append_text(padded(styled(since, "dim"), duration))
        line.append_text(padded(Text(chunk), 7, right=True))
        return line.append_text(padded(Text(idle), 6, right=True))
    if fixed >= 30:
        line = padded(Text.assemble((f"{index} ", "bold"), device), 9)
        line.append(" ").append_text(padded(_chip(phase, 10, color), 10))
        line.append(" ").append_text(padded(styled(since, "dim"), 10))
        return padded(line, fixed)
    line = padded(Text.assemble((f"{index} ", "bold"), device), 8)
    return padded(line.append(" ").append_text(_chip(phase, 10, color)), fixed)


def _chip(phase: Phase, width: int, style: str) -> Text:
    return styled(f" {_short(phase, width - 2)} ", style)


def _short(phase: Phase, width: int) -> str:
    """The name of a phase, in short where there is little room."""
    short = {"reduce across processes": "reduce X", "reduce local": "reduce R"}
    return phase if len(phase) <= width else short.get(phase, phase)


def _step(state: RunState, step: ReplicaStep | None, width: int, look: Look) -> Text:
    if step is None or state.last is None:
        return bar(None, width, look, "")
    # On an accelerator each replica has a length of its own.
    length = max([state.last.seconds, *(segment.end for segment in step.segments)])
    return step_bar(step.segments, length, width, look)


def _legend(
    state: RunState, shares: list[dict[Phase, float]], width: int, look: Look
) -> list[Text]:
    phases = [phase for phase in PHASES if any(phase in share for share in shares)]
    lines: list[Text] = []
    for entry in legend(phases, look):
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines


def thread_lines(threads: Mapping[str, float], width: int, look: Look) -> list[Text]:
    """How busy the threads of the run are, the busiest ones first, in one line."""
    busiest = sorted(threads.items(), key=lambda item: -item[1])
    parts = []
    for name, load in busiest:
        text = Text(f"{look.clean(name)} ")
        text.append_text(bar(load, 6, look, "#3fb8e8"))
        parts.append(text.append(f" {units.percent_text(load):>5}"))
    line = fitted(parts, max(0, width - 9), "  ")
    return [styled("threads  ", "dim").append_text(line)] if line else []
