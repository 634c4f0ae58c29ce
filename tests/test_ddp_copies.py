"""Copies and pickles of a distributed wrapper: made alone and in any state, they train together."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.optim.swa_utils import AveragedModel

import dataparallel as dp
from dataparallel.comm.failures import CollectiveTimeout
from tests.cluster import Cluster


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: Any, rank: int, step: int = 0) -> None:
    x = batch(rank, step).to(next(model.parameters()).device)
    model(x).square().sum().backward()


def grads(model: Any) -> list[Tensor]:
    return [p.grad.detach().cpu().clone() for p in model.module.parameters()]


def _parameters(model: Any) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def restored(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _trained(model: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def _after_a_forward(model: Any, rank: int) -> None:
    model(batch(rank).to(next(model.parameters()).device))


def _accumulated(model: Any, rank: int) -> None:
    backward(model, rank)
    with model.no_sync():
        backward(model, rank, 1)


def _hooked(model: Any, rank: int) -> None:
    """Its state cannot be copied, and belongs to the buckets of one wrapper."""

    def hook(state: Any, bucket: Any) -> Any:
        future: Any = dist.all_reduce(bucket.buffer().mul_(0.25), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook({"lock": threading.Lock()}, hook)
    _trained(model, rank)


def _with_power_sgd(model: Any, rank: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1, 2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _trained(model, rank)


def _with_steps_in_backward(model: Any, rank: int) -> None:
    model.step_in_backward(torch.optim.SGD, lr=0.1, momentum=0.9)
    backward(model, rank)


_CPU = ["cpu", "cpu"]
_VIRTUAL = ["virtual:0", "virtual:1"]
#: What is done before the wrapper is copied, its devices and its options.
STATES: dict[str, tuple[Callable[[Any, int], None], list[str], dict[str, Any]]] = {
    "before the first forward": (lambda model, rank: None, _CPU, {}),
    "after a forward": (_after_a_forward, _CPU, {}),
    "after a step": (_trained, _VIRTUAL, {}),
    "accumulated": (_accumulated, _VIRTUAL, {}),
    "accumulated sums": (_accumulated, _CPU, {"average": "none"}),
    "accumulated views": (_accumulated, _CPU, {"gradient_as_bucket_view": True}),
    "options": (
        _trained,
        _CPU,
        {
            "mixed_precision": dp.MixedPrecision(*[torch.bfloat16] * 3),
            **{"average": "samples", "nonfinite": "skip", "static_graph": True},
        },
    ),
    "a hook": (_hooked, _CPU, {}),
    "a hook of torch's": (_with_power_sgd, _CPU, {}),
    "steps in backward": (_with_steps_in_backward, _CPU, {}),
}


def _copies(rank: int, world_size: int, name: str) -> None:
    """One more backward of a wrapper, and of copies that rank 0 makes alone."""
    do, devices, options = STATES[name]
    net = make_net().to(devices[0])
    model: Any = dp.DistributedDataParallel(net, devices, timeout=20.0, **options)
    do(model, rank)
    copies: dict[str, Any] = {}

    def make() -> None:
        threads = threading.active_count()
        copies["deepcopy"] = copy.deepcopy(model)
        copies["average"] = AveragedModel(model).module
        with model.no_sync():
            copies["deepcopy in no_sync"] = copy.deepcopy(model)
        copies["pickle"] = pickle.loads(pickle.dumps(model))
        copies["torch.save"] = restored(model)
        copies["deepcopy of a copy"] = copy.deepcopy(copies["deepcopy"])
        copies["pickle of a copy"] = restored(copies["deepcopy"])
        assert threading.active_count() <= threads

    if rank == 0:
        make()
    dist.barrier()
    if rank == 1:
        make()
    anew = dp.DistributedDataParallel(copy.deepcopy(model.module), devices, **options)
    # Torch copies parameters without gradients, and no copy has a hook.
    expected = anew if "accumulated" in name or "hook" in name else model
    values = _parameters if name == "steps in backward" else grads
    backward(expected, rank, 5)
    for how, each in copies.items():
        backward(each, rank, 5)
        torch.testing.assert_close(values(each), values(expected), msg=f"{how} differs")
    if "hook" in name:
        copies["deepcopy"].register_comm_hook(None, "allreduce")


@pytest.mark.parametrize("name", STATES)
def test_copies_are_made_alone_and_train_together(cluster: Cluster, name: str) -> None:
    cluster.run(_copies, 2, name, timeout=60, virtual=STATES[name][1] == _VIRTUAL)


def _alone(rank: int, world_size: int) -> dict[str, Any]:
    """What a process does with copies while the others wait for it, and what it does not."""
    model: Any = dp.DistributedDataParallel(make_net(), ["cpu"], timeout=0.5)
    with model.join():
        backward(model, rank)
        within = copy.deepcopy(model)
    for each in (model, within):
        each.zero_grad()
        backward(each, rank, 1)
    torch.testing.assert_close(grads(within), grads(model))
    net = nn.Sequential(nn.Linear(3, 2))
    plain: Any = dp.DistributedDataParallel(net, ["cpu", "cpu"], timeout=0.5)
    found: dict[str, Any] = {}
    again = copy.deepcopy(model)
    if rank == 0:
        frozen = copy.deepcopy(plain).requires_grad_(False)
        with torch.no_grad():
            for each in (copy.deepcopy(plain), restored(plain), AveragedModel(plain), frozen):
                torch.testing.assert_close(each(batch(0)), net(batch(0)))
        moved = copy.deepcopy(plain)
        moved.module.to(torch.float64)
        assert restored(moved).state_dict()["0.weight"].dtype == torch.float64
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            backward(again, rank)
    dist.barrier()
    model.close()
    loaded = restored(model)
    for each in (again, loaded, model):
        each.zero_grad()
        backward(each, rank, 7)
        found.setdefault("grads", []).append(grads(each))
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    found["saved"] = buffer.getvalue()
    return found


def test_copies_in_one_process_alone(cluster: Cluster) -> None:
    """It evaluates, moves and saves them; a step alone fails and says who is missing."""
    both = cluster.run(_alone, 2, timeout=60)
    for found in both:
        again, loaded, itself = found["grads"]
        torch.testing.assert_close(again, itself)
        torch.testing.assert_close(loaded, itself)
    # Where there is no process group, what was saved trains by itself.
    model = torch.load(io.BytesIO(both[0]["saved"]), weights_only=False)
    assert model.process_group is None
    net = copy.deepcopy(model.module)
    backward(model, 0, 1)
    net(batch(0, 1)).square().sum().backward()
    torch.testing.assert_close(grads(model), grads(torch.nn.DataParallel(net)), atol=1e-4, rtol=0)


def _in_groups(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[rank // 2]
    model: Any = dp.DistributedDataParallel(make_net(), ["cpu"], process_group=mine)
    copied = copy.deepcopy(model)
    assert copied.process_group is mine
    with unittest.TestCase().assertLogs("dataparallel") as log:
        loaded = restored(copy.copy(model))
    (message,) = log.output
    assert "does not hold its process group" in message and "update_process_group" in message
    assert loaded.process_group is dist.group.WORLD
    loaded.update_process_group(mine)
    for each in (model, copied, loaded):
        backward(each, rank)
    torch.testing.assert_close(grads(copied), grads(model))
    torch.testing.assert_close(grads(loaded), grads(model))


def test_copies_of_a_wrapper_over_a_part_of_the_processes(cluster: Cluster) -> None:
    """A copy has the same group. A pickle cannot hold it, and is given it anew."""
    cluster.run(_in_groups, 3)
