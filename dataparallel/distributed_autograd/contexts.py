"""The block whose remote calls one backward can run through, and that backward."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from dataparallel.distributed_autograd.calls import (
    Endpoint,
    checked_timeout,
    current_context,
    current_endpoint,
    in_context,
)
from dataparallel.distributed_autograd.extension import Context, Pass, extension, loaded
from dataparallel.graph.originals import IN_GRAD, BackwardPasses, GradientHome, use_passes

#: Seconds between two looks at interrupts and the deadline.
_SLICE = 0.2
#: Seconds after which workers that have not finished are asked whether they are there.
_PATIENCE = 1.0


class context:
    """The block whose calls one backward can run through.

    The context records everything that happens between the workers in the block, by
    :func:`rpc_sync`, :func:`rpc_async` and :func:`remote`. It does so for this thread and for the
    functions that it calls on other workers. Each worker that takes part has its share of the
    context, with the gradients of its own parameters.

    When the block is left, also by an error, the context ends on all workers. It frees gradients
    and records, and a backward pass that still runs in it fails. Workers other than this one are
    told by a message that is not waited for. The context's id is of no use afterwards.

    Blocks do not nest, and a function that runs for a call inside of a context cannot open another.
    Any number of threads may be in blocks of their own at the same time.

    Example::

        with context() as context_id:
            loss = rpc_sync("main", torch.mul, (w, x)).sum()
            backward(context_id, [loss])
            gradient = get_gradients(context_id)[w]

    Returns:
        On entry the id of the context, a number that no other context of any worker has. It may be
        sent to other workers and used there.

    Raises:
        RuntimeError: This code runs on no worker, or in a context already.
    """

    def __enter__(self) -> int:
        if (outer := current_context()) is not None:
            raise RuntimeError(
                f"this code already runs in the distributed autograd context {outer.id()}: "
                "contexts do not nest; leave that block first"
            )
        self._worker = current_endpoint().worker
        made = self._worker.new_context()
        self._id = made.id()
        # Asked for now: the RPC may be shut down before the block is left.
        self._timeout = checked_timeout(None)
        self._entered = in_context(made)
        self._entered.__enter__()
        return self._id

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.__exit__(None, None, None)
        self._worker.release(self._id, self._timeout)


def find_context(context_id: int) -> Context:
    """Return the context with this id on this worker, or a ValueError."""
    worker = current_endpoint().worker
    found = worker.find(context_id)
    if found is None:
        raise ValueError(
            f"worker '{worker.name()}' has no distributed autograd context {context_id}: use the "
            "id of a `with context() as context_id:` block that has not ended, on a worker that "
            "takes part in it"
        )
    return found


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that this worker has in a context.

    Backward adds to them and leaves ``.grad`` alone. Only leaves of this worker are here; ask each
    worker for its own with ``rpc_sync(worker, get_gradients, (context_id,))``. A leaf's
    ``register_hook`` hooks change the gradient before it is added.

    Example::

        with context() as context_id:
            backward(context_id, [rpc_sync("main", torch.mul, (w, x)).sum()])
            for leaf, gradient in get_gradients(context_id).items():
                leaf.data -= 0.1 * gradient

    Args:
        context_id: The id from ``with context() as context_id:``, here or on another worker.

    Returns:
        Each leaf, as the same object that the model has, with its gradient. That is no copy. It has
        the shape and the device of the leaf, and is sparse if backward made it so. It is ready on
        the streams that are current here. Leaves that no backward reached are missing.

    Raises:
        ValueError: This worker has no such context, or it has ended.
        RuntimeError: This code runs on no worker.
    """
    return dict(find_context(context_id).gradients())


def debug_info() -> dict[str, int]:
    """Return the counts of distributed autograd's work under way on this worker.

    Example::

        assert debug_info()["num_autograd_contexts"] == 0

    Returns:
        By torch's names ``num_current_backward_passes`` and ``num_autograd_contexts``, each 0 when
        nothing is left.

    Raises:
        RuntimeError: This code runs on no worker.
    """
    return current_endpoint().worker.debug_info()


# --- backward ------------------------------------------------------------------------------------


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
        message: The error, with the traceback of the worker.
        worker: The name of the worker. Default: "", if the error itself came by RPC, which
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
    torch's engine, so streams, hooks and anomaly mode work as usual. Calls that the roots do not
    depend on take no part, and nothing waits for them.

    Gradients are added to what the context has, and ``.grad`` is left alone. So a leaf may not have
    hooks from ``register_post_accumulate_grad_hook``, which read it. After an error every worker
    can go on; what had been added to the gradients by then is still in them.

    Example::

        with context() as context_id:
            backward(context_id, [rpc_sync("main", torch.mul, (w, x)).sum()])
            gradient = get_gradients(context_id)[w]

    Args:
        context_id: The id from ``with context() as context_id:``. Any worker that takes part in the
            context may call this.
        roots: Tensors of this worker, with one element each, that require grad and have a gradient
            function. The gradient of their sum is computed.
        retain_graph: True to keep the saved tensors of the graph on all workers, for another
            backward in this context. Default: False.
        timeout: Seconds for the whole pass, on all workers; 0 for no limit. Default: None, the
            ``rpc_timeout`` that ``init_rpc`` was given, 60 s unless set.

    Raises:
        TypeError: ``roots`` is no list, or something else than tensors is in it.
        ValueError: There is no such context here, or there are no roots. Or a root has several
            elements, is complex, does not require grad or has no gradient function. Or ``timeout``
            is negative.
        WorkerError: The pass failed on another worker; the message has its name and traceback.
        TimeoutError: The pass did not end in time; the message names the workers that did not
            finish.
        RuntimeError: A worker is lost, the graph was freed by an earlier backward, or a leaf has
            hooks that read ``.grad``. Errors of Python code on this worker are raised as they are.
    """
    endpoint = current_endpoint()
    found = find_context(context_id)
    _check_roots(roots)
    seconds = checked_timeout(timeout)
    live = _live_parts(endpoint, found, roots)
    under_way = found.start(list(roots), live, retain_graph, seconds)
    lost: dict[int, str] = {}
    try:
        _wait(endpoint, under_way, seconds, lost)
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
    if isinstance(roots, torch.Tensor) or not isinstance(roots, Sequence):
        raise TypeError(f"roots must be a list of tensors, not {type(roots).__name__}: [loss]")
    if not roots:
        raise ValueError("no roots were given: backward needs at least one scalar tensor")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"root {index} must be a tensor, not {type(root).__name__}")
        if not root.requires_grad:
            raise ValueError(f"root {index} does not require grad: nothing can be computed from it")
        if root.numel() != 1 or root.is_complex():
            raise ValueError(
                f"root {index} has the shape {tuple(root.shape)} and is {root.dtype}: every root "
                "must have one element, a real one; take the sum or the mean first"
            )
        if root.grad_fn is None:
            raise ValueError(
                f"root {index} has no gradient function: it is a leaf, and nothing leads to it"
            )


def _live_parts(endpoint: Endpoint, found: Context, roots: Sequence[torch.Tensor]) -> list[int]:
    """Return the parts of messages that the roots were computed from; see Note [Live sends]."""
    start = found.reached_by(roots)
    live, unknown = found.close(start)
    while unknown:
        for part in unknown:
            sender = extension().maker(part)
            origins = endpoint.call(sender, _origins, (found.id(), part)).wait()
            found.learn([part, len(origins), *origins], sender)
        live, unknown = found.close(start)
    return live


def _origins(context_id: int, part: int) -> list[int]:
    return find_context(context_id).origins(part)


def _wait(endpoint: Endpoint, under_way: Pass, timeout: float, lost: dict[int, str]) -> None:
    """Wait for the pass; workers that are found to be gone are entered in ``lost``."""
    asked = started = time.monotonic()
    while not under_way.wait(_SLICE):
        now = time.monotonic()
        # This worker waits for the others, so it is to blame only if there are none.
        others = [each for each in under_way.missing() if each != endpoint.worker.id()]
        if 0 < timeout < now - started:
            names = map(endpoint.name_of, others or [endpoint.worker.id()])
            missing = ", ".join(f"'{name}'" for name in names)
            under_way.fail(f"not finished in time: {missing}")
            raise TimeoutError(
                f"backward did not end within {timeout:g} s; not finished: {missing}"
            )
        if now - asked > _PATIENCE:
            asked = now
            for worker in others:
                answer = endpoint.call(worker, int, timeout=timeout)
                answer.add_done_callback(functools.partial(_answered, under_way, lost, worker))


def _answered(
    under_way: Pass, lost: dict[int, str], worker: int, answer: torch.futures.Future[int]
) -> None:
    try:
        answer.value()
    except RuntimeError as error:
        lost[worker] = str(error)
        under_way.fail("a worker is lost")


# --- wrappers that reduce gradients in a context --------------------------------------------------


class _ContextHome(GradientHome):
    """Gradients that are in a context."""

    def __init__(self, found: Context) -> None:
        self._context = found
        self.context_id = found.id()

    def read(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, None if there is none."""
        return [self._context.gradient(parameter) for parameter in parameters]

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set the gradient of a parameter, or say that the tensor it is was written to."""
        self._context.set_gradient(parameter, gradient)


class _ContextPasses(BackwardPasses):
    """The answers to the wrappers' questions about passes. See Note [Gradients in a context]."""

    def home(self) -> GradientHome:
        """Return the place in which the backward of this thread leaves gradients."""
        native = loaded()
        under_way = None if native is None else native.current_pass()
        return IN_GRAD if under_way is None else _ContextHome(under_way.context())

    def reach_other_workers(self, outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """True if outputs were computed from what other workers have sent in this context."""
        found = current_context()
        flat = [tensor for replica in outputs for tensor in replica]
        return found is not None and bool(found.reached_by(flat))


use_passes(_ContextPasses())
