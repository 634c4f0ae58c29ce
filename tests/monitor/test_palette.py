"""The colors: people without one kind of cones tell them apart, and can read writing on them."""

from __future__ import annotations

import itertools
import re

import numpy as np
import numpy.typing as npt
import pytest

from dataparallel.threads import PHASES
from dataparallel.tools.monitor.palette import DARK, LIGHT, Theme
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.server import Request
from dataparallel.tools.monitor.site import routes

Matrix = npt.NDArray[np.float64]


def _matrix(numbers: str) -> Matrix:
    return np.array([float(each) for each in numbers.split()]).reshape(3, 3)


#: Machado, Oliveira and Fernandes (2009), severity 1, of linear RGB.
VISIONS = {
    "full": np.eye(3),
    "protanopia": _matrix(
        "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998"
    ),
    "deuteranopia": _matrix(
        "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881"
    ),
    "tritanopia": _matrix(
        "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900"
    ),
}
_TO_XYZ = _matrix(
    "0.4124564 0.3575761 0.1804375 0.2126729 0.7151522 0.0721750 0.0193339 0.1191920 0.9503041"
)
_WHITE = _TO_XYZ.sum(1)


def linear(color: str) -> Matrix:
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(color: str, vision: Matrix) -> Matrix:
    """Return a color's place in CIE L*a*b* as somebody sees it."""
    t = _TO_XYZ @ np.clip(vision @ linear(color), 0, 1) / _WHITE
    x, y, z = np.where(t > (6 / 29) ** 3, np.cbrt(t), t * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """Return the ratio of WCAG 2."""
    dark, light = sorted(float(_TO_XYZ[1] @ linear(color)) for color in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_phases_are_told_apart_by_everybody(theme: Theme, vision: str) -> None:
    assert tuple(theme.phases) == PHASES
    places = {phase: lab(style.color, VISIONS[vision]) for phase, style in theme.phases.items()}
    # A just noticeable difference is 2.3.
    near = {
        (a, b): distance
        for a, b in itertools.combinations(places, 2)
        if (distance := float(np.linalg.norm(places[a] - places[b]))) < 17
    }
    assert not near


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_writing_and_lines_have_the_contrast_of_wcag(theme: Theme) -> None:
    for style in theme.phases.values():
        assert contrast(style.color, style.ink) >= 4.5, style
    assert contrast(theme.ground, theme.ink) >= 7
    assert contrast(theme.ground, theme.soft) >= 4.5
    for color in (theme.line, theme.warning):
        assert contrast(theme.ground, color) >= 3, color


def test_the_page_has_all_colors_that_it_uses() -> None:
    style = routes(SampleStore(), 1.0)["/page.css"].answer(Request({}, {})).body.decode()
    defined = re.findall(r"(--\w+): light-dark", style)
    # Each has one source; the number of charts and the place of one are the page's own.
    assert len(defined) == len({*defined})
    assert {*re.findall(r"var\((--\w+)", style)} - {"--charts", "--place"} == {*defined}
