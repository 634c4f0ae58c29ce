"""The example with a parameter worker, as a user starts it, for a short while."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys
import types
from typing import Any

import pytest

_SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "parameter_server.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options], capture_output=True, text=True, timeout=240)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the script defines, to be run in this process."""
    monkeypatch.syspath_prepend(str(pathlib.Path(_SCRIPT).parent))
    names: dict[str, Any] = runpy.run_path(_SCRIPT)["main"].__globals__
    return names


def test_help_names_the_options_and_ends_with_examples(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [_SCRIPT, "--help"])
    with pytest.raises(SystemExit) as ended:
        script["main"]()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--steps", "--replicas", "--batch-size", "--lr", "--table-lr", "--seed"):
        assert option in shown
    assert "examples:\n  torchrun --nproc-per-node 3 examples/parameter_server.py" in shown


def test_one_process_is_told_what_to_do() -> None:
    finished = run(_SCRIPT)
    assert finished.returncode == 2
    assert "torchrun --nproc-per-node 3 examples/parameter_server.py" in finished.stdout


def test_trainers_and_the_table_learn_together() -> None:
    options = ("--steps", "60", "--batch-size", "128", "--replicas", "2", "--min-accuracy", "0.2")
    finished = run(*_TORCHRUN, "3", _SCRIPT, *options)
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", finished.stdout)]
    # One trainer speaks for both.
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert "Warning" not in finished.stderr


@pytest.mark.parametrize(("accuracy", "status"), [(0.2, 1), (0.3, 0)])
def test_too_low_an_accuracy_is_a_failure(
    script: dict[str, Any], accuracy: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training itself is above."""

    def nothing(*_: object) -> None:
        """In place of what needs the other processes."""

    shown: list[str] = []
    script |= {
        "join_processes": lambda: (0, 2),
        "start_worker": nothing,
        "train": lambda *_: accuracy,
        "torch_rpc": types.SimpleNamespace(shutdown=nothing),
        "dist": types.SimpleNamespace(destroy_process_group=nothing, new_group=nothing),
        "console": types.SimpleNamespace(print=shown.append),
    }
    monkeypatch.setattr(sys, "argv", [_SCRIPT, "--min-accuracy", "0.25"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert script["main"]() == status
    assert ["the accuracy is below 25.00%" in text for text in shown] == [True] * status
