"""The block whose remote calls one backward can run through."""

from __future__ import annotations

from types import TracebackType

import torch

from dataparallel.distributed_autograd.endpoint import (
    current_context,
    current_endpoint,
    find_context,
    in_context,
)


class context:
    """The block whose calls one backward can run through.

    Everything between the workers that happens in the block is recorded in the context: by
    :func:`rpc_sync`, :func:`rpc_async` and :func:`remote`, in this thread and in the functions that
    it calls on other workers. Each worker that takes part has its share of the context, with the
    gradients of its own parameters.

    When the block is left, also by an error, the context ends on all workers: gradients and what
    was recorded are freed, and a backward pass that still runs in it fails. Workers other than this
    one are told by a message that is not waited for. The context's id is of no use afterwards.

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
        self._endpoint = current_endpoint()
        made = self._endpoint.worker.new_context()
        self._id = made.id()
        # Asked for now: the RPC may be shut down before the block is left.
        self._timeout = self._endpoint.default_timeout()
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
        self._endpoint.worker.release(self._id, self._timeout)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that this worker has in a context.

    Backward adds to them and leaves ``.grad`` alone. Only leaves of this worker are here; ask each
    worker for its own with ``rpc_sync(worker, get_gradients, (context_id,))``.

    A leaf's ``register_hook`` hooks change the gradient before it is added. While a
    ``register_post_accumulate_grad_hook`` hook runs, ``.grad`` is the gradient in the context; what
    the hook leaves there becomes the context's, None removes it, and then ``.grad`` is put back.

    Example::

        with context() as context_id:
            backward(context_id, [rpc_sync("main", torch.mul, (w, x)).sum()])
            for leaf, gradient in get_gradients(context_id).items():
                leaf.data -= 0.1 * gradient

    Args:
        context_id: What ``with context() as context_id:`` gave, here or on another worker.

    Returns:
        Each leaf, as the same object that the model has, with its gradient: no copy, in the shape
        and on the device of the leaf, sparse where backward made it so, ready on the streams that
        are current here. Leaves that no backward reached are missing.

    Raises:
        ValueError: This worker has no such context, or it has ended.
        RuntimeError: This code runs on no worker.
    """
    return dict(find_context(context_id).gradients())


def debug_info() -> dict[str, int]:
    """What distributed autograd has under way on this worker.

    Example::

        assert debug_info()["num_autograd_contexts"] == 0

    Returns:
        By name, each 0 when nothing is left: ``num_current_backward_passes``,
        ``num_autograd_contexts``, ``num_outstanding_calls``, the calls made here in contexts that
        have no answer yet, and ``num_outstanding_messages``, the messages of backward passes and of
        ended contexts that have left here and are not yet answered.

    Raises:
        RuntimeError: This code runs on no worker.
    """
    endpoint = current_endpoint()
    calls = endpoint.outstanding_calls()
    return {**endpoint.worker.debug_info(), "num_outstanding_calls": calls}
