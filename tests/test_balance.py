"""A wrapper whose batches are divided by measured speed."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel
from dataparallel.extras.balancing import Balancer
from tests.cluster import Cluster
from tests.test_balance_decisions import record

WRAPPERS = [dataparallel.DataParallel, dataparallel.DistributedDataParallel]
#: Seconds per sample of replica 0 and of replica 1, and the batch.
FAST, SLOW, BATCH = 0.005, 0.010, 24


class Slowed(nn.Module):
    """Takes a time for each sample that depends on the replica."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        replica = dataparallel.current_replica()
        time.sleep(len(x) * (FAST if replica is None or replica.index == 0 else SLOW))
        result: Tensor = self.layer(x)
        return result


def gradients(
    model: Any, layer: nn.Linear, x: Tensor, y: Tensor, inside: bool = False
) -> list[Tensor]:
    layer.zero_grad()
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    loss = model.loss(criterion, x, y) if inside else criterion(model(x), y)
    loss.backward()
    return [p.grad.clone() for p in layer.parameters() if p.grad is not None]


def test_a_replica_that_is_twice_as_slow_gets_less() -> None:
    model = dataparallel.DistributedDataParallel(Slowed(), ["cpu", "cpu"])
    x, y = torch.randn(BATCH, 3).double(), torch.randint(0, 2, (BATCH,))
    with dataparallel.balance(model, every=4, warmup=1) as balancer:
        # On a busy machine some steps take other times.
        for _ in range(100):
            nn.functional.cross_entropy(model(x), y).backward()
            if balancer.history:
                break
        assert balancer.history[0].reason == "speed"
        assert balancer.sizes(BATCH)[0] > BATCH // 2 and balancer.shares[0] > 0.5
        assert balancer.speeds is not None and balancer.speeds[0] > balancer.speeds[1]


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_before_and_after(slots: list[str], wrapper: Any, inside: bool) -> None:
    layer = nn.Linear(3, 4).double().to(slots[0])
    model = wrapper(layer, slots)
    x, y = torch.randn(26, 3).double().to(slots[0]), torch.randint(0, 4, (26,)).to(slots[0])
    expected = gradients(layer, layer, x, y)
    with dataparallel.balance(model, every=2, warmup=0) as balancer:
        torch.testing.assert_close(gradients(model, layer, x, y, inside), expected)
        assert balancer.sizes(26) == (7, 7, 7, 5)
        for _ in range(4):
            balancer.observe(record((7, 7, 7, 5), (7.0, 14.0, 7.0, 5.0)))
        assert balancer.sizes(26) == (8, 3, 8, 7) or balancer.sizes(26) == (8, 4, 7, 7)
        torch.testing.assert_close(gradients(model, layer, x, y, inside), expected)
    assert model._splitter is None
    torch.testing.assert_close(gradients(model, layer, x, y, inside), expected)


def _in_processes(rank: int, world_size: int) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4).double()
    data = [(torch.randn(n, 3).double(), torch.randint(1, 4, (n,))) for n in (11, 14)[:world_size]]
    xs, ys = zip(*data, strict=True)
    expected = gradients(layer, layer, torch.cat(xs), torch.cat(ys))
    model = dataparallel.DistributedDataParallel(
        layer, ["cpu", "cpu"], average="samples", timeout=20.0
    )
    x, y = data[rank]
    sizes = []
    with dataparallel.balance(model, every=2, warmup=0) as balancer:
        for step in range(3):
            found = gradients(model, layer, x, y, inside=step == 1)
            torch.testing.assert_close(found, expected)
            sizes.append(balancer.sizes(len(x)))
            # Each process has another slow replica.
            for _ in range(2):
                balancer.observe(record((5, 5), (5.0, 15.0) if rank else (15.0, 5.0)))
    return sizes


def test_each_process_divides_its_own_batch(cluster: Cluster) -> None:
    first, second = cluster.run(_in_processes, 2)
    assert first[0] == (6, 5) and second[0] == (7, 7)
    assert first[1] == (3, 8)
    assert second[1] == (11, 3)


# --- use ----------------------------------------------------------------------------------------


def test_a_change_is_logged_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = dataparallel.DataParallel(nn.Linear(1, 1), ["cpu", "cpu"])
    with (
        caplog.at_level(logging.INFO, "dataparallel"),
        dataparallel.balance(model, every=2, warmup=0) as balancer,
    ):
        for _ in range(2):
            balancer.observe(record((30, 30), (1.0, 2.0)))
        state = balancer.state_dict()
    assert [one.getMessage() for one in caplog.records] == [str(balancer.history[0])]
    assert str(balancer.history[0]).startswith(
        "after step 2: a batch of 60 is divided into (40, 20) instead of (30, 30), since a sample "
        "takes replica 1 2.00 times as long"
    )
    # Another run goes on where it was.
    with dataparallel.balance(model) as balancer:
        balancer.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert balancer.sizes(60) == (40, 20)


def test_one_replica_has_nothing_to_hand_over(caplog: pytest.LogCaptureFixture) -> None:
    model = dataparallel.DataParallel(nn.Linear(1, 1), ["cpu"])
    with caplog.at_level(logging.WARNING, "dataparallel"), dataparallel.balance(model) as balancer:
        assert "there is one replica, on cpu: nothing to balance" in caplog.text
        x = torch.randn(4, 1)
        torch.testing.assert_close(model(x), model.module(x))
        balancer.observe(record((4,), (1.0,)))


def test_copies_of_the_wrapper_are_not_balanced() -> None:
    model = dataparallel.DistributedDataParallel(nn.Linear(1, 1), ["cpu", "cpu"])
    with dataparallel.balance(model):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other._splitter is None
            assert not other.timeline.listeners
            other(torch.ones(4, 1)).sum().backward()


def test_a_balancer_does_not_keep_the_wrapper() -> None:
    model = dataparallel.DataParallel(nn.Linear(1, 1), ["cpu", "cpu"])
    balancer = dataparallel.balance(model)
    model(torch.ones(4, 1))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    balancer.close()
    balancer.close()


# --- what is refused ----------------------------------------------------------------------------


@pytest.fixture
def model() -> dataparallel.DataParallel[nn.Linear]:
    return dataparallel.DataParallel(nn.Linear(1, 1), ["cpu", "cpu"])


@pytest.fixture
def balancer(model: Any) -> Iterator[Balancer]:
    with dataparallel.balance(model) as made:
        yield made


def test_wrong_arguments(model: Any) -> None:
    balance: Any = dataparallel.balance
    with pytest.raises(TypeError, match="a wrapper of this package is balanced, but got Linear"):
        balance(model.module)
    for options in ({"every": 0}, {"warmup": -1}, {"window": 3}, {"threshold": 1.0}):
        with pytest.raises(ValueError, match=r"every is .* from 1 to window, .* but got every="):
            balance(model, **options)
    with pytest.raises(ValueError, match="threshold=nan"):
        balance(model, threshold=math.nan)
    assert model._splitter is None
    assert not model.timeline.listeners
    with (
        dataparallel.balance(model),
        pytest.raises(RuntimeError, match="the wrapper is balanced already"),
    ):
        balance(model)


@pytest.mark.parametrize(
    "state",
    [
        {"costs": None, "limits": [None] * 3},
        {"costs": [[0, 1]], "limits": [None] * 2},
        {"costs": [[0, 1]] * 2, "limits": [None]},
    ],
)
def test_states_of_other_wrappers(balancer: Balancer, state: Any) -> None:
    good = {"costs": [[0.0, 1.0], [0.0, 2.0]], "limits": [None, 7]}
    balancer.load_state_dict(good)
    with pytest.raises(ValueError, match="replicas, but this wrapper has 2; leave it out"):
        balancer.load_state_dict(state)
    assert balancer.state_dict() == good


@pytest.mark.parametrize("cost", [1e-18, 1e18])
def test_any_state_that_is_taken_divides(balancer: Balancer, cost: float) -> None:
    balancer.load_state_dict({"costs": [[0, cost], [1e18, 1.0]], "limits": [None, None]})
    assert sum(balancer.sizes(1_000_000)) == 1_000_000
    assert balancer.sizes(0) == (0,)


def test_a_balancer_is_kept_outside_of_the_module(model: Any, balancer: Balancer) -> None:
    model.module.balancer = balancer
    for copied in (copy.deepcopy, pickle.dumps):
        for place in (balancer, model):
            with pytest.raises(TypeError, match="cannot pickle"):
                copied(place)
