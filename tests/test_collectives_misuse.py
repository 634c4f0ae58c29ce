"""What is wrong about a collective over replicas is an error that says so, and nothing hangs."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DistributedDataParallel, parallel_apply
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    op_name,
)
from dataparallel.threads.meeting import RendezvousError
from tests.models import assert_all_close
from tests.replica_cases import GROUP, each, index, run
from tests.virtual.oracle import run_python as python

ONES = [torch.ones(4) for _ in range(3)]
SUM = AllReduce("sum")


def still_works() -> None:
    """The next call, in the same threads, and soon: nobody is left waiting."""
    assert [y.tolist() for y in run(SUM, ONES, ["cpu"] * 3)] == [[3.0] * 4] * 3


@pytest.fixture(autouse=True)
def _works_afterwards() -> Any:
    yield
    still_works()


def replicas(call: Callable[..., Any], slots: tuple[str, ...] = ("cpu",) * 3) -> list[Any]:
    return each(slots, call, [torch.ones(4, device=slot) for slot in slots])


# --- replicas that do not agree ------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_replica_that_raises_releases_the_others(number: int) -> None:
    seen: list[str] = []

    def call(_: Tensor) -> Tensor:
        if index() == number:
            raise KeyError("broken")
        try:
            return GROUP.run(SUM, torch.ones(4))
        except RendezvousError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match=rf"(?s)broken.*in replica {number} on device cpu"):
        replicas(call)
    assert len(seen) == 2
    assert all(f"replica {number} failed without coming" in text for text in seen)
    assert all("all_reduce(op='sum') of float32" in text for text in seen)


OTHERS = {
    "collective": (AllGather(0), torch.ones(4), r"all_gather_tensor\(dim=0\) of float32 \(4,\)"),
    "shape": (SUM, torch.ones(5), r"all_reduce\(op='sum'\) of float32 \(5,\)"),
    "dimensions": (SUM, torch.ones(2, 2), r"all_reduce\(op='sum'\) of float32 \(2, 2\)"),
    "dtype": (SUM, torch.ones(4, dtype=torch.half), r"all_reduce\(op='sum'\) of float16"),
    "operation": (AllReduce("max"), torch.ones(4), r"all_reduce\(op='max'\) of float32"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_replica_that_comes_to_another_collective(kind: str) -> None:
    collective, tensor, text = OTHERS[kind]

    def call(x: Tensor) -> Tensor:
        return GROUP.run(collective, tensor) if index() == 1 else GROUP.run(SUM, x)

    with pytest.raises(RuntimeError, match=text) as caught:
        replicas(call)
    assert "all_reduce(op='sum') of float32 (4,)" in str(caught.value)
    assert "replica 1" in str(caught.value)


@pytest.mark.parametrize(
    "kind", [Broadcast, lambda root: Gather(0, root), lambda root: Reduce("sum", root)]
)
def test_another_root(kind: Callable[[int], Collective]) -> None:
    def call(x: Tensor) -> Tensor:
        return GROUP.run(kind(index() // 2), x)

    with pytest.raises(RuntimeError, match="root=0") as caught:
        replicas(call)
    assert "root=1" in str(caught.value)


def test_a_dimension_counted_from_either_end_is_the_same() -> None:
    outputs = replicas(lambda x: GROUP.run(AllGather(-1 if index() else 0), x))
    assert [tuple(y.shape) for y in outputs] == [(12,)] * 3


def test_a_replica_that_returns_without_coming() -> None:
    with pytest.raises(RendezvousError, match=r"needs all 3 replicas, but replica 2 returned"):
        replicas(lambda x: x if index() == 2 else GROUP.run(SUM, x))


def test_a_replica_that_calls_once_less() -> None:
    def call(x: Tensor) -> Tensor:
        for _ in range(3 if index() == 1 else 4):
            x = GROUP.run(SUM, x)
        return x

    with pytest.raises(RendezvousError, match=r"replica 1 returned without coming"):
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
            return group.run(SUM, x)
        finally:
            released.set()

    with pytest.raises(
        TimeoutError, match=rf"all_reduce.*replica {late} did not come within 0.2 s"
    ):
        replicas(call, ("cpu",) * 2)


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_the_timeout_is_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is a positive number of seconds, but got"):
        LocalGroup(timeout)


def test_no_timeout_is_too_long() -> None:
    group = LocalGroup(float("inf"))
    assert [y.tolist() for y in each(["cpu"] * 3, lambda x: group.run(SUM, x), ONES)] == [
        [3.0] * 4
    ] * 3


# --- what a collective does not take -----------------------------------------------------------

COMPLEX = torch.ones(6, dtype=torch.cfloat)
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (ReduceScatter("sum", 0), torch.ones(4), ValueError, r"4 is no multiple of 3; pad it to 6"),
    (Scatter(1, 0), torch.ones(3, 5), ValueError, r"5 is no multiple of 3; pad it to 6"),
    (AllGather(1), torch.ones(4), ValueError, r"gather_dim=1 is out of range .*\(4,\).*1 dim"),
    (AllGather(0), torch.tensor(1.0), ValueError, r"gather_dim=0 is out of range .*0 dimensions"),
    (Gather(-2, 0), torch.ones(4), ValueError, "gather_dim=-2 is out of range"),
    (ReduceScatter("sum", 2), torch.ones(3, 3), ValueError, "scatter_dim=2 is out of range"),
    (Broadcast(3), torch.ones(4), ValueError, "src is a member .*from 0 to 2, but got 3"),
    (Scatter(0, -1), torch.ones(3), ValueError, "src is a member .*from 0 to 2, but got -1"),
    (Reduce("sum", 3), torch.ones(4), ValueError, "dst is a member .*from 0 to 2, but got 3"),
    (Gather(0, 9), torch.ones(4), ValueError, "dst is a member .*from 0 to 2, but got 9"),
    (AllToAll(((1, 1),), ((2, 2),)), torch.ones(4), ValueError, "each of the 3 members.*1, 1"),
    (AllToAll(((1, 1, 1),), ((1, 1, 1),)), torch.ones(4), ValueError, r"3 rows together.*has 4"),
    (AllToAll(((4, 1, -1),), ((4, 1, -1),)), torch.ones(4), ValueError, "at least 0"),
    (AllToAll(((2, 1, 1),), ((1, 2, 1),)), torch.ones(4), ValueError, "gives 1 rows to member 0"),
    (AllToAll(((0, 0, 0),), ((0, 0, 0),)), torch.tensor(1), ValueError, "has none"),
    (AllReduce("band"), torch.ones(4), ValueError, "'band' combines the bits of integers"),
    (Reduce("bxor", 0), COMPLEX, ValueError, "'bxor' combines the bits of integers"),
    (AllReduce("avg"), torch.ones(4).bool(), ValueError, "'avg' has no mean of booleans"),
    (AllReduce("min"), COMPLEX, ValueError, "'min' needs an order, which complex"),
    (ReduceScatter("max", 0), COMPLEX, ValueError, "'max' needs an order, which complex"),
    (SUM, [1.0, 2.0], TypeError, "all_reduce takes a tensor, but got list"),
    (Broadcast(0), None, TypeError, "broadcast takes a tensor, but got NoneType"),
    (SUM, torch.eye(3).to_sparse(), ValueError, r"layout torch.sparse_coo; pass x.to_dense\(\)"),
]


@pytest.mark.parametrize(("collective", "tensor", "kind", "text"), REFUSED)
def test_what_a_collective_does_not_take(
    collective: Collective, tensor: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        replicas(lambda _: GROUP.run(collective, tensor))


def test_a_fault_of_one_replica_names_it() -> None:
    with pytest.raises(ValueError, match=r"(?s)src is a member.*in replica 1 on device cpu$"):
        replicas(lambda x: GROUP.run(Broadcast(7 if index() == 1 else 0), x))


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="a dense tensor, but got a nested one; pad it first"):
        replicas(lambda _: GROUP.run(SUM, nested))


@pytest.mark.parametrize("op", ["mean", "", "premul_sum", None, 3])
def test_unknown_operations(op: Any) -> None:
    with pytest.raises(ValueError, match="reduceOp is one of sum, avg, product, min, max, band"):
        op_name(op)


# --- where it is called ------------------------------------------------------------------------


def test_a_thread_that_is_no_replica_is_alone() -> None:
    found: list[Any] = []

    def other() -> None:
        found.append((GROUP.size(), GROUP.rank(), GROUP.run(SUM, torch.ones(2)).tolist()))

    def call(x: Tensor) -> Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        return GROUP.run(SUM, x)

    replicas(call, ("cpu",) * 2)
    assert found == [(1, 0, [1.0, 1.0])] * 2


def test_calls_within_calls_have_groups_of_their_own() -> None:
    def inner(x: Tensor) -> Tensor:
        return GROUP.run(SUM, x)

    def outer(x: Tensor) -> Any:
        before = GROUP.run(SUM, x)
        within = parallel_apply([inner] * 2, [x] * 2, devices=["cpu"] * 2)
        return before.tolist(), [y.tolist() for y in within], GROUP.run(SUM, x).tolist()

    assert replicas(outer) == [([3.0] * 4, [[2.0] * 4] * 2, [3.0] * 4)] * 3


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_and_traces_around_the_parallel_call() -> None:
    def call(x: Tensor) -> Tensor:
        first, _ = parallel_apply([lambda x: GROUP.run(SUM, x)] * 2, [x, x], devices=["cpu"] * 2)
        result: Tensor = first
        return result

    with pytest.raises(RuntimeError, match="transform"):
        torch.func.vmap(call)(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="transform"):
        torch.jit.trace(call, torch.ones(2))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_and_traces_within_a_replica() -> None:
    def vmapped(x: Tensor) -> Any:
        return torch.func.vmap(lambda row: GROUP.run(SUM, row))(x.unsqueeze(0))

    def traced(x: Tensor) -> Any:
        return torch.jit.trace(lambda y: GROUP.run(SUM, y), x)

    for call in (vmapped, traced):
        with pytest.raises(RuntimeError, match=r"torch.func transform or torch.jit.trace"):
            replicas(call)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_transforms_of_a_group_of_one() -> None:
    x = torch.arange(3.0)
    for collective in (SUM, AllReduce("product"), AllGather(0), Scatter(0, 0)):
        jacobian = torch.func.jacrev(functools.partial(GROUP.run, collective))(x)
        torch.testing.assert_close(jacobian, torch.eye(3))
    for collective in (SUM, AllReduce("product"), AllGather(0)):
        traced = torch.jit.trace(lambda y, c=collective: GROUP.run(c, y), x)
        torch.testing.assert_close(traced(x + 1), x + 1)


# --- interrupts ----------------------------------------------------------------------------------


INTERRUPTED = """
    import os, signal, threading, time
    import torch
    from dataparallel import DataParallel
    from dataparallel.collectives.operations import AllReduce
    from dataparallel.collectives.local_group import LocalGroup
    from dataparallel.threads.apply import current_replica

    group = LocalGroup(60)

    class Net(torch.nn.Module):
        def forward(self, x, size, stuck):
            total = group.run(AllReduce("sum"), torch.ones(size))
            if stuck and current_replica().index == 1:
                os.kill(os.getpid(), signal.SIGINT)
                while True:
                    time.sleep(0.01)
            return x + group.run(AllReduce("sum"), total)[:1]

    model = DataParallel(Net(), ["cpu"] * 3)
    for size in (4,):
        begin = time.monotonic()
        try:
            model(torch.zeros(3, 1), size, True)
        except KeyboardInterrupt:
            print("interrupted")
        assert time.monotonic() - begin < 30, "the interrupt released nobody"
        assert model(torch.zeros(3, 1), size, False).tolist() == [[9.0]] * 3
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


def test_an_interrupted_module_works_in_the_next_call(slots: list[str]) -> None:
    class Net(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails and index() == 1:
                raise ValueError("broken")
            return GROUP.run(SUM, super().forward(x))

    net = Net(3, 3).to(slots[0])
    model = DistributedDataParallel(net, slots[:2])
    x = torch.randn(4, 3, device=slots[0])
    expected = model(x)
    for _ in range(3):
        net.fails = True
        with pytest.raises(ValueError, match="broken\nin replica 1"):
            model(x)
        net.fails = False
        output = model(x)
        assert_all_close([output], [expected])
        output.sum().backward()
