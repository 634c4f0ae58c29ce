"""The tools that tests of faults share."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.faults import leaks, table
from tests.faults.harness import Figures
from tests.faults.injector import Fault, InjectedError, Injector, random_plan

# --- leaks -----------------------------------------------------------------------------------


def test_nothing_left(nothing_left: None) -> None:
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    with open(os.devnull) as file:
        assert file.read() == ""


def test_a_thread_that_is_left() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="forgotten")
    with (
        pytest.raises(AssertionError, match=r"left behind after 0.1 s: thread 'forgotten'"),
        leaks.nothing_left(0.1),
    ):
        thread.start()
    go_on.set()
    thread.join()


def test_a_process_that_is_left() -> None:
    with (
        pytest.raises(AssertionError, match=r"child process \d+ sleep 100"),
        leaks.nothing_left(0.1),
    ):
        process = subprocess.Popen(["sleep", "100"])
    process.kill()
    process.wait()


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_file_that_is_left(tmp_path: pathlib.Path) -> None:
    with (
        pytest.raises(AssertionError, match=f"1 x {re.escape(str(tmp_path))}/open"),
        leaks.nothing_left(0.1),
    ):
        file = open(tmp_path / "open", "w")  # noqa: SIM115
    file.close()


# --- figures ---------------------------------------------------------------------------------


def record(figures: Figures, value: float, unit: str, *, at_least: bool = False) -> None:
    figures.record(
        goal=1,
        what="p100",
        value=value,
        unit=unit,
        limit=2.0,
        repeats=3,
        baseline="none",
        at_least=at_least,
    )


def test_figures_of_a_quick_run(tmp_path: pathlib.Path) -> None:
    figures = Figures("test", False, tmp_path)
    record(figures, 9.9, "s")
    record(figures, 0.5, "x", at_least=True)
    with pytest.raises(AssertionError, match=r"goal 1, p100: 10.1 s, and not <= 10 s"):
        record(figures, 10.1, "s")
    with pytest.raises(AssertionError, match=r"2.1 failures, and not <= 2 failures"):
        record(figures, 2.1, "failures")
    assert not list(tmp_path.iterdir())


def test_figures_of_a_long_run(tmp_path: pathlib.Path) -> None:
    figures = Figures("tests/a.py::test", True, tmp_path / "out")
    record(figures, 1.9, "s")
    with pytest.raises(AssertionError, match=r"2.1 s, and not <= 2 s"):
        record(figures, 2.1, "s")
    with pytest.raises(AssertionError, match=r"1.9 of 2, and not >= 2 of 2"):
        record(figures, 1.9, "of 2", at_least=True)
    lines = (tmp_path / "out" / "figures.jsonl").read_text().splitlines()
    assert [re.findall(r'"value": ([\d.]+)', line) for line in lines] == [["1.9"], ["2.1"], ["1.9"]]
    assert "pytest 'tests/a.py::test' --faults long" in lines[0]


def test_the_table(tmp_path: pathlib.Path) -> None:
    figures = Figures("tests/a.py::test", True, tmp_path)
    for value in (1.5, 1.25):
        record(figures, value, "s")
    with pytest.raises(AssertionError, match=r"1 of 2, and not >= 2 of 2"):
        figures.record(
            goal=3,
            what="a|b",
            value=1,
            unit="of 2",
            limit=2,
            repeats=2,
            baseline="-",
            at_least=True,
            details="why",
        )
    shown = table.render(table.latest((tmp_path / "figures.jsonl").read_text().splitlines()))
    command = "`pytest 'tests/a.py::test' --faults long`"
    assert shown.splitlines()[2:] == [
        f"| 1 | p100 | 1.25 s | ≤ 2 s | 3 | none | {command} |",
        f"| 3 | a\\|b | 1 of 2 **(missed)** (why) | ≥ 2 of 2 | 2 | - | {command} |",
    ]


def test_repeats(repeats: Callable[..., int], request: pytest.FixtureRequest) -> None:
    long = request.config.getoption("--faults") == "long"
    assert repeats(quick=2, long=300) == (300 if long else 2)


def test_the_limit_of_a_test(request: pytest.FixtureRequest) -> None:
    long = request.config.getoption("--faults") == "long"
    assert request.node.get_closest_marker("timeout").args == (1800 if long else 60,)


# --- faults ----------------------------------------------------------------------------------


def test_faults_happen_once(tmp_path: pathlib.Path) -> None:
    plan = [Fault(0, 1, "raise"), Fault(1, 1, "nan"), Fault(0, 2, "oom"), Fault(0, 3, "interrupt")]
    injector = Injector(plan, tmp_path / "log")
    assert injector.at(0, 0) == []
    with pytest.raises(InjectedError, match=r"in rank 0 at step 1"):
        injector.at(0, 1)
    with pytest.raises(AssertionError, match=r"but planned was"):
        injector.check()
    # As in a process that was started again.
    injector = Injector(plan, tmp_path / "log")
    assert injector.at(0, 1) == []
    assert injector.at(1, 1) == [plan[1]]
    with pytest.raises(torch.OutOfMemoryError, match=r"in rank 0 at step 2"):
        injector.at(0, 2)
    with pytest.raises(KeyboardInterrupt):
        injector.at(0, 3)
    injector.check()
    with pytest.raises(ValueError, match=r"planned more often are \['exit 0 1'\]"):
        Injector([Fault(0, 1, "exit")] * 2, tmp_path / "other")


def test_a_random_plan() -> None:
    plan = random_plan(["kill", "kill", "raise"], [0, 1], range(10), seed=3)
    assert [fault.kind for fault in plan] == ["kill", "kill", "raise"]
    assert len({(fault.rank, fault.step) for fault in plan}) == 3
    assert plan == random_plan(["kill", "kill", "raise"], [0, 1], range(10), seed=3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("kind", "code"), [("exit", 1 << 8), ("kill", int(signal.SIGKILL))])
def test_faults_that_end_a_process(tmp_path: pathlib.Path, kind: str, code: int) -> None:
    injector = Injector([Fault(0, 0, kind)], tmp_path / "log")  # type: ignore[arg-type]
    child = os.fork()
    if child == 0:
        injector.at(0, 0)
        os._exit(77)
    assert os.waitpid(child, 0)[1] == code
    injector.check()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stop_that_ends(tmp_path: pathlib.Path) -> None:
    injector = Injector([Fault(0, 0, "stop", seconds=0.3)], tmp_path / "log")
    child = os.fork()
    if child == 0:
        injector.at(0, 0)
        os._exit(5)
    begin = time.monotonic()
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert time.monotonic() - begin > 0.2
