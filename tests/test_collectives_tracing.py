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
    "in place": lambda x, group: collectives.all_reduce_inplace(x * 2, "sum", group),
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
        # The compiler warns when an input has a history, and when it is imported.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        warnings.filterwarnings("ignore", "`torch.jit.script")
        # It also warns of its own work for each node of ours.
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
        torch._dynamo.reset()
        # The cache on the disk was compiled for operators as they were then.
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


def compare_all(rank: int, world_size: int, backend: str, names: list[str]) -> list[str]:
    def function(x: Tensor) -> list[Tensor]:
        return [part for name in names for part in around(CALLS[name], world())(x)]

    def gradients(function: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        leaf = numbers(rank, 4, 4).requires_grad_()
        outputs = function(leaf)
        return [
            *outputs,
            # Each output has its own gradient, so that a wrong one has a name.
            *(torch.autograd.grad(y.pow(3).sum(), leaf, retain_graph=True)[0] for y in outputs),
        ]

    with compiler():
        expected, found = gradients(function), gradients(compiled(function, backend))
    pairs = zip([name for name in names for _ in range(2)] * 2, found, expected, strict=True)
    return [name for name, one, other in pairs if not torch.allclose(one, other)]


@pytest.mark.parametrize(
    ("backend", "names"),
    # Only this generated code is made to look alike in all processes.
    [("aot_eager", list(CALLS)), ("inductor", ["all_reduce", "gather", "one gets all"])],
)
def test_compiled_as_eager(cluster: Cluster, backend: str, names: list[str]) -> None:
    assert cluster.run(compare_all, 2, backend, names, timeout=250) == [[], []]


def compile_and_begin_again(rank: int, world_size: int) -> str:
    name = world().group_name

    def function(x: Tensor) -> list[Tensor]:
        # Those that ask the group for its size before are left out.
        return [CALLS[each](x, name) for each in ("all_reduce", "avg", "all_gather", "scatter")]

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


def compare_groups(rank: int, world_size: int) -> bool:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (1, world_size))
    ranks = list(range(world_size))
    groups = [world(), world().group_name, mesh, (grid, 1), (mesh, "all"), ranks, [ranks]]

    def function(x: Tensor) -> list[Tensor]:
        return [CALLS["all_gather"](x, group) * 2 for group in groups]

    x = numbers(rank, 4, 4)
    with compiler():
        return all(map(torch.equal, compiled(function)(x), function(x)))


def test_every_kind_of_group_is_compiled(cluster: Cluster) -> None:
    assert cluster.run(compare_groups, 2) == [True, True]


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

    with compiler():
        anything = compiled(function, backend, dynamic=True)
        for length in (4, 6, 10):
            leaf = numbers(rank, length, length + 1).requires_grad_()
            found, expected = anything(leaf), function(leaf)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(*[torch.autograd.grad(y, leaf) for y in (found, expected)])
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
        assert re.search("[Ss]plit sizes|Runtime assertion failed", message)


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
        for mode in ("real", "symbolic"):
            graph = make_fx(one_more(call), tracing_mode=mode)(x)
            found[name, mode] = targets(graph)
            assert torch.equal(graph(x), expected), (name, mode)
    return found


def test_traces_show_the_collective_and_its_wait(cluster: Cluster) -> None:
    sums = ("avg", "product", "max", "reduce", "in place", "waited")
    rows = ("permute", "one gets all", "reduce_scatter", "all_to_all")
    other = dict.fromkeys(sums, "all_reduce") | dict.fromkeys(rows, "all_to_all_single")
    other |= dict.fromkeys(("all_gather", "gather"), "all_gather_into_tensor")
    other["scatter"] = "broadcast"
    for found in cluster.run(trace_all, 2):
        assert len(found) == 2 * len(CALLS)
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


# --- modes and transforms --------------------------------------------------------------------


def use_fake_tensors(rank: int, world_size: int) -> list[bool]:
    from torch._subclasses import FakeTensorMode

    real = [call(torch.ones(4, 4), world()).shape for call in CALLS.values()]
    with FakeTensorMode() as mode:
        inside = [call(torch.empty(4, 4), world()).shape for call in CALLS.values()]
    outside = mode.from_tensor(torch.ones(4, 4))
    meta = torch.empty(4, 4, device="meta")
    return [
        inside == real,
        [call(outside, world()).shape for call in CALLS.values()] == real,
        [call(meta, world()).shape for call in CALLS.values()] == real,
    ]


def test_shapes_without_values(cluster: Cluster) -> None:
    assert cluster.run(use_fake_tensors, 2) == [[True] * 3] * 2


def transform(rank: int, world_size: int) -> list[str]:
    x = numbers(rank, 4, 4)
    wrong = []
    for name, call in CALLS.items():

        def loss(x: Tensor, call: Call = call) -> Tensor:
            return call(x, world()).pow(2).sum()

        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        if not torch.allclose(torch.func.grad(loss)(x), expected):
            wrong.append(name)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: CALLS["all_reduce"](x, world()))(x)
    return wrong


def test_transforms_of_functions(cluster: Cluster) -> None:
    assert cluster.run(transform, 2) == [[], []]


def differentiate_forward(rank: int, world_size: int) -> bool:
    import torch.autograd.forward_ad as forward_ad

    with warnings.catch_warnings(), forward_ad.dual_level():
        # Torch's own derivatives warn; with a FutureWarning from 2.15 on.
        warnings.filterwarnings("ignore", "`torch.jit.script")
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(RuntimeError, match="jvp"):
            collectives.all_reduce(dual, "sum", world().group_name)
        assert collectives.all_reduce(torch.ones(3), "sum", world()).tolist() == [2.0] * 3

    def doubled(x: Tensor) -> Tensor:
        return collectives.all_reduce(x, "sum", world()) * 2

    jvp: Any = torch.autograd.functional.jvp
    _, tangent = jvp(doubled, torch.ones(3), torch.full((3,), rank + 1.0))
    return bool(tangent.tolist() == [6.0] * 3)


def test_forward_mode_is_refused(cluster: Cluster) -> None:
    assert cluster.run(differentiate_forward, 2) == [True, True]
