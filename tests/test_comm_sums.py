"""Sums over replicas: order, memory, layouts, sparse tensors, errors."""

from __future__ import annotations

import importlib

import pytest
import torch

from dataparallel import comm, virtual
from tests.comm_cases import (
    in_order,
    laid_out,
    make,
    same,
    sparse,
)

# The function has the name of its module.
reference = importlib.import_module("dataparallel.kernels.reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("destination", [0, 1, 3])
def test_sums_are_bitwise_those_in_replica_order(
    slots: list[str], dtype: torch.dtype, destination: int
) -> None:
    terms = [torch.randn(501, dtype=dtype) * 10.0**i for i in range(4)]
    inputs = [term.to(slot) for term, slot in zip(terms, slots, strict=True)]
    total = comm.reduce_add(inputs, slots[destination])
    assert same(total, in_order(terms), slots[destination])
    small = [tensor[:3] for tensor in inputs]
    both = comm.reduce_add_coalesced(list(zip(inputs, small, strict=True)), slots[destination])
    assert same(both[0], in_order(terms), slots[destination])
    assert same(both[1], in_order(terms)[:3], slots[destination])


def test_reduce_add_does_not_touch_its_inputs(slots: list[str]) -> None:
    for destination in (*slots, "cpu"):
        inputs = [torch.ones(3, device=slot, requires_grad=True) for slot in slots]
        assert comm.reduce_add(inputs, destination).tolist() == [4, 4, 4]
        comm.reduce_add_coalesced([[tensor, tensor] for tensor in inputs], destination)
        assert all(tensor.tolist() == [1, 1, 1] for tensor in inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_sum_takes_the_memory_of_the_first_copy(dtype: torch.dtype) -> None:
    here, there = (make((20, 30), dtype, f"virtual:{i}") for i in range(2))
    before = here.cpu(), there.cpu()
    for first, second, num_made in ((here, there, 2), (there, here, 1)):
        virtual.reset_counters()
        total = comm.reduce_add([first, second], "virtual:0")
        counted = virtual.counters()
        assert counted["allocated_bytes"] == num_made * here.nbytes
        assert same(total, in_order([first.cpu(), second.cpu()]), "virtual:0")
    assert torch.equal(here.cpu(), before[0]) and torch.equal(there.cpu(), before[1])


def test_a_sum_of_two_is_laid_out_as_the_first() -> None:
    for first in laid_out("virtual:0"):
        for second in (first.contiguous(), first.transpose(0, -1).contiguous().transpose(0, -1)):
            if first.dim() == 0:
                second = first.clone()
            expected = first + second
            total = comm.reduce_add([first, second.to("virtual:1")], "virtual:0")
            assert same(total, expected.cpu(), "virtual:0")
            assert total.stride() == expected.stride()


def test_a_sum_of_two_resolves_lazy_conjugation_and_negation() -> None:
    lazy = make((2, 3), torch.complex64, "virtual:1").conj()
    for second in (lazy, lazy.imag):
        total = comm.reduce_add([second.resolve_conj().resolve_neg().to("virtual:0"), second])
        assert not total.is_conj() and not total.is_neg()
        assert same(total, second.cpu() * 2, "virtual:0")


def test_reduce_add_of_expanded_tensors(slots: list[str]) -> None:
    inputs = [torch.ones((), device=slot).expand(2, 3) for slot in slots]
    for destination in (slots[0], slots[2], "cpu"):
        assert comm.reduce_add(inputs, destination).tolist() == [[4.0] * 3] * 2
        replicas = [[tensor, tensor * 2] for tensor in inputs]
        twice = comm.reduce_add_coalesced(replicas, destination)
        assert [t.tolist() for t in twice] == [[[4.0] * 3] * 2, [[8.0] * 3] * 2]


def test_reduce_add_of_one_input_is_that_input() -> None:
    tensor = torch.ones(3, device="virtual:1")
    assert comm.reduce_add([tensor]) is tensor
    assert same(comm.reduce_add([tensor], "cpu"), tensor, "cpu")
    assert not comm.reduce_add([torch.ones(2, requires_grad=True)]).requires_grad


def test_reduce_add_goes_to_the_first_input_by_default() -> None:
    inputs = [torch.ones(1, device=f"virtual:{i}") for i in (2, 1)]
    assert comm.reduce_add(inputs).device == torch.device("virtual:2")
    assert comm.reduce_add_coalesced([[t] for t in inputs])[0].device == inputs[0].device


def test_sums_keep_strides() -> None:
    channels_last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    replicas = [
        [tensor.to(device) for tensor in (channels_last, channels_last[0])]
        for device in ("virtual:1", "virtual:2")
    ]
    replicas[1][0] = replicas[1][0].contiguous()
    for total, model in zip(
        comm.reduce_add_coalesced(replicas, "virtual:0"), replicas[0], strict=True
    ):
        assert total.stride() == model.stride()
        assert same(total, model.cpu() * 2, "virtual:0")


def test_sparse_sums() -> None:
    replicas = [
        [torch.ones(2), sparse([1.0, 2.0], [0, 3]), sparse([1.0], [2])],
        [torch.ones(2), sparse([5.0], [3]), torch.ones(5)],
    ]
    dense, both, mixed = comm.reduce_add_coalesced(replicas, "cpu")
    assert dense.tolist() == [2, 2]
    assert both.layout == torch.sparse_coo
    assert both.to_dense().tolist() == [1, 0, 0, 7, 0]
    assert mixed.tolist() == [1, 1, 2, 1, 1]
    assert replicas[0][1].to_dense().tolist() == [1, 0, 0, 2, 0]


def test_sparse_sums_between_devices_keep_the_order_of_their_entries() -> None:
    """Entries of one index are added in this order when the tensor is coalesced."""
    inputs = [sparse([1.0, 2.0], [3, 3]), sparse([5.0], [3])]
    total = comm.reduce_add([t.to(f"virtual:{i}") for i, t in enumerate(inputs)], "virtual:0")
    expected = inputs[0] + inputs[1]
    assert total.layout == torch.sparse_coo
    assert torch.equal(total._indices().cpu(), expected._indices())
    assert torch.equal(total._values().cpu(), expected._values())


def test_sparse_broadcast_scatter_and_gather() -> None:
    tensor = sparse([1.0, 2.0, 3.0], [0, 3, 4])
    _, (_, copy) = comm.broadcast_coalesced([torch.ones(2), tensor], ["cpu", "cpu"])
    assert copy.to_dense().tolist() == [1, 0, 0, 2, 3]
    chunks = comm.scatter(tensor, ["cpu", "cpu"])
    assert [chunk.to_dense().tolist() for chunk in chunks] == [[1, 0, 0], [2, 3]]
    assert comm.gather(chunks).to_dense().tolist() == [1, 0, 0, 2, 3]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], r"as many tensors, but the replicas give \[\]"),
        (
            [torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2, 2)],
            r"input 0 is torch.float32 \(2,\) and input 1 torch.float32 \(3,\)",
        ),
        (
            [torch.ones(2), torch.ones(2).double()],
            r"input 0 is torch.float32 \(2,\) and input 1 torch.float64 \(2,\)",
        ),
    ],
)
def test_reduce_add_refuses(inputs: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comm.reduce_add(inputs)
    with pytest.raises(ValueError, match=message):
        comm.reduce_add_coalesced([[tensor] for tensor in inputs])


def test_reduce_add_refuses_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"'virtual:7' does not exist; .*virtual:3"):
        comm.reduce_add([torch.ones(2)] * 2, "virtual:7")
    with pytest.raises(ValueError, match=r"as many tensors, but the replicas give \[1, 2\]"):
        comm.reduce_add_coalesced([[torch.ones(2)], [torch.ones(2)] * 2])
    with pytest.raises(ValueError, match=r"must be on one device, .* cpu, virtual:0"):
        comm.broadcast_coalesced([torch.ones(2), torch.ones(2, device="virtual:0")], ["cpu"])
    assert comm.reduce_add_coalesced([[], []]) == ()
    assert comm.broadcast_coalesced([], ["cpu", "virtual:1"]) == [[], []]


# --- floats of 16 bits -----------------------------------------------------------------------


def rounded_each_time(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_way_to_a_sum_leads_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    # In parts, as large tensors are.
    monkeypatch.setattr(reference, "_CHUNK", 1000)
    terms = [torch.randn(70, 50).to(dtype) * 3**i for i in range(count)]
    expected = in_order(terms)
    one_by_one = rounded_each_time(terms)
    assert torch.equal(expected, one_by_one) == (count == 2 or dtype == torch.float32)

    def on(*devices: str) -> list[torch.Tensor]:
        places = [devices[i % len(devices)] for i in range(count)]
        return [term.to(place) for term, place in zip(terms, places, strict=True)]

    apart = [f"virtual:{i}" for i in range(4)]
    assert same(comm.reduce_add(on("cpu")), expected, "cpu")
    assert same(comm.reduce_add(on("virtual:1")), expected, "virtual:1")
    for devices in (apart, ["virtual:2", "cpu"], ["cpu", "cpu", "virtual:0"]):
        for destination in ("cpu", "virtual:0", "virtual:2"):
            assert same(comm.reduce_add(on(*devices), destination), expected, destination)
            pairs = [[term, term[:7]] for term in on(*devices)]
            whole, part = comm.reduce_add_coalesced(pairs, destination)
            assert same(whole, expected, destination)
            assert same(part, expected[:7], destination)
    turned = [term.mT for term in on("cpu")]
    mixed = [turned[0], *(term.contiguous() for term in turned[1:])]
    assert same(comm.reduce_add(turned), expected.mT, "cpu")
    assert same(comm.reduce_add(mixed), expected.mT, "cpu")
