"""`dataparallel bench host`: a small run of the real thing, whose counts are exact."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from dataparallel.tools import cli
from dataparallel.tools.bench.host_counts import count_operators

SMALL = ["bench", "host", "--steps", "1", "--rounds", "1", "--replicas", "2,1"]

CLOCKS = ("wall", "processor")
#: The bare module with ten layers: operators in all, and results with memory of their own.
BARE = {"operators": 141, "copied_bytes": 0, "allocations": 42, "host_waits": 0}


def measured(words: str, target: pathlib.Path) -> dict[int, Any]:
    """By number of parameters, the lines by contestant."""
    assert cli.main([*SMALL, *words.split(), "--json", str(target)]) == 0
    return {
        case["parameters"]: {row["contestant"]: row for row in case["rows"]}
        for case in json.loads(target.read_text())["cases"]
    }


@pytest.mark.usefixtures("forked_workers")
def test_a_small_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = measured("--parameters 24,20", tmp_path / "host.json")
    assert list(models) == [20, 24]
    text = capsys.readouterr().out
    assert " ✗" not in text.split("medians of")[0] and "20 parameters on cpu" in text
    assert max(map(len, text.splitlines())) <= 100
    for rows in models.values():
        assert list(rows) == ["bare", "halves", "ddp", "dp1", "dp2", "ddp1", "ddp2"]
        assert all(row["agrees"] for row in rows.values())
        for row in rows.values():
            phases = {f"{p} {c}" for p in ("forward", "backward", "step") for c in CLOCKS}
            assert row["seconds"].keys() == {*phases, "finished"}
            assert row["seconds"]["step wall"]["median"] > row["seconds"]["forward wall"]["median"]
    few, more = ({name: row["counts"] for name, row in rows.items()} for rows in models.values())
    assert few["bare"].items() >= BARE.items()
    assert all(counts["host_waits"] == 0 for counts in few.values())
    assert few["ddp"]["allocations"] == few["bare"]["allocations"]
    # Twice the forward and the backward, but one step of the optimizer; each loss is divided.
    assert few["halves"]["operators"] == 2 * BARE["operators"] - 20 + 4
    assert [few[name]["copied_bytes"] for name in ("halves", "ddp", "dp1", "ddp1")] == [0] * 4
    # Scattered inputs and gathered outputs: 16 samples of four numbers of four bytes, each.
    assert [few[name]["copied_bytes"] for name in ("dp2", "ddp2")] == [512, 512]
    for name in ("dp", "ddp"):
        assert (
            few[f"{name}1"]["operators"] < few["halves"]["operators"] < few[f"{name}2"]["operators"]
        )
        assert 0 < few[f"{name}1"]["package_calls"] < few[f"{name}2"]["package_calls"]
    for name, counts in few.items():
        assert counts["package_calls"] < counts["python_calls"], name
        assert counts["operators"] < more[name]["operators"], name
        assert counts["allocations"] < more[name]["allocations"], name
    calls = {n: more[n]["python_calls"] - few[n]["python_calls"] for n in few}
    # Those of the modules, which run in the threads of replicas.
    assert min(calls["dp2"], calls["ddp2"]) >= calls["halves"] == 2 * calls["bare"]
    assert few["bare"]["package_calls"] == few["ddp"]["package_calls"] == 0
    # DistributedDataParallel times its first ten iterations; that is no steady step.
    assert few["ddp1"]["package_calls"] < 1.5 * few["dp1"]["package_calls"]


@pytest.mark.usefixtures("forked_workers")
def test_nobody_waits_for_virtual_devices(tmp_path: pathlib.Path) -> None:
    rows = measured("--parameters 20 --devices virtual", tmp_path / "host.json")[20]
    counts = {name: row["counts"] for name, row in rows.items()}
    assert list(counts) == ["bare", "halves", "dp1", "dp2", "ddp1", "ddp2"]
    # The optimizer adds all parameters with one operator.
    assert counts["bare"].items() >= {**BARE, "operators": BARE["operators"] - 19}.items()
    assert [each["host_waits"] for each in counts.values()] == [0] * 6


def test_operators_are_told_apart() -> None:
    x = torch.ones(4, 4)

    def step() -> None:
        y = x.clone()
        y[0].copy_(x[1])
        torch.cat([x, y])
        torch._foreach_copy_([x, y], [y, x])
        torch.add(x, 1.0, out=y)
        (x + 1.0).sum().item()

    found = count_operators(step, x.device)
    assert found == {"operators": 10, "copied_bytes": 336, "allocations": 4, "host_waits": 1}
