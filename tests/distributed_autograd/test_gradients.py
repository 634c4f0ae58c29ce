"""Gradients over workers, beside ordinary autograd and torch's distributed autograd."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dataparallel.distributed_autograd import rpc_sync
from tests.distributed_autograd.oracle import Call, Case, compare
from tests.distributed_autograd.rpc_workers import World, leaf, note, take_notes

NAMES = ["worker0", "worker1", "worker2", "worker3"]


def scaled(x: Tensor, name: str = "scale") -> Tensor:
    return torch.tanh(x * leaf(name))


def shifted(x: Tensor) -> Tensor:
    return x + leaf("shift")


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


# --- where calls go --------------------------------------------------------------------------


def simple(call: Call) -> list[Tensor]:
    x, y = leaf("x"), leaf("y")
    return [(call("worker1", product, x, y) + x).sum()]


def to_self(call: Call) -> list[Tensor]:
    return [call("worker0", scaled, leaf("x") * 2).sum()]


def nothing_remote(call: Call) -> list[Tensor]:
    return [scaled(leaf("x")).sum()]


def down_the_line(call: Call, x: Tensor, names: list[str]) -> Tensor:
    x = scaled(x, f"at {names[0]}")
    if len(names) > 1:
        x = call(names[1], down_the_line, call, x, names[1:]) * leaf(f"back {names[0]}")
    return x


def nested_to_all(call: Call) -> list[Tensor]:
    return [call("worker1", down_the_line, call, leaf("x"), NAMES[1:]).sum()]


def chain_over_all(call: Call) -> list[Tensor]:
    x = leaf("x") * 1.0
    for name in NAMES[1:] + NAMES:
        x = call(name, scaled, x, f"of {name}")
    return [x.sum()]


def back_to_the_caller(call: Call) -> list[Tensor]:
    names = ["worker1", "worker0", "worker1", "worker0", "worker2", "worker0"]
    return [call("worker1", down_the_line, call, leaf("x"), names).sum()]


def calls_itself(call: Call) -> list[Tensor]:
    names = ["worker1", "worker1", "worker1", "worker0", "worker0"]
    return [call("worker1", down_the_line, call, leaf("x"), names).sum()]


def round_trips(call: Call) -> list[Tensor]:
    x = leaf("x")
    for _ in range(5):
        x = call("worker1", scaled, x, "far") + leaf("near")
    return [x.sum()]


# --- what is used, and how often -------------------------------------------------------------


def residual(call: Call) -> list[Tensor]:
    x = leaf("x") * 1.0
    for name in NAMES[1:]:
        x = x + call(name, scaled, x)
    return [x.sum()]


def residual_of_a_cycle(call: Call, x: Tensor, depth: int) -> Tensor:
    if depth == 0:
        return scaled(x, "bottom")
    y = scaled(x, f"level {depth}")
    below: Tensor = call(NAMES[depth % 2], residual_of_a_cycle, call, y, depth - 1)
    return x + y * below


def residual_cycle(call: Call) -> list[Tensor]:
    x = leaf("x")
    return [(x + call("worker1", residual_of_a_cycle, call, x, 5)).sum()]


def reused_weights(call: Call) -> list[Tensor]:
    """One weight here goes to all workers; one at each worker is used by several calls."""
    weight, x = leaf("weight"), leaf("x")
    for name in NAMES[1:] + NAMES[1:]:
        x = call(name, product, weight, call(name, scaled, x, "there")) + weight * x
    return [x.sum(), (weight * weight).sum()]


def shared_over_paths(call: Call, x: Tensor) -> Tensor:
    at_worker3: Tensor = call("worker3", scaled, x, "shared")
    at_worker0: Tensor = call("worker0", scaled, x, "shared")
    return at_worker3 + at_worker0


def shared_weights(call: Call) -> list[Tensor]:
    """worker3 is reached through worker1, through worker2, and from here."""
    x = leaf("x")
    paths = [call(name, shared_over_paths, call, x) for name in ("worker1", "worker2")]
    return [(paths[0] * paths[1] * call("worker3", scaled, x, "shared")).sum()]


def a_message_to_each(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * leaf("a"), x * leaf("b"), x * leaf("c")


def partly_used(call: Call) -> list[Tensor]:
    """One of three results is used: the gradient of a message is partly undefined."""
    first, _, _ = call("worker1", a_message_to_each, leaf("x"))
    _, second, _ = call("worker2", a_message_to_each, first)
    return [second.sum()]


def unused_inside(call: Call, x: Tensor) -> Tensor:
    call("worker3", scaled, x, "unused")
    call("worker0", scaled, x, "unused")
    return x * leaf("used")


def unused_calls(call: Call) -> list[Tensor]:
    x = leaf("x")
    call("worker1", scaled, x)
    call("worker2", unused_inside, call, x)
    return [call("worker1", unused_inside, call, x * 2).sum()]


def some_workers_only(call: Call) -> list[Tensor]:
    x, y = leaf("x"), leaf("y")
    for name in NAMES:
        call(name, scaled, y, "not reached")
    return [call("worker2", scaled, x).sum()]


def detached(call: Call) -> list[Tensor]:
    x = leaf("x")
    loose = call("worker1", scaled, x).detach()
    return [(call("worker2", scaled, x) * loose).sum()]


def several_roots(call: Call) -> list[Tensor]:
    x, y = leaf("x"), leaf("y")
    first = call("worker1", product, x, y)
    second = call("worker2", scaled, first)
    return [first.sum(), second.sum(), (first * second).mean(), first.prod(), x.max()]


def one_root_twice(call: Call) -> list[Tensor]:
    loss = call("worker1", scaled, leaf("x")).sum()
    return [loss, loss]


# --- what happens to tensors -----------------------------------------------------------------


def changed_in_place(x: Tensor) -> Tensor:
    y = x * leaf("factor")
    y.mul_(2).add_(x)
    y[1:] *= leaf("slice", 2)
    return y


def in_place(call: Call) -> list[Tensor]:
    x = leaf("x")
    received = call("worker1", changed_in_place, x * 1.0)
    received.mul_(3)
    received[0] = x[1]
    return [call("worker2", scaled, received).sum()]


def after_it_was_sent(call: Call) -> list[Tensor]:
    """The change belongs to the sender: what was sent is what it was."""
    x = leaf("x") * 1.0
    y = call("worker1", shifted, x)
    x.mul_(2)
    return [(y * y + x).sum(), call("worker1", shifted, x).prod()]


def pieces(x: Tensor) -> list[Tensor]:
    return [*x.view(2, 3).unbind(0), x[::2], x.t() if x.dim() == 2 else x.flip(0)]


def views(call: Call) -> list[Tensor]:
    x = leaf("x", 2, 6)
    first, second, odd, rest = call("worker1", pieces, x[1])
    return [(first * second * odd).sum(), call("worker2", pieces, rest)[2].sum(), x.t()[2].sum()]


def looked_up(indices: Tensor, sparse: bool) -> Tensor:
    table = leaf("table", 10, 3)
    return torch.nn.functional.embedding(indices, table, sparse=sparse)


def sparse(call: Call) -> list[Tensor]:
    """The gradient of the table is sparse, and the sum of several."""
    weight = leaf("weight")
    first = call("worker1", looked_up, torch.tensor([1, 3, 3]), True)
    second = call("worker1", looked_up, torch.tensor([3, 4]), True)
    third = call("worker2", looked_up, torch.tensor([9]), True)
    return [(first * weight).sum() + second.prod() + third.sum()]


def sparse_and_dense(call: Call) -> list[Tensor]:
    first = call("worker1", looked_up, torch.tensor([1, 3]), True)
    second = call("worker1", looked_up, torch.tensor([3, 4]), False)
    third = call("worker1", looked_up, torch.tensor([0]), True)
    return [first.sum() + second.prod() + third.exp().sum()]


def of_a_table(table: Tensor, indices: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, table, sparse=True)


def sparse_across(call: Call) -> list[Tensor]:
    """A sparse gradient travels to where the table is."""
    table = leaf("table", 6, 3)
    return [call("worker1", of_a_table, table, torch.tensor([0, 5, 5])).prod()]


def multiplied(matrix: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.sparse.mm(matrix, x)
    return out


def sparse_argument(call: Call) -> list[Tensor]:
    values = leaf("values")
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    with torch.sparse.check_sparse_tensor_invariants():
        matrix = torch.sparse_coo_tensor(indices, values, (3, 3))
    return [call("worker1", multiplied, matrix.coalesce(), torch.eye(3).double()).pow(2).sum()]


def as_they_are(*tensors: Tensor) -> list[Tensor]:
    return list(tensors)


def shapes_and_layouts(call: Call) -> list[Tensor]:
    x = leaf("x", 4, 6)
    sent = [
        x.t(),
        x[::2, 1::3],
        x.sum(),
        x[0, :1].expand(5),
        x[:0],
        x.view(2, 2, 2, 3).permute(3, 0, 2, 1),
    ]
    back = call("worker1", as_they_are, *sent)
    assert [tensor.shape for tensor in back] == [tensor.shape for tensor in sent]
    return [(tensor * (index + 1)).sin().sum() for index, tensor in enumerate(back)]


def of_several_types(call: Call) -> list[Tensor]:
    x = leaf("x")
    sent = [x, x.float(), x.to(torch.complex128), x.half(), x.bfloat16(), x.to(torch.complex64)]
    back = call("worker1", as_they_are, *sent)
    assert [tensor.dtype for tensor in back] == [tensor.dtype for tensor in sent]
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in back]
    return [tensor.double().square().sum() for tensor in real]


def two_of_one_memory(call: Call) -> list[Tensor]:
    """The receiver changes one of them in place; the other was saved for backward."""
    x = leaf("x") * 1.0
    # In one process they would be one memory.
    other = x.detach().clone() if call.__name__ == "here" else x.detach()
    kept, changed = call("worker1", used_and_changed, x, other)
    return [kept.sum(), (changed * leaf("y")).sum()]


def used_and_changed(x: Tensor, y: Tensor) -> list[Tensor]:
    kept = y * leaf("w")
    x.mul_(1.5)
    return [kept, x]


# --- objects of all kinds --------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    inputs: Tensor
    extras: dict[str, Any] = field(default_factory=dict)


class Slotted:
    __slots__ = ("label", "tensor")

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor = tensor
        self.label = label


class Reduced:
    """Pickled by a function of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.doubled = tensor * 2

    def __reduce__(self) -> Any:
        return Reduced, (self.tensor,)


def regrouped(batch: Batch, /, *rest: Any, scale: float, **named: Any) -> dict[str, Any]:
    pair: Pair = batch.extras["pair"]
    return {
        "pair": Pair(pair.second * scale, [pair.first, (batch.inputs,)]),
        "slotted": Slotted(rest[0]["deep"][0][1].tensor * 2, "answer"),
        "reduced": Reduced(named["reduced"].doubled),
        "ordered": OrderedDict(a=named["many"][0], b=None, c="text", d=[1, 2.5, True]),
    }


def containers(call: Call) -> list[Tensor]:
    x, y, z = leaf("x"), leaf("y"), leaf("z", 2, 2)
    batch = Batch(x, {"pair": Pair(y * 1.0, z)})
    rest = {"deep": [(0, Slotted(y, "argument")), {"set": {1, 2}}]}
    many = [z * i for i in range(5)]
    named: dict[str, Any] = {"reduced": Reduced(x * y), "many": many, "scale": 3.0}
    if call.__name__ == "here":
        answer = regrouped(batch, rest, **named)
    else:
        answer = rpc_sync("worker1", regrouped, (batch, rest), named)
    assert answer["slotted"].label == "answer"
    assert answer["ordered"]["d"] == [1, 2.5, True]
    second, (first, (inputs,)) = answer["pair"]
    sums = second.sum() + first.prod() + inputs.sin().sum() + answer["ordered"]["a"].sum()
    return [sums, answer["slotted"].tensor.sum(), answer["reduced"].doubled.exp().sum()]


def first_of(x: Tensor, y: Tensor) -> Tensor:
    assert x is y
    return x * 2 + y * leaf("w")


def one_tensor_twice(call: Call) -> list[Tensor]:
    x = leaf("x") * 1.0
    return [call("worker1", first_of, x, x).sum()]


# --- functions, hooks and nested backwards ---------------------------------------------------


class Nothing(torch.autograd.Function):
    """Has no gradient for its first input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0]


def nothing(x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = Nothing.apply(x * leaf("w"), y)
    return out


def no_gradients(call: Call) -> list[Tensor]:
    """The gradient of a message is undefined, and so is all that it was computed from."""
    x, y = leaf("x"), leaf("y")
    z = call("worker1", torch.mul, x, 2)
    return [call("worker2", nothing, call("worker1", torch.mul, z, 3), y).sum()]


def only_undefined(call: Call) -> list[Tensor]:
    """A worker gets undefined gradients alone, and must end all the same."""
    x, y = leaf("x"), leaf("y")
    z = call("worker1", torch.mul, x, 2)
    return [(call("worker2", torch.mul, nothing(z, y), 2) + y).sum()]


def block(x: Tensor) -> Tensor:
    note("block")
    return torch.tanh(x * leaf("w")).sin()


def checkpointed(x: Tensor) -> Tensor:
    take_notes()
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def with_checkpoints(call: Call) -> list[Tensor]:
    y = call("worker1", checkpointed, checkpointed(leaf("x")))
    return [call("worker1", checkpointed, y).sum()]


class InnerGradient(torch.autograd.Function):
    """Differentiates a graph of its own in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.sin().sum(), x)
            y = ctx.saved_tensors[0].detach().requires_grad_()
            y.sin().sum().backward()
            assert y.grad is not None
        return gradients[0] * (slope + y.grad) / 2


def inner_gradient(x: Tensor) -> Tensor:
    out: Tensor = InnerGradient.apply(x * leaf("w"))
    return out


def nested_engine(call: Call) -> list[Tensor]:
    return [call("worker1", inner_gradient, inner_gradient(leaf("x"))).sum()]


def doubled(x: Tensor) -> Tensor:
    """Tensor hooks on what arrives, on what is computed, and on a leaf of this worker."""
    weight = leaf("hooked there")
    if not weight._backward_hooks:
        weight.register_hook(lambda gradient: gradient * 2)
    # Not on the tensor that is returned or was given: the caller may have hooks there.
    x = x * 1.0
    x.register_hook(lambda gradient: gradient + 1)
    y = x * weight
    y.register_hook(lambda gradient: gradient * gradient)
    return y * 1.0


def hooks_that_change_gradients(call: Call) -> list[Tensor]:
    x = leaf("x")
    x.register_hook(lambda gradient: gradient * 3)
    x.register_hook(lambda gradient: gradient - 1)
    y = call("worker1", doubled, x * 2)
    y.register_hook(lambda gradient: gradient * 5)
    return [call("worker1", doubled, y * 1.0).sum()]


BESIDE_TORCHS: tuple[Case, ...] = (
    simple,
    to_self,
    nothing_remote,
    nested_to_all,
    chain_over_all,
    back_to_the_caller,
    calls_itself,
    round_trips,
    residual,
    residual_cycle,
    reused_weights,
    shared_weights,
    several_roots,
    one_root_twice,
    in_place,
    after_it_was_sent,
    views,
    sparse,
    sparse_and_dense,
    sparse_across,
    sparse_argument,
    shapes_and_layouts,
    of_several_types,
    hooks_that_change_gradients,
)
#: torch's waits for what is not used, refuses undefined gradients, and loses what is in objects.
BESIDE_ONE_PROCESS: tuple[Case, ...] = (
    partly_used,
    unused_calls,
    some_workers_only,
    detached,
    two_of_one_memory,
    containers,
    one_tensor_twice,
    no_gradients,
    only_undefined,
    with_checkpoints,
    nested_engine,
)


@pytest.mark.parametrize("case", BESIDE_TORCHS)
def test_gradients_are_those_of_one_process_and_of_torchs(world: World, case: Case) -> None:
    world.run(compare, case)


@pytest.mark.parametrize("case", BESIDE_ONE_PROCESS)
def test_gradients_are_those_of_one_process(world: World, case: Case) -> None:
    world.run(compare, case, False)
