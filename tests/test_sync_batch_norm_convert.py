"""Conversion of ordinary batch norm layers into synchronized ones."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dataparallel import DataParallel
from dataparallel.collectives import LocalGroup, SyncBatchNorm


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3


class OwnDefaults(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=0.5, momentum=0.3)


class Tree(nn.Module):
    """Layers of all kinds, one of them in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = nn.Sequential(nn.BatchNorm2d(3))
        self.first = nn.Sequential(nn.Conv2d(3, 3, 1), self.nested)
        self.shared = nn.BatchNorm1d(4, momentum=None)
        self.again = nn.ModuleList([self.shared, nn.BatchNorm3d(5, affine=False)])
        self.third = self.shared
        self.theirs = nn.SyncBatchNorm(6, track_running_stats=False)
        self.mine = OwnDefaults(7)
        self.other = nn.InstanceNorm1d(8, affine=True)


def test_every_layer_becomes_synchronized_and_stays_the_same_otherwise() -> None:
    tree = Tree()
    names = [name for name, _ in tree.named_modules(remove_duplicate=False)]
    tensors = {id(tensor) for tensor in (*tree.parameters(), *tree.buffers())}
    tree.nested.eval()
    found = SyncBatchNorm.convert(tree)
    assert found is tree
    assert [name for name, _ in tree.named_modules(remove_duplicate=False)] == names
    assert {id(tensor) for tensor in (*tree.parameters(), *tree.buffers())} == tensors
    layers = [part for part in tree.modules() if isinstance(part, SyncBatchNorm)]
    assert [layer.num_features for layer in layers] == [3, 4, 5, 6, 7]
    assert [layer.training for layer in layers] == [False, True, True, True, True]
    assert tree.shared is tree.again[0] is tree.third
    assert (layers[4].eps, layers[4].momentum) == (0.5, 0.3)
    without = (layers[1].momentum, layers[2].affine, layers[3].running_mean)
    assert without == (None, False, None)
    assert type(tree.other) is nn.InstanceNorm1d
    assert {layer.group for layer in layers} == {"hybrid"}
    assert "group='hybrid'" in repr(layers[0])


def test_a_single_layer_and_the_name_of_torch() -> None:
    layer = nn.BatchNorm2d(3, dtype=torch.bfloat16, device="virtual:1")
    found: Any = SyncBatchNorm.convert_sync_batchnorm(layer, "local")
    assert found is layer and isinstance(found, SyncBatchNorm) and found.group == "local"
    assert found.weight.dtype == torch.bfloat16 and found.weight.device.index == 1
    group = LocalGroup(5.0)
    assert SyncBatchNorm.convert(layer, group) is layer and found.group is group
    # Without a group the layer keeps the one it has.
    assert SyncBatchNorm.convert(layer) is layer and found.group is group


def test_hooks_stay() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    seen: list[str] = []

    def before_load(module: nn.Module, *_: Any) -> None:
        seen.append(type(module).__name__)

    handle = net[0].register_forward_hook(lambda *_: seen.append("forward"))
    net[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    net[0].register_load_state_dict_pre_hook(before_load)
    SyncBatchNorm.convert(net)
    net(torch.randn(4, 3, requires_grad=True)).sum().backward()
    net.load_state_dict(net.state_dict())
    assert seen == ["forward", "backward", "SyncBatchNorm"]
    handle.remove()
    net(torch.randn(4, 3))
    assert len(seen) == 3


def test_the_state_loads_into_the_original_and_back() -> None:
    original = Tree()
    tree = SyncBatchNorm.convert(copy.deepcopy(original), "local")
    with torch.no_grad():
        for tensor in tree.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 9)
    original.load_state_dict(tree.state_dict())
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, tree.state_dict()[name]), name
    fresh = SyncBatchNorm.convert(Tree())
    fresh.load_state_dict(original.state_dict())
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name]), name


def test_copies_and_files() -> None:
    layer = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(3)), "local")
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert (type(each[0]), each[0].group) == (SyncBatchNorm, "local")
        assert torch.equal(each(torch.ones(2, 3)), layer(torch.ones(2, 3)))


def test_within_a_wrapper_that_exists_already(slots: list[str]) -> None:
    with torch.device(slots[0]):
        bare = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = DataParallel(copy.deepcopy(bare), slots)
    x = torch.randn(8, 3, device=slots[0])
    model(x)
    model.load_state_dict(bare.state_dict())
    SyncBatchNorm.convert(model)
    torch.testing.assert_close(model(x), bare(x))


def test_all_layers_that_cannot_be_converted_are_named_and_none_is() -> None:
    patched = nn.BatchNorm1d(3)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    parametrized = nn.BatchNorm1d(3)
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    net = nn.Sequential(
        nn.BatchNorm1d(3), OwnForward(3), patched, nn.LazyBatchNorm1d(), parametrized
    )
    pattern = (
        r"'1' \(OwnForward\) has a forward of its own; use a layer of torch.nn; "
        r"'2' \(BatchNorm1d\) has a forward of its own.*; "
        r"'3' \(LazyBatchNorm1d\) .*run a forward first; and 1 more"
    )
    with pytest.raises(TypeError, match=pattern):
        SyncBatchNorm.convert(net)
    assert type(net[0]) is nn.BatchNorm1d
    with pytest.raises(TypeError, match=r"is parametrized; convert it before"):
        SyncBatchNorm.convert(net[3:])
    with pytest.raises(TypeError, match=r"'' \(OwnForward\)"):
        SyncBatchNorm.convert(OwnForward(3))
