"""What is done with distributed optimizers, in processes and in threads."""

from __future__ import annotations

import functools
import importlib
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.autograd as torch_autograd
import torch.distributed.rpc as torch_rpc
from torch import nn

from dataparallel.distributed_autograd import backward, context, rpc_sync
from dataparallel.distributed_autograd.optimizer import DistributedOptimizer
from dataparallel.distributed_autograd.references import RRef, remote

OWNERS = ("worker1", "worker2")
STEPS = 4

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "foreach": False}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}


def layer(seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


class Part:
    """A layer of the model, on the worker that owns it."""

    def __init__(self, seed: int) -> None:
        self.layer = layer(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def rrefs(self) -> list[RRef[torch.Tensor]]:
        return [RRef(parameter) for parameter in self.layer.parameters()]

    def torchs_rrefs(self) -> list[Any]:
        return [torch_rpc.RRef(parameter) for parameter in self.layer.parameters()]

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.layer.parameters()]

    def set_grads(self, value: float) -> None:
        for parameter in self.layer.parameters():
            parameter.grad = torch.full_like(parameter, value)

    def grads(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.layer.parameters()]

    def use_other_memory(self) -> None:
        for parameter in self.layer.parameters():
            parameter.data = parameter.data.clone()

    def versions(self) -> list[int]:
        return [parameter._version for parameter in self.layer.parameters()]


def inputs(step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 + step))


def trained_in_one_process(kind: Any, options: dict[str, Any], steps: int = STEPS) -> list[Any]:
    parts = [Part(seed) for seed in range(3)]
    optimizer = kind([p for part in parts for p in part.layer.parameters()], **options)
    for step in range(steps):
        optimizer.zero_grad()
        functools.reduce(lambda x, part: part.forward(x), parts, inputs(step)).sum().backward()
        optimizer.step()
    return [part.values() for part in parts]


class Model:
    """Three layers: of this worker and of the two owners."""

    def __init__(self) -> None:
        self.here = Part(0)
        self.there = [remote(owner, Part, (seed,)) for seed, owner in enumerate(OWNERS, start=1)]

    def parameters(self) -> list[Any]:
        rrefs = [part.rpc_sync().rrefs() for part in self.there]
        return [*self.here.layer.parameters(), *rrefs[0], *rrefs[1]]

    def loss(self, step: int) -> torch.Tensor:
        x = self.here.forward(inputs(step))
        for part in self.there:
            x = part.rpc_sync().forward(x)
        return x.sum()

    def train(self, optimizer: DistributedOptimizer, steps: Any = range(STEPS)) -> None:
        for step in steps:
            with context() as context_id:
                backward(context_id, [self.loss(step)])
                optimizer.step(context_id)

    def values(self) -> list[Any]:
        return [self.here.values(), *(part.rpc_sync().values() for part in self.there)]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def same_as_in_one_process() -> None:
    for kind, options in OPTIMIZERS.values():
        model = Model()
        model.train(DistributedOptimizer(kind, model.parameters(), **options))
        close(model.values(), trained_in_one_process(kind, options))


class Plain(torch.optim.Adagrad):
    """One that torch's optimizer does not compile, which would warn."""


def import_torchs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.distributed.optim")


def same_as_torchs() -> None:
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
    close(model.values(), [here.values(), *(part.rpc_sync().values() for part in parts)])


def takes_torchs_references() -> None:
    model = Model()
    rrefs = [rref for part in model.there for rref in part.rpc_sync().torchs_rrefs()]
    kind, options = OPTIMIZERS["sgd"]
    model.train(DistributedOptimizer(kind, [*model.here.layer.parameters(), *rrefs], **options))
    close(model.values(), trained_in_one_process(kind, options))


def groups_have_their_options() -> None:
    model = Model()
    parameters = model.parameters()
    groups = [{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2]}]
    model.train(DistributedOptimizer(torch.optim.SGD, groups, lr=0.01))

    parts = [Part(seed) for seed in range(3)]
    alone = [p for part in parts for p in part.layer.parameters()]
    alone_groups: list[dict[str, Any]] = [
        {"params": alone[::2], "lr": 0.1},
        {"params": alone[1::2]},
    ]
    optimizer = torch.optim.SGD(alone_groups, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        functools.reduce(lambda x, part: part.forward(x), parts, inputs(step)).sum().backward()
        optimizer.step()
    close(model.values(), [part.values() for part in parts])


def leaves_grad_alone() -> None:
    model = Model()
    kind, options = OPTIMIZERS["adam"]
    optimizer = DistributedOptimizer(kind, model.parameters(), **options)
    for part in model.there:
        part.rpc_sync().set_grads(7.0)
    model.here.set_grads(7.0)
    model.train(optimizer)
    close(model.values(), trained_in_one_process(kind, options))
    for grads in (model.here.grads(), *(part.rpc_sync().grads() for part in model.there)):
        assert all(grad is not None and (grad == 7).all() for grad in grads)


def follows_a_parameter_to_other_memory() -> None:
    model = Model()
    kind, options = OPTIMIZERS["sgd"]
    optimizer = DistributedOptimizer(kind, model.parameters(), **options)
    model.train(optimizer, range(2))
    model.there[0].rpc_sync().use_other_memory()
    model.here.use_other_memory()
    before = model.here.versions()
    model.train(optimizer, range(2, STEPS))
    close(model.values(), trained_in_one_process(kind, options))
    # What was saved for a backward notices that the parameter has changed.
    assert all(new > old for new, old in zip(model.here.versions(), before, strict=True))


def leaves_alone_what_has_no_gradient() -> None:
    used, idle = remote("worker1", leaf), remote("worker1", leaf)
    absent = remote("worker2", leaf)
    kind, options = OPTIMIZERS["sgd"]
    optimizer = DistributedOptimizer(kind, [used, idle, absent], **options)
    for rrefs in ([used, idle, absent], [used]):
        with context() as context_id:
            backward(context_id, [sum(rref.to_here().sum() for rref in rrefs)])
            before = idle.to_here().detach(), absent.to_here().detach(), used.to_here().detach()
            optimizer.step(context_id)
    assert idle.to_here().equal(before[0]) and absent.to_here().equal(before[1])
    assert not used.to_here().equal(before[2])


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def embedding_rows(weight: RRef[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(indices, weight.local_value(), sparse=True)


def table() -> torch.Tensor:
    return torch.arange(20.0).reshape(5, 4).requires_grad_()


def sparse_gradients() -> None:
    kinds: tuple[tuple[Any, dict[str, float]], ...] = (
        (torch.optim.SparseAdam, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1}),
    )
    for kind, options in kinds:
        weight, alone = remote("worker1", table), table()
        optimizer = DistributedOptimizer(kind, [weight], **options)
        expected = kind([alone], **options)
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


def several_threads_and_optimizers() -> None:
    """The sum of all gradients arrives, whatever the order: one step is one subtraction."""
    shared = [remote(owner, leaf) for owner in OWNERS]
    optimizers = [DistributedOptimizer(torch.optim.SGD, shared, lr=1.0) for _ in range(2)]
    errors: list[BaseException] = []

    def train(number: int) -> None:
        try:
            for _ in range(6):
                with context() as context_id:
                    loss = sum((rref.to_here() * (number + 1)).sum() for rref in shared)
                    backward(context_id, [loss])
                    optimizers[number % 2].step(context_id)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for rref in shared:
        close(rref.to_here().detach(), torch.full((3,), 1.0 - 6 * (1 + 2 + 3 + 4)))


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
    close(model.values(), trained_in_one_process(kind, options))
    other = DistributedOptimizer(kind, [leaf()])
    with pytest.raises(ValueError, match=r"for the workers .*worker1.* belong to \['worker0'\]"):
        other.load_state_dict(state)


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


def steps_take_turns() -> None:
    shared = [remote("worker1", leaf)]
    optimizers = [DistributedOptimizer(Alone, shared, lr=1.0) for _ in range(2)]
    with context() as context_id:
        backward(context_id, [shared[0].to_here().sum()])
        steps = [functools.partial(each.step, context_id) for each in optimizers * 4]
        with ThreadPoolExecutor(len(steps)) as pool:
            for step in [pool.submit(step) for step in steps]:
                step.result(30)
    close(shared[0].to_here().detach(), torch.full((3,), 1.0 - len(steps)))


TRAINING = (
    same_as_in_one_process,
    same_as_torchs,
    takes_torchs_references,
    groups_have_their_options,
    continues_from_a_state,
    sparse_gradients,
)
OTHERS = (
    leaves_grad_alone,
    follows_a_parameter_to_other_memory,
    leaves_alone_what_has_no_gradient,
    several_threads_and_optimizers,
    steps_take_turns,
)
