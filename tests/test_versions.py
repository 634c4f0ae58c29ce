"""The script that runs the tests on other versions, and what is said to be supported."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

from dataparallel.tools.doctor import basics
from tests import versions
from tests.versions import Row

ROOT = pathlib.Path(__file__).parents[1]
PASSED = Row("3.12.1", "2.15.0+cu132", {"passed": 20, "skipped": 3}, 61.4)


def test_the_same_versions_are_named_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert tuple(pythons) == versions.PYTHONS
    assert f'requires-python = ">={pythons[0]}"' in project
    numbers = versions.TORCHES
    assert f'dependencies = ["torch>={numbers[0]}"]' in project
    assert tuple(map(int, numbers[0].split("."))) == basics.MINIMUM_TORCH
    assert tuple(map(int, numbers[-1].split("."))) == basics.NEWEST_TESTED_TORCH
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"torch {numbers[0]} to {numbers[-1]}" in readme
    assert f"Python {pythons[0]} to {pythons[-1]}" in readme


def test_what_is_in_the_quick_part_exists() -> None:
    assert all((ROOT / path).exists() for path in versions.QUICK)
    assert len(set(versions.QUICK)) == len(versions.QUICK)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("20 passed in 3.21s", {"passed": 20}),
        (
            "2 failed, 20 passed, 1 skipped, 3 errors in 82.11s (0:01:22)",
            {"failed": 2, "passed": 20, "skipped": 1, "error": 3},
        ),
        ("no tests ran in 0.01s", {}),
        ("Segmentation fault", {}),
    ],
)
def test_the_closing_line_of_pytest(line: str, counts: dict[str, int]) -> None:
    assert versions.read_closing_line(line) == counts


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        (PASSED, True),
        (Row("3.12.1", "2.15.0", {"passed": 20, "error": 1}, 1.0), False),
        (Row("3.12.1", "2.15.0", {"skipped": 20}, 1.0), False),
        (Row("3.12.1", "2.15.0", {"passed": 20}, 1.0, "pytest ended with status -11"), False),
    ],
)
def test_what_counts_as_passed(row: Row, passed: bool) -> None:
    assert row.passed == passed


def test_this_python_is_found_and_commands_that_fail_are_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.10"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    this = ".".join(map(str, sys.version_info[:2]))
    assert versions.find_pythons() == {this: sys.executable}


def test_names_for_several_versions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    found = dict.fromkeys(("3.10", "3.12", "3.13"), "/python")
    assert versions.choose_pythons("all", found) == ["3.10", "3.12", "3.13"]
    assert versions.choose_pythons("other,3.12", found) == ["3.13", "3.12"]
    assert capsys.readouterr().out == ""
    assert versions.choose_pythons("other", {"3.12": "/python"}) == ["3.12"]
    assert "no other Python than 3.12" in capsys.readouterr().out
    oldest, *others = versions.choose_torches("oldest,2.13.0,newest")
    assert (oldest, others) == ("torch==2.11.*", ["torch==2.13.0", "torch"])
    assert versions.choose_torches("all")[-1] == "torch==2.15.*"


def test_all_combinations_are_run_and_shown_and_then_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "find_pythons", lambda: {"3.10": "/a", "3.13": "/b"})
    folders = []

    def run(python: str, torch: str, tests: list[str], *_: object) -> Row:
        folder = _[-1]
        assert isinstance(folder, pathlib.Path) and folder.parent.is_dir()
        folders.append(folder)
        assert tests == list(versions.QUICK)
        return Row(python, torch, {"passed": 5, "failed": int(torch == "torch")}, 7.0)

    monkeypatch.setattr(versions, "run_combination", run)
    assert versions.main(["--torch", "oldest"]) == 0
    assert versions.main(["--torch", "oldest,newest"]) == 1
    assert len(folders) == 6 and not any(folder.parent.exists() for folder in folders)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-6] == "| Python | torch         | passed | failed | skipped | seconds |  |"
    assert shown[-1] == "| /b     | torch         | 5      | 1      | 0       | 7       |  |"
    assert versions.main(["--python", "3.10", "--torch", "2.14,2.15"]) == 0
    assert len(folders) == 7
    assert "there is no torch==2.15.* for Python 3.10" in capsys.readouterr().out
    assert versions.main(["--python", "3.11"]) == 2
    assert "no Python 3.11 here; there is: 3.10, 3.13" in capsys.readouterr().out
