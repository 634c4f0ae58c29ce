"""Random programs over workers have the gradients that ordinary autograd has in one process.

A program is a seed. Each body draws its next step while it runs, from what it has by then, and so
draws the same over workers as in one process.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dataparallel import distributed_autograd
from tests.distributed_autograd.rpc_workers import (
    everywhere,
    expect_clean_everywhere,
    forget,
    leaf,
    own_gradients,
)

#: The leaves of each worker, with their shapes.
LEAVES = {"bias": (3,), "gain": (3,), "matrix": (3, 3), "table": (6, 3)}
#: The results of calls in this process, and the number of runs of each function's backward here.
_slots: dict[int, Tensor] = {}
_runs = Counter[int]()
_counting = threading.Lock()


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
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x * 1.25

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with _counting:
            _runs[ctx.number] += 1
        return gradient * 1.25, None


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


#: The leaf that stands for a kind of which there is no value yet.
OWN = {"vector": "bias", "matrix": "matrix", "table": "table"}


def _kind(value: Tensor) -> str:
    if not value.is_floating_point():
        return "ids"
    return {(3,): "vector", (3, 3): "matrix", (6, 3): "table"}[tuple(value.shape)]


# --- a program -----------------------------------------------------------------------------------


#: Values, and the slots that may be loaded by now, with their workers.
Message = tuple[list[Tensor], dict[int, int]]


@dataclass
class Body:
    """A function that runs on a worker, and what it has by now."""

    #: The seed of its actions.
    seed: int
    #: None in one process, with ordinary autograd.
    context_id: int | None
    #: The worker on which it runs, and the number of workers.
    worker: int
    size: int
    #: Its arguments, at first.
    values: list[Tensor]
    #: The results that it may load, with their workers. These are the results that were stored
    #: before in any order of the calls that run at the same time.
    slots: dict[int, int]
    #: The number of calls that it may make, with those that its calls make.
    calls: int
    running: list[Callable[[], Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def leaf(self, name: str) -> Tensor:
        """Return a leaf of this worker; in one process they have names of their own."""
        value = leaf(f"{self.worker} {name}", *LEAVES[name])
        if name == "gain" and not value._backward_hooks:
            value.register_hook(_halved)
        return value

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
        """Run the part of worker 0: in any case a call; only the last pass may free the graph."""
        self._leaf()
        self._call()
        self.steps(16)
        self.values.append(self.leaf("bias"))
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
        self.values.append(self.leaf(self.draw.choice(list(LEAVES))))

    def _operand(self, kind: str) -> Tensor:
        """Return a value of this kind; one made for that where there is none."""
        found = [value for value in self.values if _kind(value) == kind]
        if not found and kind == "ids":
            return torch.arange(3) + self.draw.randint(0, 3)
        return self.draw.choice(found) if found else self.leaf(OWN[kind])

    def _compute(self) -> None:
        function, kinds = self.draw.choice(COMPUTATIONS)
        self.values.append(function(*map(self._operand, kinds)))

    def _counted(self) -> None:
        operand, number = self._operand("vector"), self.draw.getrandbits(60)
        self.values.append(_Counted.apply(operand, number))

    def _store(self) -> None:
        slot = self.draw.getrandbits(60)
        _slots[slot] = self._operand("vector")
        self.slots[slot] = self.worker

    def _load(self) -> None:
        slot = self.draw.choice([slot for slot in self.slots if self.slots[slot] == self.worker])
        self.values.append(_slots[slot])

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
            answer = distributed_autograd.remote(to, Body.serve, (body,)).to_here
        else:
            answer = distributed_autograd.rpc_async(to, Body.serve, (body,)).wait
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


def reset() -> None:
    forget()
    _slots.clear()
    _runs.clear()


def outcome(context_id: int | None) -> tuple[dict[str, Tensor], Counter[int]]:
    """Return the gradients of this process's leaves, and the number of runs of each function."""
    try:
        gradients = own_gradients(context_id)
    except ValueError as error:
        # No call came here.
        assert "has no distributed autograd context" in str(error), error
        gradients = {}
    with _counting:
        return gradients, Counter(_runs)


def compare(seed: int) -> None:
    """Run the program of a seed in this process alone, and over workers."""
    found, runs_there, size = {}, Counter[int](), seed % 4 + 1
    # Torch 2.11 warns where it makes a sparse gradient without checks.
    with torch.sparse.check_sparse_tensor_invariants():
        Body(seed, None, 0, size, [], {}, calls=20).begin_and_end()
        expected, runs = outcome(None)
        reset()
        with distributed_autograd.context() as context_id:
            Body(seed, context_id, 0, size, [], {}, calls=20).begin_and_end()
            for gradients, counted in everywhere(outcome, context_id):
                found.update(gradients)
                runs_there.update(counted)
            assert everywhere(own_gradients, None) == [{}] * 4, "there are gradients in .grad"
    assert found.keys() == expected.keys(), seed
    for key, gradient in expected.items():
        assert found[key].layout == gradient.layout, (seed, key)
        values = found[key].to_dense(), gradient.to_dense()
        assert torch.allclose(*values, rtol=1e-9, atol=1e-9), (seed, key, values)
    assert runs_there == runs, seed
    expect_clean_everywhere()
    everywhere(reset)


@pytest.fixture
def programs(repeats: Callable[..., int]) -> int:
    return repeats(quick=40, long=1000)


@pytest.mark.on_worker0
def test_random_programs(programs: int) -> None:
    for seed in range(programs):
        compare(seed)
