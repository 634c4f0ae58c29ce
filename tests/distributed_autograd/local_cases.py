"""Programs over workers, which run here without them too: ordinary autograd is the oracle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import distributed_autograd
from dataparallel.distributed_autograd.local_workers import LocalWorkers

Program = Callable[[Sequence[nn.Module], Tensor], list[Tensor]]

_alone: ContextVar[bool] = ContextVar("alone", default=False)

#: Seconds that a test waits for something that another thread does.
PATIENCE = 20.0
NAMES = ("main", "worker0", "worker1", "worker2", "worker3")


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, on a worker unless the oracle runs it."""
    if _alone.get():
        return function(*args)
    return distributed_autograd.rpc_sync(to, function, args=args)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within the block, :func:`call` calls."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def make_modules(places: Sequence[str]) -> list[nn.Module]:
    """A layer for each place; calls give modules to workers by reference."""
    return [nn.Linear(3, 3, dtype=torch.float64).to(place) for place in places]


def expected_gradients(
    program: Program, modules: Sequence[nn.Module], x: Tensor
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of the parameters and ``x``, and the roots, by ordinary autograd."""
    leaves = [*parameters(modules), x]
    with alone():
        roots = program(modules, x)
    gradients = torch.autograd.grad(sum_of(roots), leaves, allow_unused=True)
    return [*gradients], [root.detach() for root in roots]


def sum_of(roots: Sequence[Tensor]) -> Tensor:
    """The sum of scalars that may be on several devices."""
    total = torch.zeros((), dtype=torch.float64)
    for root in roots:
        total = total + root.cpu()
    return total


def parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """All parameters, each once."""
    found = [parameter for module in modules for parameter in module.parameters()]
    return list({id(parameter): parameter for parameter in found}.values())


class Leaves:
    """Tensors that go to workers by reference: a list would be copied."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors


def part_of(context_id: int, leaves: Leaves) -> list[Tensor | None]:
    """What the context has for each leaf at the worker where this is called."""
    try:
        gradients = distributed_autograd.get_gradients(context_id)
    except ValueError:
        return [None for _ in leaves.tensors]
    return [gradients.get(leaf) for leaf in leaves.tensors]


def gradients_of(
    context_id: int, leaves: Leaves, names: Sequence[str] = NAMES
) -> list[Tensor | None]:
    """The gradient of each leaf, summed over the workers."""
    parts = [distributed_autograd.rpc_sync(name, part_of, (context_id, leaves)) for name in names]
    total: list[Tensor | None] = []
    for leaf, *of_leaf in zip(leaves.tensors, *parts, strict=True):
        there = [part.to(leaf.device).to_dense() for part in of_leaf if part is not None]
        total.append(torch.stack(there).sum(0) if there else None)
    return total


def compare(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Check that gradients are the same, and missing where they are missing there."""
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None), (mine, theirs)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs.to_dense(), rtol=1e-6, atol=1e-9)


def check(
    program: Program, places: Sequence[str], modules: Sequence[nn.Module] | None = None
) -> None:
    """Run a program over four workers and compare with ordinary autograd."""
    modules = make_modules(places) if modules is None else modules
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    expected, expected_roots = expected_gradients(program, modules, x)
    leaves = Leaves([*parameters(modules), x])
    with LocalWorkers(places, timeout=PATIENCE) as workers:
        with distributed_autograd.context() as context_id:
            roots = program(modules, x)
            for root, wanted in zip(roots, expected_roots, strict=True):
                torch.testing.assert_close(root.detach(), wanted.to(root.device))
            distributed_autograd.backward(context_id, roots)
            compare(gradients_of(context_id, leaves), expected)
        assert all(leaf.grad is None for leaf in leaves.tensors)
        expect_clean(workers)


def expect_clean(workers: LocalWorkers) -> None:
    """Nothing is under way at any worker, and no context is left."""

    def left() -> dict[str, dict[str, int]]:
        return {
            name: distributed_autograd.rpc_sync(name, distributed_autograd.debug_info)
            for name in workers.names
        }

    until(lambda: not any(count for counts in left().values() for count in counts.values()), left)


def until(condition: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    """Wait until something is so.

    Raises:
        AssertionError: It did not become so; with what ``what`` returns.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.002)
