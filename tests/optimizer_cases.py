"""Optimizers, a module for them, and equal modules of which one has an optimizer of ours."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dataparallel import DataParallel, ShardedOptimizer
from dataparallel.optim.in_backward import InBackwardOptimizers, TorchsOptimizers
from tests.models import placed

with warnings.catch_warnings():
    # Its package has functions that it compiles with TorchScript.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

#: Torch's function that gives every parameter an optimizer.
apply_torchs: Callable[..., None] = _apply_optimizer_in_backward

Kind: TypeAlias = Literal["sharded", "in backward", "torch's in backward"]
ADAMW = torch.optim.AdamW
#: Two ways in which six parameters may be put into buckets.
FIRST = [[5, 4], [3, 2, 1], [0]]
THEN = [[5], [0, 4], [2, 1, 3]]


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
        torch.testing.assert_close(left.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)
    else:
        assert left == right


class Twins:
    """A bare module with a plain optimizer, and an equal one with an optimizer of some kind."""

    def __init__(
        self,
        kind: Kind,
        slots: Sequence[str] = ("cpu",),
        optimizer_class: type[Optimizer] = ADAMW,
        *,
        build: Callable[[], nn.Module] = build,
        groups: Callable[[Any], Any] = nn.Module.parameters,
        **arguments: Any,
    ) -> None:
        self.kind = kind
        self.bare: Any = placed(build, slots[0], torch.float)
        self.module: Any = copy.deepcopy(self.bare)
        self.model = DataParallel(self.module, list(slots))
        self.plain: Any = optimizer_class(groups(self.bare), **arguments)
        given = groups(self.module)
        self.ours: Any
        if kind == "sharded":
            self.ours = ShardedOptimizer(optimizer_class, self.model, params=given, **arguments)
        elif kind == "in backward":
            self.ours = InBackwardOptimizers(optimizer_class, given, **arguments)
        else:
            apply_torchs(optimizer_class, given, arguments)
            self.ours = TorchsOptimizers(self.module.parameters())

    def both(self) -> list[tuple[Any, Any]]:
        return [(self.bare, self.plain), (self.module, self.ours)]

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.bare.parameters(), self.module.parameters(), strict=True)

    def set_gradients(self, scale: float = 1.0, without: Sequence[int] = ()) -> None:
        for index, (p, q) in enumerate(self.pairs()):
            p.grad = None if index in without else torch.randn_like(p) * scale
            q.grad = None if p.grad is None else p.grad.clone()

    def take(self, buckets: Sequence[Sequence[int]] = FIRST) -> None:
        """Step our optimizer; in backward, bucket by bucket, as the reducer does it."""
        if self.kind == "sharded":
            self.ours.step()
            return
        parameters = list(self.module.parameters())
        grads = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        for bucket in buckets:
            for index in bucket:
                parameters[index].grad = grads[index]
            self.ours.step([parameters[index] for index in bucket])
        assert all(p.grad is None for p in parameters)

    def step(self, buckets: Sequence[Sequence[int]] = FIRST, without: Sequence[int] = ()) -> None:
        """Step both, which leaves them equal."""
        self.set_gradients(without=without)
        self.plain.step()
        self.take(buckets)
        self.assert_equal()

    def assert_equal(self) -> None:
        assert_same([p for p, _ in self.pairs()], [q for _, q in self.pairs()])
        if isinstance(self.ours, Optimizer):
            assert_same(self.plain.state_dict(), self.ours.state_dict())
