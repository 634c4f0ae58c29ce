"""torch.accelerator and torch.virtual: devices, random generators, and what autocast does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dataparallel.virtual import counters, pending, set_memory_limit, strict_mode
from dataparallel.virtual import device_module as virtual
from tests.virtual.oracle import DEVICE

# --- devices -------------------------------------------------------------------------------------


def test_devices() -> None:
    assert torch.get_device_module("virtual") is virtual
    assert virtual.is_available() and virtual.is_initialized() and torch.accelerator.is_available()
    assert not virtual._is_in_bad_fork()
    assert virtual.device_count() == torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    virtual.init()
    virtual.set_device("virtual:3")
    assert virtual.current_device() == torch.accelerator.current_device_index() == 3
    with virtual.device("virtual:1"), torch.accelerator.device_index(2), virtual.device(1):
        assert torch.ones(1, device="virtual").device.index == 1
    with virtual.device_of(torch.ones(1, device="virtual:2")):
        assert virtual.current_device() == 2
    with virtual.device_of(torch.ones(1)):
        assert virtual.current_device() == 3
    assert virtual.get_device_properties(1).total_memory > 0
    assert "virtual" in virtual.get_device_name()
    assert virtual.get_device_capability() == (0, 0)
    assert virtual.can_device_access_peer(0, 1)
    assert virtual.is_bf16_supported()
    virtual.synchronize()
    virtual.synchronize("virtual:1")
    event = virtual.Event(enable_timing=True)
    event.record(virtual.Stream(1))
    assert event.query()


def test_stream_contexts_restore() -> None:
    before = virtual.current_stream(1)
    stream = virtual.Stream(1)
    virtual.set_device(0)
    with stream:
        assert virtual.current_stream(1) == stream
        assert virtual.current_device() == 1
    assert virtual.current_stream(1) == before
    assert virtual.current_device() == 0
    with virtual.stream(stream):
        assert torch.accelerator.current_stream(1) == stream
    with virtual.stream(None):
        assert virtual.current_stream(1) == before
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(virtual.default_stream(1))
    assert virtual.current_stream(1) == before


def test_each_thread_has_its_current_device_and_stream() -> None:
    virtual.set_device(1)
    seen: list[int] = []

    def look() -> None:
        seen.extend((virtual.current_device(), virtual.current_stream(1).stream_id))

    with torch.Stream("virtual:1"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [0, 0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: virtual.set_device("cpu"), ValueError, r"cpu .* accelerator"),
        (lambda: virtual.mem_get_info("cpu"), ValueError, "expected a virtual device, got cpu"),
        (lambda: virtual.set_device(4), RuntimeError, "there is no device virtual:4"),
        (lambda: torch.Stream("virtual:4"), RuntimeError, "there is no device virtual:4"),
        (lambda: virtual.memory_allocated("virtual:7"), (RuntimeError, ValueError), "virtual"),
        (lambda: pending("cpu"), ValueError, "expected a virtual device, got cpu"),
        (lambda: counters(8), ValueError, "no device virtual:8: 4 are enabled"),
        (lambda: set_memory_limit("virtual:9", 10), ValueError, "no device virtual:9: 4 are"),
        (lambda: set_memory_limit(1, -1), ValueError, "at least 0, or None, but got -1"),
        (lambda: set_memory_limit(1, 1.5), TypeError, "a number of bytes or None, but got 1.5"),  # type: ignore[arg-type]
    ],
)
def test_wrong_devices_and_limits(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


# --- one random generator per device -------------------------------------------------------------


def draw(device: str, generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """Numbers from many samplers."""
    options = {"device": device, "generator": generator}
    x = torch.empty(5, device=device)
    probabilities = torch.full((5,), 0.5, device=device)
    results = [
        torch.rand(5, **options),  # type: ignore[arg-type]
        torch.randn(20, **options),  # type: ignore[arg-type]
        torch.randint(0, 100, (5,), **options),  # type: ignore[arg-type]
        torch.randperm(9, **options),  # type: ignore[arg-type]
        x.uniform_(generator=generator).clone(),
        x.exponential_(generator=generator).clone(),
        torch.bernoulli(probabilities, generator=generator),
        torch.multinomial(probabilities, 3, generator=generator),
        torch.normal(probabilities, 2.0, generator=generator),
        torch.poisson(probabilities, generator=generator),
    ]
    return [each.cpu() for each in results]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("strict", [False, True])
def test_each_device_draws_as_the_cpu(strict: bool) -> None:
    torch.manual_seed(11)
    expected = draw("cpu")
    with strict_mode(strict):
        for seed in (torch.manual_seed, virtual.manual_seed_all):
            seed(11)
            assert all(same(draw(f"virtual:{i}"), expected) for i in (0, 3))
        generator = torch.Generator(device=DEVICE)
        assert generator.device == torch.device(DEVICE)
        for _ in range(2):
            generator.manual_seed(11)
            assert generator.initial_seed() == 11
            assert same(draw(DEVICE, generator), expected)
        assert generator.seed() != 11
    assert torch.equal(torch.random.get_rng_state(), torch.Generator().manual_seed(11).get_state())


@pytest.mark.parametrize("strict", [False, True])
def test_states_of_generators(strict: bool) -> None:
    with strict_mode(strict):
        generator = torch.Generator(device=DEVICE)
        state, other = generator.get_state(), generator.clone_state()
        first = draw(DEVICE, generator)
        generator.set_state(state)
        assert same(draw(DEVICE, generator), first) and same(draw(DEVICE, other), first)
        virtual.set_device(2)
        virtual.manual_seed(5)
        assert virtual.initial_seed() == 5
        state, states = virtual.get_rng_state(), virtual.get_rng_state_all()
        assert torch.equal(state, virtual.get_rng_state("virtual:2"))
        first = draw("virtual:2")
        for restore in (
            lambda: virtual.set_rng_state(state, "virtual:2"),
            lambda: virtual.set_rng_state_all(states),
        ):
            restore()
            assert same(draw("virtual:2"), first)
        with torch.random.fork_rng(devices=[0, 1], device_type="virtual"):
            inside = draw(DEVICE)
        assert same(draw(DEVICE), inside)
        virtual.seed()
        assert virtual.initial_seed() != 5
        virtual.seed_all()
        assert virtual.default_generators[2].device == torch.device("virtual:2")
        assert len({each.initial_seed() for each in virtual.default_generators}) == 1


# --- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lists_of_operators(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 4, device=DEVICE), torch.randn(4, 4, device=DEVICE)
    image, kernel = torch.randn(1, 2, 5, 5, device=DEVICE), torch.randn(3, 2, 3, 3, device=DEVICE)
    heads = torch.randn(1, 2, 3, 4, device=DEVICE)
    target = torch.tensor([0, 1, 2, 3], device=DEVICE)
    with torch.autocast("virtual", dtype=dtype):
        assert torch.get_autocast_dtype("virtual") == dtype
        lower = x @ w
        for result in (
            lower,
            F.linear(x, w),
            F.conv2d(image, kernel),
            torch.bmm(x[None], w[None]),
            F.scaled_dot_product_attention(heads, heads, heads),
            F.relu(lower),
        ):
            assert result.dtype == dtype
        for result in (
            F.softmax(lower, 1),
            F.cross_entropy(lower, target),
            F.layer_norm(lower, (4,)),
            lower.norm(),
            lower.exp(),
            lower.sum(),
            F.mse_loss(lower, x),
            torch.addcmul(x, lower, lower),
            torch.cat([x, lower]),
        ):
            assert result.dtype == torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ w).dtype == torch.float32, "that of the CPU does not concern the device"
    with pytest.warns(UserWarning, match=r"target dtype is not supported(?s:.*)bfloat16.*float16"):
        torch.autocast("virtual", dtype=torch.float64)


@pytest.mark.parametrize("strict", [False, True])
def test_scaler(strict: bool) -> None:
    with strict_mode(strict):
        network = nn.Linear(4, 2).to(DEVICE)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("virtual", init_scale=4.0)
        x = torch.randn(3, 4, device=DEVICE)
        for bad in (False, True):
            before = network.weight.detach().clone()
            with torch.autocast("virtual", dtype=torch.float16):
                loss = network(x).square().mean()
            scaler.scale(loss * float("inf") if bad else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(before, network.weight) is bad
        assert scaler.get_scale() == 2.0
