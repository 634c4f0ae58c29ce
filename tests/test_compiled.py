"""Modules and functions compiled with torch.compile, in replicas.

Oracle: the same module bare and not compiled. Nothing is compiled twice, and nothing at all when
calls go on as before.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel, compile_lock, compiled
from dataparallel.rendezvous import current_rendezvous
from dataparallel.turns import turns
from tests.models import assert_all_close, grads_of

Wrapper: TypeAlias = Callable[..., DataParallel[nn.Module]]
WRAPPERS = [DataParallel, dataparallel.DistributedDataParallel]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test finds an empty cache and leaves one, and has no warning about its limits."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def started() -> Iterator[list[tuple[str, str]]]:
    """What was compiled: what for, and in which thread."""
    found: list[tuple[str, str]] = []

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


def compile_whole(net: nn.Module, **options: Any) -> nn.Module:
    module: Any = torch.compile(net, **options)
    assert isinstance(module, nn.Module)
    return module


def compile_in_place(net: nn.Module, **options: Any) -> nn.Module:
    net.compile(**options)
    return net


def compile_parts(net: nn.Module, **options: Any) -> nn.Module:
    net.first = compile_whole(net.get_submodule("first"), **options)
    net.get_submodule("second").compile(**options)
    return net


def compile_nested(net: nn.Module, **options: Any) -> nn.Module:
    return compile_whole(compile_parts(net, **options), **options)


def compile_method(net: nn.Module, **options: Any) -> nn.Module:
    vars(net)["forward"] = torch.compile(net.forward, **options)
    return net


HOW = [
    (compile_whole, "aot_eager"),
    (compile_in_place, "eager"),
    (compile_parts, "eager"),
    (compile_nested, "eager"),
    (compile_method, "eager"),
]


def compare(
    model: DataParallel[nn.Module], bare: nn.Module, *shape: int, device: str = "cpu"
) -> None:
    """One forward and backward: outputs and gradients are those of the bare module."""
    x = torch.randn(*shape, dtype=torch.double, device=device)
    results = []
    for module in (bare, model):
        module.zero_grad()
        output = module(x)
        output.pow(2).sum().backward()
        results.append([output, *grads_of(module)])
    assert_all_close(results[1], results[0])


def twins(device: str = "cpu", build: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    bare = build().double().to(device)
    return bare, copy.deepcopy(bare)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("how, backend", HOW)
@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_outputs_and_gradients(
    kind: str,
    how: Callable[..., nn.Module],
    backend: str,
    wrapper: Wrapper,
    started: list[tuple[str, str]],
) -> None:
    slots = ["cpu"] * 3 if kind == "cpu" else [f"virtual:{i}" for i in range(3)]
    bare, net = twins(slots[0])
    model = wrapper(how(net, backend=backend), slots)
    for batch in (14, 9, 20):
        compare(model, bare, batch, 4, device=slots[0])
    assert started
    assert all("replica" in thread for _, thread in started)
    # At the first backward, several devices could come to it at the same time.
    assert {trigger for trigger, _ in started} == {"DYNAMO"}


@pytest.mark.parametrize("how", [compile_in_place, compile_parts])
def test_compiled_after_wrapping(
    how: Callable[..., nn.Module], started: list[tuple[str, str]]
) -> None:
    bare, net = twins()
    model = DataParallel(net, ["cpu", "cpu"])
    compare(model, bare, 7, 4)
    assert not started
    how(net, backend="eager")
    compare(model, bare, 7, 4)
    assert started


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_nothing_is_compiled_again(
    kind: str, wrapper: Wrapper, started: list[tuple[str, str]]
) -> None:
    slots = ["cpu"] * 2 if kind == "cpu" else ["virtual:0", "virtual:1"]
    bare, net = twins(slots[0])
    model = wrapper(compile_nested(net, backend="aot_eager"), slots)
    for _ in range(2):
        compare(model, bare, 8, 4, device=slots[0])
    # Equal chunks: once for each device.
    assert len(started) == len(set(slots))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(20):
            compare(model, bare, 8, 4, device=slots[0])
    with torch.no_grad():
        model(torch.randn(8, 4, dtype=torch.double, device=slots[0]))
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 4, dtype=torch.double, device=slots[0]))
    assert len(started) <= 3 * len(set(slots))


def test_replicas_on_one_device_share_what_is_compiled(started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend="eager", dynamic=True), ["cpu"] * 3)
    for batch in (14, 9, 20, 33):
        compare(model, bare, batch, 4)
    assert started == [("DYNAMO", "dataparallel-replica-0")]


def test_entries_stay_in_their_order() -> None:
    """An entry that moves while another thread goes through them is not found by that one."""
    _, net = twins()
    model = DataParallel(compile_whole(net, backend="eager", dynamic=False), ["cpu"] * 2)
    entries: Any = torch._dynamo.eval_frame._debug_get_cache_entry_list
    orders = []
    for batch in (8, 12, 16, 8, 12):
        model(torch.randn(batch, 4, dtype=torch.double))
        orders.append([entry.compile_id for entry in entries(Net.forward)])
    assert len(orders[2]) == 3
    assert orders[2] == orders[3] == orders[4]


# --- functions -------------------------------------------------------------------------------


@functools.partial(torch.compile, backend="eager", dynamic=True)
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x) * scale


class CallsFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = scaled(self.layer(x), self.layer.bias)
        return output


class HoldsFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = torch.compile(lambda x: torch.tanh(self.layer(x)), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function(x)
        return output


def nested_functions() -> nn.Module:
    return compile_whole(HoldsFunction(), backend="eager")


class DecoratedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @functools.partial(torch.compile, backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class HidesFunction(CallsFunction):
    """Calls the function in a way in which it is not found beforehand."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self, "_".join(("call", "scaled")))(x)
        return output

    call_scaled = CallsFunction.forward


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
@pytest.mark.parametrize(
    "build", [CallsFunction, HoldsFunction, nested_functions, DecoratedForward]
)
def test_compiled_functions(
    build: Callable[[], nn.Module], kind: str, started: list[tuple[str, str]]
) -> None:
    slots = ["cpu"] * 2 if kind == "cpu" else ["virtual:0", "virtual:1"]
    torch.manual_seed(1)
    bare, module = build().double().to(slots[0]), build().double().to(slots[0])
    module.load_state_dict(bare.state_dict())
    model = DataParallel(module, slots)
    assert compiled.has_compiled(module)
    with torch.compiler.set_stance("force_eager"):
        x = torch.randn(8, 4, dtype=torch.double, device=slots[0])
        expected = bare(x)
        expected.pow(2).sum().backward()
    for _ in range(3):
        model.zero_grad()
        output = model(x)
        output.pow(2).sum().backward()
        assert_all_close([output, *grads_of(module)], [expected, *grads_of(bare)])
    assert len(started) == len(set(slots))


def test_what_is_compiled() -> None:
    torch.compile(torch.sin, backend="eager")
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    assert not compiled.has_compiled(plain)
    assert compiled.has_compiled(nn.Sequential(plain, compile_whole(Net(), backend="eager")))
    assert compiled.has_compiled(nn.Sequential(plain, compile_in_place(Net(), backend="eager")))
    assert compiled.has_compiled(CallsFunction())
    plain.hook = torch.compiler.disable(lambda: None)
    assert not compiled.has_compiled(plain)


# --- replicas run one after another at first, then at the same time ------------------------------


class Watched(nn.Module):
    """Notes when it runs, and may wait for the other replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.compile(nn.Linear(4, 4), backend="eager")
        self.spans: list[tuple[float, float]] = []
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        begin = time.monotonic()
        if self.barrier is not None:
            self.barrier.wait(10.0)
        output = self.work(x)
        time.sleep(0.01)
        self.spans.append((begin, time.monotonic()))
        return output

    def work(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output

    def overlapped(self) -> bool:
        spans, self.spans[:] = sorted(self.spans), []
        return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def test_one_after_another_at_first_and_then_at_the_same_time() -> None:
    module = Watched()
    model = DataParallel(module, ["cpu"] * 3)
    model(torch.randn(6, 4))
    assert not module.overlapped()
    module.barrier = threading.Barrier(3)
    model(torch.randn(6, 4))
    assert module.overlapped()
    # Another mode is compiled anew.
    module.barrier = None
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert not module.overlapped()


def test_new_sizes_are_trusted_once_they_compile_nothing() -> None:
    module = Watched()
    model = DataParallel(module, ["cpu"] * 2)
    seen = []
    for batch in (4, 8, 12, 16, 20, 24, 28):
        model(torch.randn(batch, 4))
        seen.append(module.overlapped())
    # Compiled for one size, for any size, twice nothing to compile.
    assert seen[:4] == [False] * 4
    assert seen[4:] == [True] * 3


def test_what_is_not_compiled_does_not_wait() -> None:
    module = Watched()
    module.layer = nn.Linear(4, 4)
    model = DataParallel(module, ["cpu"] * 2)
    module.barrier = threading.Barrier(2)
    model(torch.randn(4, 4))
    assert module.overlapped()


def test_replicas_that_meet(started: list[tuple[str, str]]) -> None:
    def total(sizes: list[Tensor]) -> list[Tensor]:
        return [torch.stack(sizes).sum(0)] * len(sizes)

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            sizes = torch.tensor(x.shape)
            meeting = current_rendezvous()
            if meeting is not None:
                sizes = meeting.exchange("sizes", sizes, total)
            output: Tensor = self.second(x) * sizes[0]
            return output

    bare, net = twins(build=Meets)
    model = DataParallel(compile_in_place(net, backend="eager"), ["cpu"] * 3)
    for batch in (14, 14, 9, 20, 33):
        compare(model, bare, batch, 4)
    # Nothing of the meeting itself is compiled.
    assert len(started) <= 6


@pytest.mark.parametrize("buffers", ["replica0", "sync"])
def test_buffers(buffers: Any, started: list[tuple[str, str]]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    plain, net = twins(build=build)
    expected = DataParallel(plain, ["cpu"] * 2, buffers=buffers)
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2, buffers=buffers)
    for batch in (12, 12, 9):
        compare(model, expected, batch, 4)
        assert_all_close(net.buffers(), plain.buffers())
    model.eval(), expected.eval()
    compare(model, expected, 12, 4)
    assert started


def test_mean_of_buffers() -> None:
    class Remembers(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.copy_(x.mean())
            return x * 2

    module = Remembers()
    model = DataParallel(compile_whole(module, backend="aot_eager"), ["cpu"] * 3, buffers="mean")
    for _ in range(2):
        x = torch.randn(8, 4)
        model(x)
        torch.testing.assert_close(module.seen, x.mean())


# --- compiling while others run --------------------------------------------------------------


class Slow:
    """A backend that takes its time, and notes whether anything else ran meanwhile."""

    def __init__(self) -> None:
        self.compiles = 0
        self.compiling = False
        self.disturbed = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Any:
        self.compiles += 1
        assert not self.compiling
        self.compiling = True
        time.sleep(0.03)
        self.compiling = False
        return graph.forward

    def look(self) -> None:
        self.disturbed += self.compiling or torch.compiler.is_compiling()


mode = "once"
FACTORS = {"once": 1, "twice": 2, "thrice": 3}


class Unpredictable(Watched):
    """Is compiled for the value of a global variable, which no argument tells."""

    def __init__(self, backend: Slow) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.look = backend.look
        self.function = torch.compile(lambda x: self.layer(x) * FACTORS[mode], backend=backend)

    def work(self, x: Tensor) -> Tensor:
        output: Tensor = self.function(x)
        for _ in range(20):
            self.look()
            time.sleep(0.001)
        return output


def test_nothing_runs_while_a_replica_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Slow()
    module = Unpredictable(backend)
    model = DataParallel(module, ["cpu"] * 3)
    x = torch.randn(6, 4)
    model(x), module.overlapped(), model(x)
    assert backend.compiles == 1
    assert module.overlapped()
    for name in ("twice", "thrice"):
        monkeypatch.setitem(globals(), "mode", name)
        with torch.no_grad():
            expected = module.layer(x) * FACTORS[name]
        torch.testing.assert_close(model(x).detach(), expected)
        module.overlapped()
        # Then the replicas run one after another once more.
        torch.testing.assert_close(model(x).detach(), expected)
        assert not module.overlapped()
    assert backend.compiles >= 3
    assert backend.disturbed == 0


def test_replicas_within_replicas() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(self.first(x))
            return output

    bare, net = twins(build=Outer)
    net.first = compile_whole(net.get_submodule("first"), backend="eager")
    net.inner = DataParallel(
        compile_whole(net.get_submodule("inner"), backend="eager"), ["cpu"] * 2
    )
    model = DataParallel(net, ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, 12, 4)


def test_a_function_that_is_not_found_beforehand(started: list[tuple[str, str]]) -> None:
    bare, net = twins(build=HidesFunction)
    compiled._names_compiled.__globals__["_naming"][HidesFunction] = False
    assert not compiled.has_compiled(net)
    model = DataParallel(net, ["cpu"] * 3)
    with torch.compiler.set_stance("force_eager"):
        x = torch.randn(9, 4, dtype=torch.double)
        expected = bare(x)
    for _ in range(4):
        torch.testing.assert_close(model(x), expected)
    # Each replica may have compiled it once, and never again.
    assert 1 <= len(started) <= 3


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_many_shapes(kind: str, started: list[tuple[str, str]]) -> None:
    slots = ["cpu"] * 3 if kind == "cpu" else [f"virtual:{i}" for i in range(3)]
    bare, net = twins(slots[0])
    model = DataParallel(compile_parts(net, backend="aot_eager"), slots)
    shapes = random.Random(0)
    for _ in range(50):
        compare(model, bare, shapes.randint(3, 40), shapes.randint(2, 9), 4, device=slots[0])
    devices = len(set(slots))
    # For each device: one size, any size, size 1 in the batch.
    assert len(started) <= 2 * 4 * devices


def test_several_models_in_several_threads() -> None:
    failures: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            shapes = random.Random(seed)
            bare, net = twins()
            model = DataParallel(compile_nested(net, backend="aot_eager"), ["cpu"] * 2)
            for _ in range(15):
                compare(model, bare, shapes.randint(2, 20), 4)
            model.close()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


def test_a_limit_for_each_device(started: list[tuple[str, str]]) -> None:
    slots = [f"virtual:{i}" for i in range(4)]
    bare, net = twins(slots[0])
    model = DataParallel(compile_whole(net, backend="eager", dynamic=False), slots)
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch in (8, 12, 8, 12):
            compare(model, bare, batch, 4, device=slots[0])
    assert len(started) == 8


def test_the_cache_may_be_emptied() -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, 8, 4)
        compare(model, bare, 8, 4)
        torch._dynamo.reset()


# --- failures ----------------------------------------------------------------------------------


def test_an_error_of_the_backend() -> None:
    calls: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        calls.append(inputs)
        if len(calls) == 1:
            raise ZeroDivisionError("this backend fails at first")
        return graph.forward

    bare, net = twins()
    model = DataParallel(compile_whole(net, backend=backend), ["cpu"] * 3)
    with pytest.raises(Exception, match=r"(?s)this backend fails at first.*in replica 0 on device"):
        model(torch.randn(9, 4, dtype=torch.double))
    # The others would have failed alike.
    assert len(calls) == 1
    compare(model, bare, 9, 4)


def test_an_error_of_the_module() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 2:
                raise KeyError("two")
            return x + 1

    model = DataParallel(compile_whole(Fails(), backend="eager"), ["cpu"] * 2)
    with pytest.raises(KeyError, match=r"(?s)two.*in replica 1"):
        model(torch.zeros(5, 1))
    assert model(torch.zeros(6, 1)).sum() == 6


def test_an_interrupt_while_a_replica_compiles() -> None:
    interrupts = [signal.SIGINT]

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        while interrupts:
            os.kill(os.getpid(), interrupts.pop())
            time.sleep(0.5)
        return graph.forward

    bare, net = twins()
    model = DataParallel(compile_whole(net, backend=backend), ["cpu"] * 3)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(9, 4, dtype=torch.double))
    for _ in range(2):
        compare(model, bare, 9, 4)
    assert turns._owner is None and not turns._running


def test_replicas_that_wait_for_each_other_in_their_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "timeout", 0.5)
    module = Watched()
    module.barrier = threading.Barrier(2)
    module.barrier.wait = functools.partial(module.barrier.wait, 2.0)  # type: ignore[method-assign]
    module.forward = functools.partial(_meets_on_its_own, module)  # type: ignore[method-assign]
    model = DataParallel(module, ["cpu"] * 2)
    with pytest.raises(threading.BrokenBarrierError, match="in replica 0") as caught:
        model(torch.randn(4, 4))
    assert "current_rendezvous" in "".join(getattr(caught.value, "__notes__", []))


def _meets_on_its_own(module: Watched, x: Tensor) -> Tensor:
    assert module.barrier is not None
    module.barrier.wait()
    output: Tensor = module.layer(x)
    return output


# --- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout(backend: str) -> None:
    model = DataParallel(compile_whole(nn.Dropout(0.5), backend=backend), ["cpu"] * 3)
    plain = DataParallel(nn.Dropout(0.5), ["cpu"] * 3)
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


def test_what_draws_nothing_leaves_the_generator_alone(started: list[tuple[str, str]]) -> None:
    _, net = twins()
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2)
    x = torch.randn(8, 4, dtype=torch.double)
    before = torch.get_rng_state()
    model(x)
    assert started
    assert torch.equal(torch.get_rng_state(), before)


# --- the wrapper within something that is compiled -----------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_is_compiled(wrapper: Wrapper, started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = wrapper(net, ["cpu"] * 2)
    outer: Any = torch.compile(model, backend="aot_eager")
    for batch in (7, 7, 9):
        compare(outer, bare, batch, 4)
    assert not started


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_training_step_is_compiled(started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, backend="aot_eager"), ["cpu"] * 2)
    criterion = nn.MSELoss()

    def step(module: nn.Module, x: Tensor) -> Tensor:
        scaled = torch.sin(x) * 2
        if isinstance(module, DataParallel):
            loss = module.loss(criterion, scaled, x)
        else:
            loss = criterion(module(scaled), x)
        result: Tensor = module(scaled).pow(2).mean() + loss
        return result

    compiled_step = torch.compile(step, backend="aot_eager")
    for batch in (7, 7, 9):
        x = torch.randn(batch, 4, dtype=torch.double)
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


# --- inductor ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor(started: list[tuple[str, str]]) -> None:
    bare, net = twins()
    model = DataParallel(compile_whole(net, dynamic=True), ["cpu"] * 2)
    for batch in (12, 11):
        compare(model, bare, batch, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(5):
            compare(model, bare, 11, 4)
    assert started == [("DYNAMO", "dataparallel-replica-0")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_knows_no_virtual_devices() -> None:
    slots = ["virtual:0", "virtual:1"]
    bare, net = twins(slots[0])
    model = DataParallel(compile_whole(net), slots)
    with pytest.raises(Exception, match=r"(?s)virtual.*in replica 0"):
        model(torch.randn(8, 4, dtype=torch.double, device=slots[0]))
    compare(DataParallel(net, slots), bare, 8, 4, device=slots[0])


# --- what is left behind -------------------------------------------------------------------------


def test_clones_are_let_go() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    class Noted(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net = Noted()
    net.register_forward_pre_hook(lambda module, _: alive.append(weakref.ref(module)))
    model = DataParallel(compile_in_place(net, backend="eager"), ["cpu"] * 2)
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
    gc.collect()
    assert len(alive) >= 2
    assert not [reference for reference in alive if reference() is not None]


def test_torchs_flag_is_as_before() -> None:
    barrier = threading.Barrier(2)
    meets: list[bool] = []

    @compiled.untraced
    def meet() -> None:
        if meets:
            barrier.wait(10.0)

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meet()
            return x + 1

    flags: Any = torch._dynamo.eval_frame
    model = DataParallel(compile_whole(Meets(), backend="eager"), ["cpu"] * 2)
    for _ in range(3):
        model(torch.randn(4, 4))
        assert flags._in_optimized_module is False
        # From the second call on they run at the same time.
        meets.append(True)


def test_the_lock_is_put_in_place_once() -> None:
    assert compile_lock.install()
    lock = torch._dynamo.convert_frame.compile_lock
    assert compile_lock.install()
    assert torch._dynamo.convert_frame.compile_lock is lock
    assert not compile_lock.is_held()
    with lock, lock:
        assert compile_lock.is_held()
    assert not compile_lock.is_held()
