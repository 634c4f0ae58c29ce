"""Hooks for buffers: before or after a forward, as under torch's wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import dataparallel as dp
from dataparallel.comm.failures import CollectiveTimeout
from tests.cluster import Cluster
from tests.ddp_buffer_cases import Shift, State, assert_equal, batch, make_net, wrap


def _mean(state: Any, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        if buffer.dtype == torch.float32:
            assert state == "state", name
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())


def _mean_unseen(state: Any, buffers: dict[str, Tensor]) -> None:
    """For torch's wrapper, with which backward refuses changed buffers up to torch 2.11."""
    _mean(state, {name: buffer.data for name, buffer in buffers.items()})


def _mean_later(state: Any, buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
    size = dist.get_world_size()
    # Not those of batch norm, which backward may be using meanwhile.
    chosen = [buffers["torch_float32"], buffers["turned"]]
    works: list[Any] = [dist.all_reduce(buffer, async_op=True) for buffer in chosen]
    return [
        work.get_future().then(lambda done, b=buffer: b.div_(size))
        for work, buffer in zip(works, chosen, strict=True)
    ]


def _hooked(
    rank: int, world_size: int, replicas: int, hook: Callable[..., Any], location: Location
) -> list[State]:
    net = make_net(0)
    # Other values in each process, after what is sent at first.
    model = wrap(net, replicas)
    net.turned.add_(rank)
    model._register_buffer_comm_hook("state", hook, location)
    states = []
    for step in range(4):
        output = model(batch(step, rank))
        if hook is not _mean_later:
            # In torch nobody has waited yet.
            states.append({name: b.clone() for name, b in model.module.named_buffers()})
        output.sum().backward()
        states.append({name: b.clone() for name, b in model.module.named_buffers()})
    return states


@pytest.mark.parametrize(
    "hook, location",
    [
        (_mean, Location.PRE_FORWARD),
        (_mean, Location.POST_FORWARD),
        (_mean_later, Location.POST_FORWARD),
    ],
)
def test_hooks_do_what_they_do_in_torch(
    cluster: Cluster, hook: Callable[..., Any], location: Location
) -> None:
    ours = cluster.run(_hooked, 2, 1, hook, location)
    if hook is _mean and location == Location.POST_FORWARD:
        hook = _mean_unseen
    theirs = cluster.run(_hooked, 2, 0, hook, location)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, exactly=False)


def _sees(rank: int, world_size: int, devices: Sequence[str]) -> list[list[float]]:
    model = dp.DistributedDataParallel(Shift(float(rank)).to(devices[0]), devices)

    def set_to_step(state: Any, buffers: dict[str, Tensor]) -> None:
        buffers["shift"].fill_(next(state))

    model._register_buffer_comm_hook(iter((3.0, 4.0, 5.0)), set_to_step, Location.PRE_FORWARD)
    return [model(torch.zeros(2, 1, device=devices[0])).flatten().tolist() for _ in range(3)]


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["virtual:0", "virtual:1"]], ids=str)
def test_all_replicas_see_what_a_hook_has_done(cluster: Cluster, devices: list[str]) -> None:
    for outputs in cluster.run(_sees, 1, devices, virtual=devices[0] != "cpu"):
        assert outputs == [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0]]


def _never_done(rank: int, world_size: int) -> str:
    model = wrap(make_net(0), 1, timeout=0.5)
    forever: torch.futures.Future[Any] = torch.futures.Future()
    model._register_buffer_comm_hook(None, lambda state, buffers: forever)
    with pytest.raises(CollectiveTimeout, match="a future of the hook for buffers") as caught:
        model(batch(0, rank))
    return str(caught.value)


def test_a_future_that_nobody_completes(cluster: Cluster) -> None:
    assert all(cluster.run(_never_done, 2))


def test_what_cannot_be_a_hook() -> None:
    model = dp.DistributedDataParallel(Shift(0.0), ["cpu", "cpu"])
    with pytest.raises(TypeError, match=r"called as hook\(state, buffers\), but got 3"):
        model._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]


def test_a_replaced_parameter_is_noticed_before_buffers_are_brought_together() -> None:
    model: Any = dp.DistributedDataParallel(nn.BatchNorm1d(3), ["cpu", "cpu"])
    seen: list[Any] = []
    hook = model._register_buffer_comm_hook
    hook(None, lambda state, buffers: seen.append(model.reducer), Location.PRE_FORWARD)
    model(torch.randn(4, 3)).sum().backward()
    model.module.weight = nn.Parameter(torch.ones(3))
    model(torch.randn(4, 3)).sum().backward()
    assert model.module.weight.grad is not None
    assert len(seen) == 2 and seen[0] is not seen[1] and seen[1] is model.reducer
