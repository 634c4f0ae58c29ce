"""Values that stay on the worker that made them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed.rpc as torch_rpc

from dataparallel import torch_internals
from dataparallel.distributed_autograd.calls import rpc_async, rpc_sync
from dataparallel.distributed_autograd.endpoint import (
    Endpoint,
    checked_timeout,
    current_endpoint,
)
from dataparallel.distributed_autograd.remote_value import (
    Failure,
    RemoteValue,
    fail,
    held,
    invoke,
    make,
    thrown,
)

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
        self._refer_to(_hold(current_endpoint().worker.id()))
        held(self._reference).fill(value)

    def _refer_to(self, reference: Any) -> None:
        self._reference = reference

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
        return bool(self._reference.is_owner())

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference.

        Until it does, the worker that this reference came from keeps the value alive.

        Example::

            assert RRef(torch.ones(3)).confirmed_by_owner()

        Returns:
            Always True on the owner.
        """
        return bool(self._reference.confirmed_by_owner())

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
        given = checked_timeout(timeout)
        seconds = current_endpoint().default_timeout() if given is None else given
        settled = held(self._reference).settled
        concurrent.futures.wait([settled], seconds or None)
        if not settled.done():
            raise TimeoutError(
                f"the value on worker '{self.owner_name()}' is not there after {seconds:g} s: the "
                "function that makes it has not ended"
            )
        return cast(T, thrown(settled.result()))

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
            Exception: That function raised this on the owner; the text has its traceback.
        """
        if self.is_owner():
            return self.local_value(timeout)
        call: tuple[Any, ...] = ("", (), {}, self._reference)
        return cast(T, thrown(rpc_sync(self.owner(), invoke, call, None, timeout)))

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
        return _Methods(functools.partial(_call_sync, self._reference, timeout))

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
        return _Methods(functools.partial(_call_async, self._reference, timeout))

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
            calls are recorded.
        """
        return _Methods(functools.partial(_call_remote, self._reference, timeout))


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
    reference = _hold(endpoint.resolve(to))
    call = (func, tuple(args or ()), dict(kwargs or {}), reference)
    made = rpc_async(to, make, call, None, timeout)
    made.add_done_callback(functools.partial(_tell_owner, endpoint, reference))
    return around(reference)


def around(reference: Any) -> RRef[Any]:
    """An ``RRef`` of this package around one of torch's."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._refer_to(reference)
    return rref


def _hold(to: int) -> Any:
    """Make an empty ``RemoteValue`` on a worker; torch's ``RRef`` names it and keeps it alive."""
    endpoint = current_endpoint()
    if to == endpoint.worker.id():
        return torch_rpc.RRef(RemoteValue())
    # A worker of a trusted network, see docs/security.md.
    return torch_rpc.remote(endpoint.agent.get_worker_info(to), RemoteValue)


def _tell_owner(endpoint: Endpoint, reference: Any, made: torch.futures.Future[None]) -> None:
    """The call itself failed, or ran out of time: whoever waits for the value has to know."""
    try:
        made.value()
    except Exception as error:
        failure = Failure.of(error)
        # If the owner is lost, whoever waits for it learns that by itself.
        with contextlib.suppress(Exception):
            endpoint.call(reference.owner().id, fail, (failure, reference), {}, None, None)


def _call_sync(reference: Any, timeout: float | None, name: str, *args: Any, **kwargs: Any) -> Any:
    call = (name, args, kwargs, reference)
    return thrown(rpc_sync(reference.owner(), invoke, call, None, timeout))


def _call_async(
    reference: Any, timeout: float | None, name: str, *args: Any, **kwargs: Any
) -> torch.futures.Future[Any]:
    call = (name, args, kwargs, reference)
    answer = rpc_async(reference.owner(), invoke, call, None, timeout)
    result = answer.then(lambda done: done.value())
    torch_internals.open_with(result, thrown)
    return result


def _call_remote(
    reference: Any, timeout: float | None, name: str, *args: Any, **kwargs: Any
) -> RRef[Any]:
    return remote(reference.owner(), invoke, (name, args, kwargs, reference), None, timeout)


class _Methods:
    """Has every method that the value of a reference may have."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.__call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.__call, name)
