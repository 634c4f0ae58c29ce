"""How each phase of a replica looks on dark ground: a letter, a color, and the color of writing."""

from __future__ import annotations

from typing import NamedTuple

from dataparallel.threads.timeline import Phase

_DARK_INK, _LIGHT_INK = "#101418", "#ffffff"


class PhaseStyle(NamedTuple):
    """How one phase looks.

    Attributes:
        letter: Stands for it where there are no colors.
        color: As ``#rrggbb``.
        ink: Color of writing on it, likewise.
    """

    letter: str
    color: str
    ink: str


#: The palette of plots, its dark colors lighter; in the order of :data:`PHASES`.
PHASE_STYLES: dict[Phase, PhaseStyle] = {
    "input": PhaseStyle("I", "#ddcc77", _DARK_INK),
    "scatter": PhaseStyle("S", "#88ccee", _DARK_INK),
    "forward": PhaseStyle("F", "#462fbc", _LIGHT_INK),
    "gather": PhaseStyle("G", "#44aa99", _DARK_INK),
    "loss": PhaseStyle("L", "#b0b03b", _DARK_INK),
    "backward": PhaseStyle("B", "#cc6677", _DARK_INK),
    "reduce local": PhaseStyle("R", "#aa4499", _LIGHT_INK),
    "reduce across processes": PhaseStyle("X", "#bc2f75", _LIGHT_INK),
    "optimizer": PhaseStyle("O", "#1dcd58", _DARK_INK),
    # What matters least stands out least.
    "idle": PhaseStyle(".", "#3a414c", "#aab2be"),
}
