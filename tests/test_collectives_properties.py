"""Collectives over replicas equal plain tensor math, for any tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import virtual
from dataparallel.collectives.operations import (
    OPS,
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from tests.replica_cases import GROUP, PLACES, each, exchanged, expected, index, run

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

INEXACT = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
EXACT = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

shapes = st.lists(st.integers(0, 4), max_size=4)
counts = st.integers(1, 4)
seeds = st.integers(0, 999)


def dtypes_of(op: str) -> list[torch.dtype]:
    if op in ("band", "bor", "bxor"):
        return EXACT
    if op in ("min", "max"):
        return [*EXACT, *INEXACT]
    if op == "avg":
        return [*EXACT[1:], *INEXACT, *COMPLEX]
    return [*EXACT, *INEXACT, *COMPLEX]


def values(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers, of which every dtype has exact sums and products."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(x.double(), x.double().roll(1)).to(dtype)
    return x.abs().to(dtype) if dtype in (torch.bool, torch.uint8) else x.to(dtype)


#: Tensors of the same values in other memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "step": lambda x: (
        torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.dim() else torch.stack([x, x])[1]
    ),
    "offset": lambda x: torch.cat([x[:1], x])[1:][: len(x)] if x.dim() else x,
    "channels last": lambda x: (
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    ),
    "conjugate": lambda x: x.conj().resolve_conj().conj() if x.is_complex() else x,
    "negative": lambda x: (
        torch.complex(x.double(), -x.double()).conj().imag.to(x.dtype)
        if x.is_floating_point()
        else x
    ),
}
layouts = st.lists(st.sampled_from([*LAYOUTS, "negative bit"]), min_size=4, max_size=4)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "negative bit":
        # The imaginary part of a conjugate, which is computed when it is read.
        return torch.complex(torch.zeros_like(x), -x).conj().imag if x.dtype == torch.double else x
    return LAYOUTS[layout](x)


def check(
    wanted: Collective | list[Any], inputs: list[Tensor], results: list[Tensor], slots: list[str]
) -> None:
    """Values, devices and dtypes; and that every result is in memory of its own."""
    before = [x.clone() for x in inputs]
    outputs = run(wanted, inputs, slots)
    for y, result, slot in zip(outputs, results, slots, strict=True):
        assert (str(y.device), y.dtype, y.shape) == (slot, result.dtype, result.shape)
        torch.testing.assert_close(y.cpu(), result, equal_nan=True)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y), "an input was changed"
    kept = [y.cpu().clone() for y in outputs]
    for i, y in enumerate(outputs):
        y.zero_()
        for other, was in list(zip(outputs, kept, strict=True))[i + 1 :]:
            assert torch.equal(other.cpu(), was), "two results share memory"
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y), "a result shares memory with an input"


def placed(inputs: list[Tensor], layout: list[str], slots: list[str]) -> list[Tensor]:
    moved = [x.to(slot) for x, slot in zip(inputs, slots, strict=True)]
    return [laid_out(x, kind) for x, kind in zip(moved, layout, strict=False)]


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data(), shape=shapes, count=counts, seed=seeds, layout=layouts)
@PROPERTY
def test_reductions(
    place: str, data: Any, shape: list[int], count: int, seed: int, layout: list[str]
) -> None:
    op = data.draw(st.sampled_from(OPS))
    dtype = data.draw(st.sampled_from(dtypes_of(op)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    root = data.draw(st.integers(0, count - 1))
    kinds: list[Collective] = [AllReduce(op), Reduce(op, root)]
    if shape:
        shape[dim] *= count
        kinds.append(ReduceScatter(op, dim))
    slots = PLACES[place][:count]
    inputs = [values(shape, dtype, seed + i) for i in range(count)]
    for collective in kinds:
        check(collective, placed(inputs, layout, slots), expected(collective, inputs), slots)


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data(), shape=shapes, count=counts, seed=seeds, layout=layouts)
@PROPERTY
def test_copies(
    place: str, data: Any, shape: list[int], count: int, seed: int, layout: list[str]
) -> None:
    dtype = data.draw(st.sampled_from([*EXACT, *INEXACT, *COMPLEX]))
    root = data.draw(st.integers(0, count - 1))
    kinds: list[Collective] = [Broadcast(root)]
    if shape:
        dim = data.draw(st.integers(-len(shape), len(shape) - 1))
        shape[dim] *= count
        kinds += [AllGather(dim), Gather(dim, root), Scatter(dim, root)]
    slots = PLACES[place][:count]
    inputs = [values(shape, dtype, seed + i) for i in range(count)]
    for collective in kinds:
        check(collective, placed(inputs, layout, slots), expected(collective, inputs), slots)


@pytest.mark.parametrize("place", PLACES)
@given(data=st.data(), tail=st.lists(st.integers(0, 3), max_size=2), count=counts, layout=layouts)
@PROPERTY
def test_rows_to_all(place: str, data: Any, tail: list[int], count: int, layout: list[str]) -> None:
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    rows = data.draw(st.lists(numbers, min_size=count, max_size=count))
    dtype = data.draw(st.sampled_from([*EXACT, *INEXACT, *COMPLEX]))
    slots = PLACES[place][:count]
    inputs = [values([sum(gives), *tail], dtype, i) for i, gives in enumerate(rows)]
    parts = [x.split(gives) for x, gives in zip(inputs, rows, strict=True)]
    results = [torch.cat([parts[i][j] for i in range(count)]) for j in range(count)]
    check(list(exchanged(rows)), placed(inputs, layout, slots), results, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "avg", "product"])
@pytest.mark.parametrize("place", PLACES)
def test_all_members_get_the_same_bits(place: str, op: str, dtype: torch.dtype) -> None:
    """Which are those of a sum in replica order; of floats of 16 bits it is kept in float32."""
    slots = PLACES[place]
    inputs = [torch.randn(5001).to(dtype) for _ in slots]
    total = inputs[0] if op == "product" else inputs[0].float()
    for x in inputs[1:]:
        total = total * x if op == "product" else total + x
    total = total.to(dtype) / 4 if op == "avg" else total.to(dtype)
    there = [x.to(slot) for x, slot in zip(inputs, slots, strict=True)]
    for y in run(AllReduce(op), there, slots):
        assert torch.equal(y.cpu(), total)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_inputs_that_repeat_their_memory(place: str, count: int) -> None:
    slots = PLACES[place][:count]
    for rows in (6, 60_000):
        inputs = [torch.arange(3.0, device=slot).expand(rows, 3) for slot in slots]
        assert all(x.stride(0) == 0 for x in inputs)
        plain = [x.cpu().clone() for x in inputs]
        for kind in (AllReduce("sum"), AllReduce("max"), Broadcast(0), AllGather(1), Scatter(0, 0)):
            check(kind, inputs, expected(kind, plain), slots)


@pytest.mark.parametrize("size", [2, 90_000])
@pytest.mark.parametrize("place", PLACES)
def test_inputs_and_results_may_be_changed_at_once(place: str, size: int) -> None:
    """Also while others still run: nobody reads what a replica has got back."""
    slots = PLACES[place]
    kinds = [AllReduce("sum"), AllReduce("max"), AllGather(0), Broadcast(1), Reduce("sum", 2)]

    def call(x: Tensor) -> list[Tensor]:
        kept = []
        for step in range(20):
            collective = kinds[step % len(kinds)]
            x.fill_(step + index())
            y = GROUP.run(collective, x)
            x.fill_(-1000)
            kept.append(y.cpu().double().clone())
            y.fill_(-2000)
        return kept

    found = each(slots, call, [torch.empty(size, device=slot) for slot in slots])
    for step in range(20):
        inputs = [torch.full((size,), float(step + i), dtype=torch.double) for i in range(4)]
        wanted = expected(kinds[step % len(kinds)], inputs)
        for y, result in zip(found, wanted, strict=True):
            assert torch.equal(y[step], result)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_results_on_streams_of_the_replicas_own(op: str) -> None:
    """A replica may use another stream than the thread that computes for all."""
    slots = PLACES["distinct"]

    def call(x: Tensor) -> list[Tensor]:
        found = []
        with torch.Stream(x.device):
            for _ in range(10):
                y = GROUP.run(AllReduce(op), x * 2)
                x.add_(1)
                found.append(y + 0)
                y.zero_()
            return [z.cpu() for z in found]

    with virtual.strict_mode():
        inputs = [torch.full((50_000,), float(i), device=slot) for i, slot in enumerate(slots)]
        for device in slots:
            torch.accelerator.synchronize(torch.device(device))
        found = each(slots, call, inputs)
    for step in range(10):
        wanted = 2.0 * (6 + 4 * step if op == "sum" else 3 + step)
        for results in found:
            assert torch.equal(results[step], torch.full((50_000,), wanted))
