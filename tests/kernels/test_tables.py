"""Tables on a device live as long as a kernel, or a CUDA graph, may read them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dataparallel.kernels import tables

CUDA = torch.device("cuda:0")


class Table:
    """A table that notes which streams use it."""

    def __init__(self) -> None:
        self.streams: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.now)
    module = SimpleNamespace(current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(tables, "_captured", [])
    return state


def test_the_stream_of_a_launch_uses_its_tables(capturing: SimpleNamespace) -> None:
    first, second = Table(), Table()
    tables.hold(CUDA, first, second)  # type: ignore[arg-type]
    assert first.streams == second.streams == ["stream of cuda:0"]
    assert tables._captured == []


def test_a_graph_keeps_tables(capturing: SimpleNamespace) -> None:
    capturing.now = True
    table = Table()
    tables.hold(CUDA, table)  # type: ignore[arg-type]
    assert tables._captured == [table]


def test_nothing_is_copied_into_a_graph(capturing: SimpleNamespace) -> None:
    capturing.now = True
    with pytest.raises(
        RuntimeError, match=r"captured on cuda:0, and .* once .* before the capture"
    ):
        tables.upload(torch.zeros(2), CUDA)


def test_on_the_cpu_there_is_nothing_to_say() -> None:
    table = torch.zeros(2)
    assert tables.upload(table, torch.device("cpu")) is table
    tables.hold(torch.device("cpu"), table)
