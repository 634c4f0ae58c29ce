"""``make gpu``: it goes on after failures, ends in time, and its page says what happened."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from dataparallel.kernels.backend import registered
from tests.cluster import Cluster
from tests.gpu import kernel_cases
from tests.gpu.report import __main__ as command
from tests.gpu.report import run, step
from tests.gpu.report.hybrid import compare
from tests.gpu.report.page import MOST_LINES, page, record
from tests.gpu.report.plan import NAMES, WITHOUT_PEERS, Part, plan
from tests.gpu.report.run import Outcome, lay_out, run_all, run_part
from tests.kernels.host_backend import HostBackend

FACTS = {"devices": "cuda:0", "machine": "none"}
TABLE = {"title": "Figures", "head": ["name", "ms"], "rows": [["one", 1]]}


def part(title: str, code: str, limit: float = 30.0, **more: Any) -> Part:
    """Return a part that runs some Python."""
    return Part("tests", title, (sys.executable, "-c", code), limit, **more)


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
MEASURES = f"""
import os
open(os.environ["GPU_REPORT_FIGURES"], "w").write({json.dumps(TABLE)!r})
print("all is well")
print("ours / bare: time 2")
"""
WELL = "all is well\nours / bare: time 2\n"
#: Parts, and what becomes of each: verdict, reason and output.
PARTS = [
    (part("fails", "raise SystemExit('it is wrong')"), "failed", "exit status 1", "it is wrong\n"),
    (part("hangs", HANGS, 0.5), "failed", "ended at its limit of 0 s", r"child \d+\n"),
    (part("lacks", "", needs=("sys", "no-such")), "not run", "needs no-such", ""),
    (part("large", "", gpus=4), "not run", "needs 4 GPUs", ""),
    (part("dies", "import os; os.abort()"), "failed", "ended by signal 6", ""),
    (part("refuses", "print('no')", expected="yes"), "failed", "did not print 'yes'", "no\n"),
    (part("cannot", "print('not run: too small'); exit(77)"), "not run", "too small", ".*\n"),
    (part("works", MEASURES, expected="is", shown="well|ours"), "passed", "", WELL),
]


def test_a_run_goes_on_after_what_fails_hangs_and_is_missing(tmp_path: pathlib.Path) -> None:
    pages: list[str] = []
    done: dict[str, Outcome] = {}
    parts = [each for each, *_ in PARTS]

    def write(found: dict[str, Outcome]) -> None:
        done.update(found)
        pages.append(page(record(FACTS, parts, found)))

    assert run_all(parts, tmp_path, 100, tmp_path / "logs", write) == 1
    for each, verdict, why, output in PARTS:
        one = done[each.title]
        assert (one.verdict, one.why) == (verdict, why)
        assert re.fullmatch(output, one.output), each.title
    status = pathlib.Path(f"/proc/{done['hangs'].output.split()[1]}/stat")
    # If nobody waits for it, it may remain as a zombie.
    assert not status.exists() or status.read_text().split(") ")[1][0] in "ZX"
    assert "; works | not run: the run was stopped before | 0 |" in pages[0]
    assert "| fails | failed: exit status 1 | 0 |" in pages[-1]
    assert "\n## fails: exit status 1\n\n    it is wrong\n" in pages[-1]
    assert "\n## Figures\n\n| name | ms |\n| --- | --- |\n| one | 1 |\n" in pages[-1]
    assert "| works | - | all is well |\n| works | ours / bare | time 2 |\n" in pages[-1]
    assert (tmp_path / "logs" / "08-tests.log").read_text() == WELL


def test_a_page_has_few_lines_and_says_what_it_leaves_out() -> None:
    rows = [[str(i), i] for i in range(40)]
    tables = [{**TABLE, "title": f"Table {i}", "rows": rows} for i in range(4)]
    parts = [part("measures", ""), part("fails", "")]
    long = "\n".join(f"line {i}" for i in range(50))
    done = {
        "measures": Outcome("passed", "", 1.0, "", tables),
        "fails": Outcome("failed", "exit status 1", 1.0, long),
    }
    text = page(record(FACTS, parts, done))
    assert len(text.splitlines()) <= MOST_LINES
    assert "## Table 1" in text and "## Table 3" not in text
    assert text.count("Further tables did not fit; they are in the JSON.") == 1
    assert text.endswith("    line 48\n    line 49\n")


def test_the_time_in_which_a_device_works_is_counted_once() -> None:
    assert step.covered([]) == 0
    assert step.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_two_processes_of_two_devices_train_as_the_bare_module(cluster: Cluster) -> None:
    names = [f"virtual:{i}" for i in range(4)]
    cluster.run(compare, 2, names, [names[:2], names[2:]], virtual=True, backend="vccl")


def test_a_run_has_only_so_much_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = run_part(part("late", "print(1)"), tmp_path, 1.0, tmp_path / "log")
    assert (late.verdict, late.why) == ("not run", "no time left")
    monkeypatch.setattr(run, "LEAST", 0.1)
    endless = part("endless", "import time; time.sleep(600)", 500)
    long = run_part(endless, tmp_path, 0.6, tmp_path / "log")
    assert long.why == "ended at its limit of 1 s"


def test_ctrl_c_leaves_what_was_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(part: Part, *more: object) -> Outcome:
        if part.title == "second":
            raise KeyboardInterrupt
        return Outcome("passed", "")

    monkeypatch.setattr(run, "run_part", stopped)
    found: dict[str, Outcome] = {}
    parts = [part("first", ""), part("second", "")]
    assert run_all(parts, tmp_path, 9, tmp_path, found.update) == 130
    assert [one.verdict for one in found.values()] == ["passed", "not run"]


def test_the_parts_of_each_number_of_gpus() -> None:
    for full, seconds in ((False, 460), (True, 2360)):
        parts = plan([f"cuda:{i}" for i in range(8)], full)
        # The tests of training under torch's sanitizer take long.
        assert {each.name for each in parts} == {*NAMES} - ({"streams"} if not full else set())
        assert len({each.title for each in parts}) == len(parts)
        assert all(each.limit < seconds for each in parts)
    shapes = {each.title: each.gpus for each in parts if each.name == "hybrid"}
    assert (shapes["hybrid 2x1"], shapes["hybrid 2x4"], shapes["hybrid 8x1"]) == (2, 8, 8)
    (peers,) = {each.title for each in parts if each.environment.get("NCCL_P2P_DISABLE")} - {
        f"hybrid 2x1, {WITHOUT_PEERS}"
    }
    assert peers == f"hybrid 2x2, {WITHOUT_PEERS}"
    (tests,) = [each for each in parts if each.name == "tests"]
    assert {"gpu or multi_gpu", "tests/gpu", "tests/test_generators.py"} <= set(tests.command)
    trained = [each.command for each in plan(["cuda:0", "cuda:1"]) if each.name == "train"]
    # Two of NCCL's processes cannot be on one device; and one of them needs a GPU.
    assert [(words[6], words[8]) for words in trained] == [
        ("cuda:0", "bare,ddp"),
        ("cuda:0", "bare,ddp"),
        ("cuda:0,cuda:0", "bare"),
        ("cuda:0,cpu", "bare"),
        ("cuda:0,cuda:1", "bare,ddp"),
    ]
    elsewhere = plan(["virtual:0", "virtual:1"])
    assert {each.name for each in elsewhere} == {*NAMES} - {"sanitizer", "streams"}
    assert elsewhere[-1].environment == {"DATAPARALLEL_VIRTUAL_DEVICES": "2"}


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "page.md"
    assert command.main(["--devices", "cuda:99", "--output", str(output)]) == 2
    assert not output.exists()
    assert "make gpu DEVICES=virtual:0,virtual:1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["--devices", "gpu"])
    assert "'gpu' is none of cuda:0, virtual:0 and cpu" in capsys.readouterr().err
    asked = ["--devices", "virtual:0,virtual:1", "--only", "links", "--output", str(output)]
    assert command.main(asked) == 0
    assert re.search(r"\[1/1\] links between devices \(\d s elapsed, 4\d\d s left\)",
                     capsys.readouterr().out)  # fmt: skip
    text = output.read_text()
    assert "| links between devices | passed |" in text
    assert "## Copies between devices, GB/s, each pair alone" in text
    assert "here times, rates and shares mean nothing" in text
    (one,) = json.loads((tmp_path / "page.json").read_text())["parts"]
    assert one["output"][-1].startswith("the right bytes arrived from each of 2 ordered pairs")


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
