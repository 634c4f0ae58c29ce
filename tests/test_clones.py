"""Clones: structure, what they share, and what comes back from them to the original."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, DistributedDataParallel, current_replica, replicate
from tests.models import Shared, assert_all_close, grads_of, placed


def compare(
    build: Any, slots: list[str], *shape: int, before: Any = None, replicas: int = 3
) -> tuple[nn.Module, DataParallel[nn.Module]]:
    """Wrapped equals bare on one batch: outputs and gradients."""
    bare = placed(build, slots[0])
    model = DataParallel(placed(build, slots[0]), slots[:replicas])
    x = torch.randn(*shape, dtype=torch.double, device=slots[0])
    results = []
    for module in (bare, model):
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        output.pow(2).sum().backward()
        results.append([output, *grads_of(module)])
    assert_all_close(results[1], results[0])
    return bare, model


def test_shared_modules_and_parameters_stay_shared(slots: list[str]) -> None:
    original = placed(lambda: Shared([0, 1, 0]), slots[0])
    for clone in replicate(original, slots):
        assert clone.layers[0] is clone.layers[2]  # type: ignore[index]
        assert clone.tied.weight is clone.layers[0].weight  # type: ignore[union-attr, index]
        assert len(list(clone.parameters())) == len(list(original.parameters()))
        assert [n for n, _ in clone.named_parameters()] == [
            n for n, _ in original.named_parameters()
        ]
        assert all(isinstance(p, nn.Parameter) for p in clone.parameters())
    compare(lambda: Shared([0, 1, 0]), slots, 6, 4)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True),
        lambda: nn.Sequential(nn.Conv1d(4, 6, 1), nn.Flatten()),
    ],
    ids=["weight_norm", "parametrized", "orthogonal", "lstm", "conv"],
)
def test_kinds_of_modules(build: Any, slots: list[str]) -> None:
    shape = (6, 4) if not isinstance(build(), nn.Sequential) else (6, 4, 5)
    compare(build, slots, *(shape if not isinstance(build(), nn.LSTM) else (6, 5, 4)))


def test_strides_of_parameters_are_kept(slots: list[str]) -> None:
    original = nn.Conv2d(3, 4, 3).to(slots[0], memory_format=torch.channels_last)  # type: ignore[call-overload]
    for clone in replicate(original, slots):
        assert clone.weight.stride() == original.weight.stride()
    model = DataParallel(original, slots)
    model(torch.randn(8, 3, 5, 5, device=slots[0])).sum().backward()
    assert original.weight.grad.stride() == original.weight.stride()


def test_sparse_gradients(slots: list[str]) -> None:
    bare = nn.Embedding(10, 3, sparse=True).to(slots[0])
    inner = copy.deepcopy(bare)
    model = DataParallel(inner, slots)
    x = torch.randint(0, 10, (9,), device=slots[0])
    bare(x).sum().backward()
    model(x).sum().backward()
    assert inner.weight.grad is not None and inner.weight.grad.is_sparse
    assert bare.weight.grad is not None
    torch.testing.assert_close(
        inner.weight.grad.coalesce().to_dense(), bare.weight.grad.coalesce().to_dense()
    )


def test_references_in_attributes_lead_to_the_clone(slots: list[str]) -> None:
    class Refers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.plain_list = [self.first]
            self.bound = self.first.forward
            self.partial = functools.partial(torch.mul, self.first.weight)
            self.table = torch.ones(3)
            self.by_default = lambda x, first=self.first, *, by=self.first.bias: first(x) * by

        def forward(self, x: Tensor) -> Tensor:
            y = self.plain_list[0](x) + self.bound(x) + self.by_default(x)
            output: Tensor = y + self.partial(self.first.weight).sum() + self.table.to(x.dtype)
            return output

    compare(Refers, slots, 6, 3)


def test_hooks_that_are_methods_see_the_clone(slots: list[str]) -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 2.0))
            self.inner = nn.Linear(3, 3)
            self.inner.register_forward_hook(self.rescale)

        def rescale(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * self.scale

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            return output

    compare(Hooked, slots, 6, 3)


class Counting(nn.Module):
    """Installs a hook on its layer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.handle: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        counted: list[int] = []
        if self.handle is None:
            self.handle = self.layer.register_forward_hook(
                lambda layer, inputs, output: layer.counted.append(len(output))
            )
        vars(self.layer)["counted"] = counted
        output = self.layer(x)
        return output, torch.tensor([counted])


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_hooks_that_a_forward_registers_belong_to_its_replica(
    wrapper: Any, slots: list[str]
) -> None:
    model = wrapper(placed(Counting, slots[0]), slots[:2])
    x = torch.randn(6, 4, dtype=torch.double, device=slots[0])
    for _ in range(3):
        output, counted = model(x)
        assert counted.tolist() == [[3], [3]]
        torch.testing.assert_close(output, model.module.layer(x))
        assert len(model.module.layer._forward_hooks) == 1
    model.module.handle.remove()
    assert model(x)[1].shape == (2, 0)
    model.close()


def test_what_replica_0_assigns_is_assigned_to_the_original(slots: list[str]) -> None:
    class Notes(nn.Module):
        aux: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            self.calls = 0
            self.active: nn.Module = self.layers[0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.active = self.layers[self.calls % 2]
            output: Tensor = self.active(x)
            replica = current_replica()
            assert replica is not None
            self.aux = output.sum() + replica.index * 1000
            return output

    original = Notes().to(slots[0])
    model = DataParallel(original, slots)
    output = model(torch.randn(8, 3, device=slots[0]))
    assert original.calls == 1
    assert original.active is original.layers[1]
    torch.testing.assert_close(original.aux, output[:2].sum())
    original.aux.backward()
    assert original.layers[1].weight.grad is not None
    model(torch.randn(8, 3, device=slots[0]))
    assert original.calls == 2
    assert original.active is original.layers[0]


def test_changes_between_forwards_are_followed(slots: list[str]) -> None:
    original = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2)).to(slots[0])
    model = DataParallel(original, slots)
    x = torch.randn(7, 3, device=slots[0])
    for change in (
        lambda: model.eval(),
        lambda: original.append(nn.Linear(2, 2).to(slots[0])),
        lambda: next(original.parameters()).data.mul_(3),
        lambda: setattr(original[2], "bias", None),
        lambda: original[0].requires_grad_(False),
        lambda: setattr(original[0], "weight", nn.Parameter(torch.ones(3, 3, device=slots[0]))),
        lambda: original[3].register_forward_hook(lambda m, i, o: o + 1),
        lambda: nn.utils.vector_to_parameters(
            torch.ones(sum(p.numel() for p in model.parameters()), device=slots[0]),
            model.parameters(),
        ),
    ):
        change()
        torch.testing.assert_close(model(x), original(x))
        with torch.no_grad():
            torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_other_names_of_the_same_objects_are_followed(wrapper: Any, slots: list[str]) -> None:
    class Named(nn.Module):
        scale: Tensor
        factor: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(3, 3)})
            self.register_buffer("scale", torch.full((3,), 2.0))
            self.once = True

        def forward(self, x: Tensor) -> Tensor:
            y = x * (1 if hasattr(self, "once") else 5)
            y = y * self.scale if hasattr(self, "scale") else y / self.factor
            result: Tensor = self.parts["a"](y) if "a" in self.parts else -self.parts["b"](y)
            return result

    original: Any = Named().to(slots[0])
    model = wrapper(original, slots)
    x = torch.randn(8, 3, device=slots[0])

    def rename_attribute() -> None:
        del original.once
        original.twice = True

    def rename_buffer() -> None:
        scale = original.scale
        del original.scale
        original.register_buffer("factor", scale)

    def rename_child() -> None:
        original.parts["b"] = original.parts.pop("a")

    torch.testing.assert_close(model(x), original(x))
    for change in (rename_attribute, rename_buffer, rename_child):
        change()
        torch.testing.assert_close(model(x), original(x))
    model.close()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale: Any = getattr(self.weight, "scale", 1)
        output: Tensor = super().forward(x) * scale
        return output


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_another_registry_of_parameters_is_followed(wrapper: Any, slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(slots[0])
    model = wrapper(net, slots)
    x = torch.randn(4, 2, device=slots[0])
    model(x)
    net[1].__dict__["_parameters"] = dict(nn.Linear(2, 1).to(slots[0])._parameters)
    torch.testing.assert_close(model(x), net(x))
    model.close()


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_classes_of_modules_and_attributes_of_parameters_are_followed(
    wrapper: Any, slots: list[str]
) -> None:
    original: Any = nn.Sequential(nn.Linear(3, 3), Scaled(3, 3)).to(slots[0])
    weight = original[1].weight
    model = wrapper(original, slots)
    x = torch.randn(8, 3, device=slots[0])
    torch.testing.assert_close(model(x), original(x))
    for change in (
        lambda: setattr(original[0], "__class__", Doubled),
        lambda: setattr(weight, "scale", torch.full((3,), 2.0, device=slots[0])),
        lambda: weight.scale.mul_(3),
        lambda: setattr(weight, "scale", 5),
        lambda: delattr(weight, "scale"),
    ):
        change()
        torch.testing.assert_close(model(x), original(x))
    model.close()


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_a_container_of_any_kind_that_is_filled_later_is_followed(
    wrapper: Any, slots: list[str]
) -> None:
    class Late(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.found = collections.defaultdict[str, list[Any]](list)

        def forward(self, x: Tensor) -> Tensor:
            parts = list(self.found["parts"]) if self.found else []
            return super().forward(x) * sum([part.sum() for part in parts], torch.ones(()).to(x))

    original = Late().to(slots[0])
    model = wrapper(original, slots)
    x = torch.randn(8, 3, device=slots[0])
    torch.testing.assert_close(model(x), original(x))
    original.found["parts"].append(original.weight)
    torch.testing.assert_close(model(x), original(x))
    model.close()


def test_parameters_written_in_forward_are_an_error_and_nothing_is_stale(slots: list[str]) -> None:
    class Clamps(nn.Linear):
        clamping = True

        def forward(self, x: Tensor) -> Tensor:
            if self.clamping:
                with torch.no_grad():
                    self.weight.clamp_(-0.01, 0.01)
            return super().forward(x)

    module = Clamps(3, 3).to(slots[0])
    model = DataParallel(module, slots)
    x = torch.randn(8, 3, device=slots[0])
    with pytest.raises(RuntimeError, match="changed parameters in place: weight"):
        model(x)
    module.clamping = False
    torch.testing.assert_close(model(x), module(x))


class Forgetting(nn.Module):
    """Has a buffer and an attribute until its first forward."""

    first: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.start = "now"
        self.register_buffer("first", torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if hasattr(self, "first"):
            output = output + self.first
            del self.first, self.start
        self.count = self.count + 1
        return output


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_what_replica_0_deletes_is_deleted_from_the_original(
    wrapper: Any, slots: list[str]
) -> None:
    model = wrapper(Forgetting().to(slots[0]), slots[:2])
    x = torch.ones(4, 3, device=slots[0])
    before, after = model(x), model(x)
    assert_all_close([before.detach() - after.detach()], [torch.ones(4, 2, device=slots[0])])
    assert [name for name, _ in model.module.named_buffers()] == ["count"]
    assert model.module.count.item() == 2
    assert not hasattr(model.module, "start")


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_replicas_that_the_user_has_taken_are_no_concern_of_a_forward(wrapper: Any) -> None:
    net = nn.Linear(3, 2)
    model = wrapper(net, ["cpu"])
    taken = model.replicate(net, model.device_ids)
    with torch.no_grad():
        net.weight.add_(1)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    loss = model.loss(nn.MSELoss(), x, y)
    assert_all_close([loss], [nn.functional.mse_loss(net(x), y)])
    assert_all_close([taken[0](x)], [net(x)])


def test_an_uninitialized_module_is_a_clear_error(slots: list[str]) -> None:
    model = DataParallel(nn.LazyLinear(3, device=slots[0]), slots)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        model(torch.randn(8, 3, device=slots[0]))


def test_replicas_can_be_pickled(slots: list[str]) -> None:
    original = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(slots[0])
    for replica in replicate(original, slots[:2]):
        again = pickle.loads(pickle.dumps(replica))
        assert_all_close(again.state_dict().values(), replica.state_dict().values())


def test_a_detached_replica_has_no_edges(slots: list[str]) -> None:
    original = nn.Linear(3, 3).to(slots[0])
    for replica in replicate(original, slots, detach=True):
        assert not replica(torch.randn(2, 3, device=replica.weight.device)).requires_grad


def test_a_failed_forward_leaves_nothing_behind(slots: list[str]) -> None:
    class Fails(nn.Linear):
        failing = True

        def forward(self, x: Tensor) -> Tensor:
            replica = current_replica()
            if self.failing and replica is not None and replica.index == 1:
                raise KeyError("lost")
            return super().forward(x)

    bare = Fails(3, 3).to(slots[0])
    module = copy.deepcopy(bare)
    model = DataParallel(module, slots)
    x = torch.randn(8, 3, device=slots[0])
    with pytest.raises(KeyError, match=r"(?s)lost.*in replica 1 on device"):
        model(x)
    module.failing = False
    model(x).sum().backward()
    bare(x).sum().backward()
    assert_all_close(grads_of(module), grads_of(bare))
