"""A recording as a table: one row per device and sample, for spreadsheets and data frames.

A device with several replicas has one row for each of them, and a replica whose device nobody reads
has a row of its own. So each row stands for itself, as spreadsheets and data frames want it.
What has no place in such rows is left out: processes, threads, notes and the last step.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.metrics import METRICS, Unit
from dataparallel.tools.monitor.reading import DeviceReading, HostReading, Sample

_UNITS: dict[Unit, str] = {
    "ratio": "ratio",
    "bytes": "bytes",
    "bytes/s": "bytes_per_s",
    "W": "W",
    "J": "J",
    "C": "C",
    "Hz": "Hz",
    "count": "count",
}

#: Column of each metric.
_METRICS = {metric.name: f"{metric.name}_{_UNITS[metric.unit]}" for metric in METRICS}
#: Column of each phase: the seconds of all steps so far.
_PHASES: dict[Phase, str] = {phase: f"{phase.replace(' ', '_')}_s" for phase in PHASES}

#: All columns, in their order.
COLUMNS: tuple[str, ...] = (
    *("time_unix_s", "elapsed_s", "cost_s", "device", "device_name", "source", "uuid", "parent"),
    *_METRICS.values(),
    *("throttle", "error", "host_utilization_ratio", "host_cpus_count"),
    *("host_memory_used_bytes", "host_memory_total_bytes"),
    *("run_pid", "run_rank", "run_started_unix_s", "run_steps_count", "run_samples_count"),
    *("run_model", "run_wrapper", "run_world_size_count"),
    *("replica", "replica_phase", "replica_phase_since_s", "replica_memory_bytes"),
    *_PHASES.values(),
)

_SEPARATOR = "; "


def write_table(path: Path, samples: Iterable[Sample]) -> int:
    """Write the rows of all samples under a line with the names of the columns.

    Args:
        path: The file; one that is there is replaced.
        samples: The oldest first.

    Returns:
        How many rows there are.
    """
    number = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for sample in samples:
            for row in _rows(sample):
                writer.writerow({name: _field(value) for name, value in row.items()})
                number += 1
    return number


def _field(value: object) -> str:
    if value is None:
        return ""
    # A line feed within a field splits a row for programs that read line by line.
    return re.sub(r"\s+", " ", value) if isinstance(value, str) else repr(value)


def _rows(sample: Sample) -> Iterator[dict[str, object]]:
    common: dict[str, object] = {
        "time_unix_s": sample.time,
        "elapsed_s": sample.elapsed,
        "cost_s": sample.cost,
        **_host_columns(sample.host),
        **_run_columns(sample.run),
    }
    devices = sample.run.info.devices if sample.run is not None else ()
    for reading in sample.devices:
        own: list[int | None] = [
            index for index, device in enumerate(devices) if device == reading.device
        ] or [None]
        for index in own:
            yield {**common, **_device_columns(reading), **_replica_columns(sample.run, index)}
    read = {reading.device for reading in sample.devices}
    for index, device in enumerate(devices):
        if device not in read:
            yield {**common, "device": device, **_replica_columns(sample.run, index)}
    if not sample.devices and not devices:
        yield common


def _host_columns(host: HostReading | None) -> dict[str, object]:
    if host is None:
        return {}
    return {
        "host_utilization_ratio": host.utilization,
        "host_cpus_count": host.num_cpus,
        "host_memory_used_bytes": host.memory_used,
        "host_memory_total_bytes": host.memory_total,
    }


def _run_columns(run: RunState | None) -> dict[str, object]:
    if run is None:
        return {}
    return {
        "run_pid": run.pid,
        "run_rank": run.rank,
        "run_started_unix_s": run.started,
        "run_steps_count": run.num_steps,
        "run_samples_count": run.num_samples,
        "run_model": run.info.model,
        "run_wrapper": run.info.wrapper,
        "run_world_size_count": run.info.world_size,
    }


def _device_columns(reading: DeviceReading) -> dict[str, object]:
    return {
        "device": reading.device,
        "device_name": reading.name,
        "source": reading.source,
        "uuid": reading.uuid,
        "parent": reading.parent,
        "throttle": _SEPARATOR.join(reading.throttle),
        "error": reading.error,
        **{_METRICS[name]: value for name, value in reading.values.items()},
    }


def _replica_columns(run: RunState | None, index: int | None) -> dict[str, object]:
    if run is None or index is None:
        return {}
    phase, since = run.now[index]
    return {
        "replica": index,
        "replica_phase": phase,
        "replica_phase_since_s": since,
        "replica_memory_bytes": run.memory[index],
        **{_PHASES[name]: seconds for name, seconds in run.totals[index].items()},
    }
