"""Bars: of one ratio, of shares that make up a whole, and of what happened one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from dataparallel.monitor.record import Segment
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.look import Look, styled
from dataparallel.tools.monitor.phase_style import PHASE_STYLES

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_TRACK = "#2b313b"


def bar(ratio: float | None, width: int, look: Look, color: str) -> Text:
    """A bar that is filled to ``ratio``, from 0 to 1; an empty one if that is not available."""
    if width <= 0:
        return Text()
    share = min(1.0, max(0.0, ratio or 0.0))
    if not look.unicode:
        filled = round(share * width)
        return Text.assemble(("#" * filled, color), ("." * (width - filled), "dim"))
    eighths = round(share * width * 8)
    if share > 0:
        # A little is not nothing.
        eighths = max(1, eighths)
    whole, part = divmod(eighths, 8)
    filled_text = "█" * whole + (_EIGHTHS[part] if part else "")
    if look.color:
        rest = " " * (width - len(filled_text))
        return Text.assemble((filled_text, f"{color} on {_TRACK}"), (rest, f"on {_TRACK}"))
    return Text(filled_text + "░" * (width - len(filled_text)))


def cells(amounts: Sequence[float], width: int) -> list[int]:
    """So many cells for each amount that they add up to ``width``, as fair as whole cells are."""
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    ends, done, before = [], 0.0, 0
    for amount in amounts:
        done += amount
        end = round(width * done / total)
        ends.append(end - before)
        before = end
    return ends


def phase_block(phase: Phase, width: int, look: Look) -> Text:
    """Some cells of one phase: its name on its color, or its letter again and again."""
    style = PHASE_STYLES[phase]
    if not look.color:
        return Text(style.letter * width)
    label = phase if width >= len(phase) + 2 else style.letter
    # Letters of neighbors must not run together to words.
    label = label if width > 1 else ""
    return styled(label.center(width), f"{style.ink} on {style.color}")


def share_bar(shares: Mapping[Phase, float], width: int, look: Look) -> Text:
    """A bar of the shares of the phases."""
    known = [phase for phase in PHASES if shares.get(phase, 0.0) > 0]
    if not known:
        return bar(None, width, look, "")
    counts = cells([shares[phase] for phase in known], width)
    line = Text()
    for phase, count in zip(known, counts, strict=True):
        line.append_text(phase_block(phase, count, look))
    return line


def step_bar(segments: Sequence[Segment], seconds: float, width: int, look: Look) -> Text:
    """A bar of what came after what in a step that took ``seconds``."""
    if not segments or seconds <= 0:
        return bar(None, width, look, "")
    line = Text()
    place = 0
    for segment in segments:
        begin, end = (round(width * t / seconds) for t in (segment.begin, segment.end))
        begin, end = max(place, min(begin, width)), min(end, width)
        if begin > place:
            line.append_text(phase_block("idle", begin - place, look))
        if end > begin:
            line.append_text(phase_block(segment.phase, end - begin, look))
        place = max(place, end, begin)
    line.append_text(phase_block("idle", width - place, look))
    return line


def legend(phases: Sequence[Phase], look: Look) -> list[Text]:
    """What the colors and letters mean, one text per phase."""
    found = []
    for phase in phases:
        style = PHASE_STYLES[phase]
        mark = f" {style.letter} " if look.color else f"{style.letter}="
        colors = f"{style.ink} on {style.color}" if look.color else ""
        found.append(Text.assemble((mark, colors), (" " if look.color else "") + phase))
    return found
