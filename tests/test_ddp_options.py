"""Combinations of options, in training that accumulates and skips, against torch's own wrapper."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.reducer.options import AverageKind
from tests.cluster import Cluster


@dataclass(frozen=True)
class Plan:
    """Options of the wrapper, and what the training loop does."""

    replicas: int
    unused: bool | None
    static: bool
    view: bool
    cap: float
    average: AverageKind
    set_to_none: bool
    #: Per step, whether each of its backwards is reduced; the optimizer's step is after the last.
    steps: tuple[tuple[bool, ...], ...]


class Branches(nn.Module):
    """A shared layer, and branches that are used or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        x = torch.tanh(self.first(x))
        for i, layer in enumerate(self.branches):
            if branch is None or branch == i:
                x = x + torch.tanh(layer(x))
        output: Tensor = self.last(torch.tanh(self.first(x[:, :5]))) + self.last(x)
        return output


def _train(rank: int, world_size: int, plan: Plan, ours: bool) -> list[Tensor | None]:
    net = Branches()
    options: dict[str, Any] = {
        "find_unused_parameters": plan.unused if ours or plan.unused is not None else True,
        "static_graph": plan.static,
        "gradient_as_bucket_view": plan.view,
        "bucket_cap_mb": plan.cap,
    }
    factor = 1.0
    model: Any
    if ours:
        places = ["cpu"] * plan.replicas
        model = dp.DistributedDataParallel(net, places, average=plan.average, **options)
    else:
        model = nn.parallel.DistributedDataParallel(net, **options)
        # All processes have as many samples, so their weights are equal.
        factor = float(world_size) if plan.average == "none" else 1.0
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    results: list[Tensor | None] = []
    number = 0
    for backwards in plan.steps:
        for sync in backwards:
            generator = torch.Generator().manual_seed(100 * number + rank)
            number += 1
            branch = None
            if not plan.static and plan.unused is not False:
                branch = (number + rank) % 3
            with contextlib.nullcontext() if sync else model.no_sync():
                output = model(torch.randn(6, 5, generator=generator), branch)
                # torch's wrapper averages; what it should add up is multiplied beforehand.
                (output.pow(2).mean() * (factor if sync else 1.0)).backward()
        if backwards[-1]:
            results += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=plan.set_to_none)
    return [*results, *(p.detach().clone() for p in net.parameters())]


def _both(rank: int, world_size: int, plan: Plan) -> list[list[Tensor | None]]:
    return [_train(rank, world_size, plan, ours) for ours in (True, False)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    averages: list[AverageKind] = ["processes", "samples", "none"]
    average = draw(st.sampled_from(averages))
    static = draw(st.booleans())
    backwards = st.lists(st.booleans(), min_size=0, max_size=2).map(lambda some: (*some, True))
    if average == "none" or static:
        # torch has no sum to compare with once a part is left to the process, and its static graph
        # fails if the first backward is.
        backwards = st.integers(1, 1 if average == "none" else 2).map(lambda n: (True,) * n)
    return Plan(
        replicas=draw(st.integers(1, 3)),
        unused=False if static else draw(st.sampled_from([None, True, False])),
        static=static,
        view=draw(st.booleans()),
        cap=draw(st.sampled_from([0.0001, 0.001, 25.0])),
        average=average,
        set_to_none=draw(st.booleans()),
        steps=tuple(draw(st.lists(backwards, min_size=2, max_size=4))),
    )


@settings(
    max_examples=8,
    # Each example starts process groups: a failure is shown as it was found.
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plan=plans())
def test_any_options_train_as_torchs_wrapper_does(cluster: Cluster, plan: Plan) -> None:
    for mine, other in cluster.run(_both, 2, plan):
        assert len(mine) == len(other)
        for i, (got, expected) in enumerate(zip(mine, other, strict=True)):
            if got is None or expected is None:
                # torch has zeros for None where gradients are views.
                known = got if expected is None else expected
                assert known is None or not known.any(), i
            else:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
