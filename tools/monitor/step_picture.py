"""One step as a picture: what each replica did, and when."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dataparallel.monitor.record import StepRecord
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.palette import PHASE_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT = 0.7
#: From the axis to the names of the phases, in inches.
_BELOW = 0.5


def draw_step(axes: Axes, record: StepRecord, *, legend: bool = True) -> None:
    """Draw a step: one row per replica, one bar per segment.

    Example::

        figure, axes = plt.subplots()
        draw_step(axes, monitor.steps[-1])

    Args:
        axes: Where.
        record: The step.
        legend: Whether the names of the phases are put below. Default: True.
    """
    longest = max((r.segments[-1].end for r in record.replicas if r.segments), default=0.0)
    factor, unit = (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")
    for row, replica in enumerate(record.replicas):
        for phase in PHASES:
            bars = [
                (one.begin * factor, (one.end - one.begin) * factor)
                for one in replica.segments
                if one.phase == phase
            ]
            # Idle time is thinner: the row's eye-catchers are the phases.
            height = _HEIGHT / 3 if phase == "idle" else _HEIGHT
            if bars:
                axes.broken_barh(
                    bars, (row - height / 2, height), color=PHASE_COLORS[phase], linewidth=0
                )
    names = [f"replica {one.index} ({one.device})" for one in record.replicas]
    size = "medium" if len(names) <= 8 else "x-small"
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, longest * factor or 1)
    axes.set_xlabel(f"{unit} since the step began")
    kind = "Training" if record.kind == "train" else "Inference"
    axes.set_title(f"{kind} step {record.number}: {record.samples} samples", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        used = {one.phase for replica in record.replicas for one in replica.segments}
        draw_legend(axes, used)


def draw_legend(axes: Axes, phases: Collection[Phase]) -> None:
    """Put the names of phases below the horizontal axis, beside their colors.

    Args:
        axes: Whose axis.
        phases: Some of :data:`dataparallel.threads.timeline.PHASES`.
    """
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None
    below = ScaledTranslation(0, -_BELOW, figure.dpi_scale_trans)
    axes.legend(
        handles=[Patch(color=PHASE_COLORS[p], label=p) for p in PHASES if p in phases],
        ncols=min(5, len(phases)) or 1,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=axes.transAxes + below,
        frameon=False,
        handlelength=1,
        fontsize="small",
    )
