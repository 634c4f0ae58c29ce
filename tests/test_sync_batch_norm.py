"""SyncBatchNorm in replicas, in processes, and in both. Oracle: the bare module, whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel, current_replica, parallel_apply
from dataparallel.collectives import LocalGroup, SyncBatchNorm
from dataparallel.threads.meeting import Rendezvous, RendezvousError
from tests.cluster import Cluster
from tests.models import assert_all_close


class Net(nn.Module):
    """Two batch norm layers of different rank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3, 4)
        self.norm1 = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        output: Tensor = self.norm1(self.out(hidden))
        return output


def converted(bare: nn.Module, group: Any = None) -> Any:
    return SyncBatchNorm.convert(copy.deepcopy(bare), group)


def filled(layer: nn.Module) -> nn.Module:
    """The layer with weights that are not all one."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    assert list(left.state_dict()) == list(right.state_dict())
    assert_all_close(
        [tensor.cpu() for tensor in right.state_dict().values()],
        [tensor.cpu() for tensor in left.state_dict().values()],
    )


# --- in the wrappers ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("group", ["local", "hybrid", LocalGroup(60.0)])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_training_equals_the_bare_module(
    slots: list[str], wrapper: Any, group: Any, num_slots: int
) -> None:
    with torch.device(slots[0]):
        bare = Net().double()
    net = converted(bare, group)
    model = wrapper(net, slots[:num_slots])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for batch in (9, 5, 8):
        x = torch.randn(batch, 2, 5, 5, dtype=torch.double, device=slots[0])
        y = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
        for module, optimizer in zip((bare, model), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
        assert_all_close([p.grad for p in net.parameters()], [p.grad for p in bare.parameters()])
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(bare, net)


def test_a_layer_that_is_synchronized_already_stays_so_with_buffers_sync(slots: list[str]) -> None:
    with torch.device(slots[0]):
        bare = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    net = copy.deepcopy(bare)
    SyncBatchNorm.convert(net[0])
    x = torch.randn(8, 3, device=slots[0])
    torch.testing.assert_close(DataParallel(net, slots, buffers="sync")(x), bare(x))
    assert_same_state(bare, net)


def test_a_compiled_module(slots: list[str]) -> None:
    with torch.device(slots[0]):
        bare = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    net = converted(bare)
    compiled: Any = torch.compile(net, backend="eager")
    model = DataParallel(compiled, slots[:2])
    x = torch.randn(8, 3, device=slots[0])
    for _ in range(2):
        torch.testing.assert_close(model(x), bare(x))
    torch.testing.assert_close(net(x[:3]), bare(x[:3]))
    assert_same_state(bare, net)


def test_under_a_checkpoint_only_around_the_wrapper(slots: list[str]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.norm, x, use_reentrant=False)

    bare = filled(nn.BatchNorm1d(3)).to(slots[0])
    x = torch.randn(8, 3, device=slots[0], requires_grad=True)
    model = DataParallel(converted(bare), slots[:2])
    outputs = [checkpoint(module, x, use_reentrant=False) for module in (bare, model)]
    grads = [torch.autograd.grad(output.sin().sum(), x)[0] for output in outputs]
    torch.testing.assert_close(grads[1], grads[0])
    inside = DataParallel(SyncBatchNorm.convert(Checkpointed()).to(slots[0]), slots[:2])
    with pytest.raises(RuntimeError, match=r"batch norm 'norm'.*activation checkpointing"):
        inside(x)


def test_what_other_code_runs_again_in_backward_is_refused() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Any, x: Tensor) -> Any:
            ctx.function = function
            return function(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, ctx.function(grad)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = SyncBatchNorm(3)

        def forward(self, x: Tensor) -> Any:
            return Again.apply(self.norm, x)

    x = torch.randn(8, 3, requires_grad=True)
    output = DataParallel(Net(), ["cpu"] * 2)(x)
    with pytest.raises(RuntimeError, match=r"batch norm over replicas was called in backward"):
        output.sum().backward()


# --- in replicas -------------------------------------------------------------------------------


def run_replicas(
    layer: nn.Module, chunks: list[Tensor], slots: list[str]
) -> tuple[list[nn.Module], Tensor]:
    """Copies of a layer after a forward, and what they returned, concatenated."""
    layers = [copy.deepcopy(layer).to(slot) for slot in slots]
    moved = [chunk.to(slot) for chunk, slot in zip(chunks, slots, strict=True)]
    outputs = parallel_apply(layers, [(chunk,) for chunk in moved], devices=slots)
    return layers, torch.cat([output.to(chunks[0].device) for output in outputs])


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 5), (3, 2, 2, 2), (3, 1, 2, 1, 2)])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 3, 0, 4), (0, 0, 0, 2), (1, 1, 1, 1)])
def test_any_rank_and_uneven_and_empty_chunks(
    slots: list[str], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    bare = filled(SyncBatchNorm(3, dtype=torch.double))
    x = torch.randn(sum(sizes), *shape, dtype=torch.double) * 3 + 5
    coefficients = torch.randn_like(x)
    expected, got = x.clone().requires_grad_(), x.clone().requires_grad_()
    layers, output = run_replicas(bare, list(got.split(sizes)), slots)
    reference = bare(expected)
    torch.testing.assert_close(output, reference)
    for each, leaf in ((output, got), (reference, expected)):
        (each.sin() * coefficients).sum().backward()
        assert leaf.grad is not None
    torch.testing.assert_close(got.grad, expected.grad)
    for layer in layers:
        for (name, buffer), other in zip(bare.named_buffers(), layer.buffers(), strict=True):
            torch.testing.assert_close(other.cpu(), buffer, msg=name)
    for parameter, *others in zip(
        bare.parameters(), *[layer.parameters() for layer in layers], strict=True
    ):
        grads = [other.grad.cpu() for other in others if other.grad is not None]
        assert len(grads) == len(layers)
        torch.testing.assert_close(torch.stack(grads).sum(0), parameter.grad)


def test_derivatives_of_third_order(slots: list[str]) -> None:
    layer = filled(SyncBatchNorm(2, dtype=torch.double))

    def plain(x: Tensor) -> Tensor:
        # Not the bare module: its own third derivatives are not right.
        weight, bias = layer.parameters()
        variance, mean = torch.var_mean(x, 0, correction=0)
        return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias

    x = torch.randn(5, 2, dtype=torch.double) * 4
    results = []
    for synchronized in (False, True):
        leaf = x.clone().requires_grad_()
        chunks = list(leaf.split((2, 0, 1, 2)))
        output = run_replicas(layer, chunks, slots)[1] if synchronized else plain(leaf)
        (first,) = torch.autograd.grad(output.pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf, create_graph=True)
        results.append([first, second, *torch.autograd.grad(second.sin().sum(), leaf)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_gradgradcheck() -> None:
    model = DataParallel(converted(filled(nn.BatchNorm1d(2).double())), ["cpu"] * 2)
    x = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_statistics_in_float32(slots: list[str], dtype: torch.dtype) -> None:
    bare = filled(nn.BatchNorm1d(3))
    x = (torch.randn(4000, 3) + 20).to(dtype)
    layers, output = run_replicas(converted(bare), list(x.split(1000)), slots)
    assert output.dtype == dtype
    torch.testing.assert_close(output, bare(x.float()).to(dtype), atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(layers[3].running_mean.cpu(), bare.running_mean)
    torch.testing.assert_close(layers[3].running_var.cpu(), bare.running_var)


def test_a_large_mean_costs_no_precision(slots: list[str]) -> None:
    bare = nn.BatchNorm1d(3, affine=False)
    x = torch.randn(64, 3) + 1000.0
    _, output = run_replicas(converted(bare), list(x.split(16)), slots)
    exact = bare.double()(x.double()).float()
    torch.testing.assert_close(output, exact, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.7}, {"affine": False}, {"track_running_stats": False}],
)
def test_options(slots: list[str], options: dict[str, Any]) -> None:
    bare = filled(nn.BatchNorm1d(3, **options))
    layer = converted(bare)
    for _ in range(3):
        x = torch.randn(8, 3)
        layers, output = run_replicas(layer, list(x.split(2)), slots)
        torch.testing.assert_close(output, bare(x))
        assert_same_state(bare, layers[2])
        layer = layers[0].cpu()


def test_running_statistics_that_are_not_tracked_any_more(slots: list[str]) -> None:
    layer = SyncBatchNorm(3)
    layer.track_running_stats = False
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(8, 3)
    layers, output = run_replicas(layer, list(x.split(2)), slots)
    torch.testing.assert_close(output, nn.BatchNorm1d(3)(x))
    assert_all_close([t.cpu() for t in layers[1].state_dict().values()], before.values())


def test_one_meeting_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    exchange = Rendezvous.exchange

    def counted(self: Rendezvous, key: Any, *args: Any, **kwargs: Any) -> Any:
        keys.append(repr(key))
        return exchange(self, key, *args, **kwargs)

    monkeypatch.setattr(Rendezvous, "exchange", counted)
    model = DataParallel(converted(Net()), ["cpu"] * 2)
    model(torch.randn(4, 2, 5, 5)).sum().backward()
    assert len(keys) == 4 and len(set(keys)) == 2


def test_without_a_bias(slots: list[str]) -> None:
    layer = SyncBatchNorm(3, bias=False, dtype=torch.double, device=slots[0])
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    x = torch.randn(8, 3, dtype=torch.double, device=slots[0])
    output = DataParallel(layer, slots)(x)
    torch.testing.assert_close(output.mean(0), torch.zeros_like(output[0]))


def test_the_memory_format_is_kept() -> None:
    x = torch.randn(8, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    bare = nn.BatchNorm2d(3)
    layers = [converted(bare) for _ in range(2)]
    outputs = parallel_apply(layers, [(chunk,) for chunk in x.split(4)], devices=["cpu"] * 2)
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in outputs)
    torch.testing.assert_close(torch.cat(outputs), bare(x))


def test_evaluation_needs_nobody_else(slots: list[str]) -> None:
    class Skips(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            return x if replica is not None and replica.index == 1 else self.norm(x)

    norm = SyncBatchNorm(3, device=slots[0])
    model = DataParallel(Skips(norm), slots[:2])
    x = torch.randn(8, 3, device=slots[0])
    with pytest.raises(RendezvousError, match=r"batch norm.*replica 1 returned"):
        model(x)
    model.eval()
    torch.testing.assert_close(model(x)[:4], nn.BatchNorm1d(3).to(slots[0]).eval()(x[:4]))
    untracked = DataParallel(Skips(SyncBatchNorm(3, track_running_stats=False)), ["cpu"] * 2)
    x = torch.randn(8, 3)
    torch.testing.assert_close(untracked.eval()(x)[:4], nn.BatchNorm1d(3)(x[:4]))


def test_alone_it_is_an_ordinary_batch_norm() -> None:
    for group in ("local", "hybrid"):
        bare, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
        layer = converted(bare, group)
        for size in (4, 0):
            assert torch.equal(layer(x[:size]), bare(x[:size]))
        assert_same_state(bare, layer)


def test_an_empty_batch_at_all_members(slots: list[str]) -> None:
    bare = nn.BatchNorm1d(3)
    layers, output = run_replicas(converted(bare), [torch.empty(0, 3)] * 4, slots)
    assert output.shape == bare(torch.empty(0, 3)).shape
    assert_same_state(bare, layers[0])


# --- mistakes ----------------------------------------------------------------------------------


def test_a_single_value_is_refused_by_all(slots: list[str]) -> None:
    chunks = [torch.randn(1, 3), *[torch.empty(0, 3)] * 3]
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*has 1 .*batch norm"):
        run_replicas(SyncBatchNorm(3), chunks, slots)


def test_layers_in_another_order_are_named(slots: list[str]) -> None:
    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            assert replica is not None
            swapped = replica.index == 1
            output: Tensor = self.a(self.b(x)) if swapped else self.b(self.a(x))
            return output

    model = DataParallel(SyncBatchNorm.convert(Swaps()).to(slots[0]), slots[:2])
    with pytest.raises(RuntimeError, match=r"batch norm '[ab]'.*batch norm '[ab]'"):
        model(torch.randn(8, 3, device=slots[0]))


def test_inputs_that_are_refused() -> None:
    layer = SyncBatchNorm(3)
    with pytest.raises(ValueError, match=r"batch norm takes .*\(N, C, ...\), but got \(3,\)"):
        layer(torch.randn(3))
    with pytest.raises(RuntimeError, match=r"batch norm is for 3 channels.*\(2, 5\) has 5"):
        layer(torch.randn(2, 5))
    with pytest.raises(TypeError, match=r"batch norm takes floating-point.*torch.int64"):
        layer(torch.ones(2, 3, dtype=torch.long))
    assert layer.num_batches_tracked is not None and layer.num_batches_tracked.item() == 0


def refuse_processes_in_replicas(rank: int, world_size: int) -> str:
    model = DataParallel(SyncBatchNorm(3, group=dist.group.WORLD), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match="'hybrid'") as caught:
        model(torch.randn(4, 3))
    return str(caught.value)


def test_a_process_group_is_refused_in_replicas(cluster: Cluster) -> None:
    (message,) = cluster.run(refuse_processes_in_replicas, 1)
    assert "in replica 0 of 2" in message
