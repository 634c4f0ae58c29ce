"""Optimizers of parameters that belong to several workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import (
    DistributedOptimizer,
    RRef,
    backward,
    context,
    get_gradients,
    remote,
    rpc_sync,
)
from tests.distributed_autograd.rpc_workers import (
    everywhere,
    leaf,
    note,
    own_gradients,
    take_notes,
)

pytestmark = pytest.mark.on_worker0

OWNERS = ("worker0", "worker1", "worker1", "worker2")
STEPS = 4


def parameters(make: Callable[..., Any] = remote) -> list[Any]:
    """References to parameters, which begin with the same values at all of their workers."""
    return [make(owner, leaf, (f"leaf {i}",)) for i, owner in enumerate(OWNERS)]


def loss_of(values: Sequence[Tensor], step: int) -> Tensor:
    a, b, c, d = values
    x = torch.linspace(-1, step, 3, dtype=torch.float64)
    return (torch.tanh(a * x + b) * c + d).square().sum()


def train(optimizer: DistributedOptimizer, references: Sequence[Any], steps: range) -> None:
    for step in steps:
        with context() as context_id:
            values = [rpc_sync(each.owner(), value_of, (each,)) for each in references]
            backward(context_id, [loss_of(values, step)])
            optimizer.step(context_id)


def value_of(reference: Any) -> Tensor:
    value: Tensor = reference.local_value()
    return value


def values_of(references: Sequence[Any]) -> list[Tensor]:
    return [reference.to_here().detach() for reference in references]


def change_outside() -> None:
    """Set ``.grad``, and move the parameters to other memory."""
    for i in range(len(OWNERS)):
        parameter = leaf(f"leaf {i}")
        parameter.grad = torch.full_like(parameter, 7.0)
        parameter.data = parameter.data.clone()


# --- training ------------------------------------------------------------------------------------


def two_groups(members: list[Any]) -> list[dict[str, Any]]:
    return [{"params": members[::2], "lr": 0.1}, {"params": members[1::2]}]


@pytest.mark.parametrize(
    ("kind", "options", "group"),
    [
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}, two_groups),
        (torch.optim.Adam, {"lr": 0.05}, list),
    ],
)
@pytest.mark.parametrize("make", [remote, torch_rpc.remote])
def test_it_trains_as_in_one_process(kind: Any, options: Any, group: Any, make: Any) -> None:
    """By references of this package or of torch, and ``.grad`` stays as it is."""
    references = parameters(make)
    alone = [value.clone().requires_grad_() for value in values_of(references)]
    expected = kind(group(alone), **options)
    for step in range(STEPS):
        expected.zero_grad()
        loss_of(alone, step).backward()
        expected.step()
    # Parameters of this worker need no reference.
    members = [leaf("leaf 0"), *references[1:]]
    optimizer = DistributedOptimizer(kind, group(members), **options)
    train(optimizer, references, range(2))
    everywhere(change_outside)
    train(optimizer, references, range(2, STEPS))
    torch.testing.assert_close(values_of(references), [value.detach() for value in alone])
    for found in everywhere(own_gradients, None):
        assert all((gradient == 7).all() for gradient in found.values())


def test_it_leaves_alone_what_has_no_gradient() -> None:
    """It would else change by momentum."""
    references = parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1, momentum=0.9)
    train(optimizer, references, range(1))
    before = values_of(references)
    with context() as context_id:
        backward(context_id, [references[1].to_here().sum()])
        optimizer.step(context_id)
        assert not get_gradients(context_id)
    assert list(map(torch.equal, before, values_of(references))) == [True, False, True, True]


# --- several at once -----------------------------------------------------------------------------


class Alone(torch.optim.SGD):
    """Fails if two steps overlap; a step takes long enough for that."""

    inside = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        if not Alone.inside.acquire(blocking=False):
            raise AssertionError("two steps at once")
        try:
            time.sleep(0.005)
            return super().step(closure)
        finally:
            Alone.inside.release()


def test_threads_and_optimizers_take_turns() -> None:
    """The sum of all gradients arrives, whatever the order: one step is one subtraction."""
    shared = parameters()[1:]
    before = values_of(shared)
    optimizers = [DistributedOptimizer(Alone, shared, lr=1.0) for _ in range(2)]

    def run(number: int) -> None:
        for _ in range(6):
            with context() as context_id:
                loss = sum((rref.to_here() * (number + 1)).sum() for rref in shared)
                backward(context_id, [loss])
                optimizers[number % 2].step(context_id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4), timeout=50))
    expected = [value - 6 * (1 + 2 + 3 + 4) for value in before]
    torch.testing.assert_close(values_of(shared), expected)


# --- errors --------------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    """Fails on workers that have noted so."""

    def step(self, closure: Any = None) -> Any:
        if "broken" in take_notes():
            raise ArithmeticError(f"broken, {self.param_groups[0]['params'][0].grad}")
        return super().step(closure)


def test_errors_of_steps_name_their_workers() -> None:
    references = parameters()
    optimizer = DistributedOptimizer(Failing, references, lr=0.1)
    second = r"worker 'worker2': .*ArithmeticError: broken, tensor"
    for owners, text in (
        (["worker1", "worker2"], rf"(?s)^step\(\) .* failed on worker 'worker1': .*on {second}"),
        (["worker2"], rf"(?s)^step\(\) .* failed on {second}"),
    ):
        for owner in owners:
            rpc_sync(owner, note, ("broken",))
        with pytest.raises(RuntimeError, match=text):
            train(optimizer, references, range(1))
    assert everywhere(own_gradients, None) == [{}] * 4
    train(optimizer, references, range(1))


def test_bad_input() -> None:
    references: Any = parameters()[1:]
    sgd: Any = torch.optim.SGD
    failed_on_both = r"(?s)could not be made on worker 'worker1': .*Inv.*on worker 'worker2': .*Inv"
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"no parameters", lambda: DistributedOptimizer(sgd, [])),
        (TypeError, r"write \[rref\]", lambda: DistributedOptimizer(sgd, references[0])),
        (TypeError, r"type int: it must be an RRef", lambda: DistributedOptimizer(sgd, [3])),
        (TypeError, "optimize Tensors", lambda: DistributedOptimizer(sgd, [RRef(sgd)])),
        (ValueError, "a non-leaf", lambda: DistributedOptimizer(sgd, [RRef(leaf("w") * 2)])),
        (ValueError, failed_on_both, lambda: DistributedOptimizer(sgd, references, lr=-1.0)),
        (ValueError, "context 12345", lambda: DistributedOptimizer(sgd, references).step(12345)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
