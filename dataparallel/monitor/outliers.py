"""Steps that say nothing of the others: a compilation, a checkpoint, a pause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dataparallel.monitor.record import StepRecord

#: A step that takes more than so many times the median is an outlier.
OUTLIER = 5.0
#: Where more than this share of the steps takes so long, that is how the run is.
_RARE = 0.1


def without_outliers(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps that take at most :data:`OUTLIER` times the median; all, if others are not rare.

    Example::

        usual = without_outliers(monitor.steps)

    Args:
        steps: In any order; there may be none.
    """
    if not steps:
        return []
    limit = OUTLIER * statistics.median(step.seconds for step in steps)
    usual = [step for step in steps if step.seconds <= limit]
    return usual if are_rare(len(steps) - len(usual), len(steps)) else list(steps)


def are_rare(outliers: int, steps: int) -> bool:
    """Whether outliers are few enough to be left out.

    Args:
        outliers: How many there are.
        steps: How many steps there are with them.
    """
    return outliers <= max(1.0, _RARE * steps)
