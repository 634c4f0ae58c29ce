"""The fused step of Adam and AdamW: reference against torch.optim, kernel against reference."""

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
    OFFSETS,
    SEED,
    SIZES,
    Lists,
    assert_bits,
    exact_roots,
    host_kernels,
)
from tests.kernels.guarded import exit_status, guarded
from tests.kernels.host_backend import HostBackend


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options that torch.optim.AdamW and fused_adamw have in common."""
    return {
        "lr": draw(st.sampled_from((0.01, 0.0, 3e-3))),
        # Torch computes averages differently where little of them stays.
        "betas": draw(st.sampled_from(((0.9, 0.999), (0.3, 0.5), (0.5, 0.0), (0.0, 0.9)))),
        "eps": draw(st.sampled_from((1e-8, 0.1))),
        "weight_decay": draw(st.sampled_from((0.0, 0.01))),
        "maximize": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=60)
@given(
    SIZES,
    DTYPE,
    DTYPE,
    OFFSETS,
    SEED,
    options(),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1, 2, 1000)),
    st.sampled_from((1.0, 0.37)),
)
def test_kernel_equals_reference(
    sizes: list[int],
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    offsets: list[int],
    seed: int,
    chosen: dict[str, Any],
    decoupled: bool,
    amsgrad: bool,
    step: int,
    scale: float,
) -> None:
    lists = Lists(sizes, dtype, gradient_dtype, 4, offsets, seed, special=True)
    found, expected = lists.copies(), lists.copies()
    with host_kernels(seed % 3) as host:
        for states, function in ((found, kernels.fused_adamw), (expected, reference.fused_adamw)):
            with exact_roots():
                function(
                    states[0],
                    lists.gradients,
                    *states[1:3],
                    step=step,
                    decoupled=decoupled,
                    max_exp_avg_sqs=states[3] if amsgrad else None,
                    scale=scale,
                    **chosen,
                )
    assert_bits(found, expected)
    # Test that the kernels were launched is in those for each type.
    assert all(name.endswith("_4" if amsgrad else "_3") for name in host.launches)


@pytest.mark.parametrize("states", [3, 4])
@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "name"),
    [
        (torch.float32, torch.float32, "f32_f32"),
        (torch.float32, torch.float16, "f32_f16"),
        (torch.float32, torch.bfloat16, "f32_bf16"),
        (torch.float64, torch.float64, "f64_f64"),
        (torch.float16, torch.float16, "f16_f16"),
        (torch.float16, torch.float32, "f16_f32"),
        (torch.bfloat16, torch.bfloat16, "bf16_bf16"),
        (torch.bfloat16, torch.float32, "bf16_f32"),
    ],
)
def test_kernels_of_all_types(
    host_kernels: HostBackend,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    name: str,
    states: int,
) -> None:
    lists = Lists([1, 0, 700], dtype, gradient_dtype, states, offsets=[1])
    expected = lists.copies()
    for function, (first, *others) in (
        (kernels.fused_adamw, lists.states),
        (reference.fused_adamw, expected),
    ):
        largest = others[2] if states == 4 else None
        with exact_roots():
            function(first, lists.gradients, *others[:2], step=3, lr=0.1, max_exp_avg_sqs=largest)
    assert_bits(lists.states, expected)
    assert host_kernels.launches == [f"fused_adamw_{name}_{states}"]


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from((torch.float32, torch.float64)), options(), st.booleans(), st.booleans(), SEED
)
def test_reference_equals_torchs(
    dtype: torch.dtype, chosen: dict[str, Any], decoupled: bool, amsgrad: bool, seed: int
) -> None:
    lists = Lists([3, 0, 50], dtype, dtype, 1, seed=seed)
    states = [lists.states[0], *([torch.zeros_like(p) for p in lists.states[0]] for _ in range(3))]
    plain = [p.clone().requires_grad_() for p in lists.states[0]]
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class(plain, foreach=False, amsgrad=amsgrad, **chosen)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, 5):
        gradients = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in plain]
        for p, gradient in zip(plain, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        kernels.fused_adamw(
            states[0],
            gradients,
            *states[1:3],
            step=step,
            decoupled=decoupled,
            max_exp_avg_sqs=states[3] if amsgrad else None,
            **chosen,
        )
    assert_bits(states[0], [p.detach() for p in plain])
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    for name, kept in zip(names, states[1:], strict=False):
        assert_bits(kept, [optimizer.state[p][name] for p in plain])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_near_what_wide_ones_become(dtype: torch.dtype) -> None:
    lists = Lists([500], dtype, dtype, 1)
    states = [lists.states[0], *([torch.zeros_like(p) for p in lists.states[0]] for _ in range(2))]
    exact = [[tensor.double() for tensor in tensors] for tensors in states]
    # Squares of less would be lost.
    slopes = [gradient + gradient.sign() for gradient in lists.gradients]
    for step in range(1, 6):
        for of in (states, exact):
            gradients = [slope.to(of[0][0].dtype) * step for slope in slopes]
            kernels.fused_adamw(of[0], gradients, *of[1:], step=step, lr=1e-2)
    # Each of five steps rounds once, to half an eps.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(states[0][0].double(), exact[0][0], rtol=3 * eps, atol=0.02 * eps)


def test_long_lists_are_divided(host_kernels: HostBackend) -> None:
    lists = Lists([2] * 200, torch.float64, torch.float64, 4, offsets=[0, 1])
    expected = lists.copies()
    with exact_roots():
        for (p, *others), function in (
            (lists.states, kernels.fused_adamw),
            (expected, reference.fused_adamw),
        ):
            for amsgrad in (True, False):
                function(
                    p,
                    lists.gradients,
                    *others[:2],
                    step=2,
                    lr=0.1,
                    max_exp_avg_sqs=others[2] if amsgrad else None,
                )
    assert_bits(lists.states, expected)
    names = ["fused_adamw_f64_f64_4"] * 3 + ["fused_adamw_f64_f64_3"] * 3
    assert host_kernels.launches == names


def _within_bounds() -> None:
    for size in (0, 1, 7, 33, 8195):
        for side in ("begin", "end"):
            for offset in (0, 1):
                states = [guarded(torch.ones(size), side, offset) for _ in range(4)]
                gradient = guarded(torch.ones(size, dtype=torch.bfloat16), read_only=True)
                kernels.fused_adamw(
                    states[:1],
                    [gradient],
                    states[1:2],
                    states[2:3],
                    step=1,
                    lr=0.5,
                    betas=(0.0, 0.0),
                    weight_decay=0.0,
                    eps=0.0,
                    max_exp_avg_sqs=states[3:],
                )
                assert bool((states[0] == 0.5).all())


def test_nothing_else_is_touched() -> None:
    assert exit_status(_within_bounds) == 0


def test_what_does_not_fit_is_refused() -> None:
    one = [torch.ones(3)]
    with pytest.raises(ValueError, match="there are 1 parameters but 2 exp_avg_sqs"):
        kernels.fused_adamw(one, one, one, one * 2, step=1, lr=0.1)
    with pytest.raises(ValueError, match=r"max_exp_avg_sqs\[0\] is \[2\] on cpu, but parameters"):
        kernels.fused_adamw(one, one, one, one, step=1, lr=0.1, max_exp_avg_sqs=[torch.ones(2)])
    with pytest.raises(ValueError, match=r"exp_avgs\[0\] is torch\.float16, but parameters\[0\]"):
        kernels.fused_adamw(one, one, [torch.ones(3).half()], one, step=1, lr=0.1)
    with pytest.raises(
        ValueError, match="step must be 1 or more, the number of this step, but got 0"
    ):
        kernels.fused_adamw(one, one, one, one, step=0, lr=0.1)
    complex_ones = [torch.ones(3, dtype=torch.complex64)]
    with pytest.raises(ValueError, match=r"parameters\[0\] is torch\.complex64 with layout"):
        kernels.fused_adamw(*[complex_ones] * 4, step=1, lr=0.1)
    assert one[0].tolist() == [1] * 3
    kernels.fused_adamw([], [], [], [], step=1, lr=0.1)
