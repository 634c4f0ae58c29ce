"""Identity, views, version counters, storage and strides."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch

import dataparallel.virtual
from tests.virtual.oracle import DEVICE


@pytest.mark.parametrize("strict", [False, True])
def test_out_is_resized(strict: bool) -> None:
    a = torch.arange(6.0, device=DEVICE).view(2, 3)
    with dataparallel.virtual.strict_mode(strict):
        out = torch.empty(0, device=DEVICE)
        assert torch.mm(a, a.t(), out=out) is out and a.add_(0) is a
        values, indices = torch.empty(0, device=DEVICE), torch.empty(0, device=DEVICE).long()
        torch.sort(a, 1, True, out=(values, indices))
        torch.testing.assert_close(out.cpu(), a.cpu() @ a.cpu().t())
        torch.testing.assert_close(indices.cpu(), torch.tensor([[2, 1, 0]] * 2))
        torch.testing.assert_close(values.cpu(), a.cpu().flip(1))
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(a, a, out=torch.ones(2, device=DEVICE))


def test_version_counters() -> None:
    a = torch.zeros(4, device=DEVICE)
    view = a.view(2, 2)
    assert (a._version, view._version) == (0, 0)
    view.add_(1)
    assert (a._version, view._version) == (1, 1)
    torch.mul(a, 2, out=a)
    assert (a._version, view._version) == (2, 2)
    _ = a + 1
    assert a._version == 2
    assert a.detach()._version == 2
    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    saved = leaf * 2
    loss = saved.square().sum()
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_views_share_storage() -> None:
    a = torch.arange(12.0, device=DEVICE)
    for view in (a.view(3, 4), a[2:5], a.view(3, 4).t(), a.view(2, 6).unfold(1, 2, 2), a.detach()):
        assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    view = a.view(3, 4).t()[1]
    view.zero_()
    torch.testing.assert_close(a[1::4].cpu(), torch.zeros(3))
    assert view._base is a


def test_gradient_through_a_view_changed_in_place() -> None:
    results = []
    for device in ("cpu", DEVICE):
        leaf = torch.arange(6.0, device=device).requires_grad_()
        x = leaf * 2
        x.view(2, 3)[0].mul_(leaf[3:])
        x[1:3].add_(leaf[:2])
        torch.autograd.backward(x.square().sum())
        assert leaf.grad is not None
        results.append(leaf.grad.cpu())
    torch.testing.assert_close(results[1], results[0])


def test_channels_last_is_kept() -> None:
    x = torch.randn(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert (x + 1).stride() == x.stride()
    assert torch.empty_like(x).stride() == x.stride()
    weight = torch.randn(5, 3, 3, 3, device=DEVICE)
    y = torch.nn.functional.conv2d(x, weight)
    assert y.is_contiguous(memory_format=torch.channels_last)
    made = torch.empty(2, 3, 4, 4, device=DEVICE, memory_format=torch.channels_last)
    assert made.stride() == x.stride()


def test_storage_resize() -> None:
    a = torch.arange(4.0, device=DEVICE)
    storage = a.untyped_storage()
    storage.resize_(32)
    assert storage.nbytes() == 32
    a.set_(storage, 0, (8,))  # type: ignore[call-overload]
    torch.testing.assert_close(a[:4].cpu(), torch.arange(4.0))
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(32)
    a.fill_(3)
    assert a.sum().item() == 24


def test_resize_and_set() -> None:
    a = torch.arange(4.0, device=DEVICE)
    a.resize_(2, 3)
    assert a.stride() == (3, 1)
    torch.testing.assert_close(a.flatten()[:4].cpu(), torch.arange(4.0))
    b = torch.empty(0, device=DEVICE).set_(a.untyped_storage(), 1, (2,), (2,))
    assert b.data_ptr() == a.data_ptr() + 4
    assert b.set_().numel() == 0  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="different device"):
        b.set_(torch.ones(2).untyped_storage())


def test_conjugate_and_negative_views() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    y = x.to(DEVICE)
    assert y.conj().is_conj()
    torch.testing.assert_close(y.conj().cpu().resolve_conj(), x.conj().resolve_conj())
    torch.testing.assert_close((y.conj() * 2).cpu(), x.conj() * 2)
    torch.testing.assert_close(y.conj().imag.cpu().resolve_neg(), x.conj().imag.resolve_neg())
    torch.testing.assert_close(y.conj().resolve_conj().cpu(), x.conj().resolve_conj())


def test_generated_methods() -> None:
    a = torch.ones(2)
    assert not a.is_virtual  # type: ignore[attr-defined]
    assert a.virtual(2).device == torch.device("virtual:2")  # type: ignore[attr-defined]
    assert a.virtual().is_virtual  # type: ignore[attr-defined]
    assert torch.nn.Linear(2, 2).virtual(1).weight.device == torch.device("virtual:1")  # type: ignore[operator]
    assert a.untyped_storage().virtual().device == torch.device("virtual:0")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="can't convert virtual:1 device type tensor to numpy"):
        torch.ones(2, device=DEVICE).numpy()
    parameter = torch.nn.Parameter(torch.ones(2, device=DEVICE))
    parameter.data = torch.zeros(3, device="virtual:2")
    assert (parameter.device, parameter.shape) == (torch.device("virtual:2"), (3,))


def test_deep_copy_and_pickle() -> None:
    a = torch.randn(3, device=DEVICE, requires_grad=True)
    module = torch.nn.Linear(2, 2).to(DEVICE)
    for copied in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert copied.device == a.device
        assert copied.requires_grad
        assert copied.data_ptr() != a.data_ptr()
        torch.testing.assert_close(copied.detach(), a.detach())
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.weight.device == torch.device(DEVICE)
        torch.testing.assert_close(again.weight, module.weight)


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
