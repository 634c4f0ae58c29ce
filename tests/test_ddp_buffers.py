"""What all processes have in common: parameters and buffers, at first and in each forward."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.comm.failures import CollectiveTimeout
from dataparallel.reducer.options import ignored_names
from tests.cluster import Cluster
from tests.ddp_cases import wrap as wrap_module
from tests.models import assert_all_close

State: TypeAlias = dict[str, Tensor]

_DTYPES = (torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float32, torch.uint8)


class Net(nn.Module):
    """Batch norm, and buffers of other kinds; other values in each process."""

    steps: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7 + rank)
        self.rank = rank
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        for dtype in _DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.zeros(3).to(dtype))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(4, 3).t())
        for tensor in self.buffers():
            tensor.copy_((torch.rand(tensor.shape) * 5).to(tensor.dtype) + rank)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1 + self.rank
        output: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return output


def wrap(module: nn.Module, replicas: int, **options: Any) -> Any:
    """Our wrapper; torch's for 0 replicas."""
    torchs: Any = nn.parallel.DistributedDataParallel
    known = inspect.signature(torchs).parameters
    if not replicas and "forward_sync_buffers" in options and "forward_sync_buffers" not in known:
        # Newer than the oldest torch, which has one option for the start and for forwards.
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        options = {"broadcast_buffers": options["forward_sync_buffers"]}
    with warnings.catch_warnings():
        # An option is about to go there.
        warnings.simplefilter("ignore", FutureWarning)
        return wrap_module(module, replicas, **options)


def state_of(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


# --- against torch's wrapper ---------------------------------------------------------------------

IGNORED = ["last.weight", "norm.running_mean", "steps"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"broadcast_buffers": False},
    {"forward_sync_buffers": True},
    {"forward_sync_buffers": False},
    {"init_sync": False},
    {"ignored": IGNORED},
    {"copied": True},
]


def _states(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[State]:
    """The state at first and after each forward, and whether buffers will be sent."""
    net, options = Net(rank), dict(options)
    ignored, copied = options.pop("ignored", []), options.pop("copied", False)
    ignore = dp.DistributedDataParallel if replicas else nn.parallel.DistributedDataParallel
    ignore._set_params_and_buffers_to_ignore_for_model(net, ignored)
    model = wrap(net, replicas, **options)
    if copied and replicas:
        model = copy.deepcopy(model)
    states = [state_of(model.module)]
    for step, kind in enumerate(["train", "train", "alone", "train", "eval", "train", "train"]):
        if kind == "alone":
            with model.no_sync():
                model(batch(step, rank)).sum().backward()
        elif kind == "eval":
            with torch.no_grad():
                model(batch(step, rank))
        else:
            model(batch(step, rank)).sum().backward()
        states.append(state_of(model.module))
        states[-1]["will"] = torch.tensor(model.will_sync_module_buffers())
    grads = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    return [*states, grads]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_and_buffers_are_those_of_torch(
    cluster: Cluster, world_size: int, options: dict[str, Any]
) -> None:
    ours = cluster.run(_states, world_size, 1, options)
    theirs = cluster.run(_states, world_size, 0, options)
    for mine, other in zip(ours, theirs, strict=True):
        assert_all_close(mine[0].values(), other[0].values(), rtol=0.0, atol=0.0)
        for state, expected in zip(mine, other, strict=True):
            assert_all_close(state.values(), expected.values(), rtol=1e-5, atol=1e-6)


def test_names_of_what_is_ignored() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[1].weight = net[0].weight
    net._ddp_params_and_buffers_to_ignore = ["0.bias", "1.weight", "2.running_var"]
    assert ignored_names(net) == {"0.bias", "2.running_var"}
    net._ddp_params_and_buffers_to_ignore.append("0.weight")
    assert ignored_names(net) == {"0.bias", "2.running_var", "0.weight", "1.weight"}
    # As in the recipe in torch's documentation: f"{module_name}.{param_name}".
    linear: Any = nn.Linear(2, 2)
    linear._ddp_params_and_buffers_to_ignore = [".weight"]
    assert ignored_names(linear) == {"weight"}
    assert ignored_names(nn.Linear(2, 2)) == set()


def test_of_two_names_of_one_option_the_newer_counts() -> None:
    model = wrap_module(nn.Linear(2, 2), 1, broadcast_buffers=False, forward_sync_buffers=True)
    assert model.forward_sync_buffers and model.broadcast_buffers
    model.broadcast_buffers = False
    assert not model.forward_sync_buffers


# --- the buffers that arrive ---------------------------------------------------------------------


class Shift(nn.Module):
    """The output tells which buffer each replica has."""

    shift: Tensor

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("shift", torch.tensor([shift]))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x * self.weight + self.shift
        return output


def _shifted(rank: int, world_size: int, devices: Sequence[str]) -> list[list[float]]:
    model = dp.DistributedDataParallel(Shift(rank).to(devices[0]), devices)
    outputs = []
    for step in range(3):
        # Through .data, which leaves no trace in the version counter.
        model.module.shift.data.fill_(10.0 * step + rank)
        output = model(torch.zeros(4, 1, device=devices[0]))
        output.sum().backward()
        outputs.append(output.detach().flatten().tolist())
    return outputs


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["virtual:0", "virtual:1"]], ids=str)
def test_all_replicas_get_the_buffers_that_arrived(cluster: Cluster, devices: list[str]) -> None:
    on_virtual = devices[0] != "cpu"
    for outputs in cluster.run(_shifted, 2, devices, virtual=on_virtual):
        assert outputs == [[10.0 * step] * 4 for step in range(3)]


def _two_forwards(rank: int, world_size: int, replicas: int) -> Any:
    # The processes have the same buffers already. Where torch's wrapper sends them, its backward
    # refuses them as changed, up to torch 2.11.
    options: dict[str, Any] = {} if replicas else {"broadcast_buffers": False}
    model = wrap(Net(0).eval(), replicas, **options)
    # Batch norm saves its buffers for backward.
    first, second = model(batch(0, rank)), model(batch(1, rank))
    (first.sum() + second.sum()).backward()
    return model.module.first.weight.grad.clone()


@pytest.mark.parametrize("replicas", [1, 2])
def test_arriving_buffers_are_no_change_for_an_earlier_forward(
    cluster: Cluster, replicas: int
) -> None:
    ours, theirs = cluster.run(_two_forwards, 2, replicas), cluster.run(_two_forwards, 2, 0)
    torch.testing.assert_close(ours, theirs)


def _kinds(rank: int, world_size: int) -> list[float]:
    """An inference tensor is sent as any other; a sparse one has to be left to each process."""
    net = Shift(0.0)
    with torch.inference_mode():
        net.shift = torch.tensor([1.0 + rank])
    wrap(net, 1)(torch.zeros(2, 1)).sum().backward()
    net.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises((RuntimeError, NotImplementedError), match="sparse"):
        wrap(net, 1)
    dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table"])
    wrap(net, 1)
    return net.shift.tolist()


def test_kinds_of_buffers(cluster: Cluster) -> None:
    assert cluster.run(_kinds, 2) == [[1.0]] * 2


def _waits(rank: int, world_size: int) -> tuple[str, list[int]]:
    model = wrap(Net(rank), 2, timeout=0.5)
    link = model._training.processes.buckets
    counts = [link.launched.total()]
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
    assert re.search(r"within 0\.[5-9]", message)


# --- statistics of the whole batch ---------------------------------------------------------------


def norms() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers).double()


def _train(
    rank: int, world_size: int, slots: list[list[str]], sizes: list[int], average: Any
) -> None:
    bare, module = norms(), norms()
    model = copy.deepcopy(
        dp.DistributedDataParallel(
            module.to(slots[rank][0]), slots[rank], buffers="sync", average=average, timeout=30
        )
    )
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (bare, model)]
    for step in range(3):
        x = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(step)).double()
        expected = bare(x)
        losses = torch.stack([part.sin().mean() for part in expected.split(sizes)])
        (losses.mean() if average == "processes" else losses.sum()).backward()
        output = model(x.split(sizes)[rank].to(slots[rank][0]))
        output.sin().mean().backward()
        torch.testing.assert_close(output.cpu(), expected.split(sizes)[rank])
        for each in optimizers:
            each.step()
            each.zero_grad()
    model.eval()
    bare.eval()
    torch.testing.assert_close(model(x.to(slots[rank][0])).cpu(), bare(x))
    assert_all_close(model.module.cpu().state_dict().values(), bare.state_dict().values())
    model.close()


@pytest.mark.parametrize(
    ("slots", "sizes", "average"),
    [
        ([["cpu"], ["cpu"]], [4, 4], "processes"),
        ([["cpu"], ["cpu"] * 3], [1, 7], "none"),
        ([["virtual:0", "virtual:1"], ["virtual:0"]], [4, 3], "processes"),
    ],
)
def test_synchronized_training_is_that_of_the_bare_module_on_the_whole_batch(
    cluster: Cluster, slots: list[list[str]], sizes: list[int], average: str
) -> None:
    cluster.run(_train, 2, slots, sizes, average, virtual=slots[0][0] != "cpu")


def _stay_away(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"do not go together.*average='none'"):
        wrap_module(norms(), 1, buffers="sync", average="samples")
    model = wrap_module(norms(), 1, buffers="sync", timeout=0.5)
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


# --- one replica on several devices --------------------------------------------------------------


class Spread(nn.Module):
    """Layers on two devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.first, self.last = devices[0], devices[-1]
        torch.manual_seed(0)
        values = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).state_dict()
        with torch.device(self.first):
            layers: list[nn.Module] = [nn.Linear(6, 6)]
        with torch.device(self.last):
            layers += [nn.BatchNorm1d(6), nn.Linear(6, 3)]
        self.layers = nn.Sequential(*layers)
        self.layers.load_state_dict(values)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x.to(self.first)))
        output: Tensor = self.layers[1:](x.to(self.last))
        return output


def _spread(
    rank: int, world_size: int, wrapper: Any, devices: Sequence[str], options: dict[str, Any]
) -> list[Tensor]:
    net = Spread(*devices)
    model = wrapper(net, **options)
    assert {str(p.device) for p in net.parameters()} == set(devices)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    marked = x if wrapper is not dp.DistributedDataParallel else dp.Replicate(x)
    return [model(marked).detach().cpu(), *(value.cpu() for value in net.state_dict().values())]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("devices", [("virtual:0", "virtual:1"), ("cpu", "virtual:1")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_on_several_devices_is_one_replica(
    cluster: Cluster, world_size: int, devices: tuple[str, str], view: bool
) -> None:
    """It stays where it is."""
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.0001}
    ours = dp.DistributedDataParallel
    found = cluster.run(_spread, world_size, ours, devices, options, virtual=True)
    torchs = nn.parallel.DistributedDataParallel
    for mine, other in zip(
        found, cluster.run(_spread, world_size, torchs, ["cpu"], {}), strict=True
    ):
        assert_all_close(mine, other)
