"""One worker of `dataparallel bench autograd`: its turns, and what it sees of wrong gradients."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch import Tensor

from dataparallel import distributed_autograd as ours
from dataparallel.tools.bench import autograd_tasks, autograd_workers
from dataparallel.tools.bench.autograd_tasks import FORMS, PARTS, AutogradTask, Case, Form

PLACE = autograd_workers.__name__

#: What stands for an engine: from the gradient's leaf and value to what it would have returned.
Answer = Callable[[Tensor, Tensor], dict[Tensor, Tensor]]


def right(x: Tensor, gradient: Tensor) -> dict[Tensor, Tensor]:
    return {x: gradient}


class Local:
    """Calls and a backward in this process, with ordinary autograd."""

    def __init__(self, form: Form, answer: Answer, told: list[str]) -> None:
        self.form, self.answer, self.told = form, answer, told
        self.leaf = torch.empty(0)
        self.gradients: dict[Tensor, Tensor] = {}

    @contextlib.contextmanager
    def context(self) -> Iterator[int]:
        self.told.append(f"{self.form} begins")
        yield 7
        self.told.append(f"{self.form} ends")

    def rpc_sync(self, to: str, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        self.told.append(to)
        if args[0].is_leaf:
            self.leaf = args[0]
        return function(*args)

    def backward(self, context_id: int, roots: list[Tensor]) -> None:
        assert context_id == 7
        (gradient,) = torch.autograd.grad(roots[0], self.leaf)
        self.gradients = self.answer(self.leaf, gradient)

    def get_gradients(self, context_id: int) -> dict[Tensor, Tensor]:
        assert context_id == 7
        return self.gradients


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engines of a worker without any others are told; both are right."""
    said: list[str] = []
    monkeypatch.setattr(f"{PLACE}.torch_rpc.init_rpc", lambda *a, **k: None)
    monkeypatch.setattr(f"{PLACE}.torch_rpc.shutdown", lambda *a, **k: None)
    # Of this process: its other tests have the threads that they began with.
    monkeypatch.setattr(f"{PLACE}.torch.set_num_threads", lambda threads: None)
    settle = lambda to, function: said.append(f"settle {to}")  # noqa: E731
    monkeypatch.setattr(f"{PLACE}.torch_rpc.rpc_sync", settle)
    monkeypatch.setattr(f"{PLACE}.ours.debug_info", dict)
    monkeypatch.setattr(autograd_workers, "_served", Counter())
    for form in FORMS:
        use(monkeypatch, form, right, said)
    return said


def use(monkeypatch: pytest.MonkeyPatch, form: Form, answer: Answer, told: list[str]) -> None:
    local = Local(form, answer, told)
    engine = autograd_workers._Engine(
        local.context, local.rpc_sync, local.backward, local.get_gradients
    )
    monkeypatch.setitem(autograd_workers._ENGINES, form, engine)


def task(**fields: Any) -> AutogradTask:
    return AutogradTask("ours", ("cpu",), **{"calls": (1, 4), "sizes": (2**10,), **fields})


def cases() -> list[Case]:
    return autograd_tasks.plan_cases(task())


def worker(rank: int = 0, world_size: int = 3, **fields: Any) -> autograd_workers.Workers:
    return autograd_workers.Workers(task(rank=rank, world_size=world_size, **fields))


def test_each_form_has_its_own_engine() -> None:
    engines: list[tuple[Form, Any, Any]] = [
        ("ours", ours, ours),
        ("torch", torch.distributed.autograd, torch.distributed.rpc),
    ]
    for form, module, calls in engines:
        own = autograd_workers._ENGINES[form]
        assert own.rpc_sync is calls.rpc_sync, form
        assert own.context is module.context, form
        assert own.backward is module.backward, form
        assert own.get_gradients is module.get_gradients, form


def test_right_gradients_have_no_error(told: list[str]) -> None:
    errors = worker().check(2)["errors"]
    assert set(errors) == {f"{form} backward {case.name}" for form in FORMS for case in cases()}
    assert set(errors.values()) == {0.0}
    assert worker(rank=1).check(2) == {"errors": {}}


def into_grad(x: Tensor, gradient: Tensor) -> dict[Tensor, Tensor]:
    x.grad = gradient
    return {x: gradient}


WRONG: dict[str, Answer] = {
    "one element": lambda x, g: {x: g + torch.eye(len(g))[-1]},
    "not a number": lambda x, g: {x: g * math.nan},
    "shape": lambda x, g: {x: g[None]},
    "order": lambda x, g: {x: g.flip(0)},
    "absent": lambda x, g: {},
    "another leaf's": lambda x, g: {x: g, torch.ones(1): g},
    "in .grad": into_grad,
}


@pytest.mark.parametrize("wrong", FORMS)
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_gradient_is_seen(
    how: str, wrong: Form, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, wrong, WRONG[how], told)
    errors = worker().check(1)["errors"]
    for form in FORMS:
        own = [error for key, error in errors.items() if key.startswith(form)]
        assert len(own) == len(cases())
        assert all((error != 0.0) == (form == wrong) for error in own)


def test_both_take_turns_and_nobody_is_always_the_second(told: list[str]) -> None:
    seconds = worker(calls=(2,), sizes=()).run(3)
    begun = [each.split()[0] for each in told if each.endswith("begins")]
    # Three repetitions of the chain, then of the nested calls.
    assert begun == ["ours", "torch", "torch", "ours", "ours", "torch"] * 2
    chain = ["ours begins", "worker1", "worker2", "ours ends", "settle worker1", "settle worker2"]
    assert told[: len(chain)] == chain
    nested = told[6 * len(chain) :]
    assert nested[:5] == ["ours begins", "worker1", "worker2", "worker0", "ours ends"]
    assert {key: len(each) for key, each in seconds.items()} == {
        f"{form} {part} {case}": 3
        for form, part, case in itertools.product(FORMS, PARTS, ("chain of 2", "nested, 3"))
    }
    assert all(each > 0.0 for own in seconds.values() for each in own)


def test_those_that_serve_answer_in_the_same_shape(told: list[str]) -> None:
    first, second = worker().run(2), worker(rank=1).run(2)
    assert {key: len(each) for key, each in first.items()} == {
        key: len(each) for key, each in second.items()
    }
    assert not any(each for own in second.values() for each in own)


def test_calls_are_counted_where_they_are_asked_for_and_where_they_are_served(
    told: list[str],
) -> None:
    one = worker()
    one.check(2)
    answer = one.finish()
    # Chains of 1, 4 and 4, and three nested: twice, and once at the end.
    assert answer["made"] == answer["served"] == {"ours": 36, "torch": 36}
    assert set(answer["errors"].values()) == {0.0}
