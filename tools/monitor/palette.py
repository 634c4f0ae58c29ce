"""The colors of phases and devices in pictures, in the terminal and on the page.

Each phase has the same hue on light and on dark ground. The colors come from a search. Any two are
far apart for people with full color vision, and for those who lack one of the three kinds of cones
(see `tests/monitor/test_palette.py`). So they differ in lightness too, not in hue alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dataparallel.threads import Phase


class PhaseStyle(NamedTuple):
    """The look of one phase; colors are ``#rrggbb``."""

    #: Stands for it without colors.
    letter: str
    color: str
    #: Color of writing on it.
    ink: str


@dataclass(frozen=True)
class Theme:
    """The colors on one ground."""

    ground: str
    ink: str
    #: The color of less important writing, and of axes.
    soft: str
    #: The color of the one line in a chart.
    line: str
    #: The color of a device that is slowed down.
    warning: str
    #: In the order in which they are shown.
    phases: Mapping[Phase, PhaseStyle]


_BLACK, _WHITE = "#0d1117", "#ffffff"

LIGHT = Theme(
    ground="#ffffff",
    ink="#17202b",
    soft="#556372",
    line="#0b6fc2",
    warning="#c2410c",
    phases={
        "input": PhaseStyle("I", "#fed740", _BLACK),
        "scatter": PhaseStyle("S", "#a19fff", _BLACK),
        "forward": PhaseStyle("F", "#323eee", _WHITE),
        "gather": PhaseStyle("G", "#46af89", _BLACK),
        "loss": PhaseStyle("L", "#8c9b0f", _BLACK),
        "backward": PhaseStyle("B", "#ad2704", _WHITE),
        "reduce local": PhaseStyle("R", "#9e799d", _BLACK),
        "reduce across processes": PhaseStyle("X", "#4d1770", _WHITE),
        "optimizer": PhaseStyle("O", "#087a58", _WHITE),
        "pause": PhaseStyle("P", "#0a3033", _WHITE),
        "idle": PhaseStyle(".", "#dfe3e8", _BLACK),
    },
)
DARK = Theme(
    ground="#18202a",
    ink="#e8edf3",
    soft="#9aa7b6",
    line="#4fb6ff",
    warning="#ffb454",
    phases={
        "input": PhaseStyle("I", "#fff34a", _BLACK),
        "scatter": PhaseStyle("S", "#63f5f7", _BLACK),
        "forward": PhaseStyle("F", "#2669fc", _WHITE),
        "gather": PhaseStyle("G", "#b3e2a0", _BLACK),
        "loss": PhaseStyle("L", "#bdb501", _BLACK),
        "backward": PhaseStyle("B", "#c67a60", _BLACK),
        "reduce local": PhaseStyle("R", "#b4a6fc", _BLACK),
        "reduce across processes": PhaseStyle("X", "#b12d8f", _WHITE),
        "optimizer": PhaseStyle("O", "#0c7310", _WHITE),
        "pause": PhaseStyle("P", "#70b0b0", _BLACK),
        "idle": PhaseStyle(".", "#3a424e", _WHITE),
    },
)

#: Those of the terminal, whose ground is mostly dark.
PHASE_STYLES = DARK.phases
