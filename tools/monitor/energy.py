"""The energy that a device has used, from its counter or else from its power."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dataparallel.tools.monitor.recorded_time import longest_step


@dataclass(frozen=True)
class Energy:
    """What a device has used.

    Attributes:
        joules: How much.
        source: ``"counter"`` of the device, or ``"power"``, added up over time.
    """

    joules: float
    source: Literal["counter", "power"]


def energy_used(
    times: Sequence[float], counter: Sequence[float | None], power: Sequence[float | None]
) -> Energy | None:
    """The energy from the first to the last of several readings.

    A counter that goes backwards (the driver was loaded anew) counts from there on; what was used
    in between is not known. Power is added up between readings that follow each other, and not
    over gaps.

    Args:
        times: When each was taken, in seconds.
        counter: The device's counter at each, in joules; None where it is not available.
        power: Likewise its power, in watts.

    Returns:
        None if neither is available twice.
    """
    known = [value for value in counter if value is not None]
    if len(known) > 1:
        steps = [later - earlier for earlier, later in itertools.pairwise(known)]
        return Energy(sum(step for step in steps if step > 0), "counter")
    limit = longest_step(times)
    joules, pairs = 0.0, 0
    for i in range(1, len(times)):
        before, now = power[i - 1], power[i]
        length = times[i] - times[i - 1]
        if before is not None and now is not None and length <= limit:
            joules += (before + now) / 2 * length
            pairs += 1
    return Energy(joules, "power") if pairs else None
