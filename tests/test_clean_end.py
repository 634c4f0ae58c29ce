"""An object gives back what it holds: on close, when it is collected, and cycle after cycle."""

from __future__ import annotations

import functools
import gc
import re
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import runs
from tests.cluster import Cluster
from tests.faults.leaks import nothing_left
from tests.monitor.cases import run_folder as run_folder


def step(model: nn.Module) -> None:
    model(torch.ones(4, 4)).sum().backward()


def wrapped(wrapper: Any) -> Any:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = wrapper(net, ["cpu", "cpu"])
    step(model)
    return model


class Together:
    """A model, and what ends before it."""

    def __init__(self, model: nn.Module, end: Callable[[], object]) -> None:
        self._model: Any = model
        self._end = end
        step(model)

    def close(self) -> None:
        self._end()
        self._model.close()


def monitored(**options: Any) -> Any:
    model = wrapped(dp.DataParallel)
    monitor = StepMonitor(model, **options)
    monitor.__enter__()
    return Together(model, functools.partial(monitor.__exit__, None, None, None))


def failed(wrapper: Any) -> Any:
    model = wrapped(wrapper)
    with pytest.raises(RuntimeError, match="in replica 0 on device cpu"):
        model(torch.ones(4, 3))
    step(model)
    return model


def balanced() -> Any:
    model = wrapped(dp.DataParallel)
    return Together(model, dp.balance(model).close)


MAKERS: dict[str, Callable[[], Any]] = {
    "dp": lambda: wrapped(dp.DataParallel),
    "ddp": lambda: wrapped(dp.DistributedDataParallel),
    "dp that failed": lambda: failed(dp.DataParallel),
    "ddp that failed": lambda: failed(dp.DistributedDataParallel),
    "monitored": monitored,
    "telling": lambda: monitored(on_step=[].append),
    "balanced": balanced,
}


@functools.cache
def warm() -> None:
    """Start the parts of the whole process before anything is counted."""
    for make in MAKERS.values():
        make().close()
    # To look through the objects that other tests have left takes a second at every collection.
    gc.collect()
    gc.freeze()


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, run_folder: Path) -> Callable[[], Any]:
    """Makes an object that has done a step."""
    warm()
    return MAKERS[request.param]


def test_nothing_is_left_after_close(make: Callable[[], Any], repeats: Callable[..., int]) -> None:
    most, before = 0, threading.active_count()
    with nothing_left():
        for _ in range(repeats(quick=4, long=50)):
            made = make()
            made.close()
            # A second time, too.
            made.close()
            most = max(most, threading.active_count())
    # Nor do threads pile up until garbage is collected.
    assert most <= before + 4


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_nothing_is_left_when_it_is_collected(make: Callable[[], Any], in_a_cycle: bool) -> None:
    with nothing_left():
        made = make()
        made.itself = [made] if in_a_cycle else None
        seen = weakref.ref(made)
        del made
        gc.collect()
        assert seen() is None


def test_a_monitor_that_is_forgotten_can_be_watched_no_more(run_folder: Path) -> None:
    with nothing_left():
        both = monitored()
        assert len(runs()) == 1 and len(list(run_folder.iterdir())) == 1
        del both
        # A thread that has just answered may hold it for a moment longer.
        for _ in range(100):
            gc.collect()
            if not list(run_folder.iterdir()):
                break
            time.sleep(0.05)
        assert not list(run_folder.iterdir())


# --- processes -------------------------------------------------------------------------------


def cycle(how: str) -> None:
    model: Any = wrapped(dp.DistributedDataParallel)
    if how == "close":
        model.close()
        return
    model.itself = [model] if how == "cycle" else None
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def in_processes(rank: int, world_size: int, cycles: int, how: str) -> None:
    for _ in range(2):
        cycle(how)
    with nothing_left():
        for _ in range(cycles):
            cycle(how)


@pytest.mark.parametrize("how", ["close", "drop", "cycle"])
def test_processes_hold_no_more_after_many_cycles(
    cluster: Cluster, how: str, repeats: Callable[..., int]
) -> None:
    cluster.run(in_processes, 2, repeats(quick=2, long=50), how)


def test_what_is_left_is_found(tmp_path: Path) -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="forgotten")
    with pytest.raises(AssertionError) as caught, nothing_left(0.1):
        thread.start()
        process = subprocess.Popen(["sleep", "100"])
        file = open(tmp_path / "open", "w")  # noqa: SIM115
    go_on.set()
    thread.join()
    process.kill()
    process.wait()
    file.close()
    for found in ("thread 'forgotten'", r"child process \d+ sleep 100", "1 x .*/open"):
        assert re.search(found, str(caught.value))
