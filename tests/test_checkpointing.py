"""Activation checkpoints around a wrapper, and errors within them; test_dropout.py has others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dataparallel import DataParallel, DistributedDataParallel
from tests.models import assert_all_close, grads_of, twins


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())


#: One that records the results of operations, by their order too; on devices copies are among them.
SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)
KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


VIRTUAL = [f"virtual:{i}" for i in range(3)]


@pytest.mark.parametrize("samples", [7, 1])
@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        *((kind, ["cpu"] * 3) for kind in KINDS),
        *((kind, VIRTUAL) for kind in KINDS if kind != "selective"),
    ],
)
def test_checkpoint_around_the_wrapper(kind: str, slots: list[str], samples: int) -> None:
    """Replicas save at the same time, and a checkpoint tells saved tensors apart by their order.

    Layers of the caller around the wrapper are recomputed, and so the wrapper runs again too.
    """
    bare, inner = twins(layers, slots[0])
    model = DataParallel(inner, slots)
    around, between = twins(layers, slots[0])
    x = torch.randn(samples, 6, dtype=torch.double, device=slots[0], requires_grad=True)
    around(bare(around(x))).square().sum().backward()
    expected = [x.grad, *grads_of(bare), *grads_of(around)]
    for _ in range(20):
        for module in (model, between):
            module.zero_grad()
        x.grad = None
        call: Any = nn.Sequential(between, model, between)
        checkpoint(call, x, **KINDS[kind]).square().sum().backward()  # type: ignore[union-attr]
        assert_all_close([x.grad, *grads_of(model), *grads_of(between)], expected)


def test_checkpoint_around_the_wrapper_keeps_what_the_replicas_save(slots: list[str]) -> None:
    calls: list[int] = []
    net = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()).to(slots[0])
    net.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    x = torch.randn(8, 3, device=slots[0], requires_grad=True)
    for reentrant, times in ((False, 4), (True, 8)):
        calls.clear()
        checkpoint(DataParallel(net, slots), x, use_reentrant=reentrant).sum().backward()
        assert calls == [2] * times


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("slots", [["cpu"] * 2, ["virtual:0", "virtual:1"]], ids=str)
def test_after_an_error_within_checkpoints(wrapper: Callable[..., Any], slots: list[str]) -> None:
    """torch's hooks stay in the thread that met the error until somebody leaves the checkpoint."""

    class Failing(nn.Linear):
        fails = True

        def body(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            if self.fails:
                raise ValueError("of the body")
            return torch.relu(y) * y

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            try:
                y: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
                return x + y
            except ValueError as error:
                raise KeyError("of the outer body") from error

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.outer, x, use_reentrant=False)
            return y

    net = Failing(3, 3).to(slots[0])
    bare = copy.deepcopy(net)
    model = wrapper(net, slots)
    x = torch.randn(4, 3, device=slots[0])
    with pytest.raises(KeyError, match="of the outer body"):
        model(x)
    net.fails = bare.fails = False
    model(x).pow(2).sum().backward()
    bare(x).pow(2).sum().backward()
    assert_all_close(grads_of(net), grads_of(bare))
