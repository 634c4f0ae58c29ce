"""One number for the bits of a tensor: reference and kernel against integers of any width."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from dataparallel import kernels
from dataparallel.kernels import backend, reference
from dataparallel.kernels.memory import bits_of
from dataparallel.reducer.verify import ReplicaMismatch, check_replicas
from tests.kernels.host_backend import HostBackend

#: All that torch has. Values of the quantized ones are not those of their bits alone.
DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype) and "q" not in str(v)}, key=str
)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaN included; just 0 and 1 where a dtype has no others."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def mixed(word: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ word >> 32) * factor % 2**64
    return word ^ word >> 32


def expected(data: bytes) -> int:
    """Return the number of some bytes from Python's integers, which have no width."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = mixed(len(data))
    for place, word in enumerate(words, start=1):
        total += mixed((word + place * 0x9E3779B97F4A7C15) % 2**64)
    return (total + 2**63) % 2**64 - 2**63


def of(tensor: Tensor) -> int:
    """Return the number of a contiguous tensor."""
    return expected(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))


# --- against Python's integers ---------------------------------------------------------------


def test_known_numbers() -> None:
    """Files have them: they stay the same."""
    numbers = {b"": 0, b"fingerprint": 0x3E26C4D10138C060, bytes(range(256)): 0xC185C4B199F81FEB}
    assert {data: expected(data) % 2**64 for data in numbers} == numbers


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from([32767, 32768, 32769, 65536 + 8, 99_999])),
        max_size=6,
    ),
    offset=st.integers(0, 16),
    schedule=st.integers(0, 4),
    at_once=st.sampled_from([1, 5, 4096]),
)
def test_lists_of_bytes(sizes: list[int], offset: int, schedule: int, at_once: int) -> None:
    memory = torch.randint(256, (offset + sum(sizes) + 16,), dtype=torch.uint8)
    tensors = list(memory[offset : offset + sum(sizes)].split(sizes)) if sizes else []
    wanted = list(map(of, tensors))
    host = HostBackend(schedule)
    with backend.registered([host]):
        assert kernels.fingerprint(tensors).tolist() == wanted
    assert host.launches == ["fingerprint"] * any(sizes)
    with backend.registered([]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_AT_ONCE", at_once if max(sizes, default=0) < 41 else 4096)
        assert kernels.fingerprint(tensors).tolist() == wanted


def test_all_dtypes(either: str) -> None:
    tensors = [random((501,), dtype)[1:] for dtype in DTYPES]
    assert kernels.fingerprint(tensors).tolist() == list(map(of, tensors))


@pytest.mark.parametrize("count", [0, 1, 480, 481])
def test_lists_of_any_length(host_kernels: HostBackend, count: int) -> None:
    tensors = [random((i % 7,), torch.int16) for i in range(count)]
    numbers = kernels.fingerprint(tensors)
    assert (numbers.shape, numbers.dtype) == ((count,), torch.int64)
    assert numbers.tolist() == list(map(of, tensors))
    # A tensor alone is the first of the list: empty, without a launch.
    assert len(host_kernels.launches) == (0 if count < 2 else -(-count // 480))


# --- what does not count ---------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "permuted": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "with gaps": lambda t: torch.stack([t, t.flip(0)], -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "of one element": lambda t: t.view(-1)[:2].view(1, 2)[:, ::2],
    "conjugate": lambda t: torch.complex(t.float(), t.float()).conj(),
    "negative": lambda t: torch.complex(t.float(), t.float()).conj().imag,
    "a parameter": lambda t: torch.nn.Parameter(t.float()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.complex128])
def test_strides_do_not_count(either: str, dtype: torch.dtype, layout: str) -> None:
    values = torch.randint(100, (4, 6, 5)).to(dtype)
    with torch.inference_mode(layout == "permuted"):
        laid_out = LAYOUTS[layout](values.real if dtype.is_complex else values)
        plain = laid_out.detach().resolve_conj().resolve_neg()
        numbers = kernels.fingerprint([laid_out])
    assert not numbers.requires_grad
    assert numbers.tolist() == [of(plain.clone(memory_format=torch.contiguous_format))]


def test_the_same_on_another_device() -> None:
    values = [random((3, 50), torch.bool), random((0,), torch.float32), random((), torch.cfloat)]
    moved = kernels.fingerprint([value.to("virtual:1") for value in values])
    assert moved.device == torch.device("virtual:1")
    assert moved.tolist() == kernels.fingerprint(values).tolist()


# --- errors, and use -------------------------------------------------------------------------


BAD: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "tensor 0 is on cpu and tensor 1 on virtual:1": lambda t: [t, t.to("virtual:1")],
    "tensor 1 is sparse_coo; give the tensors": lambda t: [t, t.to_sparse()],
    "tensor 0 is on the meta device": lambda t: [t.to("meta")],
    "tensor 0 is a TwoTensor, which wraps others": lambda t: [TwoTensor(t, t)],
    "tensor 0 is quantized; give the tensors": lambda t: [
        torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)
    ],
}


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(either: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.fingerprint(BAD[message](torch.ones(2)))
    assert kernels.fingerprint([torch.ones(0)]).tolist() == [0]


def test_replicas_are_compared_by_the_kernel(host_kernels: HostBackend) -> None:
    first = {f"t{i}": torch.randn(50, i + 1) for i in range(9)}
    replica = {name: tensor.clone() for name, tensor in first.items()}
    check_replicas(first, [replica])
    assert host_kernels.launches == ["fingerprint"]
    bits_of(replica["t7"])[31, 2] ^= 1 << 5
    with pytest.raises(ReplicaMismatch, match="1 of 9 tensors differ:\n  't7': float32"):
        check_replicas(first, [replica])
