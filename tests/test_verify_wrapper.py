"""``dataparallel.verify``: what differs from the bare module is named, with cause and remedy."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dataparallel as dp
from dataparallel.comm.errors import CollectiveError
from dataparallel.parallel.differences import Verification
from tests.cluster import Cluster
from tests.models import WRAPPERS, Calls

CPU = ["cpu", "cpu"]

Forward = Callable[..., Any]


class Net(Calls):
    """A linear layer and whatever else a forward needs."""

    mean: Tensor
    layer: Any
    other: Any
    extra: Any

    def __init__(self, forward: Forward, **parts: nn.Module) -> None:
        layers = {"layer": nn.Linear(4, 3), "other": nn.Linear(4, 3)}
        super().__init__(forward, **layers, mean=torch.zeros(4), extra=nn.ModuleDict(parts))


def batch(size: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.arange(size) % 3


X, Y = batch()


def kinds(found: Verification) -> set[str]:
    return {one.kind for one in found.differences}


# --- causes --------------------------------------------------------------------------------------


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 3))


def running_mean(net: Net, x: Tensor) -> Any:
    net.mean.lerp_(x.mean(0), 0.1)
    return net.layer(x)


def state(net: Net, x: Tensor) -> Any:
    result = net.layer(x)
    vars(net)["state"] = result.detach()
    return result


def count(net: Net, x: Tensor) -> Any:
    vars(net)["seen"] = getattr(net, "seen", 0) + len(x)
    return net.layer(x)


def loss_of(net: Net, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    logits = net.layer(x)
    return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss_in_an_attribute(net: Net, x: Tensor, how: str = "mean") -> Any:
    vars(net)["l_aux"] = getattr(net.other(x).square(), how)()
    return net.layer(x)


IGNORED = Y.where(torch.arange(len(Y)) > 2, -100)
#: The cause, the remedy, the module, the batch, and options of the wrapper.
CAUSES: list[tuple[str, str, Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = [
    ("batch norm", 'buffers="sync"', lambda: mlp(nn.BatchNorm1d(8)), (X,), {}),
    ("time first", "dim=1", lambda: nn.LSTM(4, 3), (torch.randn(5, 6, 4),), {}),
    ("time first", "dim=1", lambda: nn.GRU(4, 3), (torch.randn(5, 6, 4),), {}),
    (
        "time first",
        "dim=1",
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1),
        (torch.randn(5, 6, 4),),
        {},
    ),
    ("buffer", 'buffers="mean"', lambda: Net(running_mean), (X,), {"buffers": "sync"}),
    (
        "buffer",
        'buffers="mean"',
        lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)),
        (torch.randn(7, 4, 5),),
        {},
    ),
    ("scalar", 'scalars="mean"', lambda: Net(loss_of), ({"x": X, "labels": Y},), {}),
    ("scalar", 'scalars="mean"', lambda: Net(loss_of), (X, Y), {"scalars": "sum"}),
    (
        "scalar",
        "scalars=lambda labels, **_: (labels != -100).sum()",
        lambda: Net(loss_of),
        ({"x": X, "labels": IGNORED},),
        {"scalars": "mean"},
    ),
    (
        "scalar",
        "scalars=lambda *args: (args[1] != -100).sum()",
        lambda: Net(loss_of),
        (X, IGNORED),
        {},
    ),
    (
        "scalar",
        'scalars="sum"',
        lambda: Net(lambda net, x: net.layer(x).sum()),
        (X,),
        {"scalars": "mean"},
    ),
    (
        "scalar",
        'scalars="mean"',
        lambda: Net(lambda net, x: (net.layer(x), net.other.weight.mean().exp())),
        (X,),
        {},
    ),
    (
        "no batch dimension",
        "out_dims=(0, None)",
        lambda: Net(lambda net, x: (net.layer(x), net.other.weight.mean(1))),
        (X,),
        {},
    ),
    (
        "no batch dimension",
        "compute it from the outputs",
        lambda: Net(lambda net, x: net.layer(x).mean(0)),
        (X,),
        {},
    ),
    (
        "number",
        'out_dims={"n": "sum"}',
        lambda: Net(lambda net, x: {"output": net.layer(x), "n": len(x)}),
        (X,),
        {},
    ),
    (
        "object",
        "in a tuple, a dict or a dataclass",
        lambda: Net(lambda net, x: torch.distributions.Categorical(logits=net.layer(x))),
        (X,),
        {},
    ),
    (
        "random",
        "eval()",
        lambda: Net(lambda net, x: net.layer(x) + torch.randn(len(x), 3)),
        (X,),
        {},
    ),
    ("random", "eval()", lambda: Net(lambda net, x: net.layer(F.dropout(x))), (X,), {}),
    (
        "coupled samples",
        "all_gather_tensor",
        lambda: Net(lambda net, x: net.layer(x - x.mean(0))),
        (X,),
        {},
    ),
    ("scalar", 'scalars="mean"', lambda: Net(loss_in_an_attribute), (X,), {}),
    ("scalar", 'scalars="sum"', lambda: Net(loss_in_an_attribute), (X, "sum"), {"scalars": "mean"}),
    ("attribute", "return it", lambda: Net(count), (X,), {}),
    ("attribute", "return it", lambda: Net(state), (X,), {}),
    ("error", "", lambda: Net(lambda net, x, y: net.layer(x)), (X, X[:3]), {}),
]


@WRAPPERS
@pytest.mark.parametrize(("kind", "remedy", "make", "given", "options"), CAUSES)
@pytest.mark.filterwarnings("ignore:.*buffers.*")
def test_the_cause_of_a_difference_and_its_remedy_are_named(
    kind: str,
    remedy: str,
    make: Callable[[], nn.Module],
    given: tuple[Any, ...],
    options: dict[str, Any],
    wrapper: Any,
) -> None:
    found = dp.verify(wrapper(make(), CPU, **options), *given)
    assert not found and kinds(found) == {kind}, found
    assert all(remedy in one.remedy for one in found.differences), found
    if "=" in remedy:
        assert "all is equal" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80 and repr(found) == str(found)


class Broken(dp.DataParallel[Any]):
    """A wrapper with a defect."""

    def parallel_apply(self, *given: Any) -> Any:
        outputs = super().parallel_apply(*given)
        return [outputs[0], *(2 * output for output in outputs[1:])]


def test_a_defect_of_a_wrapper_is_told_as_one() -> None:
    found = dp.verify(Broken(mlp(), CPU), X)
    assert kinds(found) == {"unknown"}
    with pytest.raises(AssertionError, match="it looks like a defect of"):
        found.raise_if_different()


def test_several_causes_are_told_apart() -> None:
    net = Net(
        lambda net, x: (running_mean(net, net.extra["norm"](x)), net.other(x).square().mean()),
        norm=nn.BatchNorm1d(4),
    )
    found = dp.verify(dp.DistributedDataParallel(net, CPU, buffers="replica0"), X)
    assert kinds(found) >= {"scalar", "batch norm"}
    assert 'scalars="mean" and buffers="sync"' in str(found)


# --- equal ---------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    name: str = "digits"
    loss: Tensor | None = None


class TakesDict(nn.Linear):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch["x"])


def frozen() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)  # type: ignore[index]
    return net


def shared(net: Net, x: Tensor) -> Any:
    return net.layer(x) + F.linear(x, net.layer.weight)


WITH_MASK = functools.partial(Net, lambda net, x, mask: net.layer(x) * mask)
RECURRENT = functools.partial(nn.LSTM, 4, 3, 2, batch_first=True, dropout=0.3)
SPARSE = (nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 2))
RETURNS_OUTPUT = functools.partial(
    Net, lambda net, x: Output(net.layer(x), loss=net.layer(x).mean())
)
MASK = torch.ones(3)
#: The module, the batch, options of the wrapper, and of verify.
EQUAL: list[tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    (mlp, (X, Y), {}, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))}),
    (mlp, ((X, Y),), {}, {"loss": F.cross_entropy}),
    (mlp, ([X, Y],), {}, {"loss": F.cross_entropy}),
    (mlp, (X, Y), {}, {"loss": lambda output, y: (output.sin() * y[:, None]).sum()}),
    (mlp, (X,), {}, {"loss": lambda output: output.square().sum()}),
    (lambda: mlp(nn.BatchNorm1d(8)), (X, Y), {"buffers": "sync"}, {"loss": F.cross_entropy}),
    (lambda: mlp(nn.SyncBatchNorm(8)), (X, Y), {}, {"loss": F.cross_entropy}),
    (lambda: mlp(nn.Dropout(0.5)), (X,), {}, {}),
    (lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)).eval(), (X,), {}, {}),
    (RECURRENT, (torch.randn(6, 5, 4),), {"out_dims": (0, 1)}, {}),
    (lambda: nn.LSTM(4, 3), (torch.randn(5, 6, 4),), {"dim": 1}, {}),
    (frozen, (X,), {}, {}),
    (lambda: Net(lambda net, x: net.layer(x)), (X,), {}, {}),
    (lambda: Net(shared), (X.clone().requires_grad_(),), {}, {}),
    (WITH_MASK, (X,), {"in_dims": {"mask": None}}, {"mask": MASK}),
    (WITH_MASK, (X, dp.Replicate(MASK)), {}, {}),
    (lambda: Net(loss_in_an_attribute), (X, Y), {"scalars": "mean"}, {"loss": F.cross_entropy}),
    (RETURNS_OUTPUT, ({"x": X},), {"scalars": "mean"}, {}),
    (lambda: TakesDict(4, 3), ({"x": X},), {}, {}),
    (lambda: Net(lambda net, x: torch.complex(net.layer(x), net.other(x))), (X,), {}, {}),
    (lambda: nn.Sequential(*SPARSE), (Y[:, None],), {}, {}),
    (lambda: nn.utils.weight_norm(nn.Linear(4, 3)), (X,), {}, {}),
    (mlp, (X,), {"output_device": "each"}, {}),
    (mlp, (X[:1],), {}, {}),
    (mlp, (X[:0],), {}, {}),
]


@WRAPPERS
@pytest.mark.parametrize(("make", "given", "options", "told"), EQUAL)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_what_is_equal(
    make: Callable[[], nn.Module],
    given: tuple[Any, ...],
    options: dict[str, Any],
    told: dict[str, Any],
    wrapper: Any,
) -> None:
    net = make()
    found = dp.verify(wrapper(net, CPU, **options), *given, **told)
    assert found and found.ok, found
    trained = [p for p in net.parameters() if p.requires_grad]
    assert found.compared["gradients"] == len(trained)
    found.raise_if_different()


def test_a_module_is_wrapped_on_the_devices_that_are_given() -> None:
    net = mlp(nn.BatchNorm1d(8))
    for found in (
        dp.verify(net, X, device_ids=["cpu", "cpu", "cpu"]),
        dp.verify(net, X, device_ids=["virtual:0", "virtual:1", "virtual:2"]),
    ):
        assert kinds(found) == {"batch norm"} and found.where.startswith("3 replicas")
    assert next(net.parameters()).device.type == "cpu"
    assert dp.verify(nn.ReLU(), X, device_ids=CPU)
    with pytest.raises(ValueError, match=r"its own devices, cpu, cpu, so device_ids=\[0\] has no"):
        dp.verify(dp.DataParallel(net, CPU), X, device_ids=[0])


def test_gradients_are_compared_where_autograd_records() -> None:
    model = dp.DistributedDataParallel(mlp(), CPU)
    with torch.no_grad():
        assert list(dp.verify(model, X, Y, loss=F.cross_entropy).compared) == [
            "outputs",
            "loss",
            "model.loss",
        ]
    with torch.autocast("cpu", torch.bfloat16):
        found = dp.verify(model, X, Y, loss=F.cross_entropy)
    assert found and found.rtol == pytest.approx(2**-3.5) and "gradients" in found.compared
    assert dp.verify(model.double(), X.double()).rtol == pytest.approx(2**-26)


def test_the_tolerance_can_be_given() -> None:
    model = Broken(mlp(), CPU)
    assert not dp.verify(model, X, rtol=0.4, atol=0)
    assert dp.verify(model, X, rtol=2) and dp.verify(model, X, rtol=0, atol=1e3)


def test_a_module_raises_what_it_raises() -> None:
    def fail(net: Net, x: Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        dp.verify(dp.DataParallel(Net(fail), CPU), X)


def test_a_module_that_cannot_be_copied_is_told_as_one() -> None:
    net = mlp()
    vars(net)["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle") as raised:
        dp.verify(dp.DataParallel(net, CPU), X)
    assert "verify() works on deep copies" in vars(raised.value)["__notes__"][0]


# --- nothing changes -----------------------------------------------------------------------------


def writes_all(net: Net, x: Tensor) -> Any:
    running_mean(net, x)
    count(net, x)
    vars(net)["kept"] = net.other(x)
    random.random(), np.random.rand()
    return net.layer(net.extra["drop"](x) + torch.randn_like(x)).mul_(2)


@pytest.mark.parametrize("homes", [CPU, ["virtual:0", "virtual:1"]])
@WRAPPERS
@pytest.mark.filterwarnings("ignore:.*buffers.*")
def test_nothing_changes(wrapper: Any, homes: list[str]) -> None:
    net = Net(writes_all, drop=nn.Dropout(0.3))
    model = wrapper(net, homes)
    x = X.clone().requires_grad_()
    model(x.to(homes[0])).sum().backward()
    before = snapshot(model, x)
    assert kinds(dp.verify(model, x, Y.to(homes[0]), loss=F.cross_entropy)) >= {"random"}
    assert_same(snapshot(model, x), before)
    assert net.extra["drop"].p == 0.3
    model(x.to(homes[0])).sum().backward()


def test_optimizers_in_backward_take_no_step() -> None:
    model = dp.DistributedDataParallel(mlp(), CPU)
    model.step_in_backward(torch.optim.SGD, lr=0.1)
    model.loss(F.cross_entropy, X, Y).backward()
    before = [parameter.clone() for parameter in model.parameters()]
    assert dp.verify(model, X, Y, loss=F.cross_entropy)
    assert all(map(torch.equal, before, model.parameters()))


def test_the_log_is_told_nothing_that_is_in_the_table(caplog: pytest.LogCaptureFixture) -> None:
    model = dp.DistributedDataParallel(mlp(nn.BatchNorm1d(8)), CPU)
    assert kinds(dp.verify(model, X)) == {"batch norm"}
    assert not caplog.records
    model(X)
    assert caplog.records


def snapshot(model: Any, x: Tensor) -> list[Any]:
    net = model.module
    tensors = [*net.parameters(), *net.buffers(), net.kept, x]
    numbers: list[Any] = [net.seen, net.training, id(net.kept), random.getstate()]
    numbers += [str(np.random.get_state()), str(model.device_ids), sorted(vars(net)), id(x.grad)]
    numbers += [id(p.grad) for p in net.parameters()]
    numbers += [(id(t), t._version, t.requires_grad, t.grad_fn) for t in tensors]
    if isinstance(model, dp.DistributedDataParallel):
        numbers += [model.reducer.num_rounds, model.require_forward_param_sync]
    values = [t.detach().cpu().clone() for t in tensors]
    values += [t.grad.cpu().clone() for t in tensors if t.is_leaf and t.grad is not None]
    states = [torch.get_rng_state(), *map(torch.get_device_module("virtual").get_rng_state, (0, 1))]
    return [numbers, values, states]


def assert_same(now: list[Any], before: list[Any]) -> None:
    assert now[0] == before[0]
    for a, b in zip([*now[1], *now[2]], [*before[1], *before[2]], strict=True):
        assert torch.equal(a, b)


# --- processes -----------------------------------------------------------------------------------


def verify_in_processes(
    rank: int, world_size: int, name: str, size: int, options: dict[str, Any]
) -> str:
    """Return each rank's message, without numbers that nobody knows before."""
    torch.manual_seed(0)
    make, replicas = NETS[name], options.pop("replicas", 2)
    model = dp.DistributedDataParallel(make(), ["cpu"] * replicas, **options)
    x, y = batch(size + rank)
    model.loss(F.cross_entropy, x, y).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found = dp.verify(model, x, y, loss=F.cross_entropy)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    told = [(one.kind, one.part, one.name, one.ranks) for one in found.differences]
    # The wrapper trains on.
    model.loss(F.cross_entropy, x, y).backward()
    return repr((found.where, dict(found.compared), told)) + str(found)


class OneRank(nn.Module):
    """Something that the wrapper cannot do right, on rank 1 only."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what, self.unused = nn.Linear(4, 3), what, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        here = torch.distributed.get_rank() == 1
        is_replica = dp.current_replica() is not None
        if self.what == "raises" and here and is_replica and len(x) > 5:
            raise ValueError("mine")
        return self.layer(x - x.mean(0) if here and self.what == "couples" else x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "norm": lambda: mlp(nn.BatchNorm1d(8)),
    "unused": lambda: OneRank(""),
    "couples": lambda: OneRank("couples"),
    "torch's": lambda: mlp(nn.SyncBatchNorm(8)),
}


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("mlp", 2, {}),
        ("mlp", 3, {"average": "samples"}),
        ("mlp", 2, {"average": "none", "replicas": 1}),
        ("norm", 2, {"buffers": "sync"}),
        ("norm", 2, {"replicas": 1}),
        ("torch's", 2, {}),
        ("unused", 2, {}),
    ],
)
def test_processes_are_equal(
    name: str, world_size: int, options: dict[str, Any], cluster: Cluster
) -> None:
    told = cluster.run(verify_in_processes, world_size, name, 6, options)
    assert told[0].startswith("(") and "equal: " in told[0] and len(set(told)) == 1, told[0]
    assert f"in each of {world_size} processes" in told[0]


@pytest.mark.parametrize(("name", "kind"), [("norm", "batch norm"), ("couples", "coupled samples")])
def test_all_processes_are_told_what_differs_in_one(name: str, kind: str, cluster: Cluster) -> None:
    told = cluster.run(verify_in_processes, 2, name, 6, {})
    assert len(set(told)) == 1 and "different: " in told[0]
    assert f"('{kind}', 'outputs', 'output', {(0, 1) if name == 'norm' else (1,)})" in told[0]
    assert f"('{kind}', 'gradients', '" in told[0] and "'unknown'" not in told[0]


def one_fails(rank: int, world_size: int, where: str) -> str:
    torch.manual_seed(0)

    def forward(net: Net, x: Tensor) -> Any:
        inside = dp.current_replica() is not None
        if rank == 1 and inside == (where == "wrapper"):
            raise ValueError("mine")
        return net.layer(x)

    net = Net(forward)
    model = dp.DistributedDataParallel(net, CPU)
    x, y = batch(6)
    try:
        found = dp.verify(model, x, y, loss=lambda output, y: F.cross_entropy(output, y))
    except (ValueError, CollectiveError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = str(found)
    net.function = lambda net, x: net.layer(x)
    F.cross_entropy(model(x), y).backward()
    model.check_replicas()
    return text


def test_no_process_waits_for_one_that_fails(cluster: Cluster) -> None:
    first, second = cluster.run(one_fails, 2, "module")
    assert "rank 1" in first and "ValueError: mine" in first
    assert second == "ValueError: mine"
    first, second = cluster.run(one_fails, 2, "wrapper")
    assert first == second and "error: outputs, gradients (in ranks 0, 1)" in first
    assert "ValueError: mine" in first


# --- lists ---------------------------------------------------------------------------------------


def brightness(net: Net, images: list[Tensor]) -> list[Tensor]:
    return [net.layer(image).mean() for image in images]


def captions(net: Net, x: Tensor, names: list[str]) -> Tensor:
    return torch.stack([row * len(name) for row, name in zip(net.layer(x), names, strict=True)])


IMAGES = list(torch.randn(5, 3, 6, 4, generator=torch.Generator().manual_seed(0)))
NAMES = ["a", "bb", "ccc", "d", "ee", "f", "gggg"]


@pytest.mark.parametrize(
    ("forward", "given", "position"),
    [
        (brightness, ((IMAGES,),), 0),
        (captions, (X, NAMES), 1),
        (lambda net, x, n: net.layer(x) * torch.as_tensor(n)[:, None], (X, Y.numpy()), 1),
    ],
)
def test_a_list_of_samples_is_named(
    forward: Forward, given: tuple[Any, ...], position: int
) -> None:
    found = dp.verify(Net(forward), *given, device_ids=["cpu"] * 3)
    assert kinds(found) == {"list"}
    assert found.differences[0].remedy == f'in_dims={{{position}: "samples"}}'
    assert "all is equal" in str(found)


@pytest.mark.parametrize(
    "forward",
    [lambda net, x: list(net.layer(x)), lambda net, x: (net.layer(x).argmax(1) + 0).tolist()],
)
def test_a_list_with_an_entry_for_each_sample_is_equal(forward: Forward) -> None:
    assert dp.verify(Net(forward), X, device_ids=["cpu"] * 3)


def test_what_an_error_hides_is_named_too() -> None:
    net = Net(lambda net, *given: (captions(net, *given).sum(), len(given[0])))
    found = dp.verify(net, X, NAMES, device_ids=CPU)
    assert kinds(found) == {"list", "scalar", "number"}
    assert 'in_dims={1: "samples"} and scalars="sum" and out_dims=(0, "sum"), all is' in " ".join(
        str(found).split()
    )
