"""What Prometheus is told: all that is known, in base units and under clean names."""

from __future__ import annotations

import dataclasses
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
from tests.monitor.made_up_machine import GIB, PID, make_device, make_run, make_sample

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exposed(*samples: Sample | None) -> str:
    """What is told after the last of some samples."""
    store = SampleStore()
    registry = registry_of(lambda: store.latest, lambda: store.scores)
    text = generate_latest(registry)
    for sample in samples:
        if sample is not None:
            store.add(sample)
        text = generate_latest(registry)
    return text.decode()


def series(text: str) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, /, **labels: str) -> float | None:
    """The value of the one series with a name and, among others, these labels."""
    found = [
        number
        for (own, all_labels), number in series(text).items()
        if own == name and labels.items() <= dict(all_labels).items()
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


def everything() -> Sample:
    """A sample in which each metric has a value."""
    device = make_device(
        0, values={metric.name: 0.5 for metric in METRICS}, throttle=("power cap",)
    )
    return make_sample(devices=(device,))


# --- values ------------------------------------------------------------------------------------


def test_each_metric_is_told_in_base_units() -> None:
    text = exposed(make_sample())
    of_first = {"device": "cuda:0", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0000"}
    assert value(text, "dataparallel_device_utilization_ratio", **of_first) == pytest.approx(0.82)
    assert value(text, "dataparallel_device_memory_used_bytes", **of_first) == 48 * GIB
    assert value(text, "dataparallel_device_power_limit_watts", **of_first) == 700
    assert value(text, "dataparallel_device_sm_clock_hertz", **of_first) == 1.98e9
    assert value(text, "dataparallel_device_temperature_celsius", **of_first) == 55
    assert value(text, "dataparallel_device_pcie_sent_bytes_per_second", **of_first) == 1.2e9


def test_each_metric_is_told_under_its_name_with_its_help() -> None:
    families = {f.name: f for f in parser.text_string_to_metric_families(exposed(everything()))}
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
    assert [name for name, _ in series(text) if name.startswith("dataparallel_device_")] == [
        "dataparallel_device_up"
    ]


def test_parts_and_lost_devices() -> None:
    text = exposed(make_sample())
    used = "dataparallel_device_memory_used_bytes"
    assert value(text, used, device="nvml:5/0", parent="cuda:5") == 12 * GIB
    assert value(text, used, device="cuda:5", parent="") == 63 * GIB
    assert value(text, "dataparallel_device_up", device="cuda:0") == 1
    assert value(text, "dataparallel_device_up", device="cuda:4") == 0


def test_a_reason_for_being_slow_stays_with_zero() -> None:
    slow = make_sample(devices=(make_device(0, throttle=("power cap",)), make_device(1)))
    fast = make_sample(devices=(make_device(0), make_device(1)))
    name = "dataparallel_device_throttled"
    assert value(exposed(slow), name, device="cuda:0", reason="power cap") == 1
    assert value(exposed(slow), name, device="cuda:1", reason="power cap") == 0
    assert value(exposed(fast), name, device="cuda:0") is None
    store = SampleStore()
    registry = registry_of(lambda: store.latest)
    for sample in (slow, fast):
        store.add(sample)
        text = generate_latest(registry).decode()
    assert value(text, name, device="cuda:0", reason="power cap") == 0


def test_processes() -> None:
    text = exposed(make_sample())
    memory = "dataparallel_process_device_memory_bytes"
    who = {"pid": str(PID), "process": "python train.py --epochs 90", "user": "ada"}
    assert value(text, memory, device="cuda:0", **who) == 40 * GIB
    assert value(text, memory, device="cuda:7") is None
    # It is on four devices, and uses the host once.
    assert value(text, "dataparallel_process_cpus", **who) == 5.2


def test_host_and_cost() -> None:
    text = exposed(make_sample())
    assert value(text, "dataparallel_host_utilization_ratio") == 0.43
    assert value(text, "dataparallel_host_memory_total_bytes") == 512 * GIB
    assert value(text, "dataparallel_run_thread_utilization_ratio", thread="replica-0") == 0.98
    assert value(text, "dataparallel_sample_duration_seconds") == 0.0031
    assert value(text, "dataparallel_sample_timestamp_seconds") == 1e9


# --- the run -----------------------------------------------------------------------------------


def test_run() -> None:
    text = exposed(make_sample())
    own = {"replica": "1", "device": "cuda:1"}
    seconds = "dataparallel_replica_phase_seconds_total"
    assert value(text, seconds, phase="backward", **own) == pytest.approx(40)
    assert value(text, seconds, phase="gather", **own) == 0
    now = {p: value(text, "dataparallel_replica_phase", phase=p, **own) for p in PHASES}
    assert [phase for phase, holds in now.items() if holds] == ["gather"]
    assert value(text, "dataparallel_run_steps_total") == 1000
    assert value(text, "dataparallel_run_samples_total") == 104_000
    assert value(text, "dataparallel_run_step_seconds") == pytest.approx(0.17)
    assert value(text, "dataparallel_run_info", model="TransformerLM", world_size="2") == 1
    assert value(text, "dataparallel_replica_step_samples", **own) == 28


def test_the_straggler_has_half_the_score() -> None:
    text = exposed(make_sample(0), make_sample(1))
    name = "dataparallel_replica_score_ratio"
    scores = [value(text, name, replica=str(i)) for i in range(4)]
    assert scores == [pytest.approx(0.5, abs=0.05), *[pytest.approx(1.0)] * 3]


def test_a_run_that_ends_is_down() -> None:
    never, there, gone = make_sample(run=None), make_sample(), make_sample(run=None)
    assert value(exposed(never), "dataparallel_run_up") is None
    assert value(exposed(there), "dataparallel_run_up") == 1
    store = SampleStore()
    registry = registry_of(lambda: store.latest, lambda: store.scores)
    for sample in (there, gone):
        store.add(sample)
        text = generate_latest(registry).decode()
    assert value(text, "dataparallel_run_up") == 0
    assert not [name for name, _ in series(text) if "replica" in name]


# --- hygiene -----------------------------------------------------------------------------------


def test_before_the_first_sample_there_is_the_version() -> None:
    assert [name for name, _ in series(exposed(None))] == ["dataparallel_build_info"]


def test_the_same_twice_is_told_once() -> None:
    # Prometheus refuses an answer in which two series are the same.
    process = ProcessReading("cuda:0", 7, memory=1.0)
    sample = make_sample(
        devices=(make_device(0), make_device(0)), processes=(process, process), run=make_run()
    )
    lines = [line.rsplit(" ", 1)[0] for line in exposed(sample).splitlines()]
    assert not [line for line, count in Counter(lines).items() if count > 1]


def test_any_name_can_be_told() -> None:
    name = 'a "quoted"\nname \\ with \udcff'
    process = ProcessReading("cuda:0", 7, name=name, memory=1.0)
    text = exposed(make_sample(processes=(process,)))
    told = 'a "quoted"\nname \\ with ?'
    assert value(text, "dataparallel_process_device_memory_bytes", process=told) == 1


#: As promtool has them.
_OTHER_UNITS = "milliseconds|minutes|hours|days|kilobytes|megabytes|bits|percent|fahrenheit|kelvins"
_ABBREVIATIONS = "s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d"


def complaints(text: str) -> list[str]:
    """What ``promtool check metrics`` would say."""
    found = []
    for family in parser.text_string_to_metric_families(text):
        name = family.samples[0].name
        if not family.documentation:
            found.append(f"{name}: no help")
        if (family.type == "counter") != name.endswith("_total"):
            found.append(f"{name}: _total is for counters, and only for them")
        if re.search(r"_(count|sum|bucket)$", name) or re.search(r"gauge|counter|[A-Z:]", name):
            found.append(f"{name}: words of Prometheus's own, or capitals")
        if re.search(rf"_({_OTHER_UNITS}|{_ABBREVIATIONS})(_|$)", name):
            found.append(f"{name}: not a base unit")
        if len({frozenset(sample.labels) for sample in family.samples}) > 1:
            found.append(f"{name}: its series have different labels")
    return found


def test_promtool_would_have_nothing_to_say() -> None:
    whole = dataclasses.replace(
        make_sample(), devices=(*everything().devices, *make_sample().devices)
    )
    text = exposed(whole)
    assert len(series(text)) > 200
    assert complaints(text) == []
