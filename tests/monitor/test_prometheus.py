"""What Prometheus is told: all that is known, in base units and under clean names."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
from prometheus_client import generate_latest, parser

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.monitor.metrics import METRICS
from dataparallel.tools.monitor.prometheus import registry_of
from dataparallel.tools.monitor.reading import DeviceReading, ProcessReading, Sample
from dataparallel.tools.monitor.sample_store import SampleStore
from tests.monitor.cases import BEGIN, GIB, PID, make_device, make_run, make_sample

SLOW = make_sample(devices=(make_device(0, throttle=("power cap",)), make_device(1)))
FAST = make_sample(devices=(make_device(0), make_device(1)))
#: A sample in which each metric has a value.
EVERYTHING = make_sample(
    devices=(
        make_device(5, {metric.name: 0.5 for metric in METRICS}, throttle=("power cap",)),
        *make_sample().devices,
    )
)


def exposed(*samples: Sample) -> str:
    """What is told after the last of some samples; it is also asked for at the others."""
    store = SampleStore()
    registry = registry_of(lambda: store.latest, lambda: store.scores)
    text = generate_latest(registry)
    for sample in samples:
        store.add(sample)
        text = generate_latest(registry)
    return text.decode()


def value(text: str, name: str, labels: str = "") -> float | None:
    """The value of the one series with a name and, among others, labels such as ``a=b|c=d``."""
    wanted = dict(label.split("=") for label in labels.split("|") if label).items()
    found = [
        sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"dataparallel_{name}" and wanted <= sample.labels.items()
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.mark.parametrize(
    ("samples", "name", "labels", "expected"),
    [
        ([], "build_info", "", 1),
        ([], "sample_timestamp_seconds", "", None),
        *(
            ([make_sample()], name, labels, expected)
            for name, labels, expected in [
                ("device_utilization_ratio", "device=cuda:0|uuid=GPU-0", 0.82),
                ("device_memory_used_bytes", "device=cuda:0|name=NVIDIA H100 80GB HBM3", 48 * GIB),
                ("device_power_limit_watts", "device=cuda:0", 700),
                ("device_sm_clock_hertz", "device=cuda:0", 1.98e9),
                ("device_temperature_celsius", "device=cuda:0", 55),
                ("device_pcie_sent_bytes_per_second", "device=cuda:0", 1.2e9),
                ("device_memory_used_bytes", "device=nvml:3:0|parent=cuda:3", 12 * GIB),
                ("device_memory_used_bytes", "device=cuda:3|parent=", 48 * GIB),
                ("device_up", "device=cuda:0", 1),
                ("device_up", "device=cuda:2", 0),
                ("device_throttled", "device=cuda:2", None),
                (
                    "process_device_memory_bytes",
                    f"device=cuda:0|pid={PID}|process=python train.py --epochs 90|user=ada",
                    40 * GIB,
                ),
                ("process_device_memory_bytes", "device=cuda:4", None),
                # It is on four devices, and uses the host once.
                ("process_cpus", f"pid={PID}", 5.2),
                ("host_utilization_ratio", "", 0.43),
                ("host_memory_total_bytes", "", 512 * GIB),
                ("run_thread_utilization_ratio", "thread=replica-0", 0.98),
                ("sample_duration_seconds", "", 0.0031),
                ("sample_timestamp_seconds", "", BEGIN),
                ("replica_phase_seconds_total", "phase=backward|replica=1|device=cuda:1", 40),
                ("replica_phase_seconds_total", "phase=gather|replica=1", 0),
                *(
                    ("replica_phase", f"phase={phase}|replica=1", float(phase == PHASES[3]))
                    for phase in PHASES
                ),
                ("run_steps_total", "", 1000),
                ("run_samples_total", "", 104_000),
                ("run_step_seconds", "", 0.17),
                ("run_info", "model=TransformerLM|world_size=2", 1),
                ("replica_step_samples", "replica=1|device=cuda:1", 28),
                ("run_up", "", 1),
            ]
        ),
        # A reason for being slow stays with zero.
        ([SLOW], "device_throttled", "device=cuda:0|reason=power cap", 1),
        ([SLOW], "device_throttled", "device=cuda:1|reason=power cap", 0),
        ([FAST], "device_throttled", "device=cuda:0", None),
        ([SLOW, FAST], "device_throttled", "device=cuda:0|reason=power cap", 0),
        # The straggler has half the score.
        ([make_sample(0), make_sample(1)], "replica_score_ratio", "replica=0", 0.517),
        ([make_sample(0), make_sample(1)], "replica_score_ratio", "replica=1", 1.0),
        # A run that ends is down.
        ([make_sample(run=None)], "run_up", "", None),
        ([make_sample(), make_sample(run=None)], "run_up", "", 0),
        ([make_sample(), make_sample(run=None)], "replica_phase", "", None),
    ],
)
def test_values(samples: list[Sample], name: str, labels: str, expected: float | None) -> None:
    told = value(exposed(*samples), name, labels)
    assert told == (None if expected is None else pytest.approx(expected, abs=0.01))


def test_each_metric_is_told_under_its_name_with_its_help() -> None:
    families = {f.name: f for f in parser.text_string_to_metric_families(exposed(EVERYTHING))}
    for metric in METRICS:
        name = f"dataparallel_device_{metric.name_with_unit}"
        family = families[name.removesuffix("_total")]
        assert family.type == ("counter" if metric.is_counter else "gauge")
        assert family.documentation.lower() == f"{metric.meaning}.".lower()
        assert {sample.name for sample in family.samples} == {name}
    assert "dataparallel_device_energy_joules" in families


def test_what_is_not_available_is_absent() -> None:
    values = {"utilization": None, "power": math.nan, "temperature": math.inf}
    text = exposed(make_sample(devices=(DeviceReading("cuda:0", "GPU", "nvml", values=values),)))
    assert re.findall(r"^dataparallel_device_\w+", text, re.MULTILINE) == ["dataparallel_device_up"]


def test_the_same_twice_is_told_once_and_any_name_can_be() -> None:
    # Prometheus refuses an answer in which two series are the same.
    odd = ProcessReading("cuda:0", 7, name='a "quoted"\nname \\ with \udcff', memory=1.0)
    text = exposed(make_sample(devices=(make_device(0),) * 2, processes=(odd, odd), run=make_run()))
    lines = [line.rsplit(" ", 1)[0] for line in text.splitlines()]
    assert not [line for line, count in Counter(lines).items() if count > 1]
    told = 'process=a "quoted"\nname \\ with ?'
    assert value(text, "process_device_memory_bytes", told) == 1


#: As promtool has them.
_OTHER_UNITS = "milliseconds|minutes|hours|days|kilobytes|megabytes|bits|percent|fahrenheit|kelvins"
_ABBREVIATIONS = "s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d"


def test_promtool_would_have_nothing_to_say() -> None:
    families = list(parser.text_string_to_metric_families(exposed(EVERYTHING)))
    assert sum(len(family.samples) for family in families) > 150
    for family in families:
        name = family.samples[0].name
        assert family.documentation, name
        assert (family.type == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(count|sum|bucket)$|gauge|counter|[A-Z:]", name), name
        assert not re.search(rf"_({_OTHER_UNITS}|{_ABBREVIATIONS})(_|$)", name), name
        assert len({frozenset(sample.labels) for sample in family.samples}) == 1, name
