"""The worker that is this process; calls go through ``torch.distributed.rpc``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed.rpc as torch_rpc
from torch.distributed.rpc.functions import async_execution

from dataparallel import torch_internals
from dataparallel.distributed_autograd.endpoint import Endpoint, _of_process, entered
from dataparallel.distributed_autograd.envelope import Envelope, seal, unseal
from dataparallel.distributed_autograd.extension import Context, Worker, extension
from dataparallel.distributed_autograd.remote_value import (
    Reference,
    RemoteValue,
    expect_future,
    is_async,
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ProcessEndpoint(Endpoint):
    """The worker of a process that has called ``torch.distributed.rpc.init_rpc``."""

    def __init__(self, worker: Worker, agent: Any) -> None:
        super().__init__(worker)
        self.agent = agent
        self._outstanding = 0
        self._counting = threading.Lock()

    def resolve(self, to: Any) -> int:
        if isinstance(to, torch_rpc.WorkerInfo):  # type: ignore[attr-defined]
            return int(to.id)
        try:
            return int(self.agent.get_worker_info(to).id)
        except RuntimeError as error:
            known = ", ".join(repr(info.name) for info in self.agent.get_worker_infos())
            raise ValueError(f"there is no worker {to!r}; the workers are {known}") from error

    def name_of(self, worker_id: int) -> str:
        return str(self.agent.get_worker_info(worker_id).name)

    def hold(self, to: int) -> Reference:
        if to == self.worker.id():
            return cast(Reference, torch_rpc.RRef(RemoteValue()))
        # unsafe-load: a worker of a trusted network, see docs/security.md
        return cast(Reference, torch_rpc.remote(self.agent.get_worker_info(to), RemoteValue))

    def outstanding_calls(self) -> int:
        return self._outstanding

    def count(self, change: int) -> None:
        """Note that a call was made, or one was answered."""
        with self._counting:
            self._outstanding += change

    def default_timeout(self) -> float:
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
        info = self.agent.get_worker_info(to)
        seconds = torch_rpc.constants.UNSET_RPC_TIMEOUT if timeout is None else timeout
        if context is None:
            # unsafe-load: a worker of a trusted network, see docs/security.md
            plain = torch_rpc.rpc_async(info, function, tuple(args), dict(kwargs), seconds)
            return plain  # type: ignore[no-any-return]
        envelope = seal((function, tuple(args), dict(kwargs)), self.worker, context, to)
        serve = _serve_async if is_async(function) else _serve
        # unsafe-load: a worker of a trusted network, see docs/security.md
        answer = torch_rpc.rpc_async(info, serve, (envelope,), None, seconds)
        self.count(1)
        return _opened(answer, self, context, info)


#: Seconds that word of the end of a context may take.
_RELEASE = 60.0


class _Failure:
    """An exception as the value of a future."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _opened(
    answer: torch.futures.Future[Envelope], caller: ProcessEndpoint, context: Context, callee: Any
) -> torch.futures.Future[Any]:
    def arrived(future: torch.futures.Future[Envelope]) -> Any:
        caller.count(-1)
        if context.released():
            # The word of its end may have come to the callee before the call did.
            caller.worker.tell_released(context.id(), callee.id, _RELEASE)
        try:
            return unseal(future.value(), None if context.released() else context)
        except Exception as error:
            # Raised from here it would reach the caller as a RuntimeError, whatever it is.
            return _Failure(_with_name(error, str(callee.name)))

    def raise_failure(value: Any) -> None:
        if isinstance(value, _Failure):
            raise value.error

    opened = answer.then(arrived)
    torch_internals.open_with(opened, raise_failure)
    return opened


def _with_name(error: Exception, callee: str) -> Exception:
    """An error that names the worker: errors of functions do, those of the connection do not."""
    if type(error) is not RuntimeError or callee in str(error):
        return error
    named = RuntimeError(f"a call of worker '{callee}' failed: {error}")
    named.__cause__ = error
    return named


_lock = threading.Lock()
_current: ProcessEndpoint | None = None


def process_endpoint() -> ProcessEndpoint | None:
    """The endpoint of this process, or None before ``init_rpc`` and after its shutdown."""
    global _current
    # Some builds of torch have no RPC.
    agent = torch_internals.rpc_agent() if torch_rpc.is_available() else None
    if agent is None:
        return None
    with _lock:
        if _current is None or _current.agent is not agent:
            info = agent.get_worker_info()
            native = extension()
            worker = native.Worker(info.name, info.id, native.RpcLink())
            native.set_process_worker(worker)
            _current = ProcessEndpoint(worker, agent)
        return _current


_of_process.append(process_endpoint)


def _open(envelope: Envelope) -> tuple[ProcessEndpoint, Context | None, Call]:
    endpoint = process_endpoint()
    assert endpoint is not None, "a call arrived, so the agent is there"
    # A context may end before a call that nobody waits for arrives: it runs, unrecorded.
    context = endpoint.worker.obtain(envelope.context) if envelope.context >= 0 else None
    return endpoint, context, unseal(envelope, context)


def _serve(envelope: Envelope) -> Envelope:
    endpoint, context, (function, args, kwargs) = _open(envelope)
    with entered(endpoint, context):
        result = function(*args, **kwargs)
    return seal(result, endpoint.worker, context, envelope.sender)


@async_execution  # type: ignore[untyped-decorator]
def _serve_async(envelope: Envelope) -> torch.futures.Future[Envelope]:
    endpoint, context, (function, args, kwargs) = _open(envelope)
    with entered(endpoint, context):
        result = function(*args, **kwargs)
    future = expect_future(result, getattr(function, "__qualname__", repr(function)))
    return future.then(lambda done: seal(done.value(), endpoint.worker, context, envelope.sender))
