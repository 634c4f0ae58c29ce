"""What other workers call on the owner of a value.

References come last in the arguments: torch counts a reference as sent when it is pickled, so what
cannot be pickled has to fail before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd.endpoint import current_endpoint
from dataparallel.distributed_autograd.remote_value import (
    Failure,
    Reference,
    RemoteValue,
    expect_future,
    is_async,
)

_Names = frozenset[str]


def held(reference: Reference) -> RemoteValue:
    """The value that a reference refers to, on its owner."""
    value = reference.local_value()
    if isinstance(value, RemoteValue):
        return value
    # Made with torch's own RRef, which waits until it is there.
    wrapped = RemoteValue()
    wrapped.fill(value)
    return wrapped


def get(reference: Reference) -> Any:
    """The value, or the ``Failure`` to make it; one of them is there."""
    # torch's RPC itself keeps the types of few errors, so they are sent as results.
    try:
        return held(reference).get()
    except Exception as error:
        return Failure.of(error, current_endpoint().worker.name())


def fail(failure: Failure, reference: Reference) -> None:
    """Note that nothing will make the value."""
    held(reference).fail(failure)


@async_execution  # type: ignore[untyped-decorator]
def make(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reference: Reference,
) -> torch.futures.Future[_Names]:
    """Run a function and keep its result, or its error, as the value."""
    value = held(reference)
    worker = current_endpoint().worker.name()

    def keep(future: torch.futures.Future[Any]) -> None:
        try:
            value.fill(future.value())
        except BaseException as error:
            value.fail(Failure.of(error, worker))

    try:
        result = function(*args, **kwargs)
        if is_async(function):
            expect_future(result, function.__qualname__).add_done_callback(keep)
        else:
            value.fill(result)
    except BaseException as error:
        value.fail(Failure.of(error, worker))
    return _settled(value)


@async_execution  # type: ignore[untyped-decorator]
def wait_settled(reference: Reference) -> torch.futures.Future[_Names]:
    """Wait, without a thread, until the value is there or has failed."""
    return _settled(held(reference))


def _settled(value: RemoteValue) -> torch.futures.Future[_Names]:
    future: torch.futures.Future[_Names] = torch.futures.Future()
    value.settled.add_done_callback(lambda done: future.set_result(done.result()))
    return future


def method(name: str, async_methods: _Names) -> Callable[..., Any]:
    """The function that calls a method of a value; its arguments are those of ``_invoke``."""
    return _invoke_async if name in async_methods else _invoke


def _invoke(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], reference: Reference) -> Any:
    worker = current_endpoint().worker.name()
    value = get(reference)
    if isinstance(value, Failure):
        return value
    try:
        return getattr(value, name)(*args, **kwargs)
    except Exception as error:
        return Failure.of(error, worker)


@async_execution  # type: ignore[untyped-decorator]
def _invoke_async(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], reference: Reference
) -> torch.futures.Future[Any]:
    worker = current_endpoint().worker.name()
    result = _invoke(name, args, kwargs, reference)

    def described(done: torch.futures.Future[Any]) -> Any:
        try:
            return done.value()
        except Exception as error:
            return Failure.of(error, worker)

    try:
        return expect_future(result, name).then(described)
    except TypeError as error:
        failed: torch.futures.Future[Any] = torch.futures.Future()
        failed.set_result(result if isinstance(result, Failure) else Failure.of(error, worker))
        return failed
