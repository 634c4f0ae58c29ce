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
from torch.optim.swa_utils import AveragedModel

import dataparallel as dp
from dataparallel.comm.errors import CollectiveTimeout
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, grads, two_layers


def make_net() -> Net:
    return Net("cpu", two_layers)


def backward(model: Any, rank: int, step: int = 0) -> None:
    device = str(next(model.parameters()).device)
    model(batch(device, 10 * step + rank)).square().sum().backward()


def _parameters(model: Any) -> list[Tensor | None]:
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


def _with_steps_in_backward(model: Any, rank: int) -> None:
    model.step_in_backward(torch.optim.SGD, lr=0.1, momentum=0.9)
    backward(model, rank)


_CPU = ["cpu", "cpu"]
_VIRTUAL = ["virtual:0", "virtual:1"]
#: The action before the wrapper is copied, its devices and its options.
STATES: dict[str, tuple[Callable[[Any, int], None], list[str], dict[str, Any]]] = {
    "before the first forward": (lambda model, rank: None, _CPU, {}),
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


def _alone(rank: int, world_size: int) -> bytes:
    """Copy a wrapper in one process while the others wait, as far as that is possible."""
    net = make_net()
    model: Any = dp.DistributedDataParallel(net, ["cpu"], timeout=2.0)
    with model.join():
        backward(model, rank)
        within, again = copy.deepcopy(model), copy.deepcopy(model)
    if rank == 0:
        frozen, moved = copy.deepcopy(model).requires_grad_(False), copy.deepcopy(model)
        with torch.no_grad():
            for each in (copy.deepcopy(model), restored(model), AveragedModel(model), frozen):
                torch.testing.assert_close(each(batch()), net(batch()))
        moved.module.to(torch.float32)
        assert restored(moved).state_dict()["scale"].dtype == torch.float32
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            backward(again, rank)
    dist.barrier()
    loaded = restored(model)
    model.close()
    found = []
    for each in (model, within, again, loaded, restored(model)):
        each.zero_grad()
        backward(each, rank, 7)
        found.append(grads(each))
    for each in found:
        torch.testing.assert_close(each, found[0])
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    return buffer.getvalue()


def test_copies_in_one_process_alone(cluster: Cluster) -> None:
    """It evaluates, moves and saves them; a step alone fails and names the missing rank."""
    saved, _ = cluster.run(_alone, 2, timeout=60)
    # Without a process group the restored wrapper trains by itself.
    model = torch.load(io.BytesIO(saved), weights_only=False)
    assert model.process_group is None
    net = copy.deepcopy(model.module)
    for each in (model, net):
        backward(each, 0)
    torch.testing.assert_close(grads(model), grads(net))


# --- the first forward is in inference mode ----------------------------------------------------


def _closed(model: Any) -> Any:
    model.close()
    return model


def _with_another_layer(model: Any) -> Any:
    model.module.layers[1] = nn.Linear(6, 6).to(model.module.layers[1].weight)
    return model


def _with_fewer_replicas(model: Any) -> Any:
    model.drop_replica(1)
    return model


@pytest.mark.parametrize(
    "make",
    [
        copy.deepcopy,
        restored,
        lambda model: pickle.loads(pickle.dumps(model)),
        *(_closed, _with_another_layer, _with_fewer_replicas),
    ],
    ids=["deepcopy", "torch.save", "pickle", "closed", "another layer", "fewer replicas"],
)
@pytest.mark.parametrize("devices", [_CPU, _VIRTUAL])
def test_it_evaluates_in_inference_mode_and_trains_afterwards(
    make: Callable[[Any], Any], devices: list[str]
) -> None:
    model = dp.DistributedDataParallel(make_net().to(devices[0]), devices)
    backward(model, 0)
    x = batch(devices[0], 5)
    made = make(model)
    bare = copy.deepcopy(made.module)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), bare(x))
        # A copy made here can only be evaluated, and only here.
        torch.testing.assert_close(copy.deepcopy(made)(x), bare(x))
    for each in (made, bare):
        each.zero_grad()
        backward(each, 0, 5)
    torch.testing.assert_close(grads(made), grads(bare))


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
