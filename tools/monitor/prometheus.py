"""The latest sample as metrics of Prometheus.

Names follow Prometheus's rules: base units at the end, ``_total`` for counters, and the same labels
on all series of a metric. An unavailable value has no series, so that averages stay right. A label
that does not apply is empty, which is the same as if it were not there. A series that comes and
goes, such as a reason for being slowed down, stays with 0 once it has been seen. A lost device
keeps ``dataparallel_device_up`` with 0, and a run that is gone ``dataparallel_run_up``.

Series of runs have labels for what tells runs from each other: ``rank``, ``model``, and once there
have been several jobs ``job``. Prometheus itself has a label of that name, and stores ours as
``exported_job``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dataparallel.monitor.readings.metrics import METRICS
from dataparallel.monitor.readings.placement import LABELS
from dataparallel.monitor.readings.reading import DeviceReading, HostReading, ProcessReading
from dataparallel.monitor.run import RunState
from dataparallel.monitor.sample import Sample
from dataparallel.threads import PHASES
from dataparallel.tools.monitor.ranks import model_name, process_name
from dataparallel.tools.monitor.sample_store import RunReading, SampleStore

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily

#: The meanings of the metrics, without the prefix of their names; ``_total`` makes a counter.
_MEANINGS = {
    "build_info": "Version of the package that tells these metrics.",
    "sample_timestamp_seconds": "When the latest sample was taken, in seconds since 1970.",
    "sample_duration_seconds": "How long it took to take the latest sample.",
    "driver_info": "Versions of what drives the devices.",
    "device_up": "Whether the device can be read; 0 if it is lost.",
    "device_throttled": "Whether the device is slowed down for this reason.",
    **{
        f"device_{metric.name_with_unit}": f"{metric.meaning[0].upper()}{metric.meaning[1:]}."
        for metric in METRICS
    },
    "process_device_memory_bytes": "Memory of the device that the process holds.",
    "process_device_utilization_ratio": "Share of the device's time that the process uses.",
    "process_cpus": "Processors of the host that the process keeps busy.",
    "process_host_memory_bytes": "Memory of the host that the process holds.",
    "host_utilization_ratio": "Share of the processors that can be used that is busy.",
    "host_cpus": "Processors that can be used: of the host, or of the container if it has a limit.",
    "host_memory_used_bytes": "Memory of the host in use.",
    "host_memory_total_bytes": "Memory of the host that there is.",
    "host_swap_used_bytes": "Swap space in use.",
    "host_swap_total_bytes": "Swap space that there is.",
    "host_load_average": "Processes that ran or waited, on average over so many minutes.",
    "run_thread_utilization_ratio": "Share of one processor that a thread of the run keeps busy.",
    "run_up": "Whether the run answers.",
    "run_info": "A run that is watched.",
    "run_start_timestamp_seconds": "When watching the run began, in seconds since 1970.",
    "run_steps_total": "Steps of the run.",
    "run_samples_total": "Samples of these steps, in this process.",
    "run_step_seconds": "How long the last step took.",
    "replica_score_ratio": "Speed of the replica beside the fastest one, lately; 0.5 is half.",
    "replica_phase_seconds_total": "Time that the replica has spent in a phase.",
    "replica_phase": "Whether the replica is in this phase now.",
    "replica_memory_bytes": "Memory of its device that torch's tensors occupy.",
    "replica_step_samples": "Samples that the replica got in the last step.",
}


def registry_of(store: SampleStore) -> CollectorRegistry:
    """Return a registry that tells the latest sample of a store, and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampleCollector(store))
    return registry


class SampleCollector:
    """A collector that turns the latest sample of a store into metrics."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._reasons: dict[str, None] = {}
        self._saw_jobs = False

    def collect(self) -> Iterable[Family]:
        """Return all metrics that have a value now."""
        sample = self._store.latest
        families = _Families()
        families.tell("build_info", 1, version=metadata.version("dataparallel"))
        if sample is not None:
            with self._lock:
                for device in sample.devices:
                    self._reasons.update(dict.fromkeys(device.throttle))
                runs = self._store.runs
                states = [run.state for run in runs]
                self._saw_jobs = self._saw_jobs or len({one.job for one in states}) > 1
                reasons, has_jobs = list(self._reasons), self._saw_jobs
            families.tell("sample_timestamp_seconds", sample.time)
            families.tell("sample_duration_seconds", sample.cost)
            if sample.versions:
                told = {name: sample.versions.get(name, "") for name in ("driver", "CUDA")}
                families.tell("driver_info", 1, driver=told["driver"], cuda=told["CUDA"])
            for device in sample.devices:
                _tell_device(families, device, reasons)
            for process in sample.processes:
                _tell_process(families, process)
            if sample.host is not None:
                _tell_host(families, sample.host)
                _tell_threads(families, sample, has_jobs)
            for run in runs:
                labels = _labels(run.state, has_jobs)
                labels["model"] = model_name(run.state, states) or run.state.info.model
                families.tell("run_up", run.is_up, **labels)
                if run.is_up:
                    _tell_run(families, run, labels)
        return families.found.values()


class _Families:
    """Metrics that grow series by series; a series that is there already is not added again."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, tuple[str, ...]]] = set()
        self.found: dict[str, Family] = {}

    def tell(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add a series; its labels are always given in the same order."""
        # Names of processes may be any bytes. Two series with the same labels would make Prometheus
        # refuse all of the answer.
        values = tuple(text.encode("utf-8", "replace").decode() for text in labels.values())
        if value is None or not math.isfinite(value) or (name, values) in self._seen:
            return
        self._seen.add((name, values))
        if name not in self.found:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            self.found[name] = kind(f"dataparallel_{name}", _MEANINGS[name], labels=tuple(labels))
        self.found[name].add_metric(values, float(value))


def _tell_device(families: _Families, device: DeviceReading, reasons: Sequence[str]) -> None:
    labels = {
        "device": device.device,
        "name": device.name,
        "uuid": device.uuid or "",
        "parent": device.parent or "",
    }
    families.tell("device_up", device.error is None, **labels)
    for metric in METRICS:
        families.tell(f"device_{metric.name_with_unit}", device.value(metric.name), **labels)
    if device.error is None:
        for reason in reasons:
            families.tell("device_throttled", reason in device.throttle, **labels, reason=reason)


def _tell_process(families: _Families, process: ProcessReading) -> None:
    labels = {
        "pid": str(process.pid),
        "process": process.name or "",
        "user": process.user or "",
    }
    device = process.device
    families.tell("process_device_memory_bytes", process.memory, device=device, **labels)
    families.tell("process_device_utilization_ratio", process.utilization, device=device, **labels)
    # A process may use several devices; its share of the host is shown once.
    families.tell("process_cpus", process.cpu, **labels)
    families.tell("process_host_memory_bytes", process.host_memory, **labels)


def _tell_host(families: _Families, host: HostReading) -> None:
    families.tell("host_utilization_ratio", host.utilization)
    families.tell("host_cpus", host.num_cpus)
    families.tell("host_memory_used_bytes", host.memory_used)
    families.tell("host_memory_total_bytes", host.memory_total)
    families.tell("host_swap_used_bytes", host.swap_used)
    families.tell("host_swap_total_bytes", host.swap_total)
    for minutes, load in zip(("1", "5", "15"), host.load or (), strict=False):
        families.tell("host_load_average", load, minutes=minutes)


def _tell_threads(families: _Families, sample: Sample, has_jobs: bool) -> None:
    assert sample.host is not None
    named = {process_name(one, sample.runs): _labels(one, has_jobs) for one in sample.runs}
    for thread, utilization in sample.host.threads.items():
        process, _, name = thread.rpartition(" ")
        labels = named.get(process, {"job": "", "rank": ""})
        families.tell("run_thread_utilization_ratio", utilization, **labels, thread=name)


def _labels(run: RunState, has_jobs: bool) -> dict[str, str]:
    return {"job": run.job if has_jobs else "", "rank": str(run.rank)}


def _tell_run(families: _Families, run: RunReading, run_labels: Mapping[str, str]) -> None:
    state, info = run.state, run.state.info
    families.tell(
        "run_info",
        1,
        **run_labels,
        pid=str(state.pid),
        host=state.host,
        world_size=str(info.world_size),
        wrapper=info.wrapper,
        **{label: info.labels.get(label, "") for label in LABELS},
    )
    families.tell("run_start_timestamp_seconds", state.started, **run_labels)
    for kind, steps in state.kinds.items():
        families.tell("run_steps_total", steps.steps, **run_labels, kind=kind)
        families.tell("run_samples_total", steps.samples, **run_labels, kind=kind)
    replicas = () if state.last is None else state.last.replicas
    if state.last is not None:
        families.tell("run_step_seconds", state.last.seconds, **run_labels)
    for one in run.scores:
        labels = {**run_labels, "replica": str(one.index), "device": one.device}
        families.tell("replica_score_ratio", one.relative, **labels)
    known = zip(info.devices, state.now, state.memory, strict=True)
    for i, (device, now, memory) in enumerate(known):
        labels = {**run_labels, "replica": str(i), "device": device}
        for phase in PHASES:
            seconds = sum(one.seconds[i].get(phase, 0.0) for one in state.kinds.values())
            families.tell("replica_phase_seconds_total", seconds, **labels, phase=phase)
            families.tell("replica_phase", now[0] == phase, **labels, phase=phase)
        families.tell("replica_memory_bytes", memory or None, **labels)
        if i < len(replicas):
            families.tell("replica_step_samples", replicas[i].samples, **labels)
