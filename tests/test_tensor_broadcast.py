"""Tensors that travel together: messages of a size, and tensors of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.comm.link import ProcessLink
from dataparallel.parallel import buffers
from tests.cluster import Cluster


def _broadcast(rank: int, world_size: int, message_bytes: int) -> tuple[int, list[Any]]:
    buffers.MESSAGE_BYTES = message_bytes
    values = torch.arange(12.0) + 100 * rank
    pair = TwoTensor(values[:3].clone(), values[3:5].clone().double().float()[[0, 1, 1]])
    tensors: dict[str, Any] = {
        "bytes": (values[:5] % 7).to(torch.uint8),
        "whole": values.clone().view(3, 4).t(),
        "double": values[:2].double(),
        "pair": pair,
        "scalar": values[7].clone(),
    }
    link = ProcessLink(purpose="test")
    buffers.broadcast(tensors, 1, link, what="tensors")
    count = link.launched["broadcast"]
    link.close()
    pair = tensors.pop("pair")
    parts = [tensor.tolist() for tensor in (*tensors.values(), pair.a, pair.b)]
    return count, parts


@pytest.mark.parametrize("message_bytes, count", [(2**20, 1), (40, 3), (1, 6)])
def test_messages_of_a_size(cluster: Cluster, message_bytes: int, count: int) -> None:
    try:
        (number, first), (_, second) = cluster.run(_broadcast, 2, message_bytes)
    finally:
        cluster.run(_broadcast, 2, 250 * 2**20)
    assert number == count
    assert first == second
    assert first[2] == [100.0, 101.0] and first[4:] == [
        [100.0, 101.0, 102.0],
        [103.0, 104.0, 104.0],
    ]


def _other_sizes(rank: int, world_size: int) -> list[list[float]]:
    link = ProcessLink(purpose="test")
    found = []
    for size in (2, 2, 3):
        tensor = torch.full((size,), float(rank + size))
        buffers.broadcast({"tensor": tensor}, 0, link, what="a tensor")
        found.append(tensor.tolist())
    link.close()
    return found


def test_tensors_of_other_sizes_than_last_time(cluster: Cluster) -> None:
    assert cluster.run(_other_sizes, 2) == [[[2.0] * 2, [2.0] * 2, [3.0] * 3]] * 2
