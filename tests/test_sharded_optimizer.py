"""A sharded optimizer does what the plain one does; its state is elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dataparallel import ShardedOptimizer, comm
from tests.optimizer_cases import (
    ADAMW,
    CASES,
    Twins,
    assert_same,
)

# --- which shard ---------------------------------------------------------------------------------


def test_added_parameters_go_where_least_is() -> None:
    optimizer = Twins(["virtual:0", "virtual:1"]).sharded
    added = [nn.Parameter(torch.ones(n, device="virtual:0")) for n in (3000, 10)]
    optimizer.add_param_group({"params": added})
    assert [str(optimizer.device_of(p)) for p in added] == ["virtual:1", "virtual:0"]


def test_state_is_on_the_devices_in_equal_parts(slots: list[str]) -> None:
    twins = Twins([slots[0]] * 3 if slots[0] == "cpu" else slots)
    twins.steps(1)
    filled: dict[str, int] = {}
    for p in twins.module.parameters():
        device = twins.sharded.device_of(p)
        average = twins.sharded.state[p]["exp_avg"]
        assert average.device == device
        filled[str(device)] = filled.get(str(device), 0) + average.numel()
    assert set(filled) == set(slots)
    # One matrix has most of the elements; nothing else is with it.
    assert max(filled.values()) == (48 * 48 if slots[0] != "cpu" else sum(filled.values()))


def test_a_device_has_one_shard_however_often_it_is_named() -> None:
    for slots, expected in (
        (["virtual:0", "virtual:1"] * 2, {"virtual:0": 1, "virtual:1": 5}),
        (["cpu", "virtual:0", "cpu"], {"cpu": 1, "virtual:0": 5}),
    ):
        twins = Twins(slots)
        places = Counter(str(twins.sharded.device_of(p)) for p in twins.module.parameters())
        assert places == expected


def test_frozen_parameters_are_not_copied_and_count_as_without_state() -> None:
    twins = Twins(["virtual:0", "virtual:1"])
    for p in twins.module.parameters():
        p.requires_grad_(p.dim() == 1)
    twins.module(torch.randn(3, 5, device="virtual:0")).sum().backward()
    with mock.patch.object(comm, "broadcast_coalesced", wraps=comm.broadcast_coalesced) as sent:
        optimizer = ShardedOptimizer(ADAMW, twins.model)
        optimizer.step()
    # A value, its gradient, and the value back.
    assert sum(t.numel() for call in sent.call_args_list for t in call.args[0]) == 3 * 48
    assert optimizer.device_of(twins.module[0].bias) != optimizer.device_of(twins.module[2].bias)  # type: ignore[index]


# --- the same as the plain optimizer -------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer_class", "arguments"), CASES, ids=[f"{c.__name__}-{k}" for c, k in CASES]
)
def test_steps_equal_those_of_the_plain_optimizer(
    slots: list[str], optimizer_class: type[Optimizer], arguments: dict[str, Any]
) -> None:
    twins = Twins(slots, optimizer_class, **arguments)
    twins.assert_equal()
    twins.steps(4)
    twins.assert_equal()
    assert set(twins.sharded.param_groups[0]) == set(twins.plain.param_groups[0])
    assert twins.sharded.defaults.items() >= twins.plain.defaults.items()


@pytest.mark.parametrize("optimizer_class", [ADAMW, torch.optim.SGD])
@pytest.mark.parametrize("places", [["cpu"], ["virtual:2"], ["virtual:1", "cpu"]])
def test_other_devices(places: list[str], optimizer_class: type[Optimizer]) -> None:
    twins = Twins(places, optimizer_class, lr=0.1, foreach=False)
    twins.steps(3)
    twins.assert_equal()


def test_learning_rates_that_are_tensors() -> None:
    lr = torch.tensor(0.1)
    twins = Twins(["virtual:0", "virtual:1", "virtual:2"], lr=lr, foreach=False)
    twins.steps(2)
    lr.mul_(0.5)
    twins.steps(2)
    twins.assert_equal()
    assert twins.sharded.param_groups[0]["lr"] is lr


def test_parameters_without_gradient_are_skipped(slots: list[str]) -> None:
    twins = Twins(slots, weight_decay=0.5)
    for number in range(4):
        twins.set_gradients()
        for i, (p, q) in enumerate(twins.pairs()):
            if (i + number) % 3 == 0:
                p.grad = q.grad = None
        twins.plain.step()
        twins.sharded.step()
    twins.assert_equal()
    twins.sharded.zero_grad()
    assert all(p.grad is None for p in twins.module.parameters())
    twins.sharded.step()
    assert_same(list(twins.bare.parameters()), list(twins.module.parameters()))


def test_sparse_gradients(slots: list[str]) -> None:
    def tables() -> nn.Module:
        return nn.ModuleList(nn.Embedding(9 + i, 3, sparse=True) for i in range(3))

    twins = Twins(slots, torch.optim.SparseAdam, tables, lr=0.1)
    for _ in range(3):
        for p, q in twins.pairs():
            rows = torch.randint(9, (5,), device=slots[0])
            p.grad = None
            (
                nn.functional.embedding(rows, p, sparse=True) * torch.randn_like(p[:5])
            ).sum().backward()
            assert p.grad is not None and p.grad.is_sparse
            q.grad = p.grad.clone()
        twins.plain.step()
        twins.sharded.step()
    twins.assert_equal()


def test_gradients_are_moved_and_values_written_in_few_copies() -> None:
    twins = Twins(["virtual:0", "virtual:1", "virtual:2"], torch.optim.SGD, lr=0.1)
    twins.steps(1)
    twins.set_gradients()
    with mock.patch.object(comm, "broadcast_coalesced", wraps=comm.broadcast_coalesced) as sent:
        twins.sharded.step()
        # Per shard on another device: its values and gradients together, its new values together.
        assert sent.call_count == 2 * 2
        twins.sharded.zero_grad()
        twins.sharded.step()
        assert sent.call_count == 2 * 2


def test_the_whole_loop_equals_that_of_the_bare_module(slots: list[str]) -> None:
    twins = Twins(slots, lr=0.05)
    x, y = torch.randn(12, 5, device=slots[0]), torch.randn(12, 2, device=slots[0])
    for module, optimizer in ((twins.bare, twins.plain), (twins.model, twins.sharded)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        for _ in range(5):
            nn.functional.mse_loss(module(x), y).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for p, q in twins.pairs():
        torch.testing.assert_close(p, q)
