"""Ranks that do different things get an error that says which, in all of them, and go on."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dataparallel import DistributedDataParallel, collectives, comm_hooks
from dataparallel.collectives import CollectiveMismatch
from tests.cluster import Cluster
from tests.faults.harness import Figures

# The text of an error, and the seconds until it came.
Found = tuple[str, float]


def found_by(call: Callable[[], object]) -> Found:
    started, text = time.monotonic(), "no error"
    try:
        call()
    except (RuntimeError, ValueError, TimeoutError) as error:
        text = str(error)
    return text, time.monotonic() - started


def slowest(results: list[list[Found]]) -> float:
    return max(seconds for found in results for _, seconds in found)


# --- functional collectives ------------------------------------------------------------------

#: The part of the message about the rank that came with another one.
KINDS = {"op": "all_gather_tensor", "dtype": "int32", "shape": "(1000,)", "order": "another layer"}


def collective(kind: str = "", name: str = "bucket 0") -> float:
    """A sum, or what is of another operation, dtype, shape or order than that."""
    tensor = torch.ones(1000 if kind == "shape" else 4)
    with collectives.named(f"{name} of another layer" if kind == "order" else name):
        if kind == "op":
            return float(collectives.all_gather_tensor(tensor, 0, dist.group.WORLD)[0])
        tensor = tensor.int() if kind == "dtype" else tensor
        return float(collectives.all_reduce(tensor, "sum", dist.group.WORLD)[0])


def inject(rank: int, world_size: int, count: int) -> list[Found]:
    """As many mismatches, one after the other, over one group."""
    chance = random.Random(count)
    found = []
    for number in range(count):
        kind = list(KINDS)[number % 4] if rank == chance.randrange(world_size) else ""
        if kind and number % 3 == 0:
            # The others have launched theirs, and hear of it in their wait.
            time.sleep(0.3)
        started = time.monotonic()
        with pytest.raises(CollectiveMismatch) as caught:
            collective(kind)
        found.append((str(caught.value), time.monotonic() - started))
        assert collective(name="bucket 1") == world_size
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mismatch_is_named_in_all_ranks(
    cluster: Cluster, world_size: int, repeats: Callable[..., int], figures: Figures
) -> None:
    count = repeats(quick=12, long=100)
    results = cluster.run(inject, world_size, count, timeout=120)
    for number, found in enumerate(zip(*results, strict=True)):
        (text,) = {text for text, _ in found}
        assert "different collectives as number" in text
        assert list(KINDS.values())[number % 4] in text
        assert all(f"rank {i}" in text or "ranks" in text for i in (0, 1))
    what = f"injected op, dtype, shape, order over {world_size} ranks: time to the error, p100"
    figures.record(what, slowest(results), "s", 1.0, repeats=count)


# --- in a step -------------------------------------------------------------------------------


def step_in_another_way(rank: int, world_size: int, kind: str) -> list[Found]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 3), *([nn.BatchNorm1d(3)] if kind == "forward" else []))
    model = DistributedDataParallel(body, timeout=1.0)

    def step(joined: bool = False) -> None:
        with model.join() if joined else contextlib.nullcontext():
            model(torch.ones(2, 6)).sum().backward()

    step()
    if kind == "hook":
        # It makes links anew there, which compare whether there is one.
        if rank == 1:
            model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
        found = [] if rank else [found_by(step)]
        found.append(found_by(step))
    elif kind == "forward":
        # One more forward, with its buffers, where the other rank has its backward.
        output = model(torch.ones(2, 6)).sum()
        found = [found_by(output.backward if rank == 0 else step)]
    else:
        found = [found_by(lambda: step(joined=rank == 0))]
    model.close()
    return found


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("hook", ["communication hook: none in rank 0; registered in rank 1"] * 2),
        ("forward", ["left out the backward of a step", "rank 0: 0; rank 1: 1"]),
        (
            "join",
            [
                "rank 0: the making of the process group 'join' over 2 processes did not",
                "rank 1: all_",
            ],
        ),
    ],
)
def test_a_step_in_another_way(cluster: Cluster, kind: str, texts: list[str]) -> None:
    results = cluster.run(step_in_another_way, 2, kind)
    assert slowest(results) < 5
    last = [found[-1][0] for found in results]
    assert "no error" not in last
    for text in texts:
        assert text in ("".join(last) if kind == "forward" else last[texts.index(text)])


class Branch(nn.Module):
    """A layer that is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if use else x


def leave_out(rank: int, world_size: int, flag: str, count: int) -> list[Found]:
    found = []
    for number in range(count):
        options: dict[str, Any] = {flag: flag == "static_graph"}
        model = DistributedDataParallel(Branch(), timeout=20, **options)
        use = number % 2 == 0 or flag != "static_graph"
        for _ in range(1 + number % 3):
            model(torch.ones(2, 4), use).sum().backward()
        output = model(torch.ones(2, 4), use if rank != 1 else not use).sum()
        found.append(found_by(output.backward))
        # The same processes go on.
        model(torch.ones(2, 4), use).sum().backward()
        model.close()
    return found


@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph"])
def test_parameters_that_one_rank_leaves_out_are_named_in_all(
    cluster: Cluster, flag: str, repeats: Callable[..., int], figures: Figures
) -> None:
    count = repeats(quick=3, long=50)
    results = cluster.run(leave_out, 2, flag, count, timeout=120)
    for found in zip(*results, strict=True):
        assert all("sometimes.weight" in text and "sometimes.bias" in text for text, _ in found)
        # The other one has the text of rank 1.
        assert "failed in backward: " in found[0][0]
    what = f"a parameter left out by one rank, {flag}: time to the error in all ranks, p100"
    figures.record(what, slowest(results), "s", 2.0, repeats=count)
