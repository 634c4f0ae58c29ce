"""What is recorded is read and played back, whatever happens to process, disk and files."""

from __future__ import annotations

import csv
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataparallel.tools import cli
from dataparallel.tools.monitor import record_command
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.recorder import Recorder
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.sources.replay import Replay
from tests.monitor.made_up_samples import SAMPLES, record, run_state, sample


def elapsed(path: Path, num_problems: int = 0) -> list[float]:
    recording = read_recording(path)
    assert len(recording.problems) == num_problems, recording.problems
    return [one.elapsed for one in recording.samples]


# --- a recording is what was recorded ----------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SAMPLES, max_size=3))
def test_any_samples_are_read_back(tmp_path: Path, samples: list[Sample]) -> None:
    path = tmp_path / "run.jsonl"
    path.unlink(missing_ok=True)
    record(path, *samples)
    recording = read_recording(path)
    assert recording.samples == tuple(samples)
    assert recording.problems == ()
    assert recording.header["interval"] == 1.0


def test_metrics_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(1))
    header, line = path.read_text().splitlines()
    data = json.loads(line)
    data["devices"][0]["values"]["new_metric"] = 1.0
    path.write_text(f"{header}\n{json.dumps(data)}\n")
    assert read_recording(path).samples == (sample(1),)


@pytest.mark.parametrize("keep", [1, 3, 40])
def test_files_have_a_greatest_size_and_the_oldest_go(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=4096, keep=keep) as recorder:
        for number in range(150):
            recorder.record(sample(number))
    (tmp_path / "run.x").write_text("not a part")
    (tmp_path / "run.010").write_text("not a part")
    parts = [path, *(path.with_suffix(f".{i + 1}") for i in range(keep))]
    # More than nine: they are numbers, not words.
    assert sum(part.exists() for part in parts) == keep + 1 or keep == 40
    assert keep < 40 or parts[10].exists()
    assert all(part.stat().st_size <= 4096 for part in parts if part.exists())
    kept = elapsed(path)
    assert kept == list(map(float, range(150)))[-len(kept) :]
    assert keep < 40 or len(kept) == 150
    # A crash, or a full disk, may come between two files.
    path.write_bytes(b"")
    left = elapsed(path)
    assert left == kept[: len(left)]
    path.unlink()
    assert elapsed(path) == left


def test_a_sample_that_is_larger_than_a_file_is_recorded_all_the_same(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run", max_bytes=10, keep=2) as recorder:
        for number in range(3):
            recorder.record(sample(number))
    assert elapsed(tmp_path / "run") == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_recording_is_continued_after_what_was_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(3)))
    path.write_bytes(path.read_bytes()[: -cut or None])
    # Another process begins a new file within it: its parts are still those of one recording.
    with Recorder(path, max_bytes=path.stat().st_size + 700) as recorder:
        for number in range(10, 14):
            recorder.record(sample(number))
    assert (tmp_path / "run.1").exists()
    # Without its line feed alone, the last line is whole again.
    kept = [0.0, 1.0] if cut > 1 else [0.0, 1.0, 2.0]
    assert elapsed(path, num_problems=cut > 1) == [*kept, 10.0, 11.0, 12.0, 13.0]


def test_a_part_of_another_recording_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(1))
    path.rename(tmp_path / "run.1")
    record(path, sample(2))
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [2.0]
    assert recording.problems == (f"{path}.1 belongs to another recording; it is left out",)


def test_damaged_lines_are_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(5)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"time": 1}\n', b"\0\xff\n", lines[2], lines[3][:-9]]))
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [0.0, 1.0]
    places = [problem.split(": ")[0] for problem in recording.problems]
    assert places == [f"{path}:{number}" for number in (3, 4, 6)]
    assert "this is no sample, it is left out" in recording.problems[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "its first line should be .* but it is ''"),
        (b'{"format": "dataparallel monitor recording", "version": 1, "st', "is not a recording"),
        (b"hello\n", r"its first line should be \{\"format\": .* but it is 'hello"),
        (b"[1, 2]\n", "is not a recording"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not a recording"),
        (
            b'{"format": "dataparallel monitor recording", "version": 2}\n',
            "has version 2 of the format, but this dataparallel reads versions up to 1",
        ),
        (b'{"format": "dataparallel monitor recording"}\n', "has version None"),
    ],
)
def test_what_is_no_recording_is_neither_read_nor_touched(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_recording(path)
    if content:
        with pytest.raises(ValueError, match=f"{expected}.*choose another file, or move it away"):
            Recorder(path)
        # Nor where it would be renamed, and removed in the end.
        older = path.rename(tmp_path / "run.2")
        with pytest.raises(ValueError, match=expected):
            Recorder(tmp_path / "run")
        assert older.read_bytes() == content


@pytest.mark.parametrize("name", ["", "none/run", "pipe"])
def test_only_a_file_is_recorded_to(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"cannot record to .*: it is no file, or its folder"):
        Recorder(tmp_path / name)
    with pytest.raises(ValueError, match=r"there is no file .*x; `dataparallel monitor record"):
        read_recording(tmp_path / "x")


def test_a_second_recorder_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=4096) as first:
        for number in range(30):
            first.record(sample(number))
            with pytest.raises(ValueError, match=r"somebody else is recording to .*run now; end"):
                Recorder(path)
    # The lock ends with the recorder.
    record(path, sample(30))
    assert elapsed(path)[-1] == 30.0


# --- a full disk -------------------------------------------------------------------------------


@contextmanager
def room_in_files(size: int) -> Iterator[None]:
    """No file can become larger, and a write is cut off there: as on a disk that gets full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [1500, 2999])
def test_a_full_disk_is_told_once_and_waited_for(tmp_path: Path, room: int) -> None:
    path = tmp_path / "run"
    told: list[str] = []
    with Recorder(path, tell=told.append) as some:
        with room_in_files(room):
            for number in range(8):
                some.record(sample(number))
        kept, lost = some.num_samples, some.num_lost
        assert 0 < kept < 8 and len(told) == 1
        assert "File too large; make room on the disk. What was recorded is kept" in told[0]
        some.record(sample(8))
        some.record(sample(9))
        assert told[1:] == [f"it works again; {lost} samples are missing so far"]
    # Half a line may have been written.
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [*map(float, range(kept)), 8.0, 9.0]
    assert len(recording.problems) == 1
    assert f"{lost} samples could not be written" in some.summary()


def test_a_recording_goes_on_that_a_full_disk_ended_between_two_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(0), sample(1))
    path.rename(tmp_path / "run.1")
    path.touch()
    record(path, sample(2))
    assert elapsed(path) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("goes", [Path.unlink, lambda path: path.rename(f"{path}.moved")])
def test_a_file_that_is_gone_is_made_again(tmp_path: Path, goes: Callable[[Path], object]) -> None:
    path = tmp_path / "run"
    with Recorder(path) as some:
        some.record(sample(0))
        goes(path)
        some.record(sample(1))
        assert elapsed(path) == [1.0]


@pytest.mark.parametrize("room", [0, 10])
def test_a_disk_that_is_full_from_the_beginning_is_an_error(tmp_path: Path, room: int) -> None:
    path = tmp_path / "run"
    with room_in_files(room), pytest.raises(ValueError, match=r"cannot record to .*; choose ano"):
        Recorder(path)
    # Nothing of the header stays, and nothing is held.
    assert path.read_bytes() == b""
    record(path, sample(1))
    assert elapsed(path) == [1.0]


# --- the command -------------------------------------------------------------------------------


def main(*words: str) -> int:
    return cli.main(["monitor", "record", *words])


def use(monkeypatch: pytest.MonkeyPatch, sampler: Sampler) -> None:
    monkeypatch.setattr(record_command, "open_sampler", lambda arguments: sampler)


def test_it_records_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    now = [0.0]
    sampler = Sampler(
        [],
        notes=lambda: ("no driver",),
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    use(monkeypatch, sampler)
    assert main(str(path), "--for", "3s") == 0
    assert elapsed(path) == [0.0, 1.0, 2.0, 3.0]
    output = capsys.readouterr()
    assert f"recorded 4 samples to {path}, a sample took " in output.out
    assert output.err == "dataparallel: no driver\n"


def test_it_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, False, True])
    use(monkeypatch, Sampler([], interval=0.001, is_over=lambda: next(answers)))
    assert main(str(tmp_path / "run")) == 0
    assert len(elapsed(tmp_path / "run")) == 3
    assert "Ctrl-C ends it" in capsys.readouterr().err


def test_samples_that_are_lost_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, source = tmp_path / "run", tmp_path / "source"
    record(source, *map(sample, range(6)))
    use(monkeypatch, Replay(source, speed=math.inf))
    with room_in_files(1500):
        assert main(str(path)) == 1
    output = capsys.readouterr()
    assert output.err.count("File too large") == 1
    assert "samples could not be written" in output.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--max-size", "10"], "'10' is less than 4096 bytes, too little for a recording"),
        (["run", "--max-size", "much"], "'much' is not a size"),
        (["run", "--keep", "0"], "'0' is not a whole number of at least 1"),
        (["run", "--keep", "9" * 5000], f"'{'9' * 40}' is not a whole number"),
        (["run", "--for", "ever"], "'ever' is not a duration"),
        (["run.CSV"], "`dataparallel monitor report FILE.jsonl --csv FILE.csv`"),
        (["run", "--source", "other.jsonl"], "`record` takes readings from auto, nvml, cpu, virt"),
    ],
)
def test_wrong_options(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert main(*words) == 2
    except SystemExit as error:
        assert error.code == 2
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_it_between_two_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    during: list[object] = []

    def interrupt() -> bool:
        during.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGTERM)
        # A second one does not wait for the next sample.
        during.append(signal.getsignal(signal.SIGINT))
        return False

    use(monkeypatch, Sampler([], interval=3600, is_over=interrupt))
    assert main(str(tmp_path / "run")) == 0
    assert during[0] not in before
    assert during[1] == signal.default_int_handler
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert len(elapsed(tmp_path / "run")) == 1
    assert capsys.readouterr().out.startswith(f"recorded 1 sample to {tmp_path}")


def test_a_kill_leaves_a_whole_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    words = ["monitor", "record", str(path), "--source", "cpu", "--interval", "0.01"]
    with subprocess.Popen([sys.executable, "-m", "dataparallel", *words]) as process:
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    samples = read_recording(path).samples
    assert len(samples) >= 3
    assert samples[0].devices[0].source == "cpu"


# --- tables and replays ------------------------------------------------------------------------


def test_a_table_has_a_row_per_device_and_replica(
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
        own = [row for row in rows if float(row["elapsed"]) == one.elapsed]
        assert {float(row["time"]) for row in own} == {one.time}
        assert {row["host_utilization_ratio"] for row in own} == {"0.5"}
        used = {row["device"]: row["memory_used_bytes"] for row in own if row["name"]}
        assert used == {each.device: str(each.value("memory_used")) for each in one.devices}
        assert {row["name"] for row in own} - {""} == {'a, "b" c'}
        assert {row["power_watts"] for row in own} == {""}
    run = samples[2].run
    assert run is not None
    replicas = {
        int(row["replica"]): (row["replica_phase"], float(row["reduce_local_seconds"]))
        for row in rows
        if row["elapsed"] == "2.0" and row["replica"]
    }
    assert replicas == {
        i: (run.now[i][0], total["reduce local"]) for i, total in enumerate(run.totals)
    }


def test_a_replay_is_what_was_recorded(tmp_path: Path) -> None:
    samples = [sample(3), sample(5, run_state()), sample(6)]
    record(tmp_path / "run", *samples)
    with Replay(tmp_path / "run", speed=math.inf) as replay:
        assert list(replay.samples()) == samples
        # It has ended, and stays at the last.
        assert list(replay.samples()) == []
        assert replay.sample() == samples[-1]
        assert replay.interval == 1.0


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, [2.0, 1.0]), (4.0, [0.5, 0.25])])
def test_a_replay_has_the_pace_of_the_recording(
    tmp_path: Path, speed: float, seconds: list[float]
) -> None:
    record(tmp_path / "run", *map(sample, (3, 5, 6)))
    now = [0.0]
    slept: list[float] = []

    def sleep(duration: float) -> None:
        slept.append(duration)
        now[0] += duration

    replay = Replay(tmp_path / "run", speed=speed, clock=lambda: now[0], sleep=sleep)
    assert len(list(replay.samples())) == 3
    assert slept == seconds
    # Whoever stops it does not wait for the next sample.
    stopped = Replay(tmp_path / "run", sleep=lambda seconds: stopped.stop())
    assert [one.elapsed for one in stopped.samples()] == [3.0]


def test_a_replay_tells_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(2)))
    path.write_text(path.read_text() + "torn\n" * 5)
    notes = [one.notes for one in Replay(path, speed=math.inf).samples()]
    assert notes[0] == ()
    assert notes[1] == (
        "5 lines of the recording cannot be read; `dataparallel monitor report` lists them",
    )
    path.write_text(path.read_text().splitlines()[0])
    with pytest.raises(ValueError, match="holds no sample to play back"):
        Replay(path)
