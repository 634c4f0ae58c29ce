"""Functions that run on other workers, and how their arguments and results travel."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch.distributed.rpc.functions import async_execution
from torch.distributed.rpc.internal import RemoteException

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.distributed_autograd.extension import Context, extension

#: Seconds; three weeks.
_LONGEST = 2e6

_context: ContextVar[Context | None] = ContextVar("context", default=None)


def rpc_async(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> torch.futures.Future[Any]:
    """Start a function on another worker and return at once.

    Inside of a ``with context():`` block the call belongs to the context, and so do the calls that
    the function makes on its part. Tensors that require grad may be anywhere in the arguments and
    in the result, in containers and objects too. Each keeps its connection to the graph across the
    border, in both directions. A tensor that is sent twice in one call arrives as one. An
    ``nn.Parameter`` arrives as a tensor that is connected to it; gradients reach the parameter.
    Under ``torch.no_grad()``, here for arguments and there for the result, nothing is recorded.

    Outside of a block it is ``torch.distributed.rpc.rpc_async``.

    The block belongs to the thread that entered it, and to the tasks that it awaits. A thread
    started inside of it makes calls outside of the context.

    Calls are pickled, and unpickling can run any code: all workers have to trust each other and the
    network between them.

    Example::

        with context() as context_id:
            halves = [rpc_async("main", torch.mul, (w, x)) for x in (x0, x1)]
            loss = sum(half.wait().sum() for half in halves)
            backward(context_id, [loss])

    Args:
        to: The worker: its name, its id, or torch's ``WorkerInfo``. It may be the caller itself.
        func: The function to run there: something that can be pickled. It is a function of a module
            or a method of an object that can be sent. A function that is marked with
            ``torch.distributed.rpc.functions.async_execution`` may return a future.
        args: Its positional arguments. Default: none.
        kwargs: Its keyword arguments. Default: none.
        timeout: Seconds until the call fails; 0 for no limit. Default: None, the ``rpc_timeout``
            that ``init_rpc`` was given, 60 s unless set.

    Returns:
        A future. Its ``wait()`` returns the result, or raises the function's error. The text has
        its traceback, and types other than ValueError and TypeError become RuntimeError, as with
        torch's RPC. If the context has ended by then, the result has no connection to the graph.

    Raises:
        RuntimeError: This code runs on no worker.
        TypeError: ``func`` cannot be called.
        ValueError: There is no worker ``to``, or ``timeout`` is negative.
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    endpoint = current_endpoint()
    return endpoint.call(
        endpoint.resolve(to), func, args or (), kwargs or {}, timeout, current_context()
    )


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a function on another worker and wait for its result.

    The same as ``rpc_async(...).wait()``; :func:`rpc_async` has the arguments and errors.

    Example::

        with context() as context_id:
            loss = rpc_sync("main", torch.mul, (w, x)).sum()
            backward(context_id, [loss])

    Returns:
        The result of the function; its tensors are connected to those of the other worker.
    """
    return rpc_async(to, func, args, kwargs, timeout).wait()


def current_context() -> Context | None:
    """Return the context that this code runs in, unless it has ended, or None."""
    context = _context.get()
    return None if context is None or context.released() else context


@contextlib.contextmanager
def in_context(context: Context | None) -> Iterator[None]:
    """Run code in a context."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def checked_timeout(timeout: float | None) -> float:
    """Return a timeout that a user gave, or that of RPC, in seconds; 0 for none."""
    if timeout is None:
        return float(torch_rpc.api.get_rpc_timeout())  # type: ignore[attr-defined]
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout} s, but must be at least 0 (0: no limit)")
    # torch's RPC counts milliseconds in 32 bits.
    return min(float(timeout), _LONGEST)


# --- torch's own calls ---------------------------------------------------------------------------


def _check(context: Context, what: str, value: Any) -> None:
    """Raise if a tensor that requires grad goes to another worker and leaves the graph."""
    tensors = (
        each for each in torch_internals.tree_leaves(value) if isinstance(each, torch.Tensor)
    )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"torch's own RPC was to carry a tensor that requires grad {what}, in the distributed "
            f"autograd context {context.id()}, which it would leave: what is behind it would get "
            "no gradient. Use rpc_sync, rpc_async, remote and RRef of "
            "dataparallel.distributed_autograd, or torch.no_grad()"
        )


def _call(call: Any, to: Any, func: Any, kind: Any, *arguments: Any, **named: Any) -> Any:
    context = current_context()
    if context is None or func in (_serve, _serve_async):
        return call(to, func, kind, *arguments, **named)
    _check(context, "as an argument", (arguments, named))

    def arrived(future: torch.futures.Future[Any]) -> Any:
        try:
            value = future.value()
            _check(context, "as a result", value)
        except Exception as error:
            return _Raised(error, "")
        return value

    answer = call(to, func, kind, *arguments, **named)
    if not torch.is_grad_enabled():
        return answer
    opened = answer.then(arrived)
    torch_internals.open_with(opened, _raise)
    return opened


def _start(start: Any, *arguments: Any) -> Any:
    if (context := current_context()) is not None:
        _check(context, "as an argument", arguments)
    return start(*arguments)


def _fetch(fetch: Any, reference: Any, *arguments: Any, **named: Any) -> Any:
    value = fetch(reference, *arguments, **named)
    if (context := current_context()) is not None and not reference.is_owner():
        _check(context, "as a result", value)
    return value


@functools.cache
def _watch_torchs_calls() -> None:
    """Refuse calls of torch's own RPC that would cut the graph of a context, from now on."""
    torch_internals.wrap_rpc(_call, _start, _fetch)


# --- a worker ------------------------------------------------------------------------------------


class Endpoint:
    """The worker that this process is: made once for each ``init_rpc``."""

    def __init__(self, agent: Any) -> None:
        _watch_torchs_calls()
        native = extension()
        info = agent.get_worker_info()
        self.agent = agent
        self.worker = native.Worker(info.name, info.id)
        native.set_process_worker(self.worker)

    def resolve(self, to: Any) -> int:
        """Return the id of a worker that is given by name, by id, or as torch's ``WorkerInfo``."""
        if isinstance(to, torch_rpc.WorkerInfo):  # type: ignore[attr-defined]
            return int(to.id)
        try:
            return int(self.agent.get_worker_info(to).id)
        except RuntimeError as error:
            known = ", ".join(sorted(repr(info.name) for info in self.agent.get_worker_infos()))
            raise ValueError(f"there is no worker {to!r}; the workers are {known}") from error

    def name_of(self, worker_id: int) -> str:
        """Return the name of a worker."""
        return str(self.agent.get_worker_info(worker_id).name)

    def call(
        self,
        to: int,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        context: Context | None = None,
    ) -> torch.futures.Future[Any]:
        """Run a function on a worker; in ``context`` unless it is None."""
        info = self.agent.get_worker_info(to)
        seconds = checked_timeout(timeout)
        call = (function, tuple(args), dict(kwargs or {}))
        if context is None:
            # A worker of a trusted network, see docs/security.md.
            plain = torch_rpc.rpc_async(info, *call, seconds)
            return plain  # type: ignore[no-any-return]
        serve = _serve_async if is_async(function) else _serve
        envelope = seal(call, self.worker.id(), context, to)
        # A worker of a trusted network, see docs/security.md.
        answer = torch_rpc.rpc_async(info, serve, (envelope,), None, seconds)

        def arrived(future: torch.futures.Future[Envelope]) -> Any:
            try:
                return unseal(future.value(), None if context.released() else context)
            except Exception as error:
                # Raised from here it would reach the caller as a RuntimeError, whatever it is.
                return _Raised(error, str(info.name))

        opened: torch.futures.Future[Any] = answer.then(arrived)
        torch_internals.open_with(opened, _raise)
        return opened


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


def _serve(envelope: Envelope) -> Envelope:
    result, seal_up = _serve_part(envelope)
    return seal_up(result)


@async_execution  # type: ignore[untyped-decorator]
def _serve_async(envelope: Envelope) -> torch.futures.Future[Envelope]:
    future, seal_up = _serve_part(envelope)

    def ended(done: torch.futures.Future[Any]) -> Any:
        value = done.value()
        # An error, which torch raises at the caller.
        return value if isinstance(value, RemoteException) else seal_up(value)

    sealed: torch.futures.Future[Envelope] = future.then(ended)
    return sealed


def _serve_part(envelope: Envelope) -> tuple[Any, Callable[[Any], Envelope]]:
    """Run what was called for; its result, and what packs it, or what its future gets."""
    worker = current_endpoint().worker
    # A context may end before a call that nobody waits for arrives: it runs, unrecorded.
    context = worker.obtain(envelope.context) if envelope.context >= 0 else None
    function, args, kwargs = unseal(envelope, context)
    with in_context(context):
        result = function(*args, **kwargs)
    if is_async(function):
        expect_future(result, function)
    return result, lambda value: seal(value, worker.id(), context, envelope.sender)


_lock = threading.Lock()
_current: Endpoint | None = None


def current_endpoint() -> Endpoint:
    """Return the worker of this process; raise a RuntimeError outside of its lifetime."""
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


def is_async(function: Any) -> bool:
    """True if a function returns a future of its result."""
    return hasattr(function, torch_internals.ASYNC_MARK)


def expect_future(result: Any, function: Any) -> None:
    """Raise a TypeError unless a function that is marked so has returned a future."""
    # The result of `then` is not of the class in Python.
    if not isinstance(result, torch_internals.Future):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)} is marked with async_execution, so it "
            f"must return a torch.futures.Future, but it returned {result!r} of type "
            f"{type(result).__name__}"
        )


# --- what travels --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Envelope:
    """A Python object on its way, its tensors taken out: built of what torch's RPC can send."""

    sender: int
    #: -1: the object is in no context.
    context: int
    #: The number of its send, negative if none of its tensors requires grad.
    message: int
    #: The pickled object, with numbers in place of tensors and remote references.
    body: bytes
    #: Detached.
    tensors: list[torch.Tensor]
    #: For each tensor its device at the sender if it was copied to the host, else "".
    devices: list[str]
    #: The indices of the tensors that require grad.
    attached: list[int]
    references: list[Any]
    #: The sender's news of the messages of the context, see Note [Live sends].
    news: list[int]


class _Pickler(pickle.Pickler):
    """A pickler that takes tensors and torch's remote references out of an object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []
        self._seen: dict[int, tuple[str, int]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if torch_internals.is_transformed(obj):
                raise TypeError(
                    "a tensor inside of torch.func.vmap, grad or jvp cannot be sent to another "
                    "worker: make the call outside of the transform"
                )
            return self._number("tensor", obj, self.tensors)
        if isinstance(obj, torch_rpc.PyRRef):  # type: ignore[attr-defined]
            return self._number("reference", obj, self.references)
        return None

    def _number(self, kind: str, obj: Any, found: list[Any]) -> tuple[str, int]:
        # By identity, and `found` keeps each object alive: a tensor sent twice arrives as one.
        if id(obj) not in self._seen:
            self._seen[id(obj)] = (kind, len(found))
            found.append(obj)
        return self._seen[id(obj)]


# Comes over torch's RPC, which runs what a worker sends anyway.
class _Unpickler(pickle.Unpickler):  # noqa: TID251
    def __init__(self, body: bytes, found: dict[str, list[Any]]) -> None:
        super().__init__(io.BytesIO(body))
        self._found = found

    def persistent_load(self, pid: Any) -> Any:
        kind, number = pid
        return self._found[kind][number]


def seal(obj: Any, sender: int, context: Context | None, to: int) -> Envelope:
    """Pack an object for worker ``to``; a context that has not ended records its tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    tensors = pickler.tensors
    attached = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    if not torch.is_grad_enabled():
        attached = []
    sent = None if context is None else context.send([tensors[i] for i in attached], to)
    message, news = sent or (-1, [])
    staged = [_stage(tensor.detach(), to) for tensor in tensors]
    return Envelope(
        sender=sender,
        context=-1 if context is None or sent is None else context.id(),
        message=message,
        body=file.getvalue(),
        tensors=[tensor for tensor, _ in staged],
        devices=[device for _, device in staged],
        attached=attached,
        references=pickler.references,
        news=news,
    )


def unseal(envelope: Envelope, context: Context | None) -> Any:
    """Return the object of an envelope; in a context, its tensors connect to the sent ones."""
    tensors = [
        tensor.to(device) if device else tensor
        for tensor, device in zip(envelope.tensors, envelope.devices, strict=True)
    ]
    _separate(tensors)
    if context is not None:
        context.learn(envelope.news, envelope.sender)
        if envelope.message >= 0:
            context.receive(envelope.message, [tensors[i] for i in envelope.attached])
    found = {"tensor": tensors, "reference": envelope.references}
    return _Unpickler(envelope.body, found).load()


def _separate(tensors: list[torch.Tensor]) -> None:
    """Give each tensor memory of its own.

    Tensors of one memory arrive as such, but know nothing of each other. Autograd would not notice
    that a change of one in place changes what it has saved of another.
    """
    seen = set()
    for index, tensor in enumerate(tensors):
        # A subclass may have no memory, and then shares none.
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            continue
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            tensors[index] = tensor.clone()
        seen.add(memory)


def _stage(tensor: torch.Tensor, to: int) -> tuple[torch.Tensor, str]:
    """Return a tensor as torch's RPC can send it, and the device that it was copied from, or ""."""
    if not _devices.is_accelerator(tensor.device):
        return tensor, ""
    if tensor.device in torch_internals.rpc_device_map(to):
        return tensor, ""
    return tensor.cpu(), str(tensor.device)
