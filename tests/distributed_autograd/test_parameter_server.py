"""The example with a parameter worker, as a user starts it, for a short while."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

_SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "parameter_server.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options], capture_output=True, text=True, timeout=240)


def test_help_names_the_options_and_ends_with_examples() -> None:
    finished = run(_SCRIPT, "--help")
    assert finished.returncode == 0
    for option in ("--steps", "--replicas", "--batch-size", "--lr", "--table-lr", "--seed"):
        assert option in finished.stdout
    assert (
        "examples:\n  torchrun --nproc-per-node 3 examples/parameter_server.py" in finished.stdout
    )


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


def test_too_low_an_accuracy_is_a_failure() -> None:
    options = ("--steps", "2", "--batch-size", "8", "--min-accuracy", "1")
    finished = run(*_TORCHRUN, "2", _SCRIPT, *options)
    assert finished.returncode == 1
    assert "the accuracy is below 100.00%" in finished.stdout
