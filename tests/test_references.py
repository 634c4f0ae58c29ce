"""References from a module to its parts, wherever they hide."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.replicas.clones import may_refer, substitute, with_counterparts

Pair = namedtuple("Pair", ["first", "second"])


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(part: torch.Tensor) -> torch.Tensor:
        found.append(part)
        return part

    assert substitute(value, note) is value
    return found


@pytest.mark.parametrize(
    "build",
    [
        lambda t: t,
        lambda t: [1, t],
        lambda t: (t, "a"),
        lambda t: Pair(t, 2),
        lambda t: {"a": {"b": [t]}},
        lambda t: OrderedDict(x=t),
        lambda t: defaultdict(list, a=t),
        lambda t: functools.partial(torch.add, t, other=t),
    ],
)
def test_every_container_is_followed(build: Any) -> None:
    old, new = torch.zeros(2), torch.ones(2)
    value = build(old)
    result = with_counterparts(value, {id(old): new})
    assert type(result) is type(value)
    assert getattr(result, "default_factory", None) is getattr(value, "default_factory", None)
    assert all(tensor is new for tensor in tensors_in(result))
    assert all(tensor is old for tensor in tensors_in(value)), "the original was changed"
    assert may_refer(value)
    assert with_counterparts(value, {}) is value


def test_bound_methods_and_weak_references_move_to_the_counterpart() -> None:
    old, new = nn.Linear(1, 1), nn.Linear(1, 1)
    assert with_counterparts(old.forward, {id(old): new}).__self__ is new
    assert with_counterparts(weakref.ref(old), {id(old): new})() is new
    assert with_counterparts(weakref.ref(old), {})() is old


def test_cycles_end() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    value: list[Any] = [old]
    value.append(value)
    assert with_counterparts(value, {id(old): new})[0] is new
