"""The tensor that waits for itself as an argument of compiled functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.test_collectives_async_gradients import (
    LEAF,
    Function,
    _ends_empty,  # noqa: F401
    asynchronous,
    waited,
)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_as_an_argument_of_a_compiled_function(backend: str) -> None:
    def function(t: Tensor) -> Tensor:
        return (t * 2).view(-1) + t.view(-1).sin()

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        x, work = asynchronous(LEAF)
        torch.testing.assert_close(compiled(x), function(LEAF))
        assert work.waits == 1
    leaf = LEAF.clone().requires_grad_()
    for _ in range(2):
        x, work = asynchronous(leaf)
        compiled(x).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * (2 + LEAF.cos()))
    assert not counters["aot_autograd"]["autograd_cache_bypass"]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("select", [lambda t: t, lambda t: t[1:]], ids=["all", "row"])
def test_a_compiled_function_changes_its_argument(select: Function, backend: str) -> None:
    torch._dynamo.reset()
    x, work = asynchronous(LEAF)
    torch.compile(lambda t: t.mul_(3), backend=backend, fullgraph=True)(select(x))
    expected = LEAF.clone()
    select(expected).mul_(3)
    assert torch.equal(waited(x), expected) and work.waits == 1


def test_compiled_code_takes_views_of_several_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
    for size in (3, 4, 6):
        x, work = asynchronous(torch.ones(size, 2))
        assert compiled(x[1:]).tolist() == [[2.0, 2.0]] * (size - 1) and work.waits == 1
