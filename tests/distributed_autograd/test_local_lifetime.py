"""How workers that are threads start and end, and what they leave."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_async, rpc_sync
from dataparallel.distributed_autograd.endpoint import current_endpoint
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests import forkserver
from tests.cluster import Cluster
from tests.distributed_autograd.local_cases import PATIENCE, until
from tests.distributed_autograd.rpc_workers import rpc_world


def my_name() -> str:
    return current_endpoint().worker.name()


def double(x: Tensor) -> Tensor:
    return x * 2


def threads_of_workers() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    # What other tests have compiled may have left the thread that holds a guard of torch's.
    ours = [name for name in names if name.startswith("dataparallel-")]
    return [name for name in ours if name != "dataparallel-guard"]


def test_workers_are_named_and_placed() -> None:
    workers = LocalWorkers(["cpu", "virtual:1"], main="caller", main_device="virtual:0")
    assert workers.names == ("caller", "worker0", "worker1")
    assert [str(device) for device in workers.devices] == ["virtual:0", "cpu", "virtual:1"]
    shown = "LocalWorkers({'worker0': 'cpu', 'worker1': 'virtual:1'}, main='caller', not started)"
    assert repr(workers) == shown
    with workers:
        assert "open" in repr(workers)
        assert my_name() == "caller"
    assert "closed" in repr(workers)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (({},), ValueError, "there are no workers"),
        (([],), ValueError, "device_ids is empty"),
        (({"main": "cpu"},), ValueError, "'main' is the name of a worker and of the caller"),
        (({"": "cpu"},), TypeError, "the name of a worker is a str that is not empty, but got ''"),
        (({3: "cpu"},), TypeError, "the name of a worker is a str that is not empty, but got 3"),
        (({"a": "virtual:9"},), ValueError, "device 'virtual:9' does not exist"),
        (("cpu",), TypeError, r"write \['cpu'\]"),
    ],
)
def test_wrong_workers_are_refused(
    arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LocalWorkers(*arguments)


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="timeout is -1 s, but must be at least 0"):
        LocalWorkers(["cpu"], timeout=-1)
    with pytest.raises(ValueError, match="max_calls is 1, but must be at least 2"):
        LocalWorkers(["cpu"], max_calls=1)


def test_closing_twice_is_closing_once_and_starting_again_an_error() -> None:
    workers = LocalWorkers(["cpu"]).start()
    endpoint = current_endpoint()
    assert rpc_sync("worker0", my_name) == "worker0"
    with pytest.raises(RuntimeError, match="was started before; make new LocalWorkers"):
        workers.start()
    workers.close()
    workers.close()
    assert workers.closed
    until(lambda: not threads_of_workers(), threads_of_workers)
    with pytest.raises(RuntimeError, match="this process is no worker yet"):
        rpc_sync("worker0", my_name)
    with pytest.raises(
        RuntimeError, match=r"my_name on worker 'worker0' .*LocalWorkers were closed"
    ):
        endpoint.call(1, my_name, (), {}, None, None)
    with pytest.raises(RuntimeError, match="was started before; make new LocalWorkers"):
        workers.start()


def test_calls_under_way_fail_when_the_workers_are_closed() -> None:
    go_on, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go_on.wait(PATIENCE)

    workers = LocalWorkers(["cpu", "cpu"], max_calls=2, timeout=PATIENCE).start()
    nested = rpc_async("worker1", rpc_sync, args=("worker0", wait))
    waiting = rpc_async("worker1", my_name)
    assert entered.wait(PATIENCE)
    workers.close()
    text = "has no answer: its LocalWorkers were closed"
    with pytest.raises(RuntimeError, match=f"rpc_sync on worker 'worker1' {text}"):
        nested.wait()
    with pytest.raises(RuntimeError, match=f"my_name on worker 'worker1' {text}"):
        waiting.wait()
    go_on.set()
    until(lambda: not threads_of_workers(), threads_of_workers)


def test_a_worker_may_close_all() -> None:
    workers = LocalWorkers(["cpu", "cpu"], timeout=PATIENCE).start()
    future = rpc_async("worker0", workers.close)
    with pytest.raises(RuntimeError, match="its LocalWorkers were closed"):
        future.wait()
    until(lambda: not threads_of_workers(), threads_of_workers)
    workers.close()
    with LocalWorkers(["cpu"]):
        assert rpc_sync("worker0", my_name) == "worker0"


def test_closing_releases_contexts() -> None:
    workers = LocalWorkers(["cpu"], timeout=PATIENCE).start()
    weight = torch.ones(3, requires_grad=True)
    block = context()
    context_id = block.__enter__()
    backward(context_id, [rpc_sync("worker0", double, args=(weight,)).sum()])
    kept = [weakref.ref(gradient) for gradient in get_gradients(context_id).values()]
    workers.close()
    until(lambda: all(each() is None for each in kept))
    block.__exit__(None, None, None)


def test_closed_workers_are_freed() -> None:
    with LocalWorkers(["cpu", "cpu"], timeout=PATIENCE), context() as context_id:
        endpoint = weakref.ref(current_endpoint())
        x = torch.ones(3, requires_grad=True)
        backward(context_id, [rpc_sync("worker0", double, args=(x,)).sum()])

    def gone() -> bool:
        gc.collect()
        return endpoint() is None

    until(gone)


def test_workers_that_nobody_has_are_closed() -> None:
    workers = LocalWorkers(["cpu"]).start()
    assert rpc_sync("worker0", my_name) == "worker0"
    gone = weakref.ref(workers)
    del workers
    assert gone() is None
    until(lambda: not threads_of_workers(), threads_of_workers)
    with pytest.raises(RuntimeError, match="its LocalWorkers were closed"):
        rpc_sync("worker0", my_name)
    # A later one takes the place of the one that was not left.
    with LocalWorkers({"next": "cpu"}):
        assert rpc_sync("next", my_name) == "next"


def test_an_error_in_the_block_closes_the_workers() -> None:
    with pytest.raises(ZeroDivisionError, match="division"), LocalWorkers(["cpu"]):
        rpc_sync("worker0", my_name)
        print(1 / 0)
    until(lambda: not threads_of_workers(), threads_of_workers)


def test_two_groups_do_not_mix() -> None:
    x = torch.ones(3, requires_grad=True)
    with LocalWorkers(["cpu"], main="outer") as outer, context() as outer_id:
        outer_loss = rpc_sync("worker0", double, args=(x,)).sum()
        with LocalWorkers({"inner0": "cpu"}):
            with pytest.raises(ValueError, match="there is no worker 'worker0'"):
                rpc_sync("worker0", my_name)
            with context() as inner_id:
                assert inner_id != outer_id
                backward(inner_id, [rpc_sync("inner0", double, args=(x * 2,)).sum()])
                assert torch.equal(get_gradients(inner_id)[x], torch.full((3,), 4.0))
        assert my_name() == "outer"
        backward(outer_id, [outer_loss])
        assert torch.equal(get_gradients(outer_id)[x], torch.full((3,), 2.0))
        assert not outer.closed


def test_threads_belong_to_the_only_group_or_are_told_what_to_do() -> None:
    def name_in_thread() -> object:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(rpc_sync, "worker0", my_name).result(PATIENCE)

    with LocalWorkers(["cpu"], main="outer"):
        assert name_in_thread() == "worker0"
        with LocalWorkers(["cpu"]):
            with pytest.raises(RuntimeError, match=r"2 LocalWorkers are open, and this thread"):
                name_in_thread()
            variables = contextvars.copy_context()
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(variables.run, my_name).result(PATIENCE) == "main"
        assert name_in_thread() == "worker0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_that_it_has_no_workers() -> None:
    with LocalWorkers(["cpu"], timeout=PATIENCE) as workers:
        rpc_sync("worker0", my_name)
        group = current_endpoint().group  # type: ignore[attr-defined]
        locked, forked = threading.Event(), threading.Event()

        def hold_locks() -> None:
            # As a thread does that finishes a call while another one forks.
            with group.pending._changed, group.endpoints[0].threads._lock:
                locked.set()
                forked.wait(PATIENCE)

        holder = threading.Thread(target=hold_locks)
        holder.start()
        assert locked.wait(PATIENCE)
        child = forkserver.fork()
        if child == 0:
            signal.alarm(30)
            try:
                rpc_sync("worker0", my_name)
            except RuntimeError as error:
                told = "was forked from it: make LocalWorkers here" in str(error)
                workers.close()
                os._exit(7 if told else 1)
            finally:
                os._exit(2)
        forked.set()
        holder.join(PATIENCE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert rpc_sync("worker0", my_name) == "worker0"


ENDINGS = {
    "open": "print(rpc_sync('worker0', abs, args=(-3,)))",
    "in a call": "rpc_async('worker0', time.sleep, args=(60,))",
    "in a context": "block = context(); block.__enter__(); rpc_sync('worker0', abs, args=(x,))",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits(ending: str) -> None:
    code = """
        import time, torch
        from dataparallel.distributed_autograd import context, rpc_async, rpc_sync
        from dataparallel.distributed_autograd.local_workers import LocalWorkers
        x = torch.ones(3, requires_grad=True)
        workers = LocalWorkers(["cpu", "cpu"]).start()
        print(rpc_sync("worker1", abs, args=(-3,)))
        """
    script = f"{textwrap.dedent(code)}\n{ENDINGS[ending]}\n"
    command = [sys.executable, "-W", "error", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def use_both(rank: int, world_size: int) -> None:
    other = f"worker{1 - rank}"
    assert rpc_sync(other, my_name) == other
    x = torch.ones(3, requires_grad=True)
    with LocalWorkers({"worker0": "cpu", "local": "cpu"}, main="here"):
        assert my_name() == "here"
        assert rpc_sync("local", my_name) == "local"
        with context() as context_id:
            backward(context_id, [rpc_sync("worker0", double, args=(x,)).sum()])
            assert torch.equal(get_gradients(context_id)[x], torch.full((3,), 2.0))
    assert rpc_sync(other, my_name) == other


def test_local_workers_in_a_process_that_is_a_worker(cluster: Cluster) -> None:
    rpc_world(cluster, use_both, 2)
