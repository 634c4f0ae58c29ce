"""Links between processes: tensors from each process to each."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from dataparallel.collectives import parcels
from dataparallel.comm.link import ProcessLink
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from tests.bit_cases import bits, random_bits, spread
from tests.cluster import Cluster

Results = list[Any]

MOVED = [
    torch.float32,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float64,
    torch.uint8,
    torch.uint64,
    torch.complex128,
    torch.float16,
]
SHAPES = [(3, 5), (), (0, 2), (7,), (1, 0), (2, 1, 3)]


# --- all_to_all ------------------------------------------------------------------------------


def message(source: int, target: int) -> torch.Tensor:
    """What goes from one process to another: every pair has a shape and a dtype of its own."""
    number = 5 * source + 3 * target
    dtype = MOVED[number % len(MOVED)]
    return random_bits(number, SHAPES[(source + 2 * target) % len(SHAPES)], dtype)


def send_messages(rank: int, world_size: int, device: str, strict: bool) -> Results:
    from dataparallel import virtual

    link = ProcessLink(purpose="test")
    mine = [spread(message(rank, i).to(device)) for i in range(world_size)]
    before = [bits(tensor) for tensor in mine]
    expected = [message(i, rank) for i in range(world_size)]
    like = [(t.shape, t.dtype, torch.device(device)) for t in expected]
    right = []
    with virtual.strict_mode(strict) if strict else contextlib.nullcontext():
        for _ in range(2):
            found = parcels.all_to_all(link, mine, what="messages", like=like)
            for tensor, kind, value in zip(found, like, expected, strict=True):
                right.append((tensor.shape, tensor.dtype, tensor.device) == kind)
                right.append(tensor.is_contiguous() and bits(tensor) == bits(value))
    right.append(before == [bits(tensor) for tensor in mine])
    storages = {tensor.untyped_storage()._cdata for tensor in found}
    right.append(len(storages) == world_size)
    right.append(dict(link.launched) == {"all_to_all": 2})
    link.close()
    return right


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("device", ["cpu", "virtual:1", "virtual:1 strict"])
def test_all_to_all_moves_any_type(cluster: Cluster, world_size: int, device: str) -> None:
    name, _, strict = device.partition(" ")
    virtual = name != "cpu"
    for right in cluster.run(send_messages, world_size, name, bool(strict), virtual=virtual):
        assert len(right) == 4 * world_size + 3 and all(right)


def send_from_several_devices(rank: int, world_size: int) -> Results:
    link = ProcessLink(purpose="test")
    places = [torch.device("virtual:0"), torch.device("cpu"), torch.device("virtual:3")]
    mine = [torch.full((2,), 10.0 * rank + i, device=places[i - rank]) for i in range(3)]
    # Work that the device still has to do.
    for tensor in mine:
        tensor.add_(0.5)
    like = [(torch.Size([2]), torch.float32, places[rank]) for _ in range(3)]
    found = parcels.all_to_all(link, mine, what="numbers", like=like)
    link.close()
    return [(tensor.device == places[rank], tensor.tolist()) for tensor in found]


def test_all_to_all_between_different_devices(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(send_from_several_devices, 3, virtual=True)):
        assert found == [(True, [10.0 * i + rank + 0.5] * 2) for i in range(3)]


def send_views(rank: int, world_size: int) -> Results:
    link = ProcessLink(purpose="test")
    number = torch.tensor([[1 + 2j * rank, 3.0]])
    leaf = torch.full((1,), 7.0 + rank, requires_grad=True)
    mine = [number.conj(), leaf] if rank == 0 else [leaf, number.mT.conj()]
    cpu = torch.device("cpu")
    shape, flat = torch.Size([1, 2] if rank == 0 else [2, 1]), torch.Size([1])
    like = [(shape, torch.complex64, cpu), (flat, torch.float32, cpu)]
    found = parcels.all_to_all(link, mine, what="views", like=like if rank == 0 else like[::-1])
    link.close()
    return [(tensor.requires_grad, tensor.tolist()) for tensor in found]


def test_all_to_all_takes_conjugated_views_and_leaves(cluster: Cluster) -> None:
    first, second = cluster.run(send_views, 2)
    assert first == [(False, [[1 - 0j, 3 - 0j]]), (False, [8.0])]
    assert second == [(False, [7.0]), (False, [[1 - 2j], [3 - 0j]])]


def test_long_labels_differ() -> None:
    cpu = torch.device("cpu")
    kinds = [(torch.Size([1] * 40 + [n]), torch.float32, cpu) for n in (2, 3)]
    labels = [parcels._label(kind) for kind in kinds]
    assert labels[0] != labels[1] and [len(label) for label in labels] == [64, 64]
    flat = parcels.pack_parcels([torch.ones(kinds[0][0])], cpu)
    assert flat.numel() == sum(parcels.parcel_sizes(kinds[:1])) == 64 + 16
    (found,) = parcels.unpack_parcels(flat, kinds[:1], [0], "ones")
    assert found.equal(torch.ones(kinds[0][0]))


@pytest.mark.parametrize(
    ("names", "taken", "place"),
    [
        (["cpu", "cpu"], {"cpu"}, "cpu"),
        (["virtual:1", "virtual:2"], {"cpu"}, "cpu"),
        (["virtual:1", "virtual:2"], {"cpu", "virtual"}, "virtual:1"),
        (["virtual:1", "cpu"], {"cpu", "virtual"}, "cpu"),
    ],
)
def test_where_parcels_are_packed(names: list[str], taken: set[str], place: str) -> None:
    kinds = [(torch.Size([1]), torch.float32, torch.device(name)) for name in names]
    assert parcels.meeting_place(kinds, frozenset(taken)) == torch.device(place)


def expect_something_else(rank: int, world_size: int, wanted: torch.Tensor) -> tuple[str, float]:
    link = ProcessLink(purpose="test", checks="off")
    kind = parcels.kind_of(torch.ones(2, 3))
    like = [kind] * world_size if rank == 0 else [parcels.kind_of(wanted), kind]
    found = ""
    try:
        parcels.all_to_all(link, [torch.ones(2, 3)] * world_size, what="blocks", like=like)
    except ValueError as error:
        found = str(error)
    total = torch.ones(1)
    link.all_reduce(total, what="numbers").wait()
    link.close()
    return found, total.item()


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (torch.ones(3, 2), "float32 [3, 2]"),
        (torch.ones(2, 3, dtype=torch.int32), "int32 [2, 3]"),
        (torch.ones(100, dtype=torch.bool), "bool [100]"),
    ],
)
def test_who_sent_something_else_is_named(
    cluster: Cluster, wanted: torch.Tensor, name: str
) -> None:
    first, second = cluster.run(expect_something_else, 2, wanted)
    assert first == ("", 2.0)
    assert second[1] == 2.0
    assert second[0] == (
        f"all_to_all of blocks: rank 0 sent float32 [2, 3] where {name} was expected; every "
        "process must pass as `like` what the others send to it"
    )


def miss_all_to_all(rank: int, world_size: int) -> list[BaseException]:
    link = ProcessLink(purpose="hybrid", timeout=0.5)
    found: list[BaseException] = []
    if rank != 1:
        mine = [torch.ones(2)] * world_size
        like = [parcels.kind_of(mine[0])] * world_size
        for _ in range(2):
            try:
                parcels.all_to_all(link, mine, what="the halves", like=like)
            except (CollectiveTimeout, CollectiveError) as error:
                found.append(error)
        link.close()
        return found
    with pytest.raises((CollectiveTimeout, CollectiveError), match="the end"):
        # Never comes to where the others are; leaves when they have given up.
        link.wait_for(torch.futures.Future(), what="the end")
    link.close()
    return found


def test_a_timeout_of_all_to_all_says_who_is_missing(cluster: Cluster) -> None:
    results = cluster.run(miss_all_to_all, 3)
    for rank in (0, 2):
        first, second = results[rank]
        assert type(first) is CollectiveTimeout and type(second) is CollectiveError
        text = f"rank {rank}: all_to_all of the halves (collective 1) over 3 processes for 'hybrid'"
        assert str(first).startswith(text)
        assert "rank 1 " in str(first).removeprefix(text)
        assert str(first) in str(second)
