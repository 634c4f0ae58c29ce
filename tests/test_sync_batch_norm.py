"""Batch norm over replicas, over processes, and over both. Oracle: the bare module, whole batch."""

from __future__ import annotations

import copy
import functools
import io
import operator
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel, current_replica, parallel_apply
from dataparallel.collectives import LocalGroup, SyncBatchNorm
from tests.cluster import Cluster
from tests.models import WRAPPERS, Calls, assert_all_close, norms
from tests.process_groups import new_group


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


#: Layers of torch.nn.SyncBatchNorm, and the option buffers= of the wrapper.
TORCHS = ["torch's, replica0", "torch's, mean", "torch's, sync"]
#: The wrapper's way: buffers="sync", also for a synchronized layer; else the layers' group.
HOW = ["buffers", "both", *TORCHS, "local", "hybrid", LocalGroup(60.0)]
ALL = pytest.mark.parametrize("how", ["buffers", TORCHS[0], "hybrid"])


def converted(bare: nn.Module, group: Any = None) -> Any:
    return SyncBatchNorm.convert(copy.deepcopy(bare), group)


def torchs(bare: nn.Module, group: Any = None) -> Any:
    """Return a copy as scripts for several GPUs make it."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(bare), group)


def wrapped(
    bare: nn.Module, slots: list[str], how: Any, wrapper: Any = DataParallel
) -> DataParallel[Any]:
    """Return a wrapper of a copy whose layers are synchronized in some way."""
    net = copy.deepcopy(bare)
    if how in TORCHS:
        return wrapper(torchs(bare), slots, buffers=how.split()[-1])  # type: ignore[no-any-return]
    if how == "both":
        SyncBatchNorm.convert(net.get_submodule("norm1"))
    if how in ("buffers", "both"):
        return wrapper(net, slots, buffers="sync")  # type: ignore[no-any-return]
    return wrapper(SyncBatchNorm.convert(net, how), slots)  # type: ignore[no-any-return]


def filled(layer: nn.Module) -> nn.Module:
    """Return the layer with weights that are not all one."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    assert list(left.state_dict()) == list(right.state_dict())
    ours, theirs = (list(module.state_dict().values()) for module in (left, right))
    assert_all_close([tensor.cpu() for tensor in ours], [tensor.cpu() for tensor in theirs])


# --- in the wrappers ---------------------------------------------------------------------------


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize(
    ("how", "num_slots"),
    [*((how, 4) for how in HOW), *((how, 1) for how in ("buffers", TORCHS[0], "hybrid"))],
)
def test_training_equals_the_bare_module(
    slots: list[str], wrapper: Any, how: Any, num_slots: int
) -> None:
    with torch.device(slots[0]):
        bare = Net().double()
    model = wrapped(bare, slots[:num_slots], how, wrapper)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for batch in (9, 3, 8):
        x = torch.randn(batch, 2, 5, 5, dtype=torch.double, device=slots[0])
        y = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
        for module, optimizer in zip((bare, model), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
        assert_all_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(model.module, bare)
    bare.eval(), model.eval()
    torch.testing.assert_close(model(x), bare(x))
    assert_same_state(model.module, bare)


def within(call: Any) -> Calls:
    """A module with a layer that is called in some way."""
    return Calls(lambda net, x: call(net.norm, x), norm=nn.BatchNorm1d(3))


class Again(torch.autograd.Function):
    """Runs a function again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Any:
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.function(grad)


def skipped(norm: nn.Module, x: Tensor) -> Any:
    replica = current_replica()
    return x if replica is not None and replica.index == 1 else norm(x)


@pytest.mark.in_pairs
@ALL
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (functools.partial(checkpoint, use_reentrant=False), "norm'.*activation checkpointing"),
        (Again.apply, "batch norm 'norm' .*(in backward|outside of their forward)"),
        (skipped, "batch norm.*replica 1 returned"),
    ],
    ids=["checkpoint", "again", "skipped"],
)
def test_replicas_that_do_not_meet(slots: list[str], how: str, call: Any, message: str) -> None:
    model = wrapped(within(call).to(slots[0]), slots[:2], how)
    x = torch.randn(8, 3, device=slots[0], requires_grad=True)
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    # In evaluation a layer needs nobody else.
    model.eval()
    torch.testing.assert_close(model(x)[:4], model.module.norm(x[:4]))


def test_outside_of_the_forward_is_a_clear_error(slots: list[str]) -> None:
    kept: list[nn.Module] = []

    def keep(norm: nn.Module, x: Tensor) -> Any:
        kept.append(norm)
        return norm(x)

    net = within(keep).to(slots[0])
    x = torch.randn(4, 3, device=slots[0])
    DataParallel(net, slots[:2], buffers="sync")(x)
    with pytest.raises(RuntimeError, match=r"batch norm 'norm' .* called outside of their forward"):
        kept[0](x)


FORMS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"momentum": None}, (3,)),
    ({"affine": False}, (3, 4)),
    ({"track_running_stats": False}, (3, 4, 4)),
    ({"affine": False, "track_running_stats": False}, (3,)),
    ({"momentum": 0.7}, (3, 2, 2, 2)),
]


class Scaled(nn.Sequential):
    """Layers behind a parameter."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.scale)


@pytest.mark.in_pairs
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("options", "shape"), FORMS, ids=str)
def test_torchs_layer_in_every_form(
    slots: list[str], options: dict[str, Any], shape: tuple[int, ...], autocast: bool
) -> None:
    kind = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(shape) + 1, nn.BatchNorm1d)
    dtype, linear = torch.float if autocast else torch.double, nn.Linear(shape[-1], 2)
    tolerances: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}
    bare = filled(Scaled(kind(3, **options), *([linear] if autocast else []))).to(slots[0], dtype)
    model = DistributedDataParallel(torchs(bare), slots[:3])
    for size in (7, 4, 2):
        x = torch.randn(size, *shape, device=slots[0], dtype=dtype) + 2
        if len(shape) == 3:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(torch.device(slots[0]).type, torch.bfloat16, enabled=autocast):
            got, expected = model(x), bare(x)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **tolerances)
        for module in (bare, model):
            module.zero_grad()
        (got.sin() + expected.sin()).sum().backward()
        grads = ([p.grad for p in module.parameters()] for module in (model, bare))
        assert_all_close(*grads, **tolerances)
        assert_same_state(model.module, bare)
    # Without statistics of its own, evaluation needs the whole batch, too.
    torch.testing.assert_close(model.eval()(x), bare.eval()(x))


# --- in replicas -------------------------------------------------------------------------------


def run_replicas(
    layer: nn.Module, chunks: list[Tensor], slots: list[str]
) -> tuple[list[nn.Module], Tensor]:
    """Copies of a layer after a forward, and what they returned, concatenated."""
    layers = [copy.deepcopy(layer).to(slot) for slot in slots]
    moved = [chunk.to(slot) for chunk, slot in zip(chunks, slots, strict=True)]
    outputs = parallel_apply(layers, [(chunk,) for chunk in moved], devices=slots)
    return layers, torch.cat([output.to(chunks[0].device) for output in outputs])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"momentum": 0.7, "affine": False},
    {"track_running_stats": False, "bias": False},
]


@pytest.mark.in_pairs
@pytest.mark.parametrize(
    ("shape", "options"),
    [*zip([(3,), (3, 4), (3, 2, 2, 2), (3, 1, 2, 1, 2)], OPTIONS, strict=True)],
)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 3, 0, 4), (0, 0, 0, 2), (0, 0, 0, 0)])
def test_any_rank_and_uneven_and_empty_chunks(
    slots: list[str], options: dict[str, Any], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    bare = filled(SyncBatchNorm(3, dtype=torch.double, **options))
    layer = bare
    for _ in range(2):
        x = torch.randn(sum(sizes), *shape, dtype=torch.double) * 3 + 5
        coefficients = torch.randn_like(x)
        expected, got = x.clone().requires_grad_(), x.clone().requires_grad_()
        layers, output = run_replicas(layer, list(got.split(sizes)), slots)
        reference = bare(expected)
        torch.testing.assert_close(output, reference)
        bare.zero_grad()
        for each in (output, reference):
            (each.sin() * coefficients).sum().backward()
        torch.testing.assert_close(got.grad, expected.grad)
        for each in layers:
            assert_same_state(each, bare)
        for parameter, *others in zip(
            bare.parameters(), *[each.parameters() for each in layers], strict=True
        ):
            grads = [other.grad.cpu() for other in others if other.grad is not None]
            assert len(grads) == len(layers)
            torch.testing.assert_close(functools.reduce(operator.add, grads), parameter.grad)
        layer = layers[0].cpu()
        layer.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "offset", "tolerance"),
    [(torch.float16, 20, 2e-2), (torch.bfloat16, 20, 2e-2), (torch.float32, 1000, 1e-3)],
)
def test_statistics_keep_their_precision(
    slots: list[str], dtype: torch.dtype, offset: float, tolerance: float
) -> None:
    bare = filled(nn.BatchNorm1d(3))
    x = (torch.randn(4000, 3) + offset).to(dtype)
    layers, output = run_replicas(converted(bare), list(x.split(1000)), slots)
    assert output.dtype == dtype
    exact = bare.double()(x.double())
    torch.testing.assert_close(output, exact.to(dtype), atol=tolerance, rtol=1e-2)
    for buffer, right in zip(layers[3].buffers(), bare.buffers(), strict=True):
        torch.testing.assert_close(buffer.to(right).cpu(), right, rtol=1e-5, atol=1e-5)


def test_statistics_that_are_not_tracked_any_more_and_the_memory_format(slots: list[str]) -> None:
    layer = SyncBatchNorm(3)
    layer.track_running_stats = False
    before = copy.deepcopy(layer)
    x = torch.randn(8, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    layers, output = run_replicas(layer, list(x.split(2)), slots)
    torch.testing.assert_close(output, nn.BatchNorm2d(3)(x))
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert_same_state(layers[1], before)


def test_alone_it_is_an_ordinary_batch_norm() -> None:
    for group in ("local", "hybrid"):
        bare, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
        layer = converted(bare, group)
        for size in (4, 0):
            assert torch.equal(layer(x[:size]), bare(x[:size]))
        assert_same_state(bare, layer)


# --- mistakes ----------------------------------------------------------------------------------


@ALL
def test_a_single_value_is_refused_as_torch_refuses_it(slots: list[str], how: str) -> None:
    model = wrapped(nn.BatchNorm1d(3).to(slots[0]), slots, how)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, device=slots[0]))
    # One sample per replica is enough, since statistics are over the batch.
    assert model(torch.randn(2, 3, device=slots[0])).shape == (2, 3)
    chunks = [torch.randn(1, 3), *[torch.empty(0, 3)] * 3]
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*has 1 .*batch norm"):
        run_replicas(SyncBatchNorm(3), chunks, slots)


def test_layers_in_another_order_are_named(slots: list[str]) -> None:
    class Swaps(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            replica = current_replica()
            assert replica is not None
            first, second = (1, 0) if replica.index == 1 else (0, 1)
            return self[second](self[first](x))

    net = Swaps(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).to(slots[0])
    with pytest.raises(RuntimeError, match=r"batch norm '[01]'.*batch norm '[01]'"):
        wrapped(net, slots[:2], "hybrid")(torch.randn(8, 3, device=slots[0]))


def test_inputs_that_are_refused(slots: list[str]) -> None:
    layer = SyncBatchNorm(3)
    with pytest.raises(ValueError, match=r"batch norm takes .*\(N, C, ...\), but got \(3,\)"):
        layer(torch.randn(3))
    with pytest.raises(TypeError, match=r"batch norm takes floating-point.*torch.int64"):
        layer(torch.ones(2, 3, dtype=torch.long))
    model = wrapped(nn.BatchNorm1d(3).to(slots[0]), slots, "buffers")
    for each in (layer, model):
        with pytest.raises(RuntimeError, match=r"for 3 channels.*\(2, 5\) has 5"):
            each(torch.randn(2 if each is layer else 8, 5))
        assert each.num_batches_tracked.item() == 0  # type: ignore[union-attr]


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


def own_forward(norm: Any) -> Any:
    norm.forward = lambda input: input
    return norm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OwnForward(3), r"'1' \(OwnForward\).*a forward of its own"),
        (lambda: own_forward(nn.BatchNorm1d(3)), r"'1' \(BatchNorm1d\).*a forward of its own"),
        (lambda: own_forward(nn.SyncBatchNorm(3)), r"'1' \(SyncBatchNorm\).*a forward of its own"),
        (nn.LazyBatchNorm1d, r"'1' \(\w+\), which is lazy or parametrized"),
        (lambda: weight_norm(nn.BatchNorm1d(3)), r"'1' \(\w+\), which is lazy or parametrized"),
    ],
)
def test_where_one_layer_cannot_be_converted_none_is(make: Any, message: str) -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), make())
    with pytest.raises(TypeError, match=message):
        SyncBatchNorm.convert(net)
    assert type(net[0]) is nn.BatchNorm1d
    if "own" in message:
        policies: list[Any] = ["sync", *(["mean"] if "Sync" in message else [])]
        for policy in policies:
            with pytest.raises(TypeError, match=message):
                DataParallel(net, ["cpu"] * 2, buffers=policy)(torch.randn(8, 3))


@pytest.mark.parametrize("policy", ["replica0", "sync"])
def test_replicas_within_replicas_are_refused(policy: Any) -> None:
    for wrong in (True, False):
        norm: nn.Module = nn.BatchNorm1d(3) if policy == "sync" else nn.SyncBatchNorm(3)
        inner = DataParallel(norm if wrong else nn.Identity(), ["cpu"])
        nested = DataParallel(nn.Sequential(inner, norm), ["cpu", "cpu"], buffers=policy)
        if wrong:
            with pytest.raises(TypeError, match="over the replicas of '0' within replicas"):
                nested(torch.randn(8, 3))
        else:
            assert nested(torch.randn(8, 3)).shape == (8, 3)


# --- conversion --------------------------------------------------------------------------------


class Tree(nn.Module):
    """Layers of all kinds, one of them in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = nn.Sequential(nn.BatchNorm2d(3, eps=0.5, momentum=0.3))
        self.shared = nn.BatchNorm1d(4, momentum=None)
        self.again = nn.ModuleList([self.shared, nn.BatchNorm3d(5, affine=False)])
        self.third = self.shared
        self.theirs = nn.SyncBatchNorm(6, track_running_stats=False)
        self.other = nn.InstanceNorm1d(8, affine=True)


def test_every_layer_becomes_synchronized_and_stays_the_same_otherwise() -> None:
    tree, original = Tree(), Tree()
    tensors = {id(tensor) for tensor in (*tree.parameters(), *tree.buffers())}
    tree.nested.eval()
    assert SyncBatchNorm.convert(tree) is tree
    assert {id(tensor) for tensor in (*tree.parameters(), *tree.buffers())} == tensors
    layers = [part for part in tree.modules() if isinstance(part, SyncBatchNorm)]
    found = [(each.num_features, each.training, each.eps, each.momentum) for each in layers]
    assert found == [
        (3, False, 0.5, 0.3), (4, True, 1e-5, None), (5, True, 1e-5, 0.1), (6, True, 1e-5, 0.1),
    ]  # fmt: skip
    assert tree.shared is tree.again[0] is tree.third
    assert (layers[2].affine, layers[3].running_mean) == (False, None)
    assert type(tree.other) is nn.InstanceNorm1d
    assert {layer.group for layer in layers} == {"hybrid"}
    assert "group='hybrid'" in repr(layers[0])
    # The state has the names of the original, and loads into it and back.
    for tensor in tree.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape) * 9)
    for source, target in ((tree, original), (original, SyncBatchNorm.convert(Tree()))):
        target.load_state_dict(source.state_dict())
        assert_same_state(source, target)


def test_a_single_layer_and_the_name_of_torch() -> None:
    layer: Any = nn.BatchNorm2d(3, dtype=torch.bfloat16, device="virtual:1")
    assert SyncBatchNorm.convert_sync_batchnorm(layer, "local") is layer
    assert isinstance(layer, SyncBatchNorm) and layer.group == "local"
    assert layer.weight.dtype == torch.bfloat16 and layer.weight.device.index == 1
    group = LocalGroup(5.0)
    assert SyncBatchNorm.convert(layer, group) is layer and layer.group is group
    # Without a group the layer keeps the one it has.
    assert SyncBatchNorm.convert(layer) is layer and layer.group is group


# --- between processes ---------------------------------------------------------------------------


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 2, dtype=torch.double, generator=generator)
    return x, torch.randn(size, 4, dtype=torch.double, generator=generator)


def derivatives(
    module: nn.Module, x: Tensor, coefficients: Tensor, *, second: bool
) -> list[Tensor]:
    """Output, and derivatives by the input and the parameters."""
    leaf = x.clone().requires_grad_()
    output = module(leaf)
    leaves = [leaf, *module.parameters()]
    loss = (output.sin() * coefficients).sum()
    found = torch.autograd.grad(loss, leaves, create_graph=second)
    if second:
        found += torch.autograd.grad(found[0].pow(2).sum(), leaves)
    return [output, *found]


def compare_with_whole(
    rank: int, world_size: int, sizes: list[int], group: Any, num_replicas: int
) -> None:
    x, coefficients = batch(sum(sizes))
    bare = norms()
    module = torchs(bare) if group == "torch's" else converted(bare, group or dist.group.WORLD)
    if num_replicas:
        model: Any = DataParallel(module, ["cpu"] * num_replicas)
    else:
        # Torch warns of its compiler's own work for each node of ours.
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
        model = torch.compile(module, backend="aot_eager", fullgraph=True)
    # A compiled function has no second derivatives.
    second = num_replicas > 0
    expected = derivatives(bare, x, coefficients, second=second)
    mine = (x.split(sizes)[rank], coefficients.split(sizes)[rank])
    got = derivatives(model, *mine, second=second)
    pairs = []
    for ours, whole in zip(got, expected, strict=True):
        if whole.size(0) == len(x):
            whole = whole.split(sizes)[rank]
        else:
            ours = ours.detach().clone()
            dist.all_reduce(ours)
        pairs.append((ours, whole))
    assert_all_close(*zip(*pairs, strict=True))
    assert_all_close(module.buffers(), bare.buffers())


@pytest.mark.parametrize(
    ("sizes", "group", "num_replicas"),
    [
        ([4, 4, 4], None, 1),
        # Compiled.
        ([4, 4], None, 0),
        ([7, 0, 4], None, 1),
        ([5, 1, 6], [0, 1, 2], 1),
        ([7, 0, 4], "hybrid", 1),
        ([5, 1], "hybrid", 3),
        ([1, 4], "hybrid", 3),
        ([6, 0], "hybrid", 3),
        ([6, 0], "torch's", 1),
        ([7, 2, 4], "torch's", 3),
    ],
)
def test_processes_equal_the_whole_batch(
    cluster: Cluster, sizes: list[int], group: Any, num_replicas: int
) -> None:
    cluster.run(compare_with_whole, len(sizes), sizes, group, num_replicas)


def train(rank: int, world_size: int, with_torch: bool) -> None:
    bare = norms()
    if with_torch:
        model: Any = TorchDDP(converted(bare, dist.group.WORLD))
    else:
        model = DistributedDataParallel(converted(bare), ["cpu"] * 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for size in (8, 12):
        x, y = batch(size)
        mine = [t.chunk(world_size)[rank] for t in (x, y)]
        for each, data, optimizer in zip((bare, model), ((x, y), mine), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(each(data[0]), data[1]).backward()
            optimizer.step()
        assert_same_state(model.module, bare)


@pytest.mark.parametrize("with_torch", [True, False])
def test_training_in_two_processes(cluster: Cluster, with_torch: bool) -> None:
    """With torch's wrapper, or with two replicas in each."""
    cluster.run(train, 2, with_torch)


def refuse(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(4, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*the whole batch has 1"):
        layer(torch.randn(int(rank == 1), 4))
    assert layer(torch.empty(0, 4)).shape == (0, 4)
    with pytest.raises(RuntimeError, match=r"in replica 0 of 2: .* group='hybrid'"):
        DataParallel(layer, ["cpu"] * 2)(torch.randn(4, 4))


def test_what_processes_refuse(cluster: Cluster) -> None:
    cluster.run(refuse, 2)


def copied(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(3, group=dist.group.WORLD)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(4, 3)
    expected = layer(x)
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(each(x), expected)
        assert isinstance(each.group, str) and each.group == layer.group
    halves = [new_group([0]), new_group([1])]
    theirs = nn.SyncBatchNorm(3, process_group=halves[rank])
    found: Any = SyncBatchNorm.convert(copy.copy(theirs))
    assert isinstance(found, SyncBatchNorm) and found.group == halves[rank].group_name
    x = torch.randn(4, 3) + rank
    assert torch.equal(found(x), nn.BatchNorm1d(3)(x))
    assert SyncBatchNorm.convert(found, "hybrid").group == "hybrid"


def test_copies_and_torchs_layers_keep_their_processes(cluster: Cluster) -> None:
    cluster.run(copied, 2)


# --- torch's layer between processes -------------------------------------------------------------


def outputs_of_whole(bare: nn.Module, x: Tensor, ranks: list[int], rank: int) -> Tensor:
    """Return the bare module's outputs for this process's part of the batch of some processes."""
    whole: Tensor = bare(torch.cat([x + other for other in ranks]))
    return whole.chunk(len(ranks))[ranks.index(rank)]


@torch.no_grad()
def follow_groups(rank: int, world_size: int, slots: list[str]) -> None:
    halves, two = [new_group([0, 1]), new_group([2])], new_group([1, 2])
    mine, everybody = ([0, 1] if rank < 2 else [2]), [0, 1, 2]
    x = torch.randn(6, 2, dtype=torch.double, device=slots[0])
    alone, ddp = {"process_group": False}, DistributedDataParallel
    cases: list[tuple[Any, dict[str, Any], Any, list[int]]] = [
        (DataParallel, {}, None, everybody),
        (DataParallel, {}, halves[rank == 2], mine),
        # Rank 0 is no member.
        (DataParallel, {"buffers": "mean"}, two, [1, 2] if rank else [0]),
        (ddp, {}, halves[rank == 2], mine),
        # As in torch, the layer's own group counts.
        (ddp, {"process_group": halves[rank == 2]}, None, everybody),
        (ddp, {"buffers": "sync"}, halves[rank == 2], mine),
        (ddp, alone, None, [rank]),
        (ddp, alone, two, [1, 2] if rank else [0]),
    ]
    for wrapper, options, group, ranks in cases:
        bare = norms().to(slots[0])
        for num_slots in (1, len(slots)):
            module = torchs(norms(), group).to(slots[0])
            model = wrapper(module, slots[:num_slots], **options)
            bare.load_state_dict(module.state_dict())
            for _ in range(2):
                expected = outputs_of_whole(bare, x, ranks, rank)
                torch.testing.assert_close(model(x + rank), expected)
            assert_same_state(module, bare)
            # Nobody else evaluates at the same time.
            bare.eval()
            assert_all_close([model.eval()(x[:rank])], [bare(x[:rank])])
            bare.train()
            model.close()
    if rank == 0:
        norm = nn.SyncBatchNorm(2, track_running_stats=False).eval().to(x)
        torch.testing.assert_close(DataParallel(norm, slots)(x), nn.BatchNorm1d(2).to(x)(x))


@pytest.mark.parametrize("slots", [["cpu"] * 2, ["virtual:0", "virtual:1"]])
def test_torchs_layer_keeps_its_processes(cluster: Cluster, slots: list[str]) -> None:
    cluster.run(follow_groups, 3, slots, virtual=slots[0] != "cpu")


def work_alone(rank: int, world_size: int) -> None:
    """Torch's own forward refuses the CPU as soon as there is a process group."""
    x, bare = batch(6)[0], norms()
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        torchs(bare)(x)
    expected = bare(x)
    for wrapper in (DataParallel, DistributedDataParallel):
        for num_replicas in (1, 2):
            torch.testing.assert_close(
                wrapper(torchs(norms()), ["cpu"] * num_replicas)(x), expected
            )
        # One replica does what its own forward says.
        assert torch.equal(wrapper(own_forward(nn.SyncBatchNorm(2)), ["cpu"])(x), x)


def test_torchs_layer_in_one_process_with_a_group(cluster: Cluster) -> None:
    cluster.run(work_alone, 1)


def recompute(rank: int, world_size: int, use_reentrant: bool) -> None:
    bare = norms()
    call = functools.partial(checkpoint, use_reentrant=use_reentrant)
    module = Calls(lambda net, x: call(net.norm, x), norm=torchs(bare))
    model = DistributedDataParallel(module, ["cpu"], average="none")
    x = batch(4 * world_size)[0].requires_grad_()
    bare(x).sin().sum().backward()
    model(x.detach().chunk(world_size)[rank].requires_grad_()).sin().sum().backward()
    assert_all_close([p.grad for p in module.parameters()], [p.grad for p in bare.parameters()])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_one_replica_of_each_process_may_recompute(cluster: Cluster, use_reentrant: bool) -> None:
    cluster.run(recompute, 2, use_reentrant)


def refuse_weights(rank: int, world_size: int) -> None:
    alone = [new_group([0]), new_group([1])]
    with pytest.raises(ValueError, match=r"torch.nn.SyncBatchNorm.*average='samples' do not go"):
        DistributedDataParallel(torchs(norms()), ["cpu"] * 2, average="samples")
    # Nothing of it leaves the process.
    module = torchs(norms(), alone[rank])
    DistributedDataParallel(module, ["cpu"] * 2, average="samples").close()


def test_torchs_layer_and_an_average_over_samples(cluster: Cluster) -> None:
    cluster.run(refuse_weights, 2)
