"""Wrapped equals bare: outputs, gradients, second gradients, and updates over ten steps."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dataparallel import DataParallel
from tests.models import Containers, Shared, assert_all_close, grads_of, twins

PROPERTY = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

graphs = st.lists(st.integers(0, 3), min_size=1, max_size=4)
batches = st.integers(0, 17)
replicas = st.integers(1, 4)


@given(graph=graphs, batch=batches, count=replicas, seed=st.integers(0, 99))
@PROPERTY
def test_outputs_and_gradients(
    slots: list[str], graph: list[int], batch: int, count: int, seed: int
) -> None:
    bare, inner = twins(lambda: Shared(graph), slots[0])
    model = DataParallel(inner, slots[:count])
    torch.manual_seed(seed)
    x = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
    y = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
    results = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        output = module(leaf)
        (output * y).sum().backward()
        results.append([output, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


@given(graph=graphs, batch=st.integers(1, 9), count=replicas)
@PROPERTY
def test_second_gradients(slots: list[str], graph: list[int], batch: int, count: int) -> None:
    bare, inner = twins(lambda: Shared(graph), slots[0])
    model = DataParallel(inner, slots[:count])
    x = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
    results = []
    for module in (bare, model):
        leaf = x.clone().requires_grad_()
        output = module(leaf).pow(2).sum()
        first = torch.autograd.grad(
            output, [leaf, *module.parameters()], create_graph=True, allow_unused=True
        )
        penalty = sum((g.pow(2).sum() for g in first if g is not None), torch.zeros(()))
        (penalty + output).backward()
        results.append([*first, leaf.grad, *grads_of(module)])
    assert_all_close(results[1], results[0])


@given(batch=batches, count=replicas, factor=st.floats(-2, 2))
@PROPERTY
def test_nested_containers(slots: list[str], batch: int, count: int, factor: float) -> None:
    bare, inner = twins(Containers, slots[0])
    model = DataParallel(inner, slots[:count])
    first, second = torch.randn(2, batch, 3, dtype=torch.double, device=slots[0]).unbind(0)
    results = []
    for module in (bare, model):
        output = module((first, [second]), factor=factor)
        assert output["factor"] == factor
        assert isinstance(output["parts"][1], list)
        (output["sum"].sum() + output["parts"][0].pow(2).sum()).backward()
        parts = [output["sum"], output["parts"][0], output["parts"][1][0]]
        results.append([*parts, *grads_of(module)])
    assert_all_close(results[1], results[0])


@given(
    graph=graphs,
    sizes=st.lists(st.integers(0, 17), min_size=10, max_size=10),
    count=replicas,
    optimizer=st.sampled_from(["sgd", "adamw"]),
)
@PROPERTY
def test_ten_steps(
    slots: list[str], graph: list[int], sizes: list[int], count: int, optimizer: str
) -> None:
    bare, inner = twins(lambda: Shared(graph), slots[0])
    model = DataParallel(inner, slots[:count])
    for module in (bare, model):
        torch.manual_seed(3)
        update: torch.optim.Optimizer = (
            torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            if optimizer == "sgd"
            else torch.optim.AdamW(module.parameters(), lr=0.01)
        )
        for size in sizes:
            x = torch.randn(size, 4, dtype=torch.double, device=slots[0])
            update.zero_grad()
            (module(x).pow(2).sum() / 100).backward()
            update.step()
    assert_all_close(model.parameters(), bare.parameters(), rtol=1e-5, atol=1e-7)


@given(batch=batches, count=replicas)
@PROPERTY
def test_the_loss_of_the_whole_batch(slots: list[str], batch: int, count: int) -> None:
    bare, inner = twins(lambda: nn.Linear(4, 3), slots[0])
    model = DataParallel(inner, slots[:count])
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.double, device=slots[0])
    criterion = nn.CrossEntropyLoss(weight=weight, ignore_index=2)
    x = torch.randn(batch, 4, dtype=torch.double, device=slots[0])
    y = torch.randint(0, 3, (batch,), device=slots[0])
    expected = criterion(bare(x), y)
    got = model.loss(criterion, x, y)
    expected.backward()
    got.backward()
    assert_all_close([got, *grads_of(model)], [expected, *grads_of(bare)], equal_nan=True)
