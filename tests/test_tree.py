"""Containers come apart into leaves and are rebuilt as what they were."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from dataparallel.batch.tree import LEAF, Replicate, flatten

Point = namedtuple("Point", ["x", "y"])


class Pair(NamedTuple):
    first: Any
    second: Any = 3


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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class Registered:
    def __init__(self, x: Any, tag: str) -> None:
        self.x, self.tag = x, tag


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


def test_rebuilds_every_kind_of_container() -> None:
    """Same type, same keys, other leaves."""
    returned: Any = torch.return_types
    cases: list[Any] = [
        (1, 2),
        [1, [2], ()],
        {"a": 1, "b": {"c": 2}},
        OrderedDict(b=1, a=2),
        Counter(a=1, b=2),
        Point(1, 2),
        time.gmtime(0),
        returned.max((1, 2)),
        Pair(1),
        deque([1, 2]),
        Stack([1, 2]),
        Triple(1, 2, 3),
        Frozen(1),
        Slotted(1, 2),
        Batch(1),
        ModelOutput(loss=1, states=(2, 3)),
        None,
        7,
    ]
    for case in cases:
        leaves, structure = flatten(case)
        again = structure.rebuild(leaves)
        assert again == case, case
        assert type(again) is type(case)
        numbers = [n * 10 if isinstance(n, int) else n for n in leaves]
        assert flatten(structure.rebuild(numbers))[0] == numbers


def test_rebuilding_leaves_the_original_alone() -> None:
    original = {"a": [1, 2], "b": Batch(3)}
    _, structure = flatten(original)
    structure.rebuild([10, 20, 30, "other", 50])
    assert original == {"a": [1, 2], "b": Batch(3)}


def test_defaultdict_keeps_its_factory() -> None:
    original: defaultdict[str, Any] = defaultdict(list, a=1)
    rebuilt = flatten(original)[1].rebuild([5])
    assert rebuilt == {"a": 5}
    assert rebuilt["new"] == []


def test_model_output_has_items_and_attributes_in_step() -> None:
    output = ModelOutput(loss=1, states=(2, 3))
    output.comment = "kept"
    leaves, structure = flatten(output)
    assert leaves == [1, 2, 3]
    rebuilt = structure.rebuild([10, 20, 30])
    assert dict(rebuilt) == {"loss": 10, "states": (20, 30)}
    assert (rebuilt.loss, rebuilt.logits, rebuilt.states) == (10, None, (20, 30))
    assert rebuilt.comment == "kept"
    rebuilt["loss"] = 11
    assert rebuilt.loss == 11
    assert dict(output) == {"loss": 1, "states": (2, 3)}


def test_dataclass_drops_what_it_cached() -> None:
    batch = Batch(2)
    assert batch.doubled == 4
    rebuilt = flatten(batch)[1].rebuild([5, "digits", 1])
    assert rebuilt.doubled == 10
    assert rebuilt.total == 1


def test_frozen_dataclass_is_not_initialized_again() -> None:
    assert flatten(Frozen(1))[1].rebuild(["never again"]).x == "never again"


def test_registered_node_keeps_its_context() -> None:
    leaves, structure = flatten([Registered(1, "a")])
    rebuilt = structure.rebuild([2])
    assert leaves == [1]
    assert (rebuilt[0].x, rebuilt[0].tag) == (2, "a")
    assert structure != flatten([Registered(1, "b")])[1]


def test_torch_return_types_are_containers() -> None:
    values = torch.tensor([[1.0, 2.0]]).max(dim=1)
    leaves, structure = flatten(values)
    assert len(leaves) == 2
    rebuilt = structure.rebuild(["v", "i"])
    assert (rebuilt.values, rebuilt.indices) == ("v", "i")


def test_user_dict_is_a_container() -> None:
    leaves, structure = flatten(UserDict(a=1))
    assert leaves == [1]
    assert structure.rebuild([2]) == UserDict(a=2)


def test_these_are_leaves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    for leaf in (torch.ones(2), torch.Size([1, 2]), packed, torch.nn.Linear(1, 1), {1, 2}, "ab"):
        leaves, structure = flatten(leaf)
        assert leaves == [leaf] or leaves[0] is leaf
        assert structure is LEAF


def test_paths_read_like_python() -> None:
    obj = ([{"mask": 1}], Pair(2, Batch(3)), ModelOutput(loss=4))
    assert flatten(obj)[1].paths("inputs") == [
        "inputs[0][0]['mask']",
        "inputs[1].first",
        "inputs[1].second.x",
        "inputs[1].second.name",
        "inputs[1].second.total",
        "inputs[2]['loss']",
    ]


def test_empty_containers_are_leaves_and_stay_the_same_objects() -> None:
    obj: list[Any] = [[], {}, (), OrderedDict(), 1]
    leaves, structure = flatten(obj)
    assert all(leaf is given for leaf, given in zip(leaves, obj, strict=True))
    assert structure.rebuild(leaves)[1] is obj[1]


def test_a_marker_is_left_out() -> None:
    leaves, structure = flatten([Replicate([1, Replicate(2)]), 3])
    assert leaves == [1, 2, 3]
    assert structure.paths("x") == ["x[0].value[0]", "x[0].value[1].value", "x[1]"]
    assert structure.rebuild([4, 5, 6]) == [[4, 5], 6]


def test_an_object_twice() -> None:
    shared = [1]
    assert flatten([shared, shared, {"a": shared}])[0] == [1, 1, 1]


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ({"a": 1, "b": [2, (3,)]}, "dict(a=leaf, b=list(leaf, tuple(leaf)))"),
        (Pair(1, {}), "Pair(first=leaf, second=leaf)"),
        ([Registered(1, "s")], "list(Registered('s', leaf))"),
        (None, "leaf"),
    ],
)
def test_a_structure_shows_types_keys_and_nesting(obj: Any, text: str) -> None:
    assert str(flatten(obj)[1]) == text
