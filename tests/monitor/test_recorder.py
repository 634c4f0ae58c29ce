"""Recording: no line is lost with another, and nothing of somebody else's is touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dataparallel.tools.monitor.recorder import Recorder
from dataparallel.tools.monitor.recording import read_recording
from tests.monitor.made_up_samples import record, sample


def elapsed(path: Path) -> list[float]:
    recording = read_recording(path)
    assert recording.problems == ()
    return [one.elapsed for one in recording.samples]


# --- size ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_all_files_together_have_a_greatest_size(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=4096, keep=keep) as recorder:
        for number in range(200):
            recorder.record(sample(number))
    files = sorted(tmp_path.glob("run*"))
    assert [file.name for file in files] == [
        "run",
        *(f"run.{number}" for number in range(1, keep + 1)),
    ]
    assert all(file.stat().st_size <= 4096 for file in files)
    kept = elapsed(path)
    assert kept == list(map(float, range(200)))[-len(kept) :]
    assert "files" in recorder.summary()


def test_a_sample_that_is_larger_than_a_file_is_recorded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Recorder(path, max_bytes=10, keep=2) as recorder:
        for number in range(3):
            recorder.record(sample(number))
    assert elapsed(path) == [0.0, 1.0, 2.0]


# --- continuing ------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_recording_is_continued_after_what_was_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(3)))
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    # Another process begins a new file within it: its parts are still those of one recording.
    with Recorder(path, max_bytes=path.stat().st_size + 700) as recorder:
        for number in range(10, 14):
            recorder.record(sample(number))
    assert (tmp_path / "run.1").exists()
    recording = read_recording(path)
    # Without its line feed alone, the last line is whole again.
    kept = [0.0, 1.0] if cut > 1 else [0.0, 1.0, 2.0]
    assert [one.elapsed for one in recording.samples] == [*kept, 10.0, 11.0, 12.0, 13.0]
    assert len(recording.problems) == (cut > 1)


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


@pytest.mark.parametrize("room", [1500, 2999, 4700])
def test_a_full_disk_is_told_once_and_waited_for(tmp_path: Path, room: int) -> None:
    path = tmp_path / "run"
    told: list[str] = []
    disk = Disk(room)
    with Recorder(path, max_bytes=3000, tell=told.append, write=disk.write) as some:
        for number in range(20):
            some.record(sample(number))
            # Readable at any time, up to what fitted of the first line that did not.
            kept = [one.elapsed for one in read_recording(path).samples]
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
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [*kept, 20.0, 21.0]
    assert len(recording.problems) <= 1
    assert f"{lost} samples could not be written" in some.summary()


def test_a_disk_that_is_full_from_the_beginning_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(RuntimeError, match=r"cannot record to .*: No space left on device; make"):
        Recorder(path, write=Disk(10).write)
    # Nothing of the header stays, and nothing is held.
    assert path.read_bytes() == b""
    record(path, sample(1))
    assert elapsed(path) == [1.0]


def test_an_interrupt_within_a_write_costs_that_line_alone(tmp_path: Path) -> None:
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
    recording = read_recording(path)
    assert [one.elapsed for one in recording.samples] == [1.0, 3.0]
    assert len(recording.problems) == 1
