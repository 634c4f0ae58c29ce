"""Tables that say which block works on which part of which tensor, and how long they live."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dataparallel.kernels import tables
from dataparallel.kernels.tables import chunk_table

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


def test_a_table_is_made_once_whatever_the_default_device() -> None:
    with torch.device("meta"):
        table = chunk_table((5, 0, 9), 4, CPU)
    assert table.pairs.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    assert (table.blocks, table.sizes.tolist()) == (5, [5, 0, 9])
    assert (table.pairs.dtype, table.sizes.dtype) == (torch.int32, torch.int64)
    assert chunk_table((5, 0, 9), 4, CPU) is table
    # More elements than int32 counts.
    assert chunk_table((2**40 + 1,), 2**32, CPU).blocks == 257


class Table:
    """A table that notes which streams use it."""

    def __init__(self) -> None:
        self.streams: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


def test_tables_live_as_long_as_a_kernel_or_a_graph_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(captured=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    module = SimpleNamespace(current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(tables, "_captured", [])
    first, second = Table(), Table()
    tables.hold(CUDA, first, second)  # type: ignore[arg-type]
    assert first.streams == second.streams == ["stream of cuda:0"]
    assert tables._captured == []
    state.captured = True
    tables.hold(CUDA, second)  # type: ignore[arg-type]
    assert tables._captured == [second]
    with pytest.raises(RuntimeError, match=r"captured on cuda:0, and .* once .* same BucketLayout"):
        tables.upload(torch.zeros(2), CUDA)
    table = torch.zeros(2)
    tables.hold(CPU, tables.upload(table, CPU))
    assert tables.upload(table, CPU) is table
