"""One backward through all workers."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from dataparallel.distributed_autograd.endpoint import (
    Endpoint,
    checked_timeout,
    current_endpoint,
    find_context,
)
from dataparallel.distributed_autograd.extension import Context, Pass, extension

#: Seconds between two looks at interrupts and the deadline.
_SLICE = 0.2
#: Seconds after which workers that have not finished are asked whether they are there.
_PATIENCE = 1.0


class WorkerError(RuntimeError):
    """A backward pass failed on another worker.

    Example::

        with context() as context_id:
            loss = rpc_sync("main", torch.mul, (w, x)).sum()
            try:
                backward(context_id, [loss])
            except WorkerError as error:
                print(f"{error.worker} failed")  # and str(error) has the traceback

    Args:
        message: What happened, with the traceback of the worker.
        worker: The name of the worker. Default: "", where the error itself came by RPC, which
            carries the message alone.

    Attributes:
        worker: The name of the worker.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    timeout: float | None = None,
) -> None:
    """Differentiate scalars with respect to all leaves of all workers that they were computed from.

    The gradients are those of ordinary autograd in one process. Each worker runs its own part on
    torch's engine, so streams, hooks and anomaly mode work as usual; calls that the roots do not
    depend on take no part, and nothing waits for them.

    Gradients are added to what the context has, and ``.grad`` is left alone; :func:`get_gradients`
    says what hooks of leaves see. After an error every worker can go on; what had been added to the
    gradients by then is still in them.

    Example::

        with context() as context_id:
            backward(context_id, [rpc_sync("main", torch.mul, (w, x)).sum()])
            gradient = get_gradients(context_id)[w]

    Args:
        context_id: What ``with context() as context_id:`` gave. Any worker that takes part in the
            context may call this.
        roots: Tensors of this worker, with one element each, that require grad and have a gradient
            function. The gradient of their sum is computed.
        retain_graph: Whether what the graph has saved is kept on all workers, for another backward
            in this context. Default: False.
        timeout: Seconds for the whole pass, on all workers; 0 for no limit. Default: None, the
            ``rpc_timeout`` that ``init_rpc`` was given, 60 s unless set.

    Raises:
        TypeError: ``roots`` is no list, or something else than tensors is in it.
        ValueError: There is no such context here, there are no roots, or a root has several
            elements, is complex, does not require grad or has no gradient function. Or ``timeout``
            is negative.
        WorkerError: The pass failed on another worker; the message has its name and traceback.
        TimeoutError: The pass did not end in time; the message names who did not finish.
        RuntimeError: A worker is lost, or the graph was freed by an earlier backward. Errors of
            Python code on this worker are raised as they are.
    """
    endpoint = current_endpoint()
    context = find_context(context_id)
    _check_roots(roots)
    given = checked_timeout(timeout)
    seconds = endpoint.default_timeout() if given is None else given
    live = _live_parts(endpoint, context, roots)
    _run(endpoint, context.start(list(roots), live, retain_graph, seconds), seconds)


def _run(endpoint: Endpoint, under_way: Pass, timeout: float) -> None:
    """Wait for a pass and raise what went wrong in it."""
    lost: dict[int, str] = {}
    try:
        _wait(endpoint, under_way, timeout, lost)
    except BaseException:
        under_way.fail("the caller of backward was interrupted")
        raise
    for worker, error in lost.items():
        raise _failure_of(endpoint.name_of(worker), f"it is lost: {error}")
    if (failed := under_way.failed_worker()) >= 0:
        raise _failure_of(endpoint.name_of(failed), under_way.describe_error())
    under_way.raise_error()


def _failure_of(worker: str, text: str) -> WorkerError:
    return WorkerError(f"backward failed on worker '{worker}': {text}", worker)


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    if isinstance(roots, torch.Tensor):
        raise TypeError("roots must be a list of tensors, not a tensor: write [loss]")
    if not isinstance(roots, Sequence) or isinstance(roots, str):
        raise TypeError(f"roots must be a list of tensors, not {type(roots).__name__}")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"root {index} must be a tensor, not {type(root).__name__}")
    if not roots:
        raise ValueError("no roots were given: backward needs at least one scalar tensor")
    for index, root in enumerate(roots):
        if not root.requires_grad:
            raise ValueError(f"root {index} does not require grad: nothing can be computed from it")
        if root.numel() != 1:
            raise ValueError(
                f"root {index} has the shape {tuple(root.shape)}: every root must have one "
                "element; take the sum or the mean first"
            )
        if root.is_complex():
            raise ValueError(
                f"root {index} is complex ({root.dtype}): every root must be real; take its real "
                "part or its absolute value first"
            )
        if root.grad_fn is None:
            raise ValueError(
                f"root {index} has no gradient function: it is a leaf, and nothing leads to it"
            )


def _live_parts(endpoint: Endpoint, context: Context, roots: Sequence[torch.Tensor]) -> list[int]:
    """The parts of messages that the roots were computed from; see Note [Live sends]."""
    start = context.reached_by(roots)
    live, unknown = context.close(start)
    while unknown:
        for part in unknown:
            sender = extension().maker(part)
            future = endpoint.call(sender, _origins, (context.id(), part), {}, None, None)
            origins = future.wait()
            context.learn([part, len(origins), *origins], sender)
        live, unknown = context.close(start)
    return live


def _origins(context_id: int, part: int) -> list[int]:
    return find_context(context_id).origins(part)


def _wait(endpoint: Endpoint, under_way: Pass, timeout: float, lost: dict[int, str]) -> None:
    """Wait for the pass; workers that are found to be gone are entered in ``lost``."""
    started = time.monotonic()
    asked = started
    while not under_way.wait(_SLICE):
        now = time.monotonic()
        if 0 < timeout < now - started:
            missing = _names_of_missing(endpoint, under_way)
            under_way.fail(f"not finished in time: {missing}")
            raise TimeoutError(
                f"backward did not end within {timeout:g} s; not finished: {missing}"
            )
        if now - asked > _PATIENCE:
            asked = now
            for worker in under_way.missing():
                if worker != endpoint.worker.id():
                    answer = functools.partial(_answered, under_way, lost, worker)
                    endpoint.worker.ping(worker, timeout, answer)


def _names_of_missing(endpoint: Endpoint, under_way: Pass) -> str:
    workers = under_way.missing()
    # This worker waits for the others, so it is to blame only where there are none.
    others = [worker for worker in workers if worker != endpoint.worker.id()]
    return ", ".join(f"'{endpoint.name_of(worker)}'" for worker in others or workers)


def _answered(under_way: Pass, lost: dict[int, str], worker: int, error: str) -> None:
    if error:
        lost[worker] = error
        under_way.fail("a worker is lost")
