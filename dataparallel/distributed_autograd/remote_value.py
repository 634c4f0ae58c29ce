"""A value that a worker keeps for others, and what they call on its owner.

In each call the reference comes last: torch counts a reference as sent when it is pickled, so what
cannot be pickled has to fail before.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.rpc.functions import async_execution

from dataparallel.distributed_autograd.endpoint import current_endpoint, expect_future, is_async


@dataclass(frozen=True)
class Failure:
    """An error as it can be sent: exceptions themselves are often no more picklable.

    torch's RPC itself keeps the types of few errors, so those of values are sent as results.
    """

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error that was caught on this worker."""
        kind = type(error)
        try:
            pickle.dumps(kind)
        except Exception:
            kind = RuntimeError
        if not issubclass(kind, Exception):
            # The caller must not exit because another worker was told to.
            kind = RuntimeError
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        worker = current_endpoint().worker.name()
        return cls(kind, f"{error}\n\nOn worker '{worker}':\n{lines}")

    def throw(self) -> NoReturn:
        """Raise it here."""
        try:
            error = self.kind(self.text)
        except Exception:
            error = RuntimeError(f"{self.kind.__name__}: {self.text}")
        raise error


def thrown(value: Any) -> Any:
    """A result, unless it is a ``Failure``: that is raised."""
    if isinstance(value, Failure):
        value.throw()
    return value


class RemoteValue:
    """A value that may not be there yet; an error in its place is a ``Failure``."""

    def __init__(self) -> None:
        self.settled: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def fill(self, value: Any) -> None:
        """Set the value, unless there is one: the function may end after its timeout."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.settled.set_result(value)


def held(reference: Any) -> RemoteValue:
    """The value that a reference refers to, on its owner."""
    value = reference.local_value()
    if isinstance(value, RemoteValue):
        return value
    # Made with torch's own RRef, which waits until it is there.
    wrapped = RemoteValue()
    wrapped.fill(value)
    return wrapped


@async_execution  # type: ignore[untyped-decorator]
def make(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reference: Any,
) -> torch.futures.Future[None]:
    """Run a function and keep its result, or its error, as the value."""
    value = held(reference)
    return _run(function, args, kwargs).then(lambda done: value.fill(done.value()))


def fail(failure: Failure, reference: Any) -> None:
    """Note that nothing will make the value."""
    held(reference).fill(failure)


@async_execution  # type: ignore[untyped-decorator]
def invoke(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], reference: Any
) -> torch.futures.Future[Any]:
    """Call a method of the value, or return the value for an empty name, once it is there."""
    try:
        settled = held(reference).settled
    except Exception as error:
        return _done(Failure.of(error))
    if settled.done():
        return _call(settled.result(), name, args, kwargs)
    result: torch.futures.Future[Any] = torch.futures.Future()
    variables = contextvars.copy_context()

    def call() -> None:
        called = _call(settled.result(), name, args, kwargs)
        called.add_done_callback(lambda done: result.set_result(done.value()))

    def start(_: object) -> None:
        # In threads of their own, since one method may wait for what another one does.
        threading.Thread(target=variables.run, args=(call,), daemon=True).start()

    settled.add_done_callback(start)
    return result


def _call(
    value: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.futures.Future[Any]:
    if isinstance(value, Failure) or not name:
        return _done(value)
    try:
        method = getattr(value, name)
    except Exception as error:
        return _done(Failure.of(error))
    return _run(method, args, kwargs)


def _run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.futures.Future[Any]:
    """Call a function; the future gets its result, or its error as a ``Failure``."""
    try:
        result = function(*args, **kwargs)
        if is_async(function):
            name = getattr(function, "__qualname__", repr(function))
            return expect_future(result, name).then(_described)
    except BaseException as error:
        return _done(Failure.of(error))
    return _done(result)


def _described(done: torch.futures.Future[Any]) -> Any:
    try:
        return done.value()
    except Exception as error:
        return Failure.of(error)


def _done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future
