"""The colors of phases and devices, the same in the terminal, on the page and in pictures.

They are Paul Tol's "muted" scheme, which people with any kind of color blindness can tell apart:
https://sronpersonalpages.nl/~pault/.
"""

from __future__ import annotations

from dataparallel.threads.timeline import Phase

#: Per phase its color; those that follow each other in a step are far from each other.
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
