"""Wrappers of different models, or used in different ways, raise the same error in all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dataparallel import DistributedDataParallel, comm_hooks
from tests.cluster import Cluster
from tests.faults.harness import Figures


class Found(NamedTuple):
    """What a rank got."""

    text: str
    seconds: float


def found_by(call: Callable[[], object]) -> Found:
    """The error of a call."""
    started = time.monotonic()
    try:
        call()
        text = "no error"
    except (RuntimeError, ValueError, TimeoutError) as error:
        text = str(error)
    return Found(text, time.monotonic() - started)


def one_text(results: list[Found]) -> str:
    """The text, which is the same in all ranks."""
    texts = {found.text for found in results}
    assert len(texts) == 1, texts
    return texts.pop()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3))


# --- at construction -------------------------------------------------------------------------


def resized(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 4)


def converted(model: nn.Sequential) -> None:
    model[1].double()


def longer(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


class Swapped(nn.Module):
    """The layers of a model, registered in another order."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        for name in ("1", "0", "2"):
            self.register_module(name, model[int(name)])


class SwappedAlike(nn.Module):
    """Two layers of one size, in one order or the other."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        for name in ("second", "first") if swap else ("first", "second"):
            self.register_module(name, nn.Linear(4, 4))


def restrided(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.zeros(5, 5).t())


def frozen(model: nn.Sequential) -> None:
    model[1].bias.requires_grad_(False)


MODELS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "shape": (resized, r"'2\.weight'"),
    "dtype": (converted, r"'1\.weight'"),
    "count": (longer, r"'3\.weight'"),
    "order": (Swapped, r"0\.weight"),
    "strides": (restrided, r"'1\.weight'"),
    "requires_grad": (frozen, r"'1\.bias'"),
    "order of one size": (lambda _: SwappedAlike(True), r"'second\.weight' in rank 1"),
}


def construct(rank: int, world_size: int, kind: str, count: int) -> list[Found]:
    found = []
    for _ in range(count):
        model: nn.Module = SwappedAlike(False) if kind == "order of one size" else net()
        if rank == world_size - 1:
            model = MODELS[kind][0](model) or model  # type: ignore[arg-type]
        found.append(found_by(lambda model=model: DistributedDataParallel(model)))  # type: ignore[misc]
    good = DistributedDataParallel(net())
    good(torch.ones(2, 6)).sum().backward()
    good.close()
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_different_models_are_named_in_all_ranks(
    cluster: Cluster, kind: str, repeats: Callable[..., int], figures: Figures
) -> None:
    count = repeats(quick=1, long=20)
    results = cluster.run(construct, 2, kind, count, timeout=120)
    for found in zip(*results, strict=True):
        text = one_text(list(found))
        assert MODELS[kind][1].replace("\\", "") in text
        assert "rank 0" in text and "rank 1" in text
    figures.record(
        goal=8,
        what=f"another {kind}: time to the same error in all ranks, p100",
        value=max(one.seconds for found in results for one in found),
        unit="s",
        limit=2.0,
        repeats=count,
        baseline="one rank only, or parameters by number",
    )


# --- in a step -------------------------------------------------------------------------------


def step_in_another_way(rank: int, world_size: int) -> list[Found]:
    torch.manual_seed(0)
    model = DistributedDataParallel(net(), timeout=1.0)
    if rank == 1:
        model.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    found = [] if rank else [found_by(model(torch.ones(2, 6)).sum().backward)]
    found.append(found_by(lambda: model(torch.ones(2, 6))))
    assert all(parameter.grad is None for parameter in model.parameters())
    model.close()
    return found


def test_a_hook_in_one_rank_alone(cluster: Cluster) -> None:
    """It makes links anew there, which compare whether there is one."""
    (first, again), (other,) = cluster.run(step_in_another_way, 2)
    assert "rank 1" in first.text
    assert max(first.seconds, again.seconds, other.seconds) < 5
    assert "communication hook: none in rank 0; registered in rank 1" in one_text([again, other])


def step_out_of_order(rank: int, world_size: int) -> list[Found]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), timeout=1.0)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    output = model(torch.ones(2, 6)).sum()
    # One more forward, with its buffers, where the other rank has its backward.
    call = output.backward if rank == 0 else lambda: model(torch.ones(2, 6))
    first = found_by(call)
    model.close()
    return [first]


def test_a_forward_where_another_rank_has_a_backward(cluster: Cluster) -> None:
    (first,), (second,) = cluster.run(step_out_of_order, 2)
    assert "rank 1 is at broadcast of buffers of rank 0" in first.text + second.text
    assert "rank 0 is at all_reduce of bucket 0" in first.text + second.text
    assert max(first.seconds, second.seconds) < 5


def join_alone(rank: int, world_size: int) -> Found:
    torch.manual_seed(0)
    model = DistributedDataParallel(net(), timeout=1.0)
    model(torch.ones(2, 6)).sum().backward()

    def step() -> None:
        with model.join() if rank == 0 else contextlib.nullcontext():
            model(torch.ones(2, 6)).sum().backward()

    found = found_by(step)
    model.close()
    return found


def test_a_block_of_join_in_one_rank_alone(cluster: Cluster) -> None:
    first, second = cluster.run(join_alone, 2)
    assert "rank 0: the making of the process group 'join' over 2 processes did not" in first.text
    assert "rank 1: all_reduce of bucket 0" in second.text
    assert max(first.seconds, second.seconds) < 5


# --- parameters without a gradient -----------------------------------------------------------


class Branch(nn.Module):
    """A layer that is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if use else x


FLAGS: dict[str, dict[str, Any]] = {
    "find_unused_parameters=False": {"find_unused_parameters": False},
    "static_graph=True": {"static_graph": True},
}


def leave_out(rank: int, world_size: int, flags: dict[str, Any], count: int) -> list[Found]:
    found = []
    for number in range(count):
        model = DistributedDataParallel(Branch(), timeout=20, **flags)
        use = number % 2 == 0 or "static_graph" not in flags
        for _ in range(1 + number % 3):
            model(torch.ones(2, 4), use).sum().backward()
        output = model(torch.ones(2, 4), use if rank != 1 else not use).sum()
        found.append(found_by(output.backward))
        # The same processes go on.
        model(torch.ones(2, 4), use).sum().backward()
        model.close()
    return found


@pytest.mark.parametrize("flag", FLAGS)
def test_parameters_that_one_rank_leaves_out_are_named_in_all(
    cluster: Cluster, flag: str, repeats: Callable[..., int], figures: Figures
) -> None:
    count = repeats(quick=3, long=50)
    results = cluster.run(leave_out, 2, FLAGS[flag], count, timeout=120)
    for found in zip(*results, strict=True):
        for one in found:
            assert "sometimes.weight" in one.text and "sometimes.bias" in one.text, one.text
        # The other one has the text of rank 1.
        assert "failed in backward: " in found[0].text
    figures.record(
        goal=9,
        what=f"a parameter left out by one rank, {flag}: time to the error in all ranks, p100",
        value=max(one.seconds for found in results for one in found),
        unit="s",
        limit=2.0,
        repeats=count,
        baseline="one rank at its next forward",
    )
