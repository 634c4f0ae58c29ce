"""What was recorded is read back, whatever has happened to the files."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataparallel.tools import cli
from dataparallel.tools.monitor.reading import HostReading, Sample
from dataparallel.tools.monitor.recorder import Recorder
from dataparallel.tools.monitor.recording import read_recording
from tests.monitor.made_up_samples import SAMPLES, record, run_state, sample


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SAMPLES)
def test_a_sample_is_the_same_after_json(one: Sample) -> None:
    assert Sample.from_json(json.loads(json.dumps(one.to_json()))) == one


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SAMPLES, max_size=3))
def test_a_recording_is_what_was_recorded(tmp_path: Path, samples: list[Sample]) -> None:
    path = tmp_path / "run.jsonl"
    path.unlink(missing_ok=True)
    record(path, *samples)
    recording = read_recording(path)
    assert recording.samples == tuple(samples)
    assert recording.problems == ()
    assert recording.header["interval"] == 1.0


def test_a_table_holds_devices_host_and_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = tmp_path / "run.jsonl", tmp_path / "run.csv"
    samples = [sample(0), sample(1, run_state(), power=None), sample(2, run_state())]
    record(path, *samples)
    assert cli.main(["monitor", "report", str(path), "--csv", str(table)]) == 0
    assert capsys.readouterr().out == f"wrote 10 rows to {table}\n"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    # virtual:0 has two replicas, nobody reads virtual:7: four rows for two devices.
    assert len(rows) == len(table.read_text().splitlines()) - 1 == 2 + 4 + 4
    for one in samples:
        own = [row for row in rows if float(row["elapsed_s"]) == one.elapsed]
        assert {float(row["time_unix_s"]) for row in own} == {one.time}
        assert one.host is not None
        assert {float(row["host_cpus_count"]) for row in own} == {one.host.num_cpus}
        used = {
            row["device"]: float(row["memory_used_bytes"])
            for row in own
            if row["memory_used_bytes"]
        }
        assert used == {each.device: each.value("memory_used") for each in one.devices}
        assert {row["device_name"] for row in own if row["source"]} == {'a, "b" c'}
        assert {row["power_W"] for row in own} == {""}
    run = samples[2].run
    assert run is not None
    replicas = {
        int(row["replica"]): (row["replica_phase"], float(row["reduce_local_s"] or 0))
        for row in rows
        if row["elapsed_s"] == "2.0" and row["replica"]
    }
    assert replicas == {
        i: (run.now[i][0], total.get("reduce local", 0.0)) for i, total in enumerate(run.totals)
    }


def test_a_last_line_that_is_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(3)))
    whole = path.read_bytes()
    number = whole.count(b"\n")
    for cut in (1, 2, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        recording = read_recording(path)
        assert [one.elapsed for one in recording.samples] == [0.0, 1.0]
        assert recording.problems == (f"{path}:{number}: the last line is cut off; it is left out",)


def test_a_damaged_line_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(3)))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"time": 1}\n'
    lines[2] = b"\0\xff\n"
    path.write_bytes(b"".join(lines))
    recording = read_recording(path)
    assert recording.samples[-1].elapsed == 2.0
    assert len(recording.problems) == 2
    assert recording.problems[0].startswith(f"{path}:2: this is no ")


def test_many_problems_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path)
    path.write_bytes(path.read_bytes() + b"x\n" * 50)
    problems = read_recording(path).problems
    assert len(problems) == 21
    assert problems[-1] == "and 30 more like these"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty, but a recording begins with a line"),
        (b'{"format": "dataparallel mon', "file ends within its first line: it was stopped before"),
        (
            b'{"format": "dataparallel monitor recording", "version": 1, "st',
            "ends within its first",
        ),
        (b"my notes", "is not a recording"),
        (b'{"a": ', "is not a recording"),
        (b"hello\n", r"its first line should be \{\"format\": .* but it is 'hello'"),
        (b'{"format": "x"}\n', "is not a recording of `dataparallel monitor record`"),
        (b"[1, 2]\n", "is not a recording"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not a recording"),
        (b"a,b,c\n1,2,3\n", "is not a recording"),
        (
            b'{"format": "dataparallel monitor recording", "version": 2}\n',
            "has version 2 of the format, but this dataparallel reads versions up to 1",
        ),
        (b'{"format": "dataparallel monitor recording"}\n', "has version None"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_recording(path)


def test_a_file_that_is_not_there_is_refused_with_the_command_that_makes_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none; `dataparallel monitor record"):
        read_recording(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_recording(tmp_path)


# --- parts -----------------------------------------------------------------------------------


def test_parts_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=3000, keep=40) as recorder:
        for number in range(150):
            recorder.record(sample(number))
    # More than nine: they are numbers, not words.
    assert (tmp_path / "run.10").exists()
    (tmp_path / "run.x").write_text("not a part")
    (tmp_path / "run.010").write_text("not a part")
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == list(map(float, range(150)))
    assert recording.problems == ()
    # What a crash between two files leaves can be read too.
    newest = len(read_recording(tmp_path / "run").samples)
    path.write_bytes(b"")
    left = read_recording(path)
    assert 0 < len(left.samples) < newest
    path.unlink()
    assert read_recording(path).samples == left.samples


def test_a_host_that_tells_little_is_the_same(tmp_path: Path) -> None:
    # One and a half processors, as a container may have, and nothing about how busy they are.
    shown = dataclasses.replace(sample(1), host=HostReading(None, 1.5, 1e9, 2e9))
    record(tmp_path / "run", shown)
    assert read_recording(tmp_path / "run").samples[0].host == shown.host


def test_a_part_of_another_recording_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(1))
    path.rename(tmp_path / "run.1")
    record(path, sample(2))
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [2.0]
    assert recording.problems == (f"{path}.1 belongs to another recording; it is left out",)


def test_recordings_of_later_versions_with_more_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(1))
    header, line = path.read_text().splitlines()
    data = json.loads(line)
    data["devices"][0]["values"]["new_metric"] = 1.0
    path.write_text(f"{header}\n{json.dumps(data)}\n")
    assert read_recording(path).samples == (sample(1),)
