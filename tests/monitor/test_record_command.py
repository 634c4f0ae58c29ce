"""`dataparallel monitor record`: what a user sees and gets."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dataparallel.tools import cli
from dataparallel.tools.monitor import record_command
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.sampler import Sampler
from tests.monitor.made_up_samples import record, sample


def main(*words: str) -> int:
    return cli.main(["monitor", "record", *words])


def test_it_records_for_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    words = ["--source", "cpu", "--interval", "0.05", "--for", "0.2"]
    assert main(str(path), *words) == 0
    output = capsys.readouterr()
    samples = read_recording(path).samples
    # 5 at 0 to 0.2; less where the machine has no time for them.
    assert 1 <= len(samples) <= 5
    assert samples[-1].elapsed >= 0.17
    plural = "s" if len(samples) > 1 else ""
    assert f"recorded {len(samples)} sample{plural} to {path}, " in output.out
    assert ", a sample took " in output.out
    # No progress where nobody looks.
    assert "recording " not in output.err
    before = len(samples)
    assert main(str(path), *words) == 0
    assert len(read_recording(path).samples) > before


def test_a_table_is_made_of_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path / "run.CSV"), "--source", "cpu", "--for", "0") == 2
    assert "`dataparallel monitor report FILE.jsonl --csv FILE.csv`" in capsys.readouterr().err


def test_a_recording_of_a_replay_is_the_same(tmp_path: Path) -> None:
    path, copy = tmp_path / "run", tmp_path / "copy"
    samples = list(map(sample, range(50)))
    record(path, *samples)
    words = ["--source", str(path), "--speed", "max", "--max-size", "4096", "--keep", "50"]
    assert main(str(copy), *words) == 0
    assert (tmp_path / "copy.3").exists()
    assert list(read_recording(copy).samples) == samples


@pytest.mark.parametrize(
    ("source", "target", "read", "written"),
    [
        ("run", "run", "run", "run"),
        ("link", "run", "link", "run"),
        ("run", "link", "run", "link"),
        # What is older is read too, and is renamed when the file is full.
        ("run", "run.1", "run.1", "run.1"),
        ("run.1", "run", "run.1", "run.1"),
    ],
)
def test_a_recording_of_itself_would_never_end(
    source: str,
    target: str,
    read: str,
    written: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    record(Path("run"), *map(sample, range(3)))
    if "run.1" in (source, target):
        Path("run.1").write_bytes(Path("run").read_bytes())
    Path("link").symlink_to("run")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    # It ends even if nothing keeps it from reading what it writes.
    words = ["--source", source, "--speed", "max", "--for", "1000"]
    assert main(target, *words) == 2
    error = capsys.readouterr().err
    assert f"reads {read}, and recording to {target} writes {written}" in error
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_a_part_of_a_replay(tmp_path: Path) -> None:
    path, copy = tmp_path / "run", tmp_path / "copy"
    record(path, *map(sample, range(100, 120)))
    assert main(str(copy), "--source", str(path), "--speed", "max", "--for", "3s") == 0
    assert list(read_recording(copy).samples) == list(map(sample, range(100, 104)))


def test_a_note_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Sampler([], interval=0.001, notes=lambda: ("no driver",)))
    assert main(str(tmp_path / "run"), "--for", "0.01") == 0
    assert capsys.readouterr().err.count("no driver") == 1


def test_it_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    use(monkeypatch, Sampler([], interval=0.001, is_over=lambda: next(answers)))
    assert main(str(tmp_path / "run")) == 0
    assert len(read_recording(tmp_path / "run").samples) == 3


def use(monkeypatch: pytest.MonkeyPatch, sampler: Sampler) -> None:
    monkeypatch.setattr(record_command, "open_sampler", lambda arguments: sampler)


# --- what can go wrong -----------------------------------------------------------------------


def test_what_is_no_recording_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("my notes\n")
    assert main(str(path), "--source", "cpu") == 2
    error = capsys.readouterr().err
    assert "is not a recording" in error and "choose another file" in error
    assert path.read_text() == "my notes\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("/dev/full", "--source", "cpu") == 1
    assert "cannot record to /dev/full: No space left on device; make" in capsys.readouterr().err


def test_a_disk_that_gets_full_is_told_once_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = [0]

    def fill(fd: int, data: bytes) -> int:
        number[0] += 1
        if 3 < number[0] < 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    real: Callable[[int, bytes], int] = os.write
    monkeypatch.setattr(record_command, "write", fill)
    copied = tmp_path / "samples"
    record(copied, *map(sample, range(6)))
    path = tmp_path / "run"
    assert main(str(path), "--source", str(copied), "--speed", "max") == 1
    output = capsys.readouterr()
    assert output.err.count("No space left on device") == 1
    assert "there is room again; 2 samples are missing so far" in output.err
    assert "recorded 4 samples" in output.out and "2 samples could not be written" in output.out
    assert [one.elapsed for one in read_recording(path).samples] == [0.0, 1.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-size", "10"], "'10' is less than 4096 bytes, too little for a recording"),
        (["--max-size", "much"], "'much' is not a size"),
        (["--keep", "-1"], "'-1' is not a whole number of at least 1"),
        (["--keep", "0"], "'0' is not a whole number of at least 1"),
        (["--keep", "9" * 5000], f"'{'9' * 40}' is not a whole number"),
        (["--for", "ever"], "'ever' is not a duration"),
    ],
)
def test_wrong_options(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(str(tmp_path / "run"), *words)
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- ending it -------------------------------------------------------------------------------


def test_a_thread_can_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Sampler([], interval=0.001))
    status: list[int] = []
    path = str(tmp_path / "run")
    thread = threading.Thread(target=lambda: status.append(main(path, "--for", "0.01")))
    thread.start()
    thread.join(30)
    assert status == [0]


def test_the_signals_are_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    during: list[object] = []

    def look() -> bool:
        during.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGTERM)
        # A second one does not wait for the next sample.
        during.append(signal.getsignal(signal.SIGINT))
        return False

    use(monkeypatch, Sampler([], interval=3600, is_over=look))
    assert main(str(tmp_path / "run")) == 0
    assert during[0] not in before
    assert during[1] == signal.default_int_handler
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ctrl_c_leaves_a_whole_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = [0]

    def interrupt() -> bool:
        number[0] += 1
        if number[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return number[0] > 100

    path = tmp_path / "run.jsonl"
    use(monkeypatch, Sampler([], interval=0.001, is_over=interrupt))
    assert main(str(path)) == 0
    assert len(read_recording(path).samples) == 3
    assert capsys.readouterr().out.startswith(f"recorded 3 samples to {path}")


def test_a_kill_leaves_a_whole_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    words = ["monitor", "record", str(path), "--source", "cpu", "--interval", "0.01"]
    program = f"from dataparallel.tools.cli import main; import sys; sys.exit(main({words!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=60)
    finally:
        process.kill()
    recording = read_recording(path)
    assert len(recording.samples) >= 3
    assert recording.problems == ()


# --- progress --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Text that is shown to somebody."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words", [[], ["--for", "1h"]])
def test_progress_is_shown_on_a_terminal(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    answers = iter([False, True])
    use(monkeypatch, Sampler([], interval=0.2, is_over=lambda: next(answers)))
    assert main(str(tmp_path / "run"), *words) == 0
    shown = terminal.getvalue()
    assert "recording run" in shown
    assert "1 sample, " in shown
    assert ("Ctrl-C ends it" in shown) == (not words)


def test_a_short_recording_shows_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    use(monkeypatch, Sampler([], interval=0.001))
    assert main(str(tmp_path / "run"), "--for", "0.01") == 0
    assert terminal.getvalue() == ""
