"""The summary of a run of which states are known: one for the live view and for the report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.summary import Summary, summarize_totals
from dataparallel.monitor.totals import ReplicaTotals, RunTotals, make_totals
from dataparallel.tools.monitor.run_period import RunPeriod


def summarize_periods(
    periods: Sequence[RunPeriod], slowed: Mapping[str, str] | None = None
) -> Summary:
    """Sum up what a run did while it was watched.

    Example::

        for group in group_periods(find_periods(samples)):
            print(summarize_periods(group))

    Args:
        periods: The oldest first; at least one.
        slowed: By the name of a device, why it is slowed down. Default: none is.
    """
    info = periods[-1].info
    steps = [step for period in periods for step in period.steps()]
    totals = _add([period.totals() for period in periods], info)
    kind = steps[-1].kind if steps else "train"
    # Between training steps those that nobody has seen one by one may have been evaluations.
    is_certain = kind == "inference" or len(steps) == totals.num_steps
    return summarize_totals(
        totals,
        info,
        steps,
        kind=kind if is_certain else "all",
        steady=_add([period.steady() for period in periods], info),
        slowed=slowed,
    )


def _add(parts: Sequence[RunTotals], info: RunInfo) -> RunTotals:
    replicas = []
    for i, device in enumerate(info.devices):
        own = [part.replicas[i] for part in parts]
        phases = dict.fromkeys(itertools.chain.from_iterable(one.seconds for one in own))
        seconds = {phase: sum(one.seconds.get(phase, 0.0) for one in own) for phase in phases}
        replicas.append(ReplicaTotals(i, device, sum(one.samples for one in own), seconds))
    return make_totals(
        sum(part.num_steps for part in parts),
        sum(part.seconds for part in parts),
        sum(part.samples for part in parts),
        replicas,
        info,
    )
