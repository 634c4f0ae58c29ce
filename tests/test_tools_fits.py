"""`dataparallel doctor --fits`: which mode of training has room for a module."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.memory import peaks_of
from dataparallel import virtual
from dataparallel.reducer import round as round_
from dataparallel.tools import cli
from dataparallel.tools.doctor import fits
from tests.cluster import Cluster
from tests.free_threading import LATER

MODULES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(64))

def huge():
    return nn.Sequential(*[nn.Linear(2**16, 2**16, bias=False) for _ in range(64)])

def frozen():
    return nn.Linear(4, 4).requires_grad_(False)

def sized(width):
    return nn.Linear(width, width)

def moved():
    return nn.Linear(4, 4).to("cpu")

number = 3
no_module = lambda: 3
lazy = lambda: nn.LazyLinear(4)
"""
#: The 64 layers of Net, each of 4 MiB.
P = 64 * 2**22


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODULES)
    return str(path)


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Return the exit status and the JSON."""
    capsys.readouterr()
    status = cli.main(["doctor", "--json", "--fits", *words])
    return status, json.loads(capsys.readouterr().out)


def test_needs_of_each_mode(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = found(capsys, f"{file}:Net", "--gpus", "4", "--memory", "24GiB")
    parts = ("parameters", "gradients", "state", "way")
    needs = {
        (each["mode"], each["device"]): [each[part] / P for part in parts] for each in told["needs"]
    }
    near = 1e-4  # the counts of steps
    assert needs["home", "first"] == pytest.approx([1, 1, 2, 0.1], abs=near)
    assert needs["home", "others"] == pytest.approx([1, 1, 0, 0.1], abs=near)
    assert needs["spread", "each"] == pytest.approx([1, 1 / 4, 2 / 4, 1 / 16 + 9 / 64], abs=near)
    assert needs["torch DDP", "each"] == pytest.approx([1, 1, 2, 1 + 2 / 64], abs=near)
    assert needs["FSDP2", "each"] == pytest.approx([1 / 4, 1 / 4, 2 / 4, 2 / 64], abs=near)
    assert told["sizes"]["count"] == P // 4


#: Numbers of layers and devices, as in the guide.
GUIDE = [(64, 2), (64, 4), (64, 8), (192, 4)]


def _peaks(_: int, world_size: int) -> list[int]:
    # However slow one of the threads is.
    round_._PATIENCE = 100.0
    virtual.enable(8)
    return [max(peaks_of(devices, "spread", layers, 4096)) for layers, devices in GUIDE]


def test_spread_originals_need_a_little_less_than_computed() -> None:
    """The allocator of virtual devices tells."""
    with contextlib.closing(Cluster()) as cluster:
        (peaks,) = cluster.run(_peaks, 1, init_group=False)
    for (layers, devices), peak in zip(GUIDE, peaks, strict=True):
        with torch.device("meta"):
            net = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(layers)])
        needs = fits.needs_of(fits.measure(net, "adamw"), devices)
        (total,) = (need.total for need in needs if need.mode == "spread")
        assert peak <= total * (1 + LATER) and total <= 1.1 * peak, (layers, devices, peak / total)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "state"),
    [("adamw", None, 2), ("adamw:amsgrad=True", None, 3), ("sgd", None, 0),
     ("SGD:momentum=0.9", None, 1), ("adamw", "bfloat16", 1)],
)  # fmt: skip
def test_the_state_is_that_of_the_optimizer(
    file: str, optimizer: str, dtype: str | None, state: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{file}:Net", "--gpus", "2", "--memory", "1GiB", "--optimizer", optimizer]
    _, told = found(capsys, *words, *(["--dtype", dtype] if dtype else []))
    assert told["sizes"]["state"] / P == pytest.approx(state, abs=1e-4)
    assert told["sizes"]["parameters"] == (P // 2 if dtype else P)


@pytest.mark.parametrize(
    ("memory", "status", "verdicts", "advice"),
    [
        ("2GiB", 0, ["fits", "fits", "fits", "fits"], "Choose home: model = dp.Dist"),
        ("1100MiB", 0, ["tight", "fits", "does not fit", "fits"], 'originals="spread")'),
        ("900MiB", 0, ["does not fit", "fits", "does not fit", "fits"], 'originals="spread")'),
        ("550MiB", 0, ["does not fit", "tight", "does not fit", "fits"], "with a small batch"),
        ("400MiB", 1, ["does not fit", "does not fit", "does not fit", "fits"], "Take FSDP2"),
        ("90MB", 1, ["does not fit"] * 4, "Take more devices, or"),
    ],
)
def test_verdict_and_advice(
    file: str,
    memory: str,
    status: int,
    verdicts: list[str],
    advice: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"{file}:Net", "--gpus", "4", "--memory", memory]
    ended, told = found(capsys, *words)
    assert ended == status
    assert list(told["verdicts"].values()) == verdicts
    assert advice in told["advice"]
    assert cli.main(["doctor", "--fits", *words]) == status
    shown = capsys.readouterr().out
    assert told["advice"] in shown and "Activations are not counted" in shown


def test_a_default_that_needs_more_while_it_steps_is_named(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = found(capsys, f"{file}:Net", "--gpus", "1", "--memory", "1100MiB")
    assert "foreach=False for the optimizer, whose default needs 0.25 GiB more" in told["advice"]
    _, told = found(capsys, f"{file}:Net", "--gpus", "4", "--memory", "2GiB")
    assert "foreach" not in told["advice"]


def test_a_module_larger_than_this_machine_needs_no_memory(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, told = found(capsys, f"{file}:huge", "--gpus", "8", "--memory", "80GB")
    assert ended == 1 and told["sizes"]["parameters"] == 2**40


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent", r"has no absent; it has: Net, huge, frozen, sized, moved"),
        ("sized", r"sized\(width\) wants arguments, but should be a function without arguments"),
        ("moved", "cannot build its module on torch's meta device"),
        ("number", "is of type int, but should be a function"),
        ("no_module", "returned int, but should be a function"),
        ("lazy", "has lazy parameters"),
        ("frozen", "no parameter of the module requires grad"),
        ("Net --optimizer adagrads", "torch.optim has no 'adagrads', but: adadelta"),
        ("Net --optimizer sgd:momentum", "write sgd:momentum=0.9"),
        ("Net --optimizer adafactor", "the state of adafactor cannot be counted"),
    ],
)
def test_errors(file: str, name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{file}:{name} --gpus 2 --memory 1GiB".split()
    assert cli.main(["doctor", "--fits", *words]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_errors_of_files(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import no_such_thing_here\n")
    for name, told in (
        ("none.py:make", "there is no file"),
        ("model.py", "write FILE:NAME"),
        ("broken.py:make", "cannot be imported: ModuleNotFoundError"),
    ):
        words = ["--fits", f"{tmp_path}/{name}", "--gpus", "2", "--memory", "1GiB"]
        assert cli.main(["doctor", *words]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--fits", "a.py:make", "--memory", "24X"])
    assert "'24X' is not a size such as 24GiB or 80GB" in capsys.readouterr().err
