"""Optimizers in backward do, bucket by bucket, what one ordinary optimizer does afterwards."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dataparallel import DistributedDataParallel
from dataparallel.optim.in_backward import InBackwardOptimizers, TorchsOptimizers
from dataparallel.replicas.values import steps_of
from tests.optimizer_cases import (
    ADAMW,
    BOTH,
    CASES,
    FIRST,
    THEN,
    BackwardTwins,
    apply_torchs,
    assert_same,
    build,
    ours,
)

# --- the same as the plain optimizer -------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("optimizer_class", "arguments"), CASES, ids=[f"{c.__name__}-{k}" for c, k in CASES]
)
def test_steps_equal_those_after_backward(
    kind: Callable[..., BackwardTwins], optimizer_class: type[Optimizer], arguments: dict[str, Any]
) -> None:
    twins = kind(optimizer_class, **arguments)
    twins.step()
    twins.step(without=[1, 4])
    # The buckets are planned anew, in another order.
    for _ in range(2):
        twins.step(THEN)
    twins.step(FIRST, without=[5, 0])
    twins.assert_equal()
    assert all(p.grad is None for p in twins.module.parameters())


@BOTH
def test_other_parameters_keep_their_gradients(kind: Callable[..., BackwardTwins]) -> None:
    twins = kind()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    twins.set_gradients()
    own = next(twins.module.parameters())
    twins.optimizers.step([other, own])
    assert own.grad is None and other.grad is not None
    assert torch.equal(other, torch.ones(2))


def test_one_optimizer_steps_all_of_a_bucket() -> None:
    seen: list[int] = []
    alive: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    class Seen(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            alive.add(self)
            seen.append(sum(len(group["params"]) for group in self.param_groups))

    twins = ours(Seen)
    for buckets in (FIRST, THEN):
        seen.clear()
        twins.step(buckets)
        assert seen == [*map(len, buckets), 6]
    # Nothing is kept for a bucket.
    gc.collect()
    assert list(alive) == [twins.plain]


@BOTH
def test_a_step_counts_as_a_change_of_the_bucket(kind: Callable[..., BackwardTwins]) -> None:
    twins = kind()
    twins.set_gradients()
    first, second, *_ = twins.module.parameters()
    before = steps_of([first, second])
    twins.optimizers.step([first, second])
    assert all(map(operator.ne, steps_of([first, second]), before))


def test_groups_are_kept_and_added() -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [{"params": named[:3]}, {"params": named[3:5], "lr": 0.3, "weight_decay": 0.0}]

    twins = BackwardTwins(
        lambda m: InBackwardOptimizers(ADAMW, groups(m), lr=0.01),
        lambda m: ADAMW(groups(m), lr=0.01),
    )
    twins.step(without=[5])
    twins.assert_equal()
    for optimizer, module in ((twins.plain, twins.bare), (twins.optimizers, twins.module)):
        named = list(module.named_parameters())
        optimizer.add_param_group({"params": named[5:], "lr": 0.7})
    twins.step()
    twins.step(THEN)
    twins.assert_equal()
    for optimizer in (twins.plain, twins.optimizers):
        optimizer.param_groups[1]["params"].pop()
        optimizer.param_groups[1]["param_names"].pop()
    twins.step()
    assert list(twins.module.parameters())[4].grad is not None


def test_schedulers() -> None:
    twins = ours(lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
        for optimizer in (twins.plain, twins.optimizers)
    ]
    for _ in range(4):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    assert twins.plain.param_groups[0]["lr"] != 0.1
    twins.assert_equal()


def test_hooks() -> None:
    twins = ours()
    seen: list[tuple[str, int]] = []

    def note(when: str, optimizer: Optimizer) -> None:
        assert optimizer is twins.optimizers
        members = optimizer.param_groups[0]["params"]
        seen.append((when, sum(p.grad is not None for p in members)))

    twins.optimizers.register_step_pre_hook(lambda *given: note("before", given[0]))
    twins.optimizers.register_step_post_hook(lambda *given: note("after", given[0]))
    twins.step()
    # The step frees the gradients.
    assert seen == [pair for bucket in FIRST for pair in (("before", len(bucket)), ("after", 0))]
    handle = twins.optimizers.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    assert "extra" in twins.optimizers.state_dict()
    handle.remove()
    assert "extra" not in twins.optimizers.state_dict()


def test_a_hook_of_all_optimizers_may_change_the_gradients_of_a_bucket() -> None:
    twins = ours(torch.optim.SGD, lr=0.1)
    seen: list[int] = []

    def halve(optimizer: Optimizer, *_: Any) -> None:
        members = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append(sum(p.grad is not None for p in members))
        for p in members:
            p.grad = None if p.grad is None else p.grad / 2

    handle = register_optimizer_step_pre_hook(halve)
    try:
        twins.step()
    finally:
        handle.remove()
    twins.assert_equal()
    assert seen == [*map(len, FIRST), 6]


def test_sparse_gradients() -> None:
    p, q = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    optimizers = InBackwardOptimizers(torch.optim.SGD, [p], lr=0.1)
    plain = torch.optim.SGD([q], lr=0.1)
    for parameter in (p, q):
        nn.functional.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
    assert p.grad is not None and p.grad.is_sparse
    optimizers.step([p])
    plain.step()
    assert_same(p.detach(), q.detach())
    assert not torch.equal(p, torch.ones(4, 2))


def test_buckets_that_are_stepped_at_the_same_time() -> None:
    class Slow(torch.optim.Adam):
        barrier: ClassVar[threading.Barrier] = threading.Barrier(3)

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.barrier.wait(20)
            super().step()

    twins = ours(Slow)
    twins.plain = torch.optim.Adam(twins.bare.parameters())
    parameters = list(twins.module.parameters())
    for _ in range(3):
        twins.set_gradients()
        threads = [
            threading.Thread(target=twins.optimizers.step, args=([parameters[i] for i in bucket],))
            for bucket in FIRST
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        twins.plain.step()
    twins.assert_equal()


# --- torch's protocol ----------------------------------------------------------------------------


def test_without_torchs_optimizers_there_are_none() -> None:
    assert not TorchsOptimizers(build().parameters()).found


def test_torchs_optimizers_no_longer_step_by_themselves() -> None:
    module = build()
    x = torch.randn(3, 5)
    apply_torchs(ADAMW, module.parameters(), {"lr": 0.1})
    before = [p.detach().clone() for p in module.parameters()]
    module(x).sum().backward()
    assert not any(map(torch.equal, before, module.parameters()))
    optimizers = TorchsOptimizers(module.parameters())
    before = [p.detach().clone() for p in module.parameters()]
    module(x).sum().backward()
    assert_same(before, [p.detach() for p in module.parameters()])
    optimizers.step(list(module.parameters()))
    assert not any(map(torch.equal, before, module.parameters()))
    # Their owner sees what was done.
    parameter: Any = module[0].weight  # type: ignore[index]
    assert parameter._in_backward_optimizers[0].state[parameter]["step"] == 2


def test_several_optimizers_of_a_parameter_are_stepped() -> None:
    module = build()
    expected = copy.deepcopy(module)
    classes: list[Callable[..., Optimizer]] = [torch.optim.SGD, ADAMW]
    for optimizer_class in classes:
        apply_torchs(optimizer_class, module.parameters(), {"lr": 0.1})
    optimizers = TorchsOptimizers(module.parameters())
    plain = [optimizer_class(expected.parameters(), lr=0.1) for optimizer_class in classes]
    for p, q in zip(module.parameters(), expected.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizers.step(list(module.parameters()))
    for optimizer in plain:
        optimizer.step()
    assert_same(list(module.parameters()), list(expected.parameters()))


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [ADAMW, torch.optim.Adagrad])
def test_checkpoints_go_to_and_come_from_a_plain_optimizer(
    optimizer_class: Any,
) -> None:
    twins = ours(optimizer_class, lr=0.1)
    twins.step()
    other = ours(optimizer_class, lr=0.7)
    for module in (other.bare, other.module):
        module.load_state_dict(twins.module.state_dict())
    other.plain.load_state_dict(copy.deepcopy(twins.optimizers.state_dict()))
    other.optimizers.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
    assert other.optimizers.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        other.step(THEN)
    other.assert_equal()
    with pytest.raises(ValueError, match="doesn't match the size"):
        other.optimizers.load_state_dict(
            optimizer_class([nn.Parameter(torch.ones(1))]).state_dict()
        )
    other.step()
    other.assert_equal()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent_and_go_on(duplicate: Callable[[Any], Any]) -> None:
    twins = ours(lr=0.1)
    twins.step()
    other = ours()
    other.module, other.optimizers = duplicate((twins.module, twins.optimizers))
    other.bare, other.plain = copy.deepcopy((twins.bare, twins.plain))
    other.step(THEN)
    other.assert_equal()
    twins.step()
    twins.assert_equal()


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_gradients_cannot_be_accumulated(kind: str) -> None:
    module = build()
    if kind == "torch":
        apply_torchs(ADAMW, module.parameters(), {})
    model = DistributedDataParallel(module, ["cpu", "cpu"])
    if kind == "ours":
        model.step_in_backward(ADAMW)
    before = copy.deepcopy(module)
    with (
        model.no_sync(),
        pytest.raises(RuntimeError, match=r"within no_sync\(\), but every backward is a step"),
    ):
        model(torch.randn(4, 5)).sum().backward()
    assert_same(list(before.parameters()), list(module.parameters()))
    model(torch.randn(4, 5)).sum().backward()
    assert not any(map(torch.equal, before.parameters(), module.parameters()))
    model.close()


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_what_is_in_grad_before_a_backward_is_a_part_of_the_step(kind: str) -> None:
    module = build()
    bare = copy.deepcopy(module)
    if kind == "torch":
        apply_torchs(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, ["cpu", "cpu"], bucket_cap_mb=0.0005)
    if kind == "ours":
        model.step_in_backward(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(4, 5), torch.randn(4, 5)
        for each in (module, bare):
            each(y).sum().backward()
        for each in (model, bare):
            each(x).sum().backward()
        plain.step()
        plain.zero_grad()
    for p, q in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert p.grad is None
    model.close()


def test_the_step_of_an_ordinary_loop_is_refused() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'parameters'"):
        ours().optimizers.step()


@BOTH
def test_an_ordinary_optimizer_beside_them_changes_nothing(
    kind: Callable[..., BackwardTwins],
) -> None:
    twins = kind()
    for _ in range(2):
        twins.step()
        torch.optim.SGD(twins.module.parameters(), weight_decay=0.1).step()
    twins.assert_equal()


def test_what_cannot_be_stepped_in_parts_is_refused() -> None:
    parameters = list(build().parameters())
    with pytest.raises(ValueError, match=r"LBFGS\.step cannot be done in parts"):
        InBackwardOptimizers(torch.optim.LBFGS, parameters)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        InBackwardOptimizers(ADAMW, parameters, lr=-1)


def test_a_failed_step_leaves_the_other_buckets() -> None:
    class Picky(torch.optim.Adam):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if any(p.grad.isnan().any() for g in self.param_groups for p in g["params"]):
                raise ArithmeticError("not a number")
            super().step()

    twins = ours(Picky)
    twins.plain = torch.optim.Adam(twins.bare.parameters())
    twins.step()
    parameters = list(twins.module.parameters())
    parameters[0].grad = torch.full_like(parameters[0], torch.nan)
    with pytest.raises(ArithmeticError, match="not a number"):
        twins.optimizers.step(parameters[:1])
    parameters[0].grad = None
    twins.step()
    twins.assert_equal()
