"""`monitor top`: what it shows at every size, in a pipe, in a real terminal, and how it ends."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import pty
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pexpect
import pyte
import pytest
import torch
from rich.console import Console
from torch import nn

import dataparallel
from dataparallel.monitor import StepMonitor
from dataparallel.tools import cli
from dataparallel.tools.monitor import top_command
from dataparallel.tools.monitor.reading import DeviceReading, ProcessReading, Sample
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.view import View
from tests.monitor.made_up_machine import PID, make_run, make_sample, samples
from tests.monitor.made_up_runs import run_folder as run_folder

ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


# --- what is shown -------------------------------------------------------------------------------


def draw(
    *shown: Sample, width: int = 120, height: int | None = None, color: str | None = None
) -> str:
    view = View(interval=1.0)
    for sample in shown or samples(30):
        view.add(sample)
    file = io.StringIO()
    size = {"width": width, "height": height}
    Console(file=file, **size, force_terminal=bool(color), color_system=color).print(  # type: ignore[arg-type]
        view, height=height
    )
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 20, 40, 80, 120, 200])
def test_it_fits_every_terminal(width: int) -> None:
    for height in (1, 3, 12, 24, 50):
        lines = draw(width=width, height=height).splitlines()
        assert len(lines) <= height and max(map(len, lines)) <= width


def test_where_there_is_room_everything_is_told() -> None:
    text = draw(width=200)
    for told in (
        "cuda:0  replica 0",
        "NVIDIA H100 80GB HBM3",
        "48.0/80.0 GiB",
        "700/700 W",
        "1.20/1.98 GHz",
        "91 °C",
        "slowed: power cap, thermal slowdown",
        "cuda:4 GPU is lost; reset it or restart",
        "✖ cuda:6 has 2 memory errors",
        "▲ cuda:1 is hot",
        "43 % of 64 CPUs",
        "6.00 steps/s",
        "624 samples/s",
        "rank 0 of 2",
        "TransformerLM",
        "last 10 s",
        "last 170 ms",
        "B backward",
        "replica-0 98 %",
        "python train.py --epochs 90",
        "note: NVLink counters need a driver from 535 on",
    ):
        assert told in text, told


@pytest.mark.parametrize("width", [60, 80, 160])
def test_on_a_low_terminal_devices_and_replicas_have_a_line_each(width: int) -> None:
    lines = draw(width=width, height=24).splitlines()
    for index in range(8):
        (line,) = [line for line in lines if line.startswith(f"cuda:{index} ")]
        assert index == 4 or "GiB" in line
    assert [line[:11].split() for line in lines[-4:]] == [[str(i), f"cuda:{i}"] for i in range(4)]
    assert "✖ cuda:4 cannot be read" in lines[2]
    assert ("BBB" in lines[-1]) == (width > 60)


def test_processes_take_what_room_is_left() -> None:
    only = make_sample(devices=(), host=None, run=None, notes=())
    lines = draw(only, height=6).splitlines()
    assert len(lines) == 6 and lines[2].split()[0] == "pid" and lines[-1] == "and 4 more"


def test_notes_and_warnings_are_wrapped_not_cut() -> None:
    note = "nothing from NVIDIA: the driver is not loaded; sudo modprobe nvidia"
    text = draw(make_sample(devices=(), notes=(note,)), width=30)
    assert note in " ".join(text.split())
    assert "note: nothing from NVIDIA: the\n  driver" in text


def test_parts_of_a_device_stand_below_it() -> None:
    lines = draw(width=80).splitlines()
    whole = next(i for i, line in enumerate(lines) if line.startswith("cuda:5"))
    after = next(i for i, line in enumerate(lines) if line.startswith("cuda:6"))
    parts = [i for i, line in enumerate(lines) if line.startswith("└ nvml:5/")]
    assert len(parts) == 2 and whole < min(parts) and max(parts) < after


@pytest.mark.parametrize("height", [None, 3])
def test_what_is_not_available_is_a_dash_and_no_zero(height: int | None) -> None:
    device = DeviceReading("nvml:0", "A card", "nvml", values={"power": None})
    shown = make_sample(devices=(device,), run=None, processes=(), host=None)
    lines = draw(shown, width=80, height=height).splitlines()
    assert "0 %" not in "".join(lines) and " W" not in "".join(lines)
    assert any(line.startswith(("nvml:0           - ░", "  util ░░░░ - ")) for line in lines)


def test_phases_have_letters_without_colors() -> None:
    line = next(line for line in draw().splitlines() if line.startswith("1  cuda:1"))
    assert "FFF" in line and "BBBB" in line and "...." in line
    colored = draw(color="truecolor")
    assert "\x1b[" in colored
    # A block of its color, in which the letters are not seen.
    assert "\x1b[38;2;204;102;119;48;2;204;102;119mBBBB" in colored


def test_the_process_that_is_watched_comes_first_and_is_marked() -> None:
    other = ProcessReading("cuda:7", 1, "other", "eve", 70 * 2.0**30)
    mine = ProcessReading("cuda:0", PID, "mine.py", "ada", 2.0**30)
    lines = draw(make_sample(processes=(other, mine)))
    rows = [line.split()[:2] for line in lines.splitlines() if "ada" in line or " eve " in line]
    assert rows == [[">", str(PID)], ["1", "cuda:7"]]


def test_names_of_others_cannot_steer_the_terminal() -> None:
    evil = ProcessReading("cuda:0", 7, "evil\x1b[2J\nname\x07 日本", "[bold]ada[/]")
    text = draw(make_sample(processes=(evil,)), width=200)
    assert "\x1b" not in text and "\x07" not in text
    assert "evil?[2J name? 日本" in text and "[bold]ada" in text


def test_a_run_that_is_gone_is_still_shown_as_it_was() -> None:
    text = draw(make_sample(0), make_sample(9, run=None))
    assert "replicas, as they were last" in text
    assert f"the run of process {PID} is gone since 9.00 s" in text


def test_a_run_without_steps_has_no_shares_yet() -> None:
    fresh = make_run(0, last=None, totals=({}, {}, {}, {}))
    text = draw(make_sample(run=fresh))
    assert "3  cuda:3" in text and "- steps/s" in text and "0.00 steps/s" not in text


def test_without_devices_or_samples_it_says_so() -> None:
    empty = make_sample(devices=(), processes=(), host=None, run=None, notes=())
    assert "no device could be read" in draw(empty, width=80, height=24)
    file = io.StringIO()
    Console(file=file, width=40).print(View())
    assert "waiting for the first sample" in file.getvalue()


# --- without a terminal --------------------------------------------------------------------------


class FakeSampler(Sampler):
    """Gives samples that are made up, as fast as they are wanted."""

    def __init__(self, count: int = 3, then: Callable[[], object] = lambda: None) -> None:
        super().__init__(())
        self.closed = 0
        self.given = 0
        self.count = count
        self.then = then
        self.asked = argparse.Namespace()

    def samples(self) -> Iterator[Sample]:
        for tick in range(self.count):
            self.given += 1
            yield make_sample(tick)
        self.then()

    def close(self) -> None:
        super().close()
        self.closed += 1


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    fake = FakeSampler()

    def open_sampler(arguments: argparse.Namespace) -> FakeSampler:
        fake.asked = arguments
        return fake

    monkeypatch.setattr(top_command, "open_sampler", open_sampler)
    monkeypatch.setenv("COLUMNS", "100")
    return fake


def run(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["monitor", "top", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("case", ["pipe", "forced colors", "dumb terminal"])
def test_it_prints_every_sample_where_it_cannot_draw(
    case: str,
    sampler: FakeSampler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case == "forced colors":
        monkeypatch.setenv("FORCE_COLOR", "1")
    if case == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = run([], capsys)
    assert text.count("TransformerLM") == 3 and sampler.closed == 1
    assert ("\x1b[" in text) == (case == "forced colors") and ENTER not in text
    assert max(map(len, text.splitlines())) <= 100 or case == "forced colors"


def test_once_takes_two_samples_and_prints_one_view(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(["--once"], capsys)
    assert text.count("TransformerLM") == 1 and sampler.given == 2
    # It takes two to know how fast a run is; nobody wants to wait long for them.
    assert "6.00 steps/s" in text
    assert (sampler.asked.interval, sampler.asked.speed) == (0.25, math.inf)


@pytest.mark.parametrize(
    ("words", "ticks"),
    [
        (["--json"], [0, 1, 2]),
        (["--json", "--once"], [1]),
        (["--json", "--once", "--source", "run.jsonl"], [2]),
    ],
)
def test_json_gives_samples_that_can_be_read_again(
    words: list[str],
    ticks: list[int],
    sampler: FakeSampler,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(words, capsys).splitlines()
    read = [Sample.from_json(json.loads(line)) for line in lines]
    assert read == [make_sample(tick) for tick in ticks]


def test_json_has_null_for_numbers_that_it_does_not_have(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = dataclasses.replace(make_sample(0).devices[0], values={"power": math.nan})
    one = dataclasses.replace(make_sample(0), devices=(odd,))
    monkeypatch.setattr(sampler, "samples", lambda: iter([one]))
    (line,) = run(["--json"], capsys).splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["devices"][0]["values"] == {"power": None}


def test_an_output_that_knows_ascii_only_gets_question_marks(
    sampler: FakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii", errors="strict"))
    assert cli.main(["monitor", "top", "--once"]) == 0
    assert b"TransformerLM ? 6.00 steps/s" in raw.getvalue()


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
    assert cli.main(["monitor", "top", *words]) == 2
    assert message in capsys.readouterr().err


# --- the ends of the live view -------------------------------------------------------------------


def live(sampler: Sampler) -> str:
    """The live view in a terminal without a keyboard; what it has written."""
    file = io.StringIO()
    environment = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
    console = Console(file=file, force_terminal=True, _environ=environment)
    try:
        top_command.run_live(sampler, console)
    finally:
        text = file.getvalue()
        assert text.rindex(LEAVE) > text.rindex(ENTER)
    return text


def test_without_a_keyboard_it_ends_with_the_recording() -> None:
    text = live(FakeSampler())
    assert "TransformerLM" in text and "the end" in text


def test_a_failure_while_sampling_gives_the_terminal_back() -> None:
    def fail() -> None:
        raise OSError("the sampler broke")

    with pytest.raises(RuntimeError, match="sampling has failed: OSError"):
        live(FakeSampler(then=fail))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_termination_gives_the_terminal_back(name: str) -> None:
    number = getattr(signal, name)
    fake = FakeSampler(then=lambda: os.kill(os.getpid(), number))
    # Under nohup this process ignores SIGHUP, and what is ignored stays so.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(128 + number)):
            live(fake)
        assert fake.closed and signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert "the end" in live(FakeSampler(then=lambda: signal.raise_signal(number)))
    finally:
        signal.signal(number, before)


def test_a_key_ends_it_and_the_terminal_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "wb", buffering=0) as keyboard, os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(slave)

        def press() -> None:
            assert not termios.tcgetattr(slave)[3] & (termios.ECHO | termios.ICANON)
            keyboard.write(b"x")
            time.sleep(0.3)
            keyboard.write(b"q")

        # What does not end by it is ended, as a failure.
        watchdog = threading.Timer(30, os.kill, (os.getpid(), signal.SIGTERM))
        watchdog.start()
        try:
            assert "q quits" in live(FakeSampler(then=press))
        finally:
            watchdog.cancel()
        assert termios.tcgetattr(slave) == before


# --- a real process in a real terminal -----------------------------------------------------------


class Terminal:
    """`monitor top` in a terminal that can be looked at."""

    def __init__(self, *words: str, columns: int, lines: int) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.Stream(self.screen)
        self.raw = ""
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "dataparallel", "monitor", "top", *words],
            env=environment,
            dimensions=(lines, columns),
            encoding="utf-8",
            # At an interrupt the terminal drops what it holds, half a character too.
            codec_errors="replace",
            timeout=60,
        )
        self.modes = termios.tcgetattr(self.child.child_fd)

    def read(self) -> bool:
        """Take what has been written; whether there may be more."""
        try:
            text = self.child.read_nonblocking(1 << 16, timeout=0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += text
        self._stream.feed(text)
        return True

    def until(self, condition: Callable[[str], bool]) -> str:
        """Read until the screen is as it should be; the screen."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            more = self.read()
            text = "\n".join(self.screen.display)
            if condition(text):
                return text
            assert more, f"it ended with {self.raw[-2000:]!r}"
        raise TimeoutError("\n".join(self.screen.display))

    def resize(self, columns: int, lines: int) -> None:
        self.read()
        self.screen.resize(lines, columns)
        self.screen.erase_in_display(2)
        self.child.setwinsize(lines, columns)


@pytest.fixture
def training(run_folder: Path) -> Iterator[None]:
    """This process trains on two replicas, and can be watched."""
    model = dataparallel.DataParallel(nn.Linear(8, 1), ["cpu", "cpu"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop = threading.Event()

    def train() -> None:
        while not stop.wait(0.02):
            model(torch.ones(6, 8)).sum().backward()
            optimizer.step()

    with StepMonitor(model):
        thread = threading.Thread(target=train)
        thread.start()
        yield
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


def test_it_is_used_and_leaves_no_trace(training: None) -> None:
    pid = str(os.getpid())
    words = ("--attach", pid, "--source", "cpu", "--interval", "0.2")
    terminal = Terminal(*words, columns=100, lines=34)
    text = terminal.until(lambda text: "── replicas" in text and " steps/s" in text)
    assert ENTER in terminal.raw and "q quits" in text
    assert "── devices" in text and f"pid {pid}" in text and "Linear" in text
    # Keys are not echoed, and those that mean nothing do nothing.
    terminal.child.send("x\x1b[A")
    terminal.resize(20, 10)
    text = terminal.until(lambda text: "Linear" in text and "──" not in text)
    assert "cpu" in text and "^[" not in text
    terminal.resize(160, 40)
    terminal.until(lambda text: "── devices" in text)
    # As q does it; that key is tested without a process.
    terminal.child.sendintr()
    deadline = time.monotonic() + 60
    while terminal.read():
        assert time.monotonic() < deadline
    terminal.child.wait()
    assert (terminal.child.exitstatus, terminal.child.signalstatus) == (0, None)
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    assert SHOW_CURSOR in terminal.raw[terminal.raw.rindex("\x1b[?25l") :]
    assert termios.tcgetattr(terminal.child.child_fd) == terminal.modes
    assert "Traceback" not in terminal.raw
    terminal.child.close()
