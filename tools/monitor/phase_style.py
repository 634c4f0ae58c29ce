"""How each phase of a replica looks in a terminal: a letter, and the palette on dark ground."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.palette import PHASE_COLORS

#: What stands for a phase where there are no colors.
_LETTERS: dict[Phase, str] = {
    "input": "I",
    "scatter": "S",
    "forward": "F",
    "gather": "G",
    "loss": "L",
    "backward": "B",
    "reduce local": "R",
    "reduce across processes": "X",
    "optimizer": "O",
    "idle": ".",
}

#: Terminals are dark, mostly, and dark colors of the palette would be lost there.
_LEAST_LIGHTNESS = 0.46
_DARK_INK, _LIGHT_INK = "#101418", "#ffffff"


@dataclass(frozen=True)
class PhaseStyle:
    """How one phase looks.

    Attributes:
        letter: Stands for it where there are no colors.
        color: As ``#rrggbb``.
        ink: Color of writing on it, likewise.
    """

    letter: str
    color: str
    ink: str


def _style(phase: Phase) -> PhaseStyle:
    if phase == "idle":
        # What matters least stands out least.
        return PhaseStyle(_LETTERS[phase], "#3a414c", "#aab2be")
    red, green, blue = (int(PHASE_COLORS[phase][i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = colorsys.hls_to_rgb(hue, max(lightness, _LEAST_LIGHTNESS), saturation)
    color = "#" + "".join(f"{round(255 * part):02x}" for part in light)
    luminance = 0.2126 * light[0] ** 2.2 + 0.7152 * light[1] ** 2.2 + 0.0722 * light[2] ** 2.2
    # Where both inks have the same contrast (WCAG 2).
    return PhaseStyle(_LETTERS[phase], color, _DARK_INK if luminance > 0.18 else _LIGHT_INK)


#: Of every phase, in the order in which they are shown.
PHASE_STYLES: dict[Phase, PhaseStyle] = {phase: _style(phase) for phase in PHASES}
