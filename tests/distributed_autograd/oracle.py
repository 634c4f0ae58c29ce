"""The same computation over workers, over torch's own distributed autograd, and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import backward, context, rpc_sync
from tests.distributed_autograd.rpc_workers import everywhere, forget, own_gradients

# Whatever torch imports there, mypy takes for private.
torch_autograd: Any = torch.distributed.autograd

#: ``call(to, function, *args)`` runs a function somewhere. A function that makes calls itself gets
#: it as an argument, so that the same code runs in all three ways.
Call = Callable[..., Any]
#: Makes calls and returns the roots.
Case = Callable[[Call], Sequence[Tensor]]

TOLERANCE = 1e-9


def here(to: str, function: Callable[..., Any], *args: object) -> Any:
    """Not over workers at all."""
    return function(*args)


def ours(to: str, function: Callable[..., Any], *args: object) -> Any:
    return rpc_sync(to, function, args)


def theirs(to: str, function: Callable[..., Any], *args: object) -> Any:
    return torch_rpc.rpc_sync(to, function, args)


def total(gradients: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum over workers, by name."""
    sums: dict[str, Tensor] = {}
    for found in gradients:
        for name, gradient in found.items():
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            sums[name] = sums[name] + dense if name in sums else dense.clone()
    return sums


def in_one_process(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The values of the roots and all gradients, by ordinary autograd."""
    forget()
    roots = case(here)
    torch.autograd.backward(list(roots))
    expected = total([own_gradients(None)])
    forget()
    return [root.detach() for root in roots], expected


def expect_equal(
    roots: Sequence[Tensor], gradients: dict[str, Tensor], expected: tuple[Any, ...]
) -> None:
    """Compare roots and gradients by name."""
    values, by_name = expected
    for root, value in zip(roots, values, strict=True):
        torch.testing.assert_close(root.detach(), value, rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients.keys() == by_name.keys()
    torch.testing.assert_close(gradients, by_name, rtol=TOLERANCE, atol=TOLERANCE)


def compare(case: Case, torch_too: bool = True) -> None:
    """Expect of all workers together the gradients that one process computes.

    Args:
        case: The computation.
        torch_too: Whether torch's own distributed autograd can do it, too.
    """
    expected = in_one_process(case)
    everywhere(forget)
    with context() as context_id:
        roots = case(ours)
        backward(context_id, roots)
        found = total(everywhere(own_gradients, context_id))
        expect_equal(roots, found, expected)
        assert not total(everywhere(own_gradients, None)), "there are gradients in .grad"
    everywhere(forget)
    if torch_too:
        with torch_autograd.context() as context_id:
            roots = case(theirs)
            torch_autograd.backward(context_id, list(roots))
            expect_equal(roots, total(everywhere(own_gradients, context_id, True)), expected)
        everywhere(forget)
