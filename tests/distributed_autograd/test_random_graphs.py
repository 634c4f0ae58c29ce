"""Random programs over workers have the gradients that ordinary autograd has in one process.

A program is a seed: each body draws its next step while it runs, from what it has by then, and so
draws the same over workers as in one process.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dataparallel import distributed_autograd
from tests.distributed_autograd.rpc_workers import World, expect_clean_everywhere

PROGRAMS = 200
#: What a worker has: the shape of each leaf, and whether it requires grad.
LEAVES = {
    "bias": ((3,), True),
    "gain": ((3,), True),
    "constant": ((3,), False),
    "matrix": ((3, 3), True),
    "table": ((6, 3), True),
}


# --- what is computed ----------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(weight @ x)


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(0.8).add_(0.1)
    return y.sin_()


@torch.no_grad()
def _no_grad(x: Tensor) -> Tensor:
    return x * 0.5


def _checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = checkpoint(_linear, x, weight, use_reentrant=False)
    return y


def _halved(gradient: Tensor | None) -> Tensor | None:
    # torch calls hooks for gradients that are undefined, too.
    return None if gradient is None else gradient * 0.5


def _hooked(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(_halved)
    return y


class _Undefined(torch.autograd.Function):
    """Has no gradient, and does not say so before its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class _Counted(torch.autograd.Function):
    """Does little, and counts its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, runs: Counter[int]) -> Tensor:
        ctx.number, ctx.runs = number, runs
        return x * 1.25

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with _counting:
            ctx.runs[ctx.number] += 1
        return gradient * 1.25, None, None


#: All make a vector; by the kinds of their operands.
COMPUTATIONS: list[tuple[Callable[..., Tensor], tuple[str, ...]]] = [
    (torch.add, ("vector", "vector")),
    (torch.mul, ("vector", "vector")),
    (torch.tanh, ("vector",)),
    (_linear, ("vector", "matrix")),
    (_in_place, ("vector",)),
    (lambda x, y: x.clone().mul_(y), ("vector", "vector")),
    (lambda x: x.view(1, 3).transpose(0, 1)[:, 0], ("vector",)),
    (lambda x, ids: x * (ids + 1) * 0.5, ("vector", "ids")),
    (lambda table, ids: functional.embedding(ids, table, sparse=True).sum(0), ("table", "ids")),
    (lambda table: table.mean(0), ("table",)),
    (_checkpointed, ("vector", "matrix")),
    (_hooked, ("vector",)),
    (_Undefined.apply, ("vector",)),
    (torch.detach, ("vector",)),
    (_no_grad, ("vector",)),
]


def _kind(value: Tensor) -> str:
    if not value.is_floating_point():
        return "ids"
    return {(3,): "vector", (3, 3): "matrix", (6, 3): "table"}[tuple(value.shape)]


# --- a program -----------------------------------------------------------------------------------


@dataclass
class Worker:
    """What one worker keeps between calls.

    Args:
        leaves: Its parameters and constants.
        slots: What calls have stored.
        runs: How often the backward of each `_Counted` ran here.
    """

    leaves: dict[str, Tensor]
    slots: dict[int, Tensor] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)


#: The workers in this process by number: one, or all of them.
_workers: dict[int, Worker] = {}
_counting = threading.Lock()


def begin(number: int) -> None:
    """Make a worker anew, for another program."""
    generator = torch.Generator().manual_seed(number)
    leaves = {}
    for name, (shape, grad) in LEAVES.items():
        values = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        leaves[name] = values.requires_grad_(grad)
    leaves["gain"].register_hook(_halved)
    _workers[number] = Worker(leaves)


#: Values, and the slots that may be loaded by now, with their workers.
Message = tuple[list[Tensor], dict[int, int]]


@dataclass
class Body:
    """A function that runs on a worker, and what it has by now.

    Args:
        seed: What it does.
        context_id: None in one process, with ordinary autograd.
        worker: Where it runs.
        size: How many workers there are.
        values: Its arguments, at first.
        slots: What it may load, with the workers: only what was stored before in any order of the
            calls that run at the same time.
        calls: How many calls it may make, those that its calls make included.
    """

    seed: int
    context_id: int | None
    worker: int
    size: int
    values: list[Tensor]
    slots: dict[int, int]
    calls: int
    running: list[Callable[[], Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    @property
    def here(self) -> Worker:
        return _workers[self.worker]

    def serve(self) -> Message:
        """Run, on the worker that this code runs on."""
        self.steps(6)
        return self.some(), self.slots

    def steps(self, most: int) -> None:
        """Run some steps, and wait for what they have started."""
        for _ in range(self.draw.randint(0, most)):
            getattr(self, f"_{self.draw.choice(self._possible())}")()
        while self.running:
            self._wait()

    def some(self) -> list[Tensor]:
        """Values to be sent."""
        count = self.draw.randint(0, 4) if self.values else 0
        return [self.draw.choice(self.values) for _ in range(count)]

    def begin_and_end(self) -> None:
        """What worker 0 does: in any case a call; only the last pass may free the graph."""
        self._leaf()
        self._call()
        self.steps(16)
        self.values.append(self.here.leaves["bias"])
        for _ in range(self.draw.randint(0, 1)):
            self._backward()
        self._backward(retain_graph=self.draw.random() < 0.5)

    def _possible(self) -> list[str]:
        possible = ["leaf", "counted", "store"] + ["compute"] * 6
        if self.calls:
            possible += ["call"] * 4
        if self.worker in self.slots.values():
            possible += ["load"] * 2
        if self.running:
            possible += ["wait"] * 2
        if any(value.requires_grad for value in self.values):
            possible += ["backward"]
        return possible

    def _leaf(self) -> None:
        self.values.append(self.draw.choice(list(self.here.leaves.values())))

    def _operand(self, kind: str) -> Tensor:
        """A value of this kind; one made for that where there is none."""
        found = [value for value in self.values if _kind(value) == kind]
        if not found and kind == "ids":
            return torch.arange(3) + self.draw.randint(0, 3)
        leaves = self.here.leaves.values()
        return self.draw.choice(found or [leaf for leaf in leaves if _kind(leaf) == kind])

    def _compute(self) -> None:
        function, kinds = self.draw.choice(COMPUTATIONS)
        self.values.append(function(*map(self._operand, kinds)))

    def _counted(self) -> None:
        operand, number = self._operand("vector"), self.draw.getrandbits(60)
        self.values.append(_Counted.apply(operand, number, self.here.runs))

    def _store(self) -> None:
        slot = self.draw.getrandbits(60)
        self.here.slots[slot] = self._operand("vector")
        self.slots[slot] = self.worker

    def _load(self) -> None:
        slot = self.draw.choice([slot for slot in self.slots if self.slots[slot] == self.worker])
        self.values.append(self.here.slots[slot])

    def _call(self) -> None:
        seed, to = self.draw.getrandbits(30), self.draw.randrange(self.size)
        share = self.draw.randint(0, self.calls - 1)
        self.calls -= 1 + share
        way = self.draw.choice(["sync", "async", "remote"])
        body = Body(seed, self.context_id, to, self.size, self.some(), dict(self.slots), share)
        answer: Callable[[], Message]
        if self.context_id is None:
            body.values = _copies(body.values)
            found, slots = body.serve()
            message = (found if way == "remote" and to == self.worker else _copies(found), slots)
            answer = lambda: message  # noqa: E731
        elif way == "remote":
            answer = distributed_autograd.remote(_name(to), Body.serve, (body,)).to_here
        else:
            answer = distributed_autograd.rpc_async(_name(to), Body.serve, (body,)).wait
        self.running.append(answer)
        if way == "sync":
            self._wait(-1)

    def _wait(self, index: int | None = None) -> None:
        if index is None:
            index = self.draw.randrange(len(self.running))
        values, slots = self.running.pop(index)()
        self.values += values
        self.slots.update(slots)

    def _backward(self, retain_graph: bool = True) -> None:
        possible = [value for value in self.values if value.requires_grad]
        chosen = [self.draw.choice(possible) for _ in range(self.draw.randint(1, 3))]
        roots = [value.square().sum() for value in chosen]
        if self.context_id is None:
            torch.autograd.backward(roots, retain_graph=retain_graph)
        else:
            distributed_autograd.backward(self.context_id, roots, retain_graph)


def _copies(values: list[Tensor]) -> list[Tensor]:
    """As the receiver of a message gets them: one tensor for one tensor, in memory of its own."""
    copies = {id(value): value.clone() for value in values}
    return [copies[id(value)] for value in values]


# --- both ways -----------------------------------------------------------------------------------


#: Gradients by worker and name, and how often which function ran.
Outcome = tuple[dict[tuple[int, str], Tensor], Counter[int]]


def _name(number: int) -> str:
    return f"worker{number}"


def alone(seed: int, size: int) -> Outcome:
    """The program in this process, with ordinary autograd."""
    gradients, runs = {}, Counter[int]()
    for number in range(size):
        begin(number)
    Body(seed, None, 0, size, [], {}, calls=20).begin_and_end()
    for number in range(size):
        worker = _workers.pop(number)
        runs.update(worker.runs)
        for name, leaf in worker.leaves.items():
            if leaf.grad is not None:
                gradients[number, name] = leaf.grad
    return gradients, runs


def over_workers(seed: int, size: int) -> Outcome:
    """The program on ``worker0``, which is here, and the others."""
    gradients, runs = {}, Counter[int]()
    for number in range(size):
        torch_rpc.rpc_sync(_name(number), begin, (number,))
    with distributed_autograd.context() as context_id:
        Body(seed, context_id, 0, size, [], {}, calls=20).begin_and_end()
        for number in range(size):
            part = torch_rpc.rpc_sync(_name(number), collect, (context_id, number))
            gradients.update(part[0])
            runs.update(part[1])
    return gradients, runs


def collect(context_id: int, number: int) -> Outcome:
    """What the context and the counters have on the worker that this code runs on."""
    try:
        found = distributed_autograd.get_gradients(context_id)
    except ValueError as error:
        # No call came here.
        assert "has no distributed autograd context" in str(error), error
        found = {}
    worker = _workers[number]
    names = {leaf: (number, name) for name, leaf in worker.leaves.items()}
    assert all(leaf.grad is None for leaf in names), "there are gradients in .grad"
    with _counting:
        return {names[leaf]: found[leaf] for leaf in found}, Counter(worker.runs)


def compare(seed: int) -> None:
    """Run the program of a seed in both ways."""
    size = seed % 4 + 1
    # Torch 2.11 warns where it makes a sparse gradient without checks.
    with torch.sparse.check_sparse_tensor_invariants():
        expected, runs = alone(seed, size)
        found, runs_there = over_workers(seed, size)
    assert found.keys() == expected.keys(), seed
    for key, gradient in expected.items():
        assert found[key].layout == gradient.layout, (seed, key)
        values = found[key].to_dense(), gradient.to_dense()
        assert torch.allclose(*values, rtol=1e-9, atol=1e-9), (seed, key, values)
    assert runs_there == runs, seed
    expect_clean_everywhere()


def compare_many() -> None:
    for seed in range(PROGRAMS):
        compare(seed)


def test_random_programs(world: World) -> None:
    world.run(compare_many)
