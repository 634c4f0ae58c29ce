"""When calls are alike, as far as compiled code depends on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.threads.likeness import Likeness, modules_of


def likeness(*values: Any) -> tuple[list[Any], list[Any]]:
    found = Likeness()
    found.add_settings([torch.device("cpu")])
    for value in values:
        found.add(value)
    return found.kinds, found.sizes


def call(net: nn.Module, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return functools.partial(net, *args, **kwargs)


net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())


def test_equal_calls() -> None:
    first = likeness(call(net, torch.zeros(4, 2), [1, {"mask": None}], scale=2.0))
    assert first == likeness(call(net, torch.ones(4, 2), [1, {"mask": None}], scale=2.0))
    hash(tuple(first[0])), hash(tuple(first[1]))


@pytest.mark.parametrize(
    "other",
    [
        call(net, torch.zeros(5, 2)),
        call(net, torch.zeros(4, 3)),
    ],
)
def test_other_sizes_of_the_same_kind(other: Callable[[], Any]) -> None:
    kinds, sizes = likeness(call(net, torch.zeros(4, 2)))
    other_kinds, other_sizes = likeness(other)
    assert kinds == other_kinds
    assert sizes != other_sizes
    assert likeness(2, 3.0)[0] == likeness(3, 4.0)[0]


@pytest.mark.parametrize(
    "other",
    [
        call(net, torch.zeros(1, 2)),
        call(net, torch.zeros(0, 2)),
        call(net, torch.zeros(4, 2, 2)),
        call(net, torch.zeros(4, 2, dtype=torch.double)),
        call(net, torch.zeros(4, 2, requires_grad=True)),
        call(net, torch.zeros(2, 4).t()),
        call(net, torch.zeros(4, 2).to_sparse()),
        call(net, torch.zeros(4, 2), None),
        call(net, mask=torch.zeros(4, 2)),
        call(net, (torch.zeros(4, 2),)),
        call(net[0], torch.zeros(4, 2)),
        call(nn.Sequential(*net).eval(), torch.zeros(4, 2)),
    ],
    ids=lambda other: str(other)[-40:],
)
def test_other_kinds(other: Callable[[], Any]) -> None:
    assert likeness(call(net, torch.zeros(4, 2)))[0] != likeness(other)[0]


def test_other_values_that_are_compiled_in() -> None:
    values = [True, False, None, "a", "b", torch.float32, torch.float64, torch.device("cpu"), 1]
    kinds = [tuple(likeness(value)[0]) for value in values]
    assert len(set(kinds)) == len(values)


@pytest.mark.parametrize(
    "setting",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
    ],
)
def test_other_settings(setting: Callable[[], Any]) -> None:
    before = likeness()
    with setting():
        assert likeness() != before


def test_modules_of_a_tree_with_shared_parts_and_a_cycle() -> None:
    shared = nn.Linear(2, 2)
    root = nn.Sequential(shared, nn.Sequential(shared))
    root[1].register_module("up", root)
    assert set(modules_of(root)) == set(root.modules())
    assert len(modules_of(root)) == 3
