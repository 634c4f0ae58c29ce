"""`monitor top` without a terminal of its own: pipes, JSON, faults, and how it ends."""

from __future__ import annotations

import dataclasses
import importlib.abc
import io
import json
import math
import os
import pty
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
from rich.console import Console

from dataparallel.tools import cli
from dataparallel.tools.monitor import live_view, top_command
from dataparallel.tools.monitor.keys import Keys
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.view import View
from tests.monitor.made_up_machine import make_sample

TOP = ["monitor", "top"]


class FakeSampler(Sampler):
    """Gives samples that are made up, as fast as they are wanted."""

    def __init__(self, count: int = 3, then: Callable[[], object] = lambda: None) -> None:
        super().__init__(())
        self.closed = 0
        self.given = 0
        self._total = count
        self._then = then

    def samples(self) -> Iterator[Sample]:
        for tick in range(self._total):
            self.given += 1
            yield make_sample(tick)
        self._then()

    def close(self) -> None:
        super().close()
        self.closed += 1


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    fake = FakeSampler()
    monkeypatch.setattr(top_command, "open_sampler", lambda arguments: fake)
    monkeypatch.setenv("COLUMNS", "100")
    return fake


def run(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main([*TOP, *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


# --- without a terminal --------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True])
def test_piped_it_prints_plain_text_for_every_sample(
    forced: bool,
    sampler: FakeSampler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if forced:
        # Colors are asked for, but a view that is drawn over and over makes no sense in a pipe.
        monkeypatch.setenv("FORCE_COLOR", "1")
    text = run([], capsys)
    assert text.count("TransformerLM") == 3 and sampler.closed >= 1
    assert ("\x1b[" in text) == forced and "\x1b[?1049h" not in text
    assert max(map(len, text.splitlines())) <= 100 or forced


def test_once_takes_two_samples_and_prints_one_view(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(["--once"], capsys)
    assert text.count("TransformerLM") == 1 and sampler.given == 2
    # It takes two to know how fast a run is.
    assert "6.00 steps/s" in text


def test_json_gives_samples_that_can_be_read_again(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(["--json"], capsys).splitlines()
    read = [Sample.from_json(json.loads(line)) for line in lines]
    assert read == [make_sample(tick) for tick in range(3)]


def test_json_has_null_for_numbers_that_it_does_not_have(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = dataclasses.replace(make_sample(0).devices[0], values={"power": math.nan})
    one = dataclasses.replace(make_sample(0), devices=(odd,))
    monkeypatch.setattr(sampler, "samples", lambda: iter([one]))
    (line,) = run(["--json"], capsys).splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["devices"][0]["values"] == {"power": None}


def test_json_once_is_exactly_one_object(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = run(["--json", "--once"], capsys).splitlines()
    assert Sample.from_json(json.loads(line)) == make_sample(1)


def test_once_of_a_recording_is_its_last_sample(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = run(["--json", "--once", "--source", "run.jsonl"], capsys).splitlines()
    assert Sample.from_json(json.loads(line)) == make_sample(2)


def test_this_machine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(["--once", "--source", "cpu"], capsys)
    assert "cpu" in text and "util" in text and "CPUs" in text


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_error(
    words: list[str], sampler: FakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    assert cli.main([*TOP, *words]) == 0
    assert sampler.closed


def test_a_dumb_terminal_gets_plain_text(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = run([], capsys)
    assert text.count("TransformerLM") == 3 and "\x1b" not in text


def test_no_color_leaves_the_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, legacy_windows=False)
    view = View()
    view.add(make_sample())
    console.print(view)
    text = file.getvalue()
    assert "\x1b[38" not in text and "\x1b[48" not in text and "BBBB" in text


# --- faults --------------------------------------------------------------------------------------


def test_without_rich_it_says_what_to_install(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> None:
            if name.split(".")[0] == "rich":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    assert cli.main(TOP) == 2
    assert 'pip install "dataparallel[monitor]"' in capsys.readouterr().err
    assert sampler.closed
    # JSON needs none.
    assert cli.main([*TOP, "--json", "--once"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source", "nowhere.jsonl"], "'nowhere.jsonl' is neither a source nor a recording"),
        (["--attach", "999999999"], "process 999999999 has no run that can be watched"),
    ],
)
def test_what_is_not_there_is_told(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*TOP, *words]) == 2
    assert message in capsys.readouterr().err


def terminal_console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    environment = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
    return Console(file=file, force_terminal=True, _environ=environment), file


def test_a_failure_while_sampling_gives_the_terminal_back() -> None:
    def fail() -> None:
        raise OSError("the sampler broke")

    console, file = terminal_console()
    with pytest.raises(RuntimeError, match="sampling has failed: OSError"):
        live_view.run_live(FakeSampler(then=fail), console)
    assert file.getvalue().rindex("\x1b[?1049l") > file.getvalue().rindex("\x1b[?1049h")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_termination_gives_the_terminal_back(name: str) -> None:
    number = getattr(signal, name)
    fake = FakeSampler(then=lambda: os.kill(os.getpid(), number))
    # Under nohup this process ignores SIGHUP, and what is ignored stays so.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        console, file = terminal_console()
        with pytest.raises(SystemExit, match=str(128 + number)):
            live_view.run_live(fake, console)
        assert "\x1b[?1049l" in file.getvalue() and fake.closed
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    # As nohup wants it.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        console, file = terminal_console()
        live_view.run_live(FakeSampler(then=lambda: signal.raise_signal(signal.SIGHUP)), console)
        assert "the end" in file.getvalue()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_q_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "wb", buffering=0) as keyboard, os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(slave)
        console, file = terminal_console()
        # What does not end by it is ended, as a failure.
        watchdog = threading.Timer(30, os.kill, (os.getpid(), signal.SIGTERM))
        watchdog.start()
        try:
            live_view.run_live(FakeSampler(then=lambda: keyboard.write(b"q")), console)
        finally:
            watchdog.cancel()
        assert file.getvalue().endswith("\x1b[?1049l")
        assert termios.tcgetattr(slave) == before


def test_without_a_keyboard_it_ends_with_the_recording() -> None:
    console, file = terminal_console()
    live_view.run_live(FakeSampler(), console)
    assert "TransformerLM" in file.getvalue() and "the end" in file.getvalue()


# --- keys ----------------------------------------------------------------------------------------


def test_keys_come_at_once_and_the_terminal_is_given_back_after_a_failure() -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "wb", buffering=0) as keyboard, os.fdopen(slave) as terminal:
        before = termios.tcgetattr(slave)
        with pytest.raises(ZeroDivisionError, match="division"), Keys(terminal) as keys:
            assert not termios.tcgetattr(slave)[3] & (termios.ECHO | termios.ICANON)
            assert keys.active and keys.wait(0.0) == ""
            keyboard.write(b"q")
            assert keys.wait(10.0) == "q"
            keyboard.write(b"\x1b[A")
            assert keys.wait(10.0) == "\x1b[A"
            _ = 1 / 0
        assert termios.tcgetattr(slave) == before


def test_without_a_terminal_no_key_comes() -> None:
    with open(os.devnull) as file:
        for stream in (io.StringIO(), file):
            with Keys(stream) as keys:
                assert not keys.active and keys.wait(0.0) == ""
