"""Containers, and their tensors: split and put together as torch.chunk and torch.cat do."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from dataparallel.batch.gather import gather
from dataparallel.batch.scatter import move, scatter, scatter_kwargs
from dataparallel.batch.tree import LEAF, Replicate, flatten

CPU = ["cpu"] * 4
PACKED = pack_sequence([torch.ones(2), torch.ones(1)])

Point = namedtuple("Point", ["x", "y"], defaults=[3])


def assert_same(actual: Any, expected: Any) -> None:
    """Equal containers, types and values, wherever the tensors are."""
    mine, structure = flatten(actual)
    theirs, expected_structure = flatten(expected)
    assert structure == expected_structure
    for leaf, other in zip(mine, theirs, strict=True):
        if isinstance(other, Tensor):
            assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
            assert torch.equal(leaf.cpu(), other.cpu())
        else:
            assert leaf == other


def spread(parts: list[Any], slots: list[str]) -> list[Any]:
    return [move(part, slot) for part, slot in zip(parts, slots, strict=False)]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Any, int]:
    """Return a container whose tensors agree on the batch size along one dim, and that dim."""
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
            # As long as the batch, it might have an entry for each sample: that is refused.
            st.lists(inner, max_size=3).filter(lambda made: len(made) != size),
            st.lists(inner, max_size=3).filter(lambda made: len(made) != size).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.builds(Point, inner, inner),
        ),
        max_leaves=6,
    )
    return [draw(tensors), draw(containers)], dim


@settings(max_examples=60, deadline=None)
@given(case=trees(), num_slots=st.integers(1, 4), on=st.sampled_from(["cpu", "virtual"]))
def test_gather_undoes_scatter(case: tuple[Any, int], num_slots: int, on: str) -> None:
    tree, dim = case
    devices = [on if on == "cpu" else f"virtual:{i}" for i in range(num_slots)]
    chunks = scatter(tree, devices, dim)
    expected = [t for t in tree[0].chunk(num_slots, dim) if t.numel()] or [tree[0]]
    assert_same([chunk[0] for chunk in chunks], expected)
    for chunk, device in zip(chunks, devices, strict=False):
        tensors = [leaf for leaf in flatten(chunk)[0] if isinstance(leaf, Tensor)]
        assert {tensor.device for tensor in tensors} == {torch.device(device)}
    assert_same(gather(chunks, "cpu", dim), tree)


# --- scatter ---------------------------------------------------------------------------------


def test_what_is_split_and_what_is_not(slots: list[str]) -> None:
    x, scale, marker = torch.randn(7, 2), torch.tensor(2.0), object()
    empty: list[Any] = [{}, [], ()]
    # It is longer than the batch.
    rest = [3, None, marker, list("abcd"), *empty, "text"]
    chunks = scatter({"query": x, "key": x, "s": scale, "t": [scale], "rest": rest}, slots)
    for chunk, part in zip(chunks, x.chunk(4), strict=True):
        assert_same(chunk["query"], part)
        # One tensor of the caller is one tensor in each replica.
        assert chunk["query"] is chunk["key"] and chunk["s"] is chunk["t"][0]
        assert chunk["rest"][:4] == rest[:4]
        assert all(a is b for a, b in zip(chunk["rest"][4:7], empty, strict=True))
    assert isinstance(scatter(x, slots), tuple)
    assert isinstance(scatter([x], slots), list)
    (((chunk, whole),), _) = scatter_kwargs((x, Replicate(scale)), None, ["cpu"])
    assert chunk is x and whole is scale, "one slot gets the tensors themselves"


@pytest.mark.parametrize(
    "slots",
    [["cpu"] * 3, ["virtual:0"] * 3, ["virtual:1", "cpu", "virtual:0", "cpu", "virtual:1"]],
)
@pytest.mark.parametrize("origin", ["cpu", "virtual:0"])
def test_replicas_do_not_share_the_memory_of_a_whole_tensor(slots: list[str], origin: str) -> None:
    leaf = torch.ones(3, 2, device=origin, requires_grad=True)
    plain = torch.ones(3, 2, device=origin)
    for tensor in (plain, leaf * 1, plain.to_sparse()):
        chunks = scatter([torch.randn(len(slots), 2), Replicate(tensor)], slots)
        for i, (_, whole) in enumerate(chunks):
            whole.mul_(i + 2)
        found = [whole.to_dense()[0, 0].item() for _, whole in chunks]
        assert found == [float(i + 2) for i in range(len(slots))]
        # The first replica there changes what the caller has, as the bare module would.
        here = [i for i, slot in enumerate(slots) if slot == origin]
        assert tensor.to_dense()[0, 0].item() == (here[0] + 2 if here else 1)
        if tensor.requires_grad:
            total = torch.stack([whole.sum().cpu() for _, whole in chunks]).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
            assert gradient.eq(sum(range(2, len(slots) + 2))).all()


def test_gradients_of_one_replica_are_summed_before_they_meet_others(slots: list[str]) -> None:
    """So their sum is the same to the last bit, however the uses in the replicas are timed."""
    table = torch.randn(500, device=slots[0], requires_grad=True)
    chunks = scatter([torch.randn(8, 500), Replicate(table)], slots)
    # Each of three uses in a replica has a gradient of its own.
    parts = [((x * whole).sin() * whole.exp() / whole).sum().cpu() for x, whole in chunks]
    wholes = [whole for _, whole in chunks]
    first, *others = torch.autograd.grad(parts, wholes, [torch.ones(())] * 4, retain_graph=True)
    (found,) = torch.autograd.grad(parts, table, [torch.ones(())] * 4)
    assert torch.equal(found.cpu(), first.cpu() + sum(other.cpu() for other in others))


def test_sizes_of_chunks(slots: list[str]) -> None:
    x = torch.randn(2, 6)
    for sizes in ([1, 3, 2, 0], [1, 3, 2]):
        chunks = scatter(x, slots, 1, chunk_sizes=sizes)
        assert_same(chunks, torch.split(x, [1, 3, 2], 1))
        assert [str(chunk.device) for chunk in chunks] == slots[:3]
    (chunk,) = scatter({"x": torch.ones(0, 3), "y": 1}, slots)
    assert chunk["x"].shape == (0, 3) and chunk["x"].device == torch.device(slots[0])
    args, kwargs = scatter_kwargs((), {"x": x.T}, slots)
    assert args == ((),) * 3
    assert_same(kwargs, tuple({"x": part} for part in x.T.chunk(4)))


def test_without_a_batch_one_replica_runs(slots: list[str]) -> None:
    assert scatter_kwargs(("text",), {"n": 3}, slots) == ((("text",),), ({"n": 3},))
    assert scatter_kwargs((), None, slots) == (((),), ({},))
    tensors = Replicate(torch.ones(3)), torch.tensor(1.0)
    ((args,), kwargs) = scatter_kwargs(tensors, None, slots)
    assert kwargs == ({},)
    assert [str(arg.device) for arg in args] == [slots[0]] * 2


def _sized(*sizes: int) -> Callable[[], Any]:
    return lambda: scatter(torch.ones(6, 2), CPU, chunk_sizes=sizes)


def _dims(in_dims: Any) -> Callable[[], Any]:
    return lambda: scatter_kwargs((), {"m": {"a": torch.ones(2, 2)}}, CPU, in_dims=in_dims)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *[
            (_sized(*sizes), ValueError, r"each of the 4 device slots .* 6 samples .* but got \(")
            for sizes in ([3, 2], [1] * 6, [7, -1, 0, 0], [3, 0, 3])
        ],
        (_dims({-1: 0}), ValueError, r"in_dims says \{-1: 0\} of inputs"),
        (_dims({"m": "rows"}), ValueError, r"says 'rows' of kwargs\['m'\], .*dict\(a=leaf\); give"),
        (_dims({"m": {"b": 0}}), ValueError, r"says \{'b': 0\} of kwargs\['m'\], which is dict\(a"),
        (_dims({"m": 2}), ValueError, r"dim 2 is out of range for kwargs\['m'\]\['a'\] of shape"),
        (
            lambda: scatter_kwargs(
                (torch.ones(8, 3), {"m": torch.ones(8)}),
                {"ok": torch.ones(8), "y": torch.ones(1, 5)},
                CPU,
                in_dims={"y": 1},
            ),
            ValueError,
            r"inputs\[0\] has 8 along dim 0 \(shape \(8, 3\)\) and kwargs\['y'\] has 5 along "
            r"dim 1 \(shape \(1, 5\)\); .*Replicate",
        ),
        (
            lambda: scatter_kwargs((Replicate(PACKED),), None, CPU),
            TypeError,
            r"inputs\[0\]\S* is a PackedSequence.*inside forward",
        ),
        (
            lambda: scatter(torch.ones(2), ["cpu", "virtual:8"]),
            ValueError,
            r"'virtual:8' does not exist; .*virtual:3, cpu",
        ),
    ],
)
def test_scatter_refuses(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# --- gather ----------------------------------------------------------------------------------


def test_where_outputs_go(slots: list[str]) -> None:
    a, b = torch.randn(3, 2), torch.randn(1, 2)
    for target in (slots[0], "virtual:3", "cpu"):
        gathered = gather(spread([a, b], slots), target)
        assert_same(gathered, torch.cat([a, b]))
        assert gathered.device == torch.device(target)
    swapped = gather([{"a": a, "b": b}, {"b": b, "a": a}], "cpu")
    assert list(swapped) == ["a", "b"] and swapped["a"].shape == (6, 2)


def test_scalars(slots: list[str]) -> None:
    parts = spread([torch.tensor(float(n)) for n in (1, 2, 6)], slots)
    assert gather(parts, slots[0]).tolist() == [1, 2, 6]
    assert gather(parts, "cpu", scalars="sum").item() == 9
    mean = gather(parts, slots[2], scalars="mean", weights=(3, 2, 1))
    assert mean.item() == pytest.approx(13 / 6)
    assert (mean.shape, mean.device) == ((), torch.device(slots[2]))
    mixed = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(2)]
    assert gather(mixed, "cpu", scalars="sum").dtype == torch.float64
    # A mean of half precision is added in float32.
    halves = torch.tensor([1.0, 2.0**-8, 2.0**-8, 2.0**-8]).bfloat16()
    mean = gather(list(halves), "cpu", scalars="mean")
    assert torch.equal(mean, halves.float().mean().bfloat16())
    # A replica without samples has no say.
    parts = [torch.tensor(2.0), torch.tensor(float("nan"))]
    assert gather(parts, "cpu", scalars="mean", weights=(4, 0)).item() == 2
    assert gather(parts, "cpu", scalars="mean", weights=(0, 0)).isnan()


def test_other_leaves_come_once_or_as_a_list() -> None:
    assert gather([{"n": 3, "s": "a"}, {"n": 3, "s": "b"}], "cpu") == {"n": 3, "s": ["a", "b"]}
    assert gather([1, True], "cpu") == [1, True]
    assert gather([None, None], "cpu") is None
    scalar, marker = torch.tensor(2.0), object()
    assert gather([[scalar, marker]], "cpu", scalars="mean") == [scalar, marker]
    assert gather([scalar], "cpu").tolist() == [2]
    # The comparison of arrays has no one answer.
    assert len(gather([numpy.ones(2), numpy.ones(2)], "cpu")) == 2
    packed = gather([PACKED, pack_sequence([torch.ones(2)])], "cpu")
    assert packed[0] is PACKED


def test_sparse_outputs_concatenate() -> None:
    sparse = [torch.eye(2).to_sparse().requires_grad_(), torch.ones(1, 2).to_sparse()]
    gathered = gather(sparse, -1)
    assert gathered.layout == torch.sparse_coo
    assert gathered.to_dense().tolist() == [[1, 0], [0, 1], [1, 1]]
    (gathered.to_dense() * torch.tensor([[1.0], [2], [3]])).sum().backward()
    assert sparse[0].grad is not None and sparse[0].grad.to_dense().tolist() == [[1, 0], [0, 2]]


HALVES = [torch.tensor(0.5)] * 2


@pytest.mark.parametrize(
    ("outputs", "options", "message"),
    [
        ([], {}, "at least one replica, got none"),
        ([{"a": 1}, {"b": 1}], {}, r": dict\(a=leaf\) in replica 0 but dict\(b=leaf\) in"),
        (
            [(1, [2]), (1, [2]), (1, [2, 3])],
            {},
            r"\(leaf, list\(leaf\)\) in .* list\(leaf, leaf\)\) in replica 2; .*output_device",
        ),
        (
            [{"a": None, "b": torch.ones(2)}, {"a": torch.ones(1), "b": torch.ones(2)}],
            {},
            r"outputs\['a'\] has these types in the replicas: NoneType, Tensor; .*each",
        ),
        (
            [{"b": torch.ones(2, 3)}, {"b": torch.ones(2, 4)}],
            {},
            r"outputs\['b'\] cannot .* but 0, .* tensor 1 has shape \(2, 4\) .* \(2, 3\); .*each",
        ),
        ([torch.ones(2)] * 2, {"dim": 1}, r"dim 1 is out of range .* shape \(2,\): .*each"),
        ([torch.tensor(1)] * 2, {"scalars": "mean"}, "0-d tensor of torch.int64, which has no"),
        ([1], {"scalars": "max"}, "'stack', 'mean' or 'sum', but got 'max'"),
        (HALVES, {"scalars": "mean", "weights": [1]}, r"2 replicas and the weights \(1,\)"),
        (HALVES, {"scalars": "mean", "weights": [1, -1]}, r"none is negative, .* \(1, -1\)"),
        (HALVES, {"target_device": "virtual:8"}, "'virtual:8' does not exist"),
    ],
)
def test_gather_refuses(outputs: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs, **{"target_device": "cpu", **options})


# --- containers ------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Any
    name: str = "digits"
    total: Any = dataclasses.field(init=False, default=0)

    @functools.cached_property
    def doubled(self) -> Any:
        return self.x * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None

    def __post_init__(self) -> None:
        if self.x == "never again":
            raise AssertionError


class ModelOutput(OrderedDict[str, Any]):
    """A dict that shows its items as attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
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
    assert (rebuilt.loss, rebuilt.states, rebuilt.comment) == (10, (20, 30), "kept")

    batch = Batch(2)
    assert batch.doubled == 4
    rebuilt = flatten(batch)[1].rebuild([5, "digits", 1])
    assert (rebuilt.doubled, rebuilt.total) == (10, 1), "it drops what it has cached"
    # A dataclass is not initialized again.
    assert flatten(Slotted(1))[1].rebuild(["never again", 2]).x == "never again"
    assert flatten([Registered(1, "a")])[1] != flatten([Registered(1, "b")])[1]


def test_these_are_leaves() -> None:
    given: list[Any] = [torch.ones(2), torch.Size([1, 2]), PACKED, nn.Linear(1, 1), {1}, "ab"]
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
