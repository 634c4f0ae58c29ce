"""Outputs whose samples are not along ``dim``: wrapped equals bare, whatever ``out_dims`` says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dataparallel import DataParallel, DistributedDataParallel, data_parallel, gather
from tests.models import assert_all_close, grads_of, twins

WRAPPERS = [DataParallel, DistributedDataParallel]
PROPERTY = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def lstm() -> nn.Module:
    return nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)


def results_of(module: nn.Module, *inputs: Any) -> list[Tensor | None]:
    """Outputs, and gradients of a loss on all of them."""
    module.zero_grad()
    outputs = tree_leaves(module(*inputs))
    total = sum((out * torch.linspace(-1, 1, out.size(-1)).to(out)).sum() for out in outputs)
    assert isinstance(total, Tensor)
    total.backward()
    return [*outputs, *grads_of(module)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("out_dims", [(0, 1), [0, (1, -2)], {1: 1}, {1: {0: 1, 1: 1}}])
def test_states_of_an_lstm(slots: list[str], wrapper: Any, out_dims: Any) -> None:
    bare, inner = twins(lstm, slots[0])
    model = wrapper(inner, slots, out_dims=out_dims)
    for batch in (8, 7, 5, 2, 1, 0):
        x = torch.randn(batch, 4, 3, dtype=torch.double, device=slots[0])
        assert_all_close(results_of(model, x), results_of(bare, x))
    model.close()


def test_a_state_goes_in_and_comes_out(slots: list[str]) -> None:
    bare, inner = twins(lstm, slots[0])
    model = DataParallel(inner, slots[:3], in_dims={"hx": 1}, out_dims=(0, 1))
    state = want = tuple(torch.randn(2, 4, 5, 5, dtype=torch.double, device=slots[0]))
    for x in torch.randn(3, 5, 4, 3, dtype=torch.double, device=slots[0]):
        output, state = model(x, state)
        expected, want = bare(x, want)
        assert_all_close([output, *state], [expected, *want])


def test_attention_and_its_weights(slots: list[str]) -> None:
    bare, inner = twins(lambda: nn.MultiheadAttention(4, 2), slots[0])
    model = DataParallel(inner, slots[:3], dim=1, out_dims=(1, 0))
    x = torch.randn(4, 5, 4, dtype=torch.double, device=slots[0])
    assert_all_close(results_of(model, x, x, x), results_of(bare, x, x, x))


class Turned(nn.Module):
    """Returns the same rows in many shapes, the samples along a dim that is given for each."""

    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.table = nn.Parameter(torch.ones(2, 2))
        self.dims = dims

    def forward(self, x: Tensor) -> dict[str, Any]:
        rows = self.layer(x)
        turned = [rows[..., None].expand(-1, -1, 4).movedim(0, dim) for dim in self.dims]
        return {"turned": turned, "rows": (rows, rows * 2), "table": self.table, "name": "turned"}


@given(
    dims=st.lists(st.integers(-3, 2), max_size=3),
    batch=st.integers(0, 9),
    count=st.integers(1, 4),
    wrapper=st.sampled_from(WRAPPERS),
)
@PROPERTY
def test_any_dims(slots: list[str], dims: list[int], batch: int, count: int, wrapper: Any) -> None:
    bare, inner = twins(lambda: Turned(dims), slots[0])
    model = wrapper(inner, slots[:count], out_dims={"turned": dims, "table": None})
    x = torch.randn(batch, 3, dtype=torch.double, device=slots[0])
    for module in (bare, model):
        assert module(x).pop("name") == "turned"
    results = []
    for module in (bare, model):
        module.zero_grad()
        output = module(x)
        output.pop("name")
        leaves = tree_leaves(output)
        sum((leaf.square().sum() for leaf in leaves), torch.zeros(())).backward()
        results.append([*leaves, *grads_of(module)])
    assert_all_close(results[1], results[0])
    model.close()


class Report(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        first = x[0].sum()
        return {"x": x, "turned": x.T, "sum": x.sum(), "first": first, "count": len(x)}


def test_scalars_and_other_leaves(slots: list[str]) -> None:
    x = torch.arange(10.0, device=slots[0]).view(5, 2)
    out_dims = {"turned": 1, "first": None}
    model = DataParallel(Report(), slots, scalars="sum", out_dims=out_dims)
    report = model(x)
    torch.testing.assert_close(report["turned"], x.T)
    assert (report["sum"].item(), report["first"].item(), report["count"]) == (45, 1, [2, 2, 1])
    assert report["first"].device == torch.device(slots[0])
    alone = DataParallel(Report(), slots, output_device="cpu", out_dims={**out_dims, "count": None})
    report = alone(x)
    assert (report["sum"].tolist(), report["count"]) == ([6, 22, 17], 2)
    assert report["first"].device == torch.device("cpu")
    apart = DataParallel(Report(), slots, output_device="each", out_dims={"no such": 1})(x)
    assert [tuple(each["turned"].shape) for each in apart] == [(2, 2), (2, 2), (2, 1)]


def test_one_dim_is_for_all(slots: list[str]) -> None:
    x = torch.randn(7, 4, 3, device=slots[0])
    bare = nn.LSTM(3, 5).to(slots[0])
    model = DataParallel(bare, slots[:2], in_dims={0: 1}, out_dims=1)
    assert_all_close(tree_leaves(model(x)), tree_leaves(bare(x)))


def test_copies_and_the_function() -> None:
    bare, inner = twins(lstm, "cpu")
    x = torch.randn(5, 4, 3, dtype=torch.double)
    expected = results_of(bare, x)
    for wrapper in WRAPPERS:
        model: Any = wrapper(inner, ["cpu", "cpu"], out_dims=(0, 1))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_all_close(results_of(other, x), expected)
            other.close()
        model.close()
    outputs = data_parallel(inner, x, ["cpu", "cpu"], out_dims=(0, 1))
    assert_all_close(tree_leaves(outputs), expected[:3])
    state = torch.zeros(4, 5, 5, dtype=torch.double)
    outputs = data_parallel(
        inner, (x, (state, state)), ["cpu", "cpu"], in_dims={1: 1}, out_dims=(0, 1)
    )
    assert_all_close(tree_leaves(outputs), expected[:3])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_compiled(wrapper: Any) -> None:
    bare, inner = twins(lambda: Turned([1, -1]), "cpu")
    x = torch.randn(5, 3, dtype=torch.double)
    expected = tree_leaves(bare(x))[:-1]
    out_dims = {"turned": [1, -1], "table": None}
    within = wrapper(torch.compile(inner, backend="aot_eager"), ["cpu", "cpu"], out_dims=out_dims)
    around = torch.compile(wrapper(inner, ["cpu", "cpu"], out_dims=out_dims), backend="aot_eager")
    for model in (within, around):
        assert_all_close(tree_leaves(model(x))[:-1], expected)


def test_a_gather_of_ones_own() -> None:
    class Own(DataParallel[Any]):
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return "own", super().gather([out[1] for out in outputs], output_device)

    model = Own(lstm(), ["cpu", "cpu"], out_dims=1)
    x = torch.randn(5, 4, 3)
    name, states = model(x)
    assert name == "own"
    assert_all_close(states, model.module(x)[1])


def test_gather_takes_dims_for_each_part(slots: list[str]) -> None:
    a, b = torch.randn(2, 3, device=slots[0]), torch.randn(2, 1, device=slots[1])
    outputs = [(a, {"n": a, "same": a}), (b, {"n": b.T.expand(3, 2).T, "same": b})]
    first, rest = gather(outputs, "cpu", out_dims=(1, {"n": 0, "same": None}))
    torch.testing.assert_close(first, torch.cat([a.cpu(), b.cpu()], 1))
    assert rest["n"].shape == (4, 3)
    torch.testing.assert_close(rest["same"], a.cpu())


@pytest.mark.parametrize(
    ("out_dims", "error", "message"),
    [
        ((0, 1, 1), ValueError, r"says \(0, 1, 1\) of outputs, which is tuple\(leaf, .*; give"),
        (
            (0, {"h": 1}),
            ValueError,
            r"says \{'h': 1\} of outputs\[1\], which is tuple\(leaf, leaf\)",
        ),
        ((0, (1, (1,))), ValueError, r"says \(1,\) of outputs\[1\]\[1\], which is leaf; give"),
        ("rows", ValueError, "out_dims says 'rows' of outputs, which is tuple"),
        (
            (0, 3),
            ValueError,
            r"outputs\[1\]\[0\] cannot .* dim 3 is out of range .*\(4, 3, 5\).*out_dims",
        ),
        (
            (1, 1),
            ValueError,
            r"outputs\[0\] cannot .* \(2, 4, 10\) and .* \(3, 4, 10\); .*out_dims",
        ),
    ],
)
def test_out_dims_is_checked(out_dims: Any, error: type[Exception], message: str) -> None:
    model = DataParallel(lstm(), ["cpu", "cpu"], out_dims=out_dims)
    with pytest.raises(error, match=message):
        model(torch.randn(5, 4, 3))
