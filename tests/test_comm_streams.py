"""Copies are ordered with the work around them; what NCCL serves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dataparallel import comm, devices, virtual
from tests.comm_cases import (
    queued_work,
    values,
)


def test_a_copy_follows_the_work_before_it_and_precedes_the_work_after_it() -> None:
    with virtual.strict_mode():
        for origin in ("virtual:0", "cpu"):
            source = queued_work(origin)
            source = source.pin_memory() if origin == "cpu" else source
            (copy,) = comm.broadcast(source, ["virtual:1"])
            assert values(copy * 3) == {3}


def test_a_freed_copy_outlives_the_work_that_uses_it() -> None:
    with virtual.strict_mode():
        (copy,) = comm.broadcast(queued_work("virtual:0"), ["virtual:1"])
        tripled = copy * 3
        devices.wait_stream(None, devices.copy_stream(copy.device))
        del copy
        assert values(tripled) == {3}


def test_a_part_on_the_destination_is_computed_before_it_is_gathered() -> None:
    with virtual.strict_mode():
        parts = [queued_work("virtual:1"), queued_work("virtual:2")]
        gathered = comm.gather(parts, destination="virtual:1")
        devices.wait_stream(None, devices.copy_stream(gathered.device))
        assert values(gathered) == {1}


def test_the_host_waits_only_for_memory_that_it_may_change() -> None:
    with virtual.strict_mode():
        comm.broadcast(queued_work("virtual:0"), ["virtual:1"])
        assert virtual.pending("virtual:0") > 0
        comm.gather([queued_work("virtual:0"), queued_work("virtual:1")])
        assert virtual.pending("virtual:0") > 0
        pinned = torch.ones(1000).pin_memory()
        chunks = comm.scatter(pinned, ["virtual:2", "virtual:3"])
        assert virtual.pending("virtual:2") > 0
        assert virtual.pending("virtual:3") > 0
        pageable = torch.ones(1000)
        late = comm.scatter(pageable, ["virtual:2", "virtual:3"])
        pageable.zero_()
        assert [values(chunk) for chunk in (*chunks, *late)] == [{1}] * 4


def test_sources_may_be_freed_at_once() -> None:
    with virtual.strict_mode():
        parts = [queued_work(f"virtual:{i}") for i in (1, 2, 3)]
        gathered = comm.gather(parts, destination="virtual:1")
        total = comm.reduce_add(parts, "virtual:2")
        del parts
        for index in (1, 2, 3):
            torch.empty(1000, device=f"virtual:{index}").fill_(7)
        assert values(gathered) == {1}
        assert values(total) == {3}


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued, in order, where every stream has a name. See Note [Streams of a copy]."""
    log: list[str] = []
    names: dict[int, str] = {}

    def stream(kind: str) -> Any:
        def of(device: torch.device) -> object:
            made = object()
            names[id(made)] = f"{kind} {device}"
            kept.append(made)
            return made

        return of

    kept: list[object] = []

    @contextlib.contextmanager
    def use(made: object) -> Iterator[None]:
        log.append(f"on {names[id(made)]}:")
        yield
        log.append("done")

    for name, replacement in {
        "current_stream": stream("current"),
        "copy_stream": stream("copy"),
        "use_stream": use,
        "wait_stream": lambda w, a: log.append(f"{names[id(w)]} waits for {names[id(a)]}"),
        "record_stream": lambda t, s: log.append(f"{t.device} tensor used on {names[id(s)]}"),
    }.items():
        monkeypatch.setattr(devices, name, replacement)
    return log


def test_order_of_a_copy_between_devices(queued: list[str]) -> None:
    comm.broadcast(torch.ones(2, device="virtual:0"), ["virtual:0", "virtual:1"])
    assert queued == [
        "on copy virtual:1:",
        "done",
        "current virtual:1 waits for copy virtual:1",
        "virtual:1 tensor used on current virtual:1",
    ]


def test_order_of_a_gather_of_several_devices(queued: list[str]) -> None:
    parts = [torch.ones(1, device=f"virtual:{i}") for i in (1, 2, 1)]
    comm.gather(parts, destination="virtual:1")
    assert queued == [
        "copy virtual:1 waits for current virtual:1",
        "on copy virtual:1:",
        "done",
        "current virtual:1 waits for copy virtual:1",
        "virtual:1 tensor used on current virtual:1",
    ]


def test_nothing_waits_on_the_cpu_or_within_a_device(queued: list[str]) -> None:
    tensor = torch.ones(4, device="virtual:0")
    comm.broadcast(tensor, ["cpu", "virtual:0"])
    comm.gather([tensor, torch.ones(1)], destination="cpu")
    comm.gather([tensor, tensor])
    comm.reduce_add([tensor, tensor])
    comm.scatter(tensor, ["cpu", "virtual:0"])
    assert queued == []
