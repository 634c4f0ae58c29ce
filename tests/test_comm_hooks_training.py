"""Training with communication hooks by name and with users' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from dataparallel import DistributedDataParallel
from dataparallel.comm_hooks import allreduce_hook
from tests.cluster import Cluster
from tests.comm_hook_cases import SMALL, keep_group, net, power_sgd, train


def by_name(rank: int, world_size: int, hook: Any, replicas: int) -> list[Tensor]:
    keep_group()
    model: Any = TorchsDDP(net(), bucket_cap_mb=SMALL) if replicas == 0 else None
    if model is None:
        model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
        model.register_comm_hook(None, hook)
    elif hook is not None:
        model._register_builtin_comm_hook(BuiltinCommHookType.__members__[hook])
    return train(model, rank, step_here=True)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks(cluster: Cluster, name: str) -> None:
    theirs = cluster.run(by_name, 2, name, 0)
    for hook in (name.lower(), BuiltinCommHookType.__members__[name]):
        ours = cluster.run(by_name, 2, hook, 1)
        for rank in range(2):
            torch.testing.assert_close(ours[rank], theirs[rank], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_bf16(cluster: Cluster, replicas: int) -> None:
    """Torch's wrapper asks for CUDA."""
    ours = cluster.run(by_name, 2, "bf16_compress", replicas)
    expected = cluster.run(by_name, 2, None, 0)
    for rank in range(2):
        torch.testing.assert_close(ours[rank], expected[rank], rtol=3e-2, atol=3e-2)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)


def exact_power_sgd(rank: int, world_size: int, replicas: int) -> list[Tensor]:
    """Of full rank, PowerSGD is a mean; there are several buckets."""
    keep_group()
    state = power_sgd(
        matrix_approximation_rank=64, min_compression_rate=0.01, use_error_feedback=False
    )
    model = DistributedDataParallel(net(), ["cpu"] * replicas, bucket_cap_mb=SMALL)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    results = train(model, rank, step_here=True)
    assert len(state.p_memory_dict) == 3
    model.close()
    return results


@pytest.mark.parametrize("replicas", [1, 2])
def test_power_sgd_with_several_buckets(cluster: Cluster, replicas: int) -> None:
    ours = cluster.run(exact_power_sgd, 2, replicas)
    expected = cluster.run(by_name, 2, None, 0)
    for rank in range(2):
        torch.testing.assert_close(ours[rank], expected[rank], rtol=1e-3, atol=1e-4)


def what_hooks_see(rank: int, world_size: int, replicas: int) -> list[tuple[Any, ...]]:
    """Per call: the bucket's facts, its gradients, and whether its parameters are the originals."""
    keep_group()
    module = net()
    named = {name: parameter for name, parameter in module.named_parameters()}
    seen: list[tuple[Any, ...]] = []

    def hook(state: object, bucket: Any) -> Future[Tensor]:
        original = [named[name] for name in bucket.names()]
        same = all(a is b for a, b in zip(bucket.parameters(), original, strict=True))
        gradients = [gradient.clone() for gradient in bucket.gradients()]
        seen.append((bucket.index(), bucket.is_last(), bucket.names(), same, gradients))
        everybody: Any = None
        return allreduce_hook(everybody, bucket)

    model = DistributedDataParallel(module, ["cpu"] * replicas, bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    train(model, rank, 2, step_here=True)
    model.close()
    return seen


def test_a_hook_gets_the_sum_of_the_replicas(cluster: Cluster) -> None:
    one = cluster.run(what_hooks_see, 2, 1)
    for replicas in (2, 3):
        for seen, expected in zip(cluster.run(what_hooks_see, 2, replicas), one, strict=True):
            assert [call[:4] for call in seen] == [call[:4] for call in expected]
            for call, other in zip(seen, expected, strict=True):
                torch.testing.assert_close(call[4], other[4], rtol=1e-5, atol=1e-6)
    assert not torch.equal(one[0][0][4][0], one[1][0][4][0]), "the ranks have different batches"
    begins = [number for number, call in enumerate(one[0]) if call[0] == 0]
    assert len(begins) == 2
    for round_ in (one[0][: begins[1]], one[0][begins[1] :]):
        count = len(round_)
        assert count > 2
        assert [call[0] for call in round_] == list(range(count))
        assert [call[1] for call in round_] == [False] * (count - 1) + [True]
        names = [name for call in round_ for name in call[2]]
        assert sorted(names) == sorted(name for name, _ in net().named_parameters())
        assert all(call[3] for call in round_)


def registers(rank: int, world_size: int, options: dict[str, Any], hooks: list[Any]) -> None:
    model = DistributedDataParallel(net(), ["cpu"], **options)
    for hook in hooks:
        model.register_comm_hook(None, hook)


@pytest.mark.parametrize(
    ("options", "hooks", "kind", "message"),
    [
        ({}, ["noop", "noop"], RuntimeError, "can only be called once"),
        ({"deterministic": True}, ["noop"], ValueError, "deterministic=True .*; use one of them"),
        ({}, ["none"], ValueError, "there is no communication hook 'none'; pass a function"),
        ({}, [7], TypeError, "no communication hook 7; pass a function"),
    ],
)
def test_hooks_that_are_refused(
    cluster: Cluster,
    options: dict[str, Any],
    hooks: list[Any],
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        cluster.run(registers, 2, options, hooks)


def test_a_hook_without_processes() -> None:
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"no process group; call torch\.distributed\.init"):
        model.register_comm_hook(None, "allreduce")
    model.close()
