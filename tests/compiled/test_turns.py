"""When compiled replicas run one after another, and when at the same time."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.threads import compile as compiling
from dataparallel.threads.meeting import current_rendezvous
from dataparallel.torch_internals import untraced
from tests.compiled.cases import (
    Watched,
    compare,
    compile_in_place,
    compile_nested,
    compile_whole,
    twins,
)


def test_one_after_another_at_first_and_then_at_the_same_time() -> None:
    module = Watched()
    model = DataParallel(module, ["cpu"] * 3)
    for _ in range(2):
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


def test_new_sizes_are_trusted_once_they_compile_nothing(started: list[tuple[str, str]]) -> None:
    module = Watched()
    model = DataParallel(module, ["cpu"] * 2)
    quiet = 0
    # Compiled for one size, then for any size; torch decides when.
    for batch in (4, 8, 12, 16, 20, 24, 28):
        trusted, compiled = quiet >= 1, len(started)
        # Replicas that run one after another would wait here in vain.
        module.barrier = threading.Barrier(2) if trusted else None
        model(torch.randn(batch, 4))
        assert module.overlapped() == trusted
        quiet = quiet + 1 if len(started) == compiled else 0
    assert quiet > 2


def test_what_is_not_compiled_runs_at_the_same_time_from_the_second_call_on() -> None:
    module = Watched()
    module.layer = nn.Linear(4, 4)
    model = DataParallel(module, ["cpu"] * 2)
    model(torch.randn(4, 4))
    module.overlapped()
    module.barrier = threading.Barrier(2)
    for batch in (4, 6, 8):
        model(torch.randn(batch, 4))
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
    model(x), model(x), module.overlapped(), model(x)
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


def test_a_call_that_begins_while_something_is_compiled_waits() -> None:
    other = DataParallel(nn.Linear(4, 4), ["cpu"] * 2)
    begun: list[threading.Thread] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        begun.append(threading.Thread(target=other, args=(torch.randn(4, 4),)))
        begun[0].start()
        begun[0].join(0.5)
        assert begun[0].is_alive()
        return graph.forward

    module = torch.compile(nn.Linear(4, 4), backend=backend)
    compiling.lock.install()
    module(torch.randn(2, 4))
    begun[0].join(10.0)
    assert not begun[0].is_alive()


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


# --- torch's lock --------------------------------------------------------------------------------


def test_torchs_settings_are_as_before() -> None:
    barrier = threading.Barrier(2)
    meets: list[bool] = []

    @untraced
    def meet() -> None:
        if meets:
            barrier.wait(10.0)

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            meet()
            return x + 1

    model = DataParallel(compile_whole(Meets(), backend="eager", dynamic=False), ["cpu"] * 2)
    # Which of two replicas leaves first is not ruled, and matters.
    for number in range(12):
        model(torch.randn(4, 4))
        assert torch._dynamo.config.automatic_dynamic_shapes is True
        # From the third call on they run at the same time.
        if number:
            meets.append(True)


def test_the_lock_is_put_in_place_once() -> None:
    lock: Any = compiling.lock
    for _ in range(2):
        lock.install()
        frames: Any = torch._dynamo.convert_frame
        assert frames.compile_lock is lock
        assert lock.torchs not in (None, lock)
    assert not lock.is_held()
    with lock, lock:
        assert lock.is_held()
    assert not lock.is_held()
