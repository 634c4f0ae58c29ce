"""Wrapped equals bare: outputs, gradients of both orders, and updates over ten steps."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataparallel import DataParallel
from tests.models import Shared, assert_all_close, grads_of, twins

PROPERTY = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

graphs = st.lists(st.integers(0, 3), min_size=1, max_size=4)
batches = st.integers(0, 17)
replicas = st.integers(1, 4)


@given(graph=graphs, batch=batches, count=replicas)
@PROPERTY
def test_gradients_of_both_orders(
    slots: list[str], graph: list[int], batch: int, count: int
) -> None:
    bare, inner = twins(lambda: Shared(graph), slots[0])
    model = DataParallel(inner, slots[:count])
    x, y = torch.randn(2, batch, 4, dtype=torch.double, device=slots[0]).unbind(0)
    results: list[list[Tensor | None]] = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        output = module(leaf)
        loss = (output.pow(2) * y).sum()
        first = torch.autograd.grad(
            loss, [leaf, *module.parameters()], create_graph=True, allow_unused=True
        )
        penalty = sum((g.pow(2).sum() for g in first if g is not None), torch.zeros(()))
        (penalty + loss).backward()
        results.append([output, *first, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


@given(
    graph=graphs,
    sizes=st.lists(st.integers(0, 17), min_size=10, max_size=10),
    count=replicas,
    kind=st.sampled_from([torch.optim.SGD, torch.optim.AdamW]),
)
@PROPERTY
def test_ten_steps(
    slots: list[str], graph: list[int], sizes: list[int], count: int, kind: type
) -> None:
    bare, inner = twins(lambda: Shared(graph), slots[0])
    model = DataParallel(inner, slots[:count])
    for module in (bare, model):
        torch.manual_seed(3)
        optimizer = kind(module.parameters(), lr=0.01)
        for size in sizes:
            x = torch.randn(size, 4, dtype=torch.double, device=slots[0])
            optimizer.zero_grad()
            (module(x).pow(2).sum() / 100).backward()
            optimizer.step()
    assert_all_close(model.parameters(), bare.parameters(), rtol=1e-5, atol=1e-7)
