"""Copies and pickles of a distributed wrapper: made alone and in any state, they train together."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
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

#: In seconds; what communicates alone waits so long.
_TIMEOUT = 20.0


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def batch(rank: int, step: int = 0, device: str = "cpu") -> Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 3, generator=made).to(device)


def backward(model: Any, rank: int, step: int = 0) -> None:
    device = str(next(model.parameters()).device)
    model(batch(rank, step, device)).square().sum().backward()


def grads(model: Any) -> list[Tensor]:
    return [p.grad.detach().cpu().clone() for p in model.module.parameters()]


def restored(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _local_hook() -> Callable[..., Any]:
    def halves(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().mul_(state["factor"])
        future = dist.all_reduce(buffer, async_op=True).get_future()
        averaged: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
        return averaged

    return halves


def _before(model: Any, rank: int) -> None:
    pass


def _after_a_forward(model: Any, rank: int) -> None:
    model(batch(rank, device=str(next(model.parameters()).device)))


def _after_a_step(model: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def _accumulated(model: Any, rank: int) -> None:
    backward(model, rank)
    with model.no_sync():
        backward(model, rank, 1)


def _with_builtin_hook(model: Any, rank: int) -> None:
    model.register_comm_hook(None, "bf16_compress")
    _after_a_step(model, rank)


def _with_power_sgd(model: Any, rank: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1, 2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _after_a_step(model, rank)


def _with_local_hook(model: Any, rank: int) -> None:
    model.register_comm_hook({"factor": 0.25}, _local_hook())
    _after_a_step(model, rank)


#: What is done before the wrapper is copied, and its options.
STATES: dict[str, tuple[Callable[[Any, int], None], dict[str, Any]]] = {
    "before the first forward": (_before, {}),
    "after a forward": (_after_a_forward, {}),
    "after a step": (_after_a_step, {}),
    "accumulated": (_accumulated, {}),
    "accumulated sums": (_accumulated, {"average": "none"}),
    "accumulated views": (_accumulated, {"gradient_as_bucket_view": True}),
    "static graph": (_after_a_step, {"static_graph": True}),
    "mixed precision": (
        _after_a_step,
        {"mixed_precision": dp.MixedPrecision(*[torch.bfloat16] * 3)},
    ),
    "samples": (_after_a_step, {"average": "samples", "nonfinite": "skip"}),
    "a hook by name": (_with_builtin_hook, {}),
    "a hook with a state": (_with_power_sgd, {}),
    "a local hook": (_with_local_hook, {}),
}


def _copies_in(
    rank: int, world_size: int, name: str, devices: Sequence[str]
) -> dict[str, list[Tensor]]:
    """Gradients of one more backward of a wrapper, and of copies that rank 0 makes alone."""
    do, options = STATES[name]
    model: Any = dp.DistributedDataParallel(
        make_net().to(devices[0]), devices, timeout=_TIMEOUT, **options
    )
    do(model, rank)
    copies: dict[str, Any] = {}

    def make() -> None:
        copies["deepcopy"] = copy.deepcopy(model)
        copies["average"] = AveragedModel(model).module
        with model.no_sync():
            copies["deepcopy in no_sync"] = copy.deepcopy(model)
        copies["pickle"] = pickle.loads(pickle.dumps(model))
        copies["torch.save"] = restored(model)
        copies["deepcopy of a copy"] = copy.deepcopy(copies["deepcopy"])
        copies["pickle of a copy"] = restored(copies["deepcopy"])

    if rank == 0:
        threads = threading.active_count()
        make()
        assert threading.active_count() <= threads
    dist.barrier()
    if rank == 1:
        make()
    anew = dp.DistributedDataParallel(copy.deepcopy(model.module), devices, **options)
    found = {"itself": model, "wrapped anew": anew, **copies}
    for each in found.values():
        backward(each, rank, 5)
    return {how: grads(each) for how, each in found.items()}


@pytest.mark.parametrize("name", STATES)
def test_copies_are_made_alone_and_train_together(cluster: Cluster, name: str) -> None:
    for found in cluster.run(_copies_in, 2, name, ["cpu", "cpu"], timeout=60):
        _check_copies(name, found)


def _check_copies(name: str, found: dict[str, list[Tensor]]) -> None:
    itself, anew = found.pop("itself"), found.pop("wrapped anew")
    for how, theirs in found.items():
        # Torch copies parameters without gradients, and no copy has a hook.
        wanted = anew if "accumulated" in name or "hook" in name else itself
        torch.testing.assert_close(theirs, wanted, msg=f"{how} differs")


def test_copies_on_devices_of_their_own(cluster: Cluster) -> None:
    devices = ["virtual:0", "virtual:1"]
    for name in ("after a step", "accumulated"):
        for found in cluster.run(_copies_in, 2, name, devices, timeout=60, virtual=True):
            _check_copies(name, found)


def _alone(rank: int, world_size: int) -> dict[str, Any]:
    """What a process does with copies while the others wait for it, and what it does not."""
    model: Any = dp.DistributedDataParallel(make_net(), ["cpu"], timeout=1.0)
    _after_a_step(model, rank)
    net = nn.Sequential(nn.Linear(3, 2))
    plain: Any = dp.DistributedDataParallel(net, ["cpu", "cpu"], timeout=1.0)
    found: dict[str, Any] = {}
    if rank == 0:
        frozen = copy.deepcopy(plain).requires_grad_(False)
        with torch.no_grad():
            for each in (copy.deepcopy(plain), restored(plain), AveragedModel(plain), frozen):
                torch.testing.assert_close(each(batch(0)), net(batch(0)))
        moved = copy.deepcopy(plain)
        moved.module.to(torch.float64)
        assert restored(moved).state_dict()["0.weight"].dtype == torch.float64
        again = copy.deepcopy(model)
        with pytest.raises(CollectiveTimeout) as caught:
            backward(again, rank)
        found["alone"] = str(caught.value)
    dist.barrier()
    if rank == 1:
        again = copy.deepcopy(model)
    backward(again, rank, 7)
    backward(model, rank, 7)
    model.close()
    found["itself"] = grads(model)
    found["again"] = grads(again)
    loaded = restored(model)
    backward(loaded, rank, 7)
    found["loaded"] = grads(loaded)
    buffer = io.BytesIO()
    torch.save(loaded, buffer)
    found["saved"] = buffer.getvalue()
    return found


def test_copies_in_one_process_alone(cluster: Cluster) -> None:
    """It evaluates, moves and saves them; a step alone fails and says who is missing."""
    both = cluster.run(_alone, 2, timeout=60)
    assert "rank 1" in both[0].pop("alone")
    for found in both:
        torch.testing.assert_close(found["again"], found["itself"])
        torch.testing.assert_close(found["loaded"], found["itself"])
    # Where there is no process group, what was saved trains by itself.
    model = torch.load(io.BytesIO(both[0]["saved"]), weights_only=False)
    assert model.process_group is None
    net = copy.deepcopy(model.module)
    torch.testing.assert_close(model(batch(0)), net(batch(0)))
    backward(model, 0, 1)
    net(batch(0, 1)).square().sum().backward()
    torch.testing.assert_close(grads(model), grads(torch.nn.DataParallel(net)), atol=1e-4, rtol=0)


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    """What is written into the log meanwhile, in a process of the cluster."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dataparallel").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("dataparallel").removeHandler(handler)


def _in_groups(rank: int, world_size: int) -> dict[str, Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[rank // 2]
    model: Any = dp.DistributedDataParallel(make_net(), ["cpu"], process_group=mine)
    with _log() as messages:
        copied = copy.deepcopy(model)
        assert copied.process_group is mine and not messages
        loaded = restored(copy.copy(model))
    assert loaded.process_group is dist.group.WORLD
    (message,) = messages
    assert "does not hold its process group" in message and "update_process_group" in message
    loaded.update_process_group(mine)
    found = {"itself": model, "deepcopy": copied, "pickle": loaded}
    # It has the processes of the default group.
    whole = dp.DistributedDataParallel(make_net(), process_group=dist.new_group([0, 1, 2]))
    found["pickle of all"] = restored(whole)
    for each in found.values():
        backward(each, rank)
    return {how: grads(each) for how, each in found.items()}


def test_copies_of_a_wrapper_over_a_part_of_the_processes(cluster: Cluster) -> None:
    """A copy has the same group. A pickle cannot hold it, and is given it anew."""
    for found in cluster.run(_in_groups, 3, timeout=60):
        torch.testing.assert_close(found["deepcopy"], found["itself"])
        torch.testing.assert_close(found["pickle"], found["itself"])
        assert not torch.allclose(found["pickle of all"][0], found["itself"][0])


def _stepped(rank: int, world_size: int) -> list[list[Tensor]]:
    model: Any = dp.DistributedDataParallel(make_net(), ["cpu", "cpu"])
    model.step_in_backward(torch.optim.SGD, lr=0.1, momentum=0.9)
    backward(model, rank)
    copies = [model, copy.deepcopy(model), restored(model)]
    for each in copies:
        backward(each, rank, 1)
    return [[p.detach() for p in each.parameters()] for each in copies]


def test_copies_step_their_own_parameters_in_backward(cluster: Cluster) -> None:
    both = cluster.run(_stepped, 2, timeout=60)
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
    for copied in both[0][1:]:
        torch.testing.assert_close(copied, both[0][0])


def _within_join(rank: int, world_size: int) -> list[list[Tensor]]:
    model: Any = dp.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2)), ["cpu"])
    with model.join():
        backward(model, rank)
        copies = [copy.deepcopy(model), restored(model)]
    for each in (model, *copies):
        each.zero_grad()
        backward(each, rank, 1)
    return [grads(each) for each in (model, *copies)]


def test_a_copy_made_within_join_is_not_within_it(cluster: Cluster) -> None:
    for itself, copied, loaded in cluster.run(_within_join, 2, timeout=60):
        torch.testing.assert_close(copied, itself)
        torch.testing.assert_close(loaded, itself)


def _hooked(rank: int, world_size: int) -> None:
    model: Any = dp.DistributedDataParallel(make_net(), ["cpu"])
    model.register_comm_hook({"factor": 1.0, "lock": threading.Lock()}, _local_hook())
    for make in (copy.deepcopy, restored):
        made = make(model)
        made.register_comm_hook(None, "allreduce")
        backward(made, rank)


def test_a_copy_takes_another_hook(cluster: Cluster) -> None:
    cluster.run(_hooked, 1, timeout=60)


@pytest.mark.parametrize("wrap", [dp.DataParallel, dp.DistributedDataParallel])
def test_a_shallow_copy_shares_the_module(wrap: Callable[..., Any]) -> None:
    model = wrap(make_net().eval(), ["cpu", "cpu"])
    backward(model, 0)
    wanted = grads(model)
    shallow = copy.copy(model)
    assert shallow.module is model.module
    for each in (shallow, model, shallow):
        each.zero_grad()
        backward(each, 0)
        torch.testing.assert_close(grads(model), wanted)


def _destroyed(rank: int, world_size: int) -> list[Tensor]:
    group = dist.new_group([0, 1])
    models = [
        dp.DistributedDataParallel(make_net(), ["cpu"], process_group=g) for g in (None, group)
    ]
    dist.destroy_process_group()
    loaded = [restored(model) for model in models]
    for each in loaded:
        backward(each, rank)
    torch.testing.assert_close(grads(loaded[0]), grads(loaded[1]))
    return grads(loaded[0])


def test_wrappers_are_saved_when_the_processes_have_parted(cluster: Cluster) -> None:
    """Without a process group each trains by itself."""
    first, second = cluster.run(_destroyed, 2)
    assert not torch.allclose(first[0], second[0])
