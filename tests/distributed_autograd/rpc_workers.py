"""Functions of a test run in processes that are workers of ``torch.distributed.rpc``.

To start the workers takes longer than most tests do, so the tests of this folder share one world of
four; only those that lose a worker start their own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed import autograd
from torch.distributed.rpc import api as _api

from dataparallel import distributed_autograd
from dataparallel.distributed_autograd.extension import extension
from tests.cluster import Cluster

# Whatever torch imports there, mypy takes for private.
api: Any = _api
_torch_autograd: Any = autograd

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
            otherwise may take half of it, and 30 s at most.
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
        rpc_timeout=min(timeout / 2, 30.0),
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


def expect_clean(seconds: float = CLEAN) -> None:
    """Wait until this worker has no context and no pass left.

    Raises:
        AssertionError: It has after ``seconds`` seconds.
    """
    deadline = time.monotonic() + seconds
    while any((left := distributed_autograd.debug_info()).values()):
        assert time.monotonic() < deadline, f"left behind after {seconds:g} s: {left}"
        time.sleep(0.005)


def workers() -> list[str]:
    """The names of all workers."""
    return [info.name for info in api._get_current_rpc_agent().get_worker_infos()]


def everywhere(function: Callable[..., Any], *args: object) -> list[Any]:
    """Call a function on every worker, outside of any context."""
    return [torch_rpc.rpc_sync(worker, function, args) for worker in workers()]


def expect_clean_everywhere() -> None:
    """Wait until no worker has a context or a pass left."""
    everywhere(expect_clean)


# --- what tests keep on a worker -----------------------------------------------------------------

_leaves: dict[str, Tensor] = {}
_notes: list[Any] = []
_gates: dict[str, threading.Event] = {}
_lock = threading.Lock()


def leaf(name: str, *shape: int) -> Tensor:
    """A leaf of this worker, made at the first use, with values that depend on the name only.

    It is no ``nn.Parameter``: torch's own calls cut the graph at those.
    """
    with _lock:
        if name not in _leaves:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            data = torch.randn(shape or (3,), generator=generator, dtype=torch.float64)
            _leaves[name] = data.requires_grad_()
        return _leaves[name]


def own_gradients(context_id: int | None, torchs: bool = False) -> dict[str, Tensor]:
    """The gradients of this worker's leaves in a context, or torch's; else in ``.grad``."""
    if not _leaves:
        return {}
    if context_id is None:
        found = {leaf: leaf.grad for leaf in _leaves.values() if leaf.grad is not None}
    elif torchs:
        found = _torch_autograd.get_gradients(context_id)
    else:
        found = distributed_autograd.get_gradients(context_id)
    return {name: found[leaf] for name, leaf in _leaves.items() if leaf in found}


def note(value: Any) -> None:
    """Keep something on this worker."""
    with _lock:
        _notes.append(value)


def take_notes() -> list[Any]:
    """What was kept on this worker since the last time."""
    with _lock:
        taken = list(_notes)
        _notes.clear()
        return taken


def gate(name: str) -> threading.Event:
    """Where functions wait until a test lets them go on."""
    with _lock:
        return _gates.setdefault(name, threading.Event())


def open_gate(name: str) -> None:
    """Let them go on."""
    gate(name).set()


def pass_gate(name: str) -> None:
    """Wait for that."""
    assert gate(name).wait(20), name


def forget() -> None:
    """Drop all of this."""
    _leaves.clear()
    _notes.clear()
    _gates.clear()


class Gated(torch.autograd.Function):
    """Its backward says that it has come, and waits at a gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        open_gate(f"{ctx.name} entered")
        pass_gate(ctx.name)
        return gradients[0], None


def gated(x: Tensor, name: str) -> Tensor:
    """``Gated`` behind a leaf."""
    y: Tensor = Gated.apply(x * leaf("w"), name)
    return y


# --- one world for many tests --------------------------------------------------------------------


class World:
    """Four workers, with four virtual devices each, that run one function after the other.

    They are not those of other tests: torch's remote references work only with the first
    ``init_rpc`` of a process. Where a function fails, others take their place.
    """

    SIZE = 4
    #: Seconds that a function may take, and that all may take.
    LIMIT, ALL = 100.0, 1500.0

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a function on ``worker0``, and see that no worker has a context left.

        Example::

            def sine() -> None:
                w = torch.ones(2, requires_grad=True)
                with context() as context_id:
                    backward(context_id, [rpc_sync("worker1", torch.sin, (w,)).sum()])
                    assert get_gradients(context_id)[w].equal(w.cos())

            def test_sine(world: World) -> None:
                world.run(sine)

        Args:
            function: A function of a module, found there by its name. What it returns is pickled.
            args: Its arguments, which are pickled.

        Returns:
            The result.

        Raises:
            AssertionError: It failed; the text has its traceback.
        """
        connection = self._connection or self._start()
        try:
            connection.send_bytes(pickle.dumps((function, args)))
            if not connection.poll(self.LIMIT):
                raise TimeoutError("no answer")
            result, failure = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise AssertionError(f"the workers ended: {self._error!r}") from error
        if failure:
            self.close()
            raise AssertionError(failure)
        return result

    def close(self) -> None:
        """End the workers."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._thread is not None:
            self._thread.join(20)
            self._thread = None
        self._cluster.close()

    def _start(self) -> Connection:
        self.close()
        self._cluster = Cluster()
        # Compiling takes longer than a worker may take to answer.
        extension()
        with tempfile.TemporaryDirectory(prefix="world-") as directory:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"{directory}/world")
                server.listen(1)
                server.settimeout(200)
                self._thread = threading.Thread(target=self._work, args=(directory,), daemon=True)
                self._thread.start()
                accepted, _ = server.accept()
            accepted.setblocking(True)
            self._connection = Connection(accepted.detach())
        return self._connection

    def _work(self, directory: str) -> None:
        try:
            path = f"{directory}/world"
            rpc_world(self._cluster, _jobs, self.SIZE, path, timeout=self.ALL, virtual=True)
        except BaseException as error:
            self._error = error


def _jobs(rank: int, world_size: int, address: str) -> None:
    """Worker 0 runs what it is sent, and the others serve it."""
    if rank != 0:
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        connection = Connection(client.detach())
    with connection:
        while True:
            try:
                function, args = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            result, failure = None, ""
            try:
                torch.manual_seed(0)
                result = function(*args)
                expect_clean_everywhere()
                everywhere(forget)
            except (Exception, pytest.fail.Exception):
                failure = traceback.format_exc()
            connection.send_bytes(pickle.dumps((result, failure)))
