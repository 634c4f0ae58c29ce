"""Errors of distributed optimizers, in processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from dataparallel.distributed_autograd.optimizer import DistributedOptimizer
from dataparallel.distributed_autograd.references import RRef, remote
from tests.distributed_autograd.optimizer_scenarios import (
    OWNERS,
    Model,
    Part,
    close,
    leaf,
    trained_in_one_process,
)


class Failing(torch.optim.SGD):
    """Fails where, and as long as, it is told to."""

    broken: bool = False

    def step(self, closure: Any = None) -> Any:
        if Failing.broken:
            raise ArithmeticError(f"broken, {self.param_groups[0]['params'][0].grad}")
        return super().step(closure)


def set_broken(broken: bool) -> None:
    Failing.broken = broken


def errors_of_steps_name_their_workers() -> None:
    model = Model()
    optimizer = DistributedOptimizer(Failing, model.parameters(), lr=0.1)
    for owner in OWNERS:
        rpc_sync(owner, set_broken, (True,))
    with context() as context_id:
        backward(context_id, [model.loss(0)])
        with pytest.raises(RuntimeError, match=r"(?s)worker 'worker1': .*worker 'worker2': "):
            optimizer.step(context_id)
        rpc_sync("worker1", set_broken, (False,))
        with pytest.raises(RuntimeError, match=r"(?s)^step\(\) .* failed on worker 'worker2'"):
            optimizer.step(context_id)
        rpc_sync("worker2", set_broken, (False,))
    model = Model()
    model.train(DistributedOptimizer(Failing, model.parameters(), lr=0.1))
    close(model.values(), trained_in_one_process(torch.optim.SGD, {"lr": 0.1}))
    assert model.here.grads() == [None, None]


def error_of_a_step_leaves_nothing() -> None:
    rref = remote("worker1", leaf)
    optimizer = DistributedOptimizer(Failing, [rref], lr=1.0)
    rpc_sync("worker1", set_broken, (True,))
    with context() as context_id:
        backward(context_id, [rref.to_here().sum()])
        with pytest.raises(RuntimeError, match=r"broken, tensor\(\[1\., 1\., 1\.\]\)"):
            optimizer.step(context_id)
    rpc_sync("worker1", set_broken, (False,))
    with context() as context_id:
        remote("worker1", torch.sin, (leaf(),)).to_here()
        optimizer.step(context_id)
    assert rref.to_here().equal(torch.ones(3))


def bad_input() -> None:
    rrefs: Any = [remote(owner, leaf) for owner in OWNERS]
    sgd: Any = torch.optim.SGD
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"no parameters", lambda: DistributedOptimizer(sgd, [])),
        (TypeError, r"write \[rref\]", lambda: DistributedOptimizer(sgd, rrefs[0])),
        (TypeError, r"type int: it must be an RRef", lambda: DistributedOptimizer(sgd, [3])),
        (
            TypeError,
            r"can only optimize Tensors",
            lambda: DistributedOptimizer(sgd, [RRef(Part(0))]),
        ),
        (
            ValueError,
            r"can't optimize a non-leaf Tensor",
            lambda: DistributedOptimizer(sgd, [RRef(leaf() * 2)]),
        ),
        (
            ValueError,
            r"(?s)could not be made on worker 'worker1': .*Invalid.*on worker 'worker2': .*Invalid",
            lambda: DistributedOptimizer(sgd, rrefs, lr=-1.0),
        ),
        (
            ValueError,
            r"no distributed autograd context 12345",
            lambda: DistributedOptimizer(sgd, rrefs).step(12345),
        ),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    with context() as context_id:
        optimizer = DistributedOptimizer(sgd, rrefs)
        backward(context_id, [rrefs[0].to_here().sum()])
        optimizer.step(context_id)
        assert not get_gradients(context_id)


ERRORS = (
    errors_of_steps_name_their_workers,
    error_of_a_step_leaves_nothing,
    bad_input,
)
