"""Modules and functions that are compiled with torch.compile, in replicas.

Oracle: the same module bare and not compiled. Nothing is compiled twice, and nothing at all when
calls go on as before.
"""

from __future__ import annotations

import copy
import functools
import itertools
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, current_replica
from dataparallel.collectives import SyncBatchNorm
from dataparallel.threads import compile as compiling
from dataparallel.threads import exclusive, workers
from dataparallel.torch_internals import untraced
from tests.models import assert_all_close, compare, grads_of

Started = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test finds an empty cache and leaves one, and has no warning about its limits."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def started() -> Iterator[Started]:
    """Yield the compilations: the reason of each, and its thread."""
    found: Started = []

    def note(args: Any) -> None:
        found.append((args.callback_trigger.name, threading.current_thread().name))

    handler: Any = torch._dynamo.callback.callback_handler
    handler.register_start_callback(note)
    yield found
    if note in handler.start_callbacks:
        handler.remove_start_callback(note)


class Net(nn.Module):
    """A residual block with parts that are compiled for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.second(torch.tanh(self.norm(self.first(x))))
        return output


def compile_whole(net: nn.Module, backend: str = "eager", **options: Any) -> Any:
    return torch.compile(net, backend=backend, **options)


def compile_in_place(net: nn.Module, **options: Any) -> nn.Module:
    net.compile(backend="eager", **options)
    return net


def compile_parts(net: nn.Module, backend: str = "eager") -> nn.Module:
    net.first = compile_whole(net.get_submodule("first"), backend)
    net.get_submodule("second").compile(backend=backend)
    return net


def compile_nested(net: nn.Module, backend: str = "eager") -> Any:
    return compile_whole(compile_parts(net, backend), backend)


def compile_method(net: nn.Module) -> nn.Module:
    vars(net)["forward"] = torch.compile(net.forward, backend="eager")
    return net


def compile_graphs(net: nn.Module) -> Any:
    return compile_whole(net, "aot_eager")


def twins(device: str = "cpu", build: Callable[[], Any] = Net) -> tuple[Any, Any]:
    bare = build().double().to(device)
    return bare, copy.deepcopy(bare)


def batch(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, dtype=torch.double, device=device)


CPU = ["cpu"] * 3
VIRTUAL = [f"virtual:{i}" for i in range(3)]
WRAPPERS = [DataParallel, dataparallel.DistributedDataParallel]


@pytest.mark.parametrize(
    ("how", "slots", "wrapper"),
    [
        (compile_graphs, VIRTUAL, WRAPPERS[1]),
        (compile_in_place, CPU, WRAPPERS[0]),
        (compile_parts, VIRTUAL, WRAPPERS[1]),
        (compile_nested, CPU, WRAPPERS[0]),
        (compile_nested, CPU, WRAPPERS[1]),
        (compile_method, CPU, WRAPPERS[1]),
    ],
)
def test_outputs_and_gradients(
    how: Callable[..., Any], slots: list[str], wrapper: Any, started: Started
) -> None:
    bare, net = twins(slots[0])
    model = wrapper(how(net), slots)
    for samples in (14, 9, 20):
        compare(model, bare, batch(samples, 4, device=slots[0]))
    assert started
    assert all("replica" in thread for _, thread in started)
    # At the first backward, several devices could come to it at the same time.
    assert {trigger for trigger, _ in started} == {"DYNAMO"}


@pytest.mark.parametrize("how", [compile_in_place, compile_parts])
def test_what_is_compiled_after_a_forward(how: Callable[..., Any], started: Started) -> None:
    bare, net = twins()
    model = DataParallel(net, ["cpu"] * 2)
    compare(model, bare, batch(7, 4))
    assert not started
    how(net)
    compare(model, bare, batch(7, 4))
    assert started


# --- how often something is compiled -----------------------------------------------------------


@pytest.mark.parametrize("slots", [CPU[:2], VIRTUAL[:2]], ids=["cpu", "virtual"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_compiled_again(slots: list[str], wrapper: Any, started: Started) -> None:
    bare, net = twins(slots[0])
    model = wrapper(compile_nested(net, "aot_eager"), slots)
    for _ in range(2):
        compare(model, bare, batch(8, 4, device=slots[0]))
    # Equal chunks: once for each device.
    assert len(started) == len(set(slots))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(10):
            compare(model, bare, batch(8, 4, device=slots[0]))
    with torch.no_grad():
        model(batch(8, 4, device=slots[0]))
        model.eval()
        model(batch(8, 4, device=slots[0]))
    assert len(started) <= 3 * len(set(slots))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_replicas_on_one_device_share_what_is_compiled(backend: str, started: Started) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend, dynamic=True), CPU)
    for samples in (14, 9, 20):
        compare(model, bare, batch(samples, 4))
    assert started == [("DYNAMO", "dataparallel-replica-0")]


@pytest.mark.parametrize("slots", [CPU, VIRTUAL], ids=["cpu", "virtual"])
def test_many_shapes(slots: list[str], started: Started) -> None:
    bare, net = twins(slots[0])
    model = DataParallel(compile_parts(net, "aot_eager"), slots)
    shapes = random.Random(0)
    for _ in range(25):
        compare(model, bare, batch(shapes.randint(3, 40), shapes.randint(2, 9), 4, device=slots[0]))
    # For each device: one size, any size, size 1 in the batch.
    assert len(started) <= 2 * 4 * len(set(slots))


def test_a_limit_for_each_device(started: Started) -> None:
    bare, net = twins("virtual:0")
    model = DataParallel(compile_whole(net, dynamic=False), VIRTUAL)
    with torch._dynamo.config.patch(recompile_limit=2):
        for samples in (6, 9, 6, 9):
            compare(model, bare, batch(samples, 4, device="virtual:0"))
    assert len(started) == 6


def test_the_cache_may_be_emptied() -> None:
    bare, net = twins()
    model = DataParallel(compile_graphs(net), ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, batch(8, 4))
        torch._dynamo.reset()


# --- what modules do ---------------------------------------------------------------------------


def test_replicas_within_replicas() -> None:
    bare, net = twins(build=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    net[0] = compile_whole(net[0])
    net[1] = DataParallel(compile_whole(net[1]), ["cpu"] * 2)
    model = DataParallel(net, ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, batch(12, 4))


@pytest.mark.parametrize(
    ("layer", "buffers"),
    [
        (nn.BatchNorm1d, "replica0"),
        (nn.BatchNorm1d, "sync"),
        (SyncBatchNorm, "replica0"),
    ],
)
def test_buffers_of_compiled_modules_are_those_of_plain_ones(
    layer: Any, buffers: Any, started: Started
) -> None:
    plain, net = twins(build=lambda: nn.Sequential(nn.Linear(4, 8), layer(8), nn.Linear(8, 4)))
    expected = DataParallel(plain, ["cpu"] * 2, buffers=buffers)
    model = DataParallel(compile_graphs(net), ["cpu"] * 2, buffers=buffers)
    for samples in (12, 9):
        compare(model, expected, batch(samples, 4))
        assert_all_close(net.buffers(), plain.buffers())
    model.eval(), expected.eval()
    compare(model, expected, batch(12, 4))
    assert started


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout(backend: str) -> None:
    model = DataParallel(compile_whole(nn.Dropout(0.5), backend), CPU)
    plain = DataParallel(nn.Dropout(0.5), CPU)
    x = torch.ones(300, requires_grad=True)
    masks = []
    for module in (model, model, plain):
        torch.manual_seed(3)
        output = module(x)
        (grad,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(grad, output)
        masks.append((output, torch.rand(1)))
    for mask, following in masks[1:]:
        # The first call, which compiled, draws the same.
        assert torch.equal(mask, masks[0][0])
        assert torch.equal(following, masks[0][1])
    first, second, third = masks[0][0].chunk(3)
    assert not torch.equal(first, second) and not torch.equal(second, third)


# --- functions that modules call, and those that call a wrapper --------------------------------


@functools.partial(torch.compile, backend="eager", dynamic=True)
def bent(x: Tensor) -> Tensor:
    return torch.tanh(x)


class Bent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = torch.compile(lambda x: torch.tanh(self.layer(x)), backend="eager")

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.layer(x))


class CallsFunction(Bent):
    def forward(self, x: Tensor) -> Any:
        return bent(self.layer(x))


class HoldsFunction(Bent):
    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class DecoratedForward(Bent):
    @functools.partial(torch.compile, backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("slots", [CPU[:2], VIRTUAL[:2]], ids=["cpu", "virtual"])
@pytest.mark.parametrize("build", [CallsFunction, HoldsFunction, DecoratedForward])
def test_compiled_functions(
    build: Callable[[], nn.Module], slots: list[str], started: Started
) -> None:
    bare, module = (made().double().to(slots[0]) for made in (Bent, build))
    module.load_state_dict(bare.state_dict())
    model = DataParallel(module, slots)
    counts = []
    for _ in range(3):
        compare(model, bare, batch(8, 4, device=slots[0]))
        counts.append(len(started))
    # Before the first compilation of a process replicas do not run in turn: each may compile.
    assert len(set(slots)) <= counts[0] <= len(slots)
    assert counts == counts[:1] * 3


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_is_compiled(wrapper: Any, started: Started) -> None:
    bare, net = twins()
    outer = compile_graphs(wrapper(net, ["cpu"] * 2))
    for samples in (7, 7, 9):
        compare(outer, bare, batch(samples, 4))
    assert not started


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_training_step_is_compiled(started: Started) -> None:
    bare, net = twins()
    model = DataParallel(compile_graphs(net), ["cpu"] * 2)
    criterion = nn.MSELoss()

    def step(module: nn.Module, x: Tensor) -> Tensor:
        turned = torch.sin(x) * 2
        if isinstance(module, DataParallel):
            loss = module.loss(criterion, turned, x)
        else:
            loss = criterion(module(turned), x)
        result: Tensor = module(turned).pow(2).mean() + loss
        return result

    compiled_step = torch.compile(step, backend="aot_eager")
    for samples in (7, 9):
        x = batch(samples, 4)
        results = []
        for run, module in ((step, bare), (compiled_step, model)):
            module.zero_grad()
            loss = run(module, x)
            loss.backward()
            results.append([loss, *grads_of(module)])
        assert_all_close(results[1], results[0])
    assert {thread for _, thread in started} >= {"MainThread", "dataparallel-replica-0"}
    torch._dynamo.reset()
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="replicas run in threads"):
        whole(model, x)


# --- one after another, or at the same time ------------------------------------------------------


class Holds(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Watched(nn.Module):
    """Notes when it runs, and may wait for the other replicas."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        # All replicas have this one; a list each would have for itself.
        self.spans: deque[tuple[float, float]] = deque()
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        begin = time.monotonic()
        if self.barrier is not None:
            self.barrier.wait(10.0)
        output: Tensor = self.layer(x)
        time.sleep(0.01)
        self.spans.append((begin, time.monotonic()))
        return output

    def overlapped(self) -> bool:
        spans = sorted(self.spans)
        self.spans.clear()
        return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def substitutions(call: Callable[[], object]) -> int:
    """Count how often a call goes on to the target of a module's reference."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name))
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls.count("substitute")


def test_wrapped_functions_of_the_compiler_are_cloned_without_going_over_the_layers() -> None:
    def count(num_layers: int) -> int:
        net = compile_whole(nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers))))
        return substitutions(lambda: dataparallel.replicate(net, CPU))

    assert 0 < count(12) == count(2)


@pytest.mark.parametrize("how", [compile_whole, compile_in_place, compile_nested])
def test_clones_of_compiled_modules_stand_until_a_reference_leads_elsewhere(how: Any) -> None:
    bare, net = twins()
    model = dataparallel.DistributedDataParallel(how(net), ["cpu"] * 2)
    x = batch(8, 4)
    for _ in range(3):
        compare(model, bare, x)
    assert substitutions(lambda: model(x)) == 0
    layer: nn.Module
    vars(net)["forward"] = lambda x: layer(x)
    for name, size in (("first", 4), ("norm", 8), ("second", 8)):
        layer, x = net.get_submodule(name), batch(8, size)
        torch.testing.assert_close(model(x), bare.get_submodule(name)(x))


@pytest.mark.parametrize(("wrap", "in_turn"), [(compile_whole, 2), (lambda net: net, 1)])
def test_one_after_another_at_first_and_then_at_the_same_time(wrap: Any, in_turn: int) -> None:
    module = Watched(wrap(nn.Linear(4, 4)))
    model = DataParallel(module, CPU)
    # Something is compiled in this process.
    compile_whole(nn.Linear(1, 1))(torch.ones(1, 1))
    for _ in range(in_turn):
        model(torch.randn(6, 4))
        assert not module.overlapped()
    module.barrier = threading.Barrier(3)
    for _ in range(2):
        model(torch.randn(6, 4))
        assert module.overlapped()
    # Another mode is compiled anew.
    module.barrier = None
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert not module.overlapped()


def test_new_sizes_are_trusted_once_they_compile_nothing(started: Started) -> None:
    module = Watched(compile_whole(nn.Linear(4, 4)))
    model = DataParallel(module, ["cpu"] * 2)
    quiet = 0
    # Compiled for one size, then for any size; torch decides when.
    for samples in (4, 8, 12, 16, 20, 24, 28):
        trusted, compiled = quiet >= 1, len(started)
        # Replicas that run one after another would wait here in vain.
        module.barrier = threading.Barrier(2) if trusted else None
        model(torch.randn(samples, 4))
        assert module.overlapped() == trusted
        quiet = quiet + 1 if len(started) == compiled else 0
    assert quiet > 2


def test_replicas_that_wait_for_each_other_in_their_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0.3)
    barriers = [threading.Barrier(2) for _ in range(3)]
    waits = iter([barrier for barrier in barriers for _ in range(2)])
    lock = threading.Lock()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with lock:
                barrier = next(waits)
            barrier.wait(20.0)
            return x

    net = nn.Sequential(compile_whole(nn.Linear(4, 4)), Waits(), compile_whole(nn.Linear(4, 4)))
    model = DataParallel(net, ["cpu"] * 2)
    for _ in range(3):
        # In the first call replica 1 starts though replica 0 has not ended.
        assert model(torch.randn(4, 4)).shape == (4, 4)


# --- compiling while others run ------------------------------------------------------------------


mode = "once"
FACTORS = {"once": 1, "twice": 2, "thrice": 3}


def test_nothing_runs_while_a_replica_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    now, compiles, disturbed = threading.Lock(), [0], [0]

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        compiles[0] += 1
        with now:
            time.sleep(0.03)
        return graph.forward

    layer = nn.Linear(4, 4)
    # Is compiled for the value of a global variable, which no argument tells.
    function = torch.compile(lambda x: layer(x) * FACTORS[mode], backend=backend)

    def work(x: Tensor) -> Tensor:
        output: Tensor = function(x)
        for _ in range(20):
            disturbed[0] += now.locked() or torch.compiler.is_compiling()
            time.sleep(0.001)
        return output

    module = Watched(work)
    model = DataParallel(module, CPU)
    x = torch.randn(6, 4)
    model(x), model(x), module.overlapped(), model(x)
    assert compiles[0] == 1
    assert module.overlapped()
    for name in ("twice", "thrice"):
        monkeypatch.setitem(globals(), "mode", name)
        expected = layer(x) * FACTORS[name]
        torch.testing.assert_close(model(x), expected)
        module.overlapped()
        # Then the replicas run one after another once more.
        torch.testing.assert_close(model(x), expected)
        assert not module.overlapped()
    assert compiles[0] >= 3
    assert disturbed[0] == 0


def test_a_call_that_begins_while_something_is_compiled_waits() -> None:
    other = DataParallel(nn.Linear(4, 4), ["cpu"] * 2)
    begun: list[threading.Thread] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        begun.append(threading.Thread(target=other, args=(torch.randn(4, 4),)))
        begun[0].start()
        begun[0].join(0.3)
        assert begun[0].is_alive()
        return graph.forward

    module = torch.compile(nn.Linear(4, 4), backend=backend)
    compiling.lock.install()
    module(torch.randn(2, 4))
    begun[0].join(10.0)
    assert not begun[0].is_alive()


def test_torchs_settings_are_as_before() -> None:
    barrier = threading.Barrier(2)
    meets: list[bool] = []

    @untraced
    def meet() -> None:
        if meets:
            barrier.wait(10.0)

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meet()
            return x + 1

    model = DataParallel(compile_whole(Adds(), dynamic=False), ["cpu"] * 2)
    # Either of two replicas may leave first, and it matters.
    for number in range(12):
        model(torch.randn(4, 4))
        assert torch._dynamo.config.automatic_dynamic_shapes is True
        # From the third call on they run at the same time.
        if number:
            meets.append(True)


@pytest.mark.parametrize(
    ("function", "runs_beside"),
    [
        (torch.sin, True),
        (
            lambda x: torch.div(7, x.long().abs() + 2, rounding_mode="floor"),
            torch.__version__ < "2.13",
        ),
    ],
    ids=["sin", "divides-integers"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_threads_go_on_while_a_kernel_runs(
    function: Callable[[Tensor], Tensor], runs_beside: bool
) -> None:
    compiled = torch.compile(function, backend="inductor")
    model = DataParallel(Holds(compiled), ["cpu"] * 2)
    x = torch.randn(1_000_000)
    seen: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for frame in sys._current_frames().values():
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                seen.extend([line] * line.strip().startswith("cpp_"))
            time.sleep(0)

    for _ in range(3):
        torch.testing.assert_close(model(x), function(x))
    watcher, interval = threading.Thread(target=watch), sys.getswitchinterval()
    # From now on, a thread runs until it lets others run.
    sys.setswitchinterval(1000.0)
    watcher.start()
    try:
        for _ in range(30):
            model(x)
            if seen:
                break
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        watcher.join()
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert bool(seen) == (runs_beside or not has_lock)


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupt", [False, True])
def test_an_error_or_an_interrupt_while_a_replica_compiles(interrupt: bool) -> None:
    calls: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        calls.append(inputs)
        if len(calls) == 1 and interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        elif len(calls) == 1:
            raise ZeroDivisionError("this backend fails at first")
        return graph.forward

    bare, net = twins()
    compiled: Any = torch.compile(net, backend=backend)
    model = DataParallel(compiled, CPU)
    text = None if interrupt else r"(?s)this backend fails at first.*in replica 0 on device"
    with pytest.raises(KeyboardInterrupt if interrupt else Exception, match=text):
        model(batch(9, 4))
    for _ in range(2):
        compare(model, bare, batch(9, 4))
    assert not exclusive.lock._is_wanted() and not exclusive.lock._running


def test_a_replica_that_runs_on_while_another_wants_to_compile_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exclusive.lock, "timeout", 0.3)
    monkeypatch.setattr(workers, "_PATIENCE", 0.2)
    ended = threading.Event()
    began = threading.Event()

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = compile_whole(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            replica = current_replica()
            assert replica is not None
            if replica.index == 1:
                began.set()
                # This never happens while this runs.
                ended.wait(20.0)
                return x
            try:
                began.wait(20.0)
                return self.layer(x)
            finally:
                ended.set()

    model = DataParallel(Uneven(), ["cpu"] * 2)
    with pytest.raises(TimeoutError, match=r"(?s)did not stop: .*replica-1.*current_r"):
        model(torch.randn(4, 4))
    assert not exclusive.lock._is_wanted() and not exclusive.lock._running
