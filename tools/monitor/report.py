"""The report of recordings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.summary import Summary
from dataparallel.tools.monitor.alerts import device_alerts
from dataparallel.tools.monitor.history import Since, mean, reading_of, replicas_on
from dataparallel.tools.monitor.ranks import find_in_job, run_name, speed_of_ranks
from dataparallel.tools.monitor.recording import Recording, check_different, longest_step, times_of
from dataparallel.tools.monitor.run_period import (
    RunPeriod,
    find_runs,
    seconds_still,
    summarize_periods,
)
from dataparallel.tools.monitor.units import bytes_text, percent_text, seconds_text

#: A report says that a device is slowed down from this share of the samples on.
_OFTEN = 0.1
#: The host's memory leaks if more than this share of it fills in a minute; so many samples tell it,
#: of so many seconds.
_LEAK = 0.01
_ENOUGH, _SHORTEST = 8, 20.0


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
    #: Share of the samples in which it was slowed down; and in words, why, the most frequent first.
    throttled: float
    reasons: str


@dataclass(frozen=True)
class Incident:
    """An alert of a device, or of the host, in a recording."""

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
    summary: Summary
    #: Joules of its devices while it was watched; None if that is not available.
    energy: float | None
    energy_per_sample: float | None
    #: Seconds without a step at the end of the recording, if the run stands still; else 0.
    still_for: float


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
        incidents += [*_find_incidents(recording), *_find_leak(recording)]
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
        sample_cost=mean([sample.cost for sample in samples]),
        problems=tuple(problem for one in recordings for problem in one.problems),
        devices=tuple(devices),
        incidents=tuple(incidents),
        host_utilization=mean([one.host.utilization for one in samples if one.host is not None]),
        runs=reports,
        jobs=jobs,
        advice=_advice(reports, jobs, incidents),
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
    """Return the alerts of devices."""
    since, found = Since(), dict[tuple[str, str], Incident]()
    host = recording.header.get("host", "")
    times = times_of(recording.samples)
    for time, sample in zip(times, recording.samples, strict=True):
        infos = [state.info for state in sample.runs]
        for device, finding in device_alerts(sample, infos, since):
            key = device.identity, finding.kind
            before = found.get(key)
            first, count = (time, 0) if before is None else (before.first, before.count)
            if finding.kind == "lost device" and time < times[-1]:
                # It may come back.
                finding = replace(finding, severity="warning")
            found[key] = Incident(host, device.device, finding, first, time, count + 1)
    return list(found.values())


def _find_leak(recording: Recording) -> Iterator[Incident]:
    """Yield an incident if the runs take more of the host's memory all the time."""
    samples, times = recording.samples, times_of(recording.samples)
    if len(samples) < _ENOUGH or times[-1] < _SHORTEST or (host := samples[-1].host) is None:
        return
    held = []
    for sample in samples:
        pids = {run.pid for run in sample.runs}
        # A process may be on several devices.
        each = {one.pid: one.host_memory or 0.0 for one in sample.processes if one.pid in pids}
        held.append(sum(each.values()))
    # Programs load what they need as they begin: the first quarter is left out. In each of the
    # others memory has to grow, and garbage that is collected does not count.
    edges = [len(times) * i // 4 for i in range(1, 5)]
    lows = [min(held[a:b]) for a, b in itertools.pairwise(edges)]
    minute = 60 * min(
        (lows[i + 1] - lows[i]) / max(1e-9, times[edges[i + 1]] - times[edges[i]]) for i in (0, 1)
    )
    if minute > _LEAK * host.memory_total:
        full = seconds_text((host.memory_total - host.memory_used) / minute * 60)
        text = (
            f"the processes of the runs take {bytes_text(minute)} more of the host's memory each "
            f"minute ({percent_text(minute / host.memory_total)} of it), which is full in {full}: "
            "look for tensors that are kept with their graph, as in a sum of losses without "
            ".item(), and for lists and caches that only grow"
        )
        finding = Finding("host memory", text, "warning", numbers={"bytes_per_minute": minute})
        name = recording.header.get("host", "")
        yield Incident(name, "host", finding, 0.0, times[-1], len(samples))


def _report_device(
    row: Sequence[DeviceReading | None], times: Sequence[float], host: str
) -> DeviceReport:
    known = [reading for reading in row if reading is not None]
    good = [reading for reading in known if reading.error is None]
    last = (good or known)[-1]
    number = max(1, len(good))
    reasons = Counter(reason for reading in good for reason in reading.slowdowns)
    return DeviceReport(
        host=host,
        device=last.device,
        uuid=last.uuid,
        name=last.name,
        utilization_mean=mean(_column(good, "utilization")),
        utilization_peak=_peak(good, "utilization"),
        memory_peak=_peak(good, "memory_used"),
        memory_total=_peak(good, "memory_total"),
        temperature_peak=_peak(good, "temperature"),
        power_mean=mean(_column(good, "power")),
        energy=energy_used(times, _column(row, "energy"), _column(row, "power")),
        throttled=sum(bool(reading.slowdowns) for reading in good) / number,
        reasons=", ".join(
            f"{reason} in {percent_text(count / number)} of the time"
            for reason, count in reasons.most_common()
        ),
    )


def _column(row: Sequence[DeviceReading | None], metric: str) -> list[float | None]:
    return [None if reading is None else reading.value(metric) for reading in row]


def _peak(row: Sequence[DeviceReading], metric: str) -> float | None:
    return max((value for value in _column(row, metric) if value is not None), default=None)


def _report_run(run: _Run, states: Sequence[RunState]) -> RunReport:
    periods, state = run.periods, run.state
    energy = _energy(periods, run.recording.samples, times_of(run.recording.samples))
    watched = sum(one.states[-1].main.samples - one.states[0].main.samples for one in periods)
    summary = summarize_periods(periods, run.slowed)
    return RunReport(
        job=state.job,
        rank=state.rank,
        host=state.host,
        name=run_name(state, states),
        info=state.info,
        pids=tuple(dict.fromkeys(period.states[0].pid for period in periods)),
        summary=summary,
        energy=energy,
        energy_per_sample=None if energy is None or watched <= 0 else energy / watched,
        still_for=_still_for(run, summary),
    )


def _still_for(run: _Run, summary: Summary) -> float:
    """Return for how long a run that is there at the end has made no step; 0 if it goes on."""
    last, times = run.periods[-1], times_of(run.recording.samples)
    if last.places[-1] < len(times) - 1:
        return 0.0
    return seconds_still([times[i] for i in last.places], last.states, summary.step_seconds)


def _report_jobs(reports: Sequence[RunReport], states: Sequence[RunState]) -> tuple[JobReport, ...]:
    found = []
    for job in dict.fromkeys(one.job for one in reports):
        runs = [(r, s) for r, s in zip(reports, states, strict=True) if r.job == job]
        speeds = [(report.rank, report.summary.samples_per_second) for report, _ in runs]
        findings = find_in_job(
            [(state, report.summary) for report, state in runs],
            states,
            [report.still_for for report, _ in runs],
        )
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
    incidents: Sequence[Incident],
) -> Finding:
    found = Finding(
        "unknown",
        "No run was recorded, so nothing is known of its steps. Watch it with "
        "dataparallel.monitor.StepMonitor(model), and record with --attach auto.",
    )
    if runs:
        longest = max(runs, key=lambda run: run.summary.num_steps).job
        found = next(job.findings[0] for job in jobs if job.job == longest)
    for one in incidents[:1]:
        if one.finding.severity == "error" or found.kind in ("nothing", "unknown"):
            return one.finding
    return found
