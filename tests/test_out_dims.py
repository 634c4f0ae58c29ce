"""Outputs whose samples are not along ``dim``: wrapped equals bare, whatever ``out_dims`` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dataparallel import DataParallel, DistributedDataParallel, data_parallel
from tests.models import assert_all_close, grads_of, twins

WRAPPERS = [DataParallel, DistributedDataParallel]


def lstm() -> nn.Module:
    return nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)


def results_of(module: nn.Module, *inputs: Any) -> list[Tensor | None]:
    """Outputs, and gradients of a loss on all of them."""
    module.zero_grad()
    outputs = [leaf for leaf in tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)]
    total = [(out * torch.linspace(-1, 1, out.size(-1)).to(out)).sum() for out in outputs]
    torch.stack(total).sum().backward()
    return [*outputs, *grads_of(module)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("out_dims", [(0, 1), [0, (1, -2)], {1: 1}, {1: {0: 1, 1: 1}}])
def test_states_of_an_lstm(slots: list[str], wrapper: Any, out_dims: Any) -> None:
    bare, inner = twins(lstm, slots[0])
    model = wrapper(inner, slots, out_dims=out_dims)
    for batch in (7, 2, 1, 0):
        x = torch.randn(batch, 4, 3, dtype=torch.double, device=slots[0])
        assert_all_close(results_of(model, x), results_of(bare, x))
    model.close()


def test_other_dims_go_in_too(slots: list[str]) -> None:
    bare, inner = twins(lstm, slots[0])
    model = DataParallel(inner, slots[:3], in_dims={"hx": 1}, out_dims=(0, 1))
    state = want = tuple(torch.randn(2, 4, 5, 5, dtype=torch.double, device=slots[0]))
    for x in torch.randn(3, 5, 4, 3, dtype=torch.double, device=slots[0]):
        output, state = data_parallel(
            model.module, (x, state), slots[:3], in_dims={1: 1}, out_dims=(0, 1)
        )
        assert_all_close([output, *state], tree_leaves(model(x, want)))
        expected, want = bare(x, want)
        assert_all_close([output, *state], [expected, *want])


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
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_dims(slots: list[str], dims: list[int], batch: int, count: int, wrapper: Any) -> None:
    bare, inner = twins(lambda: Turned(dims), slots[0])
    model = wrapper(inner, slots[:count], out_dims={"turned": dims, "table": None})
    x = torch.randn(batch, 3, dtype=torch.double, device=slots[0])
    assert_all_close(results_of(model, x), results_of(bare, x))
    assert model(x)["name"] == "turned"
    model.close()


class Report(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        first = x[0].sum()
        return {"x": x, "turned": x.T, "sum": x.sum(), "first": first, "count": len(x)}


def test_scalars_and_other_leaves(slots: list[str]) -> None:
    x = torch.arange(10.0, device=slots[0]).view(5, 2)
    out_dims = {"turned": 1, "first": None}
    report = DataParallel(Report(), slots, scalars="sum", out_dims=out_dims)(x)
    torch.testing.assert_close(report["turned"], x.T)
    assert (report["sum"].item(), report["first"].item(), report["count"]) == (45, 1, [2, 2, 1])
    assert report["first"].device == torch.device(slots[0])
    alone = DataParallel(Report(), slots, output_device="cpu", out_dims={**out_dims, "count": None})
    report = alone(x)
    assert (report["sum"].tolist(), report["count"]) == ([6, 22, 17], 2)
    assert report["first"].device == torch.device("cpu")
    apart = DataParallel(Report(), slots, output_device="each", out_dims={"no such": 1})(x)
    assert [tuple(each["turned"].shape) for each in apart] == [(2, 2), (2, 2), (2, 1)]


@pytest.mark.parametrize(
    ("out_dims", "message"),
    [
        ((0, (1, (1,))), r"says \(1,\) of outputs\[1\]\[1\], which is leaf; give"),
        ("rows", "out_dims says 'rows' of outputs, which is tuple"),
        ((0, 3), r"outputs\[1\]\[0\] cannot .* dim 3 is out of range .*\(4, 3, 5\).*out_dims"),
        ((1, 1), r"outputs\[0\] cannot .* \(2, 4, 10\) and .* \(3, 4, 10\); .*out_dims"),
    ],
)
def test_out_dims_is_checked(out_dims: Any, message: str) -> None:
    model = DataParallel(lstm(), ["cpu", "cpu"], out_dims=out_dims)
    with pytest.raises(ValueError, match=message):
        model(torch.randn(5, 4, 3))
