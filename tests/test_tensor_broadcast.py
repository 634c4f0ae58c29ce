"""Tensors that travel together: messages of a size, and tensors of any kind."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.comm.link import ProcessLink
from dataparallel.parallel import buffers
from tests.cluster import Cluster


def _broadcast(rank: int, world_size: int) -> list[int]:
    """Count the messages for each size of them."""
    counts = []
    for message_bytes in (2**20, 40, 1):
        own, sent = (torch.arange(12.0) + 100 * each for each in (rank, 1))
        tensors: dict[str, Any] = {
            "bytes": (own[:5] % 7).to(torch.uint8),
            "turned": own.clone().view(3, 4).t(),
            "double": own[:2].double(),
            "pair": TwoTensor(own[:3].clone(), own[3:6].clone()),
            "scalar": own[7].clone(),
        }
        link = ProcessLink(purpose="test")
        with mock.patch.object(buffers, "MESSAGE_BYTES", message_bytes):
            buffers.broadcast(tensors, 1, link, what="tensors")
        pair = tensors.pop("pair")
        found = [*tensors.values(), pair.a, pair.b]
        wanted = [(sent[:5] % 7).to(torch.uint8), sent.view(3, 4).t(), sent[:2].double(), sent[7]]
        torch.testing.assert_close(found, [*wanted, sent[:3], sent[3:6]], rtol=0, atol=0)
        counts.append(link.launched["broadcast"])
        link.close()
    return counts


def test_tensors_travel_together(cluster: Cluster) -> None:
    assert cluster.run(_broadcast, 2) == [[1, 3, 6]] * 2
