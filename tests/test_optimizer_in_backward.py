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

SGD: Any = torch.optim.SGD

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
    # The buckets are planned anew, in another order. One that was not told changes nothing.
    for _ in range(2):
        twins.step(THEN)
        SGD(twins.module.parameters(), weight_decay=0.1).step()
    twins.step(FIRST, without=[5, 0])
    twins.assert_equal()
    assert all(p.grad is None for p in twins.module.parameters())


@BOTH
def test_a_step_is_one_of_its_parameters_alone(kind: Callable[..., BackwardTwins]) -> None:
    twins = kind()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    twins.set_gradients()
    first, second, *_ = twins.module.parameters()
    before = steps_of([first, second])
    twins.optimizers.step([other, first, second])
    assert first.grad is None and other.grad is not None
    assert torch.equal(other, torch.ones(2))
    # It counts as a change of the bucket.
    assert all(map(operator.ne, steps_of([first, second]), before))


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


def test_groups_are_kept_and_added_and_scheduled() -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [{"params": named[:3]}, {"params": named[3:5], "lr": 0.3, "weight_decay": 0.0}]

    twins = BackwardTwins(
        lambda m: InBackwardOptimizers(ADAMW, groups(m), lr=0.01),
        lambda m: ADAMW(groups(m), lr=0.01),
    )
    twins.step(without=[5])
    twins.assert_equal()
    schedulers = []
    for optimizer, module in ((twins.plain, twins.bare), (twins.optimizers, twins.module)):
        named = list(module.named_parameters())
        optimizer.add_param_group({"params": named[5:], "lr": 0.7})
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    twins.step()
    for scheduler in schedulers:
        scheduler.step()
    twins.step(THEN)
    assert twins.optimizers.param_groups[0]["lr"] == 0.005
    twins.assert_equal()
    for optimizer in (twins.plain, twins.optimizers):
        optimizer.param_groups[1]["params"].pop()
        optimizer.param_groups[1]["param_names"].pop()
    twins.step()
    assert list(twins.module.parameters())[4].grad is not None


def test_hooks() -> None:
    twins = ours(SGD, lr=0.1)
    seen: list[tuple[str, int]] = []

    def note(when: str, optimizer: Optimizer) -> None:
        assert optimizer is twins.optimizers
        members = optimizer.param_groups[0]["params"]
        seen.append((when, sum(p.grad is not None for p in members)))

    def halve(optimizer: Optimizer, *_: Any) -> None:
        """One of all optimizers may change the gradients of a bucket."""
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.grad = None if p.grad is None else p.grad / 2

    twins.optimizers.register_step_pre_hook(lambda *given: note("before", given[0]))
    twins.optimizers.register_step_post_hook(lambda *given: note("after", given[0]))
    handle = register_optimizer_step_pre_hook(halve)
    try:
        twins.step()
    finally:
        handle.remove()
    twins.assert_equal()
    # The step frees the gradients.
    assert seen == [pair for bucket in FIRST for pair in (("before", len(bucket)), ("after", 0))]
    handle = twins.optimizers.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    assert "extra" in twins.optimizers.state_dict()
    handle.remove()
    assert "extra" not in twins.optimizers.state_dict()


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


def test_torchs_optimizers_no_longer_step_by_themselves() -> None:
    """A parameter may have several."""
    module = build()
    assert not TorchsOptimizers(module.parameters()).found
    bare, classes = copy.deepcopy(module), (SGD, ADAMW)
    for optimizer_class in classes:
        apply_torchs(optimizer_class, module.parameters(), {"lr": 0.1})
    plain = [optimizer_class(bare.parameters(), lr=0.1) for optimizer_class in classes]
    optimizers = TorchsOptimizers(module.parameters())
    x = torch.randn(3, 5)
    for each in (module, bare):
        each(x).sum().backward()
    assert_same(*[[p.detach() for p in each.parameters()] for each in (module, bare)])
    optimizers.step(list(module.parameters()))
    for optimizer in plain:
        optimizer.step()
    assert_same(*[[p.detach() for p in each.parameters()] for each in (module, bare)])
    # Their owner sees what was done.
    parameter: Any = module[0].weight  # type: ignore[index]
    assert parameter._in_backward_optimizers[1].state[parameter]["step"] == 1


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
    # A copy has no hooks, which cannot be pickled.
    twins.optimizers.register_step_pre_hook(lambda *given: None)
    other = ours()
    other.module, other.optimizers = duplicate((twins.module, twins.optimizers))
    other.bare, other.plain = copy.deepcopy((twins.bare, twins.plain))
    for each in (other, twins):
        each.step(THEN)
        each.assert_equal()


# --- in the wrapper, and mistakes ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_the_wrapper_steps_with_all_that_is_in_grad(kind: str) -> None:
    module = build()
    bare = copy.deepcopy(module)
    if kind == "torch":
        apply_torchs(SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, ["cpu", "cpu"], bucket_cap_mb=0.0005)
    if kind == "ours":
        model.step_in_backward(SGD, lr=0.1)
    plain = SGD(bare.parameters(), lr=0.1)
    refused = pytest.raises(RuntimeError, match=r"within no_sync\(\), but every backward is a step")
    with model.no_sync(), refused:
        model(torch.randn(4, 5)).sum().backward()
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


def test_what_is_refused() -> None:
    parameters = list(build().parameters())
    with pytest.raises(ValueError, match=r"LBFGS\.step cannot be done in parts"):
        InBackwardOptimizers(torch.optim.LBFGS, parameters)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        InBackwardOptimizers(ADAMW, parameters, lr=-1)
    # The step of an ordinary loop.
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'parameters'"):
        ours().optimizers.step()


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
