"""Recordings as tables: one row per device and sample.

A device with several replicas has one row for each of them, and a replica whose device nobody reads
has a row of its own. So each row stands for itself, as spreadsheets and data frames want it.
What has no place in such rows is left out: processes, threads, notes and the last step.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from dataparallel.monitor.run import RunInfo, RunState
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

#: All columns, in their order. The first four tell such a file from others.
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


def is_header(line: str) -> bool:
    """Whether a file that begins with this line is such a recording."""
    return line.split(",")[:4] == list(COLUMNS[:4])


def header_line() -> str:
    """The names of the columns, as the first line of a file."""
    return ",".join(COLUMNS) + "\n"


# --- writing ---------------------------------------------------------------------------------


def sample_lines(sample: Sample) -> str:
    """The rows of a sample, as lines."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    for row in _rows(sample):
        # A line feed within a field would make it two lines, of which a crash may keep one.
        writer.writerow({name: _field(value) for name, value in row.items()})
    return text.getvalue()


def _field(value: object) -> str:
    if value is None:
        return ""
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


# --- reading ---------------------------------------------------------------------------------


@dataclass
class _Rows:
    """The rows of one sample."""

    key: tuple[str, str]
    rows: list[dict[str, str]] = field(default_factory=list)


def read_samples(lines: Iterable[tuple[str, str]], tell: Callable[[str], None]) -> Iterator[Sample]:
    """The samples of a file.

    Args:
        lines: Where each line is, in words, and its text; the first is the header.
        tell: Called with what could not be read.
    """
    columns: list[str] = []
    group: _Rows | None = None
    for where, line in lines:
        if not columns:
            columns = line.split(",")
            continue
        try:
            fields = next(csv.reader([line]), [])
            row = dict(zip(columns, fields, strict=False))
            if len(fields) != len(columns):
                raise ValueError(f"{len(fields)} fields, but there are {len(columns)} columns")
            key = (row["time_unix_s"], row["elapsed_s"])
            # Whatever is wrong with a row is told with its line.
            _sample([row])
        except (ValueError, KeyError, csv.Error) as error:
            tell(f"{where}: this is no row of a recording, it is left out: {str(error)[:120]}")
            continue
        if group is not None and group.key != key:
            yield _sample(group.rows)
            group = None
        group = group or _Rows(key)
        group.rows.append(row)
    if group is not None:
        yield _sample(group.rows)


def _sample(rows: list[dict[str, str]]) -> Sample:
    first = rows[0]
    devices = {row["device"]: _device(row) for row in rows if row["source"]}
    return Sample(
        time=float(first["time_unix_s"]),
        elapsed=float(first["elapsed_s"]),
        cost=float(first["cost_s"]),
        devices=tuple(devices.values()),
        host=_host(first),
        run=_run(rows),
    )


def _device(row: dict[str, str]) -> DeviceReading:
    values = {
        name: float(row[column]) for name, column in _METRICS.items() if row.get(column, "") != ""
    }
    throttle = row["throttle"]
    return DeviceReading(
        row["device"],
        row["device_name"],
        row["source"],
        uuid=row["uuid"] or None,
        values=values,
        throttle=tuple(throttle.split(_SEPARATOR)) if throttle else (),
        parent=row["parent"] or None,
        error=row["error"] or None,
    )


def _host(row: dict[str, str]) -> HostReading | None:
    if row["host_cpus_count"] == "":
        return None
    return HostReading(
        utilization=float(busy) if (busy := row["host_utilization_ratio"]) else None,
        num_cpus=float(row["host_cpus_count"]),
        memory_used=float(row["host_memory_used_bytes"]),
        memory_total=float(row["host_memory_total_bytes"]),
    )


def _run(rows: list[dict[str, str]]) -> RunState | None:
    first = rows[0]
    replicas = sorted((row for row in rows if row["replica"]), key=lambda row: int(row["replica"]))
    if first["run_pid"] == "":
        return None
    for row in replicas:
        if row["replica_phase"] not in PHASES:
            raise ValueError(f"{row['replica_phase']!r} is no phase")
    return RunState(
        pid=int(first["run_pid"]),
        rank=int(first["run_rank"]),
        time=float(first["time_unix_s"]),
        started=float(first["run_started_unix_s"]),
        num_steps=int(first["run_steps_count"]),
        num_samples=int(first["run_samples_count"]),
        info=RunInfo(
            model=first["run_model"],
            wrapper=first["run_wrapper"],
            devices=tuple(row["device"] for row in replicas),
            uuids=tuple(row["uuid"] or None for row in replicas),
            world_size=int(first["run_world_size_count"]),
        ),
        now=tuple(
            (cast(Phase, row["replica_phase"]), float(row["replica_phase_since_s"]))
            for row in replicas
        ),
        totals=tuple(_totals(row) for row in replicas),
        memory=tuple(int(row["replica_memory_bytes"]) for row in replicas),
        last=None,
    )


def _totals(row: dict[str, str]) -> dict[Phase, float]:
    found: dict[Any, float] = {
        phase: float(row[column]) for phase, column in _PHASES.items() if row.get(column, "") != ""
    }
    return found
