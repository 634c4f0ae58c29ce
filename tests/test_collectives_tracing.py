"""Collectives over processes as operators: in compiled code, in traces, in transforms.

Oracle: the same function, called as it is.
"""

from __future__ import annotations

import contextlib
import itertools
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
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from dataparallel import collectives
from dataparallel.collectives import pending, process_kernels, process_ops
from dataparallel.collectives.collective import AllGather
from tests.cluster import Cluster

OPS: Any = torch.ops.dataparallel

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


# --- what compilers may not do ---------------------------------------------------------------


class _Late:
    """The work of a backend that writes as late as it may."""

    #: Whether the backend has finished by itself what nobody waits for.
    over = False

    def __init__(self, result: Tensor, sent: Tensor) -> None:
        self._result, self._sent = result, sent.clone()

    def wait(self) -> None:
        self._result.copy_(self._sent)

    def done(self) -> bool:
        return self.over


def gather_late(tensor: Tensor, dim: int, name: str) -> Tensor:
    result = torch.full_like(tensor, torch.nan)
    pending.register(result, _Late(result, tensor))
    return result


def reuse_memory(rank: int, world_size: int) -> bool:
    name = world().group_name

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        given = x * 2
        result = process_ops.run(AllGather(0), given, name)
        # Nobody needs what was given any more, and nobody but the backend has the result.
        between = torch.mm(x, x)
        more = torch.mm(between, x)
        return process_ops.waited(result) + 1, more

    x = numbers(rank, 8, 8)
    with pytest.MonkeyPatch.context() as patch, compiler():
        patch.setattr(process_kernels, "all_gather", gather_late)
        found, more = compiled(function, "inductor")(x)
    return torch.equal(found, x * 2 + 1) and torch.allclose(more, x @ x @ x)


@pytest.mark.slow
def test_memory_is_not_used_again_while_it_is_written(cluster: Cluster) -> None:
    assert cluster.run(reuse_memory, 1, timeout=250) == [True]


def forget_results(rank: int, world_size: int) -> tuple[int, int]:
    launched = 0

    def counted(tensor: Tensor, dim: int, name: str) -> Tensor:
        nonlocal launched
        launched += 1
        return gather_late(tensor, dim, name)

    def function(x: Tensor) -> Tensor:
        collectives.all_gather_tensor(x, 0, world())
        OPS.all_gather(x, 0, 1, world().group_name)
        return x + 1

    x = numbers(rank, 3)
    with pytest.MonkeyPatch.context() as patch, compiler():
        patch.setattr(process_kernels, "all_gather", counted)
        for backend in ("aot_eager", "inductor"):
            compiled(function, backend)(x)
            torch._dynamo.reset()
        by_compilers = launched
        # What any tool does that cleans a graph up.
        graph = make_fx(function)(x)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        graph(x)
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise the works would be left to the tests that come after this one.
        patch.setattr(_Late, "over", True)
        assert pending.count() == 0
    return by_compilers, launched


@pytest.mark.slow
def test_nothing_is_removed(cluster: Cluster) -> None:
    """Others would wait for it."""
    # Once more in the trace itself, and as often when it is run.
    assert cluster.run(forget_results, 1, timeout=250) == [(4, 8)]


def trace_tokens(rank: int, world_size: int) -> list[str]:
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def function(x: Tensor) -> Tensor:
        total = collectives.all_reduce(x, "sum", world())
        return total + collectives.broadcast(x.exp(), 0, world())

    with compiler():
        compiled(function, aot_autograd(fw_compiler=keep))(numbers(rank, 3))
    (graph,) = graphs
    chain = [node for node in graph.graph.nodes if "with_effects" in str(node.target)]
    for earlier, later in itertools.pairwise(chain):
        token = later.args[0]
        assert token.args == (earlier, 0), "each takes the token of the one before"
    return [str(node.args[1]).removeprefix("dataparallel.") for node in chain]


def test_the_order_is_fixed(cluster: Cluster) -> None:
    """Two members with other sizes may not come to another order."""
    names = ["all_reduce.default", "wait_tensor.default", "broadcast.default"]
    assert cluster.run(trace_tokens, 1) == [[*names, "wait_tensor.default"]]
