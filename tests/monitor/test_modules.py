"""The monitor of what is no wrapper of this package: modules, torch's wrappers, optimizers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import dataparallel
from dataparallel import torch_internals
from dataparallel.monitor import StepMonitor
from tests.cluster import Cluster

X = torch.ones(5, 6)
PHASES = ["input", "forward", "loss", "backward", "idle", "optimizer"]
Call = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out

    def by_parts(self, x: torch.Tensor) -> torch.Tensor:
        """As frameworks do, which call a method of the module."""
        out: torch.Tensor = self.second(self.first(x))
        return out


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return out


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def train(call: Call, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        call(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(monitor: StepMonitor) -> list[tuple[str, int, int]]:
    return [(step.kind, step.samples, step.calls) for step in monitor.steps]


def phases(monitor: StepMonitor) -> list[str]:
    """In the last step."""
    return [one.phase for one in monitor.steps[-1].replicas[0].segments]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager", fullgraph=True)  # type: ignore[return-value]


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager", fullgraph=True)
    return module


def wholly_checkpointed(module: nn.Module) -> Call:
    return lambda x: checkpoint(module, x.clone().requires_grad_(), use_reentrant=True)


def itself(module: nn.Module) -> nn.Module:
    return module


#: The watched object, from the module and its optimizer; the call, from the module; samples.
WATCHED: dict[str, tuple[Any, Any, int]] = {
    "a module": (lambda model, _: model, itself, 5),
    "an optimizer": (lambda _, optimizer: optimizer, itself, 5),
    "parts of a module": (lambda model, _: model, lambda model: model.by_parts, 5),
    "parts of a module, by the optimizer": (lambda _, opt: opt, lambda model: model.by_parts, 5),
    "a checkpoint of all": (lambda model, _: model, wholly_checkpointed, 5),
    # The load of a compiled module then belongs to the forward.
    "the original of a compiled one": (lambda model, _: model, compiled, 1),
    "parameters": (
        lambda _, optimizer: optimizer,
        lambda model: lambda x: x @ model.first.weight.T + model.first.bias,
        1,
    ),
}


@pytest.mark.parametrize("case", WATCHED)
def test_phases_of_what_is_watched(case: str) -> None:
    watched, called, samples = WATCHED[case]
    model = Net()
    optimizer = SGD(model.parameters(), 0.01)
    call = called(model)
    with StepMonitor(watched(model, optimizer), publish=False) as monitor:
        train(call, optimizer, 4)
    parts = "parts" in case
    found = told(monitor)
    assert found[-2:] == [("train", samples, 1 + parts)] * 2
    assert len(found) == 4
    shown = phases(monitor)
    if parts:
        # Between the parts.
        assert shown[1:4] == ["forward", "idle", "forward"]
        del shown[1:3]
    assert shown == PHASES
    summary = monitor.summary()
    assert summary.kind == "train" and summary.replicas[0].device == "cpu"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("by_optimizer", [False, True])
def test_a_compiled_module_is_compiled_once(in_place: bool, by_optimizer: bool) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 3))
    called: Any = Whole(model)
    if in_place:
        called.compile(backend=backend)
    else:
        called = torch.compile(called, backend=backend)
    optimizer = SGD(model.parameters(), 0.01)
    before = torch_internals.compiled_call(called)
    with StepMonitor(optimizer if by_optimizer else called, publish=False) as monitor:
        train(called, optimizer, 4)
    # With the optimizer's first step hooks within it would go.
    assert len(graphs) == 1
    assert told(monitor) == [("train", 5, 1)] * 4 and phases(monitor) == PHASES
    assert torch_internals.compiled_call(called) is before


def in_a_group(rank: int, world_size: int) -> dict[str, tuple[Any, ...]]:
    """Torch's wrappers, each watched by itself and by its optimizer."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for name in ("DDP", "FSDP", "fully_shard"):
        model: nn.Module = Net()
        if name == "DDP":
            model = DistributedDataParallel(model)
        elif name == "FSDP":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model, mesh=mesh)
        optimizer = SGD(model.parameters(), 0.01)
        train(model, optimizer)
        for target in (model, optimizer):
            with StepMonitor(target, publish=False) as monitor:
                train(model, optimizer)
            info = monitor.state().info
            last = monitor.steps[-1].replicas[0].seconds
            waits = last["backward"] > 0
            shown = info.model, info.wrapper, info.world_size, info.is_hooked
            found[f"{name} {type(target).__name__}"] = (
                *shown,
                told(monitor),
                phases(monitor),
                waits,
            )
    return found


def test_torchs_wrappers_are_watched(cluster: Cluster) -> None:
    for found in cluster.run(in_a_group, 2):
        for name, (model, wrapper, *rest) in found.items():
            names = ("SGD", "optimizer") if name.endswith("SGD") else ("Net", name.split()[0])
            assert (model, wrapper) == names
            assert rest == [2, True, [("train", 5, 1)] * 3, PHASES, True]


def late_in_backward(rank: int, world_size: int) -> float:
    """Return the share of the step that the first process spends in its backward."""
    model = DistributedDataParallel(nn.Linear(6, 3))
    optimizer = SGD(model.parameters(), 0.01)
    a = torch.ones(256, 256)

    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100 * rank):
            a @ a
        out: torch.Tensor = model(x)
        return out

    with StepMonitor(model, publish=False) as monitor:
        train(call, optimizer, 4)
    return monitor.summary().replicas[0].shares["backward"]


def test_the_all_reduce_of_torchs_wrapper_is_in_its_backward(cluster: Cluster) -> None:
    first, second = cluster.run(late_in_backward, 2)
    assert first > 0.5 > second


def test_forwards_that_fail_and_evaluation_and_many_forwards() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(X.T)
        # In its handler the next one is no failure.
        try:
            raise ValueError("out of memory")
        except ValueError:
            train(model, optimizer, 1)
        with torch.no_grad():
            model(X)
            model(X)
        # More than an evaluation with gradients may have.
        for _ in range(2):
            sum(model(X).sum() for _ in range(20)).backward()
            optimizer.step()
    assert monitor.steps[0].kind == "train" and monitor.steps[1].samples == 6 + 5
    assert [one.phase for one in monitor.steps[1].replicas[0].segments].count("forward") == 1
    kinds = [(step.kind, step.calls) for step in monitor.steps[2:]]
    # The number of forwards in a step is known after the first such step.
    assert kinds == [
        *[("inference", 1)] * 2,
        *[("inference", 8)] * 2,
        ("train", 4),
        ("train", 20),
    ]


def test_a_checkpoint_runs_within_the_backward() -> None:
    model = Checkpointed()
    optimizer = SGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer)
    assert told(monitor) == [("train", 5, 1)] * 3 and phases(monitor) == PHASES


class Recursive(nn.Module):
    """Calls itself, and then a function."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(6, 3), then

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        out: torch.Tensor = self(x, depth - 1) if depth else self.linear(x)
        self.then()
        return out


def test_a_module_that_calls_itself_is_in_one_forward() -> None:
    seen = []
    model = Recursive(lambda: seen.append(monitor.state().now[0][0]))
    with StepMonitor(model, publish=False) as monitor:
        train(model, SGD(model.parameters(), 0.01), 1)
    assert seen == ["forward"] * 3 and told(monitor) == [("train", 5, 1)]


def test_an_interrupted_forward_is_forgotten() -> None:
    model = Recursive(lambda: None)
    optimizer = SGD(model.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer, 1)
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "then", lambda: signal.raise_signal(signal.SIGINT))
            model(X)
        train(model, optimizer, 3)
    assert phases(monitor) == PHASES and told(monitor)[-1] == ("train", 5, 1)


def test_a_module_that_goes_to_a_device_later_is_watched_there() -> None:
    model = Net()
    monitor = StepMonitor(model, publish=False)
    with monitor:
        train(model, SGD(model.parameters(), 0.01))
        assert monitor.state().info.devices == ("cpu",) and len(monitor.steps) == 2
        model.to("virtual:1")
        optimizer = SGD(model.parameters(), 0.01)
        train(lambda x: model(x.to("virtual:1")), optimizer)
    assert monitor.state().info.devices == ("virtual:1",) and len(monitor.steps) == 3
    assert phases(monitor) == PHASES
    assert monitor.summary().replicas[0].device == "virtual:1"


@pytest.mark.parametrize("compile_it", [itself, compiled_in_place])
def test_the_module_is_left_as_it_was_and_may_be_copied_meanwhile(compile_it: Any) -> None:
    model = compile_it(Net())
    optimizer = SGD(model.parameters(), 0.01)
    modules = [*model.modules()]
    before = [{name: copy.copy(value) for name, value in vars(one).items()} for one in modules]
    state = model.state_dict().keys()
    with StepMonitor(model, publish=False) as monitor:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        train(model, optimizer, 1)
        torch.save(model, io.BytesIO())
        copies += [copy.deepcopy(model)]
        assert model.state_dict().keys() == state
        # Uses of copies are nothing of the model's.
        for one in copies:
            one(X)
    assert told(monitor) == [("train", 5, 1)]
    for one, then in zip(modules, before, strict=True):
        assert vars(one).keys() == then.keys()
        for name, value in then.items():
            assert isinstance(value, (torch.Tensor, dict)) or vars(one)[name] == value
            if name.startswith("_forward"):
                assert vars(one)[name] == value == {}
    for one in copies:
        # They have none of the monitor.
        train(one, SGD(one.parameters(), 0.01), 1)
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


def test_hooks_stay_only_where_they_are_needed() -> None:
    model = nn.Sequential(nn.Linear(6, 3), *(nn.Linear(3, 3) for _ in range(5)))
    optimizer = SGD(model.parameters(), 0.01)

    def hooked() -> int:
        return sum(bool(one._forward_pre_hooks) for one in model.modules())

    with StepMonitor(model, publish=False):
        assert hooked() == 7
        train(model, optimizer, 1)
        assert hooked() == 1
    with StepMonitor(model, publish=False), torch.no_grad():
        for _ in range(32):
            model(X)
        assert hooked() == 1
    assert hooked() == 0


def test_a_wrapper_of_ours_tells_its_own_phases_where_it_is_what_is_watched() -> None:
    inner = dataparallel.DataParallel(nn.Linear(6, 4), ["cpu", "cpu"])
    model = nn.Sequential(inner, nn.Linear(4, 3))
    optimizer = SGD(model.parameters(), 0.01)
    with (
        StepMonitor(inner, publish=False) as ours,
        StepMonitor(model, publish=False) as whole,
    ):
        train(model, optimizer)
    assert len(ours.steps[-1].replicas) == 2 and "scatter" in ours.steps[-1].replicas[1].seconds
    assert told(whole) == told(ours) == [("train", 5, 1)] * 3
    assert phases(whole) == PHASES and not ours.state().info.is_hooked
