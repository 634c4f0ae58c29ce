"""A summary as a notebook shows it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from dataparallel.monitor.summary_text import NO_STEP, columns, headlines, straggler_line

if TYPE_CHECKING:
    from dataparallel.monitor.summary import Summary

#: No color but the notebook's own, and a gray that is seen on dark and light.
_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"
_LEFT = "text-align:left;padding:2px 12px 2px 0;font-weight:normal"
_TABLE = "border-collapse:collapse;color:inherit;font-size:inherit;margin:.5em 0"
_RIGHT = "text-align:right;padding:2px 12px;font-variant-numeric:tabular-nums;white-space:pre"


def as_html(summary: Summary) -> str:
    """What a summary says, as HTML: lines, a table with one column per replica, the advice."""
    if not summary.num_steps:
        return _paragraph(NO_STEP)
    first, *others = headlines(summary)
    told = straggler_line(summary)
    rows = zip(*columns(summary.replicas, with_seconds=True), strict=True)
    return "".join(
        [
            _paragraph(first, "font-weight:bold"),
            *map(_paragraph, others),
            f'<div style="overflow-x:auto"><table style="{_TABLE}">',
            *(_row(row, "th" if i == 0 else "td") for i, row in enumerate(rows)),
            "</table></div>",
            *([_paragraph(told)] if told else []),
            _paragraph(f"Change first: {summary.advice}", "font-weight:bold;max-width:60em"),
        ]
    )


def _paragraph(text: str, style: str = "") -> str:
    return f'<p style="margin:.3em 0;{style}">{html.escape(text)}</p>'


def _row(cells: tuple[str, ...], tag: str) -> str:
    title, *values = map(html.escape, cells)
    shown = "".join(f'<{tag} style="{_RIGHT}">{value}</{tag}>' for value in values)
    return f'<tr style="background:none;{_LINE}"><th style="{_LEFT}">{title}</th>{shown}</tr>'
