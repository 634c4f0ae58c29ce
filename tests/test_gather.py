"""Outputs are put together as torch.cat does for one tensor, and undo scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from dataparallel.batch.gather import gather
from dataparallel.batch.scatter import move, scatter
from dataparallel.batch.tree import Replicate
from tests.tree_cases import Point, Sample, assert_same, spread, trees

HALVES = [torch.tensor(0.5)] * 2


def test_gather_concatenates_in_every_container(slots: list[str]) -> None:
    a, b = torch.randn(3, 2), torch.randn(1, 2)
    parts = [
        {"t": (x, [Sample(x * 2, "same")]), "p": Point(x.long(), None), "n": n}
        for n, x in enumerate((a, b))
    ]
    both = torch.cat([a, b])
    for target in (slots[0], "virtual:3", "cpu"):
        gathered = gather(spread(parts, slots), target)
        expected = {
            "t": (both, [Sample(both * 2, "same")]),
            "p": Point(both.long(), None),
            "n": [0, 1],
        }
        assert gathered["n"] == [0, 1]
        assert_same({**gathered, "n": 0}, {**expected, "n": 0})
        assert gathered["t"][0].device == torch.device(target)


def test_keys_may_come_in_another_order() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    gathered = gather([{"a": first, "b": second}, {"b": second, "a": first}], "cpu")
    assert list(gathered) == ["a", "b"]
    assert gathered["a"].tolist() == [1, 1]


@pytest.mark.parametrize("dim", [1, -1])
def test_gather_along_another_dim(slots: list[str], dim: int) -> None:
    parts = [torch.randn(2, n) for n in (3, 0, 1)]
    assert_same(gather(spread(parts, slots), slots[1], dim), torch.cat(parts, 1))


def test_scalars(slots: list[str]) -> None:
    parts = spread([torch.tensor(float(n)) for n in (1, 2, 6)], slots)
    assert gather(parts, slots[0]).tolist() == [1, 2, 6]
    assert gather(parts, "cpu", scalars="sum").item() == 9
    assert gather(parts, "cpu", scalars="mean").item() == 3
    mean = gather(parts, slots[2], scalars="mean", weights=(3, 2, 1))
    assert mean.item() == pytest.approx(13 / 6)
    assert mean.shape == ()
    assert mean.device == torch.device(slots[2])
    counts = [torch.tensor(n) for n in (1, 2)]
    assert gather(counts, "cpu", scalars="sum").item() == 3
    mixed = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(2)]
    assert gather(mixed, "cpu", scalars="sum").dtype == torch.float64


def test_mean_of_half_precision_is_added_in_float32() -> None:
    parts = [torch.tensor(1.0, dtype=torch.bfloat16)] + [
        torch.tensor(2.0**-8, dtype=torch.bfloat16)
    ] * 3
    mean = gather(parts, "cpu", scalars="mean")
    assert mean.dtype == torch.bfloat16
    assert mean.item() == torch.tensor((1 + 3 * 2.0**-8) / 4).bfloat16().item()


def test_a_replica_without_samples_has_no_say_in_a_mean() -> None:
    parts = [torch.tensor(2.0), torch.tensor(float("nan"))]
    assert gather(parts, "cpu", scalars="mean", weights=(4, 0)).item() == 2
    assert gather(parts, "cpu", scalars="mean", weights=(0, 0)).isnan()


def test_one_replica(slots: list[str]) -> None:
    marker = object()
    tensor = torch.randn(2, 2).to(slots[1])
    output = {"x": tensor, "m": marker}
    gathered = gather([output], slots[1])
    assert gathered["x"] is tensor
    assert gathered["m"] is marker
    assert gather([output], "cpu")["x"].device == torch.device("cpu")
    scalar = torch.tensor(2.0)
    assert gather([scalar], "cpu").tolist() == [2]
    assert gather([scalar], "cpu", scalars="mean") is scalar
    assert move({"loss": scalar}, "cpu")["loss"] is scalar


def test_each_leaves_outputs_where_they_are(slots: list[str]) -> None:
    outputs = [torch.randn(2, 3).to(slots[0]), {"other": torch.randn(1).to(slots[1])}]
    apart = gather(outputs, "each")
    assert all(a is b for a, b in zip(apart, outputs, strict=True))


def test_other_leaves_come_once_or_as_a_list() -> None:
    assert gather([{"n": 3, "s": "a"}, {"n": 3, "s": "b"}], "cpu") == {"n": 3, "s": ["a", "b"]}
    assert gather([1, True], "cpu") == [1, True]
    assert gather([None, None], "cpu") is None


def test_leaves_whose_comparison_has_no_one_answer() -> None:
    numpy = pytest.importorskip("numpy")
    gathered = gather([numpy.ones(2), numpy.ones(2)], "cpu")
    assert isinstance(gathered, list)
    assert len(gathered) == 2


def test_dtypes_promote_like_torch_cat(slots: list[str]) -> None:
    parts = [torch.ones(2, dtype=torch.float16), torch.ones(1), torch.ones(1, dtype=torch.int64)]
    assert_same(gather(spread(parts, slots), slots[0]), torch.cat(parts))
    leaves = [part.requires_grad_(part.is_floating_point()) for part in parts]
    gather(spread(leaves, slots), slots[0]).sum().backward()
    assert [None if leaf.grad is None else leaf.grad.dtype for leaf in leaves] == [
        torch.float16,
        torch.float32,
        None,
    ]


def test_sparse_outputs_concatenate() -> None:
    parts = [torch.eye(2).to_sparse().requires_grad_(), torch.ones(1, 2).to_sparse()]
    gathered = gather(parts, "cpu")
    assert gathered.layout == torch.sparse_coo
    assert gathered.to_dense().tolist() == [[1, 0], [0, 1], [1, 1]]
    (gathered.to_dense() * torch.tensor([[1.0], [2], [3]])).sum().backward()
    assert parts[0].grad is not None
    assert parts[0].grad.to_dense().tolist() == [[1, 0], [0, 2]]


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
        ([[1], None], {}, r"list\(leaf\) in replica 0 but leaf in replica 1"),
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
        ([torch.ones(2), torch.tensor(1.0)], {}, r"outputs cannot .* has shape \(\) and .*each"),
        ([torch.ones(2)] * 2, {"dim": 1}, r"dim 1 is out of range .* shape \(2,\): .*each"),
        ([torch.tensor(1)] * 2, {"scalars": "mean"}, "0-d tensor of torch.int64, which has no"),
        ([1], {"scalars": "max"}, "'stack', 'mean' or 'sum', but got 'max'"),
        (HALVES, {"scalars": "mean", "weights": [1]}, r"2 replicas and the weights \(1,\)"),
        (
            HALVES,
            {"scalars": "mean", "weights": [1, -1]},
            r"none is negative, .* weights \(1, -1\)",
        ),
    ],
)
def test_gather_refuses(outputs: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs, "cpu", **options)


@pytest.mark.parametrize("scalars", ["stack", "mean", "sum"])
def test_derivatives_of_scatter_and_gather(slots: list[str], scalars: Any) -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chunks = scatter({"x": x, "t": Replicate(table)}, slots[:3])
        outputs = [
            {"rows": chunk["x"] ** 2 * chunk["t"], "loss": (chunk["x"] * chunk["t"]).sum()}
            for chunk in chunks
        ]
        gathered = gather(outputs, slots[1], scalars=scalars, weights=(2, 2, 1))
        return gathered["rows"].to("cpu"), gathered["loss"].to("cpu")

    inputs = (
        torch.randn(5, 2, dtype=torch.float64, requires_grad=True),
        torch.randn(2, dtype=torch.float64, requires_grad=True),
    )
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@settings(max_examples=60, deadline=None)
@given(case=trees(), num_slots=st.integers(1, 4), on=st.sampled_from(["cpu", "virtual"]))
def test_gather_undoes_scatter(case: tuple[Any, int], num_slots: int, on: str) -> None:
    tree, dim = case
    devices = [on if on == "cpu" else f"virtual:{i}" for i in range(num_slots)]
    chunks = scatter(tree, devices, dim)
    size = tree[0].size(dim)
    assert len(chunks) == len([t for t in tree[0].chunk(num_slots, dim) if t.numel()] or [None])
    assert sum(chunk[0].size(dim) for chunk in chunks) == size
    assert_same(gather(chunks, "cpu", dim), tree)
