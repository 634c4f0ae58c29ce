"""The latest sample as metrics of Prometheus.

Note [Metrics of Prometheus]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Names follow Prometheus's rules: base units at the end, ``_total`` for counters, and the same labels
on all series of a metric. What is not available has no series, so that averages stay right. A label
that does not apply is empty, which is the same as if it were not there. A series that comes and
goes, such as a reason for being slowed down, stays with 0 once it has been seen, and a device that
is lost keeps ``dataparallel_device_up`` with 0.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from dataparallel.monitor.findings import ReplicaScore
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import PHASES
from dataparallel.tools.extras import needs_extra
from dataparallel.tools.monitor.metrics import METRICS, Metric
from dataparallel.tools.monitor.reading import DeviceReading, HostReading, ProcessReading, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily

#: How Prometheus calls the units of metrics.
_UNITS = {
    "ratio": "_ratio",
    "bytes": "_bytes",
    "bytes/s": "_bytes_per_second",
    "W": "_watts",
    "J": "_joules",
    "C": "_celsius",
    "Hz": "_hertz",
    "count": "_errors",
}
_DEVICE = ("device", "name", "uuid", "parent")
_PROCESS = ("pid", "process", "user")
_REPLICA = ("replica", "device")


def registry_of(
    latest: Callable[[], Sample | None],
    scores: Callable[[], Sequence[ReplicaScore]] = tuple,
) -> CollectorRegistry:
    """A registry that tells the latest sample, and nothing else.

    Example::

        registry = registry_of(lambda: sample)
        print(prometheus_client.generate_latest(registry).decode())

    Args:
        latest: Tells the latest sample; None if there is none yet.
        scores: Tells how fast the replicas of its run are lately. Default: nothing.

    Raises:
        ImportError: prometheus-client is not installed.
    """
    with needs_extra("monitor"):
        from prometheus_client import CollectorRegistry
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampleCollector(latest, scores))
    return registry


def metric_name(metric: Metric) -> str:
    """The name of a device's metric in Prometheus, as its series have it.

    Example::

        assert metric_name(BY_NAME["power"]) == "dataparallel_device_power_watts"
    """
    total = "_total" if metric.is_counter else ""
    return f"dataparallel_device_{metric.name}{_UNITS[metric.unit]}{total}"


class SampleCollector:
    """Turns the latest sample into metrics. See Note [Metrics of Prometheus].

    Args:
        latest: Tells the latest sample; None if there is none yet.
        scores: Tells how fast the replicas of its run are lately.
    """

    def __init__(
        self,
        latest: Callable[[], Sample | None],
        scores: Callable[[], Sequence[ReplicaScore]],
    ) -> None:
        self._latest = latest
        self._scores = scores
        self._lock = threading.Lock()
        self._reasons: dict[str, None] = {}
        self._saw_run = False

    def collect(self) -> Iterable[Family]:
        """All metrics that have a value now."""
        sample = self._latest()
        families = _Families()
        families.gauge(
            "dataparallel_build_info",
            "Version of the package that tells these metrics.",
            1,
            {"version": metadata.version("dataparallel")},
        )
        if sample is not None:
            with self._lock:
                self._remember(sample)
                reasons, saw_run = list(self._reasons), self._saw_run
            _tell_sampling(families, sample)
            for device in sample.devices:
                _tell_device(families, device, reasons)
            _tell_processes(families, sample.processes)
            if sample.host is not None:
                _tell_host(families, sample.host)
            if saw_run:
                families.gauge(
                    "dataparallel_run_up",
                    "Whether the run that is watched answers.",
                    float(sample.run is not None),
                )
            if sample.run is not None:
                _tell_run(families, sample.run)
                for score in self._scores():
                    families.gauge(
                        "dataparallel_replica_score_ratio",
                        "Speed of the replica beside the fastest one, lately; 0.5 is half of it.",
                        score.relative,
                        dict(zip(_REPLICA, (str(score.index), score.device), strict=True)),
                    )
        return families.all()

    def _remember(self, sample: Sample) -> None:
        for device in sample.devices:
            self._reasons.update(dict.fromkeys(device.throttle))
        self._saw_run = self._saw_run or sample.run is not None


class _Families:
    """Metrics that grow series by series; a series that is there already is not added again."""

    def __init__(self) -> None:
        with needs_extra("monitor"):
            from prometheus_client import core
        self._core = core
        self._families: dict[str, Family] = {}
        self._seen: set[tuple[str, tuple[str, ...]]] = set()

    def gauge(
        self, name: str, meaning: str, value: float | None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Add a series of a value that goes up and down."""
        self._add(self._core.GaugeMetricFamily, name, meaning, value, labels or {})

    def counter(
        self, name: str, meaning: str, value: float | None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Add a series of a value that only grows."""
        self._add(self._core.CounterMetricFamily, name, meaning, value, labels or {})

    def all(self) -> Iterator[Family]:
        """The metrics, in the order in which they came."""
        yield from self._families.values()

    def _add(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        meaning: str,
        value: float | None,
        labels: Mapping[str, str],
    ) -> None:
        # Two series with the same labels would make Prometheus refuse all of the answer.
        values = tuple(map(_clean, labels.values()))
        if value is None or not math.isfinite(value) or (name, values) in self._seen:
            return
        self._seen.add((name, values))
        if name not in self._families:
            self._families[name] = kind(name, meaning, labels=tuple(labels))
        self._families[name].add_metric(values, float(value))


def _clean(text: str) -> str:
    """Without what cannot be written as UTF-8: names of processes may be any bytes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _tell_sampling(families: _Families, sample: Sample) -> None:
    families.gauge(
        "dataparallel_sample_timestamp_seconds",
        "When the latest sample was taken, in seconds since 1970.",
        sample.time,
    )
    families.gauge(
        "dataparallel_sample_duration_seconds",
        "How long it took to take the latest sample.",
        sample.cost,
    )


def _tell_device(families: _Families, device: DeviceReading, reasons: Sequence[str]) -> None:
    whose = (device.device, device.name, device.uuid or "", device.parent or "")
    labels = dict(zip(_DEVICE, whose, strict=True))
    families.gauge(
        "dataparallel_device_up",
        "Whether the device can be read; 0 if it is lost.",
        float(device.error is None),
        labels,
    )
    for metric in METRICS:
        tell = families.counter if metric.is_counter else families.gauge
        meaning = f"{metric.meaning[0].upper()}{metric.meaning[1:]}."
        tell(metric_name(metric), meaning, device.value(metric.name), labels)
    if device.error is None:
        for reason in reasons:
            families.gauge(
                "dataparallel_device_throttled",
                "Whether the device is slowed down for this reason.",
                float(reason in device.throttle),
                {**labels, "reason": reason},
            )


def _tell_processes(families: _Families, processes: Sequence[ProcessReading]) -> None:
    for process in processes:
        whose = (str(process.pid), process.name or "", process.user or "")
        labels = dict(zip(_PROCESS, whose, strict=True))
        on_device = {"device": process.device, **labels}
        families.gauge(
            "dataparallel_process_device_memory_bytes",
            "Memory of the device that the process holds.",
            process.memory,
            on_device,
        )
        families.gauge(
            "dataparallel_process_device_utilization_ratio",
            "Share of the device's time that the process uses.",
            process.utilization,
            on_device,
        )
        # A process may use several devices; what it takes of the host is told once.
        families.gauge(
            "dataparallel_process_cpus",
            "Processors of the host that the process keeps busy.",
            process.cpu,
            labels,
        )
        families.gauge(
            "dataparallel_process_host_memory_bytes",
            "Memory of the host that the process holds.",
            process.host_memory,
            labels,
        )


def _tell_host(families: _Families, host: HostReading) -> None:
    families.gauge(
        "dataparallel_host_utilization_ratio",
        "Share of the processors that can be used that is busy.",
        host.utilization,
    )
    families.gauge(
        "dataparallel_host_cpus",
        "Processors that can be used: of the host, or of the container if it has a limit.",
        host.num_cpus,
    )
    families.gauge(
        "dataparallel_host_memory_used_bytes", "Memory of the host in use.", host.memory_used
    )
    families.gauge(
        "dataparallel_host_memory_total_bytes",
        "Memory of the host that there is.",
        host.memory_total,
    )
    for thread, utilization in host.threads.items():
        families.gauge(
            "dataparallel_run_thread_utilization_ratio",
            "Share of one processor that a thread of the run keeps busy.",
            utilization,
            {"thread": thread},
        )


def _tell_run(families: _Families, run: RunState) -> None:
    info = run.info
    families.gauge(
        "dataparallel_run_info",
        "The run that is watched.",
        1,
        {
            "pid": str(run.pid),
            "rank": str(run.rank),
            "world_size": str(info.world_size),
            "model": info.model,
            "wrapper": info.wrapper,
        },
    )
    families.gauge(
        "dataparallel_run_start_timestamp_seconds",
        "When watching the run began, in seconds since 1970.",
        run.started,
    )
    families.counter("dataparallel_run_steps_total", "Steps of the run.", run.num_steps)
    families.counter(
        "dataparallel_run_samples_total",
        "Samples of these steps, in this process.",
        run.num_samples,
    )
    if run.last is not None:
        families.gauge(
            "dataparallel_run_step_seconds", "How long the last step took.", run.last.seconds
        )
    for replica, device in enumerate(info.devices):
        _tell_replica(
            families, run, replica, dict(zip(_REPLICA, (str(replica), device), strict=True))
        )


def _tell_replica(
    families: _Families, run: RunState, replica: int, labels: Mapping[str, str]
) -> None:
    if replica < len(run.totals):
        for phase in PHASES:
            families.counter(
                "dataparallel_replica_phase_seconds_total",
                "Time that the replica has spent in a phase.",
                run.totals[replica].get(phase, 0.0),
                {**labels, "phase": phase},
            )
    if replica < len(run.now):
        for phase in PHASES:
            families.gauge(
                "dataparallel_replica_phase",
                "Whether the replica is in this phase now.",
                float(run.now[replica][0] == phase),
                {**labels, "phase": phase},
            )
    if replica < len(run.memory):
        families.gauge(
            "dataparallel_replica_memory_bytes",
            "Memory of its device that torch's tensors occupy.",
            run.memory[replica] or None,
            labels,
        )
    if run.last is not None and replica < len(run.last.replicas):
        families.gauge(
            "dataparallel_replica_step_samples",
            "Samples that the replica got in the last step.",
            run.last.replicas[replica].samples,
            labels,
        )
