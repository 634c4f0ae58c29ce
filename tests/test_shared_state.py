"""State that several threads share, where another one comes between a look and what follows it."""

from __future__ import annotations

import contextvars
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import torch_internals
from dataparallel.graph.cut import Forwards
from dataparallel.threads.exclusive import ExclusiveLock, run_once
from dataparallel.threads.timeline import Listener, Timeline
from dataparallel.threads.workers import WorkerPools
from tests.ddp_cases import Net, backward, batch, grads
from tests.models import WRAPPERS, assert_all_close, grads_of

DEVICES = ["virtual:0", "virtual:1"]
# Seconds that another thread has before the first one goes on; it may wait for that one.
MOMENT = 0.1


def in_between(call: Callable[[], Any], meanwhile: Callable[[], Any], number: int, at: str) -> bool:
    """Call something, and another thread something else before an instruction of that number.

    Instructions of functions in files with such a name count. False if there are fewer.
    """
    other, count = threading.Thread(target=meanwhile), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if at not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == number:
                other.start()
                other.join(MOMENT)
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    if count <= number:
        return False
    other.join(30)
    return True


def at_each_instruction(
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]], at: str
) -> None:
    """Do so with each number: ``make`` gives both calls, and one that looks at the outcome."""
    for number in itertools.count():
        call, meanwhile, check = make()
        if not in_between(call, meanwhile, number, at):
            assert number > 2, "there was something to come between"
            return
        check()


Calls = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]


def whether_the_lock_is_held() -> Calls:
    lock, holds, may_end = ExclusiveLock(), threading.Event(), threading.Event()
    answers: list[bool] = []

    def hold() -> None:
        with lock.alone("a test"):
            holds.set()
            may_end.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(30)

    def give_back() -> None:
        may_end.set()
        holder.join(30)

    def check() -> None:
        assert len(answers) == 1

    def ask() -> None:
        try:
            answers.append(lock.is_held())
        finally:
            give_back()

    return ask, give_back, check


def the_end_of_pools() -> Calls:
    pools = WorkerPools()

    def run() -> list[int]:
        return pools.run([lambda: 1, lambda: 2], str)

    def check() -> None:
        assert run() == [1, 2]

    run()
    return run, pools.close, check


def the_begin_of_a_backward() -> Calls:
    timeline, begun = Timeline([torch.device("cpu")] * 2), list[Any]()
    timeline.subscribe(Listener(lambda _: None))
    torch_internals.when_backward_ends = begun.append

    def check() -> None:
        assert len(begun) == 1

    return timeline.begin_backward, timeline.begin_backward, check


def listeners_of_a_timeline() -> Calls:
    timeline = Timeline([torch.device("cpu")])
    some = [Listener(on_span=print), Listener(on_devices=print)]

    def check() -> None:
        assert set(timeline.listeners) == {*some}

    first, second = ((lambda one=one: timeline.subscribe(one)) for one in some)
    return first, second, check


def forwards_that_are_open() -> Calls:
    forwards = Forwards(nn.Linear(1, 1))
    mine = [forwards.begin() for _ in range(3)]
    found: list[Any] = []

    def check() -> None:
        assert found == [mine]

    return lambda: found.append(forwards.open_before()), forwards.begin, check


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (whether_the_lock_is_held, "exclusive.py"),
        (the_end_of_pools, "workers.py"),
        (the_begin_of_a_backward, "timeline.py"),
        (listeners_of_a_timeline, "timeline.py"),
        (forwards_that_are_open, "cut.py"),
    ],
)
def test_another_thread_in_between(
    make: Callable[[], Calls], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "current_graph_task_id", lambda: 7)
    monkeypatch.setattr(torch_internals, "when_backward_ends", None)
    at_each_instruction(make, at)


# --- what is made once ---------------------------------------------------------------------------


def test_what_runs_once_runs_once_in_several_threads() -> None:
    start, calls = threading.Barrier(4), list[int]()

    @run_once
    def make() -> object:
        calls.append(1)
        time.sleep(MOMENT)
        return object()

    def come(_: int) -> object:
        start.wait(30)
        return make()

    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(come, range(4)))
    assert len(calls) == 1 and len(set(found)) == 1 and make() is found[0]


# --- objects that outlive their last use ---------------------------------------------------------
#
# Without the interpreter's lock an object dies when the thread that made it runs again.


def test_what_a_backward_has_left_behind_is_in_no_other_round() -> None:
    """The graph of gradients belongs to the backward that has made it, which has ended."""
    left: list[Any] = []

    def keep(_: Tensor) -> None:
        for each in gc.get_objects():
            if str(getattr(type(each), "__module__", "")).startswith("dataparallel."):
                left.append(each)

    def results(wrapped: bool) -> list[Tensor | None]:
        t = torch.full((6,), 1.5, dtype=torch.float64, requires_grad=True)
        net = Net(DEVICES[0], lambda net, x: net.layers[0](x).cpu() * t.exp())
        model: Any = dp.DistributedDataParallel(net, DEVICES) if wrapped else net
        x = batch(DEVICES[0], grad=True)
        register: Any = x.register_hook
        handle = register(keep)
        y = model(x).pow(2).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        handle.remove()
        backward(y + slope.cpu().pow(2).sum())
        return [*grads(net), t.grad, x.grad]

    assert_all_close(*([None if r is None else r.cpu() for r in results(w)] for w in (True, False)))
    assert left


class Value:
    """Something that a context variable may hold."""


@WRAPPERS
def test_threads_of_replicas_keep_no_context_variable(wrapper: Any) -> None:
    """Without the lock a thread takes over those of the thread that has started it."""
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)
    seen: list[bool] = []

    def forward(net: Any, x: Tensor) -> Tensor:
        seen.append(variable.get() is not None)
        output: Tensor = net.layers[0](x)
        return output

    net = Net("cpu", forward)
    model, value = wrapper(net, ["cpu"] * 2), Value()
    token = variable.set(value)
    model(batch()).sum().backward()
    variable.reset(token)
    held = weakref.ref(value)
    del value, token
    gc.collect()
    assert seen == [True, True] and held() is None
    model.close()


# --- many threads at a time ----------------------------------------------------------------------


@pytest.mark.parametrize("devices", [["cpu"] * 2, [f"virtual:{i}" for i in range(3)]])
@WRAPPERS
def test_threads_that_train_wrappers_of_their_own(wrapper: Any, devices: Sequence[str]) -> None:
    """They share devices, their streams and routes, and what is one for the process."""

    # One at a time: they take random numbers of the process.
    pairs = [
        [Net(devices[0], lambda net, x: net.layers[0](x).tanh()) for _ in range(2)]
        for _ in range(4)
    ]

    def train(index: int) -> list[Tensor]:
        net, bare = pairs[index]
        model: Any = wrapper(net, devices)
        for step in range(10):
            x = batch(devices[0], 100 * index + step)
            model(x).pow(2).sum().backward()
            bare(x).pow(2).sum().backward()
        found = [each.cpu() for one in (net, bare) for each in grads_of(one) if each is not None]
        model.close()
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as executor:
            for found in executor.map(train, range(4)):
                assert_all_close(found[: len(found) // 2], found[len(found) // 2 :])
    finally:
        sys.setswitchinterval(before)
