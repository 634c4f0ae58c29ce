"""Broadcast between any devices, alone and coalesced."""

from __future__ import annotations

import pytest
import torch

from dataparallel import comm, devices, virtual
from dataparallel.comm import local
from tests.comm_cases import (
    DTYPES,
    MIXED,
    counting_copies,
    laid_out,
    make,
    same,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_broadcast(slots: list[str], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = make(shape, dtype, slots[1])
    for slot, copy in zip(slots, comm.broadcast(tensor, slots), strict=True):
        assert same(copy, tensor, slot)


def test_broadcast_to_any_mixture_and_from_anywhere() -> None:
    for origin in ("cpu", "virtual:0", "virtual:3"):
        tensor = make((2, 3), torch.float32, origin).requires_grad_()
        for slot, copy in zip(MIXED, comm.broadcast(tensor, MIXED), strict=True):
            assert same(copy, tensor.detach(), slot)


def test_devices_are_ints_strings_and_devices() -> None:
    tensor = make((2,), torch.float32)
    on_three, on_one, on_cpu = comm.broadcast(tensor, [3, "virtual:1", torch.device("cpu")])
    assert [str(t.device) for t in (on_three, on_one, on_cpu)] == ["virtual:3", "virtual:1", "cpu"]


def test_broadcast_shares_memory_on_one_device() -> None:
    tensor = torch.zeros(2, device="virtual:1")
    own, first, second, again = comm.broadcast(
        tensor, ["virtual:1", "virtual:2", "virtual:2", "virtual:1"]
    )
    assert own.data_ptr() == again.data_ptr() == tensor.data_ptr()
    assert first.data_ptr() == second.data_ptr() != tensor.data_ptr()
    own.add_(1)
    assert tensor.tolist() == [1, 1]
    assert first.tolist() == [0, 0]


def test_broadcast_to_all_accelerators() -> None:
    copies = comm.broadcast(torch.ones(2))
    assert [copy.device for copy in copies] == list(devices.accelerators())


def test_broadcast_refuses_devices_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"'virtual:9' does not exist; .*virtual:0.*cpu"):
        comm.broadcast(torch.ones(2), ["virtual:9"])


@pytest.mark.parametrize("buffer_size", [1, 500, 10485760])
def test_broadcast_coalesced_keeps_strides_and_order(buffer_size: int) -> None:
    tensors = laid_out("virtual:1")
    tensors += [make((4,), dtype, "virtual:1") for dtype in DTYPES]
    expected = [tensor.to("cpu") for tensor in tensors]
    devices = ["virtual:0", "cpu", "virtual:1", "virtual:0"]
    results = comm.broadcast_coalesced(tensors, devices, buffer_size)
    for device, on_device in zip(devices, results, strict=True):
        for copy, tensor, moved in zip(on_device, tensors, expected, strict=True):
            assert same(copy, tensor, device)
            if copy.device == tensor.device:
                assert copy.data_ptr() == tensor.data_ptr()
            else:
                assert copy.stride() == moved.stride()


def test_broadcast_coalesced_on_one_device_shares() -> None:
    tensors = laid_out("cpu")
    for replica in comm.broadcast_coalesced(tensors, ["cpu", "cpu"]):
        for copy, tensor in zip(replica, tensors, strict=True):
            assert copy.data_ptr() == tensor.data_ptr()
            assert copy.stride() == tensor.stride()


def test_coalesced_results_have_their_own_version_counters() -> None:
    tensors = [torch.ones(3, device="virtual:0") for _ in range(3)]
    for results in (
        comm.broadcast_coalesced(tensors, ["virtual:1"])[0],
        comm.reduce_add_coalesced([tensors, tensors], "virtual:1"),
    ):
        before = [tensor._version for tensor in results]
        results[0].add_(1)
        assert [tensor._version for tensor in results[1:]] == before[1:]
        assert results[0]._version == before[0] + 1
        assert results[1].tolist() in ([1, 1, 1], [2, 2, 2])


def test_coalescing_saves_copies() -> None:
    tensors = [torch.ones(n, device="virtual:0") for n in (3, 4, 5)] + [
        torch.ones(2, device="virtual:0", dtype=torch.float64)
    ]
    with counting_copies() as made:
        comm.broadcast_coalesced(tensors, ["virtual:0", "virtual:1", "virtual:2", "virtual:1"])
    assert len(made) == 2 * 2, "one buffer per dtype, to each of two other devices"
    with counting_copies() as made:
        comm.reduce_add_coalesced([tensors, tensors], "virtual:1")
    assert len(made) == 2 * 2, "one buffer per dtype and replica"
    with counting_copies() as made:
        comm.broadcast_coalesced(tensors, ["virtual:0"] * 3)
        comm.reduce_add_coalesced([tensors] * 3, "virtual:0")
    assert made == []


def test_lazy_conjugation_and_negation() -> None:
    lazy = make((2, 3), torch.complex64).conj()
    negative = lazy.imag
    assert lazy.is_conj()
    assert negative.is_neg()
    for tensor in (lazy, negative):
        values = tensor.resolve_conj().resolve_neg()
        for copy in comm.broadcast_coalesced([tensor, values, values], ["virtual:0"])[0]:
            assert torch.equal(copy.cpu(), values)
        for total in comm.reduce_add_coalesced([[tensor, values], [values, tensor]], "virtual:0"):
            assert torch.equal(total.cpu(), values * 2)


def test_large_tensors_are_not_packed() -> None:
    tensors = [torch.ones(n, device="virtual:0") for n in (3, local.LARGE_BYTES, 4)]
    others = [tensor.to("virtual:1") for tensor in tensors]
    large, small = tensors[1].nbytes, tensors[0].nbytes + tensors[2].nbytes
    virtual.reset_counters()
    comm.broadcast_coalesced(tensors, ["virtual:1"])
    counted = virtual.counters()
    assert counted["copies_device_to_device"] == 2
    assert counted["allocated_bytes"] == large + 2 * small
    virtual.reset_counters()
    sums = comm.reduce_add_coalesced([tensors, others], "virtual:0")
    counted = virtual.counters()
    assert [set(total.tolist()) for total in sums] == [{2.0}] * 3
    assert counted["copies_device_to_device"] == 2
    assert counted["allocated_bytes"] == 2 * large + 3 * small
