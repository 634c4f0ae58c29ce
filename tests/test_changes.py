"""Changes that somebody makes in a module between two forwards, and the cost of noticing them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, virtual
from dataparallel.comm import checksum
from dataparallel.replicas import values
from tests.models import WRAPPERS

DEVICES = ["virtual:0", "virtual:1"]

Wrapper = Callable[..., nn.Module]


def assert_current(model: nn.Module, module: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(model(x), module(x))


# --- parts and attributes of the module ------------------------------------------------------


class Scaled(nn.Linear):
    """Looks at attributes of its parameter, and at its own."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.found = collections.defaultdict[str, list[Any]](list)
        self.once = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * getattr(self.weight, "scale", 1)
        parts = list(self.found["parts"]) if self.found else []
        y = y * sum([part.sum() for part in parts], torch.ones(()).to(y))
        return y if hasattr(self, "once") else y * 5


class Named(nn.Module):
    """Looks for its buffer and for its child by their names."""

    scale: Tensor
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(3, 3)})
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale if hasattr(self, "scale") else x / self.factor
        result: Tensor = self.parts["a"](y) if "a" in self.parts else -self.parts["b"](y)
        return result


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def changes(net: Any, device: str) -> Iterator[Callable[[], object]]:
    """Yield changes of one thing each in a net of a linear layer, dropout, Scaled and Named."""
    linear, scaled, named = net[0], net[2], net[3]

    def rename(table: Any, old: str, new: str) -> Callable[[], object]:
        return lambda: table.__setitem__(new, table.pop(old))

    yield lambda: net.eval()
    yield lambda: net.append(nn.Linear(3, 3).to(device))
    yield lambda: setattr(linear, "bias", None)
    yield lambda: linear.requires_grad_(False)
    yield lambda: setattr(linear, "weight", nn.Parameter(torch.ones(3, 3, device=device)))
    yield lambda: linear.register_forward_hook(lambda m, i, o: o + 1)
    yield lambda: setattr(linear, "__class__", Doubled)
    yield lambda: vars(linear).update(_parameters=dict(nn.Linear(3, 3).to(device)._parameters))
    yield lambda: nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, sum(p.numel() for p in net.parameters()), device=device),
        net.parameters(),
    )
    yield lambda: setattr(scaled.weight, "scale", torch.full((3,), 2.0, device=device))
    yield lambda: scaled.weight.scale.mul_(3)
    yield lambda: setattr(scaled.weight, "scale", 5)
    yield lambda: delattr(scaled.weight, "scale")
    yield lambda: scaled.found["parts"].append(scaled.weight)
    # Other names of the same objects.
    yield rename(vars(scaled), "once", "twice")
    yield rename(named._buffers, "scale", "factor")
    yield rename(named.parts._modules, "a", "b")


@WRAPPERS
def test_parts_and_attributes(wrapper: Any, slots: list[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), Scaled(), Named()).to(slots[0])
    model = wrapper(net, slots)
    x = torch.randn(7, 3, device=slots[0])
    model(x)
    for change in changes(net, slots[0]):
        change()
        assert_current(model, net, x)
        with torch.no_grad():
            assert_current(model, net, x)
    model.close()


# --- values ----------------------------------------------------------------------------------


class DataOptimizer(torch.optim.Optimizer):
    """Writes through ``.data``, which bumps no version counter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "storage": lambda weight: setattr(weight, "data", torch.full_like(weight, 7.0)),
    "one element": lambda weight: weight.data[1, 2].add_(1e-6),
    "signs": lambda weight: weight.data.neg_(),
    "rows": lambda weight: weight.data.copy_(weight.data.flip(0).clone()),
    "step": lambda weight: DataOptimizer([weight]).step(),
}


@pytest.mark.in_pairs
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("looks_before", [1, 3])
@WRAPPERS
def test_values_that_somebody_writes_are_in_the_next_forward(
    wrapper: Wrapper, name: str, looks_before: int
) -> None:
    module = nn.Linear(3, 2).to(DEVICES[0])
    model = wrapper(module, DEVICES)
    x = torch.eye(3, device=DEVICES[0]).repeat(2, 1)
    for _ in range(looks_before):
        model(x)
    with torch.no_grad():
        WRITES[name](module.weight)
    torch.testing.assert_close(model(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [2, 3])
@WRAPPERS
def test_a_write_is_seen_by_replicas_that_a_smaller_batch_left_out(
    wrapper: Wrapper, rows: int
) -> None:
    module = nn.Linear(3, 2).to(DEVICES[0])
    model = wrapper(module, [f"virtual:{i}" for i in range(4)])
    x = torch.randn(4, 3, device=DEVICES[0])
    assert_current(model, module, x)
    module.weight.data.neg_()
    assert_current(model, module, x[:rows])
    assert_current(model, module, x)


def test_a_graph_keeps_the_values_that_it_was_made_with() -> None:
    module = nn.Linear(3, 2, bias=False).to(DEVICES[0])
    model = DataParallel(module, DEVICES)
    x = torch.randn(4, 3, device=DEVICES[0], requires_grad=True)
    expected = torch.ones(4, 2) @ module.weight.detach().cpu()
    output = model(x).sum()
    module.weight.data = module.weight.data * 2
    model(x)
    output.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[2:].cpu(), expected[2:])


def test_a_write_beside_a_sparse_tensor() -> None:
    net = nn.Linear(3, 3).to(DEVICES[0])
    table = torch.eye(3, device=DEVICES[0]).to_sparse_coo()
    net.register_buffer("table", table)
    net.register_forward_hook(lambda module, args, output: output @ module.table.to_dense())
    model, x = DataParallel(net, DEVICES), torch.randn(4, 3, device=DEVICES[0], requires_grad=True)
    with torch.inference_mode():
        assert_current(model, net, x)
    # A copy that was made in inference mode takes part in training.
    model(x).sum().backward()
    for value in (5.0, 6.0, 7.0):
        for written in (net.bias, table._values()):
            written.data.fill_(value)
            assert_current(model, net, x)


# --- what it costs ---------------------------------------------------------------------------


@WRAPPERS
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_copies_as_often_however_many_layers_there_are(
    wrapper: Wrapper, frozen: bool
) -> None:
    counts = set()
    for num_layers in (4, 12):
        module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(num_layers)]).to(DEVICES[0])
        module[1].requires_grad_(not frozen)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        model, x = wrapper(module, DEVICES), torch.randn(4, 3, device=DEVICES[0])
        for _ in range(5):
            virtual.reset_counters()
            optimizer.zero_grad()
            model(x).sum().backward()
            counted = virtual.counters()["copies_device_to_device"]
            optimizer.step()
        assert_current(model, module, x)
        counts.add(counted)
    # A chunk there; parameters; an output, and gradients of outputs and of parameters.
    assert counts == {5}


# --- writes that leave no trace, once the host does not wait any more ------------------------


def build(
    wrapper: Wrapper, devices: list[str] = DEVICES, *, train: bool = False, forwards: int = 12
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a module, its wrapper after some forwards, and a batch."""
    norm = nn.LayerNorm(4) if train else nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)).to(devices[0])
    model, x = wrapper(module, devices).train(train), torch.randn(6, 3, device=devices[0])
    for _ in range(forwards):
        model(x)
    torch.accelerator.synchronize(torch.device(DEVICES[0]))
    return module, model, x


def write(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(1.5)


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_no_forward_waits_for_a_device(wrapper: Wrapper, train: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        _, model, x = build(wrapper, train=train)
        virtual.reset_counters()
        for _ in range(5):
            model(x)
    assert virtual.counters()["host_waits"] == 0


@WRAPPERS
@pytest.mark.parametrize("is_error", [False, True])
def test_a_write_is_told_of_a_forward_late(wrapper: Wrapper, is_error: bool) -> None:
    module, model, x = build(wrapper)
    write(module)
    model(x)
    torch.accelerator.synchronize(torch.device(DEVICES[0]))
    text = r"written through \.data.*in one forward or more"
    if is_error:
        with pytest.raises(UserWarning, match=text):
            model(x)
    else:
        with pytest.warns(UserWarning, match=text):
            assert_current(model, module, x)
    assert_current(model, module, x)


def test_a_large_model_is_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def reading(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        read.append(sum(tensor.nbytes for tensor in tensors))
        return checksum.checksum(tensors, others)

    monkeypatch.setattr(values, "_PART_BYTES", 400)
    layers = [nn.Linear(8, 8) for _ in range(24)]
    module = nn.Sequential(*layers).to(DEVICES[0])
    model, x = DataParallel(module.requires_grad_(False), DEVICES), torch.randn(6, 8).to(DEVICES[0])
    for _ in range(12):
        model(x)
    monkeypatch.setattr(values, "checksum", reading)
    size, part = sum(p.nbytes for p in module.parameters()), 24 * 288 // 16
    for _ in range(16):
        read.clear()
        model(x)
        assert sum(read) <= 2 * (part + 256)
        torch.accelerator.synchronize(torch.device(DEVICES[0]))
    for written in (layers[0].weight, layers[11].bias, layers[23].bias):
        written.data.mul_(2)
        with pytest.warns(UserWarning, match=r"written through \.data"):
            for _ in range(18):
                model(x)
                torch.accelerator.synchronize(torch.device(DEVICES[0]))
        assert_current(model, module, x)
    read.clear()
    model.train(not model.training)(x)
    assert size <= sum(read) <= 2 * size


@WRAPPERS
def test_a_write_is_seen_where_a_replica_was_not_used_before(wrapper: Wrapper) -> None:
    """The batch before had fewer samples than there are devices."""
    devices = [f"virtual:{i}" for i in range(3)]
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(devices[0])
    model, x = wrapper(module, devices), torch.randn(6, 3, device=devices[0])
    model(x[:2])
    write(module)
    assert_current(model, module, x)


@WRAPPERS
def test_a_write_is_seen_at_once_where_it_costs_nothing(wrapper: Wrapper) -> None:
    """Weights are swapped in for an evaluation, or the originals are on the CPU."""
    module, model, x = build(wrapper, train=True)
    for training in (False, True, False):
        write(module)
        model.train(training)
        assert_current(model, module, x)
    for forwards in (1, 12):
        module, model, x = build(wrapper, ["cpu", "virtual:0"], forwards=forwards)
        write(module)
        assert_current(model, module, x)
    # The statistics that batch norm has written in training are there, too.
    module, model, x = build(wrapper)
    model.train()(x)
    assert_current(model.eval(), module, x)


def test_an_answer_of_the_device_is_read_however_far_ahead_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, model, x = build(DataParallel)
    events: list[mock.Mock] = []

    def to_host_later(value: Tensor) -> tuple[Tensor, mock.Mock]:
        events.append(mock.Mock(query=mock.Mock(return_value=False)))
        return value, events[-1]

    model(x)
    torch.accelerator.synchronize(torch.device(DEVICES[0]))
    monkeypatch.setattr("dataparallel.devices.to_host_later", to_host_later)
    write(module)
    for _ in range(3):
        model(x)
    for event in events:
        event.query.return_value = True
    with pytest.warns(UserWarning, match=r"written through \.data"):
        assert_current(model, module, x)
