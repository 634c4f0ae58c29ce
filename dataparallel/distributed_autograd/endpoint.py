"""Where calls start and arrive: one endpoint for each worker of this process."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from dataparallel import torch_internals
from dataparallel.comm import interpreter_end
from dataparallel.distributed_autograd.call_threads import is_nested
from dataparallel.distributed_autograd.extension import Context, Worker
from dataparallel.distributed_autograd.remote_value import Reference


class Endpoint(ABC):
    """A worker, as the code that runs on it sees it.

    Args:
        worker: Its part in C++, which has its contexts and passes.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @abstractmethod
    def resolve(self, to: Any) -> int:
        """The id of a worker that is given by name, by id, or as torch's ``WorkerInfo``."""

    @abstractmethod
    def name_of(self, worker_id: int) -> str:
        """The name of a worker."""

    @abstractmethod
    def call(
        self,
        to: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        context: Context | None,
    ) -> torch.futures.Future[Any]:
        """Run a function on another worker, or on this one; in ``context`` unless it is None."""

    @abstractmethod
    def hold(self, to: int) -> Reference:
        """Make an empty ``RemoteValue`` on a worker and return what refers to it."""

    @abstractmethod
    def outstanding_calls(self) -> int:
        """How many calls that this worker made in a context have no answer yet."""

    @abstractmethod
    def default_timeout(self) -> float:
        """Seconds that a call or a backward pass may take if the caller does not say."""


#: Seconds; three weeks.
_LONGEST = 2e6

_here: ContextVar[Endpoint | None] = ContextVar("endpoint", default=None)
_context: ContextVar[Context | None] = ContextVar("context", default=None)
#: What to try where no endpoint was entered: the endpoint of the process, set by its module.
_of_process: list[Callable[[], Endpoint | None]] = []


def current_endpoint() -> Endpoint:
    """The worker that this code runs on.

    Raises:
        RuntimeError: It runs on none.
    """
    if not is_nested():
        interpreter_end.come_by()
    endpoint = _here.get()
    for find in _of_process:
        endpoint = endpoint or find()
    if endpoint is None:
        raise RuntimeError(
            "this process is no worker yet: call torch.distributed.rpc.init_rpc(name, rank=..., "
            "world_size=...) first, or enter dataparallel.distributed_autograd.LocalWorkers(...)"
        )
    return endpoint


def current_context() -> Context | None:
    """The context that this code runs in, or None."""
    return _context.get()


@contextlib.contextmanager
def in_context(context: Context | None) -> Iterator[None]:
    """Run code in a context."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


@contextlib.contextmanager
def entered(endpoint: Endpoint | None, context: Context | None) -> Iterator[None]:
    """Run code on a worker and in a context."""
    token = _here.set(endpoint)
    try:
        with in_context(context):
            yield
    finally:
        _here.reset(token)


def checked_timeout(timeout: float | None) -> float | None:
    """A timeout that a user gave, in seconds; 0 for none.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative or no number of seconds.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout} s, but must be at least 0 (0: no limit)")
    # torch's RPC counts milliseconds in 32 bits.
    return min(float(timeout), _LONGEST)


def refuse_transformed(tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor inside of a transform of ``torch.func``."""
    if torch_internals.is_transformed(tensor):
        raise TypeError(
            "a tensor inside of torch.func.vmap, grad or jvp cannot be sent to another worker: "
            "make the call outside of the transform"
        )


def find_context(context_id: int) -> Context:
    """The context with this id on this worker.

    Raises:
        ValueError: There is none.
    """
    worker = current_endpoint().worker
    context = worker.find(context_id)
    if context is None:
        raise ValueError(
            f"worker '{worker.name()}' has no distributed autograd context {context_id}: use the "
            "id of a `with context() as context_id:` block that has not ended, on a worker that "
            "takes part in it"
        )
    return context
