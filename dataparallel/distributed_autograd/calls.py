"""Functions that run on other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dataparallel.distributed_autograd.endpoint import (
    checked_timeout,
    current_context,
    current_endpoint,
)


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
    in the result, in containers and objects too; each keeps its connection to the graph across the
    border, in both directions. A tensor that is sent twice in one call arrives as one. An
    ``nn.Parameter`` arrives as a tensor that is connected to it; gradients reach the parameter.
    Under ``torch.no_grad()``, here for arguments and there for the result, nothing is recorded.

    Outside of a block it is ``torch.distributed.rpc.rpc_async``.

    The block belongs to the thread that entered it, and to what that awaits: a thread started
    inside of it makes calls outside of the context.

    What is sent is pickled, and unpickling can run any code: all workers have to trust each other
    and the network between them.

    Example::

        with context() as context_id:
            halves = [rpc_async("main", torch.mul, (w, x)) for x in (x0, x1)]
            loss = sum(half.wait().sum() for half in halves)
            backward(context_id, [loss])

    Args:
        to: The worker: its name, its id, or torch's ``WorkerInfo``. It may be the caller itself.
        func: What runs there: something that can be pickled, as a function of a module or a
            method of an object that can be sent. A function that is marked with
            ``torch.distributed.rpc.functions.async_execution`` may return a future.
        args: Its positional arguments. Default: none.
        kwargs: Its keyword arguments. Default: none.
        timeout: Seconds until the call fails; 0 for no limit. Default: None, the ``rpc_timeout``
            that ``init_rpc`` was given, 60 s unless set.

    Returns:
        A future. Its ``wait()`` returns the result, or raises the function's error. If the context
        has ended by then, the result has no connection to the graph.

    Raises:
        RuntimeError: This code runs on no worker.
        TypeError: ``func`` cannot be called, or ``timeout`` is no number.
        ValueError: There is no worker ``to``, or ``timeout`` is negative.
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    seconds = checked_timeout(timeout)
    context = current_context()
    if context is not None and context.released():
        context = None
    endpoint = current_endpoint()
    return endpoint.call(endpoint.resolve(to), func, args or (), kwargs or {}, seconds, context)


def rpc_sync(
    to: Any,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a function on another worker and wait for its result.

    The same as ``rpc_async(...).wait()``; :func:`rpc_async` says what is recorded.

    Example::

        with context() as context_id:
            loss = rpc_sync("main", torch.mul, (w, x)).sum()
            backward(context_id, [loss])

    Args:
        to: The worker: its name, its id, or torch's ``WorkerInfo``. It may be the caller itself.
        func: What runs there.
        args: Its positional arguments. Default: none.
        kwargs: Its keyword arguments. Default: none.
        timeout: Seconds until the call fails; 0 for no limit. Default: None, the ``rpc_timeout``
            that ``init_rpc`` was given, 60 s unless set.

    Returns:
        What the function returned; its tensors are connected to those of the other worker.

    Raises:
        RuntimeError: This code runs on no worker, or the call did not end in time.
        ValueError: There is no worker ``to``.
        Exception: The error of the function. Its text has the traceback, and types other than
            ValueError and TypeError become RuntimeError, as with torch's RPC.
    """
    return rpc_async(to, func, args, kwargs, timeout).wait()
