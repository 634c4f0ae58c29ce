"""What one process of `dataparallel bench train` does: steps, checks, memory."""

from __future__ import annotations

import mmap
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.tools.bench import summary
from dataparallel.tools.bench.memory import MemoryGauge
from dataparallel.tools.bench.trainer import Trainer, TrainTask


@pytest.fixture
def trainer() -> Iterator[Callable[[TrainTask], Trainer]]:
    threads = torch.get_num_threads()
    made: list[Trainer] = []

    def make(task: TrainTask) -> Trainer:
        made.append(Trainer(task))
        return made[-1]

    yield make
    for each in made:
        each.seat.leave(each.model)
    torch.set_num_threads(threads)


def spoil(module: nn.Module, scale: float) -> None:
    """Leave the outputs as they are, and multiply the gradients."""
    module.register_forward_hook(
        lambda module, args, output: scale * output - (scale - 1.0) * output.detach()
    )


def test_virtual_devices_that_the_environment_has_enabled_are_enough(
    trainer: Callable[[TrainTask], Trainer],
) -> None:
    """Here four are enabled; a process cannot change how many."""
    made = trainer(TrainTask("ours", ("virtual:0", "virtual:1"), case="deep", batch=4))
    assert made.inputs.device == torch.device("virtual:0")


BOTH = ("cpu", "cpu")


@pytest.mark.parametrize("wrapper", ["dp", "ddp"])
def test_the_check_agrees_on_batch_norm_and_sees_a_wrong_gradient(
    wrapper: str, trainer: Callable[[TrainTask], Trainer]
) -> None:
    figures = []
    for kind, scale in (("bare", 1.0), ("ours", 1.0), ("ours", 1.01)):
        fields: dict[str, Any] = {"kind": kind, "wrapper": wrapper}
        one = trainer(TrainTask(devices=BOTH, replicas=2, case="conv", batch=4, **fields))
        spoil(one.module, scale)
        figures.append(one.check(2))
    assert summary.agree(figures[1], figures[0])
    assert not summary.agree(figures[2], figures[0])


@pytest.mark.parametrize(("kind", "scale"), [("bare", 1.0), ("ours", 1.0), ("ours", 1.1)])
def test_parameters_are_compared_after_the_measurement(
    kind: str, scale: float, trainer: Callable[[TrainTask], Trainer]
) -> None:
    fields: dict[str, Any] = {"kind": kind, "optimizer": "adamw"}
    one = trainer(TrainTask(devices=BOTH, replicas=2, case="conv", batch=4, **fields))
    spoil(one.module, scale)
    one.run(2)
    finished = one.finish()
    assert finished["host_bytes"] > 0
    agrees = finished["parameter_error"] <= summary.PARAMETER_TOLERANCE
    assert agrees == (scale == 1.0)


@pytest.mark.parametrize("mode", ["step", "forward-backward", "forward", "inference"])
def test_each_mode_does_what_it_says(mode: str, trainer: Callable[[TrainTask], Trainer]) -> None:
    fields: dict[str, Any] = {"kind": "bare", "mode": mode}
    one = trainer(TrainTask(devices=("cpu",), case="deep", batch=2, **fields))
    graphs = []
    one.model.register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    weight = next(one.model.parameters())
    before = weight.detach().clone()
    assert len(one.run(2)["step"]) == 2
    assert graphs == [mode != "inference"] * 2
    assert (weight.grad is not None) == (mode in ("step", "forward-backward"))
    assert torch.equal(weight, before) == (mode != "step")


def test_memory_that_came_and_went_is_in_the_peak() -> None:
    gauge = MemoryGauge([torch.device("cpu")])
    del_me = torch.ones(64 * 2**20 // 4)
    del del_me
    assert 60 * 2**20 < gauge.host_peak() < 100 * 2**20
    assert gauge.device_peak() == 0


_CHECKED = """
import sys
from dataparallel.tools.bench.trainer import Trainer, TrainTask
one = Trainer(TrainTask(devices=("cpu",), replicas=2, case="mlp", batch=2, kind=sys.argv[1]))
one.run(2)
before = one.memory.host_peak()
one.check(3)
print(before, one.memory.host_peak())
"""


@pytest.mark.parametrize("kind", ["bare", "ours"])
def test_the_check_takes_no_memory_that_the_step_does_not(kind: str) -> None:
    # In a process of its own, with an allocator that gives back what is freed: holes that earlier
    # tests left in the heap would decide otherwise.
    finished = subprocess.run(
        [sys.executable, "-c", _CHECKED, kind],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    before, after = map(int, finished.stdout.split())
    # The parameters are 32 MiB.
    assert after < before + 16 * 2**20


def test_libraries_that_other_processes_share_are_no_memory_of_the_model(
    tmp_path: pathlib.Path,
) -> None:
    library = tmp_path / "library"
    library.write_bytes(bytes(64 * 2**20))
    gauge = MemoryGauge([torch.device("cpu")])
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert gauge.host_peak() < 8 * 2**20


def test_memory_on_devices_counts_from_when_the_gauge_was_made() -> None:
    device = torch.device("virtual:0")
    earlier = torch.ones(4 * 2**20, device=device)
    del earlier
    kept = torch.ones(2**20, device=device)
    gauge = MemoryGauge([device, device])
    more = torch.ones(2**20, device=device)
    del more
    assert 4 * 2**20 <= gauge.device_peak() < 5 * 2**20
    assert kept.sum().item() == 2**20
