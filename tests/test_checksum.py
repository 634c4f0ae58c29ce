"""Whether anything was written, from a few integers."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.comm.checksum import checksum
from dataparallel.kernels import backend
from dataparallel.replicas.values import Values
from tests.kernels.host_backend import HostBackend

module = sys.modules["dataparallel.comm.checksum"]


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def host(request: pytest.FixtureRequest) -> object:
    """Every test runs twice: CPU tensors are served by kernels, and they are not."""
    host = HostBackend()
    with backend.registered([host] if request.param == "kernels" else []):
        yield host if request.param == "kernels" else None


def of(*tensors: Tensor) -> Tensor:
    return checksum(tensors, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("numel", [1, 3, 1021, 5000])
def test_every_element_counts(dtype: torch.dtype, numel: int) -> None:
    values = torch.zeros(numel, dtype=dtype)
    before = of(values)
    for index in {0, numel // 2, numel - 1}:
        changed = values.clone()
        changed[index] = 1
        assert not torch.equal(of(changed), before)
    assert torch.equal(of(values.clone()), before)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_flipped_signs_never_add_up_to_nothing(rows: int) -> None:
    values = torch.randn(rows * 1021)
    assert not torch.equal(of(values), of(-values))


@pytest.mark.parametrize("numel", [1, 2**17])
def test_exchanging_two_tensors_is_a_change(numel: int) -> None:
    first, second, third = torch.randn(3, numel)
    assert not torch.equal(of(first, second, third), of(second, first, third))


@pytest.mark.parametrize("offset", range(9))
def test_memory_that_begins_anywhere(offset: int) -> None:
    """Parameters of a flat buffer begin at any element; large ones are read where they are."""
    memory = torch.randn(2**17 + 9).bfloat16()
    values = memory[offset : offset + 2**17]
    assert values.nbytes == module._LARGE
    assert torch.equal(of(values, values[1:]), of(values.clone(), values[1:].clone()))


def test_strides_and_lazy_values() -> None:
    values = torch.randn(4, 6, dtype=torch.complex64)
    assert torch.equal(of(values.t()), of(values.t().contiguous()))
    for lazy in (values.conj(), values.conj().imag):
        assert torch.equal(of(lazy), of(lazy.resolve_conj().resolve_neg()))
    assert not torch.equal(of(values.conj()), of(values))


def test_one_launch_for_all(host: HostBackend | None) -> None:
    result = of(*[torch.randn(n) for n in range(300)])
    assert result.dim() == 1
    if host is not None:
        assert host.launches == ["fingerprint"]


def test_two_devices_of_which_kernels_serve_one(host: HostBackend | None) -> None:
    here = [torch.randn(7), torch.randn(70_000), torch.ones(3, 0)]
    there = [tensor.to("virtual:1") for tensor in here]
    assert torch.equal(checksum(here, there), checksum(there, here).cpu())
    there[1][69_999] += 1
    assert not torch.equal(checksum(here, there), checksum(there, here).cpu())
    if host is not None:
        assert host.launches == []


def test_tensors_that_wrap_others() -> None:
    """They have no memory that a kernel could read."""
    first, second = (TwoTensor(torch.ones(2), torch.full((2,), b)) for b in (3.0, 4.0))
    assert torch.equal(of(first), of(first.clone()))
    assert not torch.equal(of(first), of(second))
    # Sums of the same kind as of what it is compared with.
    plain = torch.ones(2)
    assert checksum([plain], [first]).shape == checksum([first], [plain]).shape


def test_no_tensors() -> None:
    assert torch.equal(checksum([], []), checksum([], []))


@pytest.mark.parametrize(("source", "target"), [("cpu", "virtual:0"), ("virtual:0", "cpu")])
def test_copies_are_kept_until_a_write(source: str, target: str) -> None:
    """Between a device that kernels serve and one that they do not."""
    tensors = [torch.randn(5, device=source), torch.randn(3, 2, device=source)]
    copies = Values([torch.device(source), torch.device(target)])
    made = [copies.update(tensors, 2)[1] for _ in range(3)]
    assert made[0][0] is made[1][0] is made[2][0]
    tensors[1].data[2, 1] += 1
    changed = copies.update(tensors, 2)[1]
    assert torch.equal(changed[1].cpu(), tensors[1].cpu())
