"""Calls between workers of one process that have no answer yet, and what ends them early."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class PendingCall(Generic[T]):
    """One call, from when it is made until its future has a value or an error.

    Args:
        label: What is called, for error messages.
        timeout: Seconds that it may take. 0: as long as it wants.
        caller: The id of the worker that called in a context; None outside of contexts.
    """

    def __init__(self, label: str, timeout: float, caller: int | None) -> None:
        self.label = label
        self.caller = caller
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout > 0 else None
        self.future: torch.futures.Future[T] = torch.futures.Future()
        # Callbacks run in the thread that ends the call, and must not see what is set there.
        self._variables = contextvars.copy_context()

    def succeed(self, value: T) -> None:
        """Give the future its value."""
        self._variables.run(self.future.set_result, value)

    def fail(self, error: BaseException) -> None:
        """Give the future its error."""
        if not isinstance(error, Exception):
            # SystemExit and the like would end the caller's thread, not the worker's.
            shown = RuntimeError(f"{self.label} ended with {type(error).__name__}: {error}")
            shown.__cause__ = error
            error = shown
        set_exception: Callable[[Exception], None] = self.future.set_exception  # type: ignore[assignment]
        self._variables.run(set_exception, error)


class PendingCalls:
    """The calls of a group of workers that have no answer yet. Each is ended once, by whoever comes
    first: its answer, its deadline, or the end of the group.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer may close the group wherever Python collects garbage.
        self._changed = threading.Condition(threading.RLock())
        self._calls: dict[int, PendingCall[Any]] = {}
        self._watcher: threading.Thread | None = None
        self._next_look: float | None = None
        self._closed: str | None = None

    def add(self, call: PendingCall[Any]) -> None:
        """Note a call.

        Raises:
            RuntimeError: The group was closed.
        """
        with self._changed:
            if self._closed is not None:
                raise RuntimeError(f"{call.label} cannot run: {self._closed}")
            self._calls[id(call)] = call
            if call.deadline is None:
                return
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="dataparallel-deadlines", daemon=True
                )
                self._watcher.start()
            if self._next_look is None or call.deadline < self._next_look:
                self._changed.notify()

    def count(self, caller: int) -> int:
        """How many calls of a worker in contexts are without an answer."""
        return sum(call.caller == caller for call in list(self._calls.values()))

    def waits(self, call: PendingCall[Any]) -> bool:
        """Whether a call is still without an answer."""
        return id(call) in self._calls

    def drop(self, call: PendingCall[Any]) -> None:
        """Forget a call that could not be made."""
        self._calls.pop(id(call), None)

    def succeed(self, call: PendingCall[T], value: T) -> None:
        """Give a call its answer, unless it was ended before."""
        if self._calls.pop(id(call), None) is not None:
            call.succeed(value)

    def fail(self, call: PendingCall[Any], error: BaseException) -> None:
        """End a call with an error, unless it was ended before."""
        if self._calls.pop(id(call), None) is not None:
            call.fail(error)

    def close(self, reason: str) -> None:
        """Fail all calls, and every later one."""
        with self._changed:
            self._closed = reason
            calls = list(self._calls.values())
            self._changed.notify()
        for call in calls:
            self.fail(call, RuntimeError(f"{call.label} has no answer: {reason}"))

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed is not None:
                    return
                overdue = self._overdue()
                if not overdue:
                    now = time.monotonic()
                    self._changed.wait(self._next_look and max(0.0, self._next_look - now))
            while overdue:
                call = overdue.pop()
                text = f"{call.label} did not end within {call.timeout:g} s"
                self.fail(call, TimeoutError(text))
                # This thread must not hold the last call and its answer while it waits.
                del call

    def _overdue(self) -> list[PendingCall[Any]]:
        """The calls whose time is over; also notes when to look again."""
        now = time.monotonic()
        limited = [call for call in list(self._calls.values()) if call.deadline is not None]
        self._next_look = min((call.deadline or now for call in limited), default=None)
        return [call for call in limited if (call.deadline or now) <= now]
