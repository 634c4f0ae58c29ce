"""Saving while the training goes on, failures of it, and what it holds and gives back."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import checkpoint


class Gate:
    """Holds writers up until it is opened: each file is synchronized with the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        fsync = os.fsync

        def held(fd: int) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", held)


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def ended(saving: checkpoint.Saving) -> None:
    """Wait for the end of a save without being told how it went."""
    deadline = time.monotonic() + 30
    while not saving.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert saving.done()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


# --- while the training goes on ------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "virtual:1"])
def test_what_changes_later_is_not_saved(device: str, gate: Gate, tmp_path: pathlib.Path) -> None:
    net = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    expected = net.weight.detach().clone()
    data = {"history": [1, 2]}
    saving = checkpoint.save(tmp_path, net, optimizer, step=1, user=data, asynchronous=True)
    assert gate.reached.wait(30) and not saving.done()
    for _ in range(3):
        net(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
    data["history"].append(3)
    with pytest.raises(TimeoutError, match=r"goes on after 0\.01 s"):
        saving.wait(0.01)
    gate.opened.set()
    assert saving.wait(30) == 0 and saving.done()
    loaded = checkpoint.load(tmp_path, net, optimizer)
    assert torch.equal(net.weight, expected) and not optimizer.state_dict()["state"]
    assert loaded.user == {"history": [1, 2]}


def test_memory_is_used_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, made = nn.Linear(64, 64), []
    empty: Callable[..., Any] = torch.empty_like

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return empty(*args, **options)

    counts = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", counted)
        for step in range(3):
            made.clear()
            checkpoint.save(tmp_path, net, step=step, asynchronous=True).wait(30)
            counts.append(len(made))
    assert counts[0] > 0 and counts[1:] == [0, 0]


def test_one_generation_at_a_time(gate: Gate, tmp_path: pathlib.Path) -> None:
    first = checkpoint.save(tmp_path, step=1, asynchronous=True)
    assert gate.reached.wait(30)
    threading.Timer(0.1, gate.opened.set).start()
    second = checkpoint.save(tmp_path, step=2, asynchronous=True)
    assert first.done() and (first.wait(), second.wait(30)) == (0, 1)


# --- failures ------------------------------------------------------------------------------------


def test_the_next_save_tells_of_a_failure_in_the_background(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # What somebody has seen is not told again.
    with monkeypatch.context() as patched:
        fill_the_disk(patched)
        saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
        for _ in range(2):
            with pytest.raises(checkpoint.CheckpointError, match="No space left"):
                saving.wait(30)
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "dataparallel"):
        fill_the_disk(patched)
        saving = checkpoint.save(tmp_path, step=1, asynchronous=True)
        ended(saving)
    assert "No space left" in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match=r"an earlier save failed.*No space left"):
        checkpoint.save(tmp_path, step=2, asynchronous=True)
    # The failure is told once.
    checkpoint.save(tmp_path, step=3, asynchronous=True).wait(30)
    assert [info.complete for info in checkpoint.generations(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": [1]}, TypeError, "sampler is a list, which has neither"),
        ({"keep": 0}, ValueError, "keep is at least 1, but got 0"),
        ({"states": {"rng": nn.Linear(1, 1)}}, ValueError, "states has the name 'rng'"),
        ({"model": nn.LazyLinear(2)}, TypeError, "UninitializedParameter that is not dense or has"),
    ],
)
def test_arguments(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(error, match=message):
        checkpoint.save(tmp_path, step=1, **options)
    assert not checkpoint.generations(tmp_path)


# --- the end --------------------------------------------------------------------


def test_closed_means_released(tmp_path: pathlib.Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        checkpoint.save(tmp_path, step=step, asynchronous=True)
        checkpoint.close()
        checkpoint.load(tmp_path)
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files
