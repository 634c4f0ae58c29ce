"""A backward over workers, with its graphs, hooks, errors and arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dataparallel.distributed_autograd import (
    WorkerError,
    backward,
    context,
    get_gradients,
    rpc_sync,
)
from dataparallel.distributed_autograd.calls import current_endpoint
from tests.distributed_autograd.rpc_workers import (
    expect_clean_everywhere,
    gated,
    leaf,
    note,
    ones,
    open_gate,
    pass_gate,
    take_notes,
)

pytestmark = pytest.mark.on_worker0

# --- graphs --------------------------------------------------------------------------------------


def scaled(x: Tensor) -> Tensor:
    return x * leaf("w")


def test_freed_graphs_are_told() -> None:
    freed = "backward through the graph a second time"
    x = ones()
    with context() as context_id:
        loss = (rpc_sync("worker1", torch.mul, (x, 2.0)) * x).sum()
        backward(context_id, [loss])
        with pytest.raises(RuntimeError, match=freed):
            backward(context_id, [loss])
        # The freed part is at another worker.
        loss = rpc_sync("worker1", scaled, (x,)).sum()
        backward(context_id, [loss])
        with pytest.raises(WorkerError, match=rf"'worker1'.*{freed}"):
            backward(context_id, [loss])


def reentrant(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(torch.sin, x * leaf("w"), use_reentrant=True)
    return out


def test_reentrant_checkpoints_are_refused() -> None:
    """Its inner backward would write to ``.grad``."""
    x = ones()
    with context() as context_id:
        loss = rpc_sync("worker1", reentrant, (x,)).sum()
        with pytest.raises(WorkerError, match=r"'worker1'(.|\n)*use_reentrant=False"):
            backward(context_id, [loss])
        loss = (rpc_sync("worker1", torch.mul, (x, 2)) + reentrant(x)).sum()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            backward(context_id, [loss])
        assert get_gradients(context_id) == {} and x.grad is None


# --- the engine ----------------------------------------------------------------------------------


def test_gradients_have_memory_of_their_own() -> None:
    """One sum has one gradient for both terms."""
    a, b = ones(), ones()
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (a + b, 2)).sum()])
        found = get_gradients(context_id)
        found[a].add_(100)
        assert found[b].tolist() == [2] * 3 and found[b].is_contiguous()
        assert not found[b].requires_grad


def test_ordinary_backward_is_told() -> None:
    x = ones()
    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2))
        with pytest.raises(RuntimeError, match=r"distributed_autograd.backward\(context_id"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(y.sum(), x)
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2)).sum()])
        # The rest of a pass on a leaf does nothing in an ordinary backward.
        (x * 5).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [5] * 3
        assert get_gradients(context_id)[x].tolist() == [2] * 3
        assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3] * 3


def test_compiled_backward_after_a_pass() -> None:
    """A leaf that a pass has reached is as good as any other for compiled autograd."""
    w = ones()
    kept = (w * 1).exp()  # keeps the leaf's node
    with context() as context_id:
        loss = (rpc_sync("worker1", torch.mul, (w, 2)) * kept).sum()
        backward(context_id, [loss], retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (w * 3).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [3.0] * 3


def test_backward_after_a_trace() -> None:
    """Tracing makes a build for CUDA count one device where there is none."""
    with FakeTensorMode():
        pass
    w = ones()
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (w, 2)).sum()])
        assert get_gradients(context_id)[w].tolist() == [2] * 3


# --- hooks ---------------------------------------------------------------------------------------


def test_hooks_of_nodes() -> None:
    """Pre hooks and post hooks of nodes, those of accumulating nodes included."""
    x = ones(2)
    with context() as context_id:
        y = x * 2
        z = rpc_sync("worker1", torch.mul, (y, 3))
        assert y.grad_fn is not None
        accumulate = y.grad_fn.next_functions[0][0]
        assert accumulate is not None
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 10,))
        y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] + 1, *inputs[1:]))
        accumulate.register_prehook(lambda gradients: (gradients[0] * 100,))
        accumulate.register_hook(lambda inputs, outputs: note("accumulated"))
        backward(context_id, [z.sum()])
        assert get_gradients(context_id)[x].tolist() == [(3 * 10 * 2 + 1) * 100] * 2
        assert take_notes() == ["accumulated"] and x.grad is None


def test_hook_that_runs_backward() -> None:
    """An ordinary backward within a pass leaves its gradients in ``.grad``."""
    x, y = ones(), ones()

    def inner(gradient: Tensor) -> None:
        with torch.enable_grad():
            (x * y * 3).sum().backward()

    with context() as context_id:
        z = x * 1
        z.register_hook(inner)
        backward(context_id, [(rpc_sync("worker1", torch.mul, (z, 2.0)) + y).sum()], timeout=10)
        found = get_gradients(context_id)
        assert (found[x].tolist(), found[y].tolist()) == ([2] * 3, [1] * 3)
        assert x.grad is not None and y.grad is not None
        assert x.grad.tolist() == y.grad.tolist() == [3] * 3


def failing(gradient: Tensor) -> None:
    raise ArithmeticError("no file \udcff")


def failing_hook(x: Tensor) -> Tensor:
    y = x * leaf("w")
    y.register_hook(failing)
    return y * 2


def fails_after_sending(x: Tensor) -> Tensor:
    def fail(inputs: Any, outputs: Any) -> None:
        pass_gate("arrived")
        failing(outputs[0])

    assert x.grad_fn is not None
    x.grad_fn.register_hook(fail)
    return x * 2


def test_hooks_that_fail_last() -> None:
    """A worker fails when its gradients are at the root already, which waits for its end."""
    x = ones()
    with context() as context_id:
        loss = rpc_sync("worker1", fails_after_sending, (x,)).sum()
        handle = x.register_hook(
            lambda gradient: note(torch_rpc.rpc_async("worker1", open_gate, ("arrived",)))
        )
        with pytest.raises(WorkerError, match=r"'worker1'(.|\n)*no file"):
            backward(context_id, [loss])
        handle.remove()
        assert len(take_notes()) == 1


handles: list[Any] = []


def hooked_there(x: Tensor, hooked: bool) -> Tensor:
    weight = leaf("post there")
    if hooked:
        handles.append(weight.register_post_accumulate_grad_hook(failing))
    else:
        handles.pop().remove()
    return x * weight


def test_post_accumulate_hooks_are_refused() -> None:
    """They read ``.grad``, which no pass writes; where they are removed the leaf is as any."""
    x = ones()
    with context() as context_id:
        loss = rpc_sync("worker1", hooked_there, (x, True)).sum()
        with pytest.raises(WorkerError, match=r"worker1(.|\n)*register_post_accumulate_grad_hook"):
            backward(context_id, [loss])
        loss = rpc_sync("worker1", hooked_there, (x, False)).sum()
        handle = x.register_post_accumulate_grad_hook(failing)
        with pytest.raises(RuntimeError, match=r"leaf of shape \[3\] has hooks from register_post"):
            backward(context_id, [loss])
        handle.remove()
        backward(context_id, [loss])
        assert x in get_gradients(context_id)


# --- errors --------------------------------------------------------------------------------------


def relayed(x: Tensor, names: list[str], function: Callable[[Tensor], Tensor]) -> Tensor:
    if not names:
        return function(x)
    y: Tensor = rpc_sync(names[0], relayed, (x * 2, names[1:], function))
    return y * 2


def test_failing_workers() -> None:
    """Wherever it fails, the caller gets the name, the type, the text and the traceback.

    An error of this worker keeps its type, also where the chain returns to it.
    """
    x = ones()
    for names in (["worker1"], ["worker1", "worker0", "worker3"], [], ["worker2", "worker0"]):
        with context() as context_id:
            loss = relayed(x, names, failing_hook).sum()
            if names and names[-1] != "worker0":
                text = rf"'{names[-1]}'(.|\n)*in failing\n(.|\n)*ArithmeticError: no file \\udcff"
                with pytest.raises(WorkerError, match=text) as caught:
                    backward(context_id, [loss])
                assert caught.value.worker == names[-1]
            else:
                with pytest.raises(ArithmeticError, match="no file"):
                    backward(context_id, [loss])
            # The context goes on.
            assert get_gradients(context_id) == {}
            loss = relayed(x, ["worker1", "worker2", "worker3"], torch.sin).sum()
            backward(context_id, [loss], timeout=20)
            torch.testing.assert_close(get_gradients(context_id)[x], 64 * (8 * x).cos())
        expect_clean_everywhere()
    assert x.grad is None


def test_others_are_cancelled() -> None:
    """One worker fails while another is busy: the caller does not wait for that one."""
    x = ones()
    with context() as context_id:
        busy = rpc_sync("worker1", gated, (x, "busy"))
        bad = rpc_sync("worker2", failing_hook, (x,))
        started = time.monotonic()
        with pytest.raises(WorkerError, match="'worker2'"):
            backward(context_id, [(busy + bad).sum()])
        # The busy one goes on for 20 seconds.
        assert time.monotonic() - started < 15
    expect_clean_everywhere()
    rpc_sync("worker1", open_gate, ("busy",))


def test_the_time_limit() -> None:
    """An unfinished backward is named after its time, and ended everywhere."""
    x = ones()
    with context() as context_id:
        y = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", gated, (x, "late")), 2.0))
        weight = rpc_sync("worker1", leaf, ("w",)).detach()
        with pytest.raises(TimeoutError, match=r"within 0\.3 s; not finished: .*'worker1'"):
            backward(context_id, [y.sum()], retain_graph=True, timeout=0.3)
        rpc_sync("worker1", open_gate, ("late",))
        assert get_gradients(context_id) == {}
        # The same again.
        backward(context_id, [y.sum()])
        assert get_gradients(context_id)[x].equal(2 * weight)


# --- what the caller gives -----------------------------------------------------------------------


def test_roots() -> None:
    x = ones()
    wrong_roots: list[tuple[type[Exception], str, Any]]
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        wrong_roots = [
            (ValueError, "no roots were given", []),
            (TypeError, r"roots must be a list of tensors.*\[loss\]", loss),
            (TypeError, "roots must be a list of tensors, not NoneType", None),
            (TypeError, "root 0 must be a tensor, not NoneType", [None]),
            (ValueError, "root 1 does not require grad", [loss, torch.tensor(1.0)]),
            (ValueError, r"root 0 has the shape \(3,\)", [x * 2]),
            (ValueError, "is torch.complex128.* a real one", [(x * 2j).sum()]),
            (ValueError, "root 0 has no gradient function", [ones(1)]),
        ]
        for kind, text, wrong in wrong_roots:
            with pytest.raises(kind, match=text):
                backward(context_id, wrong)
        for seconds in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="must be at least 0"):
                backward(context_id, [loss], timeout=seconds)
        # Nothing of that has used up the graph.
        backward(context_id, [loss], timeout=1e12)
        assert get_gradients(context_id)[x].tolist() == [2] * 3


def test_ids() -> None:
    x = ones()
    calls: list[Callable[[Any], Any]] = [lambda id: backward(id, [x.sum()]), get_gradients]
    with context() as ended:
        pass
    for call in calls:
        for unknown in (0, -1, 1 << 60, ended):
            with pytest.raises(ValueError, match=f"'worker0' has no distributed.* {unknown}"):
                call(unknown)
        with pytest.raises(TypeError, match=r"incompatible function arguments"):
            call("1")


def release(context_id: int) -> None:
    current_endpoint().worker.release(context_id, 20.0)


def test_a_worker_that_has_left_the_context() -> None:
    x = ones()
    with context() as context_id:
        loss = rpc_sync("worker1", scaled, (x,)).sum()
        torch_rpc.rpc_sync("worker1", release, (context_id,))
        # It may still be on its way out of the context.
        gone = "no distributed autograd context|the distributed autograd context was released"
        with pytest.raises((RuntimeError, ValueError), match=gone):
            backward(context_id, [loss])


def test_foreign_tensors() -> None:
    """A tensor that was received in another context leads nowhere in this one."""
    x = ones()
    with context():
        received = rpc_sync("worker1", torch.mul, (x, 2.0))
    with context() as context_id:
        loss = (received * rpc_sync("worker1", torch.mul, (x, 2.0))).sum()
        with pytest.raises(RuntimeError, match="received in another context"):
            backward(context_id, [loss])
        assert get_gradients(context_id) == {}
