"""Collectives over processes as operators: in traces, in modes and in transforms.

Oracle: the collective of a plain tensor, one call after another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dataparallel import collectives
from dataparallel.collectives.operators import OPERATORS
from tests.cluster import Cluster
from tests.test_collectives_tracing import CALLS, OPS, Call, compiler, numbers, world

# --- traces ----------------------------------------------------------------------------------


def targets(graph: torch.fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.removesuffix(".default") for name in names if name.startswith("dataparallel.")]


def one_more(call: Call) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x, world()) + 1


def trace_all(rank: int, world_size: int) -> dict[tuple[str, str], list[str]]:
    found = {}
    x = numbers(rank, 4, 4)
    for name, call in CALLS.items():
        expected = one_more(call)(x)
        for mode in ("real", "fake", "symbolic"):
            graph = make_fx(one_more(call), tracing_mode=mode)(x)
            found[name, mode] = targets(graph)
            assert torch.equal(graph(x), expected), (name, mode)
    return found


def test_traces_show_the_collective_and_its_wait(cluster: Cluster) -> None:
    other = {"avg": "all_reduce", "product": "all_reduce", "max": "all_reduce"}
    other |= {"permute": "all_to_all", "waited": "all_reduce"}
    for found in cluster.run(trace_all, 2):
        assert len(found) == 3 * len(CALLS)
        for (name, _), names in found.items():
            waits = ["dataparallel.wait_tensor"] * (2 if name == "waited" else 1)
            assert names == [f"dataparallel.{other.get(name, name)}", *waits]


def export(rank: int, world_size: int) -> list[bool]:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return collectives.all_reduce(x * 2, "sum", group_name) + 1

    group_name = world().group_name
    x = numbers(rank, 3)
    with compiler():
        program: Any = torch.export.export(Net(), (x,))
    names = ["dataparallel.all_reduce", "dataparallel.wait_tensor"]
    return [targets(program.graph_module) == names, torch.equal(program.module()(x), Net()(x))]


def test_exported(cluster: Cluster) -> None:
    assert cluster.run(export, 2) == [[True, True]] * 2


# --- operators -------------------------------------------------------------------------------


def check_operators(rank: int, world_size: int) -> list[str]:
    options: dict[str, tuple[Any, ...]] = {
        "all_reduce": ("product",),
        "reduce": ("max", 0),
        "reduce_scatter": ("sum", 1, 1),
        "broadcast": (0,),
        "all_gather": (1, 1),
        "gather": (1, 0, 1),
        "scatter": (1, 0, 1),
        "all_to_all": ([6], [6]),
    }
    strided = torch.randn(4, 6).t()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator in OPERATORS:
        for x in (strided, strided.clone().requires_grad_()):
            arguments = (x, *options[operator.name], world().group_name)
            torch.library.opcheck(operator.overload, arguments, test_utils=tests)
    with warnings.catch_warnings():
        # What opcheck itself does; torch hides it, but not where warnings are errors.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(OPS.wait_tensor.default, (strided,))
        torch.library.opcheck(OPS.wait_tensor.default, (strided.clone().requires_grad_(),))
    return sorted(options)


def test_operators_are_what_they_say(cluster: Cluster) -> None:
    names = sorted(operator.name for operator in OPERATORS)
    assert cluster.run(check_operators, 1) == [names]


def use_fake_tensors(rank: int, world_size: int) -> list[tuple[int, ...]]:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        inside = torch.empty(4, 4)
        shapes = [tuple(call(inside, world()).shape) for call in CALLS.values()]
    outside = mode.from_tensor(torch.ones(4, 4))
    assert shapes == [tuple(call(outside, world()).shape) for call in CALLS.values()]
    meta = torch.empty(4, 4, device="meta")
    assert shapes == [tuple(call(meta, world()).shape) for call in CALLS.values()]
    real = [tuple(call(torch.ones(4, 4), world()).shape) for call in CALLS.values()]
    assert shapes == real
    return shapes


def test_shapes_without_values(cluster: Cluster) -> None:
    for rank, shapes in enumerate(cluster.run(use_fake_tensors, 2)):
        assert shapes.count((4, 4)) == 9
        assert shapes.count((4, 2)) == 2
        assert shapes.count((4, 8)) == 1
        assert shapes.count((8, 4) if rank == 0 else (0, 4)) == 1


def call_for_another_group(rank: int, world_size: int) -> list[str]:
    name = world().group_name
    x = torch.ones(2)
    messages = []
    for call in (
        lambda: OPS.all_gather(x, 0, 3, name),
        lambda: OPS.reduce_scatter(x, "sum", 0, 1, name),
        lambda: OPS.scatter(x, 0, 0, 1, name),
        lambda: OPS.gather(x, 0, 0, 2 if rank else 0, name),
    ):
        with pytest.raises(
            ValueError, match=r"compile it again \(torch.compiler.reset\(\)\)"
        ) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_operators_of_an_earlier_group_of_the_same_name(cluster: Cluster) -> None:
    first, *_, last = cluster.run(call_for_another_group, 2)[1]
    assert "this process is one of 2 members, but the operator was called for 3 members" in first
    assert "this process is member 1 of 2, but the operator was called for 2 copies" in last


# --- modes and transforms --------------------------------------------------------------------


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def watch(rank: int, world_size: int) -> list[str]:
    with _Seen() as seen:
        result = collectives.all_gather_tensor(numbers(rank, 3), 0, world())
    assert torch.equal(result, torch.cat([numbers(r, 3) for r in range(world_size)]))
    return [name for name in seen.names if "dataparallel" in name]


def test_dispatch_modes_see_the_operator(cluster: Cluster) -> None:
    assert cluster.run(watch, 2) == [["dataparallel.all_gather.default"]] * 2


class _Pair(Tensor):
    """A tensor made of another one, which only its dispatch reaches."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Pair:
        make: Any = Tensor._make_wrapper_subclass
        made: _Pair = make(cls, inner.shape, dtype=inner.dtype)
        made.inside = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [arg.inside if isinstance(arg, _Pair) else arg for arg in args]
        return _Pair(func(*plain, **(kwargs or {})))


def give_subclasses(rank: int, world_size: int) -> bool:
    result = collectives.reduce(_Pair(numbers(rank, 3)), "sum", 0, world())
    assert isinstance(result, _Pair)
    expected = numbers(0, 3) + numbers(1, 3) if rank == 0 else torch.zeros(3)
    return torch.equal(result.inside, expected.double())


def test_tensors_that_hold_others(cluster: Cluster) -> None:
    assert cluster.run(give_subclasses, 2) == [True, True]


def transform(rank: int, world_size: int) -> list[str]:
    batch = numbers(rank, 3, 4, 4)
    wrong = []
    for name, call in CALLS.items():

        def loss(x: Tensor, call: Call = call) -> Tensor:
            return call(x, world()).pow(2).sum()

        single = [call(x, world()).clone() for x in batch]
        grads = []
        for x in batch:
            leaf = x.clone().requires_grad_()
            grads.append(torch.autograd.grad(loss(leaf), leaf)[0])
        for dim in (0, 2):
            moved = batch.movedim(0, dim)
            mapped = torch.vmap(lambda x, call=call: call(x, world()), in_dims=dim)(moved)
            if not torch.equal(mapped, torch.stack(single)):
                wrong.append(f"vmap {name} {dim}")
            found = torch.vmap(torch.func.grad(loss), in_dims=dim)(moved)
            if not torch.allclose(found, torch.stack(grads)):
                wrong.append(f"grad {name} {dim}")
    return wrong


def test_vmap_and_grad(cluster: Cluster) -> None:
    assert cluster.run(transform, 2) == [[], []]


def record_outside_of_vmap(rank: int, world_size: int) -> list[bool]:
    weight = numbers(rank, 4).requires_grad_()
    batch = numbers(rank + 7, 3, 4)

    def product(x: Tensor) -> Tensor:
        return collectives.all_reduce(x * weight, "product", world())

    found = torch.autograd.grad(torch.vmap(product)(batch).sum(), weight)[0]
    loss = torch.stack([product(x).sum() for x in batch]).sum()
    expected = torch.autograd.grad(loss, weight)[0]
    hessian = torch.func.jacrev(torch.func.jacrev(lambda x: product(x).sum()))(batch[0])
    twice = torch.autograd.functional.hessian(lambda x: product(x).sum(), batch[0])
    return [torch.allclose(found, expected), torch.allclose(hessian, twice)]


def test_gradients_around_transforms(cluster: Cluster) -> None:
    assert cluster.run(record_outside_of_vmap, 2) == [[True, True]] * 2


def differentiate_forward(rank: int, world_size: int) -> int:
    import torch.autograd.forward_ad as forward_ad

    with warnings.catch_warnings():
        # Of torch's own derivatives; a FutureWarning from 2.15 on.
        warnings.filterwarnings("ignore", "`torch.jit.script")
        match = "no forward-mode derivative; compute .* two backward passes"
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
            for give in (collectives.all_reduce, OPS.all_reduce):
                with pytest.raises(NotImplementedError, match=match):
                    give(dual, "sum", world().group_name)
            assert collectives.all_reduce(torch.ones(3), "sum", world()).tolist() == [2.0] * 3

    def doubled(x: Tensor) -> Tensor:
        return collectives.all_reduce(x, "sum", world()) * 2

    jvp: Any = torch.autograd.functional.jvp
    _, tangent = jvp(doubled, torch.ones(3), torch.full((3,), rank + 1.0))
    assert tangent.tolist() == [6.0] * 3
    return 1


def test_forward_mode_is_refused(cluster: Cluster) -> None:
    assert cluster.run(differentiate_forward, 2) == [1, 1]
