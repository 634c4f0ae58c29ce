"""Values that stay on the worker that made them.

A value is a ``concurrent.futures.Future`` on its owner; torch's own reference names it and keeps it
alive. In each call the reference comes last. Torch counts a reference as sent when it is pickled,
so a value that cannot be pickled has to fail before.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed.rpc as torch_rpc
from torch.distributed.rpc.functions import async_execution
from torch.distributed.rpc.internal import RemoteException

from dataparallel.distributed_autograd.calls import (
    Endpoint,
    checked_timeout,
    current_endpoint,
    expect_future,
    is_async,
    rpc_async,
    rpc_sync,
)

T = TypeVar("T")

_Held = concurrent.futures.Future


class RRef(Generic[T]):
    """A reference to a value that stays on the worker that owns it.

    It can be sent: an ``RRef`` inside the arguments or the result of a remote call refers to the
    same value there. The owner keeps the value until no worker has a reference to it.
    :func:`remote` makes references to values on other workers; this makes one to a value of the
    worker that it is called on.

    Example::

        class Table:
            def __init__(self):
                self.rows = torch.zeros(10, 4, requires_grad=True)

            def look_up(self, indices):
                return self.rows[indices]

        table = RRef(Table())
        with context() as context_id:
            rows = table.rpc_sync().look_up(torch.tensor([1, 2]))
            backward(context_id, [rows.sum()])
            gradient = get_gradients(context_id)[table.local_value().rows]

    Args:
        value: The object of the reference, of any type. Tensors keep their connection to the graph:
            in a context, gradients flow from where the value is used back to it.

    Raises:
        RuntimeError: This process is no worker: ``torch.distributed.rpc.init_rpc`` was not called.
    """

    def __init__(self, value: T) -> None:
        self._refer_to(_hold(current_endpoint().worker.id()))
        _held(self._reference).set_result(value)

    def _refer_to(self, reference: Any) -> None:
        self._reference = reference

    def __reduce__(self) -> tuple[Any, ...]:
        return around, (self._reference,)

    def __repr__(self) -> str:
        return f"RRef(owner={self.owner_name()!r})"

    def owner(self) -> Any:
        """Return the worker that owns the value.

        Example::

            rref = RRef(torch.ones(3))
            twice = rpc_sync(rref.owner(), torch.mul, (torch.ones(3), 2))

        Returns:
            Its name and id, as torch's ``WorkerInfo``, which calls accept as their worker.
        """
        return self._reference.owner()

    def owner_name(self) -> str:
        """Return the name of the worker that owns the value, as it was given to ``init_rpc``.

        Example::

            print(RRef(torch.ones(3)).owner_name())

        Returns:
            The name.
        """
        return str(self.owner().name)

    def is_owner(self) -> bool:
        """True if this worker owns the value.

        Example::

            assert RRef(torch.ones(3)).is_owner()

        Returns:
            True on the worker whose name is ``owner_name()``.
        """
        return bool(self._reference.is_owner())

    def local_value(self, timeout: float | None = None) -> T:
        """Return the value itself, on the worker that owns it.

        Example::

            rref = RRef([1, 2])
            rref.local_value().append(3)

        Args:
            timeout: Seconds to wait if the function that makes the value has not ended. 0: no
                limit. Default: the ``rpc_timeout`` of ``init_rpc``.

        Returns:
            The value, not a copy.

        Raises:
            RuntimeError: Another worker owns it.
            TimeoutError: It is not there in time.
            Exception: The function that should make it raised this.
        """
        if not self.is_owner():
            raise RuntimeError(
                f"worker '{current_endpoint().worker.name()}' does not own this value, worker "
                f"'{self.owner_name()}' does: call to_here() for a copy"
            )
        seconds = checked_timeout(timeout)
        held = _held(self._reference)
        if not concurrent.futures.wait([held], seconds or None).done:
            raise TimeoutError(
                f"the value on worker '{self.owner_name()}' is not there after {seconds:g} s: the "
                "function that makes it has not ended"
            )
        return cast(T, held.result())

    def to_here(self, timeout: float | None = None) -> T:
        """Copy the value to this worker; the owner gets the value itself.

        In a context the copy is connected to the value: gradients flow back to the owner.

        Example::

            with context() as context_id:
                w = torch.ones(3, requires_grad=True)
                doubled = remote("main", torch.mul, (w, 2))
                backward(context_id, [doubled.to_here().sum()])
                print(get_gradients(context_id)[w])  # tensor([2., 2., 2.])

        Args:
            timeout: Seconds for the value to be made and to arrive. 0: no limit. Default: the
                ``rpc_timeout`` of ``init_rpc``.

        Returns:
            The value.

        Raises:
            RuntimeError: The owner did not answer in time, or is lost.
            TimeoutError: This worker is the owner, and the value is not there in time.
            Exception: The function that should make it raised an error on the owner; it is raised
                as :func:`rpc_sync` raises those of functions.
        """
        if self.is_owner():
            return self.local_value(timeout)
        call: tuple[Any, ...] = ("", (), {}, self._reference)
        return cast(T, rpc_sync(self.owner(), _invoke, call, None, timeout))

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """Call methods of the value on its owner, and wait for the results.

        Example::

            layer = RRef(torch.nn.Linear(4, 3))
            output = layer.rpc_sync().forward(torch.ones(2, 4))

        Args:
            timeout: Seconds that a call may take. 0: no limit. Default: the ``rpc_timeout`` of
                ``init_rpc``.

        Returns:
            An object whose methods are those of the value. In a context their calls are recorded.
        """
        return _Methods(rpc_sync, self._reference, timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """Call methods of the value on its owner without waiting.

        Example::

            layer = RRef(torch.nn.Linear(4, 3))
            futures = [layer.rpc_async().forward(torch.ones(n, 4)) for n in (1, 2)]
            outputs = torch.futures.wait_all(futures)

        Args:
            timeout: As of :meth:`rpc_sync`.

        Returns:
            An object whose methods are those of the value, and return ``torch.futures.Future``.
        """
        return _Methods(rpc_async, self._reference, timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """Call methods of the value on its owner, and leave the results there.

        Example::

            layer = RRef(torch.nn.Linear(4, 3))
            hidden = layer.remote().forward(torch.ones(2, 4))
            total = hidden.rpc_sync().sum()

        Args:
            timeout: As of :meth:`rpc_sync`.

        Returns:
            An object whose methods are those of the value, and return ``RRef``.
        """
        return _Methods(remote, self._reference, timeout)


def remote(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:
    """Run a function on another worker and leave its result there.

    In a context the call is recorded: gradients flow from where the result is used through the
    function back to its arguments.

    Example::

        with context() as context_id:
            x = torch.ones(3, requires_grad=True)
            rref = remote("main", torch.mul, (x, 2))
            backward(context_id, [rref.to_here().sum()])

    Args:
        to: The worker: its name, its id, or torch's ``WorkerInfo``. It may be the calling one.
        func: The function, as for :func:`rpc_async`. If it is decorated with
            ``torch.distributed.rpc.functions.async_execution``, the value is what its future gets.
        args: Its arguments, with tensors and references anywhere in them. Default: none.
        kwargs: Its arguments by name. Default: none.
        timeout: Seconds that the function may take; later the reference has an error in place of
            a value. 0: no limit. Default: the ``rpc_timeout`` of ``init_rpc``.

    Returns:
        A reference to the result, at once. An error of the function is raised where the result is
        used.

    Raises:
        TypeError: ``func`` cannot be called.
        ValueError: There is no such worker.
        RuntimeError: This process is no worker: ``torch.distributed.rpc.init_rpc`` was not called.
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    endpoint = current_endpoint()
    reference = _hold(endpoint.resolve(to))
    call = (func, tuple(args or ()), dict(kwargs or {}), reference)
    made = rpc_async(to, _make, call, None, timeout)
    made.add_done_callback(functools.partial(_tell_owner, endpoint, reference))
    return around(reference)


def around(reference: Any) -> RRef[Any]:
    """Return an ``RRef`` of this package around one of torch's."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._refer_to(reference)
    return rref


class _Methods:
    """A proxy with every method that the value of a reference may have."""

    def __init__(self, call: Callable[..., Any], reference: Any, timeout: float | None) -> None:
        self.__call, self.__reference, self.__timeout = call, reference, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            call = (name, args, kwargs, self.__reference)
            return self.__call(self.__reference.owner(), _invoke, call, None, self.__timeout)

        return method


def _hold(to: int) -> Any:
    """Make the place of a value on a worker, and torch's reference to it."""
    endpoint = current_endpoint()
    if to == endpoint.worker.id():
        return torch_rpc.RRef(_Held())
    # A worker of a trusted network, see docs/security.md.
    return torch_rpc.remote(endpoint.agent.get_worker_info(to), _Held)


def _tell_owner(endpoint: Endpoint, reference: Any, made: torch.futures.Future[None]) -> None:
    """Tell whoever waits for the value that the call itself failed, or ran out of time."""
    try:
        made.value()
    except Exception as error:
        # If the owner is lost, whoever waits for it learns that by itself.
        with contextlib.suppress(Exception):
            endpoint.call(reference.owner().id, _fail, (str(error), reference))


# --- on the owner --------------------------------------------------------------------------------


def _held(reference: Any) -> _Held[Any]:
    """Return the value that a reference refers to."""
    value = reference.local_value()
    if isinstance(value, _Held):
        return value
    # Made with torch's own RRef, which waits until it is there.
    held: _Held[Any] = _Held()
    held.set_result(value)
    return held


def _make(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reference: Any,
) -> None:
    """Run a function; its result, or its error, becomes the value."""
    _run(function, "", args, kwargs, _held(reference))


def _fail(text: str, reference: Any) -> None:
    """Note that nothing will make the value."""
    _settle(_held(reference), error=RuntimeError(text))


@async_execution  # type: ignore[untyped-decorator]
def _invoke(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], reference: Any
) -> torch.futures.Future[Any]:
    """Call a method of the value, or return the value for an empty name, once it is there."""
    held = _held(reference)
    outcome: _Held[Any] = _Held()
    answer: torch.futures.Future[Any] = torch.futures.Future()
    outcome.add_done_callback(lambda done: answer.set_result(_answer(done)))

    def run() -> None:
        # Not raised here: each time its traceback would grow.
        error = held.exception()
        if error is not None or not name:
            _settle(outcome, None if error else held.result(), error)
        else:
            _run(held.result(), name, args, kwargs, outcome)

    if held.done():
        run()
        return answer
    variables = contextvars.copy_context()

    def start(_: object) -> None:
        # In threads of their own, since one method may wait for what another one does.
        threading.Thread(target=variables.run, args=(run,), daemon=True).start()

    held.add_done_callback(start)
    return answer


def _run(
    target: Any,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outcome: _Held[Any],
) -> None:
    """Call the target, or its method if one is named, and settle the outcome once it is known."""
    try:
        function = getattr(target, method) if method else target
        result = function(*args, **kwargs)
        if is_async(function):
            expect_future(result, function)
            result.add_done_callback(lambda done: _run(done.value, "", (), {}, outcome))
            return
    except Exception as error:
        _settle(outcome, error=error)
        return
    _settle(outcome, result)


def _settle(outcome: _Held[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set what is known, unless there is something: a function may end after its timeout."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)


def _answer(outcome: _Held[Any]) -> Any:
    """Return the answer for the caller; an error as torch's RPC sends those of functions."""
    error = outcome.exception()
    if error is None:
        return outcome.result()
    name = current_endpoint().worker.name()
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    kind = next((kind for kind in (ValueError, TypeError) if isinstance(error, kind)), RuntimeError)
    return RemoteException(f"on worker '{name}':\n{lines}", kind)
