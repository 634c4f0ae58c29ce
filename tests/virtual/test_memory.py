"""Lifetime of device memory, poison, what is counted, and devices that have only so much."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dataparallel.virtual import (
    check_races,
    counters,
    pending,
    reset_counters,
    routes,
    set_memory_limit,
    strict_mode,
)
from dataparallel.virtual import device_module as virtual


@pytest.fixture(autouse=True)
def _no_limits() -> Iterator[None]:
    yield
    set_memory_limit(None, None)


def ones() -> torch.Tensor:
    return torch.ones(4, device="virtual:0")


@pytest.mark.parametrize("recorded", ["nothing", "another stream", "the stream"])
def test_freed_memory_is_poison_for_streams_that_were_not_recorded(
    stream: torch.Stream, recorded: str
) -> None:
    with check_races(False):
        other = torch.Stream("virtual:0")
        a = ones()
        with other:
            _ = a * 2
        with stream:
            b = a * 2
        if recorded != "nothing":
            a.record_stream(stream if recorded == "the stream" else other)
        del a
        other.synchronize()
        stream.synchronize()
        if recorded == "the stream":
            assert b.tolist() == [2.0] * 4
        else:
            assert b.cpu().isnan().all()


def test_owner_may_free_before_its_queued_work_has_run(stream: torch.Stream) -> None:
    with stream:
        held = [ones()]
        b = held[0] * 2
        a = ones()
        c = a * 2
        del a
    # In another thread and on another device, too.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.clear).result()
    stream.synchronize()
    assert b.tolist() == c.tolist() == [2.0] * 4


def test_waiting_before_freeing_is_enough(stream: torch.Stream) -> None:
    with strict_mode():
        current = virtual.current_stream(0)
        a = ones()
        stream.wait_stream(current)
        with stream:
            b = a * 2
        current.wait_stream(stream)
        del a
        current.synchronize()
        stream.synchronize()
        assert b.tolist() == [2.0] * 4


def test_memory_never_written_is_poison_in_strict_mode() -> None:
    with strict_mode():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            assert torch.empty(5, dtype=dtype, device="virtual:0").cpu().isnan().all()
        for dtype in (torch.int16, torch.int32, torch.int64):
            values = torch.empty(5, dtype=dtype, device="virtual:0").cpu()
            assert (values > 30_000).all()
            assert (values % 2 == 1).all()
    assert pending() == 0


def test_loop_that_never_waits_does_not_keep_everything() -> None:
    with strict_mode():
        a = torch.zeros(1 << 24, device="virtual:0")
        for _ in range(19):
            a = a + 1
        assert pending(0) < 18
        assert a[0].item() == 19


# --- what is counted -----------------------------------------------------------------------------


def test_counters() -> None:
    x = torch.ones(8)
    reset_counters()
    a = x.to("virtual:0")
    b = a.to("virtual:1")
    _ = b.clone()
    b.cpu()
    seen = counters()
    for kind in ("host_to_device", "device_to_device", "device_to_host"):
        assert (seen[f"copies_{kind}"], seen[f"bytes_{kind}"]) == (1, 32)
    assert (seen["kernels"], seen["allocations"], seen["allocated_bytes"]) == (1, 3, 96)
    assert seen["host_waits"] == 2
    assert counters("virtual:0")["copies_device_to_device"] == 1
    assert counters(1)["kernels"] == 1
    reset_counters(0)
    assert counters(0)["allocations"] == 0
    assert counters(1)["allocations"] == 2


def test_bytes_are_counted_per_route() -> None:
    x = torch.ones(8, device="virtual:0")
    reset_counters()
    y = x.to("virtual:1")
    x[:2].to("virtual:1")
    y.to("virtual:0")
    x.clone()
    x.cpu()
    assert routes() == {(0, 1): 40, (1, 0): 32}
    reset_counters(1)
    assert routes() == {(0, 1): 40}
    reset_counters()
    assert routes() == {}


def test_waits_of_the_host_are_counted() -> None:
    device = torch.device("virtual:0")
    x = torch.ones(8, device=device)
    pinned = torch.zeros(8).pin_memory()
    event = torch.Event(device)
    waits: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "to the host": lambda: x.cpu(),
        "from the host": lambda: x.copy_(pinned),
        "device": lambda: torch.accelerator.synchronize(device),
        "stream": lambda: torch.accelerator.current_stream(device).synchronize(),
        "event": event.synchronize,
    }
    event.record()
    for name, wait in waits.items():
        reset_counters()
        wait()
        assert (counters(0)["host_waits"], counters(1)["host_waits"]) == (1, 0), name
    reset_counters()
    x.mul_(2).sum()
    pinned.copy_(x, non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    x.to("virtual:1")
    torch.Stream(device).wait_event(event)
    assert counters()["host_waits"] == 0


def test_statistics() -> None:
    gc.collect()
    virtual.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    a = torch.empty(1000, device="virtual:1")
    b = a + 1
    # Views have no memory of their own, and each output has it once.
    views = a.view(2, 500), a[1:], a.detach()
    assert virtual.memory_allocated("virtual:1") == before + 8000
    del a, b, views
    assert torch.accelerator.memory_allocated(1) == before
    values, indices = torch.ones(10, device="virtual:1").sort()
    assert virtual.memory_allocated(1) == before + 40 + 80
    del values, indices
    assert virtual.max_memory_allocated(1) == before + 8000
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == before
    stats = torch.accelerator.memory_stats(1)
    assert stats["allocated_bytes.all.current"] == before < virtual.memory_reserved(1)
    virtual.empty_cache()
    assert virtual.memory_reserved(1) == before
    free, total = virtual.mem_get_info(1)
    assert 0 < free <= total


def test_memory_of_a_recorded_stream_is_active_until_that_has_passed(stream: torch.Stream) -> None:
    virtual.empty_cache()
    torch.accelerator.reset_peak_memory_stats(0)
    start = virtual.memory_stats(0)

    def grown() -> list[int]:
        """Bytes allocated, active and reserved, and the peaks of these."""
        stats, kinds = virtual.memory_stats(0), ("allocated", "active", "reserved")
        keys = [f"{k}_bytes.all.{which}" for which in ("current", "peak") for k in kinds]
        return [stats[key] - start[key] for key in keys]

    x = torch.ones(250, device="virtual:0")
    stream.wait_stream(virtual.current_stream(0))
    with stream:
        x.add_(1)
    x.record_stream(stream)
    del x
    assert grown() == [0, 1000, 1000] + [1000] * 3
    # An active block cannot be handed out.
    x = torch.ones(250, device="virtual:0")
    assert grown() == [1000, 2000, 2000, 1000, 2000, 2000]
    stream.synchronize()
    del x
    assert grown() == [0, 0, 2000, 1000, 2000, 2000]
    x = torch.ones(300, device="virtual:0")
    assert grown() == [1200, 1200, 2000, 1200, 2000, 2000]
    del x
    virtual.empty_cache()
    assert grown()[:3] == [0, 0, 0]


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_what_does_not_fit_raises_and_changes_nothing(strict: bool) -> None:
    with strict_mode(strict):
        used = virtual.memory_allocated(1)
        set_memory_limit("virtual:1", used + 1000)
        assert virtual.mem_get_info(1) == (1000, used + 1000)
        assert virtual.get_device_properties(1).total_memory == used + 1000
        x = torch.ones(150, device="virtual:1")
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"^virtual:1 is out of memory\. Tried to allocate 600 bytes; \d+ are in use, and "
            rf"dataparallel\.virtual\.set_memory_limit allows {used + 1000}\.$",
        ):
            x * 2
        with pytest.raises(torch.OutOfMemoryError, match="virtual:1 is out of memory"):
            torch.ones(150).to("virtual:1")
        assert virtual.memory_allocated(1) == used + 600
        assert x.sum().item() == 150
        del x
        for _ in range(5):
            # A block that is free again can be used.
            assert torch.ones(240, device="virtual:1").sum().item() == 240
        # The others have no limit.
        assert torch.ones(1000, device="virtual:2").sum().item() == 1000
        set_memory_limit("virtual:1", None)
        assert virtual.mem_get_info(1)[1] > used + 1000


def test_all_devices_can_be_limited_at_once() -> None:
    set_memory_limit(None, 0)
    for i in range(4):
        with pytest.raises(torch.OutOfMemoryError, match=f"virtual:{i} is out of memory"):
            torch.ones(1000, device=f"virtual:{i}")
    set_memory_limit(None, None)
    assert torch.ones(1000, device="virtual:3").sum().item() == 1000
