"""Broadcast, sums, scatter and gather between any devices, against torch.chunk and torch.cat."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dataparallel import comm, devices, virtual
from dataparallel.comm import copies, packing
from dataparallel.comm.nccl import Nccl
from dataparallel.devices import NullStream, parse_devices

local = importlib.import_module("dataparallel.comm.local")

MIXED = ["virtual:2", "cpu", "virtual:0", "virtual:2", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def make(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    values = torch.arange(math.prod(shape)).reshape(tuple(shape)) % 7
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype).to(device)
    return values.to(dtype).to(device)


def same(tensor: torch.Tensor, expected: torch.Tensor, device: str | torch.device) -> bool:
    return (
        tensor.device == torch.device(device)
        and tensor.dtype == expected.dtype
        and tensor.shape == expected.shape
        and torch.equal(tensor.cpu(), expected.cpu())
        and not tensor.requires_grad
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


def test_broadcast_into_out() -> None:
    tensor = make((2, 3), torch.float32, "virtual:0")
    out = [torch.empty(2, 3, device=device) for device in MIXED]
    results = comm.broadcast(tensor, out=out)
    assert all(a is b for a, b in zip(results, out, strict=True))
    assert all(same(t, tensor, device) for t, device in zip(out, MIXED, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either devices or out, but got devices=None and out=None"),
        (
            {"devices": ["cpu"], "out": [torch.empty(2)]},
            r"either devices or out, but got devices=\['cpu'\] and out=1 tensors",
        ),
        ({"devices": ["virtual:9"]}, r"'virtual:9' does not exist; .*virtual:0.*cpu"),
        ({"out": [torch.empty(3)]}, r"out\[0\] has shape \(3,\) but its content has shape \(2,\)"),
    ],
)
def test_broadcast_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comm.broadcast(torch.ones(2), **arguments)


# --- strides and layouts -------------------------------------------------------------------------


def laid_out(device: str) -> list[torch.Tensor]:
    """Tensors whose elements lie in memory in various orders."""
    base = torch.arange(120.0).reshape(2, 3, 4, 5).to(device)
    return [
        base,
        base.contiguous(memory_format=torch.channels_last),
        base.permute(3, 0, 2, 1),
        base[:, :, ::2, 1:3],
        base[0, 0, 0].expand(6, 5),
        base[:0],
        base[0, 0, 0, 0],
    ]


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


@contextlib.contextmanager
def counting_copies() -> Iterator[list[torch.device]]:
    made: list[torch.device] = []
    arrive = copies.arrive

    def counted(device: torch.device, *args: Any) -> torch.Tensor:
        made.append(device)
        return arrive(device, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "arrive", counted)
        yield made


def test_packing_resolves_lazy_conjugation_and_negation() -> None:
    lazy = make((2, 3), torch.complex64).conj()
    negative = lazy.imag
    assert lazy.is_conj()
    assert negative.is_neg()
    for tensor in (lazy, negative):
        strides = packing.packed_strides(tensor)
        assert not packing.memory_order(tensor, strides).is_conj()
        assert not packing.memory_order(tensor, strides).is_neg()
        flat = packing.pack([tensor, tensor], [strides] * 2)
        for again in packing.unpack(flat, [tensor.shape] * 2, [strides] * 2):
            assert torch.equal(again, tensor.resolve_conj().resolve_neg())


def test_groups_are_planned_from_sizes_alone() -> None:
    tensors = [
        torch.empty(2),  # 8 bytes
        torch.empty(1, dtype=torch.float64),
        torch.empty(3),
        torch.empty(100),
        torch.empty(1),
        torch.empty(0),
    ]
    assert packing.plan_groups(tensors, 20) == ((0, 2), (1,), (3,), (4, 5))
    assert packing.plan_groups(tensors, 10**6) == ((0, 2, 3, 4, 5), (1,))
    assert packing.plan_groups([], 20) == ()


def test_a_large_tensor_is_alone_and_closes_no_group() -> None:
    sizes = (3, packing.LARGE_BYTES, 3, packing.LARGE_BYTES - 1, 3)
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    assert packing.plan_groups(tensors, 10**9) == ((0, 2, 3, 4), (1,))


def test_large_tensors_are_not_packed() -> None:
    tensors = [torch.ones(n, device="virtual:0") for n in (3, packing.LARGE_BYTES, 4)]
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
    assert counted["allocated_bytes"] == large + 3 * small


# --- sums ----------------------------------------------------------------------------------------


def in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


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
def test_a_sum_of_two_takes_the_memory_of_the_copy(dtype: torch.dtype) -> None:
    here, there = (make((20, 30), dtype, f"virtual:{i}") for i in range(2))
    before = here.cpu(), there.cpu()
    for first, second in ((here, there), (there, here)):
        virtual.reset_counters()
        total = comm.reduce_add([first, second], "virtual:0")
        counted = virtual.counters()
        assert counted["allocated_bytes"] == here.nbytes
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


def sparse(values: Sequence[float], indices: Sequence[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([list(indices)]), torch.tensor(list(values)), (5,), check_invariants=True
    )


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
        ([], "at least one tensor, got none"),
        (
            [torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2, 2)],
            r"input 1 has size \(3,\) but input 0 has size \(2,\); "
            r"input 3 has size \(2, 2\) but input 0",
        ),
        (
            [torch.ones(2), torch.ones(2).double()],
            "input 1 has dtype torch.float64 but input 0 has dtype torch.float32",
        ),
    ],
)
def test_reduce_add_refuses(inputs: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comm.reduce_add(inputs)
    with pytest.raises(ValueError, match=message if inputs else "at least one replica, got none"):
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


# --- scatter and gather --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 17])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_divides_as_torch_chunk(slots: list[str], size: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = size
    tensor = torch.randn(shape)
    for origin in ("cpu", slots[1]):
        chunks = comm.scatter(tensor.to(origin), slots, dim=dim)
        expected = tensor.chunk(4, dim)
        assert len(chunks) == len(expected)
        for chunk, model, slot in zip(chunks, expected, slots, strict=False):
            assert same(chunk, model, slot)
        assert torch.equal(comm.gather(chunks, dim, origin).cpu(), tensor)


def test_scatter_by_chunk_sizes(slots: list[str]) -> None:
    tensor = torch.randn(2, 9)
    chunks = comm.scatter(tensor, slots, [4, 0, 3, 2], dim=1)
    for chunk, model, slot in zip(chunks, torch.split(tensor, [4, 0, 3, 2], 1), slots, strict=True):
        assert same(chunk, model, slot)


def test_scatter_of_an_empty_batch_is_one_chunk(slots: list[str]) -> None:
    (chunk,) = comm.scatter(torch.empty(3, 0, 2), slots, dim=1)
    assert same(chunk, torch.empty(3, 0, 2), slots[0])


def test_scatter_into_out_and_gather_into_out() -> None:
    tensor = make((5, 2), torch.complex64, "virtual:1")
    devices = ["cpu", "virtual:1", "virtual:0"]
    out = [
        torch.empty(n, 2, dtype=torch.complex64, device=d)
        for n, d in zip((2, 0, 3), devices, strict=True)
    ]
    assert comm.scatter(tensor, out=out)[2] is out[2]
    for chunk, model, device in zip(
        out, torch.split(tensor.cpu(), [2, 0, 3]), devices, strict=True
    ):
        assert same(chunk, model, device)
    whole = torch.empty(5, 2, dtype=torch.complex64, device="virtual:3")
    assert comm.gather(out, out=whole) is whole
    assert same(whole, tensor, "virtual:3")


def test_gather_promotes_dtypes_and_keeps_channels_last(slots: list[str]) -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    parts = [image.to(slots[0]), image.double().to(slots[1])]
    expected = torch.cat([image, image.double()])
    for destination in ("cpu", slots[1], "virtual:3"):
        gathered = comm.gather(parts, 0, destination)
        assert same(gathered, expected, destination)
        assert gathered.stride() == expected.stride()


def test_gather_stacks_tensors_without_dimensions(slots: list[str]) -> None:
    gathered = comm.gather([torch.tensor(float(i), device=s) for i, s in enumerate(slots)], 0, -1)
    assert same(gathered, torch.arange(4.0), "cpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: comm.scatter(t, ["cpu"], dim=2), r"dim 2 is out of range .*\(4, 2\).* -2 to 1"),
        (lambda t: comm.scatter(t[0, 0], ["cpu"]), r"dim 0 is out of range .*no dimension"),
        (lambda t: comm.scatter(t, ["cpu"] * 2, [1, 2]), r"\(1, 2\) have 3 .* has 4 along dim 0"),
        (lambda t: comm.scatter(t, ["cpu"] * 2, [5, -1]), r"negative length, .*\(5, -1\)"),
        (lambda t: comm.scatter(t, ["cpu"] * 2, [4]), "1 entries, but there are 2 devices"),
        (lambda t: comm.scatter(t, ["cpu"], out=[t]), r"together with devices=\['cpu'\]"),
        (lambda t: comm.scatter(t, chunk_sizes=[4], out=[t]), r"and chunk_sizes=\[4\]"),
        (lambda t: comm.scatter(t, out=[t[:, 0]]), "have 4|shape"),
        (lambda t: comm.gather([]), "at least one tensor"),
        (lambda t: comm.gather([t, t[:, :1]]), r"tensor 1 has shape \(4, 1\) but .* \(4, 2\)"),
        (lambda t: comm.gather([t, t[0]]), r"tensor 1 has shape \(2,\) but"),
        (lambda t: comm.gather([t], 3), "dim 3 is out of range"),
        (lambda t: comm.gather([t], destination="cpu", out=t), "together with destination=cpu"),
        (lambda t: comm.gather([t, t], out=t), r"out\[0\] has shape \(4, 2\) .* \(8, 2\)"),
        (lambda t: comm.gather([t], destination="virtual:8"), "'virtual:8' does not exist"),
    ],
)
def test_scatter_and_gather_refuse(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(4, 2))


# --- streams -------------------------------------------------------------------------------------


def queued_work(device: str) -> torch.Tensor:
    """Ones that the current stream of a device still has to compute, in strict mode."""
    return torch.zeros(1000, device=device) + 1


def values(tensor: torch.Tensor) -> set[float]:
    return set(tensor.tolist())


def test_a_copy_follows_the_work_before_it_and_precedes_the_work_after_it() -> None:
    with virtual.strict_mode():
        for origin in ("virtual:0", "cpu"):
            source = queued_work(origin)
            source = source.pin_memory() if origin == "cpu" else source
            (copy,) = comm.broadcast(source, ["virtual:1"])
            assert values(copy * 3) == {3}


def test_a_freed_copy_outlives_the_work_that_uses_it() -> None:
    with virtual.strict_mode():
        (copy,) = comm.broadcast(queued_work("virtual:0"), ["virtual:1"])
        tripled = copy * 3
        devices.copy_stream(copy.device).synchronize()
        del copy
        assert values(tripled) == {3}


def test_a_part_on_the_destination_is_computed_before_it_is_gathered() -> None:
    with virtual.strict_mode():
        parts = [queued_work("virtual:1"), queued_work("virtual:2")]
        gathered = comm.gather(parts, destination="virtual:1")
        devices.copy_stream(gathered.device).synchronize()
        assert values(gathered) == {1}


def test_the_host_waits_only_for_memory_that_it_may_change() -> None:
    with virtual.strict_mode():
        comm.broadcast(queued_work("virtual:0"), ["virtual:1"])
        assert virtual.pending("virtual:0") > 0
        comm.gather([queued_work("virtual:0"), queued_work("virtual:1")])
        assert virtual.pending("virtual:0") > 0
        pinned = torch.ones(1000).pin_memory()
        chunks = comm.scatter(pinned, ["virtual:2", "virtual:3"])
        assert virtual.pending("virtual:2") > 0
        assert virtual.pending("virtual:3") > 0
        pageable = torch.ones(1000)
        late = comm.scatter(pageable, ["virtual:2", "virtual:3"])
        pageable.zero_()
        assert [values(chunk) for chunk in (*chunks, *late)] == [{1}] * 4


def test_sources_may_be_freed_at_once() -> None:
    with virtual.strict_mode():
        parts = [queued_work(f"virtual:{i}") for i in (1, 2, 3)]
        gathered = comm.gather(parts, destination="virtual:1")
        total = comm.reduce_add(parts, "virtual:2")
        del parts
        for index in (1, 2, 3):
            torch.empty(1000, device=f"virtual:{index}").fill_(7)
        assert values(gathered) == {1}
        assert values(total) == {3}


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued, in order, where every stream has a name. See Note [Streams of a copy]."""
    log: list[str] = []
    names: dict[int, str] = {}

    def stream(kind: str) -> Any:
        def of(device: torch.device) -> NullStream:
            made = NullStream(device)
            names[id(made)] = f"{kind} {device}"
            kept.append(made)
            return made

        return of

    kept: list[NullStream] = []

    @contextlib.contextmanager
    def use(made: NullStream) -> Iterator[None]:
        log.append(f"on {names[id(made)]}:")
        yield
        log.append("done")

    for name, replacement in {
        "current_stream": stream("current"),
        "copy_stream": stream("copy"),
        "use_stream": use,
        "wait_stream": lambda w, a: log.append(f"{names[id(w)]} waits for {names[id(a)]}"),
        "record_stream": lambda t, s: log.append(f"{t.device} tensor used on {names[id(s)]}"),
    }.items():
        monkeypatch.setattr(devices, name, replacement)
    return log


def test_order_of_a_copy_between_devices(queued: list[str]) -> None:
    comm.broadcast(torch.ones(2, device="virtual:0"), ["virtual:0", "virtual:1"])
    assert queued == [
        "on copy virtual:1:",
        "done",
        "current virtual:1 waits for copy virtual:1",
        "virtual:1 tensor used on current virtual:1",
    ]


def test_order_of_a_gather_of_several_devices(queued: list[str]) -> None:
    parts = [torch.ones(1, device=f"virtual:{i}") for i in (1, 2, 1)]
    comm.gather(parts, destination="virtual:1")
    assert queued == [
        "copy virtual:1 waits for current virtual:1",
        "on copy virtual:1:",
        "done",
        "current virtual:1 waits for copy virtual:1",
        "virtual:1 tensor used on current virtual:1",
    ]


def test_nothing_waits_on_the_cpu_or_within_a_device(queued: list[str]) -> None:
    tensor = torch.ones(4, device="virtual:0")
    comm.broadcast(tensor, ["cpu", "virtual:0"])
    comm.gather([tensor, torch.ones(1)], destination="cpu")
    comm.gather([tensor, tensor])
    comm.reduce_add([tensor, tensor])
    comm.scatter(tensor, ["cpu", "virtual:0"])
    assert queued == []


# --- transports ----------------------------------------------------------------------------------


def chosen(tensors: list[torch.Tensor], devices: list[str]) -> str:
    slots = parse_devices(devices)
    return type(local.choose(local._TRANSPORTS, tensors, slots)).__name__


def test_transport_follows_from_the_devices() -> None:
    on_cpu, on_one = torch.ones(2), torch.ones(2, device="virtual:1")
    assert chosen([on_cpu, on_cpu], ["cpu"]) == "SharedMemory"
    assert chosen([on_one], ["virtual:1", "virtual:1"]) == "SharedMemory"
    assert chosen([on_one], ["virtual:1", "virtual:2"]) == "Copies"
    assert chosen([on_cpu, on_one], ["cpu"]) == "Copies"


class _OnCuda:
    """Enough of a tensor to ask a transport about devices that this machine may lack."""

    layout = torch.strided

    def __init__(self, index: int, dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device("cuda", index)
        self._like = torch.empty(0, dtype=dtype)

    def is_complex(self) -> bool:
        return self._like.is_complex()

    def is_floating_point(self) -> bool:
        return self._like.is_floating_point()


def test_nccl_serves_sums_only_where_their_order_cannot_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serves(tensors: list[Any], *devices: int) -> bool:
        return Nccl().serves(tensors, [torch.device("cuda", i) for i in devices])

    monkeypatch.setattr(torch._C, "_nccl_all_reduce", None, raising=False)
    pair, three = [_OnCuda(0), _OnCuda(1)], [_OnCuda(0), _OnCuda(1), _OnCuda(2)]
    assert serves([_OnCuda(0)], 0, 1, 2)
    assert not serves([_OnCuda(0)], 0)
    assert not serves([_OnCuda(0, torch.complex64)], 0, 1)
    assert serves(pair, 1)
    assert not serves(pair, 2), "the sum must end where one of its terms is"
    assert not serves(three, 0), "NCCL adds three terms in an order of its own"
    assert serves([_OnCuda(i, torch.int64) for i in range(3)], 0)
    assert not serves([_OnCuda(0), _OnCuda(0)], 0)
    monkeypatch.delattr(torch._C, "_nccl_all_reduce")
    assert not serves(pair, 1), "this torch was built without NCCL"


@pytest.mark.multi_gpu(2)
def test_nccl_equals_copies() -> None:
    tensors = [torch.randn(4, 3, 2, 5).to(f"cuda:{i}") for i in range(2)]
    tensors = [tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors]
    slots = parse_devices(["cuda:0", "cuda:1"])
    by_nccl, by_copies = Nccl(), copies.Copies()
    assert by_nccl.serves(tensors[:1], slots)
    for mine, theirs in zip(
        by_nccl.broadcast(tensors[0], slots), by_copies.broadcast(tensors[0], slots), strict=True
    ):
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)
    for destination in slots:
        mine = by_nccl.reduce_add(tensors, destination)
        theirs = by_copies.reduce_add(tensors, destination)
        assert mine.device == destination
        assert torch.equal(mine, theirs)
