"""Random numbers in replicas: reproducible, and different in each."""

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
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel import torch_internals
from dataparallel.threads import random as replica_random
from dataparallel.threads.apply import apply_replicas, current_replica
from dataparallel.threads.random import mixed_seed, separate_device_generators

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


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_caller_sees_only_what_the_module_does() -> None:
    with Recording() as mode:
        replicas(lambda: torch.ones(4).bernoulli_(0.5))
    assert mode.seen.count("aten.bernoulli_.float") == 4
    assert not any("random_" in name for name in mode.seen)


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
    assert replica_random.current_source() is None
    # Otherwise each random operation of the caller would go through Python.
    assert not torch_internals.is_key_included(replica_random._kernels().key)


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
    assert copy.initial_seed() == 11


# --- accelerators ----------------------------------------------------------------------------


def test_accelerators_with_equal_seeds_are_separated_once() -> None:
    devices = [torch.device(f"virtual:{i}") for i in range(4)]
    defaults = [replica_random.default_generator(device) for device in devices]
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
    default = replica_random.default_generator(torch.device("virtual:0"))
    assert default is not None
    assert default.initial_seed() == 3


def test_draws_on_a_shared_accelerator_leave_its_default_generator() -> None:
    default = replica_random.default_generator(torch.device("virtual:0"))
    assert default is not None
    torch.manual_seed(3)
    before = default.get_state()
    replicas(lambda: (torch.rand(4, device=here()), F.dropout(ones(16))), SLOTS["shared"])
    assert torch.equal(default.get_state(), before)


def test_an_operation_without_a_generator_argument_draws_from_the_replica() -> None:
    device = torch.device("virtual:0")
    default = replica_random.default_generator(device)
    assert default is not None

    class Fused:
        @staticmethod
        def redispatch(_keys: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.rand(x.shape, device=x.device, generator=default)

    keys = torch._C._dispatch_keys(torch.ones(1))
    kernel = replica_random._swapping_kernel(Fused, keys)

    def call() -> list[float]:
        x = torch.ones(8, device=device)
        # Drawn in turns by both, so that a common generator would show.
        return [float(y) for _ in range(20) for y in kernel(keys, x).cpu()]

    results = []
    for _ in range(5):
        torch.manual_seed(4)
        before = default.get_state()
        results.append(replicas(call, SLOTS["shared"]))
        assert torch.equal(default.get_state(), before)
    assert all(result == results[0] for result in results)
    assert results[0][0] != results[0][1]


def test_fused_operations_without_a_generator_argument_are_covered() -> None:
    replicas(lambda: None, SLOTS["shared"])
    name = "TESTING_ONLY_GenericMode"
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(name))
    assert {
        "aten::native_dropout",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
    } <= registered


@pytest.mark.gpu
def test_fused_operations_on_a_shared_gpu_are_reproducible() -> None:
    query = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16)

    def call() -> list[float]:
        y = F.dropout(query) + F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        return [float(value) for value in y.flatten()[::97].cpu()]

    results = []
    for _ in range(REPEATS):
        torch.manual_seed(4)
        results.append(replicas(call, ["cuda:0", "cuda:0"]))
    assert all(result == results[0] for result in results)
    assert results[0][0] != results[0][1]


# --- a torch that does not allow it ----------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    [
        "random._KEY_NAME = 'NoSuchKey'",
        "torch_internals.Kernels.register = lambda self, name, kernel: None",
        "torch_internals.replace_default_generator = lambda stand_in: None",
    ],
)
def test_a_torch_that_does_not_allow_it_says_so_at_each_call(lost: str) -> None:
    code = f"""
        import torch
        from dataparallel import torch_internals
        from dataparallel.threads import random
        {lost}
        from dataparallel.threads.apply import parallel_apply
        for _ in range(2):
            try:
                parallel_apply([torch.rand] * 2, [3, 3])
            except RuntimeError as error:
                print(error)
        assert [y.shape for y in parallel_apply([torch.rand], [3])] == [(3,)]
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("install one of torch 2.11 to 2.15") == 2


def test_traced_graphs_hold_no_generator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    tracing = threading.Lock()  # torch.fx traces in one thread at a time

    def call() -> str:
        with tracing:
            graph = make_fx(lambda x: F.dropout(x, 0.5))(torch.ones(4))
        return str(graph.code)

    assert all("bernoulli_" in code for code in replicas(call))
    assert not any("generator =" in code for code in replicas(call))
