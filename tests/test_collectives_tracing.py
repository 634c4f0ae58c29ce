"""Collectives over processes as operators: in compiled code, in traces, in transforms.

Oracle: the same function, called as it is.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from dataparallel import collectives
from tests.cluster import Cluster

Call = Callable[[Tensor, Any], Tensor]

#: Every collective, of a tensor of shape (4, 4).
CALLS: dict[str, Call] = {
    "all_reduce": lambda x, group: collectives.all_reduce(x, "sum", group),
    "avg": lambda x, group: collectives.all_reduce(x, "AVG", group),
    "product": lambda x, group: collectives.all_reduce(x, "product", group),
    "max": lambda x, group: collectives.all_reduce(x, "max", group),
    "reduce": lambda x, group: collectives.reduce(x, "sum", 0, group),
    "reduce_scatter": lambda x, group: collectives.reduce_scatter_tensor(x, "sum", 1, group),
    "broadcast": lambda x, group: collectives.broadcast(x, 0, group),
    "all_gather": lambda x, group: collectives.all_gather_tensor(x, -1, group),
    "gather": lambda x, group: collectives.gather(x, 0, 0, group),
    "scatter": lambda x, group: collectives.scatter(x, 1, 0, group),
    "all_to_all": lambda x, group: collectives.all_to_all_single(x, None, None, group),
    "permute": lambda x, group: collectives.permute_tensor(x, _next_member(group), group),
    "one gets all": lambda x, group: collectives.permute_tensor(
        x, [0] * dist.get_world_size(group), group
    ),
    "waited": lambda x, group: collectives.wait_tensor(collectives.all_reduce(x, "sum", group)),
}


def _next_member(group: dist.ProcessGroup) -> list[int]:
    size = dist.get_world_size(group)
    return [(member + 1) % size for member in range(size)]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Empty caches, and none of torch's own warnings about itself."""
    with warnings.catch_warnings():
        # Of the compiler: when an input has a history, and when it is imported.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        warnings.filterwarnings("ignore", "`torch.jit.script")
        # Of what it does itself for each node of ours.
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
        torch._dynamo.reset()
        # What is on the disk was compiled for operators as they were then.
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            yield
        torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def numbers(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


def with_gradients(function: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """What a function returns, and the gradient of the sum of its squares."""
    leaf = x.clone().requires_grad_()
    outputs = list(function(leaf))
    loss = torch.stack([output.pow(2).sum() for output in outputs]).sum()
    return [*outputs, *torch.autograd.grad(loss, leaf)]


# --- compiled --------------------------------------------------------------------------------


def around(call: Call, group: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A collective in the middle, with memory before and after it that could be mixed up."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x * 2
        result = call(before, group)
        after = before.sin() + 1
        changed = result * 3
        changed.add_(1)
        return changed, after

    return function


def compare_all(rank: int, world_size: int, backend: str) -> list[str]:
    def function(x: Tensor) -> list[Tensor]:
        return [part for call in CALLS.values() for part in around(call, world())(x)]

    def gradients(function: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        leaf = numbers(rank, 4, 4).requires_grad_()
        outputs = function(leaf)
        return [
            *outputs,
            # Of each for itself, so that a wrong one has a name.
            *(torch.autograd.grad(y.pow(3).sum(), leaf, retain_graph=True)[0] for y in outputs),
        ]

    with compiler():
        expected, found = gradients(function), gradients(compiled(function, backend))
    names = [name for name in CALLS for _ in range(2)] * 2
    pairs = zip(names, found, expected, strict=True)
    return [name for name, one, other in pairs if not torch.allclose(one, other)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_as_eager(cluster: Cluster, world_size: int) -> None:
    assert cluster.run(compare_all, world_size, "aot_eager") == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_generated_code_as_eager(cluster: Cluster, world_size: int) -> None:
    assert cluster.run(compare_all, world_size, "inductor", timeout=250) == [[]] * world_size


def compile_and_begin_again(rank: int, world_size: int) -> str:
    name = world().group_name
    # These ask the group for its size before.
    calls = [CALLS[each] for each in CALLS if each not in ("permute", "one gets all")]

    def function(x: Tensor) -> list[Tensor]:
        return [call(x, name) for call in calls]

    x = numbers(0, 4, 4)
    with compiler():
        code = compiled(function)
        code(x)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        assert world().group_name == name
        assert all(map(torch.equal, code(x), function(x)))
    return name


def test_compiled_again_for_a_default_group_of_another_size(cluster: Cluster) -> None:
    assert cluster.run(compile_and_begin_again, 2) == ["0", "0"]


def compare_groups(rank: int, world_size: int) -> int:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (1, world_size))
    ranks = list(range(world_size))
    groups = [world(), world().group_name, mesh, (grid, 1), (mesh, "all"), ranks, [ranks]]
    x = numbers(rank, 4, 4)
    expected = with_gradients(around(CALLS["all_gather"], world()), x)
    for group in groups:
        with compiler():
            found = with_gradients(compiled(around(CALLS["all_gather"], group)), x)
            assert all(map(torch.equal, found, expected)), group
    return len(groups)


def test_every_kind_of_group_is_compiled(cluster: Cluster) -> None:
    assert cluster.run(compare_groups, 2) == [7, 7]


def change_sizes(rank: int, world_size: int) -> int:
    def function(x: Tensor) -> Tensor:
        rows = collectives.all_gather_tensor(x, 1, world())
        chunk = collectives.reduce_scatter_tensor(x, "sum", 0, world())
        moved = collectives.all_to_all_single(x, None, None, world())
        return rows.pow(2).sum() + chunk.pow(2).sum() + moved.pow(3).sum()

    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def separately(x: Tensor) -> list[Tensor]:
        return [function(x)]

    with compiler():
        anything = compiled(function, backend, dynamic=True)
        for length in (4, 6, 10):
            x = numbers(rank, length, length + 1)
            found = with_gradients(lambda x: [anything(x)], x)
            assert all(map(torch.allclose, found, with_gradients(separately, x)))
    return graphs


def test_one_graph_for_all_sizes(cluster: Cluster) -> None:
    assert cluster.run(change_sizes, 2) == [1, 1]


def split_by_numbers_in_tensors(rank: int, world_size: int) -> str:
    def function(x: Tensor, gets: Tensor, gives: Tensor) -> Tensor:
        sizes = gets.tolist(), gives.tolist()
        return collectives.all_to_all_single(x, *sizes, world()) * 2

    counts = [torch.tensor([1, 2]), torch.tensor([2, 3])]
    gives = counts[rank]
    gets = torch.stack(counts)[:, rank]
    x = numbers(rank, int(gives.sum()), 2)
    with compiler(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        split = compiled(function)
        assert torch.equal(split(x, gets, gives), function(x, gets, gives))
        try:
            split(x, gets, gives + 1)
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_split_sizes_that_only_the_run_knows(cluster: Cluster) -> None:
    for message in cluster.run(split_by_numbers_in_tensors, 2):
        # The second where torch has seen through the sizes.
        assert re.search("do not add up to the rows|Runtime assertion failed", message)


def continue_after_eager(rank: int, world_size: int) -> list[bool]:
    function = around(CALLS["all_reduce"], world())
    same = []
    for backend in ("eager", "aot_eager"):
        for recorded in (False, True):
            leaf = numbers(rank, 4, 4).requires_grad_(recorded)
            with compiler():
                # Still under way when compiled code gets it.
                arriving = collectives.all_reduce(leaf, "sum", world())
                assert isinstance(arriving, collectives.AsyncCollectiveTensor)
                found = compiled(function, backend)(arriving)
                plain = collectives.all_reduce(leaf, "sum", world()).wait()  # type: ignore[attr-defined]
                expected = function(plain)
                same.append(all(map(torch.equal, found, expected)))
                if recorded:
                    grads = [
                        torch.autograd.grad(outputs[0].sum(), leaf)[0]
                        for outputs in (found, expected)
                    ]
                    same.append(torch.equal(*grads))
    return same


def test_results_under_way_are_inputs_of_compiled_code(cluster: Cluster) -> None:
    assert cluster.run(continue_after_eager, 2) == [[True] * 6] * 2


def test_replicas_end_compiled_code() -> None:
    def function(x: Tensor) -> Tensor:
        return collectives.all_reduce(x * 2, "sum", "local") + 1

    x = torch.ones(3)
    with compiler():
        broken = torch.compile(function, backend="aot_eager")
        assert torch.equal(broken(x), function(x))
    with (
        compiler(),
        pytest.raises(torch._dynamo.exc.Unsupported, match="replicas run in threads, which cannot"),
    ):
        compiled(function)(x)


# --- traces ----------------------------------------------------------------------------------


def targets(graph: torch.fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.removesuffix(".default") for name in names if name.startswith("_c10d_functional.")]


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
    sums = ("avg", "product", "max", "reduce", "waited")
    rows = ("permute", "one gets all", "reduce_scatter", "all_to_all")
    other = dict.fromkeys(sums, "all_reduce") | dict.fromkeys(rows, "all_to_all_single")
    other |= dict.fromkeys(("all_gather", "gather"), "all_gather_into_tensor")
    other["scatter"] = "broadcast"
    for found in cluster.run(trace_all, 2):
        assert len(found) == 3 * len(CALLS)
        for (name, _), names in found.items():
            wanted = [other.get(name, name), "wait_tensor"]
            assert names == [f"_c10d_functional.{each}" for each in wanted]


def export(rank: int, world_size: int) -> list[bool]:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return collectives.all_reduce(x * 2, "sum", group_name) + 1

    group_name = world().group_name
    x = numbers(rank, 3)
    with compiler():
        program: Any = torch.export.export(Net(), (x,))
    names = ["_c10d_functional.all_reduce", "_c10d_functional.wait_tensor"]
    return [targets(program.graph_module) == names, torch.equal(program.module()(x), Net()(x))]


def test_exported(cluster: Cluster) -> None:
    assert cluster.run(export, 2) == [[True, True]] * 2


# --- operators -------------------------------------------------------------------------------


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
        assert shapes.count((8, 4) if rank == 0 else (0, 4)) == 2


# --- modes and transforms --------------------------------------------------------------------


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
        match = "jvp"
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
            with pytest.raises(RuntimeError, match=match):
                collectives.all_reduce(dual, "sum", world().group_name)
            assert collectives.all_reduce(torch.ones(3), "sum", world()).tolist() == [2.0] * 3

    def doubled(x: Tensor) -> Tensor:
        return collectives.all_reduce(x, "sum", world()) * 2

    jvp: Any = torch.autograd.functional.jvp
    _, tangent = jvp(doubled, torch.ones(3), torch.full((3,), rank + 1.0))
    assert tangent.tolist() == [6.0] * 3
    return 1


def test_forward_mode_is_refused(cluster: Cluster) -> None:
    assert cluster.run(differentiate_forward, 2) == [1, 1]
