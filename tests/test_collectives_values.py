"""Collectives of replicas, processes and both: the values of plain tensor math, for any tensor."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import virtual
from dataparallel.collectives import HybridGroup, functional
from tests import collective_cases as cases
from tests.cluster import Cluster
from tests.collective_cases import GROUP, PLACES, Case, each, index

Faults = list[str]

#: The processes, the device of their tensors, and the backend; "vccl" takes no host memory.
PROCESSES = [(2, "cpu", "gloo"), (3, "cpu", "gloo"), (2, "virtual", "gloo")]
PROCESSES += [(2, "virtual", "vccl")]

#: Replicas per process, and where they are.
HYBRID = [((2, 2), "cpu"), ((1, 2, 3), "cpu"), ((2, 1), "virtual")]

#: Tensors of every kind of dtype, in memory of every kind, and small ones.
TENSORS = [
    *((dtype, cases.SHAPE, "") for dtype in cases.DTYPES),
    *(
        (dtype, cases.SHAPE, layout)
        for dtype in (torch.float32, torch.int16, torch.complex64)
        for layout in cases.layouts_of(dtype)
    ),
]
SMALL = [(), (1,), (0,), (0, 3), (3, 0), (1, 1, 1)]


def random_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaNs too, but only those of False and True where the dtype is bool."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (numel,), generator=generator).to(torch.uint8)
    return data.view(dtype).view(shape)


def bits(tensor: Tensor) -> list[int]:
    flat = tensor.detach().cpu().resolve_conj().contiguous().view(-1)
    return list(flat.view(torch.uint8).tolist())


def spread(tensor: Tensor) -> Tensor:
    """Return the same values with gaps between them."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def inputs_of(size: int, dtype: torch.dtype, shape: Sequence[int], layout: str) -> list[Tensor]:
    xs = [cases.numbers(i, dtype, shape) for i in range(size)]
    # Only some members have the layout.
    return [cases.laid_out(x, layout) if layout and i != 1 else x for i, x in enumerate(xs)]


def takes_small(case: Case, shape: Sequence[int]) -> bool:
    plain = case.name.split()[0] in ("all_reduce", "reduce", "broadcast", "permute")
    return plain or (shape == (3, 0) and case.name.endswith(" 1"))


def all_inputs(size: int) -> list[tuple[str, list[Tensor], list[Case]]]:
    found = []
    for dtype, shape, layout in TENSORS:
        # All operations get to their memory in one way.
        chosen = [*cases.copies(), *cases.reductions("sum")] if layout else cases.all_cases(dtype)
        found.append((f"{dtype} {layout}", inputs_of(size, dtype, shape, layout), chosen))
    for dtype in (torch.float32, torch.bool):
        for small in SMALL:
            chosen = [case for case in cases.all_cases(dtype) if takes_small(case, small)]
            found.append((f"{dtype} {small}", inputs_of(size, dtype, small, ""), chosen))
    return found


# --- replicas --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_values_between_replicas(place: str, size: int) -> None:
    slots = PLACES[place][:size]
    for name, xs, chosen in all_inputs(size):
        if place == "cpu" or size == 3 or name.startswith("torch.float32"):
            for case in chosen:
                mine = [
                    x if slot == "cpu" else x.to(slot) for x, slot in zip(xs, slots, strict=True)
                ]
                found = each(slots, lambda x, case=case: case.call(x, GROUP), mine)
                assert not cases.check(case, found, mine, xs, 0), (name, slots)


@pytest.mark.in_pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "avg", "product"])
@pytest.mark.parametrize("place", PLACES)
def test_all_replicas_get_the_same_bits(place: str, op: str, dtype: torch.dtype) -> None:
    """The bits are those of a sum in replica order; sums of 16-bit floats are in float32."""
    slots = PLACES[place]
    inputs = [torch.randn(5001).to(dtype) for _ in slots]
    total = inputs[0] if op == "product" else inputs[0].float()
    for x in inputs[1:]:
        total = total * x if op == "product" else total + x
    total = total.to(dtype) / 4 if op == "avg" else total.to(dtype)
    there = [x.to(slot) for x, slot in zip(inputs, slots, strict=True)]
    for y in each(slots, lambda x: functional.all_reduce(x, op, GROUP), there):
        assert torch.equal(y.cpu(), total)


@pytest.mark.in_pairs
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("size", [2, 50_000])
@pytest.mark.parametrize("place", PLACES)
def test_inputs_and_results_may_be_changed_at_once(place: str, size: int, own_stream: bool) -> None:
    """While others still run, and on another stream than that of the thread that computes."""
    slots = PLACES[place]
    chosen = [*cases.copies()[:4], *cases.reductions("sum")[:2], *cases.reductions("max")[:2]]

    def call(x: Tensor) -> list[Tensor]:
        kept = []
        stream = torch.Stream(x.device) if own_stream and x.device.type != "cpu" else None
        with stream or contextlib.nullcontext():
            for step in range(16):
                x.fill_(step + index())
                y = chosen[step % len(chosen)].call(x, GROUP)
                x.fill_(-1000)
                kept.append(y + 0)
                y.zero_()
            return [y.cpu() for y in kept]

    with virtual.strict_mode(own_stream):
        inputs = [torch.empty(size, 2, device=slot) for slot in slots]
        for slot in slots:
            if slot != "cpu":
                torch.accelerator.synchronize(torch.device(slot))
        found = each(slots, call, inputs)
    for step in range(16):
        given = [torch.full((size, 2), float(step + i)) for i in range(4)]
        for member, results in enumerate(found):
            wanted = chosen[step % len(chosen)].expected(given, member)
            assert torch.equal(results[step], wanted), chosen[step % len(chosen)].name


# --- processes -------------------------------------------------------------------------------


def run_all(rank: int, world_size: int, device: str) -> Faults:
    device = device.replace("virtual", f"virtual:{rank}")
    faults = []
    for name, xs, chosen in all_inputs(world_size):
        mine = xs[rank] if device == "cpu" else xs[rank].to(device)
        for case in chosen:
            found = functional.wait_tensor(case.call(mine, dist.group.WORLD))
            faults += [f"{name} {x}" for x in cases.check(case, [found], [mine], xs, rank)]
    image = torch.arange(1728.0).view(12, 12, 6, 2).to(device, memory_format=torch.channels_last)
    for case in cases.copies():
        found = functional.wait_tensor(case.call(image, dist.group.WORLD))
        faults += cases.check(case, [found], [image], [image.cpu()] * world_size, rank)
    scalar = functional.all_gather_tensor(
        torch.tensor(float(rank), device=device), 0, dist.group.WORLD
    )
    faults += [] if scalar.tolist() == list(map(float, range(world_size))) else ["scalars"]
    return faults


@pytest.mark.parametrize(("size", "device", "backend"), [(1, "cpu", "gloo"), *PROCESSES[1:]])
def test_values_between_processes(cluster: Cluster, size: int, device: str, backend: str) -> None:
    for faults in cluster.run(run_all, size, device, virtual=device != "cpu", backend=backend):
        assert not faults


# --- what backends cannot reduce -------------------------------------------------------------

INTEGERS = [*cases.EXACT[1:], torch.uint16, torch.uint32, torch.uint64]
INTEGER_OPS: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
}


def integers(rank: int, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, limits.max // 2 + 1, 0, 1, limits.max - rank]
    return torch.tensor(values[rank:] + values[:rank], dtype=dtype)


def wrapped(value: int, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    span: int = 2 ** int(limits.bits)
    return (value - int(limits.min)) % span + int(limits.min)


def reduce_integers(rank: int, world_size: int, device: str) -> Faults:
    device = device.replace("virtual", f"virtual:{rank}")
    faults = []
    for dtype in INTEGERS:
        parts = [integers(i, dtype).tolist() for i in range(world_size)]
        for op, pair in INTEGER_OPS.items():
            mine = integers(rank, dtype).to(device)
            found = functional.all_reduce(mine, op, dist.group.WORLD).tolist()
            columns = zip(*parts, strict=True)
            if found != [wrapped(reduce(pair, column), dtype) for column in columns]:
                faults.append(f"{op} of {dtype}: {found}")
    # All combinations of True and False in three processes; the bytes, of which any looks True.
    bools = (torch.arange(8) >> rank & 1).bool()
    rows = [[i >> r & 1 for r in range(world_size)] for i in range(8)]
    some, every = [int(any(row)) for row in rows], [int(all(row)) for row in rows]
    right = {"sum": some, "max": some, "bor": some, "product": every, "min": every, "band": every}
    for op, expected in {**right, "bxor": [sum(row) % 2 for row in rows]}.items():
        result = functional.all_reduce(bools.to(device), op, dist.group.WORLD)
        if result.cpu().view(torch.uint8).tolist() != expected:
            faults.append(f"{op} of bools")
    return faults


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3e-45]
FLOATS = [*cases.FLOATING, torch.float8_e4m3fn, torch.float8_e5m2]


def reduce_floats(rank: int, world_size: int, device: str) -> Faults:
    """Return all combinations of special values, and random bits; signs of zeros too."""
    device = device.replace("virtual", f"virtual:{rank}")
    faults = []
    table = torch.cartesian_prod(*[torch.tensor(SPECIAL)] * world_size).view(-1, world_size)
    for dtype in FLOATS:
        xs = [
            torch.cat([table[:, i].to(dtype), random_bits(i, (100,), dtype)])
            for i in range(world_size)
        ]
        xs = [torch.cat([x] * world_size) for x in xs]
        for op, fold in (("min", torch.minimum), ("max", torch.maximum)):
            expected = reduce(fold, [x.double() for x in xs])
            mine = xs[rank].to(device)
            total = functional.all_reduce(mine, op, dist.group.WORLD).cpu().double()
            torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
            rows = functional.all_gather_tensor(total[None].to(device), 0, dist.group.WORLD)
            if len(set(map(str, rows.tolist()))) > 1:
                faults.append(f"{op} of {dtype} differs between processes")
            if dtype in cases.FLOATING:
                chunk = functional.reduce_scatter_tensor(mine, op, 0, dist.group.WORLD)
                right = expected.chunk(world_size)[rank]
                torch.testing.assert_close(
                    chunk.cpu().double(), right, rtol=0, atol=0, equal_nan=True
                )
    small = torch.tensor([1.0, 1.0, 448.0 * rank]).to(torch.float8_e4m3fn)
    total = functional.all_reduce(small.to(device), "sum", dist.group.WORLD)
    faults += [] if total.float().tolist()[:2] == [world_size] * 2 else ["sum of float8"]
    return faults


@pytest.mark.parametrize("kind", [reduce_integers, reduce_floats])
@pytest.mark.parametrize(("size", "device", "backend"), PROCESSES)
def test_reductions_that_no_backend_has(
    cluster: Cluster, kind: Any, size: int, device: str, backend: str
) -> None:
    for faults in cluster.run(kind, size, device, virtual=device != "cpu", backend=backend):
        assert not faults


# --- replicas of several processes -----------------------------------------------------------


def devices_of(count: int, kind: str) -> list[str]:
    return [kind] * count if kind == "cpu" else [f"{kind}:{i}" for i in range(count)]


def compute_all(rank: int, world_size: int, counts: Sequence[int], kind: str) -> Faults:
    size, first = sum(counts), sum(counts[:rank])
    group = HybridGroup(timeout=30)
    faults = []
    for dtype in (torch.float32, torch.bool, torch.int16, torch.bfloat16, torch.complex64):
        xs = [cases.numbers(member, dtype) for member in range(size)]
        slots = devices_of(counts[rank], kind)
        mine = [xs[first + i].to(slot) for i, slot in enumerate(slots)]
        chosen = cases.all_cases(dtype)

        def compute(x: Tensor, chosen: list[Case] = chosen) -> list[Tensor]:
            return [case.call(x, group) for case in chosen]

        results = each(slots, compute, mine)
        for case, found in zip(chosen, zip(*results, strict=True), strict=True):
            faults += [f"{dtype} {x}" for x in cases.check(case, found, mine, xs, first)]
    group.close()
    return faults


#: Not all of them can be added up, and gloo sends not all of them as they are.
MOVED = [torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
MOVED += [torch.float32, torch.float64, torch.uint8, torch.uint64, torch.complex128, torch.float16]


def move_bits(rank: int, world_size: int, counts: Sequence[int], kind: str) -> Faults:
    """Return the bits that do not arrive unchanged, from tensors with gaps and without rows."""
    size, first, group = sum(counts), sum(counts[:rank]), HybridGroup(timeout=30)
    gives = [[(2 * i + j) % 3 for j in range(size)] for i in range(size)]
    gets = [[gives[i][j] for i in range(size)] for j in range(size)]
    faults = []

    def move(member: int, device: str) -> None:
        for number, dtype in enumerate(MOVED):
            xs = [
                random_bits(number + 31 * i, (sum(gives[i]), 1 + number % 4), dtype)
                for i in range(size)
            ]
            x = spread(xs[member].to(device))
            found = functional.all_to_all_single(x, gets[member], gives[member], group)
            expected = [x.split(rows)[member] for x, rows in zip(xs, gives, strict=True)]
            whole = random_bits(number, (size * 2, 3), dtype)
            chunk = functional.scatter(spread(whole.to(device)), 0, size - 1, group)
            pairs = ((found, torch.cat(expected)), (chunk, whole.chunk(size)[member]))
            if any(str(one.device) != device or bits(one) != bits(right) for one, right in pairs):
                faults.append(f"member {member}: {dtype}")

    with virtual.strict_mode() if kind == "virtual" else contextlib.nullcontext():
        slots = devices_of(counts[rank], kind)
        each(slots, move, range(first, first + len(slots)), slots)
    group.close()
    return faults


@pytest.mark.parametrize("kind", [compute_all, move_bits])
@pytest.mark.parametrize(("counts", "place"), HYBRID)
def test_values_between_replicas_of_several_processes(
    cluster: Cluster, kind: Any, counts: tuple[int, ...], place: str
) -> None:
    for faults in cluster.run(kind, len(counts), counts, place, virtual=place == "virtual"):
        assert not faults
