"""When the samples of a recording were taken, on one axis that never goes backwards."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from dataparallel.tools.monitor.reading import Sample

#: A pause that is so many times the usual interval is a gap: nothing is known of the time within.
_GAP = 5.0


def times_of(samples: Sequence[Sample]) -> list[float]:
    """Seconds from the first sample to each.

    A recording that was continued by another recorder has an ``elapsed`` that begins anew; between
    the two the clock on the wall tells, and where that was set back, no time passes.

    Args:
        samples: The oldest first.
    """
    found: list[float] = []
    for i, sample in enumerate(samples):
        if i == 0:
            found.append(0.0)
            continue
        passed = sample.elapsed - samples[i - 1].elapsed
        if passed < 0:
            passed = max(0.0, sample.time - samples[i - 1].time)
        found.append(found[-1] + passed)
    return found


def longest_step(times: Sequence[float]) -> float:
    """Between samples that are farther apart lies a gap.

    Args:
        times: What :func:`times_of` tells.
    """
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return _GAP * statistics.median(steps) if steps else 0.0
