"""Compression to fewer bits: reference against a loop in Python, kernel against reference."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import kernels
from dataparallel.kernels import backend
from tests.kernels.guarded import exit_status, guarded
from tests.kernels.host_backend import HostBackend

DTYPES = (torch.bfloat16, torch.float16, torch.int8)
INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny
SPECIAL = [0.0, -0.0, INF, -INF, NAN, LARGEST, -LARGEST, TINY, -TINY, 2.0**-149, 100 * 2.0**-149]
SPECIAL += [65519.0, 65520.0, 2.0**-24, 2.0**-25, 127.5, 126.5, 1.00390625]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, but for what kind of no number there is."""
    assert first.dtype == second.dtype and first.shape == second.shape
    if not first.is_floating_point():
        return torch.equal(first, second)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    bits = [torch.where(t.isnan(), 0.0, t).view(integers) for t in (first, second)]
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(*bits)


@st.composite
def numbers(draw: st.DrawFn) -> Tensor:
    """Of few or of all magnitudes, with special values in some places, at any alignment."""
    near = [0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 1024, 2049, 6000]
    size = draw(st.sampled_from(near) | st.integers(0, 1500))
    offset = draw(st.integers(0, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = torch.randn(size + offset, generator=generator)
    if draw(st.booleans()):
        exponents = torch.randint(-149, 128, (size + offset,), generator=generator)
        values *= torch.pow(2.0, exponents.double()).float()
    values = values[offset:]
    if size:
        for place in draw(st.lists(st.integers(0, size - 1), max_size=3)):
            values[place] = draw(st.sampled_from(SPECIAL))
    return values


SCALES = st.sampled_from([1.0, 0.5, 1 / 3, -2.0, 0.0, 1e-30, 1e30, 2.0**-126])


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    tensor=numbers(),
    scale=SCALES,
    schedule=st.integers(0, 3),
)
def test_a_kernel_is_its_reference(
    data: st.DataObject, dtype: torch.dtype, tensor: Tensor, scale: float, schedule: int
) -> None:
    with_error, add = data.draw(st.booleans()), data.draw(st.booleans())
    shift = data.draw(st.integers(0, 4))
    before = torch.randn(len(tensor) + shift)
    found = []
    host = HostBackend(schedule, blocks=2)
    for backends in ([host], []):
        error = before.clone()[shift:] if with_error else None
        out = None
        if dtype != torch.int8 and shift:
            out = torch.empty(len(tensor) + shift, dtype=dtype)[shift:]
        received = before.clone()[shift:]
        with backend.registered(backends):
            sent = kernels.compress(tensor, dtype, scale, error=error, out=out)
            kernels.decompress(sent, received, scale, add=add)
        found.append((sent, received, error))
    (sent, received, error), (sent_2, received_2, error_2) = found
    assert same_bits(sent, sent_2)
    assert same_bits(received, received_2)
    assert error is None or error_2 is None or same_bits(error, error_2)
    suffix = {torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8"}[dtype]
    expected = [
        f"compress_{suffix}{'_error' if with_error else ''}",
        f"decompress_{suffix}{'_add' if add else ''}",
    ]
    assert host.launches == (expected if len(tensor) else [])


def test_halves_are_rounded_alike() -> None:
    """Where the last bit of a quotient decides."""
    most = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)) + 1
    values = (torch.arange(256) - 127.5) * (most / 127)
    values[:, 0] = most[:, 0]
    values[:, 255] = 0
    with backend.registered([HostBackend()]):
        found = kernels.compress(values, torch.int8)
    with backend.registered([]):
        assert torch.equal(found, kernels.compress(values, torch.int8))


# --- the reference against a loop ------------------------------------------------------------


def f32(value: float) -> float:
    """Rounded to float32. What Python computes with two of them is then rounded once."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(INF, value)


def block_by_hand(values: list[float]) -> tuple[float, list[int], list[float]]:
    """The scale, the numbers and the errors of one block."""
    if not all(map(math.isfinite, values)):
        return NAN, [0] * len(values), [0.0] * len(values)
    most = max(map(abs, values))
    scale = f32(most / 127)
    if scale < TINY:
        return 0.0, [0] * len(values), values
    if math.isinf(f32(127 * scale)):
        scale = torch.nextafter(torch.tensor(scale), torch.tensor(0.0)).item()
    inverse = f32(127 / most)
    sent = [round(f32(value * inverse)) for value in values]
    return scale, sent, [f32(v - f32(q * scale)) for v, q in zip(values, sent, strict=True)]


@settings(max_examples=60, deadline=None)
@given(tensor=numbers(), scale=SCALES, with_error=st.booleans())
def test_the_reference_is_a_loop_over_blocks(
    tensor: Tensor, scale: float, with_error: bool
) -> None:
    error = torch.randn(len(tensor)) if with_error else None
    values = [f32(value * f32(scale)) for value in tensor.tolist()]
    if error is not None:
        values = [f32(v + e) for v, e in zip(values, error.tolist(), strict=True)]
    by_hand = [block_by_hand(values[i : i + 256]) for i in range(0, len(values), 256)]
    with backend.registered([]):
        sent = kernels.compress(tensor, torch.int8, scale, error=error)
        received = kernels.decompress(sent, torch.empty(len(tensor)))
    border = 4 * -(-len(by_hand) // 4) * 4
    scales = sent[:border].clone().view(torch.float32)
    assert len(sent) % 16 == 0 and len(sent) - border - len(tensor) in range(16)
    assert same_bits(scales[: len(by_hand)], torch.tensor([block[0] for block in by_hand]))
    assert not scales[len(by_hand) :].any()
    numbers = sent[border:].view(torch.int8).tolist()
    expected = [number for block in by_hand for number in block[1]]
    assert numbers == expected + [0] * (len(numbers) - len(expected))
    if error is not None:
        assert same_bits(error, torch.tensor([rest for block in by_hand for rest in block[2]]))
    products = [f32(q * block[0]) for block in by_hand for q in block[1]]
    assert same_bits(received, torch.tensor(products))


def test_16_bits_are_torchs() -> None:
    tensor = torch.tensor([*SPECIAL, *torch.randn(500).tolist()])
    with backend.registered([]):
        for dtype in (torch.bfloat16, torch.float16):
            assert same_bits(kernels.compress(tensor, dtype), tensor.to(dtype))
            # Scaled before it is rounded: 70001 / 2 is a float16, 70001 is none.
            half = kernels.compress(torch.tensor([70001.0]), dtype, 0.5)
            assert same_bits(half, torch.tensor([35000.5]).to(dtype))


# --- properties, of the reference and of the kernel ------------------------------------------


@pytest.fixture(params=["reference", "kernel"], autouse=False)
def served(request: pytest.FixtureRequest) -> object:
    with backend.registered([HostBackend()] if request.param == "kernel" else []):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_not_sent_is_sent_later(served: str, dtype: torch.dtype) -> None:
    """The sum of what was sent differs from the sum of all by the last error."""
    torch.manual_seed(0)
    error = torch.zeros(700)
    true, sent = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    plain = torch.zeros(700, dtype=torch.float64)
    constant = torch.randn(700) * torch.logspace(-6, 0, 700)
    for _ in range(50):
        gradient = constant + 0.01 * torch.randn(700)
        true += gradient.double()
        sent += kernels.decompress(
            kernels.compress(gradient, dtype, error=error), torch.empty(700)
        ).double()
        plain += kernels.decompress(kernels.compress(gradient, dtype), torch.empty(700)).double()
    torch.testing.assert_close(true - sent, error.double(), rtol=0, atol=2e-6)
    assert (true - plain).abs().max() > 3 * (true - sent).abs().max()


def test_the_error_is_at_most_half_a_step(served: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 256) * torch.logspace(-30, 30, 64).view(-1, 1)
    error = torch.zeros_like(values)
    sent = kernels.compress(values, torch.int8, error=error)
    received = kernels.decompress(sent, torch.empty_like(values))
    steps = values.abs().amax(1, keepdim=True) / 127
    assert torch.equal(error, values - received)
    assert (error.abs() <= steps * 0.5001).all()
    assert (error.abs() > steps * 0.49).any()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_block_that_is_not_finite(served: str, bad: float) -> None:
    values, error = torch.randn(600), torch.randn(600)
    before = error.clone()
    values[300] = bad
    sent = kernels.compress(values, torch.int8, error=error)
    received = kernels.decompress(sent, torch.empty(600))
    assert received[256:512].isnan().all()
    assert received[:256].isfinite().all() and received[512:].isfinite().all()
    assert not error[256:512].any()
    assert torch.equal(error[:256], (values + before)[:256] - received[:256])
    # The next step has nothing left of it.
    sent = kernels.compress(torch.ones(600), torch.int8, error=error)
    assert kernels.decompress(sent, received).isfinite().all()


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 1e5), (torch.bfloat16, LARGEST)])
def test_an_element_that_is_too_large_leaves_no_error(
    served: str, dtype: torch.dtype, large: float
) -> None:
    error = torch.tensor([1.0, 0.0])
    sent = kernels.compress(torch.tensor([large, 1.0009765625]), dtype, error=error)
    assert sent[0] == INF
    assert error[0] == 0
    assert error[1] == 1.0009765625 - sent[1].item()


@pytest.mark.parametrize("most", [0.0, 2.0**-149, 90 * 2.0**-149, 127 * TINY * 0.9999])
def test_a_block_whose_scale_would_be_subnormal(served: str, most: float) -> None:
    values = torch.linspace(-1, 1, 256) * most
    error = torch.zeros(256)
    sent = kernels.compress(values, torch.int8, error=error)
    assert not sent.any()
    assert torch.equal(error, values)


@pytest.mark.parametrize("most", [LARGEST, LARGEST * (1 - 2.0**-23), 127 * TINY * 1.0001])
def test_the_largest_and_the_smallest_scale(served: str, most: float) -> None:
    values = torch.linspace(-1, 1, 256) * most
    error = torch.zeros(256)
    received = kernels.decompress(
        kernels.compress(values, torch.int8, error=error), torch.empty(256)
    )
    assert received.isfinite().all()
    torch.testing.assert_close(received / most, values / most, rtol=0, atol=0.51 / 127)
    assert torch.equal(error, values - received)


def test_parts_are_added_in_their_order(served: str) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(300) for _ in range(3)]
    for dtype in DTYPES:
        total, expected = torch.full((300,), 7.0), torch.full((300,), 7.0)
        for part in parts:
            sent = kernels.compress(part, dtype)
            kernels.decompress(sent, total, 1 / 3, add=True)
            expected = expected + kernels.decompress(sent, torch.empty(300)) * (1 / 3)
        assert torch.equal(total, expected)


# --- layouts and dtypes ----------------------------------------------------------------------


def test_what_the_kernels_serve(host_kernels: HostBackend) -> None:
    """All other tensors get the same from the reference."""
    images = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    wide = torch.randn(40, 10)[:, ::2]
    for tensor in (images, wide, wide.double(), wide.half(), wide.t()):
        for dtype in DTYPES:
            host_kernels.launches.clear()
            sent = kernels.compress(tensor, dtype)
            served = tensor is images and dtype != torch.int8
            assert bool(host_kernels.launches) is served
            received = kernels.decompress(sent, torch.empty_like(tensor))
            if tensor is images:
                assert len(host_kernels.launches) == 2 * served
            row_major = tensor.float().contiguous()
            expected = kernels.compress(row_major, dtype)
            assert torch.equal(sent, expected)
            back = kernels.decompress(expected, torch.empty_like(row_major))
            assert torch.equal(received, back.to(tensor.dtype))


def test_compressed_memory_at_odd_addresses(host_kernels: HostBackend) -> None:
    values = torch.randn(1000)
    expected = kernels.compress(values, torch.int8)
    for offset in (1, 4, 8):
        host_kernels.launches.clear()
        out = torch.empty(len(expected) + offset, dtype=torch.uint8)[offset:]
        assert torch.equal(kernels.compress(values, torch.int8, out=out), expected)
        kernels.decompress(out, received := torch.empty(1000))
        assert not host_kernels.launches
        assert torch.equal(received, kernels.decompress(expected, torch.empty(1000)))


def test_gradients_are_not_recorded(served: str) -> None:
    parameter = torch.randn(300, requires_grad=True)
    for dtype in DTYPES:
        assert not kernels.compress(parameter, dtype).requires_grad


def test_autograd_knows_what_was_written(served: str) -> None:
    for dtype in DTYPES:
        error, out = torch.zeros(300), torch.zeros(300)
        sent = kernels.compress(torch.ones(300), dtype)
        before = [tensor._version for tensor in (error, out, sent)]
        kernels.compress(torch.ones(300), dtype, error=error, out=sent)
        kernels.decompress(sent, out)
        after = [tensor._version for tensor in (error, out, sent)]
        assert all(new > old for new, old in zip(after, before, strict=True))


def at_the_edge_of_memory() -> None:
    for size in (1, 3, 16, 255, 256, 257, 1000, 1024):
        for side in ("begin", "end"):
            for dtype in DTYPES:
                values = guarded(torch.randn(size), side, read_only=True)
                empty = kernels.compress(values, dtype)
                out = guarded(torch.empty_like(empty), side)
                error = guarded(torch.zeros(size), side)
                kernels.compress(values, dtype, out=out)
                assert torch.equal(out, empty)
                kernels.compress(values, dtype, error=error, out=out)
                for add in (False, True):
                    kernels.decompress(out, guarded(torch.zeros(size), side), add=add)


def test_memory_beside_the_tensors_is_not_touched() -> None:
    assert exit_status(at_the_edge_of_memory) == 0


# --- arguments -------------------------------------------------------------------------------


def test_sizes() -> None:
    assert kernels.compressed_size(5, torch.bfloat16) == 5
    assert [kernels.compressed_size(n, torch.int8) for n in (0, 1, 16, 17, 256, 1025)] == [
        *(0, 16 + 16, 16 + 16, 16 + 32, 16 + 256),
        32 + 1040,
    ]


X = torch.zeros(300)
BYTES = torch.zeros(kernels.compressed_size(300, torch.int8), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: kernels.compress(X, torch.int32), TypeError, "to torch.int32; choose torch.bf"),
        (lambda: kernels.compress(X.int(), torch.int8), TypeError, "torch.int32 cannot be compr"),
        (lambda: kernels.compress(X.to(torch.cfloat), torch.int8), TypeError, "by torch.view_as_r"),
        (
            lambda: kernels.compress(X, torch.int8, error=X[:5].clone()),
            ValueError,
            r"error is torch.float32 \[5\] on cpu, but the tensor has shape \[300\] on cpu; give",
        ),
        (lambda: kernels.compress(X, torch.int8, error=X), ValueError, "error shares memory with"),
        (
            lambda: kernels.compress(X, torch.int8, out=BYTES[1:]),
            ValueError,
            r"is torch.uint8 \[319\] on cpu, but tensor, torch.float32 \[300\] on cpu, has a cont",
        ),
        (lambda: kernels.compress(X, torch.half, out=X.bfloat16()), ValueError, "compressed tens"),
        (
            lambda: kernels.compress(BYTES[:4].view(torch.float), torch.int8, out=BYTES[:32]),
            ValueError,
            "out shares memory with tensor",
        ),
        (lambda: kernels.decompress(X, X), TypeError, "compressed is torch.float32, but compress"),
        (lambda: kernels.decompress(BYTES, X.int()), TypeError, "out is torch.int32, but numbers"),
        (lambda: kernels.decompress(BYTES, X[1:200]), ValueError, r"out, torch.float32 \[199\] on"),
        (lambda: kernels.decompress(X.half(), X[1:]), ValueError, r"contiguous torch.float16 \[29"),
        (
            lambda: kernels.decompress(BYTES[:32], BYTES[16:20].view(torch.float)),
            ValueError,
            "out shares memory with compressed, so",
        ),
    ],
)
def test_arguments_that_cannot_be(call: object, kind: type[Exception], message: str) -> None:
    assert callable(call)
    with pytest.raises(kind, match=message):
        call()
