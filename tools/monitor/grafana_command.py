"""The command `monitor grafana`: print a dashboard for the metrics of `monitor serve`.

The form is the classic one of a dashboard, which Grafana imports from version 10 on. The source of
the data, the machines and the ranks are variables of the dashboard.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.monitor.palette import DARK

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
#: Width of a dashboard, and height of a chart and of a number, in Grafana's units.
_WIDTH, _HEIGHT, _LOW = 24, 8, 4

#: The series that are shown.
_ON_MACHINE, _OF_RANK = 'instance=~"$instance"', 'instance=~"$instance",rank=~"$rank"'
_DEVICE, _REPLICA = "{{instance}} {{device}}", "rank {{rank}}, replica {{replica}} on {{device}}"
_THREAD, _PROCESS = "rank {{rank}} {{thread}}", "{{device}} {{process}} {{pid}} {{user}}"


def _machine(metric: str) -> str:
    return f"dataparallel_{metric}{{{_ON_MACHINE}}}"


def _device(metric: str) -> str:
    return _machine(f"device_{metric}")


def _run(metric: str) -> str:
    return f"dataparallel_{metric}{{{_OF_RANK}}}"


def _rate(series: str) -> str:
    return f"rate({series}[$__rate_interval])"


_SAMPLES = f"sum({_rate(_run('run_samples_total'))})"
#: The energy of those devices only on which there are replicas.
_ENERGY = (
    f"sum({_rate(_device('energy_joules_total'))} and on (instance, device) "
    f"{_run('replica_phase_seconds_total')})"
)
_PER_SAMPLE = f"{_ENERGY} / {_SAMPLES}"
_THROTTLED = ("power", "heat", "sync_boost", "board_limit", "reliability")
_ERRORS = (
    *("ecc_corrected_errors", "ecc_uncorrected_errors", "xid_errors", "pcie_replays"),
    *("remapped_rows_correctable", "remapped_rows_uncorrectable"),
)

#: Title, unit, and by expression the name of its series.
_Panel = tuple[str, str, Mapping[str, str]]

_NUMBERS: tuple[_Panel, ...] = (
    ("Speed", "suffix: samples/s", {_SAMPLES: "samples"}),
    ("Longest step", "s", {f"max({_run('run_step_seconds')})": "step"}),
    ("Energy per sample", "joule", {_PER_SAMPLE: "energy"}),
    ("Slowest replica", "percentunit", {f"bottomk(1, {_run('replica_score_ratio')})": _REPLICA}),
)
_PHASES = (
    "Time of replicas by phase",
    "percentunit",
    {f"avg by (phase) ({_rate(_run('replica_phase_seconds_total'))})": "{{phase}}"},
)
_RUN: tuple[_Panel, ...] = (
    (
        "Speed of each rank",
        "suffix: samples/s",
        {f"sum by (instance, rank) ({_rate(_run('run_samples_total'))})": "rank {{rank}}"},
    ),
    _PHASES,
    ("Speed beside the fastest replica", "percentunit", {_run("replica_score_ratio"): _REPLICA}),
    ("Energy per sample", "joule", {_PER_SAMPLE: "energy"}),
    ("Step", "s", {_run("run_step_seconds"): "rank {{rank}}"}),
    ("Memory of tensors", "bytes", {_run("replica_memory_bytes"): _REPLICA}),
)
_DEVICES: tuple[_Panel, ...] = (
    ("Utilization", "percentunit", {_device("utilization_ratio"): _DEVICE}),
    ("Memory in use", "bytes", {_device("memory_used_bytes"): _DEVICE}),
    ("Power", "watt", {_device("power_watts"): _DEVICE}),
    ("Temperature", "celsius", {_device("temperature_celsius"): _DEVICE}),
    ("Clock of the processors", "hertz", {_device("sm_clock_hertz"): _DEVICE}),
    (
        "Traffic",
        "Bps",
        {
            _device(f"{bus}_{way}_bytes_per_second"): f"{_DEVICE} {bus} {way}"
            for bus in ("pcie", "nvlink")
            for way in ("sent", "received")
        },
    ),
    (
        "Share of time slowed down",
        "percentunit",
        {
            _rate(_device(f"throttled_by_{why}_seconds_total")): f"{_DEVICE} {why}"
            for why in _THROTTLED
        },
    ),
    (
        "Errors",
        "short",
        {
            f"increase({_device(f'{error}_total')}[$__rate_interval])": f"{_DEVICE} {error}"
            for error in _ERRORS
        },
    ),
)
_HOST: tuple[_Panel, ...] = (
    ("Processors", "percentunit", {_machine("host_utilization_ratio"): "{{instance}}"}),
    ("Memory of the host", "bytes", {_machine("host_memory_used_bytes"): "{{instance}}"}),
    ("Threads of runs", "percentunit", {_run("run_thread_utilization_ratio"): _THREAD}),
    ("Device memory of processes", "bytes", {_machine("process_device_memory_bytes"): _PROCESS}),
)


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    print(json.dumps(dashboard(), indent=2))
    return 0


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    sections = (("Run", _NUMBERS, _RUN), ("Devices", (), _DEVICES), ("Host", (), _HOST))
    top = 0
    for title, numbers, charts in sections:
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        top = _put(panels, [_number(*one) for one in numbers], top + 1, _LOW, 4)
        top = _put(panels, [_chart(*one) for one in charts], top, _HEIGHT, 2)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "dataparallel-monitor",
        "title": "dataparallel",
        "tags": ["dataparallel"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("instance", "Machine", "build_info"),
                _variable("rank", "Rank", "run_steps_total"),
            ]
        },
        "panels": panels,
    }


def _put(
    panels: list[dict[str, Any]], new: Sequence[dict[str, Any]], top: int, height: int, number: int
) -> int:
    """Place panels in rows of so many, and return where the next row begins."""
    width = _WIDTH // number
    for i, panel in enumerate(new):
        row, column = divmod(i, number)
        panel["gridPos"] = {"h": height, "w": width, "x": column * width, "y": top + row * height}
        panels.append(panel)
    return top + -(-len(new) // number) * height


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    query = f"label_values(dataparallel_{metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        # Looked up whenever another time is shown.
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(kind: str, title: str, unit: str, series: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": kind,
        "title": title,
        "datasource": _SOURCE,
        "targets": [
            {"refId": chr(65 + i), "datasource": _SOURCE, "expr": expression, "legendFormat": name}
            for i, (expression, name) in enumerate(series.items())
        ],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
    }


def _number(title: str, unit: str, series: Mapping[str, str]) -> dict[str, Any]:
    panel = _panel("stat", title, unit, series)
    named = any("{{" in name for name in series.values())
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value_and_name" if named else "value",
        "colorMode": "none",
    }
    return panel


def _chart(title: str, unit: str, series: Mapping[str, str]) -> dict[str, Any]:
    panel = _panel("timeseries", title, unit, series)
    defaults = panel["fieldConfig"]["defaults"]
    if unit == "percentunit":
        defaults["max"] = 1
    if series is _PHASES[2]:
        defaults["custom"] = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 80}
        panel["fieldConfig"]["overrides"] = [
            {
                "matcher": {"id": "byName", "options": phase},
                "properties": [
                    {
                        "id": "color",
                        "value": {"mode": "fixed", "fixedColor": DARK.phases[phase].color},
                    }
                ],
            }
            for phase in PHASES
        ]
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel
