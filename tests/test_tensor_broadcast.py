"""Tensors that travel together: messages of a size, and tensors of any kind."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.comm.link import ProcessLink
from dataparallel.parallel import buffers
from tests.cluster import Cluster


def _broadcast(rank: int, world_size: int) -> list[Any]:
    """For each size of messages, how many there were, and the tensors of rank 1."""
    found: list[Any] = []
    for message_bytes in (2**20, 40, 1):
        values = torch.arange(12.0) + 100 * rank
        pair = TwoTensor(values[:3].clone(), values[3:5].clone()[[0, 1, 1]])
        tensors: dict[str, Any] = {
            "bytes": (values[:5] % 7).to(torch.uint8),
            "whole": values.clone().view(3, 4).t(),
            "double": values[:2].double(),
            "pair": pair,
            "scalar": values[7].clone(),
        }
        link = ProcessLink(purpose="test")
        with mock.patch.object(buffers, "MESSAGE_BYTES", message_bytes):
            buffers.broadcast(tensors, 1, link, what="tensors")
        pair = tensors.pop("pair")
        found.append([tensor.tolist() for tensor in (*tensors.values(), pair.a, pair.b)])
        found.append(link.launched["broadcast"])
        # Other sizes than last time.
        tensor = torch.full((len(found),), float(rank))
        buffers.broadcast({"tensor": tensor}, 0, link, what="a tensor")
        assert tensor.eq(0).all()
        link.close()
    return found


def test_tensors_travel_together(cluster: Cluster) -> None:
    values = torch.arange(12.0) + 100
    expected = [
        (values[:5] % 7).tolist(),
        values.view(3, 4).t().tolist(),
        [100.0, 101.0],
        107.0,
        [100.0, 101.0, 102.0],
        [103.0, 104.0, 104.0],
    ]
    assert cluster.run(_broadcast, 2) == [[expected, 1, expected, 3, expected, 6]] * 2
