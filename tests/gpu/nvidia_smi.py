"""The output of ``nvidia-smi`` beside our readings of the same devices."""

from __future__ import annotations

import csv
import shutil
import subprocess
import time
from collections.abc import Callable

import torch

from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.readings.source import SourceReading

MEBIBYTE = 2**20

#: Metric: what `nvidia-smi` calls it, its unit there, and how far the two may differ in that unit.
COLUMNS: dict[str, tuple[str, float, float]] = {
    "memory_total": ("memory.total", MEBIBYTE, 1),
    "memory_used": ("memory.used", MEBIBYTE, 64),
    "memory_free": ("memory.free", MEBIBYTE, 64),
    "utilization": ("utilization.gpu", 0.01, 30),
    "memory_utilization": ("utilization.memory", 0.01, 30),
    "power": ("power.draw", 1, 60),
    "power_limit": ("enforced.power.limit", 1, 0.02),
    "temperature": ("temperature.gpu", 1, 4),
    "memory_temperature": ("temperature.memory", 1, 4),
    "sm_clock": ("clocks.sm", 1e6, 200),
    "sm_clock_max": ("clocks.max.sm", 1e6, 0.5),
    "memory_clock": ("clocks.mem", 1e6, 200),
    "fan": ("fan.speed", 0.01, 5),
    "ecc_corrected_errors": ("ecc.errors.corrected.volatile.total", 1, 0),
    "ecc_uncorrected_errors": ("ecc.errors.uncorrected.volatile.total", 1, 0),
    "remapped_rows_correctable": ("remapped_rows.correctable", 1, 0),
    "remapped_rows_uncorrectable": ("remapped_rows.uncorrectable", 1, 0),
}


def ask(columns: list[str]) -> dict[str, dict[str, str]]:
    """Return the program's answers: by UUID, by column."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise FileNotFoundError("nvidia-smi")
    query = [path, f"--query-gpu=uuid,{','.join(columns)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"nvidia-smi failed: {done.stdout}{done.stderr}")
    rows = ([cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row)
    return {uuid: dict(zip(columns, cells, strict=True)) for uuid, *cells in rows}


def number(text: str) -> float | None:
    """Return a cell; None if it says that there is no value, as in "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def work(seconds: float) -> None:
    """Keep the first device busy."""
    one = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(50):
            one = (one @ one).clamp_(-1, 1)
        torch.cuda.synchronize(0)


def differences(read: Callable[[], SourceReading]) -> list[str]:
    """Read all devices with our source, ask ``nvidia-smi``, and read them again.

    Returns:
        Each metric of which the other's value does not lie between ours, or that only one has.
    """
    before = _whole(read())
    said = ask(["name", *(column for column, _, _ in COLUMNS.values())])
    after = _whole(read())
    assert set(before) == set(after) == set(said)
    assert {uuid: one.name for uuid, one in after.items()} == {
        uuid: cells["name"] for uuid, cells in said.items()
    }
    found = []
    for uuid, cells in said.items():
        for metric, (column, unit, tolerance) in COLUMNS.items():
            values = (one[uuid].value(metric) for one in (before, after))
            here = [value / unit for value in values if value is not None]
            there = number(cells[column])
            if there is None or not here:
                agrees = there is None and not here
            else:
                agrees = min(here) - tolerance <= there <= max(here) + tolerance
            if not agrees:
                found.append(f"{uuid}: {metric}: {here} here, but {column} is {cells[column]}")
    return found


def _whole(reading: SourceReading) -> dict[str | None, DeviceReading]:
    return {one.uuid: one for one in reading.devices if one.parent is None}
