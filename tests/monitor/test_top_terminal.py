"""The real `monitor top` in a pseudo-terminal: seen, resized, stopped, continued, ended."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest
import torch
from torch import nn

import dataparallel
from dataparallel.monitor import StepMonitor
from tests.monitor.made_up_runs import run_folder as run_folder

ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")


class Terminal:
    """`monitor top` in a terminal that can be looked at."""

    def __init__(self, *words: str, columns: int = 100, lines: int = 34) -> None:
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

    def check_end(self) -> None:
        """It ends by itself, without an error, and leaves the terminal as it was."""
        deadline = time.monotonic() + 60
        while self.read():
            assert time.monotonic() < deadline
        self.child.wait()
        assert (self.child.exitstatus, self.child.signalstatus) == (0, None), self.raw[-2000:]
        assert self.raw.count(ENTER) == self.raw.count(LEAVE) >= 1
        assert self.raw.rindex(LEAVE) > self.raw.rindex(ENTER)
        assert SHOW_CURSOR in self.raw[self.raw.rindex("\x1b[?25l") :]
        assert termios.tcgetattr(self.child.child_fd) == self.modes
        self.child.close()


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


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_is_used_and_leaves_no_trace(training: None) -> None:
    pid = str(os.getpid())
    terminal = Terminal("--attach", pid, "--source", "cpu", "--interval", "0.2")
    text = terminal.until(lambda text: "replicas" in text and " steps/s" in text)
    assert ENTER in terminal.raw and "q quit" in text
    assert "╭─ devices" in text and f"pid {pid}" in text and "Linear" in text
    # Keys are not echoed, and those that mean nothing do nothing.
    terminal.child.send("x\x1b[A")

    terminal.resize(20, 12)
    text = terminal.until(lambda text: "Linear" in text and "╭" not in text)
    assert "cpu" in text and "^[" not in text

    terminal.resize(160, 40)
    terminal.until(lambda text: "last step, " in text and "╭─ devices" in text)

    terminal.child.sendcontrol("z")
    deadline = time.monotonic() + 30
    while state_of(terminal.child.pid) != "T":
        assert time.monotonic() < deadline
        terminal.read()
    terminal.read()
    assert terminal.raw.rstrip().endswith((LEAVE, SHOW_CURSOR))
    assert termios.tcgetattr(terminal.child.child_fd) == terminal.modes
    terminal.screen.erase_in_display(2)
    os.kill(terminal.child.pid, signal.SIGCONT)
    terminal.until(lambda text: "last step, " in text)

    # As q does it; that key is tested without a process.
    terminal.child.sendintr()
    terminal.check_end()
    assert "Traceback" not in terminal.raw
