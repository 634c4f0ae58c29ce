"""Values that stay on the worker that made them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch

from dataparallel.distributed_autograd.calls import rpc_async, rpc_sync
from dataparallel.distributed_autograd.endpoint import Endpoint, current_endpoint
from dataparallel.distributed_autograd.futures import chained, concurrent_future, throwing
from dataparallel.distributed_autograd.owner_calls import (
    fail,
    get,
    held,
    make,
    method,
    wait_settled,
)
from dataparallel.distributed_autograd.remote_value import Failure, Reference, thrown

T = TypeVar("T")


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
        value: What it shall refer to, of any type. Tensors keep their connection to the graph: in
            a context, gradients flow from where the value is used back to it.

    Raises:
        RuntimeError: This process is no worker: ``torch.distributed.rpc.init_rpc`` was not called.
    """

    def __init__(self, value: T) -> None:
        endpoint = current_endpoint()
        self._begin(endpoint.hold(endpoint.worker.id()))
        held(self._reference).fill(value)

    def _begin(self, reference: Reference) -> None:
        self._reference = reference
        # Done when the function that makes the value is, if it was called from here.
        self._made: concurrent.futures.Future[frozenset[str]] | None = None
        self._async_methods: frozenset[str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return around, (self._reference,)

    def __repr__(self) -> str:
        return f"RRef(owner={self.owner_name()!r})"

    def owner(self) -> Any:
        """The worker that owns the value.

        Example::

            rref = RRef(torch.ones(3))
            twice = rpc_sync(rref.owner(), torch.mul, (torch.ones(3), 2))

        Returns:
            Its name and id, as torch's ``WorkerInfo``, which calls accept as their worker.
        """
        return self._reference.owner()

    def owner_name(self) -> str:
        """The name of the worker that owns the value.

        Example::

            print(RRef(torch.ones(3)).owner_name())

        Returns:
            The name, as it was given to ``init_rpc``.
        """
        return str(self.owner().name)

    def is_owner(self) -> bool:
        """Whether this worker owns the value.

        Example::

            assert RRef(torch.ones(3)).is_owner()

        Returns:
            True on the worker whose name is ``owner_name()``.
        """
        return self._reference.is_owner()

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference.

        Until it does, the worker that this reference came from keeps the value alive.

        Example::

            assert RRef(torch.ones(3)).confirmed_by_owner()

        Returns:
            Always True on the owner.
        """
        return self._reference.confirmed_by_owner()

    def local_value(self, timeout: float | None = None) -> T:
        """The value itself, on the worker that owns it.

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
        self._settle(_Deadline(timeout))
        return cast(T, thrown(held(self._reference).get()))

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
            TimeoutError: The function that makes the value has not ended in time.
            Exception: That function raised this on the owner; the text has its traceback.
        """
        if self.is_owner():
            return self.local_value(timeout)
        deadline = _Deadline(timeout)
        self._settle(deadline)
        found = rpc_sync(self.owner(), get, (self._reference,), None, deadline.left())
        return cast(T, thrown(found))

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
        return _Methods(self._call_sync, timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """Call methods of the value on its owner without waiting.

        Example::

            layer = RRef(torch.nn.Linear(4, 3))
            futures = [layer.rpc_async().forward(torch.ones(n, 4)) for n in (1, 2)]
            outputs = torch.futures.wait_all(futures)

        Args:
            timeout: Seconds that a call may take. 0: no limit. Default: the ``rpc_timeout`` of
                ``init_rpc``.

        Returns:
            An object whose methods are those of the value, and return ``torch.futures.Future``. In
            a context their calls are recorded.
        """
        return _Methods(self._call_async, timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """Call methods of the value on its owner, and leave the results there.

        Example::

            layer = RRef(torch.nn.Linear(4, 3))
            hidden = layer.remote().forward(torch.ones(2, 4))
            total = hidden.rpc_sync().sum()

        Args:
            timeout: Seconds that a call may take. 0: no limit. Default: the ``rpc_timeout`` of
                ``init_rpc``.

        Returns:
            An object whose methods are those of the value, and return ``RRef``. In a context their
            calls are recorded. A call waits until the value itself has been made.
        """
        return _Methods(self._call_remote, timeout)

    def _settling(self, left: float) -> concurrent.futures.Future[frozenset[str]]:
        """Done when the value is there or has failed; its result are the async methods."""
        if self._made is not None:
            return self._made
        if self.is_owner():
            return held(self._reference).settled
        endpoint = current_endpoint()
        # The wait ends first: that says what was waited for.
        seconds = left + 1 if left else 0.0
        args = (self._reference,)
        to = endpoint.resolve(self.owner())
        return concurrent_future(endpoint.call(to, wait_settled, args, {}, seconds, None))

    def _settle(self, deadline: _Deadline) -> frozenset[str]:
        if self._async_methods is None:
            settling = self._settling(deadline.left())
            concurrent.futures.wait([settling], deadline.left() or None)
            if not settling.done():
                raise TimeoutError(
                    f"the value on worker '{self.owner_name()}' is not there after "
                    f"{deadline.seconds:g} s: the function that makes it has not ended"
                )
            self._async_methods = settling.result()
        return self._async_methods

    def _call_sync(self, name: str, call: tuple[Any, ...], timeout: float | None) -> Any:
        deadline = _Deadline(timeout)
        function = method(name, self._settle(deadline))
        args = (name, *call, self._reference)
        return thrown(rpc_sync(self.owner(), function, args, None, deadline.left()))

    def _call_remote(self, name: str, call: tuple[Any, ...], timeout: float | None) -> RRef[Any]:
        deadline = _Deadline(timeout)
        function = method(name, self._settle(deadline))
        args = (name, *call, self._reference)
        return remote(self.owner(), function, args, None, deadline.left())

    def _call_async(
        self, name: str, call: tuple[Any, ...], timeout: float | None
    ) -> torch.futures.Future[Any]:
        deadline = _Deadline(timeout)
        args = (name, *call, self._reference)

        def start(names: frozenset[str]) -> torch.futures.Future[Any]:
            return throwing(
                rpc_async(self.owner(), method(name, names), args, None, deadline.left())
            )

        if self._async_methods is None:
            settling = self._settling(deadline.left())
            if not settling.done():
                return chained(settling, start)
            self._async_methods = settling.result()
        return start(self._async_methods)


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
        func: The function, one that can be pickled. If it is decorated with
            ``torch.distributed.rpc.functions.async_execution``, the value is what its future gets.
        args: Its arguments, with tensors and references anywhere in them. Default: none.
        kwargs: Its arguments by name. Default: none.
        timeout: Seconds that the function may take; later the reference has an error in place of
            a value. 0: no limit. Default: the ``rpc_timeout`` of ``init_rpc``.

    Returns:
        A reference to the result, at once. An error of the function is raised where the result is
        used.

    Raises:
        ValueError: There is no such worker.
        RuntimeError: This process is no worker: ``torch.distributed.rpc.init_rpc`` was not called.
    """
    if not callable(func):
        raise TypeError(f"func must be a function, not {type(func).__name__}")
    endpoint = current_endpoint()
    reference = endpoint.hold(endpoint.resolve(to))
    call = (func, tuple(args or ()), dict(kwargs or {}), reference)
    result: RRef[Any] = around(reference)
    result._made = concurrent_future(rpc_async(to, make, call, None, timeout))
    result._made.add_done_callback(functools.partial(_tell_owner, endpoint, reference))
    return result


def around(reference: Reference) -> RRef[Any]:
    """An ``RRef`` of this package around what refers to a value, or around torch's ``RRef``."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._begin(reference)
    return rref


def _tell_owner(
    endpoint: Endpoint,
    reference: Reference,
    made: concurrent.futures.Future[frozenset[str]],
) -> None:
    """The call itself failed, or ran out of time: whoever waits for the value has to know."""
    error = made.exception()
    if error is not None:
        failure = Failure.of(error, endpoint.worker.name())
        # If the owner is lost, whoever waits for it learns that by itself.
        with contextlib.suppress(Exception):
            endpoint.call(reference.owner().id, fail, (failure, reference), {}, None, None)


class _Methods:
    """Has every method that the value of a reference may have."""

    def __init__(self, call: Callable[..., Any], timeout: float | None) -> None:
        self.__call = call
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call, timeout = self.__call, self.__timeout
        return lambda *args, **kwargs: call(name, (args, kwargs), timeout)


class _Deadline:
    """When the seconds that were given are over."""

    def __init__(self, timeout: float | None) -> None:
        self.seconds = current_endpoint().default_timeout() if timeout is None else timeout
        if self.seconds < 0:
            raise ValueError(f"timeout is {timeout} s: it must be positive, or 0 for no limit")
        self._end = time.monotonic() + self.seconds if self.seconds else None

    def left(self) -> float:
        """The seconds from now on, 0 if there is no limit."""
        return max(self._end - time.monotonic(), 1e-3) if self._end is not None else 0.0
