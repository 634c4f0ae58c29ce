"""Random numbers in replicas: reproducible, different in each, and right when recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel import torch_internals
from dataparallel.threads import random as replica_random
from dataparallel.threads.apply import apply_replicas, current_replica
from dataparallel.threads.random import mixed_seed, separate_device_generators
from tests.virtual.oracle import run_python

CPU = torch.device("cpu")
SHARED = ["virtual:0"] * 2
PLACES = {
    "cpu": ["cpu"] * 4,
    "distinct": [f"virtual:{i}" for i in range(4)],
    "shared": SHARED,
    "mixed": ["virtual:0", "cpu", "virtual:1", "virtual:0"],
}


def replicas(call: Callable[[], Any], slots: list[str] = PLACES["cpu"]) -> list[Any]:
    return apply_replicas([call] * len(slots), [torch.device(slot) for slot in slots])


def here() -> torch.device:
    replica = current_replica()
    return CPU if replica is None else replica.device


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=here())


def default_of(device: str) -> torch.Generator:
    found = replica_random.default_generator(torch.device(device))
    assert found is not None
    return found


# --- every operation, everywhere -------------------------------------------------------------


def attention() -> Tensor:
    query = torch.linspace(-1, 1, 64, device=here()).reshape(1, 2, 4, 8)
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(ones(64)),
    "native_dropout": lambda: torch.native_dropout(ones(64), 0.5, True)[0],
    "rrelu": lambda: F.rrelu(-ones(64), training=True),
    "randperm": lambda: torch.randperm(64, device=here()),
    "normal_tensors": lambda: torch.normal(ones(16), ones(16)),
    "multinomial": lambda: torch.multinomial(ones(64), 32),
    "gamma": lambda: torch.distributions.Gamma(ones(16), ones(16)).sample(),
    "fractional_max_pool": lambda: F.fractional_max_pool2d(
        torch.arange(8.0 * 16 * 16, device=here()).reshape(1, 8, 16, 16), 2, output_size=7
    ),
    "attention": attention,
    "lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5).to(here())(ones(5, 2, 4))[0],
    "out": lambda: torch.rand(16, out=torch.empty(16, device=here())),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_operation_draws_from_its_replica(name: str) -> None:
    def draws() -> list[float]:
        return [float(x) for _ in range(3) for x in DRAWS[name]().detach().flatten()]

    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    # One draw is the seed of a call; a draw by a replica from the caller's generator would show.
    expected_state, results = torch.get_rng_state(), []
    for _ in range(3):
        torch.manual_seed(1)
        results.append(replicas(draws))
        assert torch.equal(torch.get_rng_state(), expected_state)
    assert results[0] == results[1] == results[2]
    assert len({tuple(result) for result in results[0]}) == 4, "replicas drew the same"


def test_all_operations_that_draw_are_covered() -> None:
    replicas(lambda: None, SHARED)
    name = "TESTING_ONLY_GenericMode"
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(name))
    expected = {
        operation
        for operation in torch._C._dispatch_get_all_op_names()
        if operation.startswith("aten::")
        and "Generator?" in str(torch._C._get_schema(*operation.partition(".")[::2]))
    }
    # Fused ones draw without saying so.
    fused = {"native_dropout", "_flash_attention_forward", "_efficient_attention_forward"}
    assert expected and expected | {f"aten::{name}" for name in fused} <= registered
    # Anything else there would cost time in every replica.
    assert not {op for op in registered if op.startswith("aten::add")}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_one_seed_gives_one_result_and_replicas_and_calls_differ(places: list[str]) -> None:
    net = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3))
    results = set()
    for seed in [5] * 30 + [6]:
        torch.manual_seed(seed)
        calls = [replicas(lambda: net(ones(64)).cpu(), places) for _ in range(2)]
        masks = [tuple(y.tolist()) for outputs in calls for y in outputs]
        assert len(set(masks)) == 2 * len(places)
        results.add(tuple(masks))
    assert len(results) == 2


def test_seeds_of_replicas_differ_in_the_bits_that_are_used() -> None:
    for seed in (0, 1, 2**63 - 1):
        seeds = [mixed_seed(seed, i) for i in range(256)]
        assert all(0 <= s < 2**64 for s in seeds)
        assert len({s & 0xFFFFFFFF for s in seeds}) == 256


# --- what is left alone ----------------------------------------------------------------------


def test_generators_of_others_are_left_alone() -> None:
    before = torch.get_rng_state()
    replicas(lambda: torch.ones(4) + 1)
    given = [torch.Generator().manual_seed(i) for i in range(4)]

    def call() -> Tensor:
        replica = current_replica()
        assert replica is not None
        return torch.rand(8, generator=given[replica.index])

    for i, y in enumerate(replicas(call)):
        assert torch.equal(y, torch.rand(8, generator=torch.Generator().manual_seed(i)))
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"
    # One replica draws as the bare module does, and so does any other thread.
    for run in (
        lambda: apply_replicas([lambda: torch.rand(4)], [CPU])[0],
        lambda: ThreadPoolExecutor(1).submit(torch.rand, 4).result(),
    ):
        torch.manual_seed(3)
        found = run()
        torch.manual_seed(3)
        assert torch.equal(found, torch.rand(4))
    # Otherwise each random operation of the caller would go through Python.
    assert not torch_internals.is_key_included(replica_random._kernels().key)


def test_modes_of_the_caller_see_only_what_the_module_does() -> None:
    class Recording(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def call() -> Tensor:
        return torch.ones(8, device="cpu").bernoulli_(0.5)

    seen: list[str] = []
    torch.manual_seed(0)
    expected = replicas(call)
    for mode in (torch.inference_mode(), torch.device("meta"), Recording()):
        torch.manual_seed(0)
        with mode:
            outputs = replicas(call)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert seen.count("aten.bernoulli_.float") == 4
    assert not any("random_" in name for name in seen)


def test_traced_graphs_hold_no_generator() -> None:
    tracing = threading.Lock()  # torch.fx traces in one thread at a time

    def call() -> str:
        with tracing:
            return str(make_fx(lambda x: F.dropout(x, 0.5))(torch.ones(4)).code)

    for code in replicas(call):
        assert "bernoulli_" in code and "generator =" not in code


# --- states ----------------------------------------------------------------------------------


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
        assert first == again != after
        assert seeded == expected_seeded


# --- accelerators ----------------------------------------------------------------------------


def test_accelerators_with_equal_seeds_are_separated_once() -> None:
    devices = [torch.device(slot) for slot in ("virtual:0", "cpu", *PLACES["distinct"])]
    defaults = [default_of(slot) for slot in PLACES["distinct"]]
    torch.manual_seed(3)
    separate_device_generators(devices)
    states = [generator.get_state() for generator in defaults]
    assert len({generator.initial_seed() for generator in defaults}) == 4
    assert defaults[0].initial_seed() == 3 == torch.initial_seed(), "the first keeps its seed"
    separate_device_generators(devices)
    assert all(torch.equal(a, g.get_state()) for a, g in zip(states, defaults, strict=True))


@pytest.mark.parametrize("depth", [1, 2])
def test_an_operation_without_a_generator_argument_draws_from_the_replica(depth: int) -> None:
    """Also where such an operation calls another one, as attention does."""
    default = default_of("virtual:0")

    class Fused:
        @staticmethod
        def redispatch(_keys: Any, x: Tensor) -> Tensor:
            return torch.rand(x.shape, device=x.device, generator=default)

    class Caller:
        @staticmethod
        def redispatch(keys: Any, x: Tensor) -> Tensor:
            result: Tensor = inner(keys, x)
            return result

    keys = torch._C._dispatch_keys(torch.ones(1))
    inner = replica_random._swapping_kernel(Fused, keys)
    kernel = inner if depth == 1 else replica_random._swapping_kernel(Caller, keys)

    def call() -> list[float]:
        # Drawn in turns by both, so that a common generator would show.
        return [float(y) for _ in range(20) for y in kernel(keys, ones(8)).cpu()]

    results = []
    for _ in range(5):
        torch.manual_seed(4)
        before = default.get_state()
        results.append(replicas(call, SHARED))
        replicas(lambda: F.dropout(ones(16)), SHARED)
        assert torch.equal(default.get_state(), before)
    assert all(result == results[0] for result in results)
    first, second = results[0]
    assert len({*first, *second}) == len(first) + len(second)


@pytest.mark.gpu
def test_fused_operations_on_a_shared_gpu_are_reproducible() -> None:
    query = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)

    def call() -> list[list[float]]:
        return [y.flatten()[::97].tolist() for y in (F.dropout(query), attend(), attend())]

    # Torch settles in the first call which attention is the fastest, but not for two threads.
    attend()
    results = []
    for _ in range(40):
        torch.manual_seed(4)
        results.append(replicas(call, ["cuda:0", "cuda:0"]))
    assert all(result == results[0] for result in results)
    masks = [values for replica in results[0] for values in replica]
    assert all(mask not in masks[:i] for i, mask in enumerate(masks))


# --- a torch that does not allow it ----------------------------------------------------------

WITHOUT = """
import os
import warnings
import torch
from dataparallel import torch_internals
from dataparallel.threads import random
from dataparallel.threads.apply import parallel_apply

def lose_key():
    random._KEY_NAME = "NoSuchKey"

def lose_default():
    torch_internals.replace_default_generator = lambda stand_in: None

warnings.simplefilter("ignore", DeprecationWarning)  # A fork beside threads, from Python 3.12 on.
for lose in (lose_key, lose_default):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    lose()
    for _ in range(2):
        try:
            parallel_apply([torch.rand] * 2, [3, 3])
        except RuntimeError as error:
            print(error, flush=True)
    assert [y.shape for y in parallel_apply([torch.rand], [3])] == [(3,)]
    os._exit(0)
"""


def test_a_torch_that_does_not_allow_it_says_so_at_each_call() -> None:
    result = run_python(WITHOUT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("install one of torch 2.11 to 2.15") == 4
