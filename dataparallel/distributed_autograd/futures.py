"""Futures of torch's calls, turned into others."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dataparallel import torch_internals
from dataparallel.devices import accelerators
from dataparallel.distributed_autograd.remote_value import thrown

T = TypeVar("T")


def concurrent_future(future: torch.futures.Future[T]) -> concurrent.futures.Future[T]:
    """The same result in a future whose wait has a timeout."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.add_done_callback(functools.partial(_pass_on, result))
    return result


def throwing(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """The same result in a future that raises it if it is a ``Failure``."""
    result = future.then(lambda done: done.value())
    torch_internals.open_with(result, thrown)
    return result


def chained(
    first: concurrent.futures.Future[T],
    then: Callable[[T], torch.futures.Future[Any]],
) -> torch.futures.Future[Any]:
    """The result of a call that starts when something else is done."""
    # Its result may have tensors on any of them.
    devices = [str(device) for device in accelerators()]
    result: torch.futures.Future[Any] = torch.futures.Future(devices=[*devices])
    run = contextvars.copy_context().run

    def start(done: concurrent.futures.Future[T]) -> None:
        try:
            run(then, done.result()).add_done_callback(functools.partial(_pass_on, result))
        except Exception as error:
            result.set_exception(error)

    first.add_done_callback(start)
    return result


def _pass_on(
    result: concurrent.futures.Future[Any] | torch.futures.Future[Any],
    done: torch.futures.Future[Any],
) -> None:
    try:
        result.set_result(done.value())
    except Exception as error:
        result.set_exception(error)
