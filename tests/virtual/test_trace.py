"""The trace of what virtual devices queue, and dry mode, in which nothing of it runs."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import virtual
from dataparallel.virtual import TraceEntry, dry_mode, is_dry, pending, record_trace
from dataparallel.virtual import device_module as virtual_module

HERE, THERE = "virtual:0", "virtual:1"


def only(entries: Any, *kinds: str) -> list[TraceEntry]:
    return [entry for entry in entries if entry.kind in kinds]


# --- the trace -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_two_streams_and_a_copy(strict: bool) -> None:
    """The trace has the edges of the program: an event, a wait, and both ends of a copy."""
    x = torch.ones(256, 256, device=HERE)
    there = torch.zeros(256, 256, device=THERE)
    one, two, away = torch.Stream(HERE), torch.Stream(HERE), torch.Stream(THERE)
    with virtual.strict_mode(strict), virtual.check_races(False), record_trace() as trace:
        with one:
            y = x + 1
            ready = one.record_event()
        two.wait_event(ready)
        with two, away:
            there.copy_(y, non_blocking=True)
    queued = only(trace, "kernel", "copy", "record", "wait")
    assert [(each.kind, each.device, each.stream) for each in queued] == [
        ("kernel", 0, one.stream_id),
        ("record", 0, one.stream_id),
        ("wait", 0, two.stream_id),
        # The copy is behind what the destination has queued, which goes on behind the copy.
        ("record", 1, away.stream_id),
        ("wait", 0, two.stream_id),
        ("copy", 0, two.stream_id),
        ("record", 0, two.stream_id),
        ("wait", 1, away.stream_id),
    ]
    _, ready_at, waits, behind, after, copied, done, resumes = queued
    assert (ready_at.id, behind.id, done.id) == (waits.id, after.id, resumes.id)
    assert len({ready_at.id, behind.id, done.id}) == 3
    assert (copied.source, copied.destination, copied.read) == (0, 1, 256 * 256 * 4)
    times = [entry.seconds for entry in trace]
    assert times == sorted(times)


def test_bytes_of_copies_are_those_of_the_routes() -> None:
    x = torch.ones(1000, device=HERE)
    virtual.reset_counters()
    with record_trace() as trace:
        for target in (THERE, "virtual:2", THERE):
            x.to(target)
        x.to(THERE, torch.float64)
        x.cpu()
    found: dict[tuple[int, int], int] = {}
    for entry in only(trace, "copy"):
        if entry.destination >= 0:
            way = entry.source, entry.destination
            found[way] = found.get(way, 0) + entry.read
    assert found == virtual.routes()
    assert [entry.destination for entry in only(trace, "copy")].count(-1) == 1
    assert len(only(trace, "host_wait")) >= 1


@pytest.mark.parametrize(
    ("run", "read", "written", "flops"),
    [
        (lambda a, b: a @ b, 2 * 64, 64, 2 * 4**3),
        (lambda a, b: torch.addmm(b, a, b), 3 * 64, 64, 2 * 4**3),
        (lambda a, b: torch.bmm(a.expand(3, 4, 4), b.expand(3, 4, 4)), 2 * 64, 192, 6 * 4**3),
        (lambda a, b: a + b, 2 * 64, 64, 0),
        (lambda a, b: a.add_(b), 2 * 64, 64, 0),
        (lambda a, b: a.fill_(2.0), 0, 64, 0),
        (lambda a, b: torch.mm(a, b, out=torch.empty_like(a)), 2 * 64, 64, 2 * 4**3),
    ],
    ids=["mm", "addmm", "bmm", "add", "in place", "fill", "out"],
)
def test_bytes_and_operations_of_kernels(
    run: Callable[..., Any], read: int, written: int, flops: int
) -> None:
    a, b = torch.ones(4, 4, device=HERE), torch.ones(4, 4, device=HERE)
    with record_trace() as trace:
        run(a, b)
    (kernel,) = only(trace, "kernel")
    assert (kernel.read, kernel.written, kernel.flops) == (read, written, flops)


def test_operations_of_a_convolution() -> None:
    convolution = nn.Conv2d(3, 5, 3, bias=False).to(HERE)
    x = torch.ones(2, 3, 6, 6, device=HERE, requires_grad=True)
    with record_trace() as trace:
        convolution(x).sum().backward()
    products = [entry.flops for entry in only(trace, "kernel") if entry.flops]
    forward = 2 * (2 * 5 * 4 * 4) * (3 * 3 * 3)
    assert products == [forward, 2 * forward]


def test_memory_its_users_and_its_end() -> None:
    other = torch.Stream(HERE)
    with record_trace() as trace:
        x = torch.empty(1024, device=HERE)
        x.record_stream(other)
        del x
    made, used, freed = only(trace, "allocate", "use", "free")
    assert (made.kind, used.kind, freed.kind) == ("allocate", "use", "free")
    assert made.id == used.id == freed.id != 0
    assert (made.stream, used.stream, made.written) == (0, other.stream_id, 4096)


def test_each_replay_of_a_graph_counts() -> None:
    x = torch.ones(8, device=HERE)
    graph = virtual_module.VirtualGraph()
    with virtual_module.graph(graph):
        x.mul_(2).add_(1)
    with record_trace() as trace:
        graph.replay()
        graph.replay()
    names = [(entry.kind, entry.name, entry.replayed) for entry in only(trace, "replay", "kernel")]
    once = [
        ("replay", "", False),
        ("kernel", "aten::mul_.Tensor", True),
        ("kernel", "aten::add_.Tensor", True),
    ]
    assert names == 2 * once


def test_a_trace_is_read_afterwards_and_recorded_alone() -> None:
    with record_trace() as trace:
        torch.ones(1, device=HERE)
        trace.mark("here")
        with pytest.raises(RuntimeError, match="can be read when the block"):
            list(trace)
        with pytest.raises(RuntimeError, match="recorded already"), record_trace():
            pass
        assert len(trace) > 1
    assert trace[-1].name == "here"
    assert len(trace) == len(list(trace))
    with pytest.raises(RuntimeError, match="the mark 'late' would not be recorded"):
        trace.mark("late")
    torch.ones(1, device=HERE)
    assert trace[-1].name == "here"


# --- dry mode ------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_memory_is_reserved_and_not_touched() -> None:
    """40 GB of tensors on four devices, products of them, and copies between them."""
    before = resident_bytes()
    with dry_mode():
        parts = [torch.zeros(50_000, 50_000, device=f"virtual:{i}") for i in range(4)]
        parts[0].copy_(parts[1])
        result = (parts[0] @ parts[0]).sum()
        assert result.item() == 0
        assert torch.accelerator.memory_allocated(0) >= 10**10
        assert resident_bytes() - before < 2**28
    del parts, result
    assert torch.accelerator.memory_allocated(0) < 10**9


def test_nothing_runs() -> None:
    x = torch.ones(4, device=HERE)
    with dry_mode():
        assert is_dry()
        x.mul_(3)
        y = x.to(THERE, non_blocking=True)
        assert pending() == 0
        assert y.tolist() == [0, 0, 0, 0]
        assert x[0].item() == 0
        assert torch.accelerator.current_stream().query()
    assert not is_dry()
    assert x.tolist() == [1, 1, 1, 1]


def test_what_was_queued_before_runs_first() -> None:
    with torch.Stream(HERE) as side:
        x = torch.ones(4, device=HERE) * 2
        assert pending(side) > 0
    with dry_mode():
        assert pending(side) == 0
    assert x.tolist() == [2, 2, 2, 2]


def test_shapes_of_a_step_are_those_of_a_run() -> None:
    """A model with convolution, normalization, dropout and attention trains without running."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.1))
            self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.attention(self.first(x).flatten(2).transpose(1, 2))
            return result

    def shapes() -> list[Any]:
        net = Net().to(HERE)
        optimizer = torch.optim.AdamW(net.parameters())
        with record_trace() as trace:
            output = net(torch.randn(2, 3, 6, 6, device=HERE))
            output.square().mean().backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in net.parameters()]
        kernels = [entry[:7] for entry in only(trace, "kernel")]
        return [output.shape, [None if g is None else g.stride() for g in gradients], kernels]

    with virtual.strict_mode():
        expected = shapes()
    with dry_mode():
        assert shapes() == expected


def test_an_operator_without_a_meta_kernel_raises() -> None:
    with torch.library._scoped_library("dry_tests", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CPU")
        x = torch.ones(2, device=HERE)
        assert torch.ops.dry_tests.mystery(x).tolist() == [1, 1]
        with (
            dry_mode(),
            pytest.raises(NotImplementedError, match="mystery cannot be queued in dry"),
        ):
            torch.ops.dry_tests.mystery(x)


def test_a_shape_that_depends_on_values_raises() -> None:
    x = torch.ones(2, device=HERE)
    with dry_mode(), pytest.raises(NotImplementedError, match="nonzero cannot be queued in dry"):
        x.nonzero()


def test_races_are_found_in_dry_mode() -> None:
    with dry_mode(), virtual.check_races():
        x = torch.ones(8, device=HERE)
        torch.accelerator.synchronize(0)
        with torch.Stream(HERE):
            x.add_(1)
        with pytest.raises(RuntimeError, match="race"):
            x.mul_(2)
