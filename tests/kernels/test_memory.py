"""What a kernel may read by addresses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dataparallel import kernels
from dataparallel.kernels.memory import is_plain, lie_whole, mark_written, overlap
from tests.kernels.host_backend import HostBackend


def test_what_is_plain() -> None:
    assert is_plain(torch.ones(3))
    assert is_plain(nn.Parameter(torch.ones(3)))
    assert is_plain(torch.ones(4, 4)[1:, ::2])
    assert not is_plain(torch.ones(3).to_sparse())
    assert not is_plain(torch.ones(3, dtype=torch.complex64).conj())
    assert not is_plain(torch.ones(3, dtype=torch.complex64).conj().imag)
    assert not is_plain(nn.Buffer(torch.ones(3)).as_subclass(type("Other", (torch.Tensor,), {})))
    assert not is_plain(torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1))


def test_tensors_of_transforms_go_to_the_reference(host_kernels: HostBackend) -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        assert not is_plain(x)
        return kernels.reduce_add([x, x, x])

    result = torch.func.vmap(add)(torch.arange(6.0).view(2, 3))
    assert torch.equal(result, 3 * torch.arange(6.0).view(2, 3))
    assert host_kernels.launches == []


def test_tensors_of_inference_are_written_as_torch_writes_them(host_kernels: HostBackend) -> None:
    with torch.inference_mode():
        bucket = torch.zeros(3)
        kernels.flatten([torch.ones(3)], bucket)
    assert bucket.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="outside InferenceMode"):
        kernels.flatten([torch.zeros(3)], bucket)
    mark_written([bucket])


@pytest.mark.parametrize(
    ("addresses", "dtypes", "whole"),
    [
        ([0, 4, 8], [torch.float32] * 3, True),
        ([0, 2], [torch.float32] * 2, False),
        ([0, 2], [torch.float32, torch.bfloat16], True),
        ([2, 4], [torch.float32, torch.bfloat16], False),
        ([8], [torch.complex128], True),
        ([4], [torch.complex128], False),
        ([1], [torch.int8], True),
        ([], [], True),
    ],
)
def test_elements_at_multiples_of_their_size(
    addresses: list[int], dtypes: list[torch.dtype], whole: bool
) -> None:
    assert lie_whole(addresses, dtypes) == whole


def test_overlap_counts_gaps() -> None:
    memory = torch.zeros(10)
    assert overlap(memory[:5], memory[4:])
    assert not overlap(memory[:5], memory[5:])
    assert overlap(memory[::2], memory[1::2])
    assert not overlap(memory[:0], memory)
