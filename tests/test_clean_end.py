"""What an object holds is given back: on close, when it is collected, and cycle after cycle."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.comm.link import ProcessLink
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import runs
from tests.cluster import Cluster
from tests.faults.leaks import Holdings, nothing_left
from tests.monitor.made_up_runs import run_folder as run_folder


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def step(model: nn.Module, value: float = 1.0) -> None:
    model(torch.full((4, 4), value)).sum().backward()


def data_parallel() -> Any:
    model = dp.DataParallel(network(), ["cpu", "cpu"])
    step(model)
    return model


def distributed() -> Any:
    model = dp.DistributedDataParallel(network(), ["cpu", "cpu"])
    step(model)
    return model


def left_over(before: Holdings) -> str:
    """What is held beyond that when threads have had the time to end."""
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        left = Holdings.now().more_than(before)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


class Together:
    """Several objects that end together, the last one first."""

    def __init__(self, *ends: Callable[[], object]) -> None:
        self._ends = ends

    def close(self) -> None:
        for end in reversed(self._ends):
            end()


def step_monitor(**options: Any) -> Any:
    model = data_parallel()
    monitor = StepMonitor(model, **options)
    monitor.__enter__()
    step(model)
    return Together(model.close, functools.partial(monitor.__exit__, None, None, None))


def telling_monitor() -> Any:
    return step_monitor(on_step=[].append)


def balancer() -> Any:
    model = data_parallel()
    made = dp.balance(model)
    step(model)
    return Together(model.close, made.close)


MAKERS = [data_parallel, distributed, step_monitor, telling_monitor, balancer]
each_kind = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


_warmed: list[bool] = []


@pytest.fixture(autouse=True)
def _warm(run_folder: Path) -> None:
    """What is started once for the whole process is there before anything is counted."""
    for make in MAKERS if not _warmed else []:
        make().close()
    _warmed.append(True)


@each_kind
def test_nothing_is_left_after_close(make: Callable[[], Any]) -> None:
    with nothing_left():
        made = make()
        made.close()
        # A second time, too.
        made.close()


@pytest.fixture(autouse=True)
def _few_objects() -> None:
    """What other tests have left to be looked through takes a second at every collection."""
    gc.collect()
    gc.freeze()


@each_kind
def test_nothing_is_left_when_it_is_collected(make: Callable[[], Any]) -> None:
    with nothing_left():
        made = make()
        seen = weakref.ref(made)
        del made
        gc.collect()
        assert seen() is None


@each_kind
def test_an_object_in_a_cycle_is_collected(make: Callable[[], Any]) -> None:
    with nothing_left():
        made = make()
        made.itself = [made]
        seen = weakref.ref(made)
        del made
        gc.collect()
        assert seen() is None


@each_kind
def test_many_cycles_hold_no_more_than_one(
    make: Callable[[], Any], repeats: Callable[..., int]
) -> None:
    for _ in range(3):
        make().close()
    gc.collect()
    before = Holdings.now()
    most = 0
    for _ in range(repeats(quick=6, long=50)):
        make().close()
        most = max(most, threading.active_count())
    assert left_over(before) == ""
    # Nor do they pile up until garbage is collected.
    assert most <= len(before.threads) + 4


def test_a_second_model_works_beside_the_first_and_after_it() -> None:
    x = torch.arange(8.0).view(4, 2)

    def gradients(model: nn.Module) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = nn.Linear(2, 2)
    state = plain.state_dict()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (first, second):
        module.load_state_dict(state)
    one = dp.DistributedDataParallel(first, ["cpu", "cpu"], average="none")
    other = dp.DataParallel(second, ["cpu", "cpu"])
    expected = gradients(plain)
    for model in (one, other, one, other):
        torch.testing.assert_close(gradients(model), expected)
    one.close()
    torch.testing.assert_close(gradients(other), expected)
    other.close()
    # And closed ones start again.
    torch.testing.assert_close(gradients(other), expected)
    other.close()


def test_a_model_that_failed_leaves_nothing() -> None:
    with nothing_left():
        for make in (data_parallel, distributed):
            model = make()
            with pytest.raises(RuntimeError, match="in replica 0 on device cpu"):
                model(torch.ones(4, 3))
            step(model)
            model.close()
            del model


def test_a_monitor_that_is_forgotten_can_be_watched_no_more(run_folder: Path) -> None:
    with nothing_left():
        both = step_monitor()
        assert len(runs()) == 1 and len(list(run_folder.iterdir())) == 1
        del both
        gc.collect()
        assert not list(run_folder.iterdir())


# --- processes -------------------------------------------------------------------------------


def in_processes(rank: int, world_size: int, cycles: int, how: str) -> str:
    def cycle() -> None:
        model: Any = dp.DistributedDataParallel(network(), ["cpu", "cpu"])
        step(model)
        if how == "close":
            model.close()
        elif how == "cycle":
            model.itself = [model]
            seen = weakref.ref(model)
            del model
            gc.collect()
            assert seen() is None

    for _ in range(2):
        cycle()
    before = Holdings.now()
    for _ in range(cycles):
        cycle()
    return left_over(before)


@pytest.mark.parametrize("how", ["close", "drop", "cycle"])
def test_processes_hold_no_more_after_many_cycles(
    cluster: Cluster, how: str, repeats: Callable[..., int]
) -> None:
    cycles = repeats(quick=2, long=50)
    assert cluster.run(in_processes, 2, cycles, how) == ["", ""]


def links(rank: int, world_size: int, cycles: int) -> str:
    for _ in range(2):
        ProcessLink(purpose="first").close()
    before = Holdings.now()
    for _ in range(cycles):
        link = ProcessLink(purpose="test")
        link.all_reduce(torch.ones(2), what="ones").wait()
        link.close()
    return left_over(before)


def test_links_hold_no_more_after_many_cycles(
    cluster: Cluster, repeats: Callable[..., int]
) -> None:
    assert cluster.run(links, 2, repeats(quick=10, long=50)) == ["", ""]
