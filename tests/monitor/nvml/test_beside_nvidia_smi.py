"""The comparison with ``nvidia-smi`` that ``make gpu`` makes: what agrees, and what does not."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from dataparallel.tools.monitor.sources import nvml
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from tests.gpu import nvidia_smi
from tests.gpu.report import findings, programs
from tests.gpu.report.running import Ended
from tests.monitor.nvml.stub import EVERYTHING, Stub

#: What it says of the stand-in's device, by column; of others it has no value.
SAID = {
    "memory.total": "76294",
    "memory.used": "19073.5",
    "utilization.gpu": "40",
    "utilization.memory": "25",
    "power.draw": "310.20",
    "enforced.power.limit": "700.00",
    "temperature.gpu": "61",
    "temperature.memory": "70",
    "clocks.sm": "1755",
    "clocks.max.sm": "1980",
    "clocks.mem": "2619",
    "fan.speed": "35",
    "ecc.errors.corrected.volatile.total": "3",
    "ecc.errors.uncorrected.volatile.total": "0",
}

PROGRAM = """#!{python}
import sys
said = {said!r}
(query,) = [word for word in sys.argv if word.startswith("--query-gpu=")]
print(", ".join(said.get(name, "[N/A]") for name in query.split("=")[1].split(",")))
"""


def say(
    said: dict[str, str],
    source: NvmlSource,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Put a program into the PATH that says this of the first device."""
    first = source.read().devices[0]
    free = first.value("memory_free")
    assert first.uuid is not None and free is not None
    known = {"uuid": first.uuid, "name": first.name, "memory.free": f"{free / 2**20:.0f}"}
    program = folder / "nvidia-smi"
    program.write_text(PROGRAM.format(python=sys.executable, said={**known, **said}))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def _device(stub: Stub) -> None:
    stub.script(EVERYTHING)


def test_what_agrees(
    source: NvmlSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(SAID, source, tmp_path, monkeypatch)
    pairs = nvidia_smi.compare(source.read)
    assert [pair.metric for pair in pairs] == list(nvidia_smi.COLUMNS)
    assert [str(pair) for pair in pairs if not pair.agrees] == []


@pytest.mark.parametrize(
    ("metric", "column", "said"),
    [
        ("memory_used", "memory.used", "19200"),
        ("power", "power.draw", "[N/A]"),
        ("ecc_corrected", "ecc.errors.corrected.volatile.total", "4"),
    ],
)
def test_what_does_not_agree(
    metric: str,
    column: str,
    said: str,
    source: NvmlSource,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say({**SAID, column: said}, source, tmp_path, monkeypatch)
    (wrong,) = [pair for pair in nvidia_smi.compare(source.read) if not pair.agrees]
    assert (wrong.metric, wrong.column, wrong.said) == (metric, column, said)


def test_both_columns_are_on_the_page(
    stub: Stub, source: NvmlSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say({**SAID, "temperature.gpu": "80"}, source, tmp_path, monkeypatch)
    monkeypatch.setattr(nvidia_smi, "work", lambda seconds: None)
    monkeypatch.setattr(nvml, "NvmlSource", lambda: source)
    output = tmp_path / "readings.json"
    monkeypatch.setattr(sys, "argv", ["programs", "readings", str(output)])
    programs.main()
    found = findings.readings(Ended(0, 1.0, ""), output)
    assert (found.verdict, found.summary) == ("failed", "14 of 15 metrics agree; not: temperature")
    rows = {row[0]: row[1:] for row in found.tables[0].rows}
    assert rows["temperature"] == ("61 and 61", "80 (temperature.gpu)", "4", "**no**")
    assert rows["sm_clock"] == ("1755 and 1755", "1755 (clocks.sm)", "200", "yes")


def test_without_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvidia-smi"):
        nvidia_smi.ask("--query-gpu=uuid")
