"""A recording as a table: one row per device and sample, for spreadsheets and data frames.

A device with several replicas has one row for each of them, and a replica whose device nobody reads
has a row of its own. What has no place in such rows is left out: processes, threads, notes and the
last step.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dataparallel.monitor.readings.metrics import BY_NAME, METRICS
from dataparallel.monitor.readings.reading import DeviceReading, Sample
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import PHASES, Phase

#: Column of each phase: the seconds of all steps so far.
_PHASES: dict[Phase, str] = {phase: f"{phase.replace(' ', '_')}_seconds" for phase in PHASES}

#: All columns, in their order.
COLUMNS: tuple[str, ...] = (
    *("time", "elapsed", "device", "name", "uuid"),
    *(metric.name_with_unit for metric in METRICS),
    *("throttle", "error", "host_utilization_ratio", "host_memory_used_bytes"),
    *("run_job", "run_rank", "run_pid", "run_steps", "run_samples", "replica", "replica_phase"),
    *_PHASES.values(),
)


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


def _field(value: object) -> object:
    # A line feed within a field splits a row for programs that read line by line.
    return re.sub(r"\s+", " ", value) if isinstance(value, str) else value


def _rows(sample: Sample) -> Iterator[dict[str, object]]:
    common: dict[str, object] = {"time": sample.time, "elapsed": sample.elapsed}
    if sample.host is not None:
        common["host_utilization_ratio"] = sample.host.utilization
        common["host_memory_used_bytes"] = sample.host.memory_used
    read = {reading.device: _device_columns(reading) for reading in sample.devices}
    used = set()
    for run in sample.runs:
        for index, device in enumerate(run.info.devices):
            used.add(device)
            columns = read.get(device, {"device": device})
            yield {**common, **columns, **_replica_columns(run, index)}
    for device, columns in read.items():
        if device not in used:
            yield {**common, **columns}


def _device_columns(reading: DeviceReading) -> dict[str, object]:
    return {
        "device": reading.device,
        "name": reading.name,
        "uuid": reading.uuid,
        "throttle": "; ".join(reading.throttle),
        "error": reading.error,
        **{BY_NAME[name].name_with_unit: value for name, value in reading.values.items()},
    }


def _replica_columns(run: RunState, index: int) -> dict[str, object]:
    return {
        "run_job": run.job,
        "run_rank": run.rank,
        "run_pid": run.pid,
        "run_steps": run.num_steps,
        "run_samples": run.num_samples,
        "replica": index,
        "replica_phase": run.now[index][0],
        **{_PHASES[name]: value for name, value in run.totals[index].items()},
    }
