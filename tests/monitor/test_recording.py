"""A recording is read and played back, whatever happens to process, disk and files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dataparallel.monitor.attach import Answers
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools import cli
from dataparallel.tools.monitor import record_command
from dataparallel.tools.monitor.recorder import SampleRecorder
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.replay import Replay
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.report_command import print_report
from dataparallel.tools.monitor.run_watch import RunWatch
from dataparallel.tools.monitor.sample_store import SampleStore
from dataparallel.tools.monitor.view import View
from tests.monitor.cases import device, make_run, make_sample, sample


def numbered(number: int) -> Sample:
    """Return a sample of some 700 bytes."""
    return sample(float(number), [device(i, utilization=number / 1000) for i in range(2)])


def record(path: Path, *samples: Sample, **options: Any) -> None:
    with SampleRecorder(path, about={"interval": 1.0}, **options) as recorder:
        for one in samples:
            recorder.record(one)


def elapsed(path: Path, num_problems: int = 0) -> list[float]:
    recording = read_recording(path)
    assert len(recording.problems) == num_problems, recording.problems
    return [one.elapsed for one in recording.samples]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


# --- a recording is what was recorded ----------------------------------------------------------


def test_samples_are_read_and_played_back(path: Path) -> None:
    odd = make_sample(5, notes=("\x00 \u2028\r\n\t日本",), runs=(), host=None)
    samples = [make_sample(3), odd, make_sample(6)]
    record(path, *samples)
    recording = read_recording(path)
    # Nothing in a recording steers a terminal.
    samples[1] = dataclasses.replace(odd, notes=("?     日本",))
    assert recording.samples == tuple(samples) and recording.problems == ()
    with Replay(path, speed=math.inf) as replay:
        assert list(replay.samples()) == samples
        # It has ended, and stays at the last.
        assert list(replay.samples()) == []
        assert replay.sample() == samples[-1]
        assert replay.interval == 1.0


def test_metrics_of_a_later_version_do_no_harm(path: Path) -> None:
    record(path, numbered(1))
    header, line = path.read_text().splitlines()
    data = json.loads(line)
    data["devices"][0]["values"]["new_metric"] = 1.0
    path.write_text(f"{header}\n{json.dumps(data)}\n")
    (sample,) = read_recording(path).samples
    known = {name: sample.devices[0].values[name] for name in numbered(1).devices[0].values}
    assert known == numbered(1).devices[0].values
    assert make_report(read_recording(path)).num_samples == 1


@pytest.mark.parametrize("keep", [1, 40])
def test_files_have_a_greatest_size_and_the_oldest_go(path: Path, keep: int) -> None:
    told: list[str] = []
    record(path, *map(numbered, range(100)), max_bytes=4096, keep=keep, tell=told.append)
    for name in ("run.x", "run.010", "run.1.gz.new"):
        path.with_name(name).write_text("not a part")
    parts = [path, *(path.with_name(f"run.{i + 1}.gz") for i in range(keep))]
    # More than nine: they are numbers, not words.
    assert all(part.exists() for part in parts[:11])
    assert all(part.stat().st_size < 1000 for part in parts[1:] if part.exists())
    assert path.stat().st_size <= 4096
    assert not [part for part in path.parent.iterdir() if part.name.endswith(("lock", ".1"))]
    kept = elapsed(path)
    # It is told what is lost.
    assert bool(told) == (keep == 1)
    assert all("1 older files are kept, so the oldest one is dropped" in one for one in told)
    assert kept == list(map(float, range(100)))[-len(kept) :]
    assert (len(kept) == 100) == (keep == 40)
    # A crash, or a full disk, may come between two files; then it goes on.
    path.write_bytes(b"")
    left = elapsed(path)
    assert left == kept[: len(left)]
    record(path, numbered(200))
    assert elapsed(path) == [*left, 200.0]
    path.unlink()
    assert elapsed(path) == left


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_recording_is_continued_after_what_was_cut_off(path: Path, cut: int) -> None:
    record(path, *map(numbered, range(3)))
    path.write_bytes(path.read_bytes()[: -cut or None])
    # Another process begins a new file within it: its parts are still those of one recording.
    record(path, *map(numbered, range(10, 14)), max_bytes=path.stat().st_size + 700)
    assert path.with_suffix(".1.gz").exists()
    # Without its line feed alone, the last line is whole again.
    kept = [0.0, 1.0] if cut > 1 else [0.0, 1.0, 2.0]
    assert elapsed(path, num_problems=cut > 1) == [*kept, 10.0, 11.0, 12.0, 13.0]


def test_what_is_damaged_or_of_another_recording_is_left_out_and_told(path: Path) -> None:
    older = path.with_suffix(".1")
    record(older, numbered(9))
    record(path, *map(numbered, range(5)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"time": 1}\n', b"\0\xff\n", lines[2], lines[3][:-9]]))
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [0.0, 1.0]
    first, second, *_ = recording.problems
    assert first == f"{older} belongs to another recording; it is left out"
    assert "this is no sample, it is left out" in second
    places = [problem.split(": ")[0] for problem in recording.problems[1:]]
    assert places == [f"{path}:{number}" for number in (3, 4, 6)]
    notes = [one.notes for one in Replay(path, speed=math.inf).samples()]
    assert notes[1][0].startswith("4 lines of the recording cannot be read; `dataparallel mon")
    path.write_bytes(lines[0])
    with pytest.raises(ValueError, match="holds no sample to play back"):
        Replay(path)


#: Values that stand where others are expected.
ODD: tuple[Any, ...] = (None, -1, 0, 1e308, math.nan, math.inf, "x", [], {}, True, 10**400, 2**63)


def places(data: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value in what JSON has; of lists to the first entry."""
    entries = data.items() if isinstance(data, dict) else enumerate(data[:1])
    for key, value in entries:
        yield (key,)
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in places(value))


def with_odd_values(line: str, way: Sequence[Any]) -> Iterator[str]:
    """Yield a line of JSON with each of the odd values at one place."""
    for odd in ODD:
        changed = inside = json.loads(line)
        for key in way[:-1]:
            inside = inside[key]
        inside[way[-1]] = odd
        yield json.dumps(changed)


def test_no_value_in_a_recording_stops_a_reader(path: Path) -> None:
    """A line with a value that cannot be is left out; whatever is read can be shown."""
    memory = {f"memory_{name}": (1, 2, 3, 4) for name in ("peak", "total", "retries")}
    healthy = [make_sample(i, runs=(make_run(i, **memory),)) for i in range(1, 4)]
    record(path, *healthy)
    header, first, second, third = path.read_text().splitlines()
    num_left_out = 0
    for way in places(json.loads(second)):
        path.write_text("\n".join([header, first, *with_odd_values(second, way), third, ""]))
        recording = read_recording(path)
        num_left_out += len(recording.problems)
        if any(one not in healthy for one in recording.samples):
            print_report(make_report(recording), Console(file=io.StringIO()))
            view, store = View(), SampleStore()
            for one in recording.samples:
                view.add(one)
                store.add(one)
            Console(file=io.StringIO()).print(view)
    assert num_left_out > 500


def test_no_value_in_a_header_stops_a_reader(path: Path) -> None:
    record(path, make_sample(1), make_sample(2))
    header, *lines = path.read_text().splitlines()
    ways = [way for way in places(json.loads(header)) if way[0] not in ("format", "version")]
    for odd in (odd for way in [*ways, ("host",)] for odd in with_odd_values(header, way)):
        path.write_text("\n".join([odd, *lines, ""]))
        recording = read_recording(path)
        assert len(recording.samples) == 2
        print_report(make_report(recording), Console(file=io.StringIO()))
        with Replay(path) as replay:
            assert replay.interval > 0


HEADER = b'{"format": "dataparallel monitor recording"'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "its first line should be .* but it is ''"),
        (HEADER + b', "version": 1, "st', "is not a recording"),
        (b"hello\n", r"its first line should be \{\"format\": .* but it is 'hello"),
        (b"[1, 2]\n", "is not a recording"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not a recording"),
        (HEADER + b', "version": 2}\n', "has version 2 .* reads version 3; .* an older"),
        (HEADER + b"}\n", "has version None"),
    ],
)
def test_what_is_no_recording_is_neither_read_nor_touched(
    path: Path, content: bytes, expected: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_recording(path)
    if content:
        with pytest.raises(ValueError, match=f"{expected}.*choose another file, or move it away"):
            SampleRecorder(path)
        # Nor where it would be renamed, and removed in the end.
        older = path.rename(path.with_suffix(".2"))
        with pytest.raises(ValueError, match=expected):
            SampleRecorder(path)
        assert older.read_bytes() == content


@pytest.mark.parametrize("name", ["", "none/run", "pipe"])
def test_only_a_file_is_recorded_to(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"cannot record to .*: it is no file, or its folder"):
        SampleRecorder(tmp_path / name)
    with pytest.raises(ValueError, match=r"there is no file .*x; `dataparallel monitor record"):
        read_recording(tmp_path / "x")


def test_a_second_recorder_on_the_same_file_is_refused(path: Path) -> None:
    with SampleRecorder(path, max_bytes=4096) as first:
        for number in range(12):
            first.record(numbered(number))
            with pytest.raises(ValueError, match=r"somebody else is recording to .*run now; end"):
                SampleRecorder(path)
    # The lock ends with the recorder.
    record(path, numbered(30))
    assert elapsed(path)[-1] == 30.0


def test_a_link_leads_to_the_same_recording(path: Path) -> None:
    """A recorder at either name keeps others away, and readers find all parts."""
    link = path.with_name("link")
    link.symlink_to(path)
    with SampleRecorder(link, max_bytes=4096) as first:
        with pytest.raises(ValueError, match="somebody else is recording to"):
            SampleRecorder(path)
        for number in range(12):
            first.record(numbered(number))
    assert link.is_symlink() and elapsed(link) == elapsed(path) == list(map(float, range(12)))


@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
def test_of_a_damaged_older_part_the_begin_is_read(path: Path, damage: str) -> None:
    random = np.random.default_rng(0)
    odd = [device(0, power=float(each)) for each in random.random(3000)]
    record(path, *(sample(float(i), [one]) for i, one in enumerate(odd)), max_bytes=1_000_000)
    older = path.with_name("run.1.gz")
    data = older.read_bytes()
    half = len(data) // 2
    older.write_bytes(data[:half] if damage == "cut off" else data[:half] + b"\0" * half)
    recording = read_recording(path)
    assert f"{older} is damaged; its end is left out" in recording.problems[-1]
    assert recording.samples[0].elapsed == 0.0 and recording.samples[-1].elapsed == 2999.0
    assert len(recording.samples) < 3000


# --- a full disk -------------------------------------------------------------------------------


@contextlib.contextmanager
def room_in_files(size: int) -> Iterator[None]:
    """No file can become larger, and a write is cut off there: as on a disk that gets full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [1500, 2999])
def test_a_full_disk_is_told_once_and_waited_for(path: Path, room: int) -> None:
    told: list[str] = []
    with SampleRecorder(path, tell=told.append) as some:
        with room_in_files(room):
            for number in range(8):
                some.record(numbered(number))
        kept, lost = some.num_samples, some.num_lost
        assert 0 < kept < 8 and len(told) == 1
        assert "File too large; make room on the disk. What was recorded is kept" in told[0]
        some.record(numbered(8))
        some.record(numbered(9))
        assert told[1:] == [f"it works again; {lost} samples are missing so far"]
    # Half a line may have been written.
    assert elapsed(path, num_problems=1) == [*map(float, range(kept)), 8.0, 9.0]
    assert f"{lost} samples could not be written" in some.summary()


@pytest.mark.parametrize("goes", [Path.unlink, lambda path: path.rename(f"{path}.moved")])
def test_a_file_that_is_gone_is_made_again(path: Path, goes: Callable[[Path], object]) -> None:
    with SampleRecorder(path) as some:
        some.record(numbered(0))
        goes(path)
        some.record(numbered(1))
        assert elapsed(path) == [1.0]


@pytest.mark.parametrize("room", [0, 10])
def test_a_disk_that_is_full_from_the_beginning_is_an_error(path: Path, room: int) -> None:
    with room_in_files(room), pytest.raises(ValueError, match=r"cannot record to .*; choose ano"):
        SampleRecorder(path)
    # Nothing of the header stays, and nothing is held.
    assert path.read_bytes() == b""
    record(path, numbered(1))
    assert elapsed(path) == [1.0]


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sampler], None]:
    def replace(sampler: Sampler) -> None:
        monkeypatch.setattr(record_command, "open_sampler", lambda arguments: sampler)

    return replace


def main(*words: object) -> int:
    return cli.main(["monitor", "record", *map(str, words)])


def test_it_records_for_a_time_or_as_long_as_the_run(
    path: Path, use: Callable[[Sampler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    clock: dict[str, Any] = {
        "clock": lambda: now[0],
        "sleep": lambda seconds: now.__setitem__(0, now[0] + seconds),
    }
    use(Sampler([], notes=lambda: ("no driver",), **clock))
    assert main(path, "--for", "3s") == 0
    assert elapsed(path) == [0.0, 1.0, 2.0, 3.0]
    output = capsys.readouterr()
    assert f"recorded 4 samples to {path}, a sample took " in output.out
    assert output.out.endswith("; the time is over\n")
    assert output.err == "dataparallel: no driver\n"
    answers = iter([False, False, True])
    use(Sampler([], is_over=lambda: next(answers), **clock))
    assert main(path) == 0
    assert len(elapsed(path)) == 4 + 3
    output = capsys.readouterr()
    assert "Ctrl-C ends it" in output.err
    assert output.out.endswith("; the process of the run has ended\n")


def test_it_waits_for_the_next_of_all_runs(path: Path, use: Callable[[Sampler], None]) -> None:
    now = [0.0]
    # Processes that are gone, one after the other.
    first, second = (make_run(pid=2**22 + number) for number in (1, 2))
    answers = iter([(first,), (), (), (second,), ()])
    watch = RunWatch(lambda: Answers(next(answers), ()))
    use(
        Sampler(
            [],
            runs=watch,
            is_over=watch.is_over,
            clock=lambda: now[0],
            sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
        )
    )
    assert main(path, "--attach", "auto", "--for", "4s") == 0
    pids = [[run.pid for run in one.runs] for one in read_recording(path).samples]
    assert pids == [[first.pid], [], [], [second.pid], []]


def test_samples_that_are_lost_are_no_success(
    path: Path, use: Callable[[Sampler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    source = path.with_name("source")
    record(source, *map(numbered, range(6)))
    use(Replay(source, speed=math.inf))
    with room_in_files(1500):
        assert main(path) == 1
    output = capsys.readouterr()
    assert output.err.count("File too large") == 1
    assert "samples could not be written" in output.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --max-size 10", "'10' is less than 4096 bytes, too little for a recording"),
        ("run --max-size much", "'much' is not a size"),
        ("run --keep 0", "'0' is not a whole number of at least 1"),
        (f"run --keep {'9' * 5000}", f"'{'9' * 40}' is not a whole number"),
        ("run --for ever", "'ever' is not a duration"),
        ("run --source other.jsonl", "`record` takes readings from auto, nvml, cpu, but"),
    ],
)
def test_wrong_options(
    words: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status: Any
    try:
        status = main(*words.split())
    except SystemExit as error:
        status = error.code
    assert status == 2 and expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_it_between_two_samples(
    path: Path, use: Callable[[Sampler], None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    during: list[object] = []

    def interrupt() -> bool:
        during.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGTERM)
        # A second one does not wait for the next sample.
        during.append(signal.getsignal(signal.SIGINT))
        return False

    use(Sampler([], interval=3600, is_over=interrupt))
    assert main(path) == 0
    assert during[0] not in before
    assert during[1] == signal.default_int_handler
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert len(elapsed(path)) == 1
    output = capsys.readouterr().out
    assert output.startswith(f"recorded 1 sample to {path}") and "; it was stopped\n" in output


def test_a_kill_leaves_a_whole_recording(path: Path) -> None:
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


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, [2.0, 1.0]), (4.0, [0.5, 0.25])])
def test_a_replay_has_the_pace_of_the_recording(
    path: Path, speed: float, seconds: list[float]
) -> None:
    record(path, *map(numbered, (3, 5, 6)))
    now = [0.0]
    slept: list[float] = []

    def sleep(duration: float) -> None:
        slept.append(duration)
        now[0] += duration

    replay = Replay(path, speed=speed, clock=lambda: now[0], sleep=sleep)
    assert len(list(replay.samples())) == 3
    assert slept == seconds
    # The caller that stops it does not wait for the next sample.
    stopped = Replay(path, sleep=lambda seconds: stopped.stop())
    assert [one.elapsed for one in stopped.samples()] == [3.0]
