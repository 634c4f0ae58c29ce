"""Lines of the terminal view, and their pieces: bars, the course of a ratio, columns."""

from __future__ import annotations

import itertools
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from dataparallel.monitor.from_json import clean as clean
from dataparallel.monitor.record import Segment
from dataparallel.threads import PHASES, Phase
from dataparallel.tools.monitor.palette import PHASE_STYLES

#: With as much light as can be read on a dark ground and on a bright one.
ALARM, WARNING, ACCENT, IDLE = "#e5484d", "#b87a00", "#0e93a8", "#7c8794"

#: The first of the characters with dots in two columns of four, and the bits of so many dots from
#: below, on the left and on the right.
_DOTS, _LEFT, _RIGHT = 0x2800, (0, 0x40, 0x44, 0x46, 0x47), (0, 0x80, 0xA0, 0xB0, 0xB8)

#: All characters of ours that ASCII does not have, and what stands for them there.
_ASCII = {
    **dict(zip("█░·─│└├╭╮╰╯", "#.|-|`|++++", strict=True)),
    **dict(zip("✖▲▸↑↓←→°µ…", "x!>^v<> u.", strict=True)),
    # Textual's bars for scrolling.
    **dict.fromkeys("▁▂▃▄▅▆▇▉▊▋▌▍▎▏", "#"),
    **{chr(_DOTS + bits): " ..::||##"[bits.bit_count()] for bits in range(256)},
}


def in_ascii(text: str) -> str:
    """Return a text in ASCII that takes as many cells."""
    if text.isascii():
        return text
    return "".join(c if c.isascii() else _ASCII.get(c, "?" * cell_len(c)) for c in text)


def column(text: Text | str, width: int, *, right: bool = False, style: str = "") -> Text:
    """Text in exactly ``width`` cells; what is longer is cut off."""
    cell = text.copy() if isinstance(text, Text) else Text.assemble((text, style))
    cell.truncate(width, overflow="crop")
    missing = width - cell.cell_len
    if right:
        cell.pad_left(missing)
    else:
        cell.pad_right(missing)
    return cell


def joined(parts: Sequence[Text], separator: str) -> Text:
    """Return those parts that are not empty, in one line."""
    line = Text()
    for part in filter(None, parts):
        line.append(separator if line else "").append_text(part)
    return line


def folded(text: str, width: int, style: str) -> list[Text]:
    """Text in as many lines as it takes."""
    lines = textwrap.wrap(
        clean(text), max(8, width), subsequent_indent="  ", break_on_hyphens=False
    )
    return [Text(line, style) for line in lines]


def heading(title: str, width: int) -> Text:
    """Return the line above a section."""
    return Text(f"── {title} ".ljust(width, "─"), "#9fb4cc")


def bar(ratio: float | None, width: int, color: str) -> Text:
    """Return a bar that is filled to ``ratio``, from 0 to 1; an empty one without a ratio."""
    share = min(1.0, max(0.0, ratio or 0.0))
    # A little is not nothing.
    filled = max(round(share * width), int(share > 0))
    return Text.assemble(("█" * filled, color), ("░" * (width - filled), "dim"))


def chart(
    values: Sequence[float | None], width: int, height: int, style: Callable[[float], str]
) -> list[Text]:
    """Return the last ratios as columns of dots, two a cell, the newest on the right.

    ``style`` gives the color of a ratio; missing ones are left blank.
    """
    last = [*[None] * (2 * width), *values][-2 * width :]
    # A little is not nothing.
    tops = [0 if v is None else max(1, round(min(1.0, v) * 4 * height)) for v in last]
    colors = [style(max(v or 0.0 for v in last[i : i + 2])) for i in range(0, 2 * width, 2)]
    lines = []
    for below in range(4 * height - 4, -1, -4):
        dots = [min(4, max(0, top - below)) for top in tops]
        cells = [
            chr(_DOTS + _LEFT[a] + _RIGHT[b]) for a, b in zip(dots[::2], dots[1::2], strict=True)
        ]
        runs = itertools.groupby(zip(cells, colors, strict=True), operator.itemgetter(1))
        parts = [("".join(cell for cell, _ in run), color) for color, run in runs]
        lines.append(Text.assemble(*parts))
    return lines


def phase_block(phase: Phase, width: int) -> Text:
    """Some cells of one phase: its color, or, without colors, its letter."""
    style = PHASE_STYLES[phase]
    return Text.assemble((style.letter * width, f"{style.color} on {style.color}"))


def share_bar(shares: Mapping[Phase, float], width: int) -> Text:
    """Return a bar of the shares of the phases, which add up to 1."""
    line, done, place = Text(), 0.0, 0
    for phase in PHASES:
        done += shares.get(phase, 0.0)
        end = round(width * done)
        line.append_text(phase_block(phase, end - place))
        place = end
    return line if place else bar(None, width, "")


def step_bar(segments: Sequence[Segment], seconds: float, width: int) -> Text:
    """Return a bar of the segments, in order, of a step that took ``seconds``."""
    line, place = Text(), 0
    for segment in segments:
        begin, end = (min(width, round(width * t / seconds)) for t in (segment.begin, segment.end))
        line.append_text(phase_block("idle", max(0, begin - place)))
        place = max(place, begin)
        line.append_text(phase_block(segment.phase, max(0, end - place)))
        place = max(place, end)
    return line.append_text(phase_block("idle", width - place))
