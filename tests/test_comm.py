"""Copies, sums, scatter and gather between any devices, against what torch computes on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from dataparallel import comm, devices, virtual
from dataparallel.comm import local

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
PLACES = {
    "cpu": ["cpu"] * 4,
    "virtual": [f"virtual:{i}" for i in range(4)],
    "mixed": ["virtual:2", "cpu", "virtual:0", "virtual:2", "cpu"],
}


@pytest.fixture(params=PLACES)
def places(request: pytest.FixtureRequest) -> list[str]:
    return PLACES[request.param]


def make(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    values = torch.arange(math.prod(shape)).reshape(tuple(shape)) % 7
    if dtype.is_complex:
        return torch.complex(values.float(), -values.float()).to(dtype).to(device)
    return values.to(dtype).to(device)


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


def sparse(values: Sequence[float], indices: Sequence[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([list(indices)]), torch.tensor(list(values)), (5,), check_invariants=True
    )


def in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in replica order; of floats of 16 bits in float32, rounded once."""
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype.itemsize == 2 else tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(dtype)


def same(tensor: torch.Tensor, expected: torch.Tensor, device: str | torch.device) -> bool:
    return (
        tensor.device == torch.device(device)
        and tensor.dtype == expected.dtype
        and tensor.shape == expected.shape
        and torch.equal(tensor.cpu(), expected.cpu())
        and not tensor.requires_grad
    )


# --- broadcast -------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["cpu", "virtual:1"])
def test_broadcast(places: list[str], origin: str) -> None:
    tensors = laid_out(origin)
    tensors += [make(shape, dtype, origin) for dtype in DTYPES for shape in ((3, 4), (), (0, 2))]
    lazy = make((2, 3), torch.complex64, origin).conj()
    tensors += [lazy, lazy.imag, torch.ones(2, device=origin, requires_grad=True)]
    one_by_one = zip(*[comm.broadcast(tensor, places) for tensor in tensors], strict=True)
    results: list[Any] = [list(one_by_one)]
    results += [comm.broadcast_coalesced(tensors, places, size) for size in (1, 500, 10485760)]
    for result in results:
        objects = [copy for copies in result for copy in copies]
        assert len({*map(id, objects)}) == len(objects), "each slot has tensors of its own"
        for place, copies in zip(places, result, strict=True):
            others = result[places.index(place)]
            for copy, other, tensor in zip(copies, others, tensors, strict=True):
                assert same(copy, tensor.detach(), place)
                moved = tensor.detach().to("virtual:0" if origin == "cpu" else "cpu")
                assert copy.stride() == moved.stride() or place == origin
                assert copy.data_ptr() == other.data_ptr(), "slots of one device share"
                if place == origin:
                    assert copy.data_ptr() == tensor.data_ptr()
                    assert copy.stride() == tensor.stride()


def test_devices_are_ints_strings_and_devices() -> None:
    copies = comm.broadcast(torch.ones(2), [3, "virtual:1", torch.device("cpu")])
    assert [str(copy.device) for copy in copies] == ["virtual:3", "virtual:1", "cpu"]
    assert [copy.device for copy in comm.broadcast(torch.ones(2))] == [*devices.accelerators()]


def test_coalesced_results_have_their_own_version_counters() -> None:
    tensors = [torch.ones(3, device="virtual:0") for _ in range(3)]
    for results in (
        comm.broadcast_coalesced(tensors, ["virtual:1"])[0],
        comm.reduce_add_coalesced([tensors, tensors], "virtual:1"),
    ):
        before = [tensor._version for tensor in results]
        results[0].add_(1)
        assert [tensor._version for tensor in results] == [before[0] + 1, *before[1:]]


@pytest.mark.parametrize(
    ("call", "copies", "large", "small"),
    [
        # One buffer per dtype, packed and on each other device; a large tensor is copied itself.
        (lambda here, _: comm.broadcast_coalesced(here, ["virtual:0", "virtual:1"] * 2), 3, 1, 2),
        (lambda here, _: comm.broadcast_coalesced(here, ["virtual:0"] * 3), 0, 0, 0),
        # Packed on both devices, copied, and the sums.
        (lambda here, there: comm.reduce_add_coalesced([here, there], "virtual:0"), 3, 2, 4),
        (lambda here, there: comm.reduce_add_coalesced([there, here], "virtual:0"), 3, 2, 4),
        (lambda here, _: comm.reduce_add_coalesced([here] * 3, "virtual:0"), 0, 1, 1),
    ],
)
def test_small_tensors_travel_together(call: Any, copies: int, large: int, small: int) -> None:
    here = [torch.ones(n, device="virtual:0") for n in (3, local.LARGE_BYTES_OF_LINKS // 4, 4)]
    here += [torch.ones(n, device="virtual:0", dtype=torch.float64) for n in (2, 5)]
    there = [tensor.to("virtual:1") for tensor in here]
    virtual.reset_counters()
    call(here, there)
    counted = virtual.counters()
    assert counted["copies_device_to_device"] == copies
    rest = sum(tensor.nbytes for tensor in here) - here[1].nbytes
    assert counted["allocated_bytes"] == large * here[1].nbytes + small * rest


# --- sums ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_way_to_a_sum_leads_to_the_same_bits(dtype: torch.dtype, count: int) -> None:
    terms = [torch.randn(70, 50).to(dtype) * 3**i for i in range(count)]
    expected = in_order(terms)
    groups = [["cpu"], ["virtual:1"], PLACES["virtual"], ["virtual:2", "cpu"], PLACES["mixed"]]
    for group in groups:
        rows = [term.to(group[i % len(group)]).requires_grad_() for i, term in enumerate(terms)]
        for destination in ("cpu", "virtual:0", "virtual:2", None):
            target = group[0] if destination is None else destination
            assert same(comm.reduce_add(rows, destination), expected, target)
            pairs = [[term, term[:7]] for term in rows]
            whole, part = comm.reduce_add_coalesced(pairs, destination)
            assert same(whole, expected, target) and same(part, expected[:7], target)
        assert all(torch.equal(row.cpu(), term) for row, term in zip(rows, terms, strict=True))
    turned = [term.mT for term in terms]
    assert same(comm.reduce_add(turned), expected.mT, "cpu")
    mixed = [turned[0], *(term.contiguous() for term in turned[1:])]
    assert same(comm.reduce_add(mixed), expected.mT, "cpu")


@pytest.mark.parametrize("destination", ["virtual:0", "virtual:2", "cpu"])
def test_a_sum_is_laid_out_as_torch_does(destination: str) -> None:
    """The first term decides, in one call for all, too; so for expanded and lazy ones."""
    lazy = make((2, 3), torch.complex64).conj()
    firsts = [*laid_out("cpu"), lazy, lazy.imag]
    for make_second in (torch.Tensor.contiguous, lambda t: t.mT.contiguous().mT):
        seconds = [first.clone() if first.dim() < 2 else make_second(first) for first in firsts]
        rows = [[first.to("virtual:0") for first in firsts], [t.to("virtual:1") for t in seconds]]
        sums = comm.reduce_add_coalesced(rows, destination)
        for total, first, second in zip(sums, rows[0], seconds, strict=True):
            expected = first + second.to("virtual:0")
            assert same(total, expected, destination)
            alone = comm.reduce_add([first, second.to("virtual:1")], destination)
            assert same(alone, expected, destination)
            if destination == "virtual:0":
                assert alone.stride() == total.stride() == expected.stride()
            assert not total.is_conj() and not total.is_neg()


def test_a_sum_of_one_is_that_input() -> None:
    tensor = torch.ones(3, device="virtual:1")
    assert comm.reduce_add([tensor]) is tensor
    assert same(comm.reduce_add([tensor], "cpu"), tensor, "cpu")
    assert not comm.reduce_add([torch.ones(2, requires_grad=True)]).requires_grad
    assert comm.reduce_add_coalesced([[], []]) == ()
    assert comm.broadcast_coalesced([], ["cpu", "virtual:1"]) == [[], []]


def test_sparse_tensors() -> None:
    replicas = [
        [torch.ones(2), sparse([1.0, 2.0], [0, 3]), sparse([1.0], [2])],
        [torch.ones(2), sparse([5.0], [3]), torch.ones(5)],
    ]
    dense, both, mixed = comm.reduce_add_coalesced(replicas, "cpu")
    assert dense.tolist() == [2, 2]
    assert both.layout == torch.sparse_coo
    assert both.to_dense().tolist() == [1, 0, 0, 7, 0]
    assert mixed.tolist() == [1, 1, 2, 1, 1]
    # Between devices the entries of one index keep the order in which they are added.
    inputs = [sparse([1.0, 2.0], [3, 3]), sparse([5.0], [3])]
    total = comm.reduce_add([t.to(f"virtual:{i}") for i, t in enumerate(inputs)], "virtual:0")
    assert torch.equal(total._values().cpu(), (inputs[0] + inputs[1])._values())
    # Copied, divided and put together.
    tensor = sparse([1.0, 2.0, 3.0], [0, 3, 4])
    _, (_, copy) = comm.broadcast_coalesced([torch.ones(2), tensor], ["cpu", "virtual:1"])
    assert copy.to_dense().tolist() == [1, 0, 0, 2, 3]
    for slots in (["cpu", "cpu"], ["virtual:0", "virtual:1"]):
        chunks = comm.scatter(tensor, slots)
        assert [chunk.to_dense().tolist() for chunk in chunks] == [[1, 0, 0], [2, 3]]
        assert comm.gather(chunks, 0, "cpu").to_dense().tolist() == [1, 0, 0, 2, 3]


# --- scatter and gather ----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_divides_as_torch_and_gather_puts_together(places: list[str], dim: int) -> None:
    for size in (0, 1, 2, 3, 4, 5, 8, 9, 17):
        shape = [2, 3, 4]
        shape[dim] = size
        tensor = torch.randn(shape)
        expected = tensor.chunk(len(places), dim) if size else (tensor,)
        for origin in ("cpu", places[1]):
            chunks = comm.scatter(tensor.to(origin), places, dim=dim)
            assert len(chunks) == len(expected)
            assert all(map(same, chunks, expected, places))
            assert same(comm.gather(chunks, dim, origin), tensor, origin)
    lengths = [4, 0, 3, 2, 1][: len(places)]
    tensor = torch.randn(sum(lengths), 2)
    chunks = comm.scatter(tensor, places, lengths)
    assert all(map(same, chunks, torch.split(tensor, lengths), places))


def test_gather_is_as_torch_cat() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    parts = [image.to("virtual:0"), image.double().to("virtual:1")]
    expected = torch.cat([image, image.double()])
    for destination in ("cpu", "virtual:1", "virtual:3"):
        gathered = comm.gather(parts, 0, destination)
        assert same(gathered, expected, destination)
        assert gathered.stride() == expected.stride()
    scalars = [torch.tensor(float(i), device=f"virtual:{i}") for i in range(4)]
    assert same(comm.gather(scalars, 0, -1), torch.arange(4.0), "cpu")


ONES = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (comm.broadcast, [ONES, ["virtual:9"]], r"'virtual:9' does not exist; .*virtual:0.*cpu"),
        (
            comm.broadcast_coalesced,
            [[ONES, ONES.to("meta")], ["cpu"]],
            "must be on one device, .* cpu, meta",
        ),
        (comm.reduce_add, [[]], r"as many tensors, but the replicas give \[\]"),
        (
            comm.reduce_add,
            [[ONES, ONES[:3], ONES]],
            r"input 0 is torch.float32 \(4, 2\) and input 1 torch.float32 \(3, 2\)",
        ),
        (comm.reduce_add, [[ONES, ONES.double()]], r"input 1 torch.float64 \(4, 2\)"),
        (comm.reduce_add_coalesced, [[[ONES], [ONES] * 2]], r"the replicas give \[1, 2\]"),
        (comm.scatter, [ONES, ["cpu"], None, 2], r"dim 2 is out of range .*\(4, 2\).* -2 to 1"),
        (comm.scatter, [ONES[0, 0], ["cpu"]], r"dim 0 is out of range .*no dimension"),
        (comm.scatter, [ONES, ["cpu"] * 2, [1, 2]], r"has 4 along dim 0, but got \(1, 2\)"),
        (comm.scatter, [ONES, ["cpu"] * 2, [5, -1]], r"but got \(5, -1\)"),
        (comm.scatter, [ONES, ["cpu"] * 2, [4]], r"each of the 2 devices .* \(4,\)"),
        (comm.gather, [[]], "at least one tensor"),
        (comm.gather, [[ONES, ONES[:, :1]]], r"tensor 1 has shape \(4, 1\) and .* \(4, 2\)"),
        (comm.gather, [[ONES, ONES[0]]], r"tensor 1 has shape \(2,\) and"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*arguments)


# --- streams: test_stream_waits.py shows that each wait is needed ------------------------------


def queued_work(device: str) -> torch.Tensor:
    """Ones that the current stream of a device still has to compute, in strict mode."""
    return torch.zeros(1000, device=device) + 1


def values(tensor: torch.Tensor) -> set[float]:
    return set(tensor.tolist())


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


def test_only_copies_to_another_accelerator_take_its_copy_stream() -> None:
    """There they do not wait for what it computes."""
    tensor = torch.ones(4, device="virtual:0")
    with mock.patch.object(devices, "copy_stream", wraps=devices.copy_stream) as use:
        comm.broadcast(tensor, ["virtual:0", "virtual:1"])
        use.assert_called_once_with(torch.device("virtual:1"))
        comm.broadcast(tensor, ["cpu", "virtual:0"])
        comm.gather([tensor, torch.ones(1)], destination="cpu")
        comm.gather([tensor, tensor])
        comm.reduce_add([tensor, tensor])
        comm.scatter(tensor, ["cpu", "virtual:0"])
        use.assert_called_once()
