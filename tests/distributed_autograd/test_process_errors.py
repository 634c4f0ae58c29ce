"""What goes wrong in calls and in backward is told to the caller, and the next context works."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    debug_info,
    get_gradients,
    rpc_async,
    rpc_sync,
)
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import everywhere, leaf
from tests.distributed_autograd.rpc_workers import expect_clean_everywhere, scenarios


def expect_next_context_works(*names: str) -> None:
    """A call chain over workers, with its backward, has the right gradient."""
    x = torch.ones(2, requires_grad=True)
    with context() as context_id:
        y = x
        for name in names:
            y = rpc_sync(name, torch.mul, (y, 2.0))
        backward(context_id, [y.sum()], timeout=20)
        assert get_gradients(context_id)[x].tolist() == [2.0 ** len(names)] * 2


# --- in a called function --------------------------------------------------------------------


class OwnError(Exception):
    pass


class NeedsTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_one(kind: type[Exception], x: Tensor) -> Tensor:
    raise kind("from the function\nwith two lines")


def raise_awkward(x: Tensor) -> Tensor:
    raise NeedsTwo(1, 2)


def call_on(to: str, function: Any, *args: Any) -> Any:
    return rpc_sync(to, function, args)


def errors_of_functions() -> None:
    x = torch.ones(2, requires_grad=True)
    for kind in (ValueError, TypeError, KeyError, OwnError, TimeoutError, StopIteration):
        # torch's calls keep these two types, and write the others into the text.
        expected = kind if kind in (ValueError, TypeError) else RuntimeError
        text = rf"{kind.__name__}(.|\n)*worker1(.|\n)*in raise_one(.|\n)*from the function"
        with context() as context_id:
            with pytest.raises(expected, match=text):
                rpc_sync("worker1", raise_one, (kind, x))
            future = rpc_async("worker1", raise_one, (kind, x))
            with pytest.raises(expected, match=text):
                future.wait()
            # Through a nested call.
            with pytest.raises(expected, match=r"worker2(.|\n)*from the function"):
                rpc_sync("worker1", call_on, ("worker2", raise_one, kind, x))
            # And the context goes on.
            loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
            backward(context_id, [loss])
            assert get_gradients(context_id)[x].tolist() == [2, 2]
    with context(), pytest.raises(Exception, match="1 and 2"):
        rpc_sync("worker1", raise_awkward, (x,))


def errors_in_torch() -> None:
    with context(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        rpc_sync("worker1", torch.matmul, (torch.rand(3, 3, requires_grad=True), torch.rand(6, 6)))
    expect_next_context_works("worker1")


def error_in_the_block() -> None:
    """The block ends with an error of its own; the context is released all the same."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(OwnError, match="in the block"), context():
        rpc_sync("worker1", call_on, ("worker2", torch.mul, x, 2.0))
        raise OwnError("in the block")
    expect_clean_everywhere(3)
    expect_next_context_works("worker1", "worker2")


def test_errors_of_functions(cluster: Cluster) -> None:
    scenarios(cluster, 3, errors_of_functions, errors_in_torch, error_in_the_block)


# --- in backward -----------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Fails in backward as long as this worker says so."""

    active = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if Fails.active:
            raise OwnError("no gradient today")
        return gradients[0]


def fails(x: Tensor) -> Tensor:
    out: Tensor = Fails.apply(x * leaf("w"))
    return out


def heal(active: bool = False) -> None:
    Fails.active = active


def relayed(x: Tensor, names: list[str]) -> Tensor:
    if not names:
        return fails(x)
    y: Tensor = rpc_sync(names[0], relayed, (x * 2, names[1:]))
    return y * 2


def failing_workers() -> None:
    """Wherever it fails, the caller gets the name, the type, the text and the traceback."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for names in (["worker1"], ["worker1", "worker2"], ["worker1", "worker0", "worker3"]):
        with context() as context_id:
            loss = relayed(x, names).sum()
            text = rf"'{names[-1]}'(.|\n)*in backward\n(.|\n)*OwnError: no gradient today"
            with pytest.raises(WorkerError, match=text) as caught:
                backward(context_id, [loss])
            assert caught.value.worker == names[-1]
        expect_clean_everywhere(4)
    expect_next_context_works("worker1", "worker2", "worker3", "worker0")


def failing_here() -> None:
    """An error of this worker keeps its type, also where the chain returns to it."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for names in ([], ["worker1", "worker0"], ["worker2", "worker1", "worker0"]):
        with context() as context_id:
            loss = relayed(x, names).sum()
            with pytest.raises(OwnError, match="no gradient today"):
                backward(context_id, [loss])
        expect_clean_everywhere(4)
    expect_next_context_works("worker1", "worker2")


def recovers() -> None:
    """A backward that failed is repeated in the same context when the reason is gone."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker2"]).sum()
        for _ in range(20):
            with pytest.raises(WorkerError, match="no gradient today"):
                backward(context_id, [loss], retain_graph=True)
            assert get_gradients(context_id) == {}
        rpc_sync("worker2", heal)
        for _ in range(20):
            backward(context_id, [loss], retain_graph=True)
        rpc_sync("worker2", heal, (True,))
        weight = rpc_sync("worker2", leaf, ("w",)).detach()
        torch.testing.assert_close(get_gradients(context_id)[x], 20 * 16 * weight)


def wrong_shape(x: Tensor) -> Tensor:
    out: Tensor = WrongShape.apply(x)
    return out


class WrongShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.ones(7)


def wrong_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", wrong_shape, (x * 2,)).sum()
        with pytest.raises(WorkerError, match=r"'worker1'.*invalid gradient at index 0"):
            backward(context_id, [loss])


def test_errors_in_backward(cluster: Cluster) -> None:
    scenarios(cluster, 4, failing_workers, failing_here, recovers, wrong_gradients)


class Waits(torch.autograd.Function):
    """Waits in backward until it is told to go on."""

    entered = threading.Event()
    go_on = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Waits.entered.set()
        assert Waits.go_on.wait(20)
        return gradients[0]


def waits(x: Tensor) -> Tensor:
    Waits.entered.clear()
    Waits.go_on.clear()
    out: Tensor = Waits.apply(x * leaf("w"))
    return out


def entered() -> None:
    assert Waits.entered.wait(20)


def go_on() -> None:
    Waits.go_on.set()


def others_are_cancelled() -> None:
    """One worker fails while another is busy: the caller does not wait for that one."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        busy = rpc_sync("worker1", waits, (x,))
        bad = rpc_sync("worker2", fails, (x,))
        started = time.monotonic()
        with pytest.raises(WorkerError, match="'worker2'"):
            backward(context_id, [(busy + bad).sum()])
        assert time.monotonic() - started < 5
    expect_next_context_works("worker1", "worker2")
    rpc_sync("worker1", go_on)
    expect_clean_everywhere(3)


def time_limit() -> None:
    """What is not finished in time is named, and ended everywhere."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        y = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", waits, (x,)), 2.0))
        with pytest.raises(TimeoutError, match=r"within 0\.3 s; not finished: .*'worker1'"):
            backward(context_id, [y.sum()], timeout=0.3)
        rpc_sync("worker1", go_on)
        assert get_gradients(context_id) == {}
        # The context itself is usable.
        z = rpc_sync("worker1", torch.mul, (x, 2.0))
        backward(context_id, [z.sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3
    expect_next_context_works("worker1", "worker2")


def call_time_limit() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        with pytest.raises(Exception, match=r"(?i)timed? ?out"):
            rpc_sync("worker1", held, (x,), timeout=0.3)
        rpc_sync("worker1", go_on)
        z = rpc_sync("worker1", torch.mul, (x, 2.0))
        backward(context_id, [z.sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def held(x: Tensor) -> Tensor:
    Waits.go_on.clear()
    assert Waits.go_on.wait(20)
    return x * leaf("w")


def test_time_limits(cluster: Cluster) -> None:
    scenarios(cluster, 3, others_are_cancelled, time_limit, call_time_limit)


# --- in what the caller gives ----------------------------------------------------------------


def roots() -> None:
    x = torch.ones(3, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        with pytest.raises(ValueError, match="no roots were given"):
            backward(context_id, [])
        with pytest.raises(TypeError, match=r"roots must be a list of tensors.*\[loss\]"):
            backward(context_id, loss)
        with pytest.raises(ValueError, match="root 1 does not require grad"):
            backward(context_id, [loss, torch.tensor(1.0)])
        with pytest.raises(ValueError, match=r"root 0 has the shape \(3,\)"):
            backward(context_id, [x * 2])
        with pytest.raises(ValueError, match="root 0 has no gradient function"):
            backward(context_id, [torch.tensor(1.0, requires_grad=True)])
        for wrong in (None, 3, [None], ["loss"], [3.0]):
            with pytest.raises(TypeError, match="root"):
                backward(context_id, wrong)  # type: ignore[arg-type]
        # Nothing of that has used up the graph.
        backward(context_id, [loss])
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def ids() -> None:
    x = torch.ones(3, requires_grad=True)
    for unknown in (0, 100, -1, 1 << 60):
        with pytest.raises(ValueError, match=f"'worker0' has no distributed autograd.* {unknown}"):
            backward(unknown, [x.sum()])
        with pytest.raises(ValueError, match=f"'worker0' has no distributed autograd.* {unknown}"):
            get_gradients(unknown)
    for wrong in (None, "1", 1.5):
        with pytest.raises(TypeError, match=r"incompatible function arguments|id"):
            backward(wrong, [x.sum()])  # type: ignore[arg-type]
    # A worker that takes no part does not know the context.
    unknown_there = pytest.raises(ValueError, match="'worker2' has no distributed autograd context")
    with context() as context_id, unknown_there:
        torch_rpc.rpc_sync("worker2", get_gradients, (context_id,))
    with pytest.raises(ValueError, match=f"no distributed autograd context {context_id}"):
        backward(context_id, [x.sum()])
    with pytest.raises(ValueError, match=f"no distributed autograd context {context_id}"):
        get_gradients(context_id)


def nested_blocks() -> None:
    with context() as outer:
        with pytest.raises(RuntimeError, match=f"already runs in .* context {outer}"), context():
            pass
        with pytest.raises(RuntimeError, match=f"already runs in .* context {outer}"):
            rpc_sync("worker1", open_block)
        assert get_gradients(outer) == {}
    with context() as other:
        assert other != outer


def open_block() -> None:
    with context():
        pass


def foreign_tensors() -> None:
    """A tensor that was received in another context leads nowhere in this one."""
    x = torch.ones(3, requires_grad=True)
    with context():
        received = rpc_sync("worker1", torch.mul, (x, 2.0))
    with context() as context_id:
        loss = (received * rpc_sync("worker1", torch.mul, (x, 2.0))).sum()
        with pytest.raises(RuntimeError, match="received in another context"):
            backward(context_id, [loss])
        assert get_gradients(context_id) == {}
    expect_next_context_works("worker1")


def everything_is_zero() -> None:
    expected = {
        "num_current_backward_passes": 0,
        "num_autograd_contexts": 0,
    }
    assert everywhere(debug_info) == [expected] * 3


def test_what_the_caller_gives(cluster: Cluster) -> None:
    scenarios(cluster, 3, roots, ids, nested_blocks, foreign_tensors, everything_is_zero)
