"""Lifetime of device memory, poison, and what is counted."""

from __future__ import annotations

import gc

import pytest
import torch

from dataparallel.virtual import device_module as virtual
from dataparallel.virtual import pending, strict_mode


def test_owner_may_free_before_its_queued_work_has_run(stream: torch.Stream) -> None:
    with stream:
        a = torch.ones(4, device="virtual:0")
        b = a * 2
        del a
    stream.synchronize()
    assert b.tolist() == [2.0] * 4


def test_freed_memory_is_poison_for_other_streams(stream: torch.Stream) -> None:
    a = torch.ones(4, device="virtual:0")
    with stream:
        b = a * 2
    del a
    stream.synchronize()
    assert b.cpu().isnan().all()


def test_record_stream_protects(stream: torch.Stream) -> None:
    a = torch.ones(4, device="virtual:0")
    with stream:
        b = a * 2
    a.record_stream(stream)
    del a
    stream.synchronize()
    assert b.tolist() == [2.0] * 4


def test_recorded_stream_protects_itself_only(stream: torch.Stream) -> None:
    other = torch.Stream("virtual:0")
    a = torch.ones(4, device="virtual:0")
    with stream:
        _ = a * 2
    with other:
        b = a * 2
    a.record_stream(stream)
    del a
    stream.synchronize()
    other.synchronize()
    assert b.cpu().isnan().all()


def test_waiting_before_freeing_is_enough(stream: torch.Stream) -> None:
    with strict_mode():
        current = virtual.current_stream(0)
        a = torch.ones(4, device="virtual:0")
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


def test_statistics() -> None:
    gc.collect()
    virtual.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    a = torch.empty(1000, device="virtual:1")
    b = a + 1
    assert torch.accelerator.memory_allocated(1) == before + 8000
    assert virtual.memory_allocated("virtual:1") == before + 8000
    del a, b
    assert torch.accelerator.memory_allocated(1) == before
    assert torch.accelerator.max_memory_allocated(1) == before + 8000
    assert virtual.max_memory_allocated(1) == before + 8000
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == before
    stats = torch.accelerator.memory_stats(1)
    assert stats["allocated_bytes.all.current"] == before
    assert virtual.memory_reserved(1) == before
    torch.accelerator.empty_cache()
    virtual.empty_cache()
    free, total = virtual.mem_get_info(1)
    assert 0 < free <= total


def test_adopted_outputs_count_once() -> None:
    gc.collect()
    a = torch.ones(10, device="virtual:2")
    before = virtual.memory_allocated(2)
    views = a.view(2, 5), a[1:], a.detach()
    assert virtual.memory_allocated(2) == before
    values, indices = a.sort()
    assert virtual.memory_allocated(2) == before + 40 + 80
    del values, indices, views
    assert virtual.memory_allocated(2) == before


def test_freeing_in_another_thread_and_on_another_device(stream: torch.Stream) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with stream:
        held = [torch.ones(4, device="virtual:0")]
        b = held[0] + 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.clear).result()
    stream.synchronize()
    assert b.tolist() == [2.0] * 4


def test_loop_that_never_waits_does_not_keep_everything() -> None:
    with strict_mode():
        a = torch.zeros(1 << 24, device="virtual:0")
        for _ in range(24):
            a = a + 1
        assert pending(0) < 20
        assert a[0].item() == 24


def test_unknown_device_for_statistics() -> None:
    with pytest.raises((RuntimeError, ValueError), match="virtual"):
        virtual.memory_allocated("virtual:7")
