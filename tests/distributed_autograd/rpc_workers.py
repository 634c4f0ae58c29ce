"""Processes that are workers of ``torch.distributed.rpc``, and what tests keep on them."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch.distributed.rpc import api as _api

from dataparallel import distributed_autograd
from dataparallel.distributed_autograd.extension import extension
from tests.cluster import Cluster

# Whatever torch imports there, mypy takes for private.
api: Any = _api

#: Seconds until a worker must have nothing left of the contexts that have ended.
CLEAN = 10.0


class World:
    """Workers ``worker0``, ``worker1`` and so on, with four virtual devices each.

    They are not the processes of other tests: torch's remote references work only with the first
    ``init_rpc`` of a process. After a failure others take their place.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._cluster: Cluster | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        clean: bool = True,
        timeout: float = 100.0,
    ) -> Any:
        """Call a function on ``worker0``; unless one is lost, no worker may have a context left."""
        cluster = self._cluster or self._start()
        try:
            (result,) = cluster.run(
                _job, 1, function, args, clean, init_group=False, virtual=True, timeout=timeout
            )
        except BaseException:
            self.close()
            raise
        return result

    def close(self) -> None:
        """End the workers."""
        if self._cluster is not None and self._folder is not None:
            self._cluster.close()
            self._folder.cleanup()
        self._cluster = self._folder = None

    def _start(self) -> Cluster:
        # Compiling takes longer than a worker may take to answer.
        extension()
        self._cluster, self._folder = Cluster(), tempfile.TemporaryDirectory(prefix="rpc-")
        path = f"{self._folder.name}/rpc"
        self._cluster.run(_begin, self._size, path, init_group=False, virtual=True)
        return self._cluster


def _begin(rank: int, world_size: int, path: str) -> None:
    """Become a worker: it serves the others until its process ends."""
    # As gloo, it would else look up the machine's name, and listen to the network.
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    # A nested call keeps a thread of each worker on its way. A worker with other transports looks
    # for messages all the time, on the cores that the others need.
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}", rpc_timeout=30.0, num_worker_threads=64, _transports=["uv"]
    )
    with warnings.catch_warnings():
        # init_rpc itself causes this warning.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        torch_rpc.init_rpc(
            f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
        )


def _job(
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[object, ...],
    clean: bool,
) -> Any:
    everywhere(_prepare)
    result = function(*args)
    if clean:
        expect_clean_everywhere()
        everywhere(forget)
    return result


def _prepare() -> None:
    # As in the process that runs the test.
    warnings.simplefilter("error")


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
    """Return the names of all workers."""
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


def ones(*shape: int) -> Tensor:
    """Return a leaf that the test alone has."""
    return torch.ones(shape or (3,), dtype=torch.float64, requires_grad=True)


def leaf(name: str, *shape: int) -> Tensor:
    """Return a leaf of this worker, made at the first use, with values from its name."""
    with _lock:
        if name not in _leaves:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            data = torch.randn(shape or (3,), generator=generator, dtype=torch.float64)
            _leaves[name] = data.requires_grad_()
        return _leaves[name]


def own_gradients(context_id: int | None) -> dict[str, Tensor]:
    """Return the gradients of this worker's leaves in a context, or else in ``.grad``, by name."""
    with _lock:
        leaves = dict(_leaves)
    if not leaves:
        return {}
    if context_id is None:
        found = {leaf: leaf.grad for leaf in leaves.values() if leaf.grad is not None}
    else:
        found = distributed_autograd.get_gradients(context_id)
    return {name: found[leaf] for name, leaf in leaves.items() if leaf in found}


def note(value: Any) -> None:
    """Keep something on this worker."""
    with _lock:
        _notes.append(value)


def take_notes() -> list[Any]:
    """Return the notes of this worker since the last time."""
    with _lock:
        taken = list(_notes)
        _notes.clear()
        return taken


def gate(name: str) -> threading.Event:
    """Return the gate at which functions wait until a test lets them go on."""
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
