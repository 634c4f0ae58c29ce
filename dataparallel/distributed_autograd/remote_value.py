"""A value that a worker keeps for others, and how an error is told to them."""

from __future__ import annotations

import concurrent.futures
import pickle
import threading
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import torch

from dataparallel import torch_internals


@dataclass(frozen=True)
class Failure:
    """An error as it can be sent: exceptions themselves are often no more picklable.

    Args:
        kind: Its type.
        text: Its message, with the worker and the traceback.
    """

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: BaseException, worker: str) -> Failure:
        """Describe an error that was caught on a worker."""
        kind = type(error)
        try:
            pickle.dumps(kind)
        except Exception:
            kind = RuntimeError
        if not issubclass(kind, Exception):
            # The caller must not exit because another worker was told to.
            kind = RuntimeError
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
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
    """A value that may not be there yet.

    ``settled`` is done when the value or an error is there. Its result are the names of those
    methods of the value that return a future, see ``torch.distributed.rpc.functions``.
    """

    def __init__(self) -> None:
        self.settled: concurrent.futures.Future[frozenset[str]] = concurrent.futures.Future()
        self._value: Any = None
        self._failure: Failure | None = None
        # Two may come at once: the end of the function and its timeout.
        self._lock = threading.Lock()
        self._taken = False

    def fill(self, value: Any) -> None:
        """Set the value, unless this has one or has failed. A ``Failure`` is an error."""
        if isinstance(value, Failure):
            self.fail(value)
            return
        names = async_methods(value)
        if self._take(value, None):
            self.settled.set_result(names)

    def fail(self, failure: Failure) -> None:
        """Set the error, unless this has a value or has failed."""
        if self._take(None, failure):
            self.settled.set_result(frozenset())

    def get(self) -> Any:
        """The value, or the error as a ``Failure``; one of them is there."""
        return self._value if self._failure is None else self._failure

    def _take(self, value: Any, failure: Failure | None) -> bool:
        with self._lock:
            if self._taken:
                return False
            self._taken = True
            self._value, self._failure = value, failure
            return True


def is_async(function: Any) -> bool:
    """Whether a function returns a future of its result."""
    return hasattr(function, torch_internals.ASYNC_MARK)


def expect_future(result: Any, name: str) -> torch.futures.Future[Any]:
    """What a function that is marked so has returned.

    Raises:
        TypeError: It is no future.
    """
    # What `then` returns is not of the class in Python.
    if not isinstance(result, torch_internals.Future):
        raise TypeError(
            f"{name} is marked with async_execution, so it must return a torch.futures.Future, but "
            f"it returned {result!r} of type {type(result).__name__}"
        )
    return cast("torch.futures.Future[Any]", result)


def async_methods(value: Any) -> frozenset[str]:
    """The methods that return a future of their result."""
    if isinstance(value, torch.Tensor | torch.jit.ScriptModule):
        return frozenset()
    kind = type(value)
    return frozenset(name for name in dir(kind) if is_async(getattr(kind, name, None)))


class Reference(Protocol):
    """What names a value on another worker in arguments, and keeps it alive: torch's ``RRef``,
    or a ``LocalReference``."""

    def owner(self) -> Any: ...
    def is_owner(self) -> bool: ...
    def confirmed_by_owner(self) -> bool: ...
    def local_value(self) -> Any: ...
