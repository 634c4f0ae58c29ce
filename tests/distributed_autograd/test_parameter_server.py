"""The example with a parameter worker, as a user starts it."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys

import pytest

_SCRIPT = str(pathlib.Path(__file__).parents[2] / "examples" / "parameter_server.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")


def test_one_process_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 3 examples/parameter_server"):
        runpy.run_path(_SCRIPT, run_name="__main__")


def test_trainers_and_the_table_learn_together() -> None:
    finished = subprocess.run(
        [sys.executable, *_TORCHRUN, _SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    # One trainer speaks for both.
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", finished.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    assert "Warning" not in finished.stderr
