"""Processes that come with different collectives all get the same error, and go on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dataparallel import collectives
from dataparallel.collectives import CollectiveMismatch
from dataparallel.comm.failures import CollectiveError
from tests.cluster import Cluster
from tests.faults.harness import Figures

KINDS = ("op", "dtype", "shape", "order")

#: What the message says of the rank that came with another one.
SAYS = {"op": "all_gather_tensor", "dtype": "int32", "shape": "(1000,)", "order": "another layer"}


class Found(NamedTuple):
    """What one injection led to in one rank."""

    kind: str
    text: str
    seconds: float
    goes_on: bool


def functional_calls(group: Any) -> Callable[[str, str, bool], float]:
    """Runs a functional collective, in one rank another one of some kind."""

    def call(kind: str, name: str, other: bool) -> float:
        tensor = torch.ones(4)
        with collectives.named(f"{name} of another layer" if other and kind == "order" else name):
            if other and kind == "op":
                return float(collectives.all_gather_tensor(tensor, 0, group)[0])
            if other and kind == "dtype":
                tensor = tensor.int()
            elif other and kind == "shape":
                tensor = torch.ones(1000)
            return float(collectives.all_reduce(tensor, "sum", group)[0])

    return call


def inject(rank: int, world_size: int, count: int) -> list[Found]:
    """As many mismatches, one after the other, over one group."""
    chance = random.Random(count)
    call = functional_calls(dist.group.WORLD)
    found = []
    for number in range(count):
        kind, odd = KINDS[number % 4], chance.randrange(world_size)
        started = time.monotonic()
        try:
            call(kind, "bucket 0", rank == odd)
            text = "no error"
        except CollectiveMismatch as error:
            text = str(error)
        seconds = time.monotonic() - started
        goes_on = call("", "bucket 1", False) == world_size
        found.append(Found(kind, text, seconds, goes_on))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mismatch_is_named_in_all_ranks(
    cluster: Cluster,
    world_size: int,
    repeats: Callable[..., int],
    figures: Figures,
) -> None:
    count = repeats(quick=12, long=100)
    results = cluster.run(inject, world_size, count, timeout=120)
    wrong = 0
    for found in zip(*results, strict=True):
        first = found[0]
        right = "different collectives as number" in first.text and SAYS[first.kind] in first.text
        right = right and all(f"rank {i}" in first.text or "ranks" in first.text for i in (0, 1))
        wrong += not (right and all(one.goes_on and one.text == first.text for one in found))
    what = f"injected op, dtype, shape, order over {world_size} ranks"
    baseline = "2 of 4 kinds silent, 1 aborts"
    figures.record(
        goal=7,
        what=f"{what}: not found in all ranks with one text, or group lost",
        value=wrong,
        unit="failures",
        limit=0,
        repeats=count,
        baseline=baseline,
    )
    figures.record(
        goal=7,
        what=f"{what}: time to the error, p100",
        value=max(one.seconds for found in results for one in found),
        unit="s",
        limit=1.0,
        repeats=count,
        baseline=baseline,
    )


def come_late(rank: int, world_size: int) -> tuple[str, str, float]:
    """Rank 1 comes with another shape when rank 0 has launched already."""
    call = functional_calls(dist.group.WORLD)
    if rank == 1:
        time.sleep(1.0)
    texts = []
    started = time.monotonic()
    for kind in ("shape", ""):
        try:
            call(kind, "bucket 0", rank == 1)
            texts.append("no error")
        except CollectiveError as error:
            texts.append(str(error))
    seconds = time.monotonic() - started
    return texts[0], texts[1], seconds


def test_who_has_launched_hears_of_a_mismatch_in_its_wait(cluster: Cluster) -> None:
    for first, second, seconds in cluster.run(come_late, 2):
        assert "different collectives as number 1 of" in first
        assert "rank 0: bucket 0: all_reduce(op='sum') of float32 (4,)" in first
        assert "rank 1: bucket 0: all_reduce(op='sum') of float32 (1000,)" in first
        assert "different collectives" in second, "the next one is launched"
        assert seconds < 5.0
