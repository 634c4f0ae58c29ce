"""The cost of a step, counted: collectives, copies, memory, threads."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel, kernels, virtual
from dataparallel.comm import local
from tests.cluster import Cluster
from tests.ddp_cases import Net, batch, two_layers, wrap


def _three_layers(net: Any, x: Tensor, rank: int) -> Tensor:
    output: Tensor = net.layers[2](two_layers(net, x))
    return output


def _other_layers_in_rank_one(net: Any, x: Tensor, rank: int) -> Tensor:
    return _three_layers(net, x, rank) if rank else two_layers(net, x)


def _used_twice(net: Any, x: Tensor, rank: int) -> Tensor:
    """Autograd's engine accumulates the first layer's gradients twice in one backward."""
    x = checkpoint(net.layers[0], net.layers[1](x), use_reentrant=True)
    x = torch.tanh(net.layers[2](x)) * net.scale
    output: Tensor = checkpoint(net.layers[0], x, use_reentrant=True)
    return output


def _collectives(rank: int, world_size: int, forward: Any, replicas: int) -> tuple[int, int, int]:
    model = wrap(Net("cpu", forward), replicas, bucket_cap_mb=0.0001)
    processes = model._training.processes
    assert processes is not None
    for _ in range(3):
        model(batch(), rank).sum().backward()
    sent, said = processes.buckets.launched.total(), processes.control.launched.total()
    model(batch(), rank).sum().backward()
    return (
        processes.buckets.launched.total() - sent,
        processes.control.launched.total() - said,
        len(model.reducer.buckets.all),
    )


@pytest.mark.parametrize(
    ("forward", "replicas"),
    [(_three_layers, 1), (_other_layers_in_rank_one, 2), (_used_twice, 2)],
)
def test_collectives_of_a_step(cluster: Cluster, forward: Any, replicas: int) -> None:
    """A round has only two messages, one as it begins and its vote, whatever is used."""
    for sent, said, num_buckets in cluster.run(_collectives, 2, forward, replicas):
        assert num_buckets > 2
        assert (sent, said) == (num_buckets, 2)


class _Large(TorchDispatchMode):
    """Counts the operations that make a tensor of the size of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and ("empty" in str(func) or "zeros" in str(func)):
            self.made += [str(func)] * (result.numel() >= 36)
        return result


def _allocations(rank: int, world_size: int, replicas: int, view: bool) -> list[str]:
    """Large tensors that are made in two steps after three. Views are not copied to either."""
    net, large = Net("cpu", _three_layers), _Large()
    model = wrap(net, replicas, gradient_as_bucket_view=view)
    with mock.patch.object(kernels, "unflatten", wraps=kernels.unflatten) as copied:
        for step in range(5):
            net.zero_grad()
            output = model(batch(), 0).sum()
            with large if step > 2 else contextlib.nullcontext():
                output.backward()
    assert bool(copied.call_count) is not view
    flats = {
        b.storage.flat.untyped_storage().data_ptr() for b in model.reducer.buckets.all if b.storage
    }
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert [g.untyped_storage().data_ptr() in flats for g in grads] == [view] * 7
    return large.made


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_reducer_allocates_nothing_after_the_third_step(
    cluster: Cluster, replicas: int, view: bool
) -> None:
    assert cluster.run(_allocations, 2, replicas, view) == [[], []]


def _views_that_stay(rank: int, world_size: int, average: Any) -> list[str]:
    net, large = Net("cpu", _three_layers), _Large()
    model = wrap(net, 1, gradient_as_bucket_view=True, average=average)
    x = batch()
    for _ in range(3):
        net.zero_grad(set_to_none=False)
        model(x, 0).sum().backward()
    kept = [p.grad for p in net.parameters() if p.grad is not None]
    before = [grad.clone() for grad in kept]
    net.zero_grad(set_to_none=False)
    for _ in range(2):
        output = model(x, 0).sum()
        with large:
            output.backward()
    assert all(p.grad is grad for p, grad in zip(net.parameters(), kept, strict=True))
    torch.testing.assert_close(kept, [2 * grad for grad in before])
    return [name for name in large.made if "like" not in name]


@pytest.mark.parametrize("average", ["processes", "none"])
def test_bucket_views_that_were_not_set_to_none_stay(cluster: Cluster, average: str) -> None:
    """An optimizer, or a captured graph, may hold what ``.grad`` is."""
    assert cluster.run(_views_that_stay, 2, average) == [[], []]


# --- DataParallel --------------------------------------------------------------------------------


@contextlib.contextmanager
def counting_copies() -> Iterator[list[torch.device]]:
    """Yield the targets of copies that are made in the block."""
    with mock.patch.object(local, "arrive", wraps=local.arrive) as arrive:
        made: list[torch.device] = []
        yield made
        made += [call.args[0] for call in arrive.call_args_list]


def _wrapped(devices: list[str]) -> DataParallel[nn.Sequential]:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    return DataParallel(layers.to(devices[0]), devices)


def test_a_forward_copies_parameters_only_after_a_step_and_packed() -> None:
    devices = [f"virtual:{i}" for i in range(3)]
    model = _wrapped(devices).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 3, device=devices[0])
    model(x).sum().backward()
    with counting_copies() as again:
        model(x)
    # A chunk goes to each other device, and the outputs come back together.
    assert sorted(map(str, again)) == devices
    virtual.reset_counters()
    model(x)
    unchanged = virtual.routes()
    optimizer.step()
    virtual.reset_counters()
    model(x)
    more = Counter(virtual.routes()) - Counter(unchanged)
    # All together go to one device, and from there to the other.
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert list(more.values()) == [size, size] and {end for _, end in more} == {1, 2}


def test_no_thread_starts_after_the_first_forward(slots: list[str]) -> None:
    """Nor is anything copied between replicas on the CPU."""
    model, x = _wrapped(slots), torch.randn(8, 3, device=slots[0])
    with counting_copies() as seen:
        model(x).sum().backward()
    assert bool(seen) == (slots[0] != "cpu")
    with mock.patch.object(threading.Thread, "start", autospec=True) as start:
        for _ in range(3):
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
    start.assert_not_called()
