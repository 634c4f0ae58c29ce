"""Random numbers in replicas: one seed one result, different masks, right when recomputed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel
from tests.models import assert_all_close, grads_of


class Dropping(nn.Module):
    """Draws in the module and in a function, with or without activation checkpointing."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(32, 4)
        self.reentrant = reentrant

    def hidden(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.drop(torch.relu(self.first(x))), 0.3) + torch.rand_like(
            x[:, :1]
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            y = self.hidden(x)
        else:
            y = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        output: Tensor = self.second(y)
        return output


def run(model: nn.Module, x: Tensor, seed: int) -> list[Tensor | None]:
    torch.manual_seed(seed)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    results: list[Tensor | None] = []
    for _ in range(2):
        output = model(leaf)
        output.pow(2).sum().backward()
        results.append(output.detach())
    return [*results, leaf.grad, *[g.clone() for g in grads_of(model) if g is not None]]


def test_one_seed_gives_one_result(slots: list[str]) -> None:
    model = DataParallel(Dropping().double().to(slots[0]), slots)
    x = torch.randn(16, 8, dtype=torch.double, device=slots[0])
    first = run(model, x, 5)
    for _ in range(40):
        for got, expected in zip(run(model, x, 5), first, strict=True):
            assert got is not None and expected is not None
            assert torch.equal(got, expected)
    assert not torch.equal(run(model, x, 6)[0], first[0])  # type: ignore[arg-type]


def test_masks_differ_between_replicas_and_forwards(slots: list[str]) -> None:
    model = DataParallel(nn.Dropout(0.5), slots)
    x = torch.ones(4, 64, device=slots[0])
    torch.manual_seed(0)
    masks = [row for _ in range(2) for row in model(x).cpu().ne(0)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same(slots: list[str], reentrant: bool) -> None:
    plain = Dropping().double().to(slots[0])
    recomputed = copy.deepcopy(plain)
    recomputed.reentrant = reentrant
    x = torch.randn(16, 8, dtype=torch.double, device=slots[0])
    for seed in range(10):
        expected = run(DataParallel(plain, slots), x, seed)
        got = run(DataParallel(recomputed, slots), x, seed)
        assert_all_close(got, expected)


def test_one_replica_draws_what_the_bare_module_draws(slots: list[str]) -> None:
    bare = Dropping().double().to(slots[0])
    x = torch.randn(16, 8, dtype=torch.double, device=slots[0])
    assert_all_close(run(DataParallel(bare, slots[:1]), x, 3), run(bare, x, 3))


def test_a_module_that_does_not_draw_leaves_the_generator_alone(slots: list[str]) -> None:
    model = DataParallel(nn.Linear(8, 8).to(slots[0]), slots)
    before = torch.get_rng_state()
    model(torch.ones(8, 8, device=slots[0])).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
