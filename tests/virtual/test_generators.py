"""One random generator per device."""

from __future__ import annotations

import copy

import pytest
import torch

from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import strict_mode


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


@pytest.mark.parametrize("strict", [False, True])
def test_manual_seed_seeds_all_devices_as_the_cpu(strict: bool) -> None:
    torch.manual_seed(11)
    expected = draw("cpu")
    with strict_mode(strict):
        for seed in (torch.manual_seed, virtual.manual_seed_all):
            seed(11)
            for device in ("virtual:0", "virtual:3"):
                for result, wanted in zip(draw(device), expected, strict=True):
                    assert torch.equal(result, wanted)


def test_devices_draw_independently() -> None:
    torch.manual_seed(1)
    torch.rand(5, device="virtual:0")
    second = torch.rand(5, device="virtual:1").cpu()
    torch.manual_seed(1)
    assert torch.equal(torch.rand(5, device="virtual:1").cpu(), second)
    cpu = torch.random.get_rng_state()
    torch.rand(5, device="virtual:0")
    assert torch.equal(torch.random.get_rng_state(), cpu)


def test_own_generator() -> None:
    generator = torch.Generator(device="virtual:1")
    assert generator.device == torch.device("virtual:1")
    generator.manual_seed(7)
    assert generator.initial_seed() == 7
    first = draw("virtual:1", generator)
    state = generator.get_state()
    after = torch.rand(3, device="virtual:1", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device="virtual:1", generator=generator), after)
    other = generator.clone_state()
    assert torch.equal(
        torch.rand(3, device="virtual:1", generator=generator),
        torch.rand(3, device="virtual:1", generator=other),
    )
    generator.manual_seed(7)
    for again, before in zip(draw("virtual:1", generator), first, strict=True):
        assert torch.equal(again, before)
    assert generator.seed() != 7


def test_generator_of_another_device() -> None:
    generator = torch.Generator(device="virtual:1")
    with pytest.raises(RuntimeError, match="Expected a 'virtual:0' generator but found"):
        torch.rand(3, device="virtual:0", generator=generator)
    with pytest.raises(
        RuntimeError, match="Expected a 'virtual:0' generator but found one for 'cpu'"
    ):
        torch.empty(3, device="virtual:0").uniform_(generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
        torch.empty(3).uniform_(generator=generator)


@pytest.mark.parametrize("strict", [False, True])
def test_module_functions(strict: bool) -> None:
    with strict_mode(strict):
        _use_module_functions()


def _use_module_functions() -> None:
    virtual.set_device(2)
    virtual.manual_seed(5)
    assert virtual.initial_seed() == 5
    state = virtual.get_rng_state()
    assert torch.equal(state, virtual.get_rng_state("virtual:2"))
    a = torch.rand(3, device="virtual:2")
    virtual.set_rng_state(state, "virtual:2")
    assert torch.equal(torch.rand(3, device="virtual:2"), a)
    states = virtual.get_rng_state_all()
    b = torch.rand(3, device="virtual:2")
    virtual.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="virtual:2"), b)
    virtual.seed()
    virtual.seed_all()
    assert virtual.default_generators[2].device == torch.device("virtual:2")
    assert virtual.default_generators[0].initial_seed() == (
        virtual.default_generators[3].initial_seed()
    )


def test_torch_restores_what_draws() -> None:
    torch.manual_seed(2)
    with torch.random.fork_rng(devices=[0, 1], device_type="virtual"):
        inside = torch.rand(3, device="virtual:1")
    assert torch.equal(torch.rand(3, device="virtual:1"), inside)
    module = torch.nn.Dropout(0.5)
    x = torch.ones(100, device="virtual:1")
    torch.manual_seed(0)
    first = module(x)
    torch.manual_seed(0)
    assert torch.equal(copy.deepcopy(module)(x), first)
