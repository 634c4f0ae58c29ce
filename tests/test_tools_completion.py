"""`dataparallel completion`: the script really completes in the shell."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from dataparallel.tools import cli

CASES = {
    "dataparallel mon": {"monitor"},
    "dataparallel monitor re": {"record", "report"},
    "dataparallel monitor top --at": {"--attach"},
    "dataparallel bench train --loss ''": {"gathered", "replicas"},
    "dataparallel bench train --json run": {"run.jsonl", "runs"},
    "dataparallel monitor plot run.jsonl pic": {"picture.png"},
    "dataparallel monitor top --source run": {"run.jsonl", "runs"},
    "dataparallel completion z": {"zsh"},
}


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_words_options_values_and_files(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.jsonl", "picture.png"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    # As bash does when somebody presses the tab key: it calls what the script has registered.
    lines = [
        script("bash", capsys),
        "complete -p dataparallel",
        'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_dataparallel; '
        'echo "${COMPREPLY[*]}"; }',
        *(f"try {line}" for line in CASES),
    ]
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    registered, *found = done.stdout.splitlines()
    assert "-F _shtab_dataparallel" in registered
    assert dict(zip(CASES, map(set, map(str.split, found)), strict=True)) == CASES


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_take_the_script(
    shell: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    assert "dataparallel" in text and "attach" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)


def test_without_its_package_it_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    told = capsys.readouterr().err
    assert "'shtab'" in told and 'pip install "dataparallel[tools]"' in told
