"""Gradients over workers are those of one process: shapes, types, memory and objects.

Beside this, random programs go through chains of calls, state on workers, hooks, changes in place,
sparse gradients, undefined ones and checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.distributed_autograd import backward, context, rpc_sync
from tests.distributed_autograd.rpc_workers import (
    everywhere,
    forget,
    leaf,
    own_gradients,
)

#: ``call(function, *args, **kwargs)`` runs a function here, or on another worker.
Call = Callable[..., Any]
#: Makes calls and returns the roots.
Case = Callable[[Call], Sequence[Tensor]]


def here(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    return function(*args, **kwargs)


def there(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    return rpc_sync("worker1", function, args, kwargs)


def scaled(x: Tensor) -> Tensor:
    return torch.tanh(x * leaf("scale"))


# --- what tensors are ----------------------------------------------------------------------------


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
    back = call(as_they_are, *sent)
    assert [tensor.shape for tensor in back] == [tensor.shape for tensor in sent]
    return [(tensor * (index + 1)).sin().sum() for index, tensor in enumerate(back)]


def of_several_types(call: Call) -> list[Tensor]:
    x = leaf("x")
    sent = [x, x.float(), x.to(torch.complex128), x.half(), x.bfloat16(), x.to(torch.complex64)]
    back = call(as_they_are, *sent)
    assert [tensor.dtype for tensor in back] == [tensor.dtype for tensor in sent]
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in back]
    return [tensor.double().square().sum() for tensor in real]


def without_gradients(call: Call) -> list[Tensor]:
    sent = [
        torch.tensor([True, False, True]),
        torch.arange(3),
        torch.tensor(2.5),
        torch.empty(0),
        torch.tensor([1], dtype=torch.uint8),
        torch.tensor(1j),
    ]
    back = call(as_they_are, *sent)
    for before, after in zip(sent, back, strict=True):
        assert after.dtype == before.dtype and torch.equal(after, before)
        assert not after.requires_grad
    return [(leaf("x") * back[0] * back[1]).sum()]


def multiplied(matrix: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.sparse.mm(matrix, x)
    return out


def sparse_argument(call: Call) -> list[Tensor]:
    values = leaf("values")
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    with torch.sparse.check_sparse_tensor_invariants():
        matrix = torch.sparse_coo_tensor(indices, values, (3, 3))
    return [call(multiplied, matrix.coalesce(), torch.eye(3).double()).pow(2).sum()]


def after_it_was_sent(call: Call) -> list[Tensor]:
    """The change belongs to the sender: what was sent is what it was."""
    x = leaf("x") * 1.0
    y = call(torch.add, x, leaf("y"))
    x.mul_(2)
    return [(y * y + x).sum(), call(scaled, x).prod()]


def used_and_changed(x: Tensor, y: Tensor) -> list[Tensor]:
    kept = y * leaf("w")
    x.mul_(1.5)
    return [kept, x]


def two_of_one_memory(call: Call) -> list[Tensor]:
    """The receiver changes one of them in place; the other was saved for backward."""
    x = leaf("x") * 1.0
    # In one process they would be one memory.
    other = x.detach().clone() if call is here else x.detach()
    kept, changed = call(used_and_changed, x, other)
    return [kept.sum(), (changed * leaf("y")).sum()]


# --- objects of all kinds ------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


class Reduced:
    """Pickled by a function of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.doubled = tensor * 2

    def __reduce__(self) -> Any:
        return Reduced, (self.tensor,)


def regrouped(pair: Pair, /, *rest: Any, scale: float, **named: Any) -> dict[str, Any]:
    return {
        "pair": Pair(pair.second[0] * scale, [pair.first, (rest[0]["deep"][0][1],)]),
        "reduced": Reduced(named["reduced"].doubled),
        "ordered": OrderedDict(a=named["many"][0], b=None, c="text", d=[1, 2.5, True]),
    }


def containers(call: Call) -> list[Tensor]:
    x, y, z = leaf("x"), leaf("y"), leaf("z", 2, 2)
    rest = {"deep": [(0, y), {"set": {1, 2}}]}
    named: dict[str, Any] = {"reduced": Reduced(x * y), "many": [z * i for i in range(1, 5)]}
    answer = call(regrouped, Pair(x * 1.0, [z]), rest, scale=3.0, **named)
    assert answer["ordered"]["d"] == [1, 2.5, True]
    second, (first, (inputs,)) = answer["pair"]
    sums = second.sum() + first.prod() + inputs.sin().sum() + answer["ordered"]["a"].sum()
    return [sums, answer["reduced"].doubled.exp().sum()]


CASES: list[Case] = [
    shapes_and_layouts,
    of_several_types,
    without_gradients,
    sparse_argument,
    after_it_was_sent,
    two_of_one_memory,
    containers,
]


@pytest.mark.on_worker0
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: Case) -> None:
    """Both workers together have the gradients that one process computes."""
    wanted = case(here)
    torch.autograd.backward(list(wanted))
    expected = own_gradients(None)
    everywhere(forget)
    with context() as context_id:
        roots = case(there)
        backward(context_id, roots)
        found = own_gradients(context_id) | rpc_sync("worker1", own_gradients, (context_id,))
        assert everywhere(own_gradients, None) == [{}] * 4, "there are gradients in .grad"
    assert found.keys() == expected.keys()
    pairs = [(found[name], expected[name]) for name in found]
    for actual, value in (*pairs, *zip(roots, wanted, strict=True)):
        torch.testing.assert_close(actual.detach(), value.detach(), rtol=1e-9, atol=1e-9)
