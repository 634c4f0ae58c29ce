"""Processes that run one random program after the other, without a start for each."""

from __future__ import annotations

import pickle
import socket
import tempfile
import threading
from multiprocessing.connection import Connection

import torch

from dataparallel import distributed_autograd
from tests.cluster import Cluster
from tests.distributed_autograd.graph_runs import HANGS, LIMIT, Outcome, run_on_workers
from tests.distributed_autograd.random_graphs import WORKERS, Program
from tests.distributed_autograd.rpc_workers import rpc_world

#: Seconds until the processes are ready.
STARTUP = 200.0


# --- in the tests' process -------------------------------------------------------------------


class Processes:
    """Workers that are processes; where one is lost, others take the place of all.

    They are not those of the other tests: torch's remote references work only with the first
    `init_rpc` of a process.

    Args:
        seconds: How long they may work in all.
    """

    def __init__(self, seconds: float) -> None:
        self._cluster = Cluster()
        self._seconds = seconds
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, program: Program) -> Outcome:
        """Run a program.

        Raises:
            AssertionError: It failed, hung, or left something behind.
        """
        if self._connection is not None and self._connection.poll():
            # No answer is due: this is the end of worker 0, which has lost another.
            self.close()
        connection = self._connection or self._start()
        try:
            connection.send_bytes(pickle.dumps(program))
            if not connection.poll(HANGS + LIMIT):
                raise TimeoutError("no answer")
            # Torch 2.11 warns where it makes a sparse gradient without checks.
            with torch.sparse.check_sparse_tensor_invariants():
                reply = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise AssertionError(f"the processes ended: {self._error!r}") from error
        assert isinstance(reply, Outcome), reply
        return reply

    def close(self) -> None:
        """Let the processes end, and wait for that."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._thread is not None:
            self._thread.join(self._seconds)
            self._thread = None
        self._cluster.close()

    def _start(self) -> Connection:
        self.close()
        self._error = None
        with tempfile.TemporaryDirectory(prefix="graphs-") as directory:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"{directory}/programs")
                server.listen(1)
                server.settimeout(STARTUP)
                self._thread = threading.Thread(target=self._work, args=(directory,), daemon=True)
                self._thread.start()
                accepted, _ = server.accept()
            accepted.setblocking(True)
            self._connection = Connection(accepted.detach())
        return self._connection

    def _work(self, directory: str) -> None:
        try:
            address = f"{directory}/programs"
            rpc_world(self._cluster, _run_programs, WORKERS, address, timeout=self._seconds)
        except BaseException as error:
            self._error = error


# --- in the processes ------------------------------------------------------------------------


def _run_programs(rank: int, world_size: int, address: str) -> None:
    """Worker 0 runs the programs, and the others serve it."""
    if rank != 0:
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        connection = Connection(client.detach())
    with connection:
        while True:
            try:
                program: Program = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                reply: Outcome | str = run_on_workers(program)
            except AssertionError as error:
                reply = str(error)
            connection.send_bytes(pickle.dumps(reply))
            if isinstance(reply, str) and not _all_there():
                return


def _all_there() -> bool:
    try:
        for number in range(WORKERS):
            distributed_autograd.rpc_sync(f"worker{number}", int, timeout=LIMIT)
    except (RuntimeError, OSError):
        return False
    return True
