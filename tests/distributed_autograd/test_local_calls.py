"""What a call to a worker of this process does with functions, arguments, results and errors."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.rpc import WorkerInfo  # type: ignore[attr-defined]
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd import context, rpc_async, rpc_sync
from dataparallel.distributed_autograd.endpoint import current_endpoint
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests.distributed_autograd.local_cases import PATIENCE, until


@pytest.fixture
def workers() -> Iterator[LocalWorkers]:
    with LocalWorkers({"front": "cpu", "back": "virtual:1"}, timeout=PATIENCE) as workers:
        yield workers


class Batch(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Sample:
    x: Tensor
    more: list[Any]


def identity(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def my_name() -> str:
    return current_endpoint().worker.name()


def test_functions_run_at_the_worker(workers: LocalWorkers) -> None:
    assert [rpc_sync(name, my_name) for name in workers.names] == ["main", "front", "back"]
    assert my_name() == "main"
    assert rpc_sync(2, my_name) == "back"
    assert rpc_sync(WorkerInfo("front", 1), my_name) == "front"
    assert rpc_sync("front", rpc_sync, args=("back", my_name)) == "back"


def test_worker_threads_have_the_device_and_fresh_settings(workers: LocalWorkers) -> None:
    def settings() -> tuple[int, bool, bool, torch.device]:
        found = (
            torch.accelerator.current_device_index(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
        )
        torch._C._set_grad_enabled(False)
        torch.accelerator.set_device_index(3)
        return found

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        for _ in range(3):
            assert rpc_sync("back", settings) == (1, True, False, torch.device("cpu"))


def test_tensors_are_copied_to_the_worker_and_back(workers: LocalWorkers) -> None:
    x = torch.arange(3.0)

    def there(x: Tensor) -> tuple[str, Tensor]:
        return str(x.device), x

    place, result = rpc_sync("back", there, args=(x,))
    assert place == "virtual:1"
    assert result.device == torch.device("virtual:1")
    with LocalWorkers(["virtual:1"], main="caller", main_device="virtual:0"):
        place, result = rpc_sync("worker0", there, args=(x,))
        assert (place, result.device) == ("virtual:1", torch.device("virtual:0"))
    assert torch.equal(result.cpu(), x)


@pytest.mark.parametrize("name", ["main", "front"])
def test_changes_in_place_do_not_show_elsewhere(workers: LocalWorkers, name: str) -> None:
    x, numbers = torch.zeros(3), [1]
    seen: list[Tensor] = []

    def change(x: Tensor, numbers: list[int]) -> Tensor:
        x.add_(1)
        numbers.append(2)
        seen.append(x)
        return x

    result = rpc_sync(name, change, args=(x, numbers))
    assert torch.equal(x, torch.zeros(3))
    assert numbers == [1]
    result.add_(1)
    assert torch.equal(seen[0], torch.ones(3))


def test_containers_are_built_anew_and_the_rest_arrives_itself(workers: LocalWorkers) -> None:
    x, module, lock = torch.ones(2), nn.Linear(1, 1), threading.Lock()
    sent = (Batch(x, "first"), Sample(x, [{"x": x}, module]), lock)
    args, kwargs = rpc_sync("front", identity, args=sent, kwargs={"last": [x, None, module]})
    batch, sample, same_lock = args
    assert type(batch) is Batch
    assert type(sample) is Sample
    assert sample is not sent[1]
    assert batch.x is sample.x is sample.more[0]["x"] is kwargs["last"][0]
    assert batch.x is not x
    assert sample.more[1] is kwargs["last"][2] is module
    assert same_lock is lock


def test_parameters_arrive_as_tensors(workers: LocalWorkers) -> None:
    weight = nn.Parameter(torch.ones(2))
    with context():
        arrived = rpc_sync("front", identity, args=(weight,))[0][0]
        assert type(arrived) is Tensor
        assert arrived.requires_grad
    arrived = rpc_sync("front", identity, args=(weight,))[0][0]
    assert type(arrived) is Tensor
    assert not arrived.requires_grad


def test_inference_tensors_take_part_in_autograd_at_the_worker(workers: LocalWorkers) -> None:
    weight = torch.ones(2, requires_grad=True)

    def scaled(x: Tensor) -> bool:
        return (x * weight).requires_grad

    with torch.inference_mode():
        assert rpc_sync("front", scaled, args=(torch.ones(2),))


def test_containers_with_cycles_are_refused(workers: LocalWorkers) -> None:
    numbers: list[Any] = [1]
    numbers.append(numbers)
    with pytest.raises(ValueError, match=r"\(args, kwargs\)\[0\]\[0\]\[1\] contains itself"):
        rpc_sync("front", identity, args=(numbers,))

    def bad() -> Any:
        return numbers

    with pytest.raises(ValueError, match=r"the result of .*bad on worker 'front'\[1\] contains"):
        rpc_sync("front", bad)
    assert rpc_sync("front", my_name) == "front"


class Unusual(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def fail() -> None:
    raise Unusual(7, "it went wrong")


def fail_further(name: str) -> None:
    rpc_sync(name, fail)


def test_errors_arrive_as_they_are_with_the_worker_named(workers: LocalWorkers) -> None:
    future = rpc_async("front", fail_further, args=("back",))
    with pytest.raises(Unusual, match="it went wrong") as caught:
        future.wait()
    assert caught.value.code == 7
    assert str(caught.value) == "it went wrong"
    assert vars(caught.value)["__notes__"] == [
        "raised by fail on worker 'back' (device virtual:1)",
        "raised by fail_further on worker 'front' (device cpu)",
    ]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "fail"
    assert "fail_further" in frames
    assert "_serve" not in frames
    assert rpc_sync("front", my_name) == "front"


def test_a_function_that_exits_ends_its_call_alone(workers: LocalWorkers) -> None:
    with pytest.raises(RuntimeError, match="exit on worker 'front' ended with SystemExit: 3"):
        rpc_sync("front", exit, args=(3,))
    assert rpc_sync("front", my_name) == "front"


def test_unknown_workers_and_wrong_arguments_are_named(workers: LocalWorkers) -> None:
    with pytest.raises(ValueError, match=r"no worker 'middle'; the workers are 'main', 'front', '"):
        rpc_sync("middle", my_name)
    with pytest.raises(ValueError, match="no worker 3; the workers are"):
        rpc_sync(3, my_name)
    with pytest.raises(TypeError, match="func must be callable, not int"):
        rpc_sync("front", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout is -1 s, but must be at least 0"):
        rpc_sync("front", my_name, timeout=-1)


def test_a_call_that_takes_too_long_fails_and_nothing_else(workers: LocalWorkers) -> None:
    go_on = threading.Event()
    slow = rpc_async("front", go_on.wait, args=(PATIENCE,), timeout=0.05)
    unlimited = rpc_async("front", go_on.wait, args=(PATIENCE,), timeout=0)
    with pytest.raises(TimeoutError, match=r"wait on worker 'front' did not end within 0.05 s"):
        slow.wait()
    assert rpc_sync("front", my_name, timeout=PATIENCE) == "front"
    go_on.set()
    assert unlimited.wait() is True


def test_the_shorter_of_two_timeouts_comes_first(workers: LocalWorkers) -> None:
    go_on = threading.Event()
    long = rpc_async("front", go_on.wait, args=(PATIENCE,), timeout=PATIENCE)
    until(lambda: rpc_sync("main", my_name) == "main")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end within 0.05 s"):
        rpc_sync("front", go_on.wait, args=(PATIENCE,), timeout=0.05)
    assert time.monotonic() - start < PATIENCE / 2
    go_on.set()
    assert long.wait() is True


@async_execution  # type: ignore[untyped-decorator]
def answer_later(name: str, x: Tensor) -> torch.futures.Future[Tensor]:
    first: torch.futures.Future[Tensor] = rpc_async(name, torch.mul, args=(x, 2.0))
    return first.then(lambda done: done.value() + 1)


@async_execution  # type: ignore[untyped-decorator]
def answer_wrongly(what: str) -> Any:
    if what == "no future":
        return 5
    failed: torch.futures.Future[int] = torch.futures.Future()
    failed.set_exception(KeyError("missing"))  # type: ignore[arg-type]
    return failed


def test_functions_may_answer_with_a_future(workers: LocalWorkers) -> None:
    x = torch.ones(2)
    assert torch.equal(rpc_sync("front", answer_later, args=("main", x)), x * 3)
    with pytest.raises(TypeError, match=r"must return a torch.futures.Future, but it returned 5"):
        rpc_sync("front", answer_wrongly, args=("no future",))
    with pytest.raises(KeyError, match="missing"):
        rpc_sync("front", answer_wrongly, args=("error",))


def name_in_callback(name: str) -> list[str]:
    future = rpc_async(name, my_name)
    chained: torch.futures.Future[list[str]] = future.then(lambda done: [done.value(), my_name()])
    return chained.wait()


def test_callbacks_run_as_the_caller(workers: LocalWorkers) -> None:
    assert rpc_sync("front", name_in_callback, args=("back",)) == ["back", "front"]
    assert name_in_callback("back") == ["back", "main"]


def deeper(depth: int) -> int:
    return 0 if depth == 0 else 1 + int(rpc_sync("front", deeper, args=(depth - 1,)))


def test_nested_calls_beyond_the_limit_are_an_error() -> None:
    with LocalWorkers({"front": "cpu"}, max_calls=6, timeout=PATIENCE):
        assert rpc_sync("front", deeper, args=(5,)) == 5
        with pytest.raises(RuntimeError, match=r"'front' runs 6 calls, which is its limit"):
            rpc_sync("front", deeper, args=(6,))
        assert rpc_sync("front", deeper, args=(5,)) == 5


def test_calls_from_outside_wait_for_their_turn() -> None:
    lock = threading.Lock()
    running, most = 0, 0

    def count(depth: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        result = deeper(depth)
        with lock:
            running -= 1
        return result

    with LocalWorkers({"front": "cpu"}, max_calls=8, timeout=PATIENCE):
        futures = [rpc_async("front", count, args=(1,)) for _ in range(100)]
        assert [future.wait() for future in futures] == [1] * 100
    assert most <= 4
