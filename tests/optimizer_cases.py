"""Optimizers, and equal modules of which one is stepped in backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dataparallel.optim.in_backward import InBackwardOptimizers, TorchsOptimizers

with warnings.catch_warnings():
    # Its package has functions that it compiles with TorchScript.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

#: Torch's function that gives every parameter an optimizer.
apply_torchs: Callable[..., None] = _apply_optimizer_in_backward

ADAMW = torch.optim.AdamW
CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (ADAMW, {"lr": 0.01}),
    (ADAMW, {"lr": 0.01, "foreach": True, "maximize": True}),
    (ADAMW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adafactor, {}),
]


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)
    )


def assert_same(left: Any, right: Any) -> None:
    """Compare nested containers bit for bit, wherever the tensors in them are."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left.cpu(), right.cpu())
    else:
        assert left == right


# --- in backward ---------------------------------------------------------------------------------

#: Two ways in which six parameters may be put into buckets.
FIRST = [[5, 4], [3, 2, 1], [0]]
THEN = [[5], [0, 4], [2, 1, 3]]


class BackwardTwins:
    """A module with a plain optimizer, and an equal one that is stepped in backward."""

    def __init__(
        self,
        make: Callable[[nn.Module], Any],
        plain: Callable[[nn.Module], Optimizer],
    ) -> None:
        self.bare = build()
        self.module = copy.deepcopy(self.bare)
        self.plain = plain(self.bare)
        self.optimizers = make(self.module)

    def set_gradients(self, without: Sequence[int] = ()) -> None:
        for index, (p, q) in enumerate(self.pairs()):
            p.grad = None if index in without else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()

    def step(self, buckets: Sequence[Sequence[int]] = FIRST, without: Sequence[int] = ()) -> None:
        self.set_gradients(without)
        parameters = list(self.module.parameters())
        grads = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        for bucket in buckets:
            # As the reducer does it.
            for index in bucket:
                parameters[index].grad = grads[index]
            self.optimizers.step([parameters[index] for index in bucket])
        self.plain.step()
        self.plain.zero_grad()

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.bare.parameters(), self.module.parameters(), strict=True)

    def assert_equal(self) -> None:
        assert_same([p for p, _ in self.pairs()], [q for _, q in self.pairs()])
        if isinstance(self.optimizers, Optimizer):
            assert_same(self.plain.state_dict(), self.optimizers.state_dict())


def ours(optimizer_class: type[Optimizer] = ADAMW, **arguments: Any) -> BackwardTwins:
    return BackwardTwins(
        lambda m: InBackwardOptimizers(optimizer_class, m.parameters(), **arguments),
        lambda m: optimizer_class(m.parameters(), **arguments),
    )


def torchs(optimizer_class: type[Optimizer] = ADAMW, **arguments: Any) -> BackwardTwins:
    def make(module: nn.Module) -> TorchsOptimizers:
        apply_torchs(optimizer_class, module.parameters(), arguments)
        return TorchsOptimizers(module.parameters())

    return BackwardTwins(make, lambda m: optimizer_class(m.parameters(), **arguments))


BOTH = pytest.mark.parametrize("kind", [ours, torchs])
