"""What the wrappers tell about phases, and to whom."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel
from dataparallel import DataParallel, DistributedDataParallel, parallel_apply
from dataparallel.parallel import step
from dataparallel.threads import timeline
from dataparallel.threads.meeting import current_rendezvous
from dataparallel.threads.timeline import Listener, Span, Timeline
from tests.optimizer_cases import apply_torchs

WRAPPERS = [DataParallel, DistributedDataParallel]
X = torch.ones(5, 6)
BOTH = (0, 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model: Any) -> None:
    model(X).sum().backward()


def spans_of(model: DataParallel[Any], step: Callable[[Any], Any] = train) -> list[Span]:
    found: list[Span] = []
    model.timeline.subscribe(Listener(found.append))
    step(model)
    # One that equals it.
    model.timeline.unsubscribe(Listener(found.append))
    assert not model.timeline.listeners
    return sorted(found, key=lambda span: (span.begin, span.replicas))


def phases(spans: list[Span]) -> list[tuple[str, tuple[int, ...]]]:
    return [(span.phase, span.replicas) for span in spans]


class Telling(nn.Module):
    """Calls a function with the index of the replica."""

    def __init__(self, tell: Callable[[int], Any]) -> None:
        super().__init__()
        self.tell = tell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica = dataparallel.current_replica()
        assert replica is not None
        found = self.tell(replica.index)
        return x if found is None else x * found


def test_a_step_of_data_parallel() -> None:
    model = DataParallel(net(), ["cpu", "cpu"])
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        told = phases(spans_of(one))
        # Inputs, and parameters.
        assert told[:2] == [("scatter", BOTH), ("scatter", BOTH)]
        assert sorted(told[2:4]) == [("forward", (0,)), ("forward", (1,))]
        assert told[4:] == [("gather", BOTH), ("backward", BOTH)]
        # A copy has a timeline of its own.
        assert (one.timeline is model.timeline) == (one is model)


def test_the_replicas_of_the_wrapper_with_a_reducer_have_backwards_of_their_own() -> None:
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    train(model)
    train(model)
    spans = spans_of(model)
    assert {("backward", (0,)), ("backward", (1,))} <= set(phases(spans))
    # The replica that is last sums up, within its backward; then the result is handed out.
    sums = [span for span in spans if span.phase == "reduce local"]
    own = next(
        span for span in spans if (span.phase, span.replicas) == ("backward", sums[0].replicas)
    )
    assert own.begin < sums[0].begin <= sums[0].end < own.end
    assert sums[-1].replicas == BOTH and sums[-1].begin >= own.end


def test_a_step_in_backward_is_an_optimizers_phase() -> None:
    module = net()
    apply_torchs(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    spans = spans_of(DistributedDataParallel(module, ["cpu", "cpu"]))
    assert ("optimizer", (0,)) in phases(spans)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_loss_in_the_replicas_is_a_phase_within_their_forward(wrapper: Any) -> None:
    y = torch.ones(5, 3)
    model = wrapper(net(), ["cpu", "cpu"])
    spans = spans_of(model, lambda model: model.loss(nn.MSELoss(), X, y).backward())
    for replica in BOTH:
        own = {span.phase: span for span in spans if span.replicas == (replica,)}
        forward, loss = own["forward"], own["loss"]
        assert forward.begin < loss.begin <= loss.end <= forward.end


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_made_while_nobody_listens(
    wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapper(net(), ["cpu", "cpu"])
    # The first iterations are sampled for torch's logging data.
    for _ in range(11):
        train(model)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(timeline, "Span", refuse)
    monkeypatch.setattr(step, "mark_backward", refuse)
    train(model)
    model.timeline.subscribe(Listener(lambda span: None))
    with pytest.raises(AssertionError, match="a span was made"):
        train(model)


def test_an_error_ends_a_span_as_failed() -> None:
    def fail(index: int) -> None:
        if index == 1:
            raise ValueError("not today")

    model = DataParallel(Telling(fail), ["cpu", "cpu"])

    def failing(model: Any) -> None:
        with pytest.raises(ValueError, match=r"not today\nin replica 1"):
            model(X)

    spans = spans_of(model, failing)
    failed = {span.replicas: span.failed for span in spans if span.phase == "forward"}
    assert failed == {(0,): False, (1,): True}
    assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]


def test_a_backward_that_fails_leaves_the_next_one_alone() -> None:
    model = DataParallel(net(), ["cpu", "cpu"])
    found: list[Span] = []
    model.timeline.subscribe(Listener(found.append))
    out = model(X)
    handle = model.module[0].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError, match="division"):
        out.sum().backward(retain_graph=True)
    handle.remove()
    assert "backward" not in [span.phase for span in found]
    model(X)
    assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]
    out.sum().backward()
    assert [span.phase for span in found].count("backward") == 1


def test_a_replica_is_in_its_forward_and_idle_while_it_waits_for_others_there() -> None:
    comes = threading.Event()
    seen: dict[int, str] = {}

    def meet(index: int) -> object:
        meeting = current_rendezvous()
        assert meeting is not None
        seen[index] = model.timeline.now[index][0]
        if index == 1:
            comes.set()
        else:
            assert comes.wait(20)
            while model.timeline.now[1][0] != "idle":
                time.sleep(0.001)
            time.sleep(0.02)
        return meeting.exchange("sum", 1, lambda values: [sum(values)] * 2)

    model = DataParallel(Telling(meet), ["cpu", "cpu"])
    spans = spans_of(model, lambda model: model(X))
    assert seen == {0: "forward", 1: "forward"}
    (waited,) = (span for span in spans if span.phase == "idle")
    assert waited.replicas == (1,) and waited.end - waited.begin > 20_000_000
    assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]


def test_a_wrapper_in_a_replica_of_another_one_tells_its_own_timeline() -> None:
    found: list[Span] = []
    inner = Timeline([torch.device("cpu")] * 2)
    inner.subscribe(Listener(found.append))

    def call() -> None:
        with inner.span_here("loss"):
            pass

    parallel_apply([call] * 3, [()] * 3, devices=["cpu"] * 3)
    call()
    # To the third replica of the outer wrapper none of the inner one belongs.
    assert sorted(span.replicas for span in found) == [(0,), BOTH, BOTH, (1,)]


def test_listeners_are_told_of_calls() -> None:
    told: list[str] = []
    line = Timeline([torch.device("cpu")])
    listener = Listener(on_call=lambda sizes, trains: told.append(f"{sizes} {trains}"))
    line.subscribe(listener)
    line.subscribe(Listener())
    line.call([4])
    line.unsubscribe(listener)
    line.call([4])
    assert told == ["[4] True"]
