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
from dataparallel.kernels.memory import bits_of, bytes_of
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


def one(tensor: Tensor) -> int:
    (number,) = kernels.fingerprint([tensor]).tolist()
    return int(number)


def mixed(word: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ word >> 32) * factor % 2**64
    return word ^ word >> 32


def expected(data: bytes) -> int:
    """The number of some bytes from Python's integers, which have no width."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = mixed(len(data))
    for place, word in enumerate(words, start=1):
        total += mixed((word + place * 0x9E3779B97F4A7C15) % 2**64)
    return (total + 2**63) % 2**64 - 2**63


# --- against Python's integers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"", 0),
        (b"\0", 0xAEE5911FE8D57A98),
        (b"fingerprint", 0x3E26C4D10138C060),
        (bytes(range(256)), 0xC185C4B199F81FEB),
    ],
)
def test_known_numbers(either: str, data: bytes, number: int) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert one(tensor) % 2**64 == number
    assert expected(data) % 2**64 == number


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(1, 9))
def test_the_reference_against_integers(data: bytes, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_AT_ONCE", at_once)
        assert one(torch.tensor(list(data), dtype=torch.uint8)) == expected(data)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from([32767, 32768, 32769, 65536 + 8, 99_999])),
        max_size=6,
    ),
    offset=st.integers(0, 16),
    schedule=st.integers(0, 4),
)
def test_the_kernel_against_integers(sizes: list[int], offset: int, schedule: int) -> None:
    memory = torch.randint(256, (offset + sum(sizes) + 16,), dtype=torch.uint8)
    tensors = list(memory[offset : offset + sum(sizes)].split(sizes)) if sizes else []
    host = HostBackend(schedule)
    with backend.registered([host]):
        numbers = kernels.fingerprint(tensors).tolist()
    assert numbers == [expected(bytes(tensor.tolist())) for tensor in tensors]
    assert host.launches == ["fingerprint"] * any(sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_and_alignments(host_kernels: HostBackend, dtype: torch.dtype) -> None:
    memory = random((5000 + 17,), dtype)
    tensors = [memory[i : i + 5000] for i in range(17)]
    data = bytes(memory.view(torch.uint8).tolist())
    size = dtype.itemsize
    wanted = [expected(data[i * size : (i + 5000) * size]) for i in range(17)]
    assert kernels.fingerprint(tensors).tolist() == wanted
    with backend.registered([]):
        assert kernels.fingerprint(tensors).tolist() == wanted


@pytest.mark.parametrize("count", [0, 1, 480, 481, 961])
def test_lists_of_any_length(host_kernels: HostBackend, count: int) -> None:
    tensors = [random((i % 7,), torch.int16) for i in range(count)]
    numbers = kernels.fingerprint(tensors)
    assert (numbers.shape, numbers.dtype) == ((count,), torch.int64)
    assert numbers.tolist() == [expected(bytes(bytes_of(t).tolist())) for t in tensors]
    # A tensor alone is the first of the list: empty, without a launch.
    assert len(host_kernels.launches) == (0 if count < 2 else -(-count // 480))


# --- what counts -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_every_bit_counts(either: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = random(shape, dtype)
    data = bytes_of(values)
    flips = 1 if dtype == torch.bool else 8
    variants = [values]
    for position in range(data.numel()):
        for bit in range(flips):
            changed = data.clone()
            changed[position] ^= 1 << bit
            variants.append(changed.view(dtype).view(shape))
    assert len(set(kernels.fingerprint(variants).tolist())) == 1 + data.numel() * flips


@pytest.mark.parametrize("distance", [1, 2, 3, 512, 8192, 2**17])
def test_places_count(either: str, distance: int) -> None:
    values = torch.arange(2**17 + 5, dtype=torch.float32)
    swapped = values.clone()
    swapped[0], swapped[distance] = values[distance], values[0]
    assert one(swapped) != one(values)


def test_what_sums_of_bits_would_not_see_counts(either: str) -> None:
    # The sum of what changes is 0 modulo 2**64 for 64-bit words.
    variants = [torch.ones(40, dtype=torch.float64) for _ in range(40)]
    for other in range(1, 40):
        variants[other][0] *= -1
        variants[other][other] *= -1
    assert len(set(kernels.fingerprint(variants).tolist())) == 40
    # Only zeros come at the end of a word that is there anyway.
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
        assert len({one(torch.zeros(n, dtype=dtype)) for n in range(20)}) == 20
    # Kinds of NaN and of zero.
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000, 0x7F800001, 0, -(2**31)])
    assert len(set(kernels.fingerprint(list(bits.int().view(torch.float32))).tolist())) == 6


def test_no_tensors_and_empty_ones(either: str) -> None:
    assert kernels.fingerprint([]).tolist() == []
    empty = [torch.ones(0), torch.ones(3, 0), torch.ones(2)[:0]]
    numbers = kernels.fingerprint([*empty, torch.ones(1)]).tolist()
    assert numbers == [0, 0, 0, one(torch.ones(1))]


# --- what does not ---------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "permuted": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "with gaps": lambda t: torch.stack([t, t.flip(0)], -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "in one row": lambda t: t.reshape(1, -1).expand(3, -1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_count(either: str, dtype: torch.dtype, layout: str) -> None:
    # Integers, since torch cannot copy values of all dtypes.
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    base = random((4, 6, 5), dtype)
    if dtype.itemsize == 16:
        laid_out = LAYOUTS[layout](base)
        plain = laid_out.contiguous()
    else:
        numbers = LAYOUTS[layout](base.view(whole[dtype.itemsize]))
        laid_out, plain = numbers.view(dtype), numbers.contiguous().view(dtype)
    assert laid_out.stride() != plain.stride()
    single = random((1, 2), dtype)[:, ::2]
    assert single.is_contiguous() and single.stride(1) == 2
    assert one(single) == expected(bytes(bytes_of(single).tolist()))
    assert one(laid_out) == one(plain) == expected(bytes(plain.view(-1).view(torch.uint8).tolist()))


def test_lazy_conjugates_and_negatives(either: str) -> None:
    values = torch.randn(5, dtype=torch.complex64)
    assert one(values.conj()) == one(values.conj().resolve_conj()) != one(values)
    imaginary = values.conj().imag
    assert imaginary.is_neg()
    assert one(imaginary) == one(imaginary.resolve_neg()) != one(values.imag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_on_another_device(dtype: torch.dtype) -> None:
    values = [random((3, 50), dtype), random((0,), dtype), random((), dtype)]
    # As bytes, since torch cannot copy values of all dtypes.
    there = [bytes_of(v).to("virtual:1").view(dtype).view(v.shape) for v in values]
    moved = kernels.fingerprint(there)
    assert moved.device == torch.device("virtual:1")
    assert moved.tolist() == kernels.fingerprint(values).tolist()


@pytest.mark.parametrize("with_grad", [False, True])
def test_tensors_of_inference_and_of_training(either: str, with_grad: bool) -> None:
    values = torch.randn(3, requires_grad=with_grad)
    with torch.inference_mode():
        copy = values.clone()
        assert one(copy) == one(values)
    assert one(copy) == one(values) == one(torch.nn.Parameter(values.detach()))
    assert not kernels.fingerprint([values]).requires_grad


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
    assert one(torch.ones(0)) == 0


def test_replicas_are_compared_by_the_kernel(host_kernels: HostBackend) -> None:
    first = {f"t{i}": torch.randn(50, i + 1) for i in range(9)}
    replica = {name: tensor.clone() for name, tensor in first.items()}
    check_replicas(first, [replica])
    assert host_kernels.launches == ["fingerprint"]
    bits_of(replica["t7"])[31, 2] ^= 1 << 5
    with pytest.raises(ReplicaMismatch, match="1 of 9 tensors differ:\n  't7': float32"):
        check_replicas(first, [replica])
