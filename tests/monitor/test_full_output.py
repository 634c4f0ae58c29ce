"""Commands whose output cannot be written end with a line that says so."""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dataparallel.tools import cli
from tests.monitor.made_up_samples import record, sample

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "words", [["top", "--once", "--source"], ["top", "--once", "--json", "--source"], ["report"]]
)
def test_an_output_without_room(
    words: list[str],
    unbuffered: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run"
    record(path, *map(sample, range(3)))
    # As Python opens its own, with and without PYTHONUNBUFFERED.
    binary = FULL.open("wb", buffering=0 if unbuffered else -1)
    with io.TextIOWrapper(binary, write_through=unbuffered) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["monitor", *words, str(path)]) == 1
        # What is left must not fail when Python ends, which closes it as this does.
        full.flush()
    error = capsys.readouterr().err
    assert error == (
        "dataparallel: error: cannot write the output: No space left on device; make room\n"
    )


@pytest.mark.skipif(not hasattr(select, "poll"), reason="the system tells it only on writing")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_reader_that_goes_away_is_no_error(
    unbuffered: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    binary = os.fdopen(writer, "wb", buffering=0 if unbuffered else -1)
    with io.TextIOWrapper(binary, write_through=unbuffered) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["bench"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a.png"), "a.png: Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "OSError: [Errno 5] Input/output error"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
        (BrokenPipeError("a worker is gone"), "BrokenPipeError: a worker is gone"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: OSError,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_of(error, monkeypatch) == 1
    assert capsys.readouterr().err == f"dataparallel: error: {told}\n"


def run_of(error: OSError, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(namespace: argparse.Namespace) -> int:
        raise error

    run: Callable[[argparse.Namespace], int] = fail
    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    return cli.main([])


def test_without_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a program without a console.
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["bench"]) == 0
