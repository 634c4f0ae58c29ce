"""Containers that the tests of scatter and gather share."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import torch
from hypothesis import strategies as st

from dataparallel.batch.scatter import move
from dataparallel.batch.tree import flatten

Point = namedtuple("Point", ["x", "y"])


CPU = ["cpu"] * 4


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = 3


def assert_same(actual: Any, expected: Any) -> None:
    """Equal containers, types and values, wherever the tensors are."""
    mine, structure = flatten(actual)
    theirs, expected_structure = flatten(expected)
    assert structure == expected_structure
    for leaf, other in zip(mine, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert leaf.shape == other.shape
            assert leaf.dtype == other.dtype
            assert torch.equal(leaf.cpu(), other.cpu())
        else:
            assert leaf == other


def spread(parts: list[Any], slots: list[str]) -> list[Any]:
    return [move(part, slot) for part, slot in zip(parts, slots, strict=False)]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Any, int]:
    """A container whose tensors agree on the batch size along one dim, and that dim."""
    size = draw(st.integers(0, 17))
    dim = draw(st.integers(-2, 1))
    other = draw(st.integers(1, 3))
    shape = (size, other) if dim in (0, -2) else (other, size)
    tensors = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16]).map(
        lambda dtype: torch.arange(size * other).reshape(shape).to(dtype)
    )
    leaves = st.one_of(tensors, st.none(), st.integers(), st.text(max_size=3))
    containers = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.builds(Point, inner, inner),
            st.builds(Sample, inner, inner),
        ),
        max_leaves=6,
    )
    return [draw(tensors), draw(containers)], dim
