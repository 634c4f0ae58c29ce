"""DistributedDataParallel over processes and replicas against torch's wrapper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, two_layers, wrap
from tests.models import assert_all_close


def _trained(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[Tensor]:
    net = Net("cpu", two_layers)
    # Torch's wrapper wants every parameter to be used.
    net.layers[2].requires_grad_(False)
    model = wrap(net, replicas, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        model(batch(seed=100 * step + rank)).pow(2).mean().backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("world_size", "replicas", "view"),
    [(2, 1, True), (2, 3, False), (3, 1, False), (3, 2, True)],
)
def test_training_is_that_of_torch(
    cluster: Cluster, world_size: int, replicas: int, view: bool
) -> None:
    options = {"gradient_as_bucket_view": view}
    ours = cluster.run(_trained, world_size, replicas, {**options, "bucket_cap_mb": 0.0001})
    theirs = cluster.run(_trained, world_size, 0, options)
    for mine, other in zip(ours, theirs, strict=True):
        assert_all_close(mine, other)
        assert all(map(torch.equal, mine, ours[0]))


@pytest.mark.parametrize("replicas", [1, 2])
def test_deterministic_sums_have_the_same_bits_for_any_bucket_size(
    cluster: Cluster, replicas: int
) -> None:
    sizes: list[Any] = [0.0001, [0.0003, 25], 25]
    options = [{"deterministic": True, "bucket_cap_mb": size} for size in sizes]
    first, *others = [cluster.run(_trained, 3, replicas, each) for each in options]
    for found in [*first, *(rank for ranks in others for rank in ranks)]:
        assert all(map(torch.equal, found, first[0]))


def _sparse(rank: int, world_size: int, replicas: int) -> None:
    """All look up the first table, rank 0 the second one, nobody the third."""
    net = Net("cpu", lambda net, x, count: sum(table(x) for table in net.layers[:count]))
    net.layers = nn.ModuleList(
        nn.Embedding(5, 3, sparse=True, dtype=torch.float64) for _ in range(3)
    )
    bare, x = copy.deepcopy(net), torch.randint(5, (world_size, 4, 2))
    model = wrap(net, replicas)
    for _ in range(3):
        model(x[rank], 1 if rank else 2).sum().backward()
        for k in range(world_size):
            (bare(x[k], 1 if k else 2).sum() / world_size).backward()
        for p, q in zip(net.parameters(), bare.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                assert p.grad.is_sparse
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())
            p.grad = q.grad = None


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_gradients(cluster: Cluster, replicas: int) -> None:
    cluster.run(_sparse, 2, replicas)
