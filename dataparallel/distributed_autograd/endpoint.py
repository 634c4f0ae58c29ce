"""The worker that this process is, as the code that runs on it sees it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed.rpc as torch_rpc
from torch.distributed.rpc.functions import async_execution

from dataparallel import torch_internals
from dataparallel.distributed_autograd.envelope import Envelope, seal, unseal
from dataparallel.distributed_autograd.extension import Context, extension

#: Seconds that word of the end of a context may take.
_RELEASE = 60.0
#: Seconds; three weeks.
_LONGEST = 2e6

_context: ContextVar[Context | None] = ContextVar("context", default=None)


class Endpoint:
    """Where calls start and arrive: made once for each ``init_rpc`` of this process."""

    def __init__(self, agent: Any) -> None:
        native = extension()
        info = agent.get_worker_info()
        self.agent = agent
        self.worker = native.Worker(info.name, info.id)
        native.set_process_worker(self.worker)
        self._outstanding = 0
        self._counting = threading.Lock()

    def resolve(self, to: Any) -> int:
        """The id of a worker that is given by name, by id, or as torch's ``WorkerInfo``."""
        if isinstance(to, torch_rpc.WorkerInfo):  # type: ignore[attr-defined]
            return int(to.id)
        try:
            return int(self.agent.get_worker_info(to).id)
        except RuntimeError as error:
            known = ", ".join(repr(info.name) for info in self.agent.get_worker_infos())
            raise ValueError(f"there is no worker {to!r}; the workers are {known}") from error

    def name_of(self, worker_id: int) -> str:
        """The name of a worker."""
        return str(self.agent.get_worker_info(worker_id).name)

    def outstanding_calls(self) -> int:
        """How many calls that this worker made in a context have no answer yet."""
        return self._outstanding

    def default_timeout(self) -> float:
        """Seconds that a call or a backward pass may take if the caller does not say."""
        return float(torch_rpc.api.get_rpc_timeout())  # type: ignore[attr-defined]

    def call(
        self,
        to: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        context: Context | None,
    ) -> torch.futures.Future[Any]:
        """Run a function on a worker; in ``context`` unless it is None."""
        info = self.agent.get_worker_info(to)
        seconds = torch_rpc.constants.UNSET_RPC_TIMEOUT if timeout is None else timeout
        if context is None:
            # A worker of a trusted network, see docs/security.md.
            plain = torch_rpc.rpc_async(info, function, tuple(args), dict(kwargs), seconds)
            return plain  # type: ignore[no-any-return]
        envelope = seal((function, tuple(args), dict(kwargs)), self.worker, context, to)
        serve = _serve_async if is_async(function) else _serve
        # A worker of a trusted network, see docs/security.md.
        answer = torch_rpc.rpc_async(info, serve, (envelope,), None, seconds)
        self._count(1)
        return self._opened(answer, context, info)

    def _opened(
        self, answer: torch.futures.Future[Envelope], context: Context, callee: Any
    ) -> torch.futures.Future[Any]:
        """The result in an answer, its tensors connected."""

        def arrived(future: torch.futures.Future[Envelope]) -> Any:
            self._count(-1)
            if context.released():
                # The word of its end may have come to the callee before the call did.
                self.worker.tell_released(context.id(), callee.id, _RELEASE)
            try:
                return unseal(future.value(), None if context.released() else context)
            except Exception as error:
                # Raised from here it would reach the caller as a RuntimeError, whatever it is.
                return _Raised(error, str(callee.name))

        opened = answer.then(arrived)
        torch_internals.open_with(opened, _raise)
        return opened

    def _count(self, change: int) -> None:
        with self._counting:
            self._outstanding += change


class _Raised:
    """An exception as the value of a future, and the worker whose call has raised it."""

    def __init__(self, error: Exception, callee: str) -> None:
        self.error, self.callee = error, callee


def _raise(value: Any) -> None:
    if not isinstance(value, _Raised):
        return
    error, callee = value.error, value.callee
    if type(error) is not RuntimeError or callee in str(error):
        raise error
    # Errors of functions name the worker, those of the connection do not.
    raise RuntimeError(f"a call of worker '{callee}' failed: {error}") from error


def _open(envelope: Envelope) -> tuple[Endpoint, Context | None, tuple[Any, ...]]:
    endpoint = current_endpoint()
    # A context may end before a call that nobody waits for arrives: it runs, unrecorded.
    context = endpoint.worker.obtain(envelope.context) if envelope.context >= 0 else None
    return endpoint, context, unseal(envelope, context)


def _serve(envelope: Envelope) -> Envelope:
    endpoint, context, (function, args, kwargs) = _open(envelope)
    with in_context(context):
        result = function(*args, **kwargs)
    return seal(result, endpoint.worker, context, envelope.sender)


@async_execution  # type: ignore[untyped-decorator]
def _serve_async(envelope: Envelope) -> torch.futures.Future[Envelope]:
    endpoint, context, (function, args, kwargs) = _open(envelope)
    with in_context(context):
        result = function(*args, **kwargs)
    future = expect_future(result, getattr(function, "__qualname__", repr(function)))
    return future.then(lambda done: seal(done.value(), endpoint.worker, context, envelope.sender))


_lock = threading.Lock()
_current: Endpoint | None = None


def current_endpoint() -> Endpoint:
    """The worker that this process is; a RuntimeError before ``init_rpc`` and after its end."""
    global _current
    # Some builds of torch have no RPC.
    agent = torch_internals.rpc_agent() if torch_rpc.is_available() else None
    if agent is None:
        raise RuntimeError(
            "this process is no worker yet: call torch.distributed.rpc.init_rpc(name, rank=..., "
            "world_size=...) first"
        )
    with _lock:
        if _current is None or _current.agent is not agent:
            _current = Endpoint(agent)
        return _current


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


def find_context(context_id: int) -> Context:
    """The context with this id on this worker, or a ValueError."""
    worker = current_endpoint().worker
    context = worker.find(context_id)
    if context is None:
        raise ValueError(
            f"worker '{worker.name()}' has no distributed autograd context {context_id}: use the "
            "id of a `with context() as context_id:` block that has not ended, on a worker that "
            "takes part in it"
        )
    return context


def checked_timeout(timeout: float | None) -> float | None:
    """A timeout that a user gave, in seconds; 0 for none."""
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout} s, but must be at least 0 (0: no limit)")
    # torch's RPC counts milliseconds in 32 bits.
    return min(float(timeout), _LONGEST)


def is_async(function: Any) -> bool:
    """Whether a function returns a future of its result."""
    return hasattr(function, torch_internals.ASYNC_MARK)


def expect_future(result: Any, name: str) -> torch.futures.Future[Any]:
    """What a function that is marked so has returned, or a TypeError."""
    # What `then` returns is not of the class in Python.
    if not isinstance(result, torch_internals.Future):
        raise TypeError(
            f"{name} is marked with async_execution, so it must return a torch.futures.Future, but "
            f"it returned {result!r} of type {type(result).__name__}"
        )
    return cast("torch.futures.Future[Any]", result)
