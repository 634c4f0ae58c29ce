"""The fused step of SGD: reference against torch.optim, kernel against reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel import kernels
from dataparallel.kernels import reference
from tests.kernels.fused_cases import (
    DTYPE,
    DTYPES,
    OFFSETS,
    SEED,
    SIZES,
    Lists,
    assert_bits,
    host_kernels,
)
from tests.kernels.guarded import exit_status, guarded
from tests.kernels.host_backend import HostBackend

SERVED = {
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
}


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of torch.optim.SGD."""
    momentum = draw(st.sampled_from((0, 0.9)))
    nesterov = momentum > 0 and draw(st.booleans())
    return {
        "lr": draw(st.sampled_from((0.1, 0.0, 3e-3))),
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": 0.0 if nesterov else draw(st.sampled_from((0.0, 0.3))),
        "weight_decay": draw(st.sampled_from((0.0, 0.01))),
        "maximize": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=60)
@given(SIZES, DTYPE, DTYPE, OFFSETS, SEED, options(), st.booleans(), st.sampled_from((1.0, 0.37)))
def test_kernel_equals_reference(
    sizes: list[int],
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    offsets: list[int],
    seed: int,
    chosen: dict[str, Any],
    first_step: bool,
    scale: float,
) -> None:
    lists = Lists(sizes, dtype, gradient_dtype, 2, offsets, seed, special=True)
    found, expected = lists.copies(), lists.copies()
    given_options = {**chosen, "first_step": first_step, "scale": scale}
    with host_kernels(seed % 3) as host:
        kernels.fused_sgd(found[0], lists.gradients, found[1], **given_options)
    reference.fused_sgd(expected[0], lists.gradients, expected[1], **given_options)
    assert_bits(found, expected)
    assert bool(host.launches) == (any(sizes) and (dtype, gradient_dtype) in SERVED)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from((torch.float32, torch.float64)), options(), SEED)
def test_reference_equals_torchs(dtype: torch.dtype, chosen: dict[str, Any], seed: int) -> None:
    lists = Lists([3, 0, 50], dtype, dtype, 2, seed=seed)
    plain = [p.clone().requires_grad_() for p in lists.states[0]]
    optimizer = torch.optim.SGD(plain, foreach=False, **chosen)
    generator = torch.Generator().manual_seed(seed)
    for step in range(4):
        gradients = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in plain]
        for p, gradient in zip(plain, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        kernels.fused_sgd(
            lists.states[0], gradients, lists.states[1], first_step=step == 0, **chosen
        )
    assert_bits(lists.states[0], [p.detach() for p in plain])
    if chosen["momentum"]:
        assert_bits(lists.states[1], [optimizer.state[p]["momentum_buffer"] for p in plain])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_rounded_once(dtype: torch.dtype) -> None:
    p, buffer = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    small = torch.finfo(dtype).eps / 4
    # Each of the two terms is too small to change 1, their sum is not.
    kernels.fused_sgd([p], [torch.full_like(p, small)], lr=-1.0, weight_decay=small * 1.5)
    assert p == 1 + small * 4
    p.fill_(1)
    kernels.fused_sgd(
        [p], [torch.full_like(p, 2.0)], [buffer], lr=0.5, momentum=0.5, first_step=True, scale=0.5
    )
    assert p == 0.5 and buffer == 1


def test_long_lists_are_divided(host_kernels: HostBackend) -> None:
    lists = Lists([3] * 250, torch.float32, torch.float32, 2, offsets=[0, 1, 2])
    expected = lists.copies()
    kernels.fused_sgd(lists.states[0], lists.gradients, lists.states[1], lr=0.1, momentum=0.5)
    reference.fused_sgd(expected[0], lists.gradients, expected[1], lr=0.1, momentum=0.5)
    assert_bits(lists.states, expected)
    assert host_kernels.launches == ["fused_sgd_f32_f32_2"] * 3


def test_lists_of_several_dtypes_and_layouts(host_kernels: HostBackend) -> None:
    mixed = [Lists([9], dtype, dtype, 2, seed=k) for k, dtype in enumerate(DTYPES)]
    parameters = [lists.states[0][0] for lists in mixed]
    gradients = [lists.gradients[0] for lists in mixed]
    # In any order, dense and alike; alike with gaps; and in different orders.
    for strides, other in (((1, 4), (1, 4)), ((8, 2), (8, 2)), ((4, 1), (1, 4))):
        parameters.append(torch.randn(40).as_strided((4, 4), strides))
        gradients.append(torch.randn(40).as_strided((4, 4), other))
    expected = [p.clone() for p in parameters]
    reference.fused_sgd(expected, gradients, None, lr=0.1)
    kernels.fused_sgd(parameters, gradients, lr=0.1)
    assert_bits(parameters, expected)
    names = [f"fused_sgd_{name}_{name}_1" for name in ("f32", "f64", "f16", "bf16")]
    assert host_kernels.launches == names


def test_lazy_negatives_and_sparse_parameters_are_seen(host_kernels: HostBackend) -> None:
    p = torch.zeros(3)
    kernels.fused_sgd([p], [torch._neg_view(torch.ones(3))], lr=1.0)
    assert p.tolist() == [1] * 3 and host_kernels.launches == []
    sparse = [torch.ones(3).to_sparse()]
    with pytest.raises(ValueError, match=r"parameters\[0\] is .* with layout torch\.sparse_coo"):
        kernels.fused_sgd(sparse, sparse, lr=1.0)


def test_a_step_is_a_change_that_autograd_sees(host_kernels: HostBackend) -> None:
    p = torch.ones(3, requires_grad=True)
    loss = (p * p).sum()
    kernels.fused_sgd([p], [torch.ones(3)], lr=0.1)
    assert host_kernels.launches
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        q = torch.ones(3)
        kernels.fused_sgd([q], [torch.ones(3)], lr=0.25)
    assert q.tolist() == [0.75] * 3


def _within_bounds() -> None:
    for size in (0, 1, 7, 33, 8195):
        for dtype in (torch.float32, torch.bfloat16):
            for offset in (0, 1):
                p, buffer = (guarded(torch.ones(size, dtype=dtype), "begin", offset) for _ in "pb")
                gradient = guarded(torch.ones(size), read_only=True)
                kernels.fused_sgd([p], [gradient], [buffer], lr=1.0, momentum=1.0)
                p, buffer = (guarded(torch.ones(size, dtype=dtype), "end", offset) for _ in "pb")
                gradient = guarded(torch.ones(size), "begin", 1, read_only=True)
                kernels.fused_sgd([p], [gradient], [buffer], lr=1.0, momentum=1.0)
                assert bool((p == -1).all()) and bool((buffer == 2).all())


def test_nothing_else_is_touched() -> None:
    assert exit_status(_within_bounds) == 0


def test_what_does_not_fit_is_refused() -> None:
    p, g = [torch.ones(3)], [torch.ones(3)]
    with pytest.raises(ValueError, match="there are 1 parameters but 2 gradients"):
        kernels.fused_sgd(p, g * 2, lr=0.1)
    with pytest.raises(ValueError, match="there are 1 parameters but 0 momentum_buffers"):
        kernels.fused_sgd(p, g, [], lr=0.1, momentum=0.9)
    with pytest.raises(
        ValueError, match=r"gradients\[0\] is \[1\] on cpu, but .*\[0\] is \[3\] on"
    ):
        kernels.fused_sgd(p, [torch.ones(1)], lr=0.1)
    with pytest.raises(ValueError, match=r"gradients\[0\] is \[3\] on virtual:0, but"):
        kernels.fused_sgd(p, [g[0].to("virtual:0")], lr=0.1)
    with pytest.raises(ValueError, match=r"momentum_buffers\[0\] is torch.float64, but .* convert"):
        kernels.fused_sgd(p, g, [torch.ones(3).double()], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"gradients\[0\] is torch.int64 with layout"):
        kernels.fused_sgd(p, [torch.ones(3, dtype=torch.int64)], lr=0.1)
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo, but a fused step"):
        kernels.fused_sgd(p, [torch.ones(3).to_sparse()], lr=0.1)
    with pytest.raises(ValueError, match=r"momentum is 0.9, but there are no momentum_buffers"):
        kernels.fused_sgd(p, g, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="nesterov is True, but momentum is 0"):
        kernels.fused_sgd(p, g, lr=0.1, nesterov=True)
    assert p[0].tolist() == [1] * 3
    kernels.fused_sgd([], [], lr=0.1)
