"""The common tensors of all processes: parameters and buffers, at first and in each forward."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.comm.errors import CollectiveTimeout
from dataparallel.reducer.parameters import ignored_names
from tests.cluster import Cluster
from tests.ddp_cases import wrap as wrap_module
from tests.models import assert_all_close, norms

State: TypeAlias = dict[str, Tensor]

_DTYPES = (torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float32, torch.uint8)


class Net(nn.Module):
    """Buffers of many kinds, other values in each process; its layers may be on two devices."""

    steps: Tensor
    scale: Tensor
    empty: Tensor

    def __init__(self, rank: int, first: str = "cpu", last: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(7 + rank)
        self.rank = rank
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)
        for dtype in _DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.zeros(3).to(dtype))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.zeros(6))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(4, 3).t())
        for tensor in self.buffers():
            tensor.copy_((torch.rand(tensor.shape) * 5).to(tensor.dtype) + rank)
        self.to(last).first.to(first)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1 + self.rank
            self.scale.mul_(0.5).add_(self.rank)
        hidden = torch.relu(self.first(x.to(self.first.weight.device)))
        # Backward needs the buffer.
        output: Tensor = self.last(hidden.to(self.scale.device) * self.scale)
        return output


def wrap(module: nn.Module, replicas: int, **options: Any) -> Any:
    """Our wrapper; torch's for 0 replicas."""
    if not replicas and "forward_sync_buffers" in options:
        # Newer than the oldest torch, which has one option for the start and for forwards.
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        options = {"broadcast_buffers": options["forward_sync_buffers"]}
    with warnings.catch_warnings():
        # This option is about to go.
        warnings.simplefilter("ignore", FutureWarning)
        return wrap_module(module, replicas, **options)


def state_of(module: nn.Module) -> State:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


# --- against torch's wrapper ---------------------------------------------------------------------

IGNORED = ["last.weight", "scale", "steps"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"broadcast_buffers": False},
    {"forward_sync_buffers": True},
    {"forward_sync_buffers": False},
    {"init_sync": False},
    {"ignored": IGNORED},
    {"copied": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
]
#: Devices of the layers, and of the replicas; a module on several devices is one, and stays there.
PLACES: list[tuple[tuple[str, str], list[str] | None]] = [
    (("cpu", "cpu"), ["cpu"]),
    (("cpu", "cpu"), ["cpu"] * 2),
    (("virtual:0", "virtual:0"), ["virtual:0", "virtual:1"]),
    (("virtual:0", "virtual:1"), None),
    (("cpu", "virtual:1"), None),
]


def _states(rank: int, world_size: int, place: Any, options: dict[str, Any]) -> list[State]:
    """Return the state at first and after each forward, its output, and if buffers go out."""
    devices, slots = place or (("cpu", "cpu"), None)
    net, options = Net(rank, *devices), dict(options)
    ignored, copied = options.pop("ignored", []), options.pop("copied", False)
    ignore = dp.DistributedDataParallel if place else nn.parallel.DistributedDataParallel
    ignore._set_params_and_buffers_to_ignore_for_model(net, ignored)
    if place:
        model: Any = dp.DistributedDataParallel(net, slots, **options)
        model = copy.deepcopy(model) if copied else model
    else:
        model = wrap(net, 0, **options)
    assert [str(p.device) for p in model.parameters()] == [devices[i // 2] for i in range(4)]
    states = [state_of(model.module)]
    for step, kind in enumerate(["train", "train", "alone", "train", "eval", "train", "train"]):
        x = batch(step, rank).to(devices[0])
        if model.will_sync_module_buffers():
            # Through .data, which leaves no trace in the version counter.
            model.module.scale.data.add_(rank + 1)
        if kind == "alone":
            with model.no_sync():
                output = model(x)
                output.sum().backward()
        elif kind == "eval":
            with torch.no_grad():
                output = model(x)
        else:
            output = model(x)
            output.sum().backward()
        states.append(state_of(model.module))
        states[-1]["will"] = torch.tensor(model.will_sync_module_buffers())
        states[-1]["output"] = output.detach().cpu()
    return [*states, {name: p.grad.cpu() for name, p in model.module.named_parameters()}]


@pytest.mark.parametrize(
    ("world_size", "options", "places"),
    [(1, {}, PLACES[3:]), (2, {}, PLACES), (3, {}, PLACES[:2])]
    + [(2, options, PLACES[1:4:2]) for options in OPTIONS[1:]],
    ids=lambda each: f"{len(each)} places" if isinstance(each, list) else str(each),
)
def test_parameters_and_buffers_are_those_of_torch(
    cluster: Cluster, world_size: int, options: dict[str, Any], places: list[Any]
) -> None:
    theirs = cluster.run(_states, world_size, None, options)
    for place in places:
        on_virtual = place[0][1] != "cpu"
        ours = cluster.run(_states, world_size, place, options, virtual=on_virtual)
        for mine, other in zip(ours, theirs, strict=True):
            assert_all_close(mine[0].values(), other[0].values(), rtol=0.0, atol=0.0)
            for state, expected in zip(mine, other, strict=True):
                assert_all_close(state.values(), expected.values(), rtol=1e-5, atol=1e-6)


def test_names_of_what_is_ignored() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert ignored_names(net) == set()
    net[1].weight = net[0].weight
    # With the dot of the recipe in torch's documentation: f"{module_name}.{param_name}".
    net._ddp_params_and_buffers_to_ignore = [".0.bias", "1.weight", "2.running_var"]
    assert ignored_names(net) == {"0.bias", "2.running_var"}
    net._ddp_params_and_buffers_to_ignore.append("0.weight")
    assert ignored_names(net) == {"0.bias", "2.running_var", "0.weight", "1.weight"}


def test_of_two_names_of_one_option_the_newer_counts() -> None:
    model = wrap_module(nn.Linear(2, 2), 1, broadcast_buffers=False, forward_sync_buffers=True)
    assert model.forward_sync_buffers and model.broadcast_buffers
    model.broadcast_buffers = False
    assert not model.forward_sync_buffers


# --- the buffers that arrive ---------------------------------------------------------------------


def _two_forwards(rank: int, world_size: int, replicas: int) -> Any:
    # The processes have the same buffers already. If torch's wrapper sends them, its backward
    # refuses them as changed, up to torch 2.11.
    options: dict[str, Any] = {} if replicas else {"broadcast_buffers": False}
    model = wrap(Net(0).eval(), replicas, **options)
    first, second = model(batch(0, rank)), model(batch(1, rank))
    (first.sum() + second.sum()).backward()
    return model.module.first.weight.grad.clone()


def test_arriving_buffers_are_no_change_for_an_earlier_forward(cluster: Cluster) -> None:
    theirs = cluster.run(_two_forwards, 2, 0)
    for replicas in (1, 2):
        torch.testing.assert_close(cluster.run(_two_forwards, 2, replicas), theirs)


def _kinds(rank: int, world_size: int) -> list[float]:
    """An inference tensor is sent as any other; a sparse one has to be left to each process."""
    net = Net(0).eval()
    with torch.inference_mode():
        net.empty = torch.tensor([1.0 + rank])
    wrap(net, 1)(batch(0, rank)).sum().backward()
    net.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises((RuntimeError, NotImplementedError), match="sparse"):
        wrap(net, 1)
    dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table"])
    wrap(net, 1)
    empty: list[float] = net.empty.tolist()
    return empty


def test_kinds_of_buffers(cluster: Cluster) -> None:
    assert cluster.run(_kinds, 2) == [[1.0]] * 2


def _waits(rank: int, world_size: int) -> tuple[str, list[int]]:
    model = wrap(Net(rank), 2, timeout=2.0)
    link = model._training.processes.buckets
    counts = [link.launched.total()]
    with torch.no_grad():
        model(batch(0, rank))
    counts.append(link.launched.total())
    message = ""
    dist.barrier()
    if rank == 1:
        with pytest.raises(CollectiveTimeout, match="buffers of rank 0") as caught:
            model.require_forward_param_sync = True
            model(batch(0, rank))
        message = str(caught.value)
    dist.barrier()
    return message, counts


def test_one_message_for_all_and_an_end_to_waiting_for_it(cluster: Cluster) -> None:
    (_, counts), (message, others) = cluster.run(_waits, 2)
    assert counts == others == [1, 2]
    assert "rank 1: broadcast of buffers of rank 0" in message
    assert re.search(r"within 2(\.\d+)? s", message)


# --- statistics of the whole batch ---------------------------------------------------------------


def _train(
    rank: int, world_size: int, slots: list[list[str]], sizes: list[int], average: Any, policy: Any
) -> None:
    bare, home = norms(), slots[rank][0]
    module = norms().to(home)
    if policy != "sync":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model = copy.deepcopy(
        dp.DistributedDataParallel(module, slots[rank], buffers=policy, average=average, timeout=30)
    )
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (bare, model)]
    for step in range(3):
        x = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(step)).double()
        losses = torch.stack([part.sin().mean() for part in bare(x).split(sizes)])
        (losses.mean() if average == "processes" else losses.sum()).backward()
        model(x.split(sizes)[rank].to(home)).sin().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.eval()(x.to(home)).cpu(), bare.eval()(x))
    assert_all_close(model.module.cpu().state_dict().values(), bare.state_dict().values())
    model.close()


@pytest.mark.parametrize(
    ("slots", "sizes", "average"),
    [
        ([["cpu"], ["cpu"] * 3], [1, 7], "none"),
        ([["virtual:0", "virtual:1"], ["virtual:0"]], [4, 3], "processes"),
    ],
)
@pytest.mark.parametrize("policy", ["sync", "replica0", "mean"])
def test_synchronized_training_is_that_of_the_bare_module_on_the_whole_batch(
    cluster: Cluster, slots: list[list[str]], sizes: list[int], average: str, policy: str
) -> None:
    """With one option for all layers, or with those of torch.nn.SyncBatchNorm."""
    cluster.run(_train, 2, slots, sizes, average, policy, virtual=slots[0][0] != "cpu")


def _track(rank: int, world_size: int) -> None:
    """Instance norm, in a process of two replicas and one of none or one; first without samples."""
    bare: Any = nn.Sequential(nn.Conv1d(3, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
    bare.double()
    model = dp.DistributedDataParallel(copy.deepcopy(bare), ["cpu"] * (1 + rank), buffers="sync")
    for size in (0, 2, 1):
        x = torch.randn(3 * size + 2, 3, 4, dtype=torch.double)
        mine = x.split([size, 2 * size + 2])[rank]
        torch.testing.assert_close(model(mine), bare(x).split([size, 2 * size + 2])[rank])
        assert_all_close(model.module.buffers(), bare.buffers())
    torch.testing.assert_close(model.eval()(x), bare.eval()(x))
    model.close()


def test_instance_norm_tracks_the_samples_of_all_processes(cluster: Cluster) -> None:
    cluster.run(_track, 2)


def _stay_away(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"do not go together.*average='none'"):
        wrap_module(norms(), 1, buffers="sync", average="samples")
    model = wrap_module(norms(), 1, buffers="sync", timeout=2.0)
    x = torch.ones(2, 2).double()
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1 did not come"):
            model(x)
    dist.barrier()
    # As the error says, both close what is broken, and go on.
    model.close()
    model(x).sum().backward()
    model.close()


def test_a_process_that_stays_away_is_named(cluster: Cluster) -> None:
    cluster.run(_stay_away, 2)
