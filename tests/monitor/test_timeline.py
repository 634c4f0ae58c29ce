"""What the wrappers tell about phases, and to whom."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
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


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def spans_of(model: DataParallel[Any], step: Callable[[], Any]) -> list[Span]:
    found: list[Span] = []
    model.timeline.subscribe(Listener(found.append))
    try:
        step()
    finally:
        model.timeline.unsubscribe(Listener(found.append))
    return sorted(found, key=lambda span: span.begin)


def forward_and_backward(model: DataParallel[Any]) -> None:
    model(torch.ones(5, 6)).sum().backward()


def phases(spans: list[Span]) -> list[tuple[str, tuple[int, ...]]]:
    return [(span.phase, span.replicas) for span in spans]


def test_a_forward_and_backward_of_data_parallel() -> None:
    model = DataParallel(net(), ["cpu", "cpu"])
    spans = spans_of(model, lambda: model(torch.ones(5, 6)).sum().backward())
    told = phases(spans)
    assert told[:2] == [("scatter", (0, 1)), ("scatter", (0, 1))]
    assert sorted(told[2:4]) == [("forward", (0,)), ("forward", (1,))]
    assert told[4:] == [("gather", (0, 1)), ("backward", (0, 1))]
    ends = [span.end for span in spans]
    assert ends == sorted(ends) or ends[3] < ends[2]
    assert all(span.begin <= span.end for span in spans)


def test_the_replicas_of_the_wrapper_with_a_reducer_have_backwards_of_their_own() -> None:
    model = DistributedDataParallel(net(), ["cpu", "cpu"])
    for _ in range(2):
        model(torch.ones(5, 6)).sum().backward()
    spans = spans_of(model, lambda: model(torch.ones(5, 6)).sum().backward())
    told = phases(spans)
    assert {("backward", (0,)), ("backward", (1,))} <= set(told)
    # The replica that is last sums up, within its backward; then the result is handed out.
    sums = [span for span in spans if span.phase == "reduce local"]
    own = next(span for span in spans if told[spans.index(span)] == ("backward", sums[0].replicas))
    assert own.begin < sums[0].begin <= sums[0].end < own.end
    assert sums[-1].replicas == (0, 1) and sums[-1].begin >= own.end


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_loss_in_the_replicas_is_a_phase_within_their_forward(wrapper: Any) -> None:
    model = wrapper(net(), ["cpu", "cpu"])
    x, y = torch.ones(5, 6), torch.ones(5, 3)
    spans = spans_of(model, lambda: model.loss(nn.MSELoss(), x, y).backward())
    for replica in range(2):
        forward = next(s for s in spans if s.phase == "forward" and s.replicas == (replica,))
        loss = next(s for s in spans if s.phase == "loss" and s.replicas == (replica,))
        assert forward.begin < loss.begin <= loss.end <= forward.end


def test_a_step_in_backward_is_an_optimizers_phase() -> None:
    module = net()
    apply_torchs(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, ["cpu", "cpu"])
    spans = spans_of(model, lambda: model(torch.ones(5, 6)).sum().backward())
    assert ("optimizer", (0,)) in phases(spans)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_made_while_nobody_listens(
    wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapper(net(), ["cpu", "cpu"])
    # The first iterations are sampled for torch's logging data.
    for _ in range(11):
        model(torch.ones(5, 6)).sum().backward()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(timeline, "Span", refuse)
    monkeypatch.setattr(step, "mark_backward", refuse)
    model(torch.ones(5, 6)).sum().backward()
    model.timeline.subscribe(Listener(lambda span: None))
    with pytest.raises(AssertionError, match="a span was made"):
        model(torch.ones(5, 6))


def test_an_error_ends_a_span_as_failed() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = dataparallel.current_replica()
            if replica is not None and replica.index == 1:
                raise ValueError("not today")
            return x

    model = DataParallel(Failing(), ["cpu", "cpu"])

    def step() -> None:
        with pytest.raises(ValueError, match=r"not today\nin replica 1"):
            model(torch.ones(4, 2))

    spans = spans_of(model, step)
    failed = {span.replicas: span.failed for span in spans if span.phase == "forward"}
    assert failed == {(0,): False, (1,): True}
    assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]


def test_a_backward_that_fails_leaves_the_next_one_alone() -> None:
    model = DataParallel(net(), ["cpu", "cpu"])
    found: list[Span] = []
    model.timeline.subscribe(Listener(found.append))
    out = model(torch.ones(5, 6))
    handle = model.module[0].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError, match="division"):
        out.sum().backward(retain_graph=True)
    handle.remove()
    assert "backward" not in [span.phase for span in found]
    model(torch.ones(5, 6))
    assert [phase for phase, _ in model.timeline.now] == ["idle", "idle"]
    out.sum().backward()
    assert [span.phase for span in found].count("backward") == 1


def test_now_tells_the_phase_of_each_replica_while_it_lasts() -> None:
    seen: dict[int, str] = {}
    lock = threading.Barrier(2, timeout=20)

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = dataparallel.current_replica()
            assert replica is not None
            lock.wait()
            seen[replica.index] = model.timeline.now[replica.index][0]
            return x

    model = DataParallel(Looking(), ["cpu", "cpu"])
    model.timeline.subscribe(Listener(lambda span: None))
    model(torch.ones(4, 2))
    assert seen == {0: "forward", 1: "forward"}
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
    assert sorted(span.replicas for span in found) == [(0,), (0, 1), (0, 1), (1,)]


def test_a_replica_that_waits_for_others_in_its_forward_is_idle() -> None:
    comes = threading.Event()

    class Meeting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = dataparallel.current_replica()
            meeting = current_rendezvous()
            assert replica is not None and meeting is not None
            if replica.index == 1:
                comes.set()
            else:
                assert comes.wait(20)
                while model.timeline.now[1][0] != "idle":
                    time.sleep(0.001)
                time.sleep(0.02)
            return x * meeting.exchange("sum", 1, lambda values: [sum(values)] * 2)

    model = DataParallel(Meeting(), ["cpu", "cpu"])
    model.timeline.subscribe(Listener(lambda span: None))
    spans = spans_of(model, lambda: model(torch.ones(4, 2)))
    (waited,) = (span for span in spans if span.phase == "idle")
    assert waited.replicas == (1,) and waited.end - waited.begin > 20_000_000


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_copies_of_a_wrapper_have_timelines_of_their_own(wrapper: Any) -> None:
    model = wrapper(net(), ["cpu", "cpu"])
    model.timeline.subscribe(Listener(lambda span: None))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.timeline is not model.timeline and not twin.timeline.listeners
        told = phases(spans_of(twin, partial(forward_and_backward, twin)))
        assert ("backward", (0, 1)) in told or ("backward", (1,)) in told


def test_listeners_come_and_go() -> None:
    told: list[str] = []
    line = Timeline([torch.device("cpu")])
    first = Listener(lambda span: told.append(f"first {span.phase}"))
    second = Listener(
        lambda span: told.append(f"second {span.phase}"),
        lambda sizes, trains: told.append(f"{sizes} {trains}"),
    )
    line.subscribe(first)
    line.subscribe(second)
    with line.span("forward"):
        pass
    line.call([4])
    line.unsubscribe(first)
    with line.span("gather", 0):
        pass
    line.unsubscribe(second)
    assert not line.listeners
    with line.span("loss"):
        pass
    line.call([4])
    assert told == ["first forward", "second forward", "[4] True", "second gather"]
