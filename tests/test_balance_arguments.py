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
    with pytest.raises(ValueError, match=r"every is .* got 0; threshold is .* got 1\.5; warmup"):
        balance(model, every=0, threshold=1.5, warmup=-1)
    with pytest.raises(ValueError, match="window is at least every, which is 10, but got 3"):
        balance(model, window=3)
    with (
        dataparallel.balance(model),
        pytest.raises(RuntimeError, match="the wrapper is balanced already"),
    ):
        balance(model)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"every": 2.5}, TypeError, r"every is a whole number, but got 2\.5 \(float\)"),
        ({"every": "10"}, TypeError, r"every is a whole number, but got '10' \(str\)"),
        ({"every": True}, TypeError, r"every is a whole number, but got True \(bool\)"),
        ({"warmup": None}, TypeError, "warmup is a whole number, but got None"),
        ({"window": 30.0}, TypeError, r"window is a whole number, but got 30\.0"),
        ({"threshold": "0.1"}, TypeError, r"threshold is a part of the time, .* got '0\.1' \(str"),
        ({"threshold": False}, TypeError, "threshold is a part of the time, .* got False"),
        ({"threshold": math.nan}, ValueError, "threshold is .* from 0 to below 1, but got nan"),
    ],
)
def test_options_that_are_no_numbers(
    model: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        dataparallel.balance(model, **options)
    assert model._splitter is None
    assert not model.timeline.listeners


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 3}, "this is no state of a Balancer, which has 'costs' and 'limits'"),
        (None, "this is no state of a Balancer"),
        ({"costs": None, "limits": [None] * 3}, "limits of 3 replicas, but this wrapper has 2"),
        ({"costs": [[0, 1]], "limits": [None] * 2}, "limits of 2 and costs of 1 replicas, but"),
        ({"costs": [[0, 1]] * 2, "limits": [None]}, "limits of 1 and costs of 2 replicas, but"),
        ({"costs": [[0, 1], [0, 0]], "limits": [None] * 2}, "replica 1 has seconds per sample"),
        ({"costs": [[0, 1], [0, -1]], "limits": [None] * 2}, "per sample from .* but got -1"),
        ({"costs": [[0, 1], [0, math.nan]], "limits": [None] * 2}, "per sample .* but got nan"),
        ({"costs": [[0, math.inf], [0, 1]], "limits": [None] * 2}, "per sample .* but got inf"),
        ({"costs": [[-1, 1], [0, 1]], "limits": [None] * 2}, "replica 0 has fixed .* but got -1"),
        ({"costs": [[math.nan, 1]] * 2, "limits": [None] * 2}, "fixed seconds .* but got nan"),
        ({"costs": [[0, "1"], [0, 1]], "limits": [None] * 2}, r"replica 0 is two numbers, .* '1'"),
        ({"costs": [[0, 1, 2], [0, 1]], "limits": [None] * 2}, "replica 0 is two numbers"),
        ({"costs": None, "limits": [0, None]}, "limit of replica 0 is None or .* but got 0"),
        ({"costs": None, "limits": [None, -3]}, "limit of replica 1 is None or .* but got -3"),
        ({"costs": None, "limits": [None, "a"]}, "limit of replica 1 is None or .* but got 'a'"),
        ({"costs": None, "limits": [None, 2.5]}, r"limit of replica 1 .* but got 2\.5"),
        ({"costs": [[0, 1], [0, 1]], "limits": [True, None]}, "limit of replica 0 .* got True"),
    ],
)
def test_states_that_are_none(balancer: Balancer, state: Any, message: str) -> None:
    good = {"costs": [[0.0, 1.0], [0.0, 2.0]], "limits": [None, 7]}
    balancer.load_state_dict(good)
    with pytest.raises(ValueError, match=message):
        balancer.load_state_dict(state)
    assert balancer.state_dict() == good


@pytest.mark.parametrize("cost", [1e-18, 1e18])
def test_any_state_that_is_taken_divides(balancer: Balancer, cost: float) -> None:
    balancer.load_state_dict({"costs": [[0, cost], [1e18, 1.0]], "limits": [None, None]})
    assert sum(balancer.sizes(1_000_000)) == 1_000_000


def test_sizes_of_no_batch(balancer: Balancer) -> None:
    sizes: Any = balancer.sizes
    with pytest.raises(ValueError, match="batch_size is a number of samples, at least 0, but got"):
        sizes(-4)
    for wrong in ("a", 2.0, True, [2]):
        with pytest.raises(TypeError, match="batch_size is a whole number, but got"):
            sizes(wrong)
    assert sizes(0) == (0,)


def test_a_balancer_is_kept_outside_of_the_module(model: Any, balancer: Balancer) -> None:
    model.module.balancer = balancer
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        for place in (balancer, model):
            if copied is copy.copy and place is model:
                continue
            with pytest.raises(TypeError, match=r"keep it outside of the module .* state_dict"):
                copied(place)
