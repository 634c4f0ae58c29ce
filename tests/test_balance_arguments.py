"""What a Balancer refuses."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import dataparallel
from dataparallel.extras.balancing import Balancer


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


def test_sizes_of_no_batch(balancer: Balancer) -> None:
    assert balancer.sizes(0) == (0,)


def test_a_balancer_is_kept_outside_of_the_module(model: Any, balancer: Balancer) -> None:
    model.module.balancer = balancer
    for copied in (copy.deepcopy, pickle.dumps):
        for place in (balancer, model):
            with pytest.raises(TypeError, match="cannot pickle"):
                copied(place)
