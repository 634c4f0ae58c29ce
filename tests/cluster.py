"""Functions of a test run in several processes, which start once and serve all tests.

To start a process and to import torch takes seconds; a test over processes that exist already
takes milliseconds. Every process of pytest has workers of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import itertools
import math
import multiprocessing.connection
import multiprocessing.process
import os
import pathlib
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import dataparallel.virtual
from tests import forkserver
from tests.device_only import backend as device_only

#: Seconds that a worker may take to start: many may start at once, and the first one compiles.
STARTUP = 600.0

#: The environment variable for another number of virtual devices than four.
VIRTUAL_DEVICES = "DATAPARALLEL_TESTS_VIRTUAL_DEVICES"

#: Seconds that the other ranks get after one has failed, before they are ended.
GRACE = 10.0


def free_port() -> int:
    """Return a port of this machine on which nobody listens at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RankFailed(Exception):
    """The failure of workers: the cause of an exception, or a stand-in for an unpicklable one."""


class RankDied(Exception):
    """A worker ended, or had to be ended since it took too long."""


@dataclass
class _Reply:
    """The answer of a worker, and its time."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    when: float = field(default_factory=time.time)
    num_loops: int = 0
    records: device_only.Records = field(default_factory=lambda: device_only.Records([], []))


def _died(text: str) -> _Reply:
    return _Reply(error=RankDied(text), trace=text)


# --- in the tests' process -------------------------------------------------------------------


@dataclass
class _Worker:
    """A process that waits for functions to run."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks: pathlib.Path
    num_loops: int = 0

    def stop(self, seconds: float = 0.0) -> None:
        """End the process, which is killed after some seconds."""
        self.connection.close()
        self.process.join(seconds)
        self.process.kill()
        self.process.join()

    def where(self) -> str:
        """Return the Python stacks of all threads of the worker."""
        if not hasattr(signal, "SIGUSR1") or self.process.pid is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text()


class Cluster:
    """Runs functions in processes that form a group. See the fixture ``cluster``.

    A process with more loops of gloo than ``most_loops`` is replaced: each looks for work a hundred
    times a second, also for a group that was given up.
    """

    def __init__(self, *, most_loops: float = math.inf) -> None:
        self._most_loops = most_loops
        self._workers: dict[bool, list[_Worker]] = {False: [], True: []}
        self._context = forkserver.context()
        # It lives as long as the workers do. A thread that lets go of a store late, after its job
        # for example, waits for minutes. It waits with the interpreter's lock, for a folder that
        # was removed meanwhile.
        self._folder = tempfile.TemporaryDirectory(prefix="cluster-")
        self._calls = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: object,
        timeout: float = 120.0,
        expect_errors: bool = False,
        init_group: bool = True,
        virtual: bool = False,
        backend: str = "gloo",
    ) -> list[Any]:
        """Call ``function(rank, world_size, *args)`` in one process per rank.

        Each finds the seed 0, one intra-op thread, warnings that are errors, and a fresh default
        process group, which is destroyed afterwards.

        Example::

            def total(rank: int, world_size: int, factor: int) -> float:
                tensor = torch.tensor(float(rank * factor))
                dist.all_reduce(tensor)
                return tensor.item()

            def test_total(cluster: Cluster) -> None:
                assert cluster.run(total, 2, 10) == [10.0, 10.0]

        Args:
            function: A function of a module, found there by its name. The arguments and the results
                are pickled.
            timeout: Seconds after which ranks that still run are ended. Also the timeout of the
                default group.
            expect_errors: Return exceptions in place of results. Default: raise the first one.
            virtual: True if the processes have four virtual devices. Default: they have none.
            backend: The backend of the default group: ``"gloo"`` (default), or where there are
                virtual devices also ``"vccl"``, which takes tensors on these only (see
                ``device_only/backend.py``), and ``"cpu:gloo,virtual:vccl"``.

        Raises:
            BaseException: The error of a rank; its cause tells the rank and the traceback there.
            RankDied: A rank ended, or ran for longer than ``timeout``.
        """
        workers = self._ready(world_size, virtual)
        # Not by TCP, where torch asks the name server for the name of each address: an answer that
        # is lost takes five seconds.
        store = f"{self._folder.name}/{next(self._calls)}"
        for rank, worker in enumerate(workers):
            group = (backend, store, rank, world_size, timeout) if init_group else None
            job = functools.partial(function, rank, world_size, *args)
            worker.connection.send_bytes(pickle.dumps((job, group)))
        replies = self._collect(workers, timeout, GRACE if not expect_errors else timeout)
        failed = {rank: reply for rank, reply in enumerate(replies) if reply.error}
        if failed and not expect_errors:
            text = "\n".join(f"in rank {rank}:\n{reply.trace}" for rank, reply in failed.items())
            # The others may have failed only because the first one did.
            first = min(failed.values(), key=lambda reply: reply.when)
            assert first.error is not None
            raise first.error from RankFailed(text)
        for rank, reply in enumerate(replies):
            assert not reply.records.kills, f"would end rank {rank}: {reply.records.kills}"
        different = device_only.find_difference([reply.records.launches for reply in replies])
        assert not different, different
        return [reply.error or reply.value for reply in replies]

    def close(self) -> None:
        """End all workers."""
        for worker in itertools.chain(*self._workers.values()):
            worker.stop(5.0)
        self._workers.clear()
        self._folder.cleanup()

    def _ready(self, world_size: int, virtual: bool) -> list[_Worker]:
        """Workers that wait for a job; new ones start where there are too few."""
        workers = self._workers[virtual]
        new = [
            rank
            for rank, worker in enumerate(workers)
            if not worker.process.is_alive() or worker.num_loops > self._most_loops
        ]
        for rank in new:
            workers[rank].stop()
            # In its place: a process has the same rank as long as it lives.
            workers[rank] = self._start(virtual)
        while len(workers) < world_size:
            new.append(len(workers))
            workers.append(self._start(virtual))
        for rank in new:
            if not workers[rank].connection.poll(STARTUP):
                raise RankDied(f"a worker took longer than {STARTUP:g} s to start")
            workers[rank].connection.recv_bytes()
        return workers[:world_size]

    def _start(self, virtual: bool) -> _Worker:
        ours, theirs = self._context.Pipe()
        stacks = pathlib.Path(self._folder.name, f"stacks {next(self._calls)}")
        arguments = theirs, str(stacks), virtual
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def _collect(self, workers: list[_Worker], timeout: float, grace: float) -> list[_Reply]:
        """Return the answer of every rank; a late rank is ended."""
        deadline = time.monotonic() + timeout
        replies: dict[int, _Reply] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        while waiting:
            remaining = max(0.0, deadline - time.monotonic())
            arrived: list[Any] = multiprocessing.connection.wait(list(waiting), remaining)
            for connection in arrived:
                rank = waiting.pop(connection)
                replies[rank] = self._receive(workers[rank])
                if replies[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
            if not arrived:
                for rank in waiting.values():
                    where = workers[rank].where()
                    text = f"still running; ended by the test (timeout {timeout:g} s)\n{where}"
                    replies[rank] = _died(text)
                    workers[rank].stop()
                break
        return [replies[rank] for rank in range(len(workers))]

    def _receive(self, worker: _Worker) -> _Reply:
        try:
            reply: _Reply = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(5)
            return _died(f"the worker ended with exit code {worker.process.exitcode}")
        worker.num_loops = reply.num_loops
        return reply


# --- in a worker -----------------------------------------------------------------------------


def _work(connection: Connection, stacks: str, virtual: bool) -> None:
    """Run jobs until the tests' process closes the connection or ends."""
    if hasattr(os, "setsid"):
        # Ctrl-C in the terminal is for the tests' process alone.
        os.setsid()
    if hasattr(signal, "SIGUSR1"):
        file = open(stacks, "w")  # noqa: SIM115 (open as long as the process lives)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    # Gloo would else look up the machine's name, and listen to the network.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    if virtual:
        dataparallel.virtual.enable(int(os.environ.get(VIRTUAL_DEVICES, "4")))
        device_only.register()
    stray: list[str] = []
    _catch_strays(stray)
    # Imported objects are never garbage; without them, a collection after every job is cheap.
    gc.collect()
    gc.freeze()
    connection.send_bytes(b"ready")
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, OSError):
            return
        reply = _run(received, stray, virtual)
        connection.send_bytes(reply)


def _num_loops() -> int:
    """Return how many loops of gloo run in this process; 0 where nobody tells."""
    found = 0
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            found += task.read_text().startswith("gloo_tcp_loop")
    return found


def _catch_strays(stray: list[str]) -> None:
    """Note what nobody can catch: exceptions in threads and in finalizers."""

    def hook(args: Any) -> None:
        trace = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        # The ignored error and its place; nothing for a thread.
        about = f"{getattr(args, 'err_msg', '') or ''} {getattr(args, 'object', '')!r}"
        stray.append(f"{about}\n{''.join(trace)}")

    threading.excepthook = sys.unraisablehook = hook


def _run(received: bytes, stray: list[str], virtual: bool) -> bytes:
    """Return the pickled reply to a pickled job."""
    stray.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # As in pyproject.toml.
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        if virtual:
            device_only.set_habits()
            device_only.take_records()
        reply = _call(received)
        gc.collect()
        if virtual:
            reply.records = device_only.take_records()
    reply.num_loops = _num_loops()
    if stray and reply.error is None:
        text = "\n".join(stray)
        reply = _Reply(error=RuntimeError(f"outside of the function:\n{text}"), trace=text)
    return _pickled(reply)


def _call(received: bytes) -> _Reply:
    failed = None
    try:
        job, group = pickle.loads(received)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        with _group(*group) if group else contextlib.nullcontext():
            try:
                return _Reply(value=job())
            except BaseException:
                # Before the group is destroyed, and the other ranks fail because of that.
                failed = time.time()
                raise
    except BaseException as error:
        trace = traceback.format_exc()
        # The frames keep alive what the function left behind, groups and threads for example.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        return _Reply(error=error, trace=trace, when=failed or time.time())


@contextlib.contextmanager
def _group(backend: str, path: str, rank: int, world_size: int, timeout: float) -> Iterator[None]:
    store, limit = FileStore(path, world_size), datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    # As on hardware, the host does not wait for what its default streams wait for.
    strict = dataparallel.virtual.strict_mode() if "vccl" in backend else None
    try:
        # A rank that ends at once would else leave others that are still about to connect to it.
        if backend == "vccl":
            # Its communicators are for the devices that the function chooses.
            store.set(f"here/{rank}", "")
            store.wait([f"here/{i}" for i in range(world_size)])
        else:
            # NCCL refuses two ranks on one device.
            dist.all_reduce(torch.zeros(1, device=f"cuda:{rank}" if backend == "nccl" else "cpu"))
        with strict or contextlib.nullcontext():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _pickled(reply: _Reply) -> bytes:
    try:
        data = pickle.dumps(reply)
        # Some errors can be pickled, and not made again.
        pickle.loads(data)
        return data
    except Exception as failure:
        text = f"the result can't be pickled: {failure}"
        if reply.error is not None:
            text = f"{type(reply.error).__name__}: {reply.error}"
        return pickle.dumps(_Reply(error=RankFailed(text), trace=reply.trace or text))
