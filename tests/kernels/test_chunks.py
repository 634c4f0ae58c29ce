"""Tables that say which block works on which part of which tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.kernels import chunks
from dataparallel.kernels.chunks import ChunkTable, chunk_table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunks, "_tables", {})
    yield


@pytest.mark.parametrize(
    ("sizes", "chunk", "pairs"),
    [
        ([], 4, []),
        ([0], 4, []),
        ([0, 0], 4, []),
        ([1], 4, [[0, 0]]),
        ([4], 4, [[0, 0]]),
        ([5], 4, [[0, 0], [0, 1]]),
        ([3, 0, 9, 8, 0], 4, [[0, 0], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1]]),
        ([2, 2], 1, [[0, 0], [0, 1], [1, 0], [1, 1]]),
    ],
)
def test_the_table(sizes: list[int], chunk: int, pairs: list[list[int]]) -> None:
    table = chunk_table(sizes, chunk, CPU)
    assert table.pairs.tolist() == pairs
    assert table.pairs.shape == (len(pairs), 2)
    assert table.pairs.dtype == torch.int32
    assert table.pairs.is_contiguous()
    assert table.blocks == len(pairs)
    assert table.sizes.tolist() == sizes
    assert table.sizes.dtype == torch.int64


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 17))
def test_every_element_is_in_one_chunk(sizes: list[int], chunk: int) -> None:
    found = [
        (tensor, i)
        for tensor, number in chunk_table(sizes, chunk, CPU).pairs.tolist()
        for i in range(number * chunk, min((number + 1) * chunk, sizes[tensor]))
    ]
    assert found == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size)]


def test_a_tensor_of_more_elements_than_int32_counts() -> None:
    table = chunk_table([2**40 + 1], 2**32, CPU)
    assert table.blocks == 257
    assert table.sizes.tolist() == [2**40 + 1]


def test_the_same_table_for_the_same_arguments() -> None:
    first = chunk_table([3, 5], 4, CPU)
    assert chunk_table((3, 5), 4, CPU) is first
    assert chunk_table(torch.Size([3, 5]), 4, CPU) is first
    others = [chunk_table([5, 3], 4, CPU), chunk_table([3, 5], 3, CPU), chunk_table([3], 4, CPU)]
    assert all(other is not first for other in others)
    assert chunk_table([3, 5], 4, torch.device("meta")).pairs.device.type == "meta"
    assert chunk_table([3, 5], 4, CPU) is first


def test_a_default_device_is_not_where_a_table_is_made() -> None:
    with torch.device("meta"):
        table = chunk_table([3, 5], 4, CPU)
    assert table.pairs.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert table.sizes.tolist() == [3, 5]


def test_a_program_of_many_lists_keeps_some_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_MOST_TABLES", 3)
    first = chunk_table([1], 4, CPU)
    for size in range(2, 20):
        assert chunk_table([size], 4, CPU).sizes.tolist() == [size]
        assert len(chunks._tables) <= 3
    again = chunk_table([1], 4, CPU)
    assert again is not first
    assert again.pairs.tolist() == first.pairs.tolist() == [[0, 0]]


class _FoundByNone(dict[object, ChunkTable]):
    """Tables in which no thread finds one before all threads have looked once."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._all_have_looked = threading.Barrier(threads, timeout=30)
        self._seen = threading.local()

    def get(self, key: object, default: object = None) -> ChunkTable | None:  # type: ignore[override]
        found = super().get(key)
        if not hasattr(self._seen, "once"):
            self._seen.once = True
            self._all_have_looked.wait()
        return found


def test_threads_get_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_tables", _FoundByNone(4))
    found: list[ChunkTable] = []
    threads = [
        threading.Thread(target=lambda: found.append(chunk_table([3, 5], 4, CPU))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert all(table is found[0] for table in found)
