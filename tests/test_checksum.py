"""A check for writes, from a few integers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel.comm.checksum import checksum
from dataparallel.kernels import backend
from tests.kernels.host_backend import HostBackend

LARGE = importlib.import_module("dataparallel.comm.checksum")._LARGE


@pytest.fixture(params=["kernels", "no kernels"], autouse=True)
def host(request: pytest.FixtureRequest) -> Iterator[HostBackend | None]:
    """Every test runs twice: CPU tensors are served by kernels, and they are not."""
    host = HostBackend()
    with backend.registered([host] if request.param == "kernels" else []):
        yield host if request.param == "kernels" else None


def of(*tensors: Tensor) -> list[int]:
    numbers: list[int] = checksum(tensors, tensors).tolist()
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("numel", [1, 3, 1021, 5000])
def test_every_element_counts(dtype: torch.dtype, numel: int, host: HostBackend | None) -> None:
    values = torch.zeros(numel, dtype=dtype)
    of(values, *[torch.randn(n) for n in range(30)])
    assert host is None or host.launches == ["fingerprint"]
    for index in {0, numel // 2, numel - 1}:
        changed = values.clone()
        changed[index] = 1
        assert of(changed) != of(values)
    assert of(values.clone()) == of(values)


def test_what_would_add_up_to_nothing() -> None:
    for rows in (1, 2, 3, 4):
        values = torch.randn(rows * 1021)
        assert of(values) != of(-values), "flipped signs"
    for numel in (1, LARGE // 2):
        first, second, third = torch.randn(3, numel)
        assert of(first, second, third) != of(second, first, third), "exchanged tensors"


def test_memory_that_begins_anywhere_in_any_order() -> None:
    """Parameters of a flat buffer begin at any element; large ones are read where they are."""
    memory = torch.randn(LARGE // 2 + 9).bfloat16()
    for offset in range(9):
        values = memory[offset : offset + LARGE // 2]
        assert of(values, values[1:]) == of(values.clone(), values[1:].clone())
    turned = torch.randn(4, 6, dtype=torch.complex64).t()
    for lazy in (turned, turned.conj(), turned.conj().imag):
        assert of(lazy) == of(lazy.resolve_conj().resolve_neg().contiguous())
    assert of(turned.conj()) != of(turned)
    assert of() == of()


def test_two_devices_of_which_kernels_serve_one(host: HostBackend | None) -> None:
    here = [torch.randn(7), torch.randn(70_000), torch.ones(3, 0)]
    there = [tensor.to("virtual:1") for tensor in here]
    assert torch.equal(checksum(here, there), checksum(there, here).cpu())
    there[1][69_999] += 1
    assert not torch.equal(checksum(here, there), checksum(there, here).cpu())
    assert host is None or host.launches == []


def test_tensors_that_wrap_others() -> None:
    """They have no memory that a kernel could read."""
    first, second = (TwoTensor(torch.ones(2), torch.full((2,), b)) for b in (3.0, 4.0))
    assert of(first) == of(first.clone())
    assert of(first) != of(second)
    # Sums of the same kind as of what it is compared with.
    plain = torch.ones(2)
    assert checksum([plain], [first]).shape == checksum([first], [plain]).shape
