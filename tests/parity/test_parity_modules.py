"""What torch promises of replicas and of modules that cannot be wrapped."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, data_parallel, replicate


def linear(device: str = "cpu") -> nn.Linear:
    return nn.Linear(2, 2).to(device, torch.float64)


# --- where the module must be ----------------------------------------------------------------


def misplaced(name: str) -> nn.Module:
    """Modules of which some part is not on virtual:0."""
    modules: dict[str, Callable[[], nn.Module]] = {
        "on the CPU": lambda: linear(),
        "on another device": lambda: linear("virtual:1"),
        "a child on the CPU": lambda: nn.Sequential(linear("virtual:0"), linear()),
        "a child on another device": lambda: nn.Sequential(
            linear("virtual:0"), linear("virtual:1")
        ),
        "a buffer on the CPU": lambda: nn.Sequential(linear("virtual:0"), nn.BatchNorm1d(2)),
    }
    return modules[name]()


@pytest.mark.parametrize(
    "name",
    [
        "on the CPU",
        "on another device",
        "a child on the CPU",
        "a child on another device",
        "a buffer on the CPU",
    ],
)
def test_data_parallel_model_device(name: str) -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    net = misplaced(name)
    with pytest.raises(ValueError, match="the module must be on virtual:0"):
        data_parallel(net, x, ["virtual:0", "virtual:1"])
    model = DataParallel(net, ["virtual:0", "virtual:1"])
    # What is on the CPU as a whole was moved, on purpose.
    if name != "on the CPU":
        with pytest.raises(ValueError, match="the module must be on virtual:0"):
            model(x)
    model.eval().to("virtual:0", torch.float64)
    torch.testing.assert_close(model(x), net(x.to("virtual:0")))


def test_the_first_of_the_devices_is_the_one_that_counts() -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    net = linear("virtual:1")
    assert DataParallel(net, ["virtual:1", "virtual:0"])(x).device == torch.device("virtual:1")
    with pytest.raises(ValueError, match="'weight' is on virtual:1; 'bias' is on"):
        DataParallel(net, ["virtual:0", "virtual:1"])(x)


def test_data_parallel_lazy_linear(slots: list[str]) -> None:
    net = nn.Sequential(nn.LazyLinear(3, device=slots[0]), nn.LazyLinear(2, device=slots[0]))
    model = DataParallel(net, slots)
    x = torch.randn(6, 4, device=slots[0])
    with pytest.raises(ValueError, match="uninitialized parameter"):
        model(x)
    net(x)
    torch.testing.assert_close(model(x), net(x))


def test_data_parallel_model_no_refcycles(slots: list[str]) -> None:
    model = DataParallel(linear(slots[0]), slots)
    x = torch.randn(8, 2, dtype=torch.float64)
    model(x).sum().backward()  # threads and clones are made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            model(x).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_zero_grad_in_a_replica(slots: list[str]) -> None:
    """torch warns that it has no effect."""

    class Zeroing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.zero_grad()
            return super().forward(x)

    model = DataParallel(Zeroing(3, 2).to(slots[0]), slots)
    x = torch.randn(6, 3, device=slots[0])
    with pytest.warns(UserWarning, match=r"Calling \.zero_grad\(\) from a module created with"):
        model(x)


# --- replicas --------------------------------------------------------------------------------


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("detach", [False, True])
def test_replicate(slots: list[str], container: Any, detach: bool) -> None:
    net = linear(slots[0])
    x = torch.randn(3, 2, dtype=torch.float64)
    replicas = replicate(net, container(slots), detach)
    assert len(replicas) == 4
    for slot, replica in zip(slots, replicas, strict=True):
        assert type(replica) is nn.Linear
        assert [p.device for p in replica.parameters()] == [torch.device(slot)] * 2
        torch.testing.assert_close(replica(x.to(slot)).cpu(), net(x.to(slots[0])).cpu())
    total = sum(
        replica(x.to(slot)).sum().cpu()
        for slot, replica in zip(slots[1:], replicas[1:], strict=True)
    )
    assert isinstance(total, Tensor)
    assert total.requires_grad is not detach
    if not detach:
        (grad,) = torch.autograd.grad(total, net.weight)
        torch.testing.assert_close(grad.cpu(), 3 * x.sum(0).expand(2, 2))


def test_replicate_buffers(slots: list[str]) -> None:
    net = nn.Module()
    net.bn = nn.BatchNorm2d(10)
    net.to(slots[0])
    for slot, replica in zip(slots, replicate(net, slots), strict=True):
        buffers = dict(replica.named_buffers())
        assert list(buffers) == ["bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]
        assert {buffer.device for buffer in buffers.values()} == {torch.device(slot)}


@pytest.mark.parametrize("detach", [False, True])
def test_save_replica_module(slots: list[str], detach: bool) -> None:
    net = linear(slots[0])
    replicas = replicate(net, slots, detach=detach)
    file = io.BytesIO()
    torch.save(replicas, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for replica, again in zip(replicas, loaded, strict=True):
        torch.testing.assert_close(again.weight, replica.weight, check_device=True)
    assert len(pickle.loads(pickle.dumps(replicas))) == 4


def test_script_modules_are_refused(slots: list[str]) -> None:
    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            trace: Any = torch.jit.trace
            self.inner = trace(nn.Linear(2, 2), torch.ones(1, 2), check_trace=False)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        net = Traced()
    with pytest.raises(TypeError, match="'inner'"):
        replicate(net.to(slots[0]), slots)


# --- autocast --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_the_modules_own_forward(slots: list[str], dtype: torch.dtype) -> None:
    kind = torch.device(slots[0]).type

    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(kind, dtype=dtype):
                return super().forward(x)

    model = DataParallel(Casting(8, 8).to(slots[0]), slots)
    x = torch.randn(8, 8, device=slots[0])
    assert model(x).dtype is dtype
    torch.testing.assert_close(model(x), model.module(x))
    assert not torch.is_autocast_enabled(kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_the_caller(slots: list[str], dtype: torch.dtype) -> None:
    kind = torch.device(slots[0]).type
    net = nn.Linear(8, 8).to(slots[0])
    model = DataParallel(net, slots)
    x = torch.randn(8, 8, device=slots[0])
    with torch.autocast(kind, dtype=dtype):
        out = model(x)
        expected = net(x)
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected)
    assert model(x).dtype is torch.float32
