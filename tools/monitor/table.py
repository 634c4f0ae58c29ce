"""Recordings as a table: one row per device and sample, for spreadsheets and data frames.

A device with several replicas has one row for each of them, and a replica whose device nobody reads
has a row of its own. Parts without a place in such rows are left out: processes, threads, notes and
the last step.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dataparallel.monitor.readings.metrics import BY_NAME, METRICS
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.run import RunState
from dataparallel.monitor.sample import Sample
from dataparallel.threads.timeline import PHASES, Phase
from dataparallel.tools.monitor.history import reading_of
from dataparallel.tools.monitor.recording import RecordingReader

#: Column of each phase: the seconds of all steps so far.
_PHASES: dict[Phase, str] = {phase: f"{phase.replace(' ', '_')}_seconds" for phase in PHASES}

#: All columns, in their order.
COLUMNS: tuple[str, ...] = (
    *("host", "time", "elapsed", "device", "name", "uuid"),
    *(metric.name_with_unit for metric in METRICS),
    *("throttle", "error", "host_utilization_ratio", "host_memory_used_bytes"),
    *("run_job", "run_rank", "run_pid", "run_steps", "run_samples", "replica", "replica_phase"),
    *_PHASES.values(),
)


def write_table(path: Path, recordings: Iterable[RecordingReader]) -> int:
    """Write the rows of all samples under the names of columns; returns how many there are."""
    number = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for recording in recordings:
            host = {"host": recording.header.get("host", "")}
            for row in itertools.chain.from_iterable(map(_rows, recording)):
                writer.writerow({name: _field(value) for name, value in {**host, **row}.items()})
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
    used = set()
    for run in sample.runs:
        pairs = zip(run.info.devices, run.info.uuids, strict=True)
        for index, (device, uuid) in enumerate(pairs):
            reading = reading_of(sample, device, uuid)
            columns = {"device": device} if reading is None else _device_columns(reading)
            used.add(columns["device"])
            yield {**common, **columns, **_replica_columns(run, index)}
    for reading in sample.devices:
        if reading.device not in used:
            yield {**common, **_device_columns(reading)}


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
