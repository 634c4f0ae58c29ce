"""The script that runs the tests on other versions, and what is said to be supported."""

from __future__ import annotations

import hashlib
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

import dataparallel
from dataparallel.tools.doctor import basics
from tests import build_python, versions

ROOT = pathlib.Path(__file__).parents[1]


def test_one_version_is_told_everywhere() -> None:
    places = {
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## \[(\d.*)\]",
    }
    for name, pattern in places.items():
        told = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert told[0] == dataparallel.__version__


def test_the_same_versions_are_supported_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert (*pythons, f"{pythons[-1]}t") == versions.PYTHONS
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


def test_this_python_is_found_and_commands_that_fail_are_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.10"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    this = ".".join(map(str, sys.version_info[:2]))
    this += "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert versions.find_pythons() == {this: sys.executable}
    given = tmp_path / "mine"
    given.write_text("#!/bin/sh\necho 3.14t\n")
    given.chmod(0o755)
    found = versions.find_pythons([str(given)])
    assert found == {this: sys.executable, "3.14t": str(given)}
    assert versions.choose_pythons(f"{given},{this}", found) == ["3.14t", this]


def test_names_for_several_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    found = dict.fromkeys(("3.10", "3.12", "3.13"), "/python")
    assert versions.choose_pythons("all", found) == ["3.10", "3.12", "3.13"]
    assert versions.choose_pythons("other,3.12", found) == ["3.13", "3.12"]
    assert versions.choose_pythons("other", {"3.12": "/python"}) == ["3.12"]
    chosen = versions.choose_torches("oldest,2.13.0,newest")
    assert chosen == ["torch==2.11.*", "torch==2.13.0", "torch"]
    assert versions.choose_torches("all")[-1] == "torch==2.15.*"


def test_all_combinations_are_run_and_shown_and_then_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "find_pythons", lambda paths=(): {"3.10": "/a", "3.13": "/b"})
    folders = []

    def run(
        version: str, python: str, torch: str, tests: list[str], folder: pathlib.Path
    ) -> tuple[bool, str]:
        assert versions.find_pythons()[version] == python
        assert folder.parent.is_dir() and tests == list(versions.QUICK)
        folders.append(folder)
        return torch != "torch", "| 2.0 | 5 passed |"

    monkeypatch.setattr(versions, "run_combination", run)
    assert versions.main(["--torch", "oldest"]) == 0
    assert versions.main(["--torch", "oldest,newest"]) == 1
    assert len(folders) == 6 and not any(folder.parent.exists() for folder in folders)
    assert capsys.readouterr().out.endswith("\n| 3.13 | 2.0 | 5 passed |\n")
    assert versions.main(["--python", "3.10", "--torch", "2.14,2.15"]) == 0
    assert len(folders) == 7
    assert "there is no torch==2.15.* for Python 3.10" in capsys.readouterr().out
    assert versions.main(["--python", "3.11"]) == 2
    assert "no Python 3.11 here; there is: 3.10, 3.13" in capsys.readouterr().out


def test_a_python_is_built_of_sources_that_are_as_they_were(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = tmp_path / "Python-3.14.4"
    sources.mkdir()
    configure = sources / "configure"
    configure.write_text(
        "#!/bin/sh\necho configured with $@\nprefix=${1#--prefix=}\n"
        f"printf 'all:\\ninstall:\\n\\tmkdir -p %s/bin; "
        f"ln -s {sys.executable} %s/bin/python3\\n' $prefix $prefix > Makefile\n"
    )
    configure.chmod(0o755)
    archive = tmp_path / "sources.tar"
    subprocess.run(["tar", "cf", archive, "-C", tmp_path, sources.name], check=True)
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    target, given = tmp_path / "new", ["--source", archive.as_uri()]
    assert build_python.main([str(target), *given, "0" * 64]) == 1
    assert f"has the checksum {checksum}, not 0000" in capsys.readouterr().out
    assert not target.exists()
    ordinary = not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert build_python.main([str(target), *given, checksum]) == ordinary
    (target / "bin" / "python3").unlink()
    assert build_python.main([str(target), *given, checksum, "--with-lock"]) == (not ordinary)
    assert f"configured with --prefix={target}\n" in target.with_suffix(".log").read_text()
