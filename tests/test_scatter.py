"""Arguments are split as torch.chunk does for one tensor."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dataparallel.batch.gather import gather
from dataparallel.batch.scatter import execute, plan_scatter, scatter, scatter_kwargs
from dataparallel.batch.tree import Replicate, flatten
from tests.tree_cases import CPU, Point, Sample, assert_same


@pytest.mark.parametrize("size", [1, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_splits_like_torch_chunk(slots: list[str], size: int, dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = size
    x = torch.randn(shape)
    inputs = {"a": x, "b": [x * 2, (x.to(slots[1]),)], "c": 7}
    chunks = scatter(inputs, slots, dim)
    expected = x.chunk(4, dim)
    assert len(chunks) == len(expected)
    for chunk, model, slot in zip(chunks, expected, slots, strict=False):
        assert_same(chunk, {"a": model, "b": [model * 2, (model,)], "c": 7})
        tensors = [leaf for leaf in flatten(chunk)[0] if isinstance(leaf, torch.Tensor)]
        assert {tensor.device for tensor in tensors} == {torch.device(slot)}


def test_scatter_of_a_tensor_is_a_tuple_of_tensors(slots: list[str]) -> None:
    x = torch.randn(7, 2)
    chunks = scatter(x, slots)
    assert isinstance(chunks, tuple)
    assert_same(chunks, x.chunk(4))
    assert isinstance(scatter([x], slots), list)


def test_what_is_no_tensor_goes_to_each_replica_as_it_is() -> None:
    marker = object()
    empty: list[Any] = [{}, [], ()]
    x = torch.randn(4, 1)
    chunks = scatter([x, 3, "text", None, marker, *empty], CPU[:2])
    for chunk in chunks:
        assert chunk[1:4] == [3, "text", None]
        assert chunk[4] is marker
        assert all(a is b for a, b in zip(chunk[5:], empty, strict=True))


def test_containers_keep_their_types() -> None:
    x = torch.arange(4)
    inputs: Any = (Point(x, 1), OrderedDict(b=x, a=[Sample(x)]), {"empty": []})
    for chunk, part in zip(scatter(inputs, CPU[:2]), x.chunk(2), strict=True):
        assert_same(chunk, (Point(part, 1), OrderedDict(b=part, a=[Sample(part)]), {"empty": []}))


def test_what_is_one_tensor_for_the_caller_is_one_in_each_replica(slots: list[str]) -> None:
    x, scale = torch.randn(4, 2), torch.tensor(2.0)
    for chunk in scatter({"query": x, "key": x, "s": scale, "t": [scale]}, slots):
        assert chunk["query"] is chunk["key"]
        assert chunk["s"] is chunk["t"][0]


def test_tensors_without_dimensions_go_to_each_replica(slots: list[str]) -> None:
    scale = torch.tensor(3.0, requires_grad=True)
    chunks = scatter((torch.randn(8, 1), scale), slots)
    assert [chunk[1].item() for chunk in chunks] == [3.0] * 4
    assert [str(chunk[1].device) for chunk in chunks] == slots
    sum((chunk[1] * (i + 1)).cpu() for i, chunk in enumerate(chunks)).backward()
    assert scale.grad is not None
    assert scale.grad.item() == 10


def test_replicate_goes_whole_and_sums_its_gradients(slots: list[str]) -> None:
    table = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    chunks = scatter({"x": torch.randn(8, 2), "t": Replicate([table, "name"])}, slots)
    for chunk, slot in zip(chunks, slots, strict=True):
        assert isinstance(chunk["t"], list)
        assert chunk["t"][0].device == torch.device(slot)
        assert_same(chunk["t"], [table, "name"])
    total = sum((chunk["t"][0].sum() * (i + 1)).cpu() for i, chunk in enumerate(chunks))
    (gradient,) = torch.autograd.grad(total, table)
    assert gradient.tolist() == [[10.0, 10.0]] * 3


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
        assert [whole.to_dense()[0, 0].item() for _, whole in chunks] == [
            float(i + 2) for i in range(len(slots))
        ]
        # The first replica there changes what the caller has, as the bare module would.
        here = [i for i, slot in enumerate(slots) if slot == origin]
        expected = here[0] + 2 if here else 1
        assert tensor.to_dense()[0, 0].item() == expected
        if tensor.requires_grad:
            total = sum(whole.sum().cpu() for _, whole in chunks)
            assert isinstance(total, torch.Tensor)
            (gradient,) = torch.autograd.grad(total, leaf, retain_graph=True)
            assert gradient.tolist() == [[sum(range(2, len(slots) + 2))] * 2] * 3
            (gradient,) = torch.autograd.grad(tensor.sum(), leaf)
            assert gradient.tolist() == [[expected] * 2] * 3


def test_gradients_of_one_replica_are_summed_before_they_meet_others(slots: list[str]) -> None:
    """So their sum is the same to the last bit, however the uses in the replicas are timed."""
    table = torch.randn(500, device=slots[0], requires_grad=True)
    chunks = scatter([torch.randn(8, 500), Replicate(table)], slots)
    # Each of three uses in a replica has a gradient of its own.
    parts = [((x * whole).sin() * whole.exp() / whole).sum().cpu() for x, whole in chunks]
    wholes = [whole for _, whole in chunks]
    first, *others = torch.autograd.grad(parts, wholes, [torch.ones(())] * 4, retain_graph=True)
    expected = first.cpu() + sum(other.cpu() for other in others)
    torch.autograd.backward(parts)
    assert table.grad is not None
    assert torch.equal(table.grad.cpu(), expected)


@pytest.mark.parametrize(
    "in_dims",
    [
        {"mask": None, 0: 0, 1: 1},
        {"mask": [None, {"inner": None}], 1: 1, "absent": 3, 9: 1},
        {"mask": (None, None), 1: -1},
    ],
)
def test_in_dims_decides_per_argument(slots: list[str], in_dims: Any) -> None:
    x, y = torch.randn(6, 3), torch.randn(2, 6)
    mask = [torch.randn(5), {"inner": torch.randn(1, 1)}]
    args, kwargs = scatter_kwargs((x, y), {"mask": mask}, slots, in_dims=in_dims)
    expected = zip(x.chunk(4), y.chunk(4, 1), strict=True)
    for arg, kwarg, model in zip(args, kwargs, expected, strict=True):
        assert_same(arg, model)
        assert_same(kwarg, {"mask": mask})


def test_in_dims_of_scatter_follows_the_container() -> None:
    x, y = torch.randn(4, 2), torch.randn(2, 4)
    first, second = scatter((x, {"y": y, "z": x}), CPU[:2], in_dims=(0, {"y": 1}))
    assert_same(first, (x[:2], {"y": y[:, :2], "z": x[:2]}))
    assert_same(second, (x[2:], {"y": y[:, 2:], "z": x[2:]}))


@pytest.mark.parametrize(
    ("in_dims", "error", "message"),
    [
        ([1], AttributeError, "'list' object has no attribute 'items'"),
        ({-1: 0}, ValueError, r"in_dims says \{-1: 0\} of inputs"),
        ({"m": "rows"}, ValueError, r"says 'rows' of kwargs\['m'\], which is dict\(a=leaf\); give"),
        ({"m": {"b": 0}}, ValueError, r"says \{'b': 0\} of kwargs\['m'\], which is dict\(a=leaf"),
        ({"m": [0, 1]}, ValueError, r"says \[0, 1\] of kwargs\['m'\], which is dict\(a=leaf"),
        ({"m": 2}, ValueError, r"dim 2 is out of range for kwargs\['m'\]\['a'\] of shape"),
    ],
)
def test_in_dims_is_checked(in_dims: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scatter_kwargs((), {"m": {"a": torch.ones(2, 2)}}, CPU, in_dims=in_dims)


def test_lists_without_tensors_go_to_each_replica() -> None:
    x, names = torch.arange(5), list("abcde")
    for chunk in scatter({"x": x, "names": names}, CPU[:2]):
        assert chunk["names"] == names


def test_chunk_sizes(slots: list[str]) -> None:
    x = torch.randn(2, 6)
    chunks = scatter(x, slots, 1, chunk_sizes=[1, 3, 2, 0])
    assert_same(chunks, torch.split(x, [1, 3, 2], 1))
    assert [str(chunk.device) for chunk in chunks] == slots[:3]
    assert_same(scatter(x, slots, 1, chunk_sizes=[1, 3, 2]), torch.split(x, [1, 3, 2], 1))


@pytest.mark.parametrize(
    "chunk_sizes", [[3, 2], [1] * 6, [7, -1, 0, 0], [2, 2, 2, 2], [3, 0, 3, 0], [0, 3, 3, 0], []]
)
def test_chunk_sizes_are_checked(chunk_sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"each of the 4 device slots .* 6 samples .* but got \("):
        scatter(torch.ones(6, 2), CPU, chunk_sizes=chunk_sizes)


def test_small_and_empty_batches_use_fewer_replicas(slots: list[str]) -> None:
    assert len(scatter(torch.ones(2, 1), slots)) == 2
    chunks = scatter({"x": torch.ones(0, 3), "y": 1}, slots)
    assert len(chunks) == 1
    assert chunks[0]["x"].shape == (0, 3)
    assert chunks[0]["x"].device == torch.device(slots[0])


def test_without_a_tensor_one_replica_runs(slots: list[str]) -> None:
    assert scatter_kwargs(("text",), {"n": 3}, slots) == ((("text",),), ({"n": 3},))
    assert scatter_kwargs((), None, slots) == (((),), ({},))
    plan = plan_scatter((Replicate(torch.ones(3)), torch.tensor(1.0)), None, 4)
    assert (plan.sizes, plan.batch_size) == ((1,), None)
    ((args, kwargs),) = execute(plan, [torch.device(slot) for slot in slots])
    assert kwargs == {}
    assert [str(arg.device) for arg in args] == [slots[0]] * 2


def test_kwargs_only_and_args_only_have_equal_length(slots: list[str]) -> None:
    x = torch.randn(3, 1)
    assert_same(
        scatter_kwargs((), {"x": x}, slots), (((),) * 3, tuple({"x": c} for c in x.chunk(3)))
    )
    assert_same(scatter_kwargs((x,), {}, slots), (tuple((c,) for c in x.chunk(3)), ({},) * 3))


def test_one_slot_gets_the_tensor_itself() -> None:
    x, table = torch.randn(3, 1, requires_grad=True), torch.randn(2)
    ((chunk, whole),), _ = scatter_kwargs((x, Replicate(table)), None, ["cpu"])
    assert chunk is x
    assert whole is table


def test_plan_is_made_before_anything_is_copied() -> None:
    x = torch.randn(7, 2)
    plan = plan_scatter((x,), {"mask": torch.ones(2)}, 3, in_dims={"mask": None})
    assert (plan.batch_size, plan.sizes) == (7, (3, 3, 1))
    chunks = execute(plan, [torch.device("cpu")] * 4)
    assert_same([args for args, _ in chunks], [(part,) for part in torch.split(x, [3, 3, 1])])
    with pytest.raises(dataclasses.FrozenInstanceError, match="sizes"):
        plan.sizes = (7,)  # type: ignore[misc]


def test_two_arguments_that_disagree_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"inputs\[0\] has 8 along dim 0 \(shape \(8, 3\)\) and kwargs\['y'\] has 5 along "
        r"dim 1 \(shape \(1, 5\)\); .*Replicate",
    ):
        scatter_kwargs(
            (torch.ones(8, 3), {"m": torch.ones(8)}),
            {"ok": torch.ones(8), "y": torch.ones(1, 5)},
            CPU,
            in_dims={"y": 1},
        )


def test_an_argument_without_the_dim_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"dim 1 is out of range for inputs\[1\] of shape \(4,\).*through in_dims"
    ):
        scatter_kwargs((torch.ones(4, 4), torch.ones(4)), {"t": torch.ones(2)}, CPU, dim=1)
    with pytest.raises(ValueError, match=r"dim 0 is out of range for inputs\[0\] of shape \(\)"):
        scatter_kwargs((torch.tensor(1.0),), None, CPU, in_dims={0: 0})


def test_packed_sequences_are_refused_with_a_remedy() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    for marked in (packed, Replicate(packed)):
        with pytest.raises(TypeError, match=r"inputs\[0\]\S* is a PackedSequence.*inside forward"):
            scatter_kwargs((marked,), None, CPU)
    other = pack_sequence([torch.ones(2)])
    both = gather([{"h": packed}, {"h": other}], "cpu")["h"]
    assert both[0] is packed and both[1] is other


def test_devices_must_exist() -> None:
    with pytest.raises(ValueError, match=r"'virtual:8' does not exist; .*virtual:3, cpu"):
        scatter(torch.ones(2), ["cpu", "virtual:8"])
    with pytest.raises(ValueError, match="'virtual:8' does not exist"):
        gather([torch.ones(2)], "virtual:8")
