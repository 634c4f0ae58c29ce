"""The report of recordings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.summary import Summary
from dataparallel.tools.monitor.alerts import device_alerts
from dataparallel.tools.monitor.history import Since, reading_of, replicas_on
from dataparallel.tools.monitor.ranks import find_in_job, run_name, speed_of_ranks
from dataparallel.tools.monitor.recording import Recording, check_different, longest_step, times_of
from dataparallel.tools.monitor.run_period import RunPeriod, find_runs, summarize_periods

#: A report says that a device is slowed down from this share of the samples on.
_OFTEN = 0.1


@dataclass(frozen=True)
class DeviceReport:
    """One device in a whole recording, in base units; what is None was not available."""

    host: str
    device: str
    uuid: str | None
    name: str
    utilization_mean: float | None
    utilization_peak: float | None
    memory_peak: float | None
    memory_total: float | None
    temperature_peak: float | None
    power_mean: float | None
    energy: float | None
    #: Share of the samples in which it was slowed down; and by reason, the most frequent first.
    throttled: float
    throttle_reasons: Mapping[str, float]
    #: In how many samples it could not be read, and why not, the last time.
    failed: int
    error: str | None
    #: True if it could not be read, or was missing, at the end.
    is_lost: bool

    @property
    def reasons(self) -> str:
        """Return, in words, why it is slowed down and how often."""
        return ", ".join(
            f"{reason} in {100 * share:.0f} % of the time"
            for reason, share in self.throttle_reasons.items()
        )


@dataclass(frozen=True)
class Incident:
    """An alert of a device in a recording."""

    host: str
    device: str
    #: As it was told last.
    finding: Finding
    #: Seconds since the begin of the recording, and the number of samples that told it.
    first: float
    last: float
    count: int


@dataclass(frozen=True)
class RunReport:
    """The report of a run from a recording."""

    job: str
    rank: int
    host: str
    #: The words that tell it from the other runs; empty for the only one.
    name: str
    info: RunInfo
    #: Several if it was started again.
    pids: tuple[int, ...]
    #: True if the numbers are since the run began, not since it was seen first.
    since_start: bool
    summary: Summary
    #: Joules of its devices while it was watched; None if that is not available.
    energy: float | None
    energy_per_sample: float | None


@dataclass(frozen=True)
class JobReport:
    """The report of a job's recorded ranks together."""

    job: str
    world_size: int
    ranks: tuple[int, ...]
    samples_per_second: float
    #: The changes to make, the largest gain first; at least one.
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class RecordingReport:
    """The report of recordings."""

    #: From the first sample to the last, of the longest recording.
    seconds: float
    #: In seconds since 1970; None if there is no sample.
    started: float | None
    num_samples: int
    #: Seconds that one took on average.
    sample_cost: float | None
    problems: tuple[str, ...]
    devices: tuple[DeviceReport, ...]
    #: Errors come first.
    incidents: tuple[Incident, ...]
    #: Share of all processors of the host that was busy, on average.
    host_utilization: float | None
    runs: tuple[RunReport, ...]
    jobs: tuple[JobReport, ...]
    #: The one thing to change first.
    advice: Finding


class _Run(NamedTuple):
    """A run, what it was started again as, and where it was recorded."""

    recording: Recording
    periods: Sequence[RunPeriod]
    slowed: Mapping[str, str]

    @property
    def state(self) -> RunState:
        """The last one."""
        return self.periods[-1].states[-1]


def make_report(*recordings: Recording) -> RecordingReport:
    """Sum up recordings, one of each machine."""
    check_different(recordings)
    devices: list[DeviceReport] = []
    incidents: list[Incident] = []
    runs: list[_Run] = []
    for recording in recordings:
        own = _report_devices(recording)
        devices += own
        incidents += _find_incidents(recording)
        often = sorted(own, key=lambda one: -one.throttled)
        for periods in find_runs(recording.samples):
            info = periods[-1].info
            slowed = {
                info.devices[i]: one.reasons
                for one in often
                if one.throttled >= _OFTEN
                for i in replicas_on(one.device, one.uuid, info)
            }
            runs.append(_Run(recording, periods, slowed))
    runs.sort(key=lambda run: run.state.order)
    incidents.sort(key=lambda one: one.finding.severity != "error")
    states = [run.state for run in runs]
    reports = tuple(_report_run(run, states) for run in runs)
    jobs = _report_jobs(reports, states)
    lengths = [times_of(one.samples)[-1] for one in recordings if one.samples]
    samples = [sample for one in recordings for sample in one.samples]
    return RecordingReport(
        seconds=max(lengths, default=0.0),
        started=min((sample.time for sample in samples), default=None),
        num_samples=len(samples),
        sample_cost=_mean([sample.cost for sample in samples]),
        problems=tuple(problem for one in recordings for problem in one.problems),
        devices=tuple(devices),
        incidents=tuple(incidents),
        host_utilization=_mean([one.host.utilization for one in samples if one.host is not None]),
        runs=reports,
        jobs=jobs,
        advice=_advice(reports, jobs, devices, incidents),
    )


def energy_used(
    times: Sequence[float], counter: Sequence[float | None], power: Sequence[float | None]
) -> float | None:
    """Joules from the first to the last of several readings of a device, by counter or else power.

    A counter that goes backwards (the driver was loaded anew) counts from there on. Power is added
    up between readings that follow each other, and not over gaps. None if neither is available
    twice.
    """
    known = [value for value in counter if value is not None]
    if len(known) > 1:
        return sum(max(0.0, later - earlier) for earlier, later in itertools.pairwise(known))
    limit = longest_step(times)
    parts = [
        (before + now) / 2 * (end - begin)
        for (begin, end), (before, now) in zip(
            itertools.pairwise(times), itertools.pairwise(power), strict=True
        )
        if before is not None and now is not None and end - begin <= limit
    ]
    return sum(parts) if parts else None


def _report_devices(recording: Recording) -> list[DeviceReport]:
    times = times_of(recording.samples)
    rows: dict[str, list[DeviceReading | None]] = {}
    for place, sample in enumerate(recording.samples):
        for reading in sample.devices:
            rows.setdefault(reading.identity, [None] * len(times))[place] = reading
    host = recording.header.get("host", "")
    return [_report_device(row, times, host) for row in rows.values()]


def _find_incidents(recording: Recording) -> list[Incident]:
    """Return the alerts of devices, but for those that a device's report has already."""
    since, found = Since(), dict[tuple[str, str], Incident]()
    host = recording.header.get("host", "")
    for time, sample in zip(times_of(recording.samples), recording.samples, strict=True):
        infos = [state.info for state in sample.runs]
        for device, finding in device_alerts(sample, infos, since):
            if finding.kind in ("slowed device", "lost device"):
                continue
            key = device.identity, finding.kind
            before = found.get(key)
            first, count = (time, 0) if before is None else (before.first, before.count)
            found[key] = Incident(host, device.device, finding, first, time, count + 1)
    return list(found.values())


def _report_device(
    row: Sequence[DeviceReading | None], times: Sequence[float], host: str
) -> DeviceReport:
    known = [reading for reading in row if reading is not None]
    good = [reading for reading in known if reading.error is None]
    errors = [reading.error for reading in known if reading.error is not None]
    last = (good or known)[-1]
    number = max(1, len(good))
    reasons = Counter(reason for reading in good for reason in reading.slowdowns)
    return DeviceReport(
        host=host,
        device=last.device,
        uuid=last.uuid,
        name=last.name,
        utilization_mean=_mean(_column(good, "utilization")),
        utilization_peak=_peak(good, "utilization"),
        memory_peak=_peak(good, "memory_used"),
        memory_total=_peak(good, "memory_total"),
        temperature_peak=_peak(good, "temperature"),
        power_mean=_mean(_column(good, "power")),
        energy=energy_used(times, _column(row, "energy"), _column(row, "power")),
        throttled=sum(bool(reading.slowdowns) for reading in good) / number,
        throttle_reasons={reason: count / number for reason, count in reasons.most_common()},
        failed=len(errors),
        error=errors[-1] if errors else None,
        is_lost=row[-1] is None or row[-1].error is not None,
    )


def _column(row: Sequence[DeviceReading | None], metric: str) -> list[float | None]:
    return [None if reading is None else reading.value(metric) for reading in row]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _peak(row: Sequence[DeviceReading], metric: str) -> float | None:
    return max((value for value in _column(row, metric) if value is not None), default=None)


def _report_run(run: _Run, states: Sequence[RunState]) -> RunReport:
    periods, state = run.periods, run.state
    energy = _energy(periods, run.recording.samples, times_of(run.recording.samples))
    watched = sum(one.states[-1].main.samples - one.states[0].main.samples for one in periods)
    return RunReport(
        job=state.job,
        rank=state.rank,
        host=state.host,
        name=run_name(state, states),
        info=state.info,
        pids=tuple(dict.fromkeys(period.states[0].pid for period in periods)),
        since_start=all(period.since_start for period in periods),
        summary=summarize_periods(periods, run.slowed),
        energy=energy,
        energy_per_sample=None if energy is None or watched <= 0 else energy / watched,
    )


def _report_jobs(reports: Sequence[RunReport], states: Sequence[RunState]) -> tuple[JobReport, ...]:
    found = []
    for job in dict.fromkeys(one.job for one in reports):
        runs = [(r, s) for r, s in zip(reports, states, strict=True) if r.job == job]
        speeds = [(report.rank, report.summary.samples_per_second) for report, _ in runs]
        findings = find_in_job([(state, report.summary) for report, state in runs], states)
        found.append(
            JobReport(
                job=job,
                world_size=max(report.info.world_size for report, _ in runs),
                ranks=tuple(dict.fromkeys(report.rank for report, _ in runs)),
                samples_per_second=speed_of_ranks(speeds) or 0.0,
                findings=tuple(findings),
            )
        )
    return tuple(found)


def _energy(
    periods: Sequence[RunPeriod], samples: Sequence[Sample], times: Sequence[float]
) -> float | None:
    """Joules of the devices of a run while it was watched; None if one of them does not tell."""
    found = []
    for period in periods:
        watched = slice(period.places[0], period.places[-1] + 1)
        devices = zip(period.info.devices, period.info.uuids, strict=True)
        for device, uuid in dict.fromkeys(devices):
            row = [reading_of(sample, device, uuid) for sample in samples[watched]]
            used = energy_used(times[watched], _column(row, "energy"), _column(row, "power"))
            if len(period.places) > 1:
                found.append(used)
    known = [joules for joules in found if joules is not None]
    return sum(known) if known and len(known) == len(found) else None


def _advice(
    runs: Sequence[RunReport],
    jobs: Sequence[JobReport],
    devices: Sequence[DeviceReport],
    incidents: Sequence[Incident],
) -> Finding:
    lost = next((one for one in devices if one.is_lost and one.error), None)
    if lost is not None:
        text = f"{lost.device} was lost, and is not back at the end: {lost.error}."
        return Finding("lost device", text, "error")
    if incidents and incidents[0].finding.severity == "error":
        return incidents[0].finding
    if runs:
        longest = max(runs, key=lambda run: run.summary.num_steps).job
        return next(job.findings[0] for job in jobs if job.job == longest)
    slowest = max(devices, key=lambda one: one.throttled, default=None)
    if slowest is not None and slowest.throttled >= _OFTEN:
        return Finding(
            "slowed device",
            f"{slowest.device} is slowed down: {slowest.reasons}. Look at its cooling, its power "
            "limit and what else runs on it.",
        )
    return Finding(
        "unknown",
        "No run was recorded, so nothing is known of its steps. Watch it with "
        "dataparallel.monitor.StepMonitor(model), and record with --attach auto.",
    )
