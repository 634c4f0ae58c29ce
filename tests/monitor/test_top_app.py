"""The interactive `monitor top`: what keys and mouse do, in terminals of several sizes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import html
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest
from textual.pilot import Pilot

from dataparallel.monitor.readings.reading import HostReading, ProcessReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools import cli
from dataparallel.tools.monitor import signals, top_command
from dataparallel.tools.monitor.bars import chart
from dataparallel.tools.monitor.process_control import end_process
from dataparallel.tools.monitor.process_rows import Row, arranged, as_tree
from dataparallel.tools.monitor.top_app import TopApp
from dataparallel.tools.monitor.top_widgets import Ascii, Table
from dataparallel.tools.monitor.view import View
from tests.forkserver import fork
from tests.monitor.cases import GIB, FakeSampler, make_device, make_sample
from tests.monitor.golden import Golden

SMALL = (80, 24)


class Screen:
    """The app in a terminal that is not there: keys go in, and lines of text come out."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, keys: str) -> list[str]:
        """Press keys, named as textual names them; what is seen then."""
        await self.pilot.press(*keys.split())
        return await self.lines()

    async def lines(self) -> list[str]:
        await self.pilot.pause()
        width, height = self.app.size
        cells = [[" "] * width for _ in range(height)]
        for x, y, text in re.findall(
            r'<text[^>]* x="([\d.]+)"[^>]*line-(\d+)\)">([^<]*)</text>',
            self.app.export_screenshot(),
        ):
            place = round(float(x) / 12.2)
            shown = html.unescape(text).rstrip("\n").replace("\xa0", " ")
            cells[int(y)][place : place + len(shown)] = shown
        return ["".join(row).rstrip() for row in cells]

    async def table(self, keys: str = "") -> list[str]:
        """Return the head and the rows of the processes."""
        lines = await self.press(keys) if keys else await self.lines()
        begin = next((i for i, line in enumerate(lines) if HEAD in line), len(lines))
        return [line for line in lines[begin:-1] if line]


HEAD = "  command"


def play(
    script: Callable[[Screen], Awaitable[Any]],
    *shown: Sample,
    size: tuple[int, int] = (120, 40),
    **options: Any,
) -> None:
    """Run a script with the app, which shows these samples."""
    samples = deque(shown or [make_sample(tick) for tick in range(30)])

    async def main() -> None:
        app = TopApp(View(interval=1.0), samples, lambda: False, **options)
        async with app.run_test(size=size, notifications=True) as pilot:
            await pilot.pause()
            await script(Screen(app, pilot))

    asyncio.run(main())


@contextlib.contextmanager
def sleeping(**options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its end."""
    child = subprocess.Popen(["sleep", "100"], **options)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


# --- what is shown -------------------------------------------------------------------------------


VERSIONS = {
    "versions": {"driver": "570.1"},
    "host": HostReading(0.43, 64, 120 * GIB, 512 * GIB, load=(1.0, 2.0, 3.0)),
}


def test_it_fits_every_terminal_and_every_new_size(golden: Golden) -> None:
    shown: dict[str, list[str]] = {}

    async def script(screen: Screen) -> None:
        shown["80 x 24"] = await screen.lines()
        for width, height in ((5, 3), (120, 40), (200, 60)):
            await screen.pilot.resize_terminal(width, height)
            shown[f"{width} x {height}"] = await screen.lines()
        await screen.pilot.resize_terminal(*SMALL)
        assert await screen.lines() == shown["80 x 24"]
        shown["help"] = await screen.press("?")
        shown["notes"] = await screen.press("escape n")
        assert await screen.press("escape") == shown["80 x 24"]

    play(script, *(make_sample(tick, **VERSIONS) for tick in range(30)), size=SMALL)
    golden("top_app", {what: "\n".join(lines) for what, lines in shown.items()})


def test_a_terminal_without_blocks_is_told_the_same_in_ascii(golden: Golden) -> None:
    shown: dict[str, list[str]] = {}

    async def script(screen: Screen) -> None:
        shown["the view"] = await screen.lines()
        shown["help"] = await screen.press("?")
        shown["a filter"] = await screen.press("escape / a d a")

    # 100 processes make a bar for scrolling.
    many = tuple(process(i, f"x{i}.py") for i in range(100))
    play(
        script,
        *(make_sample(tick, **VERSIONS, processes=many) for tick in range(30)),
        size=SMALL,
        line_filters=[Ascii()],
    )
    text = "\n".join(line for lines in shown.values() for line in lines)
    assert text.isascii()
    golden("top_ascii", {what: "\n".join(lines) for what, lines in shown.items()})


def test_charts_of_each_device_need_room_and_else_there_is_one() -> None:
    devices = [make_device(i, {"utilization": i / 8}) for i in range(8)]
    # A MIG instance is a part of one.
    devices.append(make_device(8, parent="cuda:0"))
    shown = [make_sample(t, devices=tuple(devices), runs=(), processes=()) for t in range(9)]
    found: dict[tuple[int, int], str] = {}

    async def script(screen: Screen) -> None:
        for size in ((200, 60), (120, 40), (80, 30), (80, 14)):
            await screen.pilot.resize_terminal(*size)
            lines = await screen.lines()
            found[size] = next((line.strip("─ ") for line in lines if " last " in line), "")

    play(script, *shown, size=SMALL)
    each, whole = "each device, last 8 s", "mean of 8 devices, last 8 s"
    assert list(found.values()) == [each, each, whole, ""]


@pytest.mark.parametrize(
    ("ratios", "rows"),
    [
        # A quarter of a row is a dot; a little is not nothing, and too much is all.
        ([0.5, 1.0, 0.25, 0.125, 0.001, 7.0], ["⢸⠀⢸", "⣿⣄⣸"]),
        # The newest are on the right, and missing ones stay blank.
        ([1.0, None], ["⠀⠀⡇", "⠀⠀⡇"]),
        ([0.0] * 9 + [1.0], ["⠀⠀⢸", "⣀⣀⣸"]),
    ],
)
def test_a_chart_has_two_ratios_a_cell(ratios: list[float | None], rows: list[str]) -> None:
    lines = chart(ratios, 3, 2, lambda ratio: "red" if ratio > 0.9 else "green")
    assert [line.plain for line in lines] == rows


def test_phases_have_letters_where_there_are_no_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(screen: Screen) -> None:
        assert "BBBB" in "\n".join(await screen.lines())
        colors = set(re.findall(r"fill: (#\w+)", screen.app.export_screenshot()))
        # The ground, the writing, and dim writing.
        assert len(colors) == 3

    play(script)


def process(pid: int, command: str, **more: Any) -> ProcessReading:
    more = {"device": "cuda:0", "user": "ada", "memory": pid * GIB, **more}
    return ProcessReading(pid=pid, name=command.split()[0], command=command, **more)


OTHERS = make_sample(
    processes=(
        process(10, "python a.py", utilization=0.5, parent=7),
        process(11, "python b.py", utilization=0.1, parent=10, user="eve"),
        process(12, "blender", parent=7, device="cuda:1"),
        process(13, "python c.py", utilization=0.9, parent=11, device="cuda:10"),
        process(13, "python c.py", utilization=0.2, parent=11, device="cuda:1"),
    )
)

ALL = ["13 c.py", "13 c.py", "12 blender", "11 b.py", "10 a.py"]
#: The keys that are pressed one after the other, and the rows that are seen then.
STEPS: list[tuple[str, str, list[str]]] = [
    ("at first by memory", "", ALL),
    ("the next column", ".", ["13 c.py", "10 a.py", "13 c.py", "11 b.py", "12 blender"]),
    ("the other way around", "r", ["11 b.py", "13 c.py", "10 a.py", "13 c.py", "12 blender"]),
    ("names go upwards", ", , ,", ["10 a.py", "12 blender", "13 c.py", "13 c.py", "11 b.py"]),
    ("a filter", "/ e v e", ["11 b.py"]),
    ("of none", "x", []),
    ("that is ended", "escape", ["10 a.py", "12 blender", "13 c.py", "13 c.py", "11 b.py"]),
    ("that is kept", "/ b enter r", ["11 b.py", "12 blender"]),
    ("a tree", "escape . . t", ["12 blender", "10 a.py", "11 └─ b.py", *["13    └─ c.py"] * 2]),
]


def test_rows_are_sorted_filtered_and_put_below_their_parents() -> None:
    async def script(screen: Screen) -> None:
        for what, keys, rows in STEPS:
            head, *lines = await screen.table(keys) or [""]
            place = head.find("command")
            found = [f"{line.split()[0]} {line[place:]}" for line in lines if line[place:]]
            assert (what, [line.replace("python ", "") for line in found]) == (what, rows)

    play(script, OTHERS, is_live=False)


def test_many_rows_scroll_with_the_one_that_is_chosen() -> None:
    many = make_sample(processes=tuple(process(i, f"x{i}.py") for i in range(1, 80)))

    async def script(screen: Screen) -> None:
        # The head stays; what does not fit any more is not the end of the list.
        for keys, first, last, chosen in (
            ("end", 4, 1, 78),
            ("home", 79, 76, 0),
            ("pagedown pagedown up", 74, 71, 7),
            ("/ x 7 enter end", 71, 7, 10),
            ("escape", 71, 68, 72),
        ):
            head, *rows = [line.split()[0] for line in await screen.table(keys)]
            found = screen.app.query_one(Table).cursor
            rows = [one for one in rows if one.isdigit()]
            assert (head, rows[0], rows[-1], found) == ("pid", str(first), str(last), chosen), keys

    play(script, many, size=SMALL)


@pytest.mark.parametrize(
    ("pattern", "pids"),
    [
        ("PYTHON", [10, 11, 13, 13]),
        ("python 10", [10, 13]),
        ("user:eve", [11]),
        ("user:ev", []),
        ("device:cuda:1 c.py", [13]),
        ("device:10", [13]),
        ("cuda:1", [12, 13, 13]),
    ],
)
def test_filters(pattern: str, pids: list[int]) -> None:
    rows = arranged(OTHERS.processes, "pid", descending=False, pattern=pattern)
    assert [row.process.pid for row in rows] == pids


def test_a_tree_shows_everybody_once_even_in_a_circle() -> None:
    circle = [Row(process(i, "a", parent=parent)) for i, parent in ((1, 2), (2, 1), (3, 3))]
    assert sorted(row.process.pid for row in as_tree(circle, ())) == [1, 2, 3]


def test_parents_are_those_of_this_machine() -> None:
    with sleeping() as child:
        me = Row(process(child.pid, "sleep", parent=os.getpid(), started=1.0))

        async def script(screen: Screen) -> None:
            rows = await screen.table("t")
            # The parent of it is no process on a device.
            assert rows[-1].split()[0] == str(child.pid) and rows[-1].endswith("└─ sleep")
            assert rows[-2].split()[0] == str(os.getpid()) and len(rows) > 2

        play(script, make_sample(processes=(me.process,)))


# --- the mouse -----------------------------------------------------------------------------------


def test_a_click_on_a_head_sorts_and_another_one_the_other_way_around() -> None:
    async def script(screen: Screen) -> None:
        for marks in ("util↓", "util↑"):
            head = (await screen.table())[0]
            await screen.pilot.click("#processes", offset=(head.index("util") + 1, 0))
            assert marks in (await screen.table())[0]
        assert (await screen.table())[1].split()[0] == "11"
        await screen.pilot.click("#processes", offset=(20, 3))
        assert screen.app.query_one(Table).cursor == 2

    play(script, OTHERS)


# --- ending processes ----------------------------------------------------------------------------


def reading(child: subprocess.Popen[bytes]) -> ProcessReading:
    started = psutil.Process(child.pid).create_time()
    return process(child.pid, "sleep 100", started=started)


def test_a_process_is_ended_once_that_is_confirmed() -> None:
    with sleeping() as first, sleeping() as second:
        # The higher number is further up.
        low, high = sorted((first, second), key=lambda child: child.pid)

        async def script(screen: Screen) -> None:
            text = "\n".join(await screen.press("T"))
            assert f"SIGTERM to process {high.pid}?" in text
            assert re.search("ada +sleep 100", text)
            # Enter alone means no.
            assert not any("SIGTERM to" in line for line in await screen.press("enter"))
            assert high.poll() is None
            await screen.press("T")
            await screen.pilot.click("#yes")
            assert high.wait(60) == -signal.SIGTERM and low.poll() is None
            text = "\n".join(await screen.press("T y"))
            assert f"process {high.pid} is gone" in text

        play(script, make_sample(processes=(reading(high), reading(low))))


@pytest.mark.parametrize("options", [{"read_only": True}, {"is_live": False}])
def test_a_process_of_a_recording_or_for_a_reader_is_not_ended(options: dict[str, Any]) -> None:
    with sleeping() as child:

        async def script(screen: Screen) -> None:
            lines = await screen.press("I T K y")
            assert "kill" not in lines[-1] and len(screen.app.screen_stack) == 1
            assert "kill" not in "\n".join(await screen.press("?"))

        play(script, make_sample(processes=(reading(child),)), **options)
        assert child.poll() is None


def refuse(*_: object) -> None:
    raise psutil.AccessDenied


def test_only_what_the_user_may_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeping() as child:
        started = reading(child).started
        others: list[tuple[int, float | None, type[OSError], str]] = [
            (0, 1.0, PermissionError, "process 0 is what all others live by"),
            (1, 1.0, PermissionError, "process 1 is what all others live by"),
            (os.getpid(), 1.0, PermissionError, "is this monitor itself"),
            (child.pid, None, PermissionError, "cannot be seen from here"),
            # Another one with this number is not meant.
            (child.pid, (started or 0.0) - 60.0, ProcessLookupError, "is gone"),
            (2**22 + 1, 1.0, ProcessLookupError, "is gone"),
        ]
        for pid, when, error, text in others:
            with pytest.raises(error, match=text):
                end_process(pid, signal.SIGKILL, started=when)
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "send_signal", refuse)
            with pytest.raises(PermissionError, match="is somebody else's"):
                end_process(child.pid, signal.SIGKILL, started=started)
        assert child.poll() is None
        end_process(child.pid, signal.SIGINT, started=started)
        assert child.wait(60) == -signal.SIGINT


# --- in a terminal -------------------------------------------------------------------------------


def fail() -> None:
    raise OSError("the sampler broke")


#: The key or signal, the exit status, and the output.
ENDS: dict[str, tuple[bytes | int | None, int, str]] = {
    "q": (b"q", 0, ""),
    "Ctrl-C": (b"\x03", 0, ""),
    "Ctrl-C in a panel": (b"?\x03", 0, ""),
    "SIGINT": (signal.SIGINT, 128 + signal.SIGINT, ""),
    "SIGTERM": (signal.SIGTERM, 128 + signal.SIGTERM, ""),
    "SIGHUP": (signal.SIGHUP, 128 + signal.SIGHUP, ""),
    "failure": (None, 1, "sampling has failed: OSError('the sampler broke')"),
}


@pytest.mark.parametrize("case", ENDS)
def test_however_it_ends_the_terminal_is_as_before(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how, status, told = ENDS[case]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    written: list[bytes] = []
    drawn = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(master, 65536):
                written.append(data)
                if b"TransformerLM" in data:
                    drawn.set()

    def act() -> None:
        # Its keys are not echoed.
        assert drawn.wait(60)
        assert not termios.tcgetattr(slave)[3] & (termios.ECHO | termios.ICANON)
        if isinstance(how, bytes):
            os.write(master, how)
        elif how is None:
            fail()
        else:
            os.kill(os.getpid(), how)
        ended.wait(60)

    ended, sampler = threading.Event(), FakeSampler(act)
    monkeypatch.setattr(sampler, "stop", ended.set)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in watched}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with os.fdopen(slave, "w", buffering=1, closefd=False) as terminal:
            for name in ("__stdin__", "__stdout__", "__stderr__"):
                monkeypatch.setattr(sys, name, terminal)
            monkeypatch.setenv("TERM", "xterm-256color")
            monkeypatch.setattr(top_command, "open_sampler", lambda arguments: sampler)
            modes = termios.tcgetattr(slave)
            try:
                found = cli.main(["monitor", "top"])
            except SystemExit as end:
                found = int(end.code or 0)
            assert found == status and sampler.closed
            assert termios.tcgetattr(slave) == modes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(slave)
    reader.join(60)
    os.close(master)
    text = b"".join(written).decode()
    assert text.count(ENTER) == text.count(LEAVE) == 1 and text.rindex(SHOW_CURSOR) > text.rindex(
        ENTER
    )
    assert told in capsys.readouterr().err


ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def show_top(terminal: int) -> None:
    """Be a process with this terminal, and run `top`; it never returns."""
    status: Any = 70
    try:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(terminal, number)
            file = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)
        os.environ["TERM"] = "xterm-256color"
        status = cli.main(["monitor", "top", "--source", "cpu", "--interval", "0.01"])
    except SystemExit as end:
        status = end.code
    finally:
        os._exit(status)


@contextlib.contextmanager
def top_in_a_window(on_hangup: Any = signal.SIG_DFL) -> Iterator[tuple[int, int]]:
    """Start `top` in a terminal of its own; yield the window's end of that, and the process."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
    # The tests may run under nohup.
    before = signal.signal(signal.SIGHUP, on_hangup)
    process = fork()
    if not process:
        os.close(master)
        show_top(slave)
    signal.signal(signal.SIGHUP, before)
    os.close(slave)
    try:
        yield master, process
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def status_of(process: int, each_time: Callable[[], object] = lambda: None) -> int | None:
    """Wait a minute at most for the end of a process, and return its status."""
    for _ in range(6000):
        each_time()
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def read_until_drawn(master: int) -> None:
    text = b""
    while b"quit" not in text:
        text += os.read(master, 65536)


@pytest.mark.parametrize("on_hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_it_ends_with_its_window(on_hangup: Any) -> None:
    with top_in_a_window(on_hangup) as (master, process):
        read_until_drawn(master)
        os.close(master)
        assert status_of(process) == 128 + signal.SIGHUP


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes an app wait, as for a driver or a terminal, and sets the patience of signals."""

    def set_patience(seconds: float) -> None:
        monkeypatch.setattr(TopApp, "exit", lambda self: None)
        monkeypatch.setattr(signals, "_PATIENCE", seconds)

    return set_patience


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_app_that_is_stuck(
    number: signal.Signals, stuck: Callable[[float], None]
) -> None:
    stuck(0.1)
    with top_in_a_window() as (master, process):
        read_until_drawn(master)
        os.kill(process, number)
        assert status_of(process) == 128 + number
        # Keys are echoed again.
        assert termios.tcgetattr(master)[3] & termios.ECHO
        os.close(master)


def test_a_second_signal_ends_it_at_once(stuck: Callable[[float], None]) -> None:
    stuck(3600)
    with top_in_a_window() as (master, process):
        read_until_drawn(master)
        # Two of a kind may come as one.
        status = status_of(process, lambda: os.kill(process, signal.SIGTERM))
        assert status == 128 + signal.SIGTERM
        os.close(master)
