"""Many gradients in one backward: ``is_grads_batched``, ``vectorize``, and vmap around one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional, grad, gradcheck, gradgradcheck

import dataparallel as dp
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, two_layers
from tests.models import WRAPPERS


def used(module: Any) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if "layers.2" not in name]


def _of_gradients(model: Any, x: Tensor) -> Any:
    first = grad(model(x).sin().sum(), [x, *used(model)], create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return grad(total, [x], torch.ones(2, dtype=x.dtype, device=x.device), is_grads_batched=True)


def _batched(inputs: Callable[[Any, Tensor], Any], **options: bool) -> Callable[..., Any]:
    def way(model: Any, x: Tensor) -> Any:
        output = model(x)
        vectors = torch.stack([output.detach(), output.detach().sin()])
        return grad(output, inputs(model, x), vectors, is_grads_batched=True, **options)

    return way


def _mapped(model: Any, x: Tensor) -> Any:
    output = model(x)
    vectors = torch.stack([output.detach(), output.detach().sin()])
    return torch.vmap(lambda v: grad(output, [x], v, retain_graph=True))(vectors)


WAYS: dict[str, Callable[..., Any]] = {
    "jacobian": lambda model, x: functional.jacobian(model, x, vectorize=True),
    "of inputs": _batched(lambda model, x: [x]),
    "of everything": _batched(lambda model, x: [x, *used(model)]),
    "with a graph": _batched(lambda model, x: used(model), create_graph=True),
    "of gradients": _of_gradients,
    "vmap": _mapped,
}


@pytest.mark.in_pairs
@WRAPPERS
@pytest.mark.parametrize("way", WAYS)
def test_several_replicas_refuse_them(slots: list[str], wrapper: Any, way: str) -> None:
    bare = Net(slots[0], two_layers)
    model = wrapper(copy.deepcopy(bare), slots[:3])
    x = batch(slots[0], size=5, grad=True)
    with pytest.raises(RuntimeError, match=r"batched .*several replicas; .*vectorize=False"):
        WAYS[way](model, x)
    # The rows that they are computed from work, one after the other.
    torch.testing.assert_close(functional.jacobian(model, x), functional.jacobian(bare, x))


@WRAPPERS
def test_gradients_pass_the_checks_of_torch(slots: list[str], wrapper: Any) -> None:
    model, x = wrapper(Net(slots[0], two_layers), slots[:2]), batch(size=2, grad=True)

    def from_cpu(x: Tensor) -> Tensor:
        # The checks perturb their inputs element by element, which is a matter of the CPU.
        output: Tensor = model(x.to(slots[0]))
        return output.cpu()

    assert gradcheck(from_cpu, (x,))
    assert gradgradcheck(from_cpu, (x,))


def _one_replica(rank: int, world_size: int) -> list[Tensor]:
    bare = Net("cpu", two_layers)
    model = dp.DistributedDataParallel(bare, ["cpu"])
    x = batch(seed=rank, grad=True)
    for way in ("jacobian", "of inputs", "vmap"):
        torch.testing.assert_close(WAYS[way](model, x), WAYS[way](bare, x))
    with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
        WAYS["of everything"](model, x)
    model(x).sum().backward()
    return [p.grad.clone() for p in used(model) if p.grad is not None]


def test_one_replica_has_those_of_its_inputs(cluster: Cluster) -> None:
    first, second = cluster.run(_one_replica, 2)
    torch.testing.assert_close(first, second)
    assert len(first) == 5
