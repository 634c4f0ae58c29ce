"""``make gpu``: it goes on after failures, ends in time, and its page says what happened."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from dataparallel.kernels.backend import registered
from tests.gpu import kernel_cases, report
from tests.gpu.report import NAMES, Part, lay_out, plan, run_all, run_part
from tests.kernels.host_backend import HostBackend


def part(title: str, code: str, limit: float = 30.0, **more: object) -> Part:
    """Return a part that runs some Python."""
    return Part("tests", title, (sys.executable, "-c", code), limit, **more)  # type: ignore[arg-type]


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
#: Parts, and what becomes of each: verdict, reason and output.
PARTS = [
    (part("fails", "raise SystemExit('it is wrong')"), "failed", "exit status 1", "it is wrong\n"),
    (part("hangs", HANGS, 0.5), "failed", "ended at its limit of 0 s", r"child \d+\n"),
    (part("lacks", "", needs=("sys", "no-such")), "not run", "needs no-such", ""),
    (part("dies", "import os; os.abort()"), "failed", "ended by signal 6", ""),
    (part("refuses", "print('no')", expected="yes"), "failed", "did not print 'yes'", "no\n"),
    (part("works", "print('all is well')", expected="is"), "passed", "", "all is well\n"),
]


def test_a_run_goes_on_after_what_fails_hangs_and_is_missing(tmp_path: pathlib.Path) -> None:
    pages: list[str] = []
    done: dict[str, report.Outcome] = {}

    def write(found: dict[str, report.Outcome]) -> None:
        done.update(found)
        pages.append(report.page(["virtual:0"], found))

    assert run_all([each for each, *_ in PARTS], tmp_path, 100, write) == 1
    for each, verdict, why, output in PARTS:
        one = done[each.title]
        assert (one.verdict, one.why) == (verdict, why)
        assert re.fullmatch(output, one.output), each.title
    status = pathlib.Path(f"/proc/{done['hangs'].output.split()[1]}/stat")
    # If nobody waits for it, it may remain as a zombie.
    assert not status.exists() or status.read_text().split(") ")[1][0] in "ZX"
    assert "| works | not run | 0 | the run was stopped before |" in pages[0]
    assert "| fails | failed | 0 | exit status 1 |" in pages[-1]
    assert "\n## works: passed\n\n    all is well\n" in pages[-1]


def test_a_run_has_only_so_much_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = run_part(part("late", "print(1)"), tmp_path, left=1.0)
    assert (late.verdict, late.why) == ("not run", "the time of the whole run was over")
    monkeypatch.setattr(report, "_LEAST", 0.1)
    long = run_part(part("long", "import time; time.sleep(600)", 500), tmp_path, left=0.6)
    assert long.why == "ended at its limit of 1 s"


def test_ctrl_c_leaves_what_was_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(part: Part, *more: object) -> report.Outcome:
        if part.title == "second":
            raise KeyboardInterrupt
        return report.Outcome("passed", "")

    monkeypatch.setattr(report, "run_part", stopped)
    found: dict[str, report.Outcome] = {}
    assert run_all([part("first", ""), part("second", "")], tmp_path, 9, found.update) == 130
    assert [one.verdict for one in found.values()] == ["passed", "not run"]


def test_all_parts_run_on_a_gpu_and_the_sanitizer_nowhere_else() -> None:
    parts = plan(["cuda:0", "cuda:1"])
    assert {each.name for each in parts} == set(NAMES)
    (tests,) = [each for each in parts if each.name == "tests"]
    assert {"gpu or multi_gpu", "tests/gpu", "tests/test_generators.py"} <= set(tests.command)
    trained = [each.command for each in parts if each.name == "train"]
    # Two of NCCL's processes cannot be on one device; and one of them needs a GPU.
    assert [(words[6], words[8]) for words in trained] == [
        ("cuda:0", "bare,ddp"),
        ("cuda:0", "bare,ddp"),
        ("cuda:0,cuda:0", "bare"),
        ("cuda:0,cpu", "bare"),
        ("cuda:0,cuda:1", "bare,ddp"),
    ]
    elsewhere = plan(["virtual:0", "virtual:1"])
    assert {each.name for each in elsewhere} == {*NAMES} - {"sanitizer"}
    assert elsewhere[-1].environment == {"DATAPARALLEL_VIRTUAL_DEVICES": "2"}


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "page.md"
    assert report.main(["--devices", "cuda:99", "--output", str(output)]) == 2
    assert not output.exists()
    assert "make gpu DEVICES=virtual:0,virtual:1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        report.main(["--devices", "gpu"])
    assert "'gpu' is none of cuda:0, virtual:0 and cpu" in capsys.readouterr().err
    assert report.main(["--devices", "cpu", "--only", "doctor", "--output", str(output)]) == 0
    assert "| The machine | passed |" in output.read_text()


def test_a_sanitizer_watches_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = HostBackend()
    monkeypatch.setattr(kernel_cases, "WATCHED", ((33, 1),))
    monkeypatch.setattr(sys, "argv", ["kernel_cases", "cpu"])
    with registered([backend]):
        kernel_cases.main()
    names = [case.__name__ for case in kernel_cases.CASES]
    assert capsys.readouterr().out.split() == names
    assert {name.split("_")[0] for name in backend.launches} >= {
        name.split("_")[0] for name in names
    }


def test_the_package_can_be_imported_where_it_was_laid_out(tmp_path: pathlib.Path) -> None:
    lay_out(tmp_path)
    code = "from dataparallel.tools import cli; import dataparallel.kernels as k; print(k.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; cli.main(['--version'])"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    place, version = done.stdout.splitlines()
    assert pathlib.Path(place) == tmp_path / "dataparallel" / "kernels" / "__init__.py"
    assert version == "dataparallel 0.1.0"
