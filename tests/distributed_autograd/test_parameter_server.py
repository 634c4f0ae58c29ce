"""The example with a parameter worker."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

from tests.launched import launched

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "parameter_server.py"


def test_one_process_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 3 examples/parameter_server"):
        runpy.run_path(str(_SCRIPT), run_name="__main__")


def test_trainers_and_the_table_learn_together(tmp_path: pathlib.Path) -> None:
    printed = launched(_SCRIPT, 3, tmp_path, virtual=False)
    # One trainer speaks for both.
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 6
    # About 0.3; 0.68 where the table learns nothing.
    assert losses[-1] < 0.5 * losses[0]
