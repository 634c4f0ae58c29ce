"""The `dataparallel` command line: help, errors, exit status."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dataparallel.errors import install_command, needs_extra
from dataparallel.tools import arguments, cli
from dataparallel.tools.monitor import report_command
from tests.monitor.cases import make_sample, write_recording

COMMANDS = (
    "doctor",
    "bench",
    "bench train",
    "bench host",
    "monitor",
)
PARTS = ("run", "top", "record", "plot", "report", "serve")


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
    ("line", "told"),
    [
        ("monitro", "invalid choice: 'monitro'"),
        ("doctor --xyz", "dataparallel doctor: error: unrecognized arguments: --xyz"),
        ("monitor top --for 3", "dataparallel monitor top: error: unrecognized arguments: --for 3"),
        ("bench train --cases mlp,rnn", "got 'rnn', but there are: mlp, wide, deep, transformer"),
        ("bench train --devices ,", "one device per replica, for example cpu,cpu"),
        ("bench host --replicas 1,", "'' is not a whole number of at least 1"),
        ("bench train --rounds 1.5", "'1.5' is not a whole number of at least 1"),
        ("bench host --replicas 1,0", "'0' is not a whole number of at least 1"),
    ],
)
def test_what_means_nothing_is_refused(
    line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ValueError("x"), 2, "x"),
        (ImportError("x"), 2, "x"),
        (RuntimeError("x"), 1, "x"),
        (KeyboardInterrupt(), 130, "stopped"),
        (PermissionError(errno.EACCES, "No entry", "a.png"), 1, "a.png: No entry"),
        (OSError(errno.EIO, "Input/output error"), 1, "OSError: [Errno 5] Input/output error"),
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
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(report_command, "run", fail)
    assert cli.main(["monitor", "report", "run.jsonl"]) == status
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
        # The rest must not fail when Python ends, which closes it as this does.
        full.flush()
    assert capsys.readouterr().err == (
        "dataparallel: error: cannot write the output: No space left on device; make room\n"
    )


@pytest.mark.skipif(not hasattr(select, "poll"), reason="the system tells it only on writing")
@pytest.mark.parametrize("buffering", [0, -1])
@pytest.mark.parametrize("words", [["bench"], ["monitor", "report", "run"]])
def test_a_reader_that_goes_away_is_no_error_nor_is_none(
    words: list[str],
    buffering: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recording(tmp_path / "run", [make_sample(i) for i in range(3)])
    reader, writer = os.pipe()
    os.close(reader)
    with redirected(os.fdopen(writer, "wb", buffering=buffering), monkeypatch):
        assert cli.main(words) == 0
    assert capsys.readouterr().err == ""
    # As in a program without a console.
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(words) == 0


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/a%20b/dp", "dir_info": {"editable": True}},
            'pip install -e "/home/a b/dp[monitor]"',
        ),
        (
            {"url": "file:///home/dp", "dir_info": {}},
            'pip install "dataparallel[monitor] @ file:///home/dp"',
        ),
        (
            {"url": "file:///tmp/dataparallel-0.1.0-py3-none-any.whl", "archive_info": {}},
            'pip install "dataparallel[monitor] @ file:///tmp/dataparallel-0.1.0-py3-none-any.whl"',
        ),
        (None, 'pip install ".[monitor]" in a clone of dataparallel'),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if origin is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    found = metadata.PathDistribution(tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    assert install_command("monitor") == command


def test_nobody_is_told_to_install_this_from_an_index() -> None:
    """Anybody could own the name there."""
    root = Path(__file__).parents[1]
    for folder in ("dataparallel", "kernels", "tools", "docs", "examples"):
        for file in (root / folder).rglob("*.*"):
            if file.suffix in (".py", ".md", ".ipynb"):
                for line in file.read_text().splitlines():
                    assert "install dataparallel" not in line, (file, line)
                    assert "@" in line or not re.search(r"""install ["']dataparallel""", line), file


def test_checkpoints_without_safetensors_name_their_extra() -> None:
    code = "import sys; sys.modules['safetensors'] = None; from dataparallel import checkpoint"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    told = done.stderr.splitlines()[-1]
    assert told.startswith("ImportError: this needs the package 'safetensors'"), done.stderr
    assert "[checkpoint]" in told


def test_a_missing_package_is_explained_by_its_extra_and_a_fault_of_our_own_is_not() -> None:
    with (
        pytest.raises(ImportError, match=r"'package_that_does_not_exist', .*\[tools\]"),
        needs_extra("tools"),
    ):
        import package_that_does_not_exist  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"dataparallel\.nowhere"), needs_extra("tools"):
        import dataparallel.nowhere  # type: ignore[import-not-found]  # noqa: F401


def test_values_of_options() -> None:
    assert arguments.count("12") == 12
    for text in ("0", "-1", "two", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of at least 1"):
            arguments.count(text)


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


ALL_HELP = """
from dataparallel.tools import cli
for command in {!r}:
    try:
        cli.main([*command.split(), "--help"])
    except SystemExit:
        pass
"""
ASKED = "import dataparallel.monitor as m; m.devices(); m.processes()"


@pytest.mark.parametrize(
    "words",
    [
        ["-c", ALL_HELP.format(("", *COMMANDS, *(f"monitor {part}" for part in PARTS)))],
        ["-m", "dataparallel", "monitor", "top", "--once"],
        ["-m", "dataparallel", "monitor", "top", "--once", "--json", "--attach", "auto"],
        ["-m", "dataparallel", "monitor", "record", "new", "--for", "0.1", "--attach", "auto"],
        ["-m", "dataparallel", "monitor", "top", "--once", "--source", "run"],
        ["-m", "dataparallel", "monitor", "report", "run"],
        ["-m", "dataparallel", "monitor", "serve", "--port", "0"],
        ["-c", "import dataparallel.tools.monitor.top_app"],
        ["-c", ASKED],
        ["-m", "dataparallel", "monitor", "plot", "run", "run.svg"],
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_who_watches_a_machine_waits_for_no_torch(words: list[str], tmp_path: Path) -> None:
    """Torch takes seconds and hundreds of megabytes; numpy, which it brings, a part of them."""
    write_recording(tmp_path / "run", [make_sample(i) for i in range(3)])
    (folder := tmp_path / "runs").mkdir(mode=0o700)
    with (
        (tmp_path / "modules").open("w") as modules,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", *words],
            cwd=tmp_path,
            env={**os.environ, "DATAPARALLEL_MONITOR_DIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=modules,
            text=True,
        ) as process,
    ):
        if "serve" in words:
            assert process.stdout is not None
            while "Ctrl-C ends it" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    told = (tmp_path / "modules").read_text()
    assert process.returncode == 0, told[-2000:]
    loaded = {name.split(".")[0] for name in re.findall(r"(?m)^import time: .*\| *(\S+)$", told)}
    heavy = {"torch"} if "plot" in words else {"torch", "numpy", "matplotlib"}
    assert "dataparallel" in loaded and not heavy & loaded
