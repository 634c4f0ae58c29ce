"""What a recording comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.run import RunInfo
from dataparallel.monitor.summary import Summary
from dataparallel.tools.monitor.device_report import (
    DeviceReport,
    column,
    reasons_text,
    report_devices,
    slowed_devices,
)
from dataparallel.tools.monitor.energy import energy_used
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.recorded_time import times_of
from dataparallel.tools.monitor.run_period import (
    RunPeriod,
    find_periods,
    group_periods,
    summarize_periods,
)


@dataclass(frozen=True)
class RunReport:
    """What a recording tells of a run.

    Attributes:
        info: What does not change.
        pids: Its processes: several if it was started again.
        since_start: Whether the numbers are since the run began, not since it was seen first.
        summary: Shares, scores, throughput, and what to change first.
        energy: Joules of its devices while it was watched; None if that is not available.
        energy_per_sample: Joules; likewise.
        energy_note: Why it is not available; empty if it is.
    """

    info: RunInfo
    pids: tuple[int, ...]
    since_start: bool
    summary: Summary
    energy: float | None
    energy_per_sample: float | None
    energy_note: str


@dataclass(frozen=True)
class Report:
    """What a recording comes to.

    Attributes:
        seconds: From the first sample to the last.
        started: When it began, in seconds since 1970; None if it is empty.
        num_samples: How many samples there are.
        sample_cost: Seconds that one took on average; None if there is none.
        problems: What could not be read, in words.
        devices: What it tells of each device.
        host_utilization: Share of all processors of the host that was busy, on average.
        runs: What it tells of each run.
        advice: The one thing to change first.
    """

    seconds: float
    started: float | None
    num_samples: int
    sample_cost: float | None
    problems: tuple[str, ...]
    devices: tuple[DeviceReport, ...]
    host_utilization: float | None
    runs: tuple[RunReport, ...]
    advice: Finding

    def to_json(self) -> dict[str, Any]:
        """The report as what ``json`` writes."""
        return asdict(self)


def make_report(samples: Sequence[Sample], problems: Sequence[str] = ()) -> Report:
    """Sum up a recording.

    Example::

        recording = read_recording("run.jsonl")
        report = make_report(recording.samples, recording.problems)

    Args:
        samples: The oldest first; there may be none.
        problems: What could not be read. Default: nothing.
    """
    times = times_of(samples)
    devices = report_devices(samples, times)
    slowed = slowed_devices(devices)
    groups = group_periods(find_periods(samples))
    runs = tuple(_report_run(group, samples, times, slowed) for group in groups)
    hosts = [sample.host.utilization for sample in samples if sample.host is not None]
    loads = [load for load in hosts if load is not None]
    return Report(
        seconds=times[-1] if times else 0.0,
        started=samples[0].time if samples else None,
        num_samples=len(samples),
        sample_cost=sum(sample.cost for sample in samples) / len(samples) if samples else None,
        problems=tuple(problems),
        devices=devices,
        host_utilization=sum(loads) / len(loads) if loads else None,
        runs=runs,
        advice=_advice(runs, devices),
    )


def _report_run(
    periods: Sequence[RunPeriod],
    samples: Sequence[Sample],
    times: Sequence[float],
    slowed: dict[str, str],
) -> RunReport:
    info = periods[-1].info
    energy, note = _energy(periods, samples, times)
    watched = sum(one.states[-1].num_samples - one.states[0].num_samples for one in periods)
    if energy is not None and watched <= 0:
        energy, note = None, "no step ended between the first sample of the run and the last"
    return RunReport(
        info=info,
        pids=tuple(dict.fromkeys(period.states[0].pid for period in periods)),
        since_start=all(period.since_start for period in periods),
        summary=summarize_periods(periods, slowed),
        energy=energy,
        energy_per_sample=None if energy is None else energy / watched,
        energy_note=note,
    )


def _energy(
    periods: Sequence[RunPeriod], samples: Sequence[Sample], times: Sequence[float]
) -> tuple[float | None, str]:
    """Joules of the devices of a run while it was watched, or why they are not known."""
    total = 0.0
    for period in periods:
        first, last = period.places[0], period.places[-1]
        if first == last:
            continue
        part, axis = samples[first : last + 1], times[first : last + 1]
        identities = zip(period.info.devices, period.info.uuids, strict=True)
        for device, uuid in dict.fromkeys(identities):
            row = [_reading(sample, device, uuid) for sample in part]
            found = energy_used(axis, column(row, "energy"), column(row, "power"))
            if found is None:
                return None, f"{device} tells neither its energy nor its power"
            total += found.joules
    if all(len(period.places) < 2 for period in periods):
        return None, "the run is in one sample only"
    return total, ""


def _reading(sample: Sample, device: str, uuid: str | None) -> DeviceReading | None:
    """The reading of a device of a run, which may have another name where it was read."""
    if uuid is not None:
        for reading in sample.devices:
            if reading.uuid == uuid:
                return reading
    return next((one for one in sample.devices if one.device == device), None)


def _advice(runs: Sequence[RunReport], devices: Sequence[DeviceReport]) -> Finding:
    if runs:
        return max(runs, key=lambda run: run.summary.num_steps).summary.advice
    for device in sorted(devices, key=lambda one: -one.throttled):
        if device.throttled >= 0.1:
            return Finding(
                "slowed device",
                f"{device.device} is slowed down: {reasons_text(device)}. Look at its cooling, its "
                "power limit and what else runs on it.",
                numbers={"throttled_share": device.throttled},
            )
    return Finding(
        "unknown",
        "No run was recorded, so nothing is known of its steps. Watch it with "
        "dataparallel.monitor.StepMonitor(model), and record with --attach auto.",
    )
