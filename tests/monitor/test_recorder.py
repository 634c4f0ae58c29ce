"""Recording: never half a line, never too much, never over what belongs to somebody else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dataparallel.tools.monitor import recording_file
from dataparallel.tools.monitor.recorder import Format, Recorder
from dataparallel.tools.monitor.recording import read_recording
from tests.monitor.made_up_samples import record, sample

FORMATS: list[Format] = ["jsonl", "csv"]


def elapsed(path: Path) -> list[float]:
    recording = read_recording(path)
    assert recording.problems == ()
    return [one.elapsed for one in recording.samples]


# --- size ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_all_files_together_have_a_greatest_size(tmp_path: Path, format: Format, keep: int) -> None:
    path = tmp_path / "run"
    with Recorder(path, format=format, max_bytes=4096, keep=keep) as recorder:
        for number in range(200):
            recorder.record(sample(number))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["run", *(f"run.{number}" for number in range(1, keep + 1))]
    assert all(file.stat().st_size <= 4096 for file in tmp_path.iterdir())
    kept = elapsed(path)
    assert kept == list(map(float, range(200)))[-len(kept) :]
    assert "files" in recorder.summary()


def test_a_smaller_number_of_files_removes_those_that_are_too_many(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for keep, number_of_files in ((4, 5), (1, 2)):
        with Recorder(path, max_bytes=4096, keep=keep) as recorder:
            for number in range(100):
                recorder.record(sample(number))
        assert len(list(tmp_path.iterdir())) == number_of_files


def test_a_sample_that_is_larger_than_a_file_is_recorded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=10, keep=2) as recorder:
        for number in range(3):
            recorder.record(sample(number))
    assert elapsed(path) == [0.0, 1.0, 2.0]


# --- continuing ------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_recording_is_continued_after_what_was_cut_off(
    tmp_path: Path, format: Format, cut: int
) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(3)), format=format)
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    told: list[str] = []
    # A process that starts again counts from 0 again; 10 seconds have gone by since sample 0.
    with Recorder(path, format=format, tell=told.append) as recorder:
        for number in (10, 11):
            begun_anew = sample(number)
            object.__setattr__(begun_anew, "elapsed", number - 10.0)
            recorder.record(begun_anew)
    kept = [0.0, 1.0] if cut and format == "jsonl" else [0.0, 1.0, 2.0]
    assert elapsed(path) == [*kept, 10.0, 11.0]
    assert len(told) == bool(cut)
    if cut:
        assert "ended within a line" in told[0] and "are cut off" in told[0]


def test_time_goes_on_where_the_clock_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(100))
    earlier = sample(50)
    object.__setattr__(earlier, "elapsed", 0.0)
    record(path, earlier)
    assert elapsed(path) == [100.0, 100.0]


@pytest.mark.parametrize("rest", [b"", b"\0" * 50, b'{"format": "dataparallel mon'])
def test_what_a_crash_leaves_of_the_first_line_is_begun_again(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "run"
    path.write_bytes(rest)
    record(path, sample(1))
    assert elapsed(path) == [1.0]


@pytest.mark.parametrize(
    "content",
    [b"my notes", b"{", b'{"format": 1}\n', b"a,b\n1,2\n", b"\x7fELF\0\0\0\n", b"\n", b"\0" * 9999],
)
def test_what_is_no_recording_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    expected = r"it is left as it is: choose another file, or remove it"
    with pytest.raises(ValueError, match=expected):
        Recorder(path)
    assert path.read_bytes() == content
    path.unlink()
    record(path, sample(1))
    assert elapsed(path) == [1.0]


def test_a_file_in_the_place_of_an_older_part_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "run.2").write_text("my notes\n")
    with pytest.raises(ValueError, match=r"an older part is in the way: .*run\.2 is not a record"):
        Recorder(tmp_path / "run")
    assert (tmp_path / "run.2").read_text() == "my notes\n"


def test_one_file_has_one_format(tmp_path: Path) -> None:
    for theirs, ours in (("jsonl", "csv"), ("csv", "jsonl")):
        path = tmp_path / theirs
        record(path, sample(1), format=theirs)  # type: ignore[arg-type]
        before = path.read_bytes()
        with pytest.raises(
            ValueError, match=r"cannot be continued in .*; choose the same --format"
        ):
            Recorder(path, format=ours)  # type: ignore[arg-type]
        assert path.read_bytes() == before


def test_a_table_with_other_columns_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    record(path, sample(1), format="csv")
    path.write_text(path.read_text().replace("power_W,", "", 1))
    with pytest.raises(ValueError, match="has other columns than this dataparallel writes"):
        Recorder(path, format="csv")


@pytest.mark.parametrize(
    ("name", "expected"), [("", "Is a directory"), ("none/run", "No such file or directory")]
)
def test_where_nothing_can_be_recorded(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"cannot record to .*: {expected}; choose another file"):
        Recorder(tmp_path / name)


# --- others ----------------------------------------------------------------------------------


def test_a_second_recorder_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=4096) as first:
        for number in range(30):
            first.record(sample(number))
            # The lock is on the new file too when the old one is full.
            with pytest.raises(ValueError, match=r"somebody else is recording to .*run now; end"):
                Recorder(path)
    # The lock ends with the recorder.
    record(path, sample(30))
    assert elapsed(path)[-1] == 30.0


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_is_moved_away_is_begun_anew(
    tmp_path: Path, replace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_file, "SYNC_SECONDS", 0.0)
    path = tmp_path / "run"
    with Recorder(path) as recorder:
        recorder.record(sample(1))
        path.rename(tmp_path / "moved")
        if replace:
            path.write_text("my notes\n")
            with pytest.raises(ValueError, match="is not a recording"):
                recorder.record(sample(2))
            assert path.read_text() == "my notes\n"
            path.unlink()
        recorder.record(sample(3))
    assert elapsed(path) == [3.0]
    assert elapsed(tmp_path / "moved") == [1.0]


# --- a full disk -----------------------------------------------------------------------------


class Disk:
    """Writes as long as there is room."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(fd, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("room", [1500, 2999, 4700])
def test_a_full_disk_is_told_once_and_waited_for(tmp_path: Path, format: Format, room: int) -> None:
    path = tmp_path / "run"
    told: list[str] = []
    disk = Disk(room)
    with Recorder(path, format=format, max_bytes=3000, tell=told.append, write=disk.write) as some:
        for number in range(20):
            some.record(sample(number))
            # Readable at any time.
            kept = elapsed(path)
            assert kept == list(map(float, range(some.num_samples)))
        lost = 20 - some.num_samples
        assert 0 < lost == some.num_lost < 20
        assert len(told) == 1
        assert (
            "No space left on device; make room on the disk. What was recorded is kept" in told[0]
        )
        disk.room = 10**6
        some.record(sample(20))
        some.record(sample(21))
        assert told[1:] == [f"there is room again; {lost} samples are missing so far"]
    assert elapsed(path) == [*kept, 20.0, 21.0]
    assert f"{lost} samples could not be written" in some.summary()


def test_a_disk_that_is_full_from_the_beginning_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(RuntimeError, match=r"cannot record to .*: No space left on device; make"):
        Recorder(path, write=Disk(10).write)
    # Nothing of the header stays, and nothing is held.
    assert path.read_bytes() == b""
    record(path, sample(1))
    assert elapsed(path) == [1.0]


def test_an_interrupt_within_a_write_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    calls: list[int] = []

    def interrupted(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            return os.write(fd, data[:7])
        if len(calls) == 4:
            raise KeyboardInterrupt("stop")
        return os.write(fd, data)

    with Recorder(path, write=interrupted) as recorder:
        recorder.record(sample(1))
        with pytest.raises(KeyboardInterrupt, match="stop"):
            recorder.record(sample(2))
        recorder.record(sample(3))
    assert elapsed(path) == [1.0, 3.0]


def test_what_is_recorded_reaches_the_disk_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real: Callable[[int], None] = os.fsync

    def sync(fd: int) -> None:
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    now = [0.0]
    with recording_file.RecordingFile(
        tmp_path / "run", b"header\n", max_bytes=10**6, keep=1, clock=lambda: now[0]
    ) as file:
        for _ in range(20):
            now[0] += 1.0
            file.write(b"line\n")
        assert len(synced) == 4
    assert len(synced) == 5
