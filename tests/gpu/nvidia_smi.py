"""What ``nvidia-smi`` says beside our readings of the same devices."""

from __future__ import annotations

import csv
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dataparallel.tools.monitor.reading import DeviceReading
from dataparallel.tools.monitor.sources.source import SourceReading

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
    "ecc_corrected": ("ecc.errors.corrected.volatile.total", 1, 0),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", 1, 0),
}


@dataclass(frozen=True)
class Pair:
    """One metric of one device: ours before and after, in the unit of ``nvidia-smi``, and its."""

    device: str
    metric: str
    here: tuple[float, ...]
    column: str
    said: str
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the other's value lies between ours, or neither has one."""
        said = number(self.said)
        if said is None or not self.here:
            return said is None and not self.here
        return min(self.here) - self.tolerance <= said <= max(self.here) + self.tolerance

    def __str__(self) -> str:
        return f"{self.device}: {self.metric}: {self.here} here, but {self.column} is {self.said}"


def ask(*query: str) -> list[list[str]]:
    """What the program says, a row per line."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise FileNotFoundError("nvidia-smi")
    done = subprocess.run(
        [path, *query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        raise RuntimeError(f"nvidia-smi failed: {done.stdout}{done.stderr}")
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def number(text: str) -> float | None:
    """A cell; None where it says that there is no value, as in "[N/A]"."""
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


def compare(read: Callable[[], SourceReading]) -> list[Pair]:
    """Read all devices with our source, ask ``nvidia-smi``, and read them again."""
    columns = ["uuid", "name", *(column for column, _, _ in COLUMNS.values())]
    before = _whole(read())
    begin = time.monotonic()
    rows = ask("--query-gpu=" + ",".join(columns))
    assert time.monotonic() - begin < 30
    after = _whole(read())
    said = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert set(before) == set(after) == set(said)
    names = {uuid: one.name for uuid, one in after.items()}
    assert names == {uuid: cells["name"] for uuid, cells in said.items()}
    return [
        pair
        for uuid, cells in said.items()
        for pair in _pairs(uuid, before[uuid], cells, after[uuid])
    ]


def _whole(reading: SourceReading) -> dict[str | None, DeviceReading]:
    return {one.uuid: one for one in reading.devices if one.parent is None}


def _pairs(
    uuid: str, before: DeviceReading, cells: dict[str, str], after: DeviceReading
) -> Iterator[Pair]:
    for metric, (column, unit, tolerance) in COLUMNS.items():
        read = (one.value(metric) for one in (before, after))
        here = tuple(value / unit for value in read if value is not None)
        yield Pair(uuid, metric, here, column, cells[column], tolerance)
