"""Functions of a test run in processes that are workers of ``torch.distributed.rpc``."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rpc import api as _api

from dataparallel import distributed_autograd
from dataparallel.distributed_autograd.extension import extension
from tests.cluster import Cluster

# Whatever torch imports there, mypy takes for private.
api: Any = _api

#: Seconds until a worker must have nothing left of the contexts that have ended.
CLEAN = 10.0


def rpc_world(
    cluster: Cluster,
    function: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    expect_errors: bool = False,
    lost: Collection[int] = (),
    virtual: bool = False,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in one process per rank, each a worker.

    The workers are called ``worker0``, ``worker1`` and so on. Each serves the others until all
    functions have returned or failed; then ``debug_info()`` must become zero everywhere.

    Example::

        def chain(rank: int, world_size: int) -> None:
            if rank == 0:
                w = torch.ones(2, requires_grad=True)
                with context() as context_id:
                    backward(context_id, [rpc_sync("worker1", torch.sin, (w,)).sum()])
                    assert get_gradients(context_id)[w].equal(w.cos())

        def test_chain(cluster: Cluster) -> None:
            rpc_world(cluster, chain, 2)

    Args:
        cluster: The fixture of that name.
        function: A function of a module, found there by its name. What it returns is pickled.
        world_size: How many processes.
        args: Further arguments, which are pickled.
        timeout: Seconds after which processes that still run are ended. A call that does not say
            otherwise may take half of it.
        expect_errors: Return exceptions in place of results. Default: raise the first one.
        lost: The ranks that will not come to the end, since the test kills them. The others do
            not wait for them, and need not be clean.
        virtual: Whether the processes have virtual devices.

    Returns:
        The result of every rank.

    Raises:
        BaseException: What a rank raised.
        AssertionError: A worker was not clean at the end.
    """
    # Compiling takes longer than a test may.
    extension()
    with tempfile.TemporaryDirectory(prefix="rpc-") as directory:
        inputs = (function, directory, timeout, frozenset(lost), args)
        run: Any = cluster.run
        result: list[Any] = run(
            _serve,
            world_size,
            *inputs,
            timeout=timeout,
            expect_errors=expect_errors,
            init_group=False,
            virtual=virtual,
        )
        return result


def _serve(
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    directory: str,
    timeout: float,
    lost: frozenset[int],
    args: tuple[object, ...],
) -> Any:
    # As gloo, it would else look up the machine's name, and listen to the network.
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    store = FileStore(f"{directory}/meetings", world_size)
    # A nested call keeps a thread of each worker on its way; and a worker with other transports
    # looks for messages all the time, on the cores that the others need.
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{directory}/rpc",
        rpc_timeout=timeout / 2,
        num_worker_threads=64,
        _transports=["uv"],
    )
    # Parts of names, and not the same in processes that have served different tests.
    torch_rpc._init_counter = 0
    api._all_gather_sequence_id.clear()
    others = [other for other in range(world_size) if other not in lost]
    try:
        with warnings.catch_warnings():
            # What init_rpc itself does with its process group.
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            torch_rpc.init_rpc(
                f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
            )
        # Nobody leaves while another may still have to tell it something.
        with _meeting(store, "clean", rank, others, timeout):
            with _meeting(store, "end", rank, others, timeout):
                result = function(rank, world_size, *args)
            if not lost and not store.check(["failed"]):
                expect_clean()
                api._delete_all_user_and_unforked_owner_rrefs()
        return result
    finally:
        # A graceful one counts the shutdowns of a process, and waits for those who have counted as
        # many; and it would wait for a worker that is lost.
        if api._is_current_rpc_agent_set():
            torch_rpc.shutdown(graceful=False)


@contextlib.contextmanager
def _meeting(
    store: Store, name: str, rank: int, others: list[int], timeout: float
) -> Iterator[None]:
    """Wait at the end for the others, also after an error."""
    try:
        yield
    except BaseException:
        store.set("failed", "yes")
        raise
    finally:
        store.set(f"{name}{rank}", "here")
        expected = [f"{name}{other}" for other in others]
        store.wait(expected, datetime.timedelta(seconds=timeout))


def expect_clean(seconds: float = CLEAN, *, calling: bool = False) -> None:
    """Wait until this worker has no context, pass, message and, unless ``calling``, call left.

    Raises:
        AssertionError: It has after ``seconds`` seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        info = distributed_autograd.debug_info()
        calls = 0
        left = {name: count for name, count in {**info, "calls": calls}.items() if count}
        if not any(info.values()) and (calling or not calls):
            return
        assert time.monotonic() < deadline, f"left behind after {seconds:g} s: {left}"
        time.sleep(0.005)


def expect_clean_everywhere(
    world_size: int, seconds: float = CLEAN, *, calling: bool = False
) -> None:
    """Wait until no worker has a context, pass, message and, unless ``calling``, call left."""
    for rank in range(world_size):
        torch_rpc.rpc_sync(f"worker{rank}", expect_clean, (seconds,), {"calling": calling})


def scenarios(
    cluster: Cluster,
    world_size: int,
    *functions: Callable[[], None],
    timeout: float = 60.0,
    virtual: bool = False,
) -> None:
    """Run functions one after the other on worker 0, the other workers serving it.

    To start the workers takes longer than most scenarios do. After each, all workers must be
    clean; and when one has failed, the next ones run all the same.

    Raises:
        AssertionError: Functions failed; it has the traceback of each.
    """
    failed = rpc_world(cluster, _all, world_size, functions, timeout=timeout, virtual=virtual)[0]
    assert not failed, "\n".join(failed)


def _all(rank: int, world_size: int, functions: tuple[Callable[[], None], ...]) -> list[str]:
    failed = []
    for function in functions if rank == 0 else ():
        try:
            torch.manual_seed(0)
            function()
            expect_clean_everywhere(world_size)
        except (Exception, pytest.fail.Exception):
            failed.append(f"{_name(function)}: {traceback.format_exc()}")
    return failed


def _name(function: Callable[..., None]) -> str:
    if isinstance(function, functools.partial):
        return f"{function.func.__name__}{function.args}"
    return function.__name__
