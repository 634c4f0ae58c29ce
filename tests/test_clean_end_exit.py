"""The end of the interpreter: no error, no output, no wait, whatever is under way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dataparallel import checkpoint
from tests.exit_server import Ended, ExitServer

pytestmark = pytest.mark.skipif(not hasattr(sys, "_current_frames"), reason="needs CPython")

#: Seconds that an interpreter may take, which includes what it does before its end. Less than the
#: end would wait for a thread in tests/clean_end_cases.py: nobody may have to be waited for.
LIMIT = 40.0


@pytest.fixture(scope="module")
def exits() -> Iterator[ExitServer]:
    with ExitServer("tests.clean_end_cases") as server:
        yield server


def assert_clean(ended: list[Ended]) -> None:
    for each in ended:
        assert (each.status, each.out, each.err) == (0, "", "")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("data_parallel", ["trained", "in_cycle"]),
        ("distributed", ["trained", "closed", "in_cycle", "monitored", "after_an_error"]),
        ("virtual", ["trained", "two_models"]),
    ],
)
def test_after_training(exits: ExitServer, kind: str, names: list[str]) -> None:
    assert_clean(exits.run(*[(name, [kind]) for name in names], timeout=LIMIT))


def test_after_a_fork(exits: ExitServer) -> None:
    kinds = ["data_parallel", "distributed"]
    assert_clean(exits.run(*[("after_fork", [kind]) for kind in kinds], timeout=LIMIT))


def test_with_tools_that_are_open(exits: ExitServer) -> None:
    assert_clean(exits.run(("balanced", []), timeout=LIMIT))


@pytest.mark.parametrize("destroy", [True, False])
def test_in_processes(exits: ExitServer, tmp_path: Path, destroy: bool) -> None:
    store = str(tmp_path / "store")
    calls = [("trained_in_processes", [rank, 2, store, destroy]) for rank in range(2)]
    assert_clean(exits.run(*calls, timeout=LIMIT))


def test_a_checkpoint_that_is_being_written_is_finished(exits: ExitServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert_clean(exits.run(("saving", [str(folder)]), timeout=LIMIT))
    loaded = checkpoint.load(folder, torch.nn.Linear(300, 300))
    assert loaded.step == 7 and not loaded.rejected


def test_right_after_a_failure_of_a_process(exits: ExitServer, tmp_path: Path) -> None:
    calls = [("failed_in_processes", [rank, 4, str(tmp_path / "store")]) for rank in range(4)]
    assert_clean(exits.run(*calls, timeout=LIMIT))


def test_the_error_of_the_program_is_all_that_is_said(exits: ExitServer) -> None:
    (ended,) = exits.run(("ends_by_an_error", ["distributed"]), timeout=LIMIT)
    assert ended.status == 1
    assert ended.err.startswith("Traceback") and ended.err.count("Traceback") == 1
    assert "in replica 0 on device cpu" in ended.err.splitlines()[-2]


def test_the_status_of_the_program_is_that_of_the_process(exits: ExitServer) -> None:
    (ended,) = exits.run(("ends_by_exit", ["distributed", 3]), timeout=LIMIT)
    assert (ended.status, ended.err) == (3, "")


def test_replicas_that_were_left_behind_are_waited_for(exits: ExitServer) -> None:
    """Where they come out of torch when the interpreter is gone, that aborts the process."""
    (ended,) = exits.run(("left_behind", [3]), timeout=LIMIT)
    assert (ended.status, ended.out, ended.err) == (3, "", "")


def test_a_real_interpreter_is_no_different() -> None:
    program = "from tests import clean_end_cases as c; kept = c.trained('distributed')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
