"""The rows of a plot that show the phases of replicas over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.monitor.palette import PHASE_COLORS
from dataparallel.tools.monitor.plot_series import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_shares(
    axes: Axes, stretches: Sequence[Sequence[Interval]], replica: int, name: str, factor: float
) -> None:
    """Draw the shares of one replica's phases, one above the other.

    Args:
        axes: Where.
        stretches: What the replicas did, without gaps within each.
        replica: Index of the replica.
        name: Stands beside it.
        factor: So many seconds are one unit of the axis.
    """
    for stretch in stretches:
        edges = [stretch[0].begin / factor, *(one.end / factor for one in stretch)]
        below = [0.0] * len(edges)
        for phase in PHASES:
            shares = [one.shares[replica].get(phase, 0.0) for one in stretch]
            # Each share holds from its edge to the next one.
            shares.append(shares[-1])
            above = [low + share for low, share in zip(below, shares, strict=True)]
            if any(shares):
                axes.fill_between(
                    edges, below, above, step="post", color=PHASE_COLORS[phase], linewidth=0
                )
            below = above
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_imbalance(axes: Axes, stretches: Sequence[Sequence[Interval]], factor: float) -> None:
    """Draw how much longer than the mean the slowest replica computes.

    Args:
        axes: Where.
        stretches: What the replicas did, without gaps within each.
        factor: So many seconds are one unit of the axis.
    """
    highest = 1.0
    for stretch in stretches:
        known = [one for one in stretch if one.imbalance is not None]
        values = [one.imbalance for one in known if one.imbalance is not None]
        if not known:
            continue
        highest = max(highest, *values)
        edges = [known[0].begin / factor, *(one.end / factor for one in known)]
        axes.step(edges, [*values, values[-1]], where="post", color="#332288", linewidth=1.5)
    axes.axhline(1.0, color="#777777", linestyle="--", linewidth=1)
    axes.set_ylim(0.95, 1.05 + (highest - 1.0) * 1.1)
    axes.set_title("Imbalance: computing time of the slowest replica over the mean", loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
