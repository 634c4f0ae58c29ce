"""What processes have in common: parameters and buffers at first, and buffers in each forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location
from torch.testing._internal.two_tensor import TwoTensor

import dataparallel as dp
from dataparallel import tensor_broadcast
from dataparallel.comm.processes import CollectiveTimeout, ProcessLink
from dataparallel.reducer.ignored import ignored_names
from dataparallel.tensor_broadcast import Broadcast
from tests.cluster import Cluster

State: TypeAlias = dict[str, Tensor]

_DTYPES = (torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float32, torch.uint8)


class Net(nn.Module):
    """Batch norm, and buffers of other kinds."""

    steps: Tensor
    turned: Tensor
    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        for dtype in _DTYPES:
            self.register_buffer(str(dtype).replace(".", "_"), torch.zeros(3).to(dtype))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1 + self.rank
        output: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return output


def make_net(rank: int) -> Net:
    """Other values in each process."""
    torch.manual_seed(7 + rank)
    net = Net()
    for tensor in net.buffers():
        tensor.copy_((torch.rand(tensor.shape) * 5).to(tensor.dtype) + rank)
    return net


def wrap(module: nn.Module, replicas: int, **options: Any) -> Any:
    """Our wrapper; torch's for 0 replicas."""
    if replicas:
        return dp.DistributedDataParallel(module, ["cpu"] * replicas, **options)
    with warnings.catch_warnings():
        # An option is about to go there.
        warnings.simplefilter("ignore", FutureWarning)
        return nn.parallel.DistributedDataParallel(module, **options)


def state_of(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_equal(ours: Sequence[State], theirs: Sequence[State], *, exactly: bool = True) -> None:
    rtol, atol = (0.0, 0.0) if exactly else (1e-5, 1e-6)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, tensor in mine.items():
            where = _located(f"{name} of entry {rank}")
            torch.testing.assert_close(tensor, other[name], rtol=rtol, atol=atol, msg=where)


def _located(where: str) -> Callable[[str], str]:
    return lambda message: f"{where}: {message}"


# --- at the beginning ------------------------------------------------------------------------


def _at_first(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> State:
    net = make_net(rank)
    wrap(net, replicas, **options)
    return state_of(net)


OPTIONS = [
    {},
    {"broadcast_buffers": True},
    {"broadcast_buffers": False},
    {"forward_sync_buffers": True},
    {"forward_sync_buffers": False},
    {"init_sync": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_sent_at_first_is_what_torch_sends(
    cluster: Cluster, options: dict[str, Any]
) -> None:
    ours = cluster.run(_at_first, 2, 2, options)
    assert_equal(ours, cluster.run(_at_first, 2, 0, options))


def _collectives_at_first(rank: int, world_size: int) -> tuple[int, int]:
    model = wrap(make_net(rank), 2)
    before = model._reduction.processes.buckets.launched.total()
    model(batch(0, rank))
    return before, model._reduction.processes.buckets.launched.total() - before


def test_everything_travels_in_one_message(cluster: Cluster) -> None:
    assert cluster.run(_collectives_at_first, 2) == [(1, 1)] * 2


def _other_shapes(rank: int, world_size: int) -> str:
    net = make_net(0)
    if rank == 1:
        net.norm.running_mean = torch.zeros(7)
        net.register_buffer("extra", torch.zeros(2))
        net.torch_float32 = net.torch_float32.double()
    with pytest.raises(ValueError, match="are not the same") as caught:
        wrap(net, 1)
    return str(caught.value)


def test_buffers_of_other_shapes_are_named(cluster: Cluster) -> None:
    first, second = cluster.run(_other_shapes, 2)
    assert first == second
    assert (
        "'norm.running_mean': (6,) torch.float32 in rank 0, (7,) torch.float32 in rank 1" in first
    )
    assert "'extra': not there in rank 0, (2,) torch.float32 in rank 1" in first
    assert "'torch_float32': (3,) torch.float32 in rank 0, (3,) torch.float64 in rank 1" in first
    assert "running_var" not in first


def test_two_names_of_one_option_are_not_taken() -> None:
    with pytest.warns(FutureWarning, match="forward_sync_buffers counts, which is True"):
        model = dp.DistributedDataParallel(
            nn.Linear(2, 2), ["cpu"], broadcast_buffers=False, forward_sync_buffers=True
        )
    assert model.forward_sync_buffers and model.broadcast_buffers
    model.broadcast_buffers = False
    assert not model.forward_sync_buffers


# --- in forwards -----------------------------------------------------------------------------


def _forwards(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[State]:
    model = wrap(make_net(0), replicas, **options)
    model.module.rank = rank
    states = []
    for step, kind in enumerate(["train", "train", "alone", "train", "eval", "train", "train"]):
        if kind == "alone":
            with model.no_sync():
                model(batch(step, rank)).sum().backward()
        elif kind == "eval":
            with torch.no_grad():
                model(batch(step, rank))
        else:
            model(batch(step, rank)).sum().backward()
        states.append({name: b.clone() for name, b in model.module.named_buffers()})
        states[-1]["will"] = torch.tensor(model.will_sync_module_buffers())
    return states


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_buffers_after_each_forward_are_those_of_torch(
    cluster: Cluster, world_size: int, options: dict[str, Any]
) -> None:
    ours = cluster.run(_forwards, world_size, 1, options)
    theirs = cluster.run(_forwards, world_size, 0, options)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, exactly=False)


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
    model = wrap(make_net(0).eval(), replicas)
    # Batch norm saves its buffers for backward.
    first, second = model(batch(0, rank)), model(batch(1, rank))
    (first.sum() + second.sum()).backward()
    return model.module.first.weight.grad.clone()


@pytest.mark.parametrize("replicas", [1, 2])
def test_arriving_buffers_are_no_change_for_an_earlier_forward(
    cluster: Cluster, replicas: int
) -> None:
    ours = cluster.run(_two_forwards, 2, replicas)
    theirs = cluster.run(_two_forwards, 2, 0)
    torch.testing.assert_close(ours, theirs)


def _frozen_in_inference_mode(rank: int, world_size: int) -> list[float]:
    net = Shift(0.0)
    with torch.inference_mode():
        net.shift = torch.tensor([1.0 + rank])
    model = wrap(net, 1)
    model(torch.zeros(2, 1)).sum().backward()
    return net.shift.tolist()


def test_a_buffer_that_is_an_inference_tensor(cluster: Cluster) -> None:
    assert cluster.run(_frozen_in_inference_mode, 2) == [[1.0]] * 2


def _waits(rank: int, world_size: int) -> str:
    model = wrap(make_net(0), 1, timeout=0.5)
    message = ""
    if rank == 1:
        with pytest.raises(CollectiveTimeout, match="buffers of rank 0") as caught:
            model(batch(0, rank))
        message = str(caught.value)
    dist.barrier()
    return message


def test_waiting_for_buffers_ends(cluster: Cluster) -> None:
    _, message = cluster.run(_waits, 2)
    assert "rank 1: broadcast of buffers of rank 0" in message and "within 0.5" in message


def test_buffers_without_other_processes() -> None:
    net = make_net(0)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    counts = dict(net.named_buffers())
    before = int(counts["steps"]), int(counts["norm.num_batches_tracked"])
    for _ in range(2):
        model(batch(0, 0)).sum().backward()
    counts = dict(net.named_buffers())
    after = int(counts["steps"]), int(counts["norm.num_batches_tracked"])
    assert after == (before[0] + 2, before[1] + 2)


def _copied(rank: int, world_size: int) -> State:
    model = copy.deepcopy(wrap(make_net(0), 1))
    model.module.rank = rank
    model(batch(0, rank)).sum().backward()
    model(batch(1, rank)).sum().backward()
    return {name: b.clone() for name, b in model.module.named_buffers()}


def test_a_copy_of_the_wrapper_sends_its_own_buffers(cluster: Cluster) -> None:
    ours = cluster.run(_copied, 2)
    theirs = cluster.run(_forwards, 2, 0, {})
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal([mine], [other[1]], exactly=False)


# --- hooks -----------------------------------------------------------------------------------


def _mean(state: Any, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        if buffer.dtype == torch.float32:
            assert state == "state", name
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())


def _mean_later(state: Any, buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
    size = dist.get_world_size()
    # Not those of batch norm, which backward may be using meanwhile.
    chosen = [buffers["torch_float32"], buffers["turned"]]
    works = [dist.all_reduce(buffer, async_op=True) for buffer in chosen]
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
        if hook is _mean:
            states.append({name: b.clone() for name, b in model.module.named_buffers()})
        output.sum().backward()
        states.append({name: b.clone() for name, b in model.module.named_buffers()})
    return states


@pytest.mark.parametrize(
    "hook, location",
    [
        (_mean, Location.PRE_FORWARD),
        (_mean, Location.POST_FORWARD),
        # Before a forward, it would change buffers while that uses them.
        (_mean_later, Location.POST_FORWARD),
    ],
)
def test_hooks_do_what_they_do_in_torch(
    cluster: Cluster, hook: Callable[..., Any], location: Location
) -> None:
    ours = cluster.run(_hooked, 2, 1, hook, location)
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
    loss = model(batch(0, rank)).sum()
    with pytest.raises(CollectiveTimeout, match="a future of the hook for buffers") as caught:
        loss.backward()
    return str(caught.value)


def test_a_future_that_nobody_completes(cluster: Cluster) -> None:
    assert all(cluster.run(_never_done, 2))


def _forwards_alone(rank: int, world_size: int) -> int:
    model = wrap(make_net(0), 1, timeout=0.5)
    forever: torch.futures.Future[Any] = torch.futures.Future()
    calls = []

    def hook(state: Any, buffers: dict[str, Tensor]) -> Any:
        calls.append(len(buffers))
        return forever

    model._register_buffer_comm_hook(None, hook)
    model(batch(0, rank))
    with pytest.raises(CollectiveTimeout, match="a future of the hook for buffers"):
        model(batch(1, rank))
    return len(calls)


def test_a_hook_is_not_called_before_the_last_one_has_ended(cluster: Cluster) -> None:
    assert cluster.run(_forwards_alone, 2) == [1, 1]


def test_what_cannot_be_a_hook() -> None:
    model = dp.DistributedDataParallel(Shift(0.0), ["cpu", "cpu"])
    with pytest.raises(TypeError, match=r"called as hook\(state, buffers\), but got 3"):
        model._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PRE_FORWARD or POST_FORWARD .* but got 'before'"):
        model._register_buffer_comm_hook(None, _mean, "before")  # type: ignore[arg-type]


# --- what is left to each process ------------------------------------------------------------


def _grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def _ignoring(rank: int, world_size: int, replicas: int, names: Sequence[str]) -> list[State]:
    net = make_net(rank)
    ignore = nn.parallel.DistributedDataParallel if not replicas else dp.DistributedDataParallel
    ignore._set_params_and_buffers_to_ignore_for_model(net, names)
    model = wrap(net, replicas)
    states = [state_of(net)]
    for step in range(2):
        model(batch(step, rank)).sum().backward()
        states.append(state_of(net))
    states.append({name: _grad_of(p) for name, p in net.named_parameters()})
    return states


def test_ignored_parameters_and_buffers_are_those_of_torch(cluster: Cluster) -> None:
    names = ["last.weight", "norm.running_mean", "steps"]
    ours = cluster.run(_ignoring, 2, 1, names)
    theirs = cluster.run(_ignoring, 2, 0, names)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, exactly=False)
    assert not torch.equal(ours[0][0]["last.weight"], ours[1][0]["last.weight"])


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


# --- messages --------------------------------------------------------------------------------


def _broadcast(rank: int, world_size: int, message_bytes: int) -> tuple[int, list[Any]]:
    tensor_broadcast._MESSAGE_BYTES = message_bytes
    values = torch.arange(12.0) + 100 * rank
    pair = TwoTensor(values[:3].clone(), values[3:5].clone().double().float()[[0, 1, 1]])
    tensors: dict[str, Any] = {
        "bytes": (values[:5] % 7).to(torch.uint8),
        "whole": values.clone().view(3, 4).t(),
        "double": values[:2].double(),
        "pair": pair,
        "scalar": values[7].clone(),
    }
    link = ProcessLink(purpose="test")
    Broadcast().run(tensors, 1, link, what="tensors")
    count = link.launched["broadcast"]
    link.close()
    pair = tensors.pop("pair")
    parts = [tensor.tolist() for tensor in (*tensors.values(), pair.a, pair.b)]
    return count, parts


@pytest.mark.parametrize("message_bytes, count", [(2**20, 1), (40, 3), (1, 6)])
def test_messages_of_a_size(cluster: Cluster, message_bytes: int, count: int) -> None:
    try:
        (number, first), (_, second) = cluster.run(_broadcast, 2, message_bytes)
    finally:
        cluster.run(_broadcast, 2, 250 * 2**20)
    assert number == count
    assert first == second
    assert first[2] == [100.0, 101.0] and first[4:] == [
        [100.0, 101.0, 102.0],
        [103.0, 104.0, 104.0],
    ]


def _other_sizes(rank: int, world_size: int) -> list[list[float]]:
    link, broadcast = ProcessLink(purpose="test"), Broadcast()
    found = []
    for size in (2, 2, 3):
        tensor = torch.full((size,), float(rank + size))
        broadcast.run({"tensor": tensor}, 0, link, what="a tensor")
        found.append(tensor.tolist())
    link.close()
    return found


def test_tensors_of_other_sizes_than_last_time(cluster: Cluster) -> None:
    assert cluster.run(_other_sizes, 2) == [[[2.0] * 2, [2.0] * 2, [3.0] * 3]] * 2


def _sparse(rank: int, world_size: int) -> str:
    net = Shift(0.0)
    net.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"'table' is torch.sparse_coo") as caught:
        wrap(net, 1)
    dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table"])
    wrap(net, 1)
    return str(caught.value)


def test_sparse_buffers_are_refused_with_the_remedy(cluster: Cluster) -> None:
    assert (
        "_set_params_and_buffers_to_ignore_for_model(module, ['table'])"
        in cluster.run(_sparse, 2)[0]
    )
