"""The colors of phases and devices in pictures, in the terminal and on the page.

Those on white are Paul Tol's "muted" scheme, which people with any kind of color blindness can tell
apart: https://sronpersonalpages.nl/~pault/. Dark ones of them would be lost on a dark ground: there
they have the same hue and more light.
"""

from __future__ import annotations

from typing import NamedTuple

from dataparallel.threads.timeline import Phase


class PhaseStyle(NamedTuple):
    """How one phase looks in the terminal and on the page.

    Attributes:
        letter: Stands for it where there are no colors.
        color: As ``#rrggbb``.
        ink: Color of writing on it, likewise.
    """

    letter: str
    color: str
    ink: str


#: Per phase its color on white; those that follow each other in a step are far from each other.
PHASE_COLORS: dict[Phase, str] = {
    "input": "#ddcc77",
    "scatter": "#88ccee",
    "forward": "#332288",
    "gather": "#44aa99",
    "loss": "#999933",
    "backward": "#cc6677",
    "reduce local": "#aa4499",
    "reduce across processes": "#882255",
    "optimizer": "#117733",
    "idle": "#dddddd",
}

#: For lines: one per device or replica, in this order.
LINE_COLORS: tuple[str, ...] = (
    "#332288",
    "#cc6677",
    "#117733",
    "#88ccee",
    "#882255",
    "#999933",
    "#44aa99",
    "#aa4499",
)

#: On a dark ground, in the order in which phases are shown.
PHASE_STYLES: dict[Phase, PhaseStyle] = {
    "input": PhaseStyle("I", "#ddcc77", "#101418"),
    "scatter": PhaseStyle("S", "#88ccee", "#101418"),
    "forward": PhaseStyle("F", "#462fbc", "#ffffff"),
    "gather": PhaseStyle("G", "#44aa99", "#101418"),
    "loss": PhaseStyle("L", "#b0b03b", "#101418"),
    "backward": PhaseStyle("B", "#cc6677", "#101418"),
    "reduce local": PhaseStyle("R", "#aa4499", "#ffffff"),
    "reduce across processes": PhaseStyle("X", "#bc2f75", "#ffffff"),
    "optimizer": PhaseStyle("O", "#1dcd58", "#101418"),
    "idle": PhaseStyle(".", "#3a414c", "#aab2be"),
}
