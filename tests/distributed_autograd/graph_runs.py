"""Runs random distributed programs: in one process with ordinary autograd, or over workers."""

from __future__ import annotations

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
from tests.distributed_autograd import random_graphs as graphs
from tests.distributed_autograd.random_graphs import Body, Program

#: Seconds that a call or a backward pass may take.
LIMIT = 30.0


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(weight @ x)


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(0.8).add_(0.1)
    return y.sin_()


def _in_place_slice(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[1:].add_(y[:2])
    return z


def _no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 0.5


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


COMPUTATIONS: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "tanh": torch.tanh,
    "linear": _linear,
    "residual": lambda x: x + torch.sin(x),
    "in_place": _in_place,
    "in_place_mul": lambda x, y: x.clone().mul_(y),
    "in_place_slice": _in_place_slice,
    "view": lambda x: x.view(1, 3).transpose(0, 1)[:, 0],
    "column": lambda x: torch.stack([x, x.cos()], 1)[:, 1],
    "split": lambda x: torch.cat(x.split([1, 2])[::-1]),
    "gate": lambda x, ids: x * (ids + 1) * 0.5,
    "lookup": lambda table, ids: functional.embedding(ids, table, sparse=True).sum(0),
    "mean": lambda table: table.mean(0),
    "checkpoint": lambda x, weight: checkpoint(_linear, x, weight, use_reentrant=False),
    "hooked": _hooked,
    "undefined": _Undefined.apply,
    "detach": lambda x: x.detach(),
    "no_grad": _no_grad,
}


@dataclass
class Worker:
    """What one worker keeps between calls.

    Args:
        leaves: Its parameters and constants.
        slots: What calls have stored.
        runs: How often the backward of each `Counted` ran here.
    """

    leaves: dict[str, Tensor]
    slots: dict[int, Tensor] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)


@dataclass
class Outcome:
    """What a program left: gradients by worker and name, and how often which function ran."""

    gradients: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)


#: The workers in this process by number: one, or all of them.
_workers: dict[int, Worker] = {}
_counting = threading.Lock()


class _Count(torch.autograd.Function):
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


def begin(number: int) -> None:
    """Make a worker anew, for another program."""
    generator = torch.Generator().manual_seed(number)
    leaves = {}
    for name, (kind, grad) in graphs.LEAVES.items():
        shape = {"vector": (3,), "matrix": (3, 3), "table": (6, 3)}[kind]
        values = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        leaves[name] = values.requires_grad_(grad)
    worker = Worker(leaves)
    leaves["gain"].register_hook(_halved)
    _workers[number] = worker


def serve(context_id: int | None, worker: int, body: Body, values: list[Tensor]) -> list[Tensor]:
    """Run a body on the worker that this code runs on; without a context in ordinary autograd."""
    here = _workers[worker]
    running: dict[int, Callable[[], list[Tensor]]] = {}
    for step in body.steps:
        match step:
            case graphs.Leaf(name):
                values.append(here.leaves[name])
            case graphs.Ids(first):
                values.append(torch.arange(first, first + 3))
            case graphs.Compute(kind, operands):
                values.append(COMPUTATIONS[kind](*(values[operand] for operand in operands)))
            case graphs.Counted(operand, number):
                values.append(_Count.apply(values[operand], number, here.runs))
            case graphs.Overwrite(operand):
                values[operand].mul_(1.5)
            case graphs.Store(slot, operand):
                here.slots[slot] = values[operand]
            case graphs.Load(slot):
                values.append(here.slots[slot])
            case graphs.Call(to, operands, inner, handle, remote):
                sent = [values[operand] for operand in operands]
                if context_id is None:
                    results = _call_directly(worker, to, inner, sent, remote)
                else:
                    results = _call(context_id, to, inner, sent, remote)
                if handle is None:
                    values += results()
                else:
                    running[handle] = results
            case graphs.Wait(handle):
                values += running.pop(handle)()
            case graphs.Backward(roots, retain_graph):
                _backward(context_id, [values[root] for root in roots], retain_graph)
    return [values[result] for result in body.results]


def _call(
    context_id: int, to: int, body: Body, values: list[Tensor], remote: bool
) -> Callable[[], list[Tensor]]:
    """Start a call; what is returned waits for it."""
    arguments = (context_id, to, body, values)
    if remote:
        return distributed_autograd.remote(_name(to), serve, arguments, timeout=LIMIT).to_here
    return distributed_autograd.rpc_async(_name(to), serve, arguments, timeout=LIMIT).wait


def _call_directly(
    worker: int, to: int, body: Body, values: list[Tensor], remote: bool
) -> Callable[[], list[Tensor]]:
    """The same in one process."""
    results = serve(None, to, body, _copies(values))
    if not remote or to != worker:
        results = _copies(results)
    return lambda: results


def _copies(values: list[Tensor]) -> list[Tensor]:
    """As the receiver of a message gets them: one tensor for one tensor, in memory of its own."""
    copies = {id(value): value.clone() for value in values}
    return [copies[id(value)] for value in values]


def _backward(context_id: int | None, values: list[Tensor], retain_graph: bool) -> None:
    roots = [value.square().sum() for value in values]
    if context_id is None:
        torch.autograd.backward(roots, retain_graph=retain_graph)
    else:
        distributed_autograd.backward(context_id, roots, retain_graph, timeout=LIMIT)


def run_alone(program: Program) -> Outcome:
    """The program in this process, with ordinary autograd."""
    _workers.clear()
    for number in range(program.workers):
        begin(number)
    serve(None, 0, program.main, [])
    outcome = Outcome()
    for number, worker in _workers.items():
        for name, leaf in worker.leaves.items():
            if leaf.grad is not None:
                outcome.gradients[number, name] = leaf.grad
        outcome.runs.update(worker.runs)
    return outcome


def run_on_workers(program: Program) -> Outcome:
    """The program on ``worker0``, which is here, and others with such names."""
    workers = range(program.workers)
    for number in workers:
        distributed_autograd.rpc_sync(_name(number), begin, (number,))
    outcome = Outcome()
    with distributed_autograd.context() as context_id:
        serve(context_id, 0, program.main, [])
        for number in workers:
            part = torch_rpc.rpc_sync(_name(number), _collect, (context_id, number))
            outcome.gradients.update(part.gradients)
            outcome.runs.update(part.runs)
    return outcome


def _name(number: int) -> str:
    return f"worker{number}"


def _collect(context_id: int, number: int) -> Outcome:
    """What the context and the counters have on the worker that this code runs on."""
    try:
        found = distributed_autograd.get_gradients(context_id)
    except ValueError as error:
        # No call came here.
        assert "has no distributed autograd context" in str(error), error
        found = {}
    worker = _workers[number]
    names = {leaf: (number, name) for name, leaf in worker.leaves.items()}
    touched = [name for leaf, name in names.items() if leaf.grad is not None]
    assert not touched, f"{touched} have a gradient in .grad"
    gradients = {names[leaf]: gradient for leaf, gradient in found.items()}
    with _counting:
        return Outcome(gradients, Counter(worker.runs))


def compare(outcome: Outcome, expected: Outcome) -> None:
    """Gradients and runs are those of ordinary autograd.

    Raises:
        AssertionError: They are not.
    """
    found, wanted = outcome.gradients, expected.gradients
    lacking, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    assert not lacking, f"without gradient, but should have one: {lacking}"
    assert not extra, f"with gradient, but should have none: {extra}"
    for key, gradient in wanted.items():
        layouts = (found[key].layout, gradient.layout)
        assert layouts[0] == layouts[1], f"{key} has the layouts {layouts}"
        values = found[key].to_dense(), gradient.to_dense()
        close = torch.allclose(*values, rtol=1e-9, atol=1e-9)
        assert close, f"the gradient of {key} is {values[0]} and should be {values[1]}"
    runs = {number: (outcome.runs[number], times) for number, times in expected.runs.items()}
    differ = {number: both for number, both in runs.items() if both[0] != both[1]}
    assert outcome.runs == expected.runs, f"ran, and should have run: {differ}, all: {outcome.runs}"
