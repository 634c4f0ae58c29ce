"""The making of tensors, their moves, copies and saves, and refusals."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import strict_mode
from tests.virtual.oracle import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_factories_use_the_named_or_the_current_device(dtype: torch.dtype) -> None:
    virtual.set_device(2)
    for made in (
        torch.empty(3, dtype=dtype, device="virtual"),
        torch.zeros(3, dtype=dtype, device="virtual"),
        torch.full((3,), 1, dtype=dtype, device="virtual"),
        torch.tensor([0, 1], dtype=dtype, device="virtual"),
    ):
        assert made.device == torch.device("virtual:2")
        assert made.dtype == dtype
    for function, arguments in (
        (torch.arange, (5,)),
        (torch.eye, (3,)),
        (torch.linspace, (0, 1, 4)),
    ):
        made = function(*arguments, device="virtual:3")
        assert made.device == torch.device("virtual:3")
        torch.testing.assert_close(made.cpu(), function(*arguments))
    with torch.device("virtual:3"):
        assert torch.ones(2).device == torch.device("virtual:3")


def test_generated_methods() -> None:
    a = torch.ones(2)
    assert not a.is_virtual  # type: ignore[attr-defined]
    assert a.virtual(2).device == torch.device("virtual:2")  # type: ignore[attr-defined]
    assert a.virtual().is_virtual  # type: ignore[attr-defined]
    assert torch.nn.Linear(2, 2).virtual(1).weight.device == torch.device("virtual:1")  # type: ignore[operator]
    assert a.untyped_storage().virtual().device == torch.device("virtual:0")  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    parameter.data = torch.zeros(3, device="virtual:2")
    assert (parameter.device, parameter.shape) == (torch.device("virtual:2"), (3,))


def test_deep_copy_and_pickle() -> None:
    a = torch.randn(3, device=DEVICE, requires_grad=True)
    module = torch.nn.Linear(2, 2).to(DEVICE)
    for duplicate in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        copied = duplicate(a)
        assert (copied.device, copied.requires_grad) == (a.device, True)
        assert copied.data_ptr() != a.data_ptr()
        torch.testing.assert_close(copied, a)
        torch.testing.assert_close(duplicate(module).weight, module.weight)


def test_save_and_load(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(3).to(DEVICE)
    path = tmp_path / "state.pt"
    torch.save(module.state_dict(), path)
    assert torch.load(path)["weight"].device == torch.device(DEVICE)
    for target in ("cpu", "virtual:2"):
        loaded = torch.load(path, map_location=target, weights_only=True)
        assert loaded["running_mean"].device == torch.device(target)
        torch.testing.assert_close(loaded["weight"].cpu(), torch.ones(3))
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(3)}, buffer)
    buffer.seek(0)
    on_device = torch.load(buffer, map_location="virtual:3")["a"]
    assert on_device.device == torch.device("virtual:3")
    module.load_state_dict(torch.load(path, map_location="cpu"))


def test_what_looks_at_a_tensor_sees_its_values() -> None:
    a = torch.tensor([1.5, 2.5], device=DEVICE)
    assert repr(a) == "tensor([1.5000, 2.5000], device='virtual:1')"
    torch.testing.assert_close(a, a.clone())
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(a, a + 1)


def test_what_of_the_cpu_mixes() -> None:
    half = torch.tensor(0.5, dtype=torch.float64)
    a = torch.ones(3, 3, device=DEVICE) * half + 1
    assert a.dtype == torch.float32
    torch.testing.assert_close(a.cpu(), torch.full((3, 3), 1.5))
    b = torch.arange(6.0, device=DEVICE)
    assert b[torch.tensor([1, 3])].tolist() == [1.0, 3.0]
    b[torch.tensor([0])] = 9.0
    assert b[0].item() == 9.0


def test_an_output_that_is_resized_is_warned_of() -> None:
    a = torch.ones(2, 3, device=DEVICE)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(a, a, out=torch.ones(2, device=DEVICE))


def written_before_backward(a: Tensor, b: Tensor) -> None:
    doubled = a.requires_grad_() * 2
    loss = doubled.square().sum()
    doubled.add_(1)
    loss.backward()


MIXED = "on the same device, but found at least two devices, virtual:0 and virtual:1!"
WITH_CPU = "at least two devices, virtual:0 and cpu!"
GENERATOR = "Expected a 'virtual:0' generator but found one for "
#: The refused calls of tensors on virtual:0 and virtual:1, and their errors.
REFUSED: list[tuple[str, Callable[[Tensor, Tensor], object]]] = [
    (MIXED, lambda a, b: a + b),
    (MIXED, lambda a, b: a.add_(b)),
    (MIXED, lambda a, b: a @ b),
    (MIXED, lambda a, b: torch.cat([a, b])),
    (MIXED, lambda a, b: a[b.long()]),
    (MIXED, lambda a, b: torch.add(a, a, out=b)),
    (MIXED, lambda a, b: F.conv2d(a[None, None], b[None, None])),
    (WITH_CPU, lambda a, b: a + torch.ones(2, 2)),
    (WITH_CPU, lambda a, b: torch.mm(torch.ones(2, 2), a)),
    ("same device", lambda a, b: a.to_sparse() + b.to_sparse()),
    (
        r"device of indices \(virtual:0\)|same device",
        lambda a, b: torch.sparse_coo_tensor(a[:1].long(), b[0], (3,)),
    ),
    ("SparseCsr.*virtual|virtual.*SparseCsr", lambda a, b: a.to_sparse_csr()),
    ("different device", lambda a, b: a.set_(torch.ones(2).untyped_storage())),
    ("modified by an inplace operation", written_before_backward),
    ("cannot be broadcast", lambda a, b: a.copy_(torch.ones(4))),
    (
        "_cudnn_rnn_flatten_weight",
        lambda a, b: torch._cudnn_rnn_flatten_weight([a], 1, 1, 1, 1, 1, 1, False, False),
    ),
    ("there is no device virtual:9: 4 virtual dev", lambda a, b: torch.ones(2, device="virtual:9")),
    (GENERATOR, lambda a, b: a.uniform_(generator=torch.Generator("virtual:1"))),
    (GENERATOR + "'cpu'", lambda a, b: a.uniform_(generator=torch.Generator())),
    (
        "Expected a 'cpu' device type for generator",
        lambda a, b: torch.empty(3).uniform_(generator=torch.Generator("virtual:1")),
    ),
]


@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
def test_operators_and_generators_of_other_devices_are_refused(strict: bool) -> None:
    with strict_mode(strict):
        for message, call in REFUSED:
            a, b = torch.ones(2, 2, device="virtual:0"), torch.ones(2, 2, device="virtual:1")
            with pytest.raises((RuntimeError, NotImplementedError), match=message):
                call(a, b)
        with pytest.raises(TypeError, match="can't convert virtual:0 device type tensor to numpy"):
            a.numpy()
