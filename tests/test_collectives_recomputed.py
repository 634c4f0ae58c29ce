"""Collectives over replicas in what runs forward again, and in backward: a clear error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as by_hooks
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.collectives.operations import AllReduce
from tests.replica_cases import GROUP

SUM = AllReduce("sum")


def _sum(x: Tensor) -> Tensor:
    return GROUP.run(SUM, x * 2)


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _sum(x)


def _through_hooks(x: Tensor) -> Any:
    return by_hooks(Plain())(x)


def _through_hooks_below_others(x: Tensor) -> Any:
    class Saving(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    return by_hooks(Saving())(x)


def _early_stop(x: Tensor) -> Any:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(_sum, x, use_reentrant=False)


_contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
CHECKPOINTS: dict[str, Callable[[Tensor], Any]] = {
    "reentrant": lambda x: checkpoint(_sum, x, use_reentrant=True),
    "not reentrant": lambda x: checkpoint(_sum, x, use_reentrant=False),
    "no early stop": _early_stop,
    "selective": lambda x: checkpoint(_sum, x, use_reentrant=False, context_fn=_contexts),
    "sequential": lambda x: checkpoint_sequential([_sum, _sum, _sum], 2, x, use_reentrant=False),
    "module hooks": _through_hooks,
    "module hooks below others": _through_hooks_below_others,
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_a_checkpoint_within_a_replica(kind: str, wrapper: Callable[..., Any]) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return CHECKPOINTS[kind](super().forward(x))

    model = wrapper(Net(3, 3), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"all_reduce over replicas .*activation checkpointing"):
        model(torch.randn(4, 3))
    x = torch.randn(4, 3, requires_grad=True)
    # A group of one may be recomputed.
    CHECKPOINTS[kind](x).sum().backward()
    factor = 8 if kind == "sequential" else 2
    torch.testing.assert_close(x.grad, torch.full_like(x, factor))


class Recomputed(torch.autograd.Function):
    """A checkpoint of somebody else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(_sum(leaf), leaf, grad)[0]


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("slots", [["cpu"] * 2, ["virtual:0", "virtual:1"]])
def test_other_code_that_runs_forward_again(wrapper: Callable[..., Any], slots: list[str]) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Recomputed.apply(super().forward(x))
            return result

    model = wrapper(Net(3, 3).to(slots[0]), slots)
    loss = model(torch.randn(4, 3, device=slots[0])).sum()
    with pytest.raises(RuntimeError, match="all_reduce over replicas was called in backward"):
        loss.backward()


@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_a_hook_that_runs_in_backward(wrapper: Callable[..., Any]) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            output.register_hook(lambda grad: GROUP.run(SUM, grad))
            return output

    loss = wrapper(Net(3, 3), ["cpu"] * 2)(torch.randn(4, 3)).sum()
    with pytest.raises(RuntimeError, match="all_reduce over replicas was called in backward"):
        loss.backward()
