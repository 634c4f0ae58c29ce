"""Random numbers in replicas: reproducible, different in each, and right under checkpointing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dataparallel import generators, random_dispatch
from dataparallel.generators import mixed_seed, separate_device_generators
from dataparallel.parallel_apply import apply_replicas, current_replica

CPU = torch.device("cpu")
REPEATS = 40
SLOTS = {
    "cpu": ["cpu"] * 4,
    "distinct": [f"virtual:{i}" for i in range(4)],
    "shared": ["virtual:0"] * 2,
    "mixed": ["virtual:0", "cpu", "virtual:1", "virtual:0"],
}


def replicas(call: Callable[[], Any], slots: list[str] = SLOTS["cpu"]) -> list[Any]:
    return apply_replicas([call] * len(slots), [torch.device(slot) for slot in slots])


def here() -> torch.device:
    replica = current_replica()
    return CPU if replica is None else replica.device


@pytest.fixture(params=SLOTS)
def places(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    yield SLOTS[request.param]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=here())


# --- reproducible, and different -------------------------------------------------------------


def test_forty_repeats_give_one_result_and_replicas_differ(places: list[str]) -> None:
    net = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3))

    def call() -> torch.Tensor:
        return torch.cat([net(ones(64)).cpu() for _ in range(4)])

    results = set()
    for _ in range(REPEATS):
        torch.manual_seed(5)
        outputs = replicas(call, places)
        results.add(tuple(torch.cat(outputs).tolist()))
        assert len({tuple(y.tolist()) for y in outputs}) == len(places)
    assert len(results) == 1


def test_two_calls_after_one_seed_differ_and_are_reproducible(places: list[str]) -> None:
    def run() -> list[list[float]]:
        torch.manual_seed(5)
        calls = [replicas(lambda: F.dropout(ones(64)).cpu(), places) for _ in range(3)]
        return [torch.cat(outputs).tolist() for outputs in calls]

    first = run()
    assert run() == first
    assert first[0] != first[1] != first[2]


def test_another_seed_gives_other_numbers() -> None:
    torch.manual_seed(1)
    first = replicas(lambda: torch.rand(4))
    torch.manual_seed(2)
    second = replicas(lambda: torch.rand(4))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_call_without_draws_leaves_the_generator_of_the_caller() -> None:
    before = torch.get_rng_state()
    replicas(lambda: torch.ones(4) + 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_replica_draws_as_the_bare_module_does() -> None:
    net = nn.Dropout(0.5)
    x = torch.ones(64)
    torch.manual_seed(3)
    expected = net(x)
    torch.manual_seed(3)
    (output,) = apply_replicas([lambda: net(x)], [CPU])
    assert torch.equal(output, expected)


def test_a_generator_of_the_user_is_used_as_it_is() -> None:
    given = [torch.Generator().manual_seed(i) for i in range(4)]

    def call() -> torch.Tensor:
        replica = current_replica()
        assert replica is not None
        return torch.rand(8, generator=given[replica.index])

    before = torch.get_rng_state()
    outputs = replicas(call)
    for i, y in enumerate(outputs):
        assert torch.equal(y, torch.rand(8, generator=torch.Generator().manual_seed(i)))
    assert torch.equal(torch.get_rng_state(), before)


def test_nested_calls_are_reproducible() -> None:
    def outer() -> Any:
        first = torch.rand(2).tolist()
        return first, [y.tolist() for y in replicas(lambda: torch.rand(2))], torch.rand(2).tolist()

    results = []
    for _ in range(10):
        torch.manual_seed(0)
        results.append(replicas(outer))
    assert all(result == results[0] for result in results)
    inner = [tuple(y) for _, ys, _ in results[0] for y in ys]
    assert len(set(inner)) == 16


def test_draws_see_no_mode_of_the_caller() -> None:
    torch.manual_seed(0)
    expected = replicas(lambda: F.dropout(torch.ones(8, device="cpu")))
    for mode in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
        torch.manual_seed(0)
        with mode:
            outputs = replicas(lambda: F.dropout(torch.ones(8, device="cpu")))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_gradients_pass_through_random_operations() -> None:
    x = torch.ones(16, requires_grad=True)
    y = replicas(lambda: F.dropout(x, 0.5) + F.rrelu(-x, training=True))[0]
    (grad,) = torch.autograd.grad(y.sum(), x)
    # d/dx of x m + slope (-x) at x = 1 is the output itself.
    torch.testing.assert_close(grad, y.detach())


def test_other_threads_are_left_alone() -> None:
    replicas(lambda: torch.rand(1))
    torch.manual_seed(0)
    expected = torch.rand(4)
    found: list[torch.Tensor] = []

    def draw() -> None:
        torch.manual_seed(0)
        found.append(torch.rand(4))

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)
    assert random_dispatch.current_source() is None


def test_seeds_of_replicas_differ_in_the_bits_that_are_used() -> None:
    for seed in (0, 1, 2**63 - 1):
        seeds = [mixed_seed(seed, i) for i in range(256)]
        assert all(0 <= s < 2**64 for s in seeds)
        assert len({s & 0xFFFFFFFF for s in seeds}) == 256


# --- the state functions in a replica --------------------------------------------------------


def test_the_state_functions_act_on_the_generator_of_the_replica() -> None:
    def call() -> list[list[float]]:
        state = torch.get_rng_state()
        first = torch.rand(4)
        torch.set_rng_state(state)
        again = torch.rand(4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            assert torch.initial_seed() == 7
            seeded = torch.rand(4)
        return [first.tolist(), again.tolist(), seeded.tolist(), torch.rand(4).tolist()]

    torch.manual_seed(7)
    expected_seeded = torch.rand(4).tolist()
    results = []
    for _ in range(5):
        torch.manual_seed(1)
        results.append(replicas(call))
        assert torch.initial_seed() == 1, "a replica seeded the caller's generator"
    assert all(result == results[0] for result in results)
    for first, again, seeded, after in results[0]:
        assert first == again
        assert seeded == expected_seeded
        assert after != first
    assert len({tuple(result[0]) for result in results[0]}) == 4


def test_outside_of_replicas_the_state_functions_act_on_the_default_generator() -> None:
    replicas(lambda: torch.rand(1))
    stand_in: Any = torch.random.default_generator  # type: ignore[attr-defined]
    assert stand_in is not torch.default_generator
    torch.manual_seed(11)
    assert torch.default_generator.initial_seed() == stand_in.initial_seed() == 11
    assert torch.initial_seed() == 11
    assert stand_in.device == CPU
    assert torch.equal(torch.get_rng_state(), torch.default_generator.get_state())
    copy = pickle.loads(pickle.dumps(stand_in))
    assert isinstance(copy, torch.Generator)
    assert "CPU generator of this thread" in repr(stand_in)


# --- checkpointing ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def body(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(12).to(x.device)
        return F.dropout(torch.relu(layer(x)), 0.4) + noise * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.kind == "none":
                x = self.body(layer, x)
            else:
                reentrant = self.kind == "reentrant"
                x = checkpoint(self.body, layer, x, use_reentrant=reentrant)
        return x


def gradients(kind: str, slots: list[str]) -> list[torch.Tensor]:
    torch.manual_seed(9)
    blocks = [Block(kind).to(slot) for slot in slots]
    xs = [torch.randn(5, 12).to(slot).requires_grad_() for slot in slots]
    calls = [lambda b=b, x=x: b(x) for b, x in zip(blocks, xs, strict=True)]
    outputs = apply_replicas(calls, [torch.device(slot) for slot in slots])
    state = torch.get_rng_state()
    # One backward for all replicas, as with gathered outputs.
    torch.autograd.backward([y.square().sum().cpu() for y in outputs])
    assert torch.equal(torch.get_rng_state(), state), "backward changed the caller's generator"
    leaves = [*xs, *(p for block in blocks for p in block.parameters())]
    return [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_checkpointed_gradients_equal_those_without(places: list[str], kind: str) -> None:
    expected = gradients("none", places)
    assert len(expected) == len(places) * 7
    for _ in range(10):
        for found, wanted in zip(gradients(kind, places), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_checkpoints_recomputed_in_replica_threads_are_right_too() -> None:
    def train(kind: str) -> list[list[float]]:
        torch.manual_seed(9)
        blocks = [Block(kind) for _ in range(4)]
        x = torch.randn(5, 12)

        def call() -> list[float]:
            replica = current_replica()
            assert replica is not None
            block = blocks[replica.index]
            block(x.clone().requires_grad_()).square().sum().backward()
            return [float(g) for p in block.parameters() for g in p.grad.flatten()]  # type: ignore[union-attr]

        return replicas(call)

    expected = train("none")
    for kind in ("reentrant", "not reentrant"):
        for found, wanted in zip(train(kind), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


# --- accelerators ----------------------------------------------------------------------------


def test_accelerators_with_equal_seeds_are_separated_once() -> None:
    devices = [torch.device(f"virtual:{i}") for i in range(4)]
    defaults = [random_dispatch.default_generator(device) for device in devices]
    torch.manual_seed(3)
    assert [g.initial_seed() for g in defaults if g] == [3] * 4
    separate_device_generators(devices)
    seeds = [g.initial_seed() for g in defaults if g]
    assert len(set(seeds)) == 4
    assert seeds[0] == 3, "the first device keeps its seed"
    states = [g.get_state() for g in defaults if g]
    separate_device_generators(devices)
    assert all(torch.equal(a, g.get_state()) for a, g in zip(states, defaults, strict=True) if g)
    torch.manual_seed(3)
    separate_device_generators(devices)
    assert [g.initial_seed() for g in defaults if g] == seeds, "reproducible"


def test_separating_skips_the_cpu_and_repeated_devices() -> None:
    torch.manual_seed(3)
    separate_device_generators([CPU, CPU])
    assert torch.initial_seed() == 3
    separate_device_generators([torch.device("virtual:0")] * 2)
    default = random_dispatch.default_generator(torch.device("virtual:0"))
    assert default is not None
    assert default.initial_seed() == 3


def test_draws_on_a_shared_accelerator_leave_its_default_generator() -> None:
    default = random_dispatch.default_generator(torch.device("virtual:0"))
    assert default is not None
    torch.manual_seed(3)
    before = default.get_state()
    replicas(lambda: (torch.rand(4, device=here()), F.dropout(ones(16))), SLOTS["shared"])
    assert torch.equal(default.get_state(), before)


# --- a torch that does not allow it ----------------------------------------------------------


def test_a_torch_without_the_dispatch_key_warns_once_and_works() -> None:
    code = """
        import warnings
        import torch
        from dataparallel import random_dispatch
        random_dispatch._KEY_NAME = "NoSuchKey"
        from dataparallel.parallel_apply import parallel_apply
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert [y.shape for y in parallel_apply([torch.rand] * 2, [3, 3])] == [(3,)] * 2
        assert len(caught) == 1, caught
        assert "dropout masks depend on timing" in str(caught[0].message)
        assert torch.random.default_generator is torch.default_generator
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.returncode == 0, result.stderr


def test_traced_graphs_hold_no_generator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    tracing = threading.Lock()  # torch.fx traces in one thread at a time

    def call() -> str:
        with tracing:
            graph = make_fx(lambda x: F.dropout(x, 0.5))(torch.ones(4))
        return str(graph.code)

    assert all("bernoulli_" in code for code in replicas(call))
    assert not any("generator =" in code for code in replicas(call))
    assert generators.ReplicaGenerators([CPU, CPU]).shared == frozenset()
