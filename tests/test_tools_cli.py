"""The `dataparallel` command line: help, errors, exit status."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from dataparallel.tools import arguments, cli
from dataparallel.tools.extras import needs_extra
from tests.monitor.cases import make_sample, write_recording

COMMANDS = ("doctor", "bench", "bench train", "completion", "monitor")
PARTS = ("top", "record", "plot", "report", "serve")


@pytest.mark.parametrize("command", [*COMMANDS, *(f"monitor {part}" for part in PARTS)])
def test_every_command_explains_itself_with_examples_that_are_accepted(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: dataparallel {command}")
    examples = text.split("examples:\n")[1].splitlines()
    assert examples
    parser = cli.build_parser()
    for example in examples:
        line = re.sub(r"^\s*([A-Z_]+=\S+ )*|^eval .\$\(|\).*", "", example.strip())
        words = shlex.split(line.split(" > ")[0].split("    #")[0])
        assert " ".join(words).startswith(f"dataparallel {command}")
        if "--help" not in words:
            parser.parse_args(words[1:])


@pytest.mark.parametrize(
    ("words", "part"), [([], "bench"), (["bench"], "train"), (["monitor"], "record")]
)
def test_a_group_alone_prints_its_help(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    assert f"\n    {part}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "command", "hint"),
    [
        ("monitro", "", "; did you mean 'monitor'?"),
        ("monitor topp", " monitor", "; did you mean 'top'?"),
        ("monitor top --atach=7", " monitor top", "; did you mean '--attach'?"),
        ("monitor top --sorce a --onse", " monitor top", "; did you mean '--once', '--source'?"),
        ("bench train --mode stp", " bench train", "; did you mean 'step'?"),
        ("--versoin", "", "; did you mean '--version'?"),
        ("doctor --xyz", " doctor", "arguments: --xyz"),
        ("xyz", "", ")"),
    ],
)
def test_a_misspelled_word_is_told_with_the_one_that_is_close(
    line: str, command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"dataparallel{command}: error: ") and told.endswith(hint)


def test_unknown_cases_are_named_with_those_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "train", "--cases", "mlp,rnn"])
    error = capsys.readouterr().err
    assert "got 'rnn', but there are: mlp, wide, deep, transformer, conv" in error


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ValueError("x"), 2, "x"),
        (ImportError("x"), 2, "x"),
        (RuntimeError("x"), 1, "x"),
        (KeyboardInterrupt(), 130, "stopped"),
        (PermissionError(errno.EACCES, "No entry", "a.png"), 1, "a.png: No entry"),
        (OSError(errno.EIO, "Input/output error"), 1, "OSError: [Errno 5] Input/output error"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "BrokenPipeError: [Errno 32] Broken pipe"),
        (BrokenPipeError("a worker is gone"), 1, "BrokenPipeError: a worker is gone"),
    ],
)
def test_errors_become_a_line_and_an_exit_status(
    error: BaseException,
    status: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(namespace: argparse.Namespace) -> int:
        raise error

    class Parser:
        def parse_args(self, argv: list[str]) -> argparse.Namespace:
            return argparse.Namespace(run=fail)

    monkeypatch.setattr(cli, "build_parser", Parser)
    assert cli.main([]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dataparallel: ") and line.endswith(told)


def redirected(binary: BinaryIO, patch: pytest.MonkeyPatch) -> io.TextIOWrapper:
    """The output is this, as Python opens its own with and without PYTHONUNBUFFERED."""
    output = io.TextIOWrapper(binary, write_through=isinstance(binary, io.RawIOBase))
    patch.setattr(sys, "stdout", output)
    return output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("buffering", [0, -1])
@pytest.mark.parametrize("words", ["top --once --source", "top --once --json --source", "report"])
def test_an_output_without_room(
    words: str,
    buffering: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recording(tmp_path / "run", [make_sample(i) for i in range(3)])
    with redirected(open("/dev/full", "wb", buffering=buffering), monkeypatch) as full:
        assert cli.main(["monitor", *words.split(), str(path)]) == 1
        # What is left must not fail when Python ends, which closes it as this does.
        full.flush()
    assert capsys.readouterr().err == (
        "dataparallel: error: cannot write the output: No space left on device; make room\n"
    )


@pytest.mark.skipif(not hasattr(select, "poll"), reason="the system tells it only on writing")
@pytest.mark.parametrize("buffering", [0, -1])
def test_a_reader_that_goes_away_is_no_error_nor_is_none(
    buffering: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with redirected(os.fdopen(writer, "wb", buffering=buffering), monkeypatch):
        assert cli.main(["bench"]) == 0
    assert capsys.readouterr().err == ""
    # As in a program without a console.
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["bench"]) == 0


def test_a_missing_package_is_explained_by_its_extra() -> None:
    with (
        pytest.raises(ImportError, match=r'pip install "dataparallel\[tools\]"'),
        needs_extra("tools"),
    ):
        import package_that_does_not_exist  # type: ignore[import-not-found]  # noqa: F401


def test_a_fault_of_our_own_is_not_blamed_on_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"dataparallel\.nowhere"), needs_extra("tools"):
        import dataparallel.nowhere  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_counts_are_whole_and_positive(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of at least 1"):
        arguments.count(text)


def test_device_lists_keep_repeats_and_cannot_be_empty() -> None:
    assert arguments.device_names("cpu, cpu") == ["cpu", "cpu"]
    with pytest.raises(argparse.ArgumentTypeError, match="one device per replica"):
        arguments.device_names(" ,")


def test_python_dash_m_is_the_same_command_and_needs_no_extra() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['dataparallel', '--version']\n"
        "try: runpy.run_module('dataparallel', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "late = {'rich', 'psutil', 'dataparallel.distributed_autograd'}\n"
        "sys.exit(not late.isdisjoint(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.stdout.startswith("dataparallel 0.") and finished.returncode == 0
