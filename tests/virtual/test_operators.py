"""Operators give what they give on the CPU, in values, gradients, strides and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dataparallel.virtual
from dataparallel.virtual import device_module as virtual
from tests.virtual.oracle import DEVICE, assert_same


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


A, B = randn(4, 6), randn(4, 6)
IMAGE = randn(2, 3, 8, 8)
INDEX = torch.tensor([2, 0, 3])
MASK = torch.tensor([[True, False, True, True, False, True]] * 4)

OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "arithmetic": (lambda a, b: (a + b * 2 - b / 3, a**2, -a, a % 3, (a.detach() // 2)), (A, B)),
    "broadcast": (lambda a, b: a + b, (A, randn(6))),
    "unary": (lambda a: (a.exp(), a.sin(), a.abs().sqrt(), a.sigmoid(), a.erf()), (A,)),
    "compare": (lambda a, b: (a > b, a == b, torch.where(a > b, a, b), a.clamp(-1, 1)), (A, B)),
    "matmul": (lambda a, b: (a @ b.t(), torch.mv(a, b[0])), (A, B)),
    "bmm": (lambda a, b: torch.bmm(a, b), (randn(3, 4, 5), randn(3, 5, 2))),
    "linear": (lambda x, w, b: F.linear(x, w, b), (A, randn(5, 6), randn(5))),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (A, B)),
    "reductions": (lambda a: (a.sum(), a.mean(0), a.amax(1), a.var(), a.norm(), a.prod()), (A,)),
    "max_with_indices": (lambda a: a.max(dim=1), (A,)),
    "softmax": (lambda a: (a.softmax(1), a.log_softmax(0), a.logsumexp(1)), (A,)),
    "sort": (lambda a: (a.sort(dim=1), a.topk(3), a.kthvalue(2)), (A,)),
    "scans": (lambda a: (a.cumsum(1), a.cumprod(0), a.cummax(1)), (A,)),
    "joining": (lambda a, b: (torch.cat([a, b]), torch.stack([a, b], 1)), (A, B)),
    "splitting": (lambda a: (a.split(2, 1), a.chunk(2), a.unbind(0)), (A,)),
    "views": (
        lambda a: (a.view(6, 4) * 1, a.t() + 0, a[1:3, ::2] * 2, a.unfold(1, 3, 2) * 1),
        (A,),
    ),
    "index": (lambda a, i: (a[i], a[:, i], a.index_select(0, i)), (A, INDEX)),
    "mask": (lambda a, m: (a[m], a.masked_select(m), a.masked_fill(m, 3.0)), (A, MASK)),
    "gather": (lambda a, i: a.gather(0, i.repeat(2).view(1, 6)), (A, INDEX)),
    "scatter": (lambda a, b, i: a.scatter_add(0, i.repeat(2).view(1, 6), b[:1]), (A, B, INDEX)),
    "index_add": (lambda a, b, i: a.index_add(0, i, b[:3]), (A, B, INDEX)),
    "padding": (lambda a: (F.pad(a, (1, 2)), F.pad(a[None], (1, 1), mode="reflect")), (A,)),
    "pooling": (lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1)), (IMAGE,)),
    "adaptive": (lambda x: (F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 2)), (IMAGE,)),
    "interpolate": (
        lambda x: (
            F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
            F.interpolate(x, size=5, mode="nearest"),
        ),
        (IMAGE,),
    ),
    "linalg": (
        lambda a: (
            torch.linalg.inv(a @ a.t() + torch.eye(4, dtype=a.dtype, device=a.device)),
            torch.linalg.det(a @ a.t()),
        ),
        (A,),
    ),
    "complex": (lambda a, b: (torch.complex(a, b).conj() * 1j, torch.fft.fft(a)), (A, B)),
    "distances": (lambda a, b: (torch.cdist(a, b), F.cosine_similarity(a, b)), (A, B)),
    "tril": (lambda a: (a.tril(), a.triu(1), a.diagonal() * 1, a.trace()), (A[:, :4],)),
    "flips": (lambda a: (a.flip(0), a.roll(1, 1), a.repeat(2, 1), a.expand(2, 4, 6) * 1), (A,)),
    "unique": (lambda i: torch.unique(i, return_counts=True), (torch.tensor([3, 1, 3, 2]),)),
    "nonzero": (lambda m: m.nonzero(), (MASK,)),
    "bincount": (lambda i: torch.bincount(i, minlength=6), (INDEX,)),
}


@pytest.mark.parametrize("name", sorted(OPERATORS))
@pytest.mark.parametrize("strict", [False, True], ids=["eager", "strict"])
def test_operator_equals_cpu(name: str, strict: bool) -> None:
    function, inputs = OPERATORS[name]
    inputs = tuple(
        each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
        for each in inputs
    )
    with dataparallel.virtual.strict_mode(strict):
        assert_same(function, *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_arithmetic_in_every_float_type(dtype: torch.dtype) -> None:
    a, b = torch.randn(5, 4).to(dtype), torch.randn(5, 4).to(dtype)
    assert_same(lambda x, y: (x + y, x * y, x @ y.t(), x.sum(0)), a, b)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_arithmetic_in_every_integer_type(dtype: torch.dtype) -> None:
    a = torch.randint(0, 2, (5, 4)).to(dtype)
    assert_same(lambda x: (x.bitwise_and(x), x.any(), x.sum(), x + 1, x == 1, x.float()), a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_factories_use_the_named_or_the_current_device(dtype: torch.dtype) -> None:
    virtual.set_device(2)
    for made in (
        torch.empty(3, dtype=dtype, device="virtual"),
        torch.zeros(3, dtype=dtype, device="virtual"),
        torch.ones(3, dtype=dtype, device="virtual"),
        torch.full((3,), 1, dtype=dtype, device="virtual"),
        torch.tensor([0, 1], dtype=dtype, device="virtual"),
    ):
        assert made.device == torch.device("virtual:2")
        assert made.dtype == dtype
    assert torch.zeros(3, device="virtual:3").device == torch.device("virtual:3")
    torch.testing.assert_close(torch.arange(5, device="virtual").cpu(), torch.arange(5))
    torch.testing.assert_close(torch.eye(3, device="virtual").cpu(), torch.eye(3))
    torch.testing.assert_close(
        torch.linspace(0, 1, 4, device="virtual").cpu(), torch.linspace(0, 1, 4)
    )


def test_devices_by_default_and_that_do_not_exist() -> None:
    with torch.device("virtual:3"):
        assert torch.ones(2).device == torch.device("virtual:3")
    with pytest.raises(RuntimeError, match="there is no device virtual:9: 4 virtual devices"):
        torch.ones(2, device="virtual:9")


@pytest.mark.parametrize("strict", [False, True])
def test_two_devices_do_not_mix(strict: bool) -> None:
    a, b = torch.ones(2, 2, device="virtual:0"), torch.ones(2, 2, device="virtual:1")
    wording = (
        "Expected all tensors to be on the same device, but found at least two devices, "
        "virtual:0 and virtual:1!"
    )
    with dataparallel.virtual.strict_mode(strict):
        for mixed in (
            lambda: a + b,
            lambda: a.add_(b),
            lambda: a @ b,
            lambda: torch.cat([a, b]),
            lambda: a[b.long()],
            lambda: torch.add(a, a, out=b),
            lambda: F.conv2d(a[None, None], b[None, None]),
        ):
            with pytest.raises(RuntimeError, match=wording):
                mixed()


def test_what_of_the_cpu_mixes() -> None:
    a = torch.ones(3, 3, device="virtual:0")
    for mixed in (lambda: a + torch.ones(3, 3), lambda: torch.mm(torch.ones(3, 3), a)):
        with pytest.raises(RuntimeError, match="at least two devices, virtual:0 and cpu!"):
            mixed()
    half = torch.tensor(0.5, dtype=torch.float64)
    assert (a * half).dtype == torch.float32
    torch.testing.assert_close((a * half + 1).cpu(), torch.full((3, 3), 1.5))
    b = torch.arange(6.0, device=DEVICE)
    assert b[torch.tensor([1, 3])].tolist() == [1.0, 3.0]
    b[torch.tensor([0])] = 9.0
    assert b[0].item() == 9.0


def test_operator_without_a_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="_cudnn_rnn_flatten_weight"):
        torch._cudnn_rnn_flatten_weight(
            [torch.ones(2, 2, device=DEVICE)], 1, 1, 1, 1, 1, 1, False, False
        )


def test_gradcheck() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w = torch.randn(2, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: (x @ w.t()).tanh().cumsum(0), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: (x @ w.t()).tanh(), (x, w))


def test_what_looks_at_a_tensor_sees_its_values() -> None:
    a = torch.tensor([1.5, 2.5], device=DEVICE)
    assert repr(a) == "tensor([1.5000, 2.5000], device='virtual:1')"
    torch.testing.assert_close(a, a.clone())
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(a, a + 1)


def test_foreach() -> None:
    a = [torch.randn(3), torch.randn(2, 2)]
    assert_same(lambda *t: torch._foreach_add(torch._foreach_mul(list(t), 2.0), list(t)), *a)
    others = [each.to(DEVICE) for each in a]
    torch._foreach_addcdiv_(others, others, others, 2.0)
    for other, each in zip(others, a, strict=True):
        torch.testing.assert_close(other.cpu(), each + 2.0)


# Forward mode scripts its formulas, and torch deprecates scripting.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_forward_mode_and_vmap() -> None:
    x = torch.randn(4, 3, device=DEVICE)
    by_row = torch.vmap(lambda row: row.softmax(0))(x)
    torch.testing.assert_close(by_row.cpu(), x.cpu().softmax(1))
    _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))  # type: ignore[misc]
    torch.testing.assert_close(tangent.cpu(), x.cpu().cos())
