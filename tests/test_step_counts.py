"""The part of the package that a steady training step runs: files, functions and calls, counted.

The counts are those of Python 3.11, where each comprehension is a call; from 3.12 on it is none.
They are made in a process of their own, since what other tests import and patch would count, too.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import dataparallel as dp
from tests.cluster import Cluster

PACKAGE = pathlib.Path(dp.__file__).parent
FOLDERS = tuple(f"{folder}/" for folder in (PACKAGE, PACKAGE.parent / "kernels"))

#: The most that a step runs: files, functions, calls for no layers, and calls for each layer. They
#: only fall, but rose three times. The causes were a lock, lists and their notes, results in
#: attributes, buffers that replicas write differently, and all devices' streams in backward. Then
#: came routes, parameters that are still on their way, and those that come from several devices.
MOST = {
    "DataParallel": (22, 170, 254, 2.0),
    "DistributedDataParallel": (27, 204, 369, 0.0),
}

#: Numbers of layers of the two models that are counted.
FEW, MANY = 4, 12


class Counts(NamedTuple):
    """The counts of one step."""

    files: int
    functions: int
    calls: int


class _Profile:
    """Notes calls of functions of the package, in all threads that begin after it is made."""

    def __init__(self) -> None:
        self._notes = False
        self._calls: list[CodeType] = []
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self._notes and event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            self._calls.append(frame.f_code)

    def count(self, step: Callable[[], object]) -> Counts:
        self._calls = []
        self._notes = True
        step()
        self._notes = False
        functions = {(code.co_filename, code.co_firstlineno) for code in self._calls}
        return Counts(len({name for name, _ in functions}), len(functions), len(self._calls))


def count_steps(rank: int, world_size: int) -> dict[str, list[Counts]]:
    """Count a step of each wrapper, with few layers and with many."""
    profile = _Profile()
    return {name: [_count_step(profile, name, number) for number in (FEW, MANY)] for name in MOST}


def _count_step(profile: _Profile, wrapper: str, num_layers: int) -> Counts:
    """Count a forward and backward of a stack of linear layers on two CPU replicas."""
    layers = [nn.Linear(4, 4) for _ in range(num_layers)]
    model: nn.Module = getattr(dp, wrapper)(nn.Sequential(*layers), ["cpu"] * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4)
    found = []
    for _ in range(14):
        optimizer.zero_grad()
        found.append(profile.count(lambda: model(x).sum().backward()))
        optimizer.step()
    # The first steps make replicas, learn an order and are timed, each of the first ten; where
    # threads wait, calls may differ.
    return min(found[11:])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counts are those of Python 3.11")
def test_a_step_runs_no_more_of_the_package_than_before() -> None:
    with contextlib.closing(Cluster()) as cluster:
        (counted,) = cluster.run(count_steps, 1, init_group=False)
    for wrapper, most in MOST.items():
        few, many = counted[wrapper]
        per_layer = (many.calls - few.calls) / (MANY - FEW)
        counts = (few.files, few.functions, round(few.calls - FEW * per_layer), per_layer)
        assert all(now <= then for now, then in zip(counts, most, strict=True)), (
            f"a step of {wrapper} runs {counts} (files, functions, calls, calls per layer), "
            f"but at most {most}"
        )
