"""What a backward over workers does with graphs, hooks, errors and its arguments."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
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
from tests.distributed_autograd.rpc_workers import (
    World,
    expect_clean_everywhere,
    gated,
    leaf,
    note,
    open_gate,
    own_gradients,
    pass_gate,
    take_notes,
)

FREED = "backward through the graph a second time"


def ones(*shape: int) -> Tensor:
    return torch.ones(shape or (3,), dtype=torch.float64, requires_grad=True)


def chained(x: Tensor) -> Tensor:
    y: Tensor = rpc_sync("worker2", torch.mul, (x * leaf("w"), 2.0))
    return y * leaf("w")


# --- more than one backward ----------------------------------------------------------------------


def retained() -> None:
    x = ones()
    with context() as context_id:
        loss = rpc_sync("worker1", chained, (x,)).sum()
        for times in (1, 2, 3):
            backward(context_id, [loss], retain_graph=times < 3)
            found = get_gradients(context_id)[x]
            there = rpc_sync("worker1", own_gradients, (context_id,))["w"]
            if times == 1:
                first, first_there = found.clone(), there
            torch.testing.assert_close(found, times * first)
            torch.testing.assert_close(there, times * first_there)


def not_retained() -> None:
    x = ones()
    with context() as context_id:
        loss = (rpc_sync("worker1", chained, (x,)) * x).sum()
        backward(context_id, [loss])
        with pytest.raises(RuntimeError, match=FREED):
            backward(context_id, [loss])
        # What was freed is at another worker.
        loss = rpc_sync("worker1", chained, (x,)).sum()
        backward(context_id, [loss])
        with pytest.raises(WorkerError, match=rf"'worker1'.*{FREED}"):
            backward(context_id, [loss])


def parts_of_one_graph() -> None:
    """Backward passes with different roots reach different workers; calls may come in between."""
    x = ones()
    with context() as context_id:
        first = rpc_sync("worker1", torch.mul, (x, 2.0))
        second = rpc_sync("worker2", torch.mul, (x, 3.0))
        both = rpc_sync("worker1", torch.add, (first, second))
        backward(context_id, [first.sum()], retain_graph=True)
        assert get_gradients(context_id)[x].tolist() == [2] * 3
        backward(context_id, [second.sum()], retain_graph=True)
        assert get_gradients(context_id)[x].tolist() == [5] * 3
        backward(context_id, [both.sum(), first.sum()], retain_graph=True)
        assert get_gradients(context_id)[x].tolist() == [12] * 3
        backward(context_id, [rpc_sync("worker2", torch.mul, (first, 5.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [22] * 3


def backward_there(context_id: int, x: Tensor) -> None:
    backward(context_id, [rpc_sync("worker2", torch.mul, (x * leaf("w"), 2.0)).sum()])


def roots_at_another_worker() -> None:
    """A called function starts a backward of its own in the caller's context."""
    x = ones()
    with context() as context_id:
        for times in (1, 2):
            rpc_sync("worker1", backward_there, (context_id, x * 3))
            weight = rpc_sync("worker1", leaf, ("w",)).detach()
            torch.testing.assert_close(get_gradients(context_id)[x], 6 * times * weight)
            there = rpc_sync("worker1", own_gradients, (context_id,))
            assert there["w"].tolist() == [6.0 * times] * 3


# --- functions of users --------------------------------------------------------------------------


class Counted(torch.autograd.Function):
    """Counts how often its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        note("counted")
        return gradients[0] * 2


def counted(x: Tensor, depth: int) -> Tensor:
    y: Tensor = Counted.apply(x)
    if depth:
        y = y + rpc_sync(f"worker{depth % 3}", counted, (y, depth - 1))
        y = y + rpc_sync(f"worker{depth % 3}", counted, (y, 0)) * y
    return y


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        note([gradient is None for gradient in gradients])
        return next(gradient for gradient in gradients if gradient is not None) * 1


def two_outputs(x: Tensor) -> Any:
    return TwoOutputs.apply(x)


def functions_run_once() -> None:
    x = ones()
    with context() as context_id:
        backward(context_id, [counted(x, 4).sum()])
        runs = [rpc_sync(f"worker{rank}", take_notes) for rank in range(3)]
        assert sum(map(len, runs)) == 9
    with context() as context_id:
        _, second = rpc_sync("worker1", two_outputs, (x,))
        backward(context_id, [second.sum()])
        assert get_gradients(context_id)[x].tolist() == [1] * 3
    assert rpc_sync("worker1", take_notes) == [[True, False]]


def reentrant(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(torch.sin, x * leaf("w"), use_reentrant=True)
    return out


def reentrant_checkpoints_are_refused() -> None:
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


def anomaly_mode() -> None:
    x = torch.zeros(3, requires_grad=True)
    with context() as context_id, torch.autograd.set_detect_anomaly(True):
        loss = (torch.sqrt(x) * rpc_sync("worker1", torch.mul, (x, 2))).sum()
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"):
            backward(context_id, [loss])
        assert x.grad is None


def added(a: Tensor, b: Tensor) -> Tensor:
    return a + b.view(3)


def gradients_have_memory_of_their_own() -> None:
    """One sum has one gradient for both terms; here, and where a message brings it."""
    a, b = ones(), ones(1, 3)
    with context() as context_id:
        loss = rpc_sync("worker1", added, (a, b)).square().sum()
        backward(context_id, [loss], retain_graph=True)
        backward(context_id, [loss])
        found = get_gradients(context_id)
        assert not found[a].requires_grad
        assert (found[a].tolist(), found[b].tolist()) == ([8.0] * 3, [[8.0] * 3])
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (a + b, 2)).sum()])
        found = get_gradients(context_id)
        found[a].add_(100)
        assert found[b].tolist() == [[2] * 3] and found[b].is_contiguous()


def ordinary_backward_is_told() -> None:
    x = ones()
    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2))
        with pytest.raises(RuntimeError, match=r"distributed_autograd.backward\(context_id"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(y.sum(), x)
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2)).sum()])
        # What a pass has left on a leaf does nothing in an ordinary backward.
        (x * 5).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [5] * 3
        assert get_gradients(context_id)[x].tolist() == [2] * 3
        assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3] * 3


def compiled_backward_after_a_pass() -> None:
    """A leaf that a pass has reached is as good as any other for compiled autograd."""
    w = ones()
    kept = (w * 1).exp()  # keeps the leaf's node
    with context() as context_id:
        loss = (rpc_sync("worker1", torch.mul, (w, 2)) * kept).sum()
        backward(context_id, [loss], retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (w * 3).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [3.0] * 3


def backward_after_a_trace() -> None:
    """Tracing makes a build for CUDA count one device where there is none."""
    with FakeTensorMode():
        pass
    w = ones()
    with context() as context_id:
        backward(context_id, [rpc_sync("worker1", torch.mul, (w, 2)).sum()])
        assert get_gradients(context_id)[w].tolist() == [2] * 3


# --- hooks ---------------------------------------------------------------------------------------


def hooks_of_nodes() -> None:
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


def hooks_of_several_tensors() -> None:
    """``register_multi_grad_hook``, and ``retain_grad`` of tensors that are no leaves."""
    x, y = ones(2), ones(2)
    handle = torch.autograd.graph.register_multi_grad_hook(
        (x, y), lambda gradients: note([gradient.tolist() for gradient in gradients])
    )
    with context() as context_id:
        t = x * 2
        t.retain_grad()
        z = rpc_sync("worker1", torch.mul, (t, 3))
        z.retain_grad()
        backward(context_id, [(z * 5 + rpc_sync("worker1", torch.mul, (y, 4))).sum()])
        assert t.grad is not None and t.grad.tolist() == [15, 15]
        assert z.grad is not None and z.grad.tolist() == [5, 5]
        assert x.grad is None
    assert take_notes() == [[[30, 30], [4, 4]]]
    handle.remove()


def hook_that_runs_backward() -> None:
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
    y = x * 1
    y.register_hook(failing)
    return y * 2


def hooks_that_fail() -> None:
    """Here and there, also with a text that is no Unicode; without the hook all is well."""
    x = ones()
    kept = x.grad = torch.full((3,), 9.0, dtype=torch.float64)
    handle = x.register_hook(failing)
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        with pytest.raises(ArithmeticError, match="no file"):
            backward(context_id, [loss], retain_graph=True)
        handle.remove()
        loss_there = rpc_sync("worker1", failing_hook, (x,)).sum()
        with pytest.raises(WorkerError, match=r"'worker1'(.|\n)*ArithmeticError: no file \\udcff"):
            backward(context_id, [loss_there])
        assert get_gradients(context_id) == {}
        backward(context_id, [loss])
        assert get_gradients(context_id)[x].tolist() == [2] * 3
        assert x.grad is kept and kept.tolist() == [9] * 3


def fails_after_sending(x: Tensor) -> Tensor:
    def fail(inputs: Any, outputs: Any) -> None:
        pass_gate("arrived")
        failing(outputs[0])

    assert x.grad_fn is not None
    x.grad_fn.register_hook(fail)
    return x * 2


def hooks_that_fail_last() -> None:
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


def post_accumulate_hooks_are_refused() -> None:
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


class OwnError(Exception):
    pass


class Fails(torch.autograd.Function):
    """Fails in backward until this worker says otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if "healed" not in take_notes():
            raise OwnError("no gradient today")
        note("healed")
        return gradients[0]


def fails(x: Tensor) -> Tensor:
    out: Tensor = Fails.apply(x * leaf("w"))
    return out


def relayed(x: Tensor, names: list[str]) -> Tensor:
    if not names:
        return fails(x)
    y: Tensor = rpc_sync(names[0], relayed, (x * 2, names[1:]))
    return y * 2


def expect_next_context_works(*names: str) -> None:
    x = ones()
    with context() as context_id:
        y = x
        for name in names:
            y = rpc_sync(name, torch.mul, (y, 2.0))
        backward(context_id, [y.sum()], timeout=20)
        assert get_gradients(context_id)[x].tolist() == [2.0 ** len(names)] * 3


def failing_workers() -> None:
    """Wherever it fails, the caller gets the name, the type, the text and the traceback."""
    x = ones()
    for names in (["worker1"], ["worker1", "worker2"], ["worker1", "worker0", "worker3"]):
        with context() as context_id:
            loss = relayed(x, names).sum()
            text = rf"'{names[-1]}'(.|\n)*in backward\n(.|\n)*OwnError: no gradient today"
            with pytest.raises(WorkerError, match=text) as caught:
                backward(context_id, [loss])
            assert caught.value.worker == names[-1]
        expect_clean_everywhere()
    # An error of this worker keeps its type, also where the chain returns to it.
    for names in ([], ["worker1", "worker0"], ["worker2", "worker1", "worker0"]):
        with context() as context_id:
            loss = relayed(x, names).sum()
            with pytest.raises(OwnError, match="no gradient today"):
                backward(context_id, [loss])
        expect_clean_everywhere()
    expect_next_context_works("worker1", "worker2", "worker3", "worker0")


def a_context_recovers() -> None:
    """A backward that failed is repeated in the same context when the reason is gone."""
    x = ones()
    with context() as context_id:
        loss = relayed(x, ["worker1", "worker2"]).sum()
        for _ in range(20):
            with pytest.raises(WorkerError, match="no gradient today"):
                backward(context_id, [loss], retain_graph=True)
            assert get_gradients(context_id) == {}
        rpc_sync("worker2", note, ("healed",))
        for _ in range(20):
            backward(context_id, [loss], retain_graph=True)
        weight = rpc_sync("worker2", leaf, ("w",)).detach()
        torch.testing.assert_close(get_gradients(context_id)[x], 20 * 16 * weight)


class WrongShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.ones(7)


def wrong_shape(x: Tensor) -> Tensor:
    out: Tensor = WrongShape.apply(x)
    return out


def gradients_of_a_wrong_shape() -> None:
    x = ones()
    with context() as context_id:
        loss = rpc_sync("worker1", wrong_shape, (x * 2,)).sum()
        with pytest.raises(WorkerError, match=r"'worker1'.*invalid gradient at index 0"):
            backward(context_id, [loss])


def others_are_cancelled() -> None:
    """One worker fails while another is busy: the caller does not wait for that one."""
    x = ones()
    with context() as context_id:
        busy = rpc_sync("worker1", gated, (x, "busy"))
        bad = rpc_sync("worker2", fails, (x,))
        started = time.monotonic()
        with pytest.raises(WorkerError, match="'worker2'"):
            backward(context_id, [(busy + bad).sum()])
        assert time.monotonic() - started < 5
    expect_next_context_works("worker1", "worker2")
    rpc_sync("worker1", open_gate, ("busy",))


def the_time_limit() -> None:
    """What is not finished in time is named, and ended everywhere."""
    x = ones()
    with context() as context_id:
        y = rpc_sync("worker2", torch.mul, (rpc_sync("worker1", gated, (x, "late")), 2.0))
        with pytest.raises(TimeoutError, match=r"within 0\.3 s; not finished: .*'worker1'"):
            backward(context_id, [y.sum()], timeout=0.3)
        rpc_sync("worker1", open_gate, ("late",))
        assert get_gradients(context_id) == {}
        # The context itself is usable.
        backward(context_id, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert get_gradients(context_id)[x].tolist() == [2] * 3
    expect_next_context_works("worker1", "worker2")


# --- what the caller gives -----------------------------------------------------------------------


def roots() -> None:
    x = ones()
    wrong_roots: list[tuple[type[Exception], str, Any]]
    with context() as context_id:
        loss = rpc_sync("worker1", torch.mul, (x, 2.0)).sum()
        wrong_roots = [
            (ValueError, "no roots were given", []),
            (TypeError, r"roots must be a list of tensors.*\[loss\]", loss),
            (TypeError, "roots must be a list of tensors, not NoneType", None),
            (TypeError, "root 0 must be a tensor, not str", "loss"),
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


def ids() -> None:
    x = ones()
    calls: list[Callable[[Any], Any]] = [lambda id: backward(id, [x.sum()]), get_gradients]
    # A worker that takes no part does not know the context.
    unknown_there = pytest.raises(ValueError, match="'worker2' has no distributed autograd context")
    with context() as ended, unknown_there:
        torch.distributed.rpc.rpc_sync("worker2", get_gradients, (ended,))
    for call in calls:
        for unknown in (0, 100, -1, 1 << 60, ended):
            with pytest.raises(ValueError, match=f"'worker0' has no distributed.* {unknown}"):
                call(unknown)
        for wrong in (None, "1", 1.5):
            with pytest.raises(TypeError, match=r"incompatible function arguments"):
                call(wrong)


def foreign_tensors() -> None:
    """A tensor that was received in another context leads nowhere in this one."""
    x = ones()
    with context():
        received = rpc_sync("worker1", torch.mul, (x, 2.0))
    with context() as context_id:
        loss = (received * rpc_sync("worker1", torch.mul, (x, 2.0))).sum()
        with pytest.raises(RuntimeError, match="received in another context"):
            backward(context_id, [loss])
        assert get_gradients(context_id) == {}
    expect_next_context_works("worker1")


@pytest.mark.parametrize(
    "case",
    [
        retained,
        not_retained,
        parts_of_one_graph,
        roots_at_another_worker,
        functions_run_once,
        reentrant_checkpoints_are_refused,
        anomaly_mode,
        gradients_have_memory_of_their_own,
        ordinary_backward_is_told,
        compiled_backward_after_a_pass,
        backward_after_a_trace,
        hooks_of_nodes,
        hooks_of_several_tensors,
        hook_that_runs_backward,
        hooks_that_fail,
        hooks_that_fail_last,
        post_accumulate_hooks_are_refused,
        failing_workers,
        a_context_recovers,
        gradients_of_a_wrong_shape,
        others_are_cancelled,
        the_time_limit,
        roots,
        ids,
        foreign_tensors,
    ],
)
def test_backward(world: World, case: Callable[[], None]) -> None:
    world.run(case)


def test_the_end_of_a_process_while_a_hook_runs(tmp_path: pathlib.Path) -> None:
    """A thread that wants the interpreter when it is gone would abort the process."""
    script = """
        import sys, threading, time, torch
        import torch.distributed.rpc as torch_rpc
        from dataparallel.distributed_autograd import backward, context, rpc_sync

        torch_rpc.init_rpc(
            "main",
            rank=0,
            world_size=1,
            rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1]),
        )
        entered = threading.Event()

        def slow(gradient):
            entered.set()
            end = time.monotonic() + 2
            while time.monotonic() < end:
                time.sleep(0.001)

        w = torch.ones(2, requires_grad=True)
        with context() as context_id:
            y = w * 2
            y.register_hook(slow)
            loss = rpc_sync("main", torch.mul, (y, 2)).sum()
            try:
                backward(context_id, [loss], timeout=0.2)
            except TimeoutError:
                assert entered.is_set()
                print("leaving")
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), f"file://{tmp_path}/store"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "leaving\n"), ended.stderr
