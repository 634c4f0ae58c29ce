"""Collectives over replicas: modules with them, and what is wrong is an error that says so.

Oracle: the bare module on the whole batch.
"""

from __future__ import annotations

import copy
import functools as partials
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as by_hooks
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, DistributedDataParallel, parallel_apply
from dataparallel.collectives import LocalGroup
from dataparallel.collectives import functional as f
from dataparallel.collectives.operations import op_name
from dataparallel.threads.meeting import RendezvousError
from tests.collective_cases import GROUP, PLACES, each, index
from tests.models import assert_all_close, grads_of

ONES = [torch.ones(4) for _ in range(3)]
WRAPPERS: dict[str, Callable[..., Any]] = {"dp": DataParallel, "ddp": DistributedDataParallel}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


@pytest.fixture(params=PLACES)
def places(request: pytest.FixtureRequest) -> list[str]:
    return PLACES[request.param]


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


CHECKPOINTS: dict[str, Callable[[Tensor], Any]] = {
    "reentrant": lambda x: checkpoint(doubled, x, use_reentrant=True),
    "not reentrant": lambda x: checkpoint(doubled, x, use_reentrant=False),
    "module hooks": lambda x: by_hooks(Doubled())(x),
    "module hooks below others": lambda x: by_hooks(Saving())(x),
}


class Calling(nn.Linear):
    """Calls something with what it computes, in forward."""

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__(3, 3)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(super().forward(x))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_within_a_replica(kind: str, wrap: Callable[..., Any]) -> None:
    model = wrap(Calling(CHECKPOINTS[kind]), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"all_reduce over replicas .*activation checkpointing"):
        model(torch.randn(4, 3))
    x = torch.randn(4, 3, requires_grad=True)
    # A group of one may be recomputed.
    CHECKPOINTS[kind](x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


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
def test_other_code_that_runs_in_backward(
    wrap: Callable[..., Any], slots: list[str], call: Any
) -> None:
    model = wrap(Calling(call).to(slots[0]), slots)
    loss = model(torch.randn(4, 3, device=slots[0])).sum()
    with pytest.raises(RuntimeError, match="all_reduce over replicas was called in backward"):
        loss.backward()


# --- modules ---------------------------------------------------------------------------------


class Net(nn.Module):
    """With a group of one on the whole batch it computes the same as with any other on chunks."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.kinds = kinds

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if "reduce" in self.kinds:
            count = total(torch.tensor(float(len(x)), device=x.device))
            h = h - total(h.sum(0)) / count.double()
        if "extremum" in self.kinds:
            low = h.amin(0) if len(x) else h.new_full((6,), float("inf"))
            h = h / (1 + (h.detach() - f.all_reduce(low, "min", GROUP)).abs())
        if "gather" in self.kinds:
            every = f.all_gather_tensor(h, 0, GROUP)
            h = h + torch.softmax(h @ every.t(), 1) @ every
        if "rows" in self.kinds:
            # There and back.
            back = f.all_to_all_single(h, None, None, GROUP)
            h = h * f.all_to_all_single(back, None, None, GROUP)
        if "scatter" in self.kinds:
            # Each result for all is the same for all, so the mean of the chunks is no other.
            chunk = f.reduce_scatter_tensor(self.first.weight.repeat(2, 1), "avg", 0, GROUP)
            every = f.all_gather_tensor(chunk, 0, GROUP)
            h = h + every.sum() + f.broadcast(self.first.bias, 0, GROUP)
        output: Tensor = self.second(h.tanh())
        return output


KINDS = ["reduce extremum", "gather rows", "scatter", "reduce gather scatter"]


def pair(wrap: Callable[..., Any], places: list[str], kinds: str) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(1)
    bare = Net(kinds).double().to(places[0])
    x = torch.randn(16, 4, dtype=torch.double, device=places[0])
    return bare, wrap(copy.deepcopy(bare), places), x


def compare(
    models: tuple[Any, Any], x: Tensor, run: Callable[[Any, Tensor], Any] = lambda m, x: m(x)
) -> None:
    """Outputs and gradients of both, of the input too."""
    results = []
    for module in models:
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        output = run(module, leaf)
        output.square().sum().backward()
        results.append([output, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


@pytest.mark.in_pairs
@pytest.mark.parametrize("kinds", KINDS)
def test_three_steps(wrap: Callable[..., Any], places: list[str], kinds: str) -> None:
    bare, model, x = pair(wrap, places, kinds)
    for number in range(3):
        compare((bare, model), x * (number + 1))
        for module in (bare, model):
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.01 * p.grad
    assert_all_close(model.parameters(), bare.parameters())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_all_close([model(x)], [bare(x)])


@pytest.mark.in_pairs
@pytest.mark.parametrize("samples", [9, 3, 1])
def test_uneven_chunks(wrap: Callable[..., Any], places: list[str], samples: int) -> None:
    bare, model, x = pair(wrap, places, "reduce extremum")
    compare((bare, model), x[:samples])


def test_torch_autograd_grad_and_second_gradients(
    wrap: Callable[..., Any], places: list[str]
) -> None:
    bare, model, x = pair(wrap, places, "reduce gather")
    results = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        output = module(leaf).square().sum()
        first = torch.autograd.grad(
            output, [leaf, *module.parameters()], create_graph=True, allow_unused=True
        )
        output.backward(retain_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        results.append([*first, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


@pytest.mark.in_pairs
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_wrapper(
    wrap: Callable[..., Any], places: list[str], reentrant: bool
) -> None:
    bare, model, x = pair(wrap, places, "reduce gather")
    compare((bare, model), x, lambda m, leaf: checkpoint(m, leaf, use_reentrant=reentrant))


# --- graphs that share a node, and graphs that do not ------------------------------------------


THREADS: set[int] = set()


class Sometimes(nn.Module):
    """Has as many nodes with a collective as without, or more, or less."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, mode: str) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda _: THREADS.add(threading.get_ident()))
        own = h.sum(0)
        rank, last = GROUP.rank(), GROUP.size() - 1
        met = own if mode == "apart" else total(own.detach() if mode == "without gradient" else own)
        if mode == "apart":
            # As many nodes in all threads as if all of them had met; of another group than ours.
            met = own.clone() if rank == last else own
        elif mode == "without gradient":
            met = met + own
        elif mode == "twice":
            met = f.all_reduce(met, "max", GROUP)
        elif (mode == "first only" and rank != 0) or (mode == "last only" and rank != last):
            met = h.sum(0)
        output: Tensor = self.second((h * met).tanh())
        return output


#: And in how many threads backward runs: graphs that share a node go into one.
MODES = {"apart": 2, "met": 1, "first only": 1, "last only": 1, "without gradient": 2, "twice": 1}


def call_in(mode: str, model: Any, x: Tensor) -> Any:
    return model(x, mode)


def test_a_collective_is_noticed_in_every_forward(slots: list[str]) -> None:
    """Whatever was computed in the forwards before: the sizes of their graphs are remembered."""
    one = DataParallel(Sometimes().double().to(slots[0]), slots[:2])
    other = DistributedDataParallel(copy.deepcopy(one.module), slots[:2])
    torch.manual_seed(2)
    order = [list(MODES)[i] for i in torch.randint(0, len(MODES), (40,)).tolist()]
    for number, mode in enumerate([*order, "apart", "apart", "met", "apart", "met"]):
        samples = 2 if number % 3 else 6
        x = torch.randn(samples, 4, dtype=torch.double, device=slots[0])
        compare((one, other), x, partials.partial(call_in, mode))


def test_only_graphs_that_share_a_node_go_into_one_backward() -> None:
    model = DistributedDataParallel(Sometimes().double(), ["cpu"] * 2)
    x = torch.randn(4, 4, dtype=torch.double)
    for _ in range(2):
        for mode, threads in MODES.items():
            THREADS.clear()
            model(x, mode).square().sum().backward()
            assert len(THREADS) == threads, mode
