"""Optimizers of parameters that belong to several workers."""

from __future__ import annotations

import functools
import importlib
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.autograd as torch_autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn

from dataparallel.distributed_autograd import (
    DistributedOptimizer,
    RRef,
    backward,
    context,
    get_gradients,
    remote,
    rpc_sync,
)
from tests.distributed_autograd.rpc_workers import World, note, take_notes

OWNERS = ("worker1", "worker2")
STEPS = 4

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "foreach": False}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}


class Part:
    """A layer of the model, on the worker that owns it."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(4, 4)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def rrefs(self, kind: Any = RRef) -> list[Any]:
        return [kind(parameter) for parameter in self.layer.parameters()]

    def torchs_rrefs(self) -> list[Any]:
        return self.rrefs(torch_rpc.RRef)

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.layer.parameters()]

    def set_grads(self, value: float) -> None:
        for parameter in self.layer.parameters():
            parameter.grad = torch.full_like(parameter, value)

    def grads(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.layer.parameters()]

    def use_other_memory(self) -> None:
        for parameter in self.layer.parameters():
            parameter.data = parameter.data.clone()


def inputs(step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 + step))


Group = Callable[[list[Any]], Any]


def trained_in_one_process(kind: Any, options: dict[str, Any], group: Group = list) -> list[Any]:
    parts = [Part(seed) for seed in range(3)]
    optimizer = kind(group([p for part in parts for p in part.layer.parameters()]), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        functools.reduce(lambda x, part: part.forward(x), parts, inputs(step)).sum().backward()
        optimizer.step()
    return [part.values() for part in parts]


class Model:
    """Three layers: of this worker and of the two owners."""

    def __init__(self) -> None:
        self.here = Part(0)
        self.there = [remote(owner, Part, (seed,)) for seed, owner in enumerate(OWNERS, start=1)]

    def parameters(self, method: str = "rrefs") -> list[Any]:
        rrefs = [getattr(part.rpc_sync(), method)() for part in self.there]
        return [*self.here.layer.parameters(), *rrefs[0], *rrefs[1]]

    def train(self, optimizer: DistributedOptimizer, steps: Any = range(STEPS)) -> None:
        for step in steps:
            with context() as context_id:
                x = self.here.forward(inputs(step))
                for part in self.there:
                    x = part.rpc_sync().forward(x)
                backward(context_id, [x.sum()])
                optimizer.step(context_id)

    def on_all(self, method: str, *args: Any) -> list[Any]:
        rest = [getattr(part.rpc_sync(), method)(*args) for part in self.there]
        return [getattr(self.here, method)(*args), *rest]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


# --- training ------------------------------------------------------------------------------------


def trains_as_in_one_process() -> None:
    """By references of this package or of torch, after a step that failed, with `.grad` set."""
    for kind, options in OPTIMIZERS.values():
        for method in ("rrefs", "torchs_rrefs"):
            model = Model()
            optimizer = DistributedOptimizer(kind, model.parameters(method), **options)
            model.on_all("set_grads", 7.0)
            model.train(optimizer, range(2))
            model.on_all("use_other_memory")
            model.train(optimizer, range(2, STEPS))
            close(model.on_all("values"), trained_in_one_process(kind, options))
            for grads in model.on_all("grads"):
                assert all(grad is not None and (grad == 7).all() for grad in grads)


class Plain(torch.optim.Adagrad):
    """One that torch's optimizer does not compile, which would warn."""


def import_torchs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.distributed.optim")


def trains_as_torchs() -> None:
    kind, options = Plain, {"lr": 0.1}
    model = Model()
    model.train(DistributedOptimizer(kind, model.parameters(), **options))
    parts = [torch_rpc.remote(owner, Part, (seed,)) for seed, owner in enumerate(OWNERS, start=1)]
    here = Part(0)
    rrefs = [rref for part in parts for rref in part.rpc_sync().torchs_rrefs()]
    for owner in OWNERS:
        torch_rpc.rpc_sync(owner, import_torchs)
    import_torchs()
    from torch.distributed.optim import DistributedOptimizer as TorchDistributedOptimizer

    theirs = TorchDistributedOptimizer(kind, [*here.torchs_rrefs(), *rrefs], **options)
    for step in range(STEPS):
        with torch_autograd.context() as context_id:
            x = here.forward(inputs(step))
            for part in parts:
                x = part.rpc_sync().forward(x)
            torch_autograd.backward(context_id, [x.sum()])  # type: ignore[attr-defined]
            theirs.step(context_id)
    close(model.on_all("values"), [here.values(), *(part.rpc_sync().values() for part in parts)])


def two_groups(parameters: list[Any]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2]}]


def groups_have_their_options() -> None:
    model = Model()
    groups = two_groups(model.parameters())
    model.train(DistributedOptimizer(torch.optim.SGD, groups, lr=0.01))
    expected = trained_in_one_process(torch.optim.SGD, {"lr": 0.01}, two_groups)
    close(model.on_all("values"), expected)


def continues_from_a_state() -> None:
    kind, options = OPTIMIZERS["adam"]
    model = Model()
    first = DistributedOptimizer(kind, model.parameters(), **options)
    model.train(first, range(2))
    state = first.state_dict()
    assert set(state) == {"worker0", *OWNERS}
    second = DistributedOptimizer(kind, model.parameters(), lr=9.0)
    second.load_state_dict(state)
    model.train(second, range(2, STEPS))
    close(model.on_all("values"), trained_in_one_process(kind, options))
    other = DistributedOptimizer(kind, [leaf()])
    with pytest.raises(ValueError, match=r"for the workers .*worker1.* belong to \['worker0'\]"):
        other.load_state_dict(state)


def embedding_rows(weight: RRef[Tensor], indices: Tensor) -> Tensor:
    return nn.functional.embedding(indices, weight.local_value(), sparse=True)


def table() -> Tensor:
    return torch.arange(20.0).reshape(5, 4).requires_grad_()


def sparse_gradients() -> None:
    kinds: tuple[Any, ...] = (torch.optim.SparseAdam, torch.optim.SGD)
    for kind in kinds:
        weight, alone = remote("worker1", table), table()
        optimizer, expected = DistributedOptimizer(kind, [weight], lr=0.1), kind([alone], lr=0.1)
        for step in range(STEPS):
            indices = torch.tensor([0, step % 5, step % 5])
            with context() as context_id:
                rows = rpc_sync("worker1", embedding_rows, (weight, indices))
                backward(context_id, [rows.sin().sum()])
                optimizer.step(context_id)
            expected.zero_grad()
            nn.functional.embedding(indices, alone, sparse=True).sin().sum().backward()
            assert alone.grad is not None and alone.grad.is_sparse
            expected.step()
        close(weight.to_here(), alone)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def leaves_alone_what_has_no_gradient() -> None:
    used, idle = remote("worker1", leaf), remote("worker1", leaf)
    absent = remote("worker2", leaf)
    kind, options = OPTIMIZERS["sgd"]
    optimizer = DistributedOptimizer(kind, [used, idle, absent], **options)
    for rrefs in ([used, idle, absent], [used]):
        with context() as context_id:
            backward(context_id, [sum(rref.to_here().sum() for rref in rrefs)])
            before = [rref.to_here().detach() for rref in (used, idle, absent)]
            optimizer.step(context_id)
    same = [
        rref.to_here().equal(old) for rref, old in zip((used, idle, absent), before, strict=True)
    ]
    assert same == [False, True, True]


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


def threads_and_optimizers_take_turns() -> None:
    """The sum of all gradients arrives, whatever the order: one step is one subtraction."""
    shared = [remote(owner, leaf) for owner in OWNERS]
    optimizers = [DistributedOptimizer(Alone, shared, lr=1.0) for _ in range(2)]

    def train(number: int) -> None:
        for _ in range(6):
            with context() as context_id:
                loss = sum((rref.to_here() * (number + 1)).sum() for rref in shared)
                backward(context_id, [loss])
                optimizers[number % 2].step(context_id)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(train, number) for number in range(4)]:
            future.result(50)
    for rref in shared:
        close(rref.to_here().detach(), torch.full((3,), 1.0 - 6 * (1 + 2 + 3 + 4)))


# --- errors --------------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    """Fails on workers that have noted so."""

    def step(self, closure: Any = None) -> Any:
        if "broken" in take_notes():
            raise ArithmeticError(f"broken, {self.param_groups[0]['params'][0].grad}")
        return super().step(closure)


def errors_of_steps_name_their_workers() -> None:
    model = Model()
    optimizer = DistributedOptimizer(Failing, model.parameters(), lr=0.1)
    for owners, text in (
        (OWNERS, r"(?s)^step\(\) .* failed on worker 'worker1': .*on worker 'worker2': "),
        (
            OWNERS[1:],
            r"(?s)^step\(\) .* failed on worker 'worker2': .*ArithmeticError: broken, ten",
        ),
    ):
        for owner in owners:
            rpc_sync(owner, note, ("broken",))
        with pytest.raises(RuntimeError, match=text):
            model.train(optimizer, [0])
    assert model.on_all("grads") == [[None, None]] * 3
    # The next one works.
    model = Model()
    model.train(DistributedOptimizer(Failing, model.parameters(), lr=0.1))
    close(model.on_all("values"), trained_in_one_process(torch.optim.SGD, {"lr": 0.1}))


def bad_input() -> None:
    rrefs: Any = [remote(owner, leaf) for owner in OWNERS]
    sgd: Any = torch.optim.SGD
    failed_on_both = r"(?s)could not be made on worker 'worker1': .*Inv.*on worker 'worker2': .*Inv"
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"no parameters", lambda: DistributedOptimizer(sgd, [])),
        (TypeError, r"write \[rref\]", lambda: DistributedOptimizer(sgd, rrefs[0])),
        (TypeError, r"type int: it must be an RRef", lambda: DistributedOptimizer(sgd, [3])),
        (TypeError, "optimize Tensors", lambda: DistributedOptimizer(sgd, [RRef(Part(0))])),
        (ValueError, "a non-leaf Tensor", lambda: DistributedOptimizer(sgd, [RRef(leaf() * 2)])),
        (ValueError, failed_on_both, lambda: DistributedOptimizer(sgd, rrefs, lr=-1.0)),
        (ValueError, "context 12345", lambda: DistributedOptimizer(sgd, rrefs).step(12345)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    with context() as context_id:
        optimizer = DistributedOptimizer(sgd, rrefs)
        backward(context_id, [rrefs[0].to_here().sum()])
        optimizer.step(context_id)
        assert not get_gradients(context_id)


@pytest.mark.parametrize(
    "case",
    [
        trains_as_in_one_process,
        trains_as_torchs,
        groups_have_their_options,
        continues_from_a_state,
        sparse_gradients,
        leaves_alone_what_has_no_gradient,
        threads_and_optimizers_take_turns,
        errors_of_steps_name_their_workers,
        bad_input,
    ],
)
def test_optimizer(world: World, case: Callable[[], None]) -> None:
    world.run(case)
