"""What is wrong about a collective over replicas is an error that says so, and nothing hangs."""

from __future__ import annotations

import functools as partials
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as by_hooks
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from dataparallel import DataParallel, DistributedDataParallel, parallel_apply
from dataparallel.collectives import LocalGroup
from dataparallel.collectives import functional as f
from dataparallel.collectives.operations import op_name
from dataparallel.threads.meeting import RendezvousError
from tests.collective_cases import GROUP, each, index
from tests.virtual.oracle import run_python as python

ONES = [torch.ones(4) for _ in range(3)]
WRAPPERS: list[Callable[..., Any]] = [DataParallel, DistributedDataParallel]


def total(x: Tensor, group: Any = GROUP) -> Tensor:
    return f.all_reduce(x, "sum", group)


def replicas(call: Callable[[Tensor], Any], count: int = 3) -> list[Any]:
    return each(["cpu"] * count, call, ONES)


@pytest.fixture(autouse=True)
def _works_afterwards() -> Any:
    """The next call, in the same threads, and soon: nobody is left waiting."""
    yield
    assert [y.tolist() for y in replicas(total)] == [[3.0] * 4] * 3


# --- replicas that do not agree ------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_replica_that_raises_releases_the_others(number: int) -> None:
    seen: list[str] = []

    def call(x: Tensor) -> Tensor:
        if index() == number:
            raise KeyError("broken")
        try:
            return total(x)
        except RendezvousError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match=rf"(?s)broken.*in replica {number} on device cpu"):
        replicas(call)
    assert len(seen) == 2
    assert all(f"replica {number} failed without coming" in text for text in seen)
    assert all("all_reduce(op='sum') of float32" in text for text in seen)


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "collective": (
        lambda x: f.all_gather_tensor(x, 0, GROUP),
        r"all_gather_tensor\(dim=0\) of float32 \(4,\)",
    ),
    "shape": (lambda x: total(torch.ones(2, 2)), r"all_reduce\(op='sum'\) of float32 \(2, 2\)"),
    "dtype": (lambda x: total(x.half()), r"all_reduce\(op='sum'\) of float16"),
    "operation": (
        lambda x: f.all_reduce(x, "max", GROUP),
        r"all_reduce\(op='max'\) of float32",
    ),
    "root": (lambda x: f.reduce(x, "sum", 1, GROUP), r"reduce\(op='sum', root=1\)"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_replica_that_comes_to_another_collective(kind: str) -> None:
    other, text = OTHERS[kind]
    with pytest.raises(RuntimeError, match=text) as caught:
        replicas(lambda x: other(x) if index() == 1 else total(x))
    assert "all_reduce(op='sum') of float32 (4,)" in str(caught.value)
    assert "replica 1" in str(caught.value)


def test_a_dimension_counted_from_either_end_is_the_same() -> None:
    found = replicas(lambda x: f.all_gather_tensor(x, -1 if index() else 0, GROUP))
    assert [tuple(y.shape) for y in found] == [(12,)] * 3


@pytest.mark.parametrize("calls", [0, 3])
def test_a_replica_that_returns_without_coming(calls: int) -> None:
    def call(x: Tensor) -> Tensor:
        for _ in range(calls if index() == 2 else calls + 1):
            x = total(x)
        return x

    with pytest.raises(RendezvousError, match=r"needs all 3 replicas, but replica 2 returned"):
        replicas(call)


@pytest.mark.parametrize("late", [0, 1])
def test_a_replica_that_does_not_come_in_time(late: int) -> None:
    released = threading.Event()
    group = LocalGroup(0.2)

    def call(x: Tensor) -> Tensor:
        if index() == late:
            released.wait(30)
            return x
        try:
            return total(x, group)
        finally:
            released.set()

    text = rf"all_reduce.*replica {late} did not come within 0.2 s"
    with pytest.raises(TimeoutError, match=text):
        replicas(call, 2)


# --- what a collective does not take -----------------------------------------------------------

V, R = ValueError, RuntimeError
REFUSED: list[tuple[type[Exception], str, Any]] = [
    (V, "4 is no multiple of 3; pad it", lambda x: f.reduce_scatter_tensor(x, "sum", 0, GROUP)),
    (V, "5 is no multiple of 3; pad it", lambda x: f.scatter(torch.ones(3, 5), 1, 0, GROUP)),
    (V, r"gather_dim=1 is out of .*\(4,\)", lambda x: f.all_gather_tensor(x, 1, GROUP)),
    (V, "gather_dim=-2 is out of range", lambda x: f.gather(x, -2, 0, GROUP)),
    (V, "scatter_dim=2 is out of range", lambda x: f.scatter(x, 2, 0, GROUP)),
    (V, "src is .* from 0 to 2, but got 3", lambda x: f.broadcast(x, 3, GROUP)),
    (V, "src is .* from 0 to 2, but got -1", lambda x: f.scatter(x, 0, -1, GROUP)),
    (V, "dst is .* from 0 to 2, but got 3", lambda x: f.reduce(x, "sum", 3, GROUP)),
    (V, "each of the 3 members.*1, 1", lambda x: f.all_to_all_single(x, [1, 1], [2, 2], GROUP)),
    (V, "3 rows together.*has 4", lambda x: f.all_to_all_single(x, [1] * 3, [1] * 3, GROUP)),
    (V, "at least 0", lambda x: f.all_to_all_single(x, [4, 1, -1], [4, 1, -1], GROUP)),
    (V, "gives 1 rows to member 0", lambda x: f.all_to_all_single(x, [2, 1, 1], [1, 2, 1], GROUP)),
    (V, "'min' needs an order", lambda x: f.all_reduce(x.to(torch.cfloat), "min", GROUP)),
    (R, "bitwise_and.* not implemented", lambda x: f.all_reduce(x, "band", GROUP)),
    (R, "can't be cast|Boolean", lambda x: f.all_reduce(x.bool(), "avg", GROUP)),
    (TypeError, "takes a tensor, .* list", lambda x: f.all_reduce(x.tolist(), "sum", GROUP)),
    (V, r"sparse_coo; pass x.to_dense\(\)", lambda x: total(torch.eye(3).to_sparse())),
    (V, "got a nested one; pad it first", lambda x: total(nested(x, x[:2]))),
]


def nested(*rows: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


@pytest.mark.parametrize(("kind", "text", "call"), REFUSED)
def test_what_a_collective_does_not_take(kind: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(kind, match=text):
        replicas(call)


def test_a_fault_of_one_replica_names_it() -> None:
    with pytest.raises(ValueError, match=r"(?s)src is a member.*in replica 1 on device cpu$"):
        replicas(lambda x: f.broadcast(x, 7 if index() == 1 else 0, GROUP))


@pytest.mark.parametrize("op", ["mean", "", "premul_sum", None, 3])
def test_unknown_operations(op: Any) -> None:
    with pytest.raises(ValueError, match="reduceOp is one of sum, avg, product, min, max, band"):
        op_name(op)


# --- where it is called ------------------------------------------------------------------------


def test_a_thread_that_is_no_replica_is_alone() -> None:
    found: list[Any] = []

    def other() -> None:
        found.append((GROUP.size(), GROUP.rank(), total(torch.ones(2)).tolist()))

    def call(x: Tensor) -> Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        return total(x)

    replicas(call, 2)
    assert found == [(1, 0, [1.0, 1.0])] * 2


def test_calls_within_calls_have_groups_of_their_own() -> None:
    def outer(x: Tensor) -> Any:
        before = total(x)
        within = parallel_apply([total] * 2, [x] * 2, devices=["cpu"] * 2)
        return before.tolist(), [y.tolist() for y in within], total(x).tolist()

    assert replicas(outer) == [([3.0] * 4, [[2.0] * 4] * 2, [3.0] * 4)] * 3


def call_transformed(transform: Callable[[Any], Any], _: Tensor) -> Any:
    return transform(total)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_and_traces() -> None:
    def around(x: Tensor) -> Tensor:
        first, _ = parallel_apply([total] * 2, [x, x], devices=["cpu"] * 2)
        result: Tensor = first
        return result

    def trace(call: Callable[[Tensor], Tensor]) -> Any:
        return torch.jit.trace(call, torch.ones(2))

    def vmap(call: Callable[[Tensor], Tensor]) -> Any:
        return torch.func.vmap(call)(torch.ones(3, 2))

    for transform in (vmap, trace):
        with pytest.raises(RuntimeError, match="transform"):
            transform(around)
        with pytest.raises(RuntimeError, match=r"torch.func transform or torch.jit.trace"):
            replicas(partials.partial(call_transformed, transform))
    # A group of one may be transformed.
    x = torch.arange(3.0)
    for call in (total, lambda x: f.all_gather_tensor(x, 0, GROUP)):
        torch.testing.assert_close(torch.func.jacrev(call)(x), torch.eye(3))
        torch.testing.assert_close(torch.jit.trace(call, x)(x + 1), x + 1)


# --- what runs forward again -------------------------------------------------------------------


def doubled(x: Tensor) -> Tensor:
    return total(x * 2)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


class Saving(Doubled):
    """With other hooks above those of the checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


def _early_stop(x: Tensor) -> Any:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(doubled, x, use_reentrant=False)


def _recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Callable[[Tensor], Any]] = {
    "reentrant": lambda x: checkpoint(doubled, x, use_reentrant=True),
    "not reentrant": lambda x: checkpoint(doubled, x, use_reentrant=False),
    "without early stop": _early_stop,
    "selective": lambda x: checkpoint(
        doubled,
        x,
        use_reentrant=False,
        context_fn=partials.partial(create_selective_checkpoint_contexts, _recompute),
    ),
    "sequential": lambda x: checkpoint_sequential([doubled] * 3, 2, x, use_reentrant=False),
    "module hooks": lambda x: by_hooks(Doubled())(x),
    "module hooks below others": lambda x: by_hooks(Saving())(x),
}


class Net(nn.Linear):
    """Calls something with what it computes, in forward."""

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__(3, 3)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(super().forward(x))


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_within_a_replica(kind: str, wrapper: Callable[..., Any]) -> None:
    model = wrapper(Net(CHECKPOINTS[kind]), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"all_reduce over replicas .*activation checkpointing"):
        model(torch.randn(4, 3))
    x = torch.randn(4, 3, requires_grad=True)
    # A group of one may be recomputed.
    CHECKPOINTS[kind](x).sum().backward()
    factor = 8 if kind == "sequential" else 2
    torch.testing.assert_close(x.grad, torch.full_like(x, factor))


class Recomputed(torch.autograd.Function):
    """A checkpoint of somebody else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return doubled(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(doubled(leaf), leaf, grad)[0]


def hooked(x: Tensor) -> Tensor:
    x.register_hook(total)
    return x * 2


@pytest.mark.parametrize("call", [Recomputed.apply, hooked])
@pytest.mark.parametrize("slots", [["cpu"] * 2, ["virtual:0", "virtual:1"]])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_code_that_runs_in_backward(
    wrapper: Callable[..., Any], slots: list[str], call: Any
) -> None:
    model = wrapper(Net(call).to(slots[0]), slots)
    loss = model(torch.randn(4, 3, device=slots[0])).sum()
    with pytest.raises(RuntimeError, match="all_reduce over replicas was called in backward"):
        loss.backward()


# --- interrupts ----------------------------------------------------------------------------------


INTERRUPTED = """
    import os, signal, threading, time
    import torch
    from dataparallel import DataParallel
    from dataparallel.collectives import LocalGroup, all_reduce
    from dataparallel.threads.apply import current_replica

    group = LocalGroup(60)

    class Net(torch.nn.Module):
        def forward(self, x, stuck):
            total = all_reduce(torch.ones(4), "sum", group)
            if stuck and current_replica().index == 1:
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    time.sleep(0.01)
            return x + all_reduce(total, "sum", group)[:1]

    model = DataParallel(Net(), ["cpu"] * 3)
    begin = time.monotonic()
    try:
        model(torch.zeros(3, 1), True)
    except KeyboardInterrupt:
        print("interrupted")
    assert time.monotonic() - begin < 30, "the interrupt released nobody"
    assert model(torch.zeros(3, 1), False).tolist() == [[9.0]] * 3
    names = "more than at first"
    # The interrupted thread ends once it has been told, for which nobody waits.
    while len(names) != 3 and time.monotonic() - begin < 30:
        names = [t.name for t in threading.enumerate() if t.name.startswith("dataparallel")]
    assert len(names) == 3, names
    print("usable")
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_releases_replicas_in_a_collective() -> None:
    result = python(INTERRUPTED)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "interrupted\nusable\n"
