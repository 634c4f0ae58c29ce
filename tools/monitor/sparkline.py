"""The course of a ratio over time, in one line or in several."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dataparallel.tools.monitor.look import Look, styled


def sparkline(values: Sequence[float | None], width: int, look: Look, color: str) -> Text:
    """The last values in one line; see :func:`chart`."""
    return chart(values, width, 1, look, color)[0]


def chart(
    values: Sequence[float | None], width: int, height: int, look: Look, color: str
) -> list[Text]:
    """The last values, the newest on the right; what is not available is left blank.

    Args:
        values: From 0 to 1.
        width: Number of columns, one per value.
        height: Number of lines.
        look: What the terminal can show.
        color: Of the columns.

    Returns:
        The lines from the top, each of ``width`` cells.
    """
    width = max(0, width)
    last = list(values[-width:]) if width else []
    columns = [None] * (width - len(last)) + last
    steps = len(look.levels) - 1
    lines = []
    for row in range(height):
        below = (height - 1 - row) * steps
        line = "".join(
            _cell(value, below, height * steps, row == height - 1, look) for value in columns
        )
        lines.append(styled(line, color))
    return lines


def _cell(value: float | None, below: int, full: int, is_lowest: bool, look: Look) -> str:
    if value is None:
        return " "
    level = round(min(1.0, max(0.0, value)) * full) - below
    if is_lowest:
        # Zero is something that was read.
        level = max(1, level)
    return look.levels[max(0, min(len(look.levels) - 1, level))]
