"""Containers come apart into leaves and are rebuilt as what they were."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from dataparallel.batch.tree import LEAF, Replicate, flatten

Point = namedtuple("Point", ["x", "y"], defaults=[3])


@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "digits"
    total: Any = dataclasses.field(init=False, default=0)

    @functools.cached_property
    def doubled(self) -> Any:
        return self.x * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any

    def __post_init__(self) -> None:
        if self.x == "never again":
            raise AssertionError


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dict that shows its items as attributes, and leaves out what is None."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Registered:
    def __init__(self, x: Any, tag: str) -> None:
        self.x, self.tag = x, tag

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


_pytree.register_pytree_node(
    Registered,
    lambda obj: ([obj.x], obj.tag),
    lambda children, tag: Registered(next(iter(children)), tag),
)


class Stack(list):  # type: ignore[type-arg]
    def append(self, _: Any) -> None:
        raise AssertionError("a copy of a checked list is not checked again")


class Triple(tuple):  # type: ignore[type-arg]
    __slots__ = ()

    def __new__(cls, a: int, b: int, c: int) -> Triple:
        return super().__new__(cls, (a, b, c))


RETURNED: Any = torch.return_types


@pytest.mark.parametrize(
    "case",
    [
        (1, 2),
        [1, [2], ()],
        {"a": 1, "b": {"c": 2}},
        OrderedDict(b=1, a=2),
        Counter(a=1, b=2),
        Point(1),
        time.gmtime(0),
        RETURNED.max((1, 2)),
        deque([1, 2]),
        Stack([1, 2]),
        Triple(1, 2, 3),
        Frozen(1),
        Slotted(1, 2),
        Batch(1),
        ModelOutput(loss=1, states=(2, 3)),
        UserDict(a=1),
        Registered(1, "a"),
        None,
    ],
    ids=lambda case: type(case).__name__,
)
def test_a_container_is_rebuilt_as_what_it_was(case: Any) -> None:
    """Same type, same keys, other leaves; and the original is left alone."""
    leaves, structure = flatten(case)
    again = structure.rebuild(leaves)
    assert again == case
    assert type(again) is type(case)
    numbers = [n * 10 if isinstance(n, int) else n for n in leaves]
    assert flatten(structure.rebuild(numbers))[0] == numbers
    assert flatten(case)[0] == leaves


def test_what_is_kept_beside_the_leaves() -> None:
    original: defaultdict[str, Any] = defaultdict(list, a=1)
    rebuilt = flatten(original)[1].rebuild([5])
    assert rebuilt == {"a": 5} and rebuilt["new"] == []

    output: Any = ModelOutput(loss=1, states=(2, 3))
    output.comment = "kept"
    rebuilt = flatten(output)[1].rebuild([10, 20, 30])
    assert dict(rebuilt) == {"loss": 10, "states": (20, 30)}
    assert (rebuilt.loss, rebuilt.logits, rebuilt.states) == (10, None, (20, 30))
    assert rebuilt.comment == "kept"

    batch = Batch(2)
    assert batch.doubled == 4
    rebuilt = flatten(batch)[1].rebuild([5, "digits", 1])
    assert (rebuilt.doubled, rebuilt.total) == (10, 1), "it drops what it has cached"
    # A dataclass is not initialized again.
    assert flatten(Frozen(1))[1].rebuild(["never again"]).x == "never again"
    assert flatten([Registered(1, "a")])[1] != flatten([Registered(1, "b")])[1]


def test_these_are_leaves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    given: list[Any] = [torch.ones(2), torch.Size([1, 2]), packed, torch.nn.Linear(1, 1), {1}, "ab"]
    # Empty containers stay the same objects.
    given += [[], {}, (), OrderedDict()]
    for obj in given:
        leaves, structure = flatten(obj)
        assert leaves[0] is obj and structure is LEAF
    leaves, structure = flatten(given)
    assert all(a is b for a, b in zip(structure.rebuild(leaves), given, strict=True))


def test_paths_read_like_python() -> None:
    obj = ([{"mask": 1}], Point(2, Batch(3)), ModelOutput(loss=4))
    assert flatten(obj)[1].paths("inputs") == [
        "inputs[0][0]['mask']",
        "inputs[1].x",
        "inputs[1].y.x",
        "inputs[1].y.name",
        "inputs[1].y.total",
        "inputs[2]['loss']",
    ]


def test_a_marker_is_left_out() -> None:
    leaves, structure = flatten([Replicate([1, Replicate(2)]), 3])
    assert leaves == [1, 2, 3]
    assert structure.paths("x") == ["x[0].value[0]", "x[0].value[1].value", "x[1]"]
    assert structure.rebuild([4, 5, 6]) == [[4, 5], 6]
