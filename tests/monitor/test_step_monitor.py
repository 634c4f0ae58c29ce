"""The monitor in a run: what the wrappers tell, what it records and exports, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import gzip
import json
import logging
import os
import pickle
import threading
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizer_module

import dataparallel
from dataparallel import DataParallel, DistributedDataParallel, parallel_apply
from dataparallel.monitor import ReplicaStep, Segment, StepMonitor
from dataparallel.monitor.assembler import StepAssembler
from dataparallel.monitor.attach import ask, runs
from dataparallel.monitor.from_json import record_of
from dataparallel.monitor.record import StepRecord
from dataparallel.monitor.run import RunState
from dataparallel.monitor.trace import write_timeline
from dataparallel.parallel import data_parallel as wrappers
from dataparallel.threads import Phase, timeline
from dataparallel.threads.meeting import current_rendezvous
from dataparallel.threads.timeline import Listener, Span, Timeline
from tests.cluster import Cluster
from tests.monitor.cases import BUSY, SLOW, make_info, make_step, make_steps
from tests.optimizer_cases import apply_torchs

WRAPPERS = [DataParallel, DistributedDataParallel]
X = torch.ones(5, 6)
BOTH = (0, 1)
IDLE = ["idle", "idle"]


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def make(wrapper: Any = DataParallel) -> tuple[Any, Optimizer]:
    model = wrapper(net(), ["cpu", "cpu"])
    return model, SGD(model.parameters(), 0.01)


def train(model: DataParallel[Any], optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def now(model: DataParallel[Any]) -> list[str]:
    return [phase for phase, _ in model.timeline.now]


# --- what the wrappers tell --------------------------------------------------------------------


def spans_of(model: DataParallel[Any], run: Callable[[Any], Any] | None = None) -> list[Span]:
    """Return all spans of a step, or of what is run."""
    found: list[Span] = []
    model.timeline.subscribe(Listener(found.append))
    if run is None:
        model(X).sum().backward()
    else:
        run(model)
    # One that equals it.
    model.timeline.unsubscribe(Listener(found.append))
    assert not model.timeline.listeners
    return sorted(found, key=lambda span: (span.begin, span.replicas))


def phases(spans: list[Span]) -> list[tuple[str, tuple[int, ...]]]:
    return [(span.phase, span.replicas) for span in spans]


def test_a_step_of_data_parallel() -> None:
    model, _ = make()
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        told = phases(spans_of(one))
        # Inputs, and parameters.
        assert told[:2] == [("scatter", BOTH), ("scatter", BOTH)]
        assert sorted(told[2:4]) == [("forward", (0,)), ("forward", (1,))]
        assert told[4:] == [("gather", BOTH), ("backward", BOTH)]
        # A copy has a timeline of its own.
        assert (one.timeline is model.timeline) == (one is model)


def test_the_replicas_of_the_wrapper_with_a_reducer_have_backwards_of_their_own() -> None:
    model, optimizer = make(DistributedDataParallel)
    train(model, optimizer, 2)
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
    apply_torchs(SGD, module.parameters(), {"lr": 0.1})
    spans = spans_of(DistributedDataParallel(module, ["cpu", "cpu"]))
    assert ("optimizer", (0,)) in phases(spans)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_loss_in_the_replicas_is_a_phase_within_their_forward(wrapper: Any) -> None:
    y = torch.ones(5, 3)
    spans = spans_of(make(wrapper)[0], lambda model: model.loss(nn.MSELoss(), X, y).backward())
    for replica in BOTH:
        own = {span.phase: span for span in spans if span.replicas == (replica,)}
        forward, loss = own["forward"], own["loss"]
        assert forward.begin < loss.begin <= loss.end <= forward.end


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_made_while_nobody_listens(
    wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(wrapper)
    # The first iterations are sampled for torch's logging data.
    train(model, optimizer, 11)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(timeline, "Span", refuse)
    monkeypatch.setattr(wrappers, "mark_backward", refuse)
    train(model, optimizer)
    model.timeline.subscribe(Listener(lambda span: None))
    with pytest.raises(AssertionError, match="a span was made"):
        train(model, optimizer)


def test_a_backward_that_fails_leaves_the_next_one_alone() -> None:
    model, _ = make()
    found: list[Span] = []
    model.timeline.subscribe(Listener(found.append))
    out = model(X)
    handle = model.module[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        out.sum().backward(retain_graph=True)
    handle.remove()
    assert "backward" not in [span.phase for span in found]
    model(X)
    assert now(model) == IDLE
    out.sum().backward()
    assert [span.phase for span in found].count("backward") == 1


class Meeting(nn.Module):
    """The replicas meet in their forward; the first comes when the second waits there."""

    def __init__(self, now: Callable[[int], str]) -> None:
        super().__init__()
        self.now = now
        self.comes = threading.Event()
        # Both replicas have this one; a dict each would have for itself.
        self.seen: UserDict[int, str] = UserDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica, meeting = dataparallel.current_replica(), current_rendezvous()
        assert replica is not None and meeting is not None
        self.seen[replica.index] = self.now(replica.index)
        if replica.index == 1:
            self.comes.set()
        else:
            assert self.comes.wait(20)
            while self.now(1) != "idle":
                time.sleep(0.001)
        total = meeting.exchange("sum", 1, lambda values: [sum(values)] * 2)
        return x * int(total)


def test_a_replica_is_in_its_forward_and_idle_while_it_waits_for_others_there() -> None:
    module = Meeting(lambda index: now(model)[index])
    model = DataParallel(module, ["cpu", "cpu"])
    spans = spans_of(model, lambda model: model(X))
    assert module.seen == {0: "forward", 1: "forward"}
    (waited,) = (span for span in spans if span.phase == "idle")
    assert waited.replicas == (1,) and now(model) == IDLE


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


def test_no_phase_is_told_of_what_is_recorded_in_a_graph() -> None:
    found: list[Span] = []
    line = Timeline([torch.device("virtual:0")])
    line.subscribe(Listener(found.append))
    device: Any = torch.get_device_module("virtual")
    for recorded in (device.graph(device.VirtualGraph(), stream=torch.Stream("virtual:0")), None):
        with recorded or contextlib.nullcontext(), line.span("forward"):
            pass
        assert bool(found) == (recorded is None)


# --- from spans to steps, with spans whose times are given ------------------------------------

MS = 1_000_000


class Run:
    """A run whose clock is set by hand, in milliseconds since it began."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_replicas: int = 2, **options: Any
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter_ns", lambda: int(self.now * MS))
        self.line = Timeline([torch.device("cpu")] * num_replicas)
        self.assembler = StepAssembler(self.line, **options)
        self.assembler.start()

    def span(self, phase: Phase, begin: float, end: float, replica: int | None = None) -> None:
        """Record a span from ``begin`` to ``end``."""
        self.now = begin
        with self.line.span(phase, replica):
            self.now = end

    def forward(self, begin: float, end: float, *sizes: int, trains: bool = True) -> None:
        """Scattering takes the first millisecond."""
        self.span("scatter", begin, begin + 1)
        with torch.set_grad_enabled(trains):
            self.line.call(sizes)
        self.span("forward", begin + 1, end)

    def step(self, begin: float, *, optimizer: bool = True) -> None:
        """Record a step of 40 ms whose first 5 ms are input."""
        self.span("scatter", begin + 5, begin + 10)
        self.line.call((3, 2))
        self.span("forward", begin + 10, begin + 18, 0)
        self.span("forward", begin + 10, begin + 14, 1)
        self.span("gather", begin + 18, begin + 20)
        self.span("backward", begin + 25, begin + 35)
        if optimizer:
            self.span("optimizer", begin + 35, begin + 40, 0)

    def finish(self) -> list[StepRecord]:
        self.assembler.finish()
        return self.assembler.drain()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def milliseconds(record: StepRecord, replica: int = 0) -> dict[str, float]:
    seconds = record.replicas[replica].seconds
    return {phase: round(value * 1e3, 6) for phase, value in seconds.items()}


def test_what_lies_between_the_spans_has_a_name(run: Run) -> None:
    run.step(0)
    run.step(40)
    for record in run.finish():
        assert (record.seconds, record.samples, record.kind) == (0.04, 5, "train")
        first, second = record.replicas
        assert (first.samples, second.samples, first.device) == (3, 2, "cpu")
        common = {"input": 5, "scatter": 5, "gather": 2, "backward": 10}
        assert milliseconds(record) == {**common, "forward": 8, "loss": 5, "optimizer": 5}
        assert milliseconds(record, 1) == {**common, "forward": 4, "idle": 14}
        for replica in record.replicas:
            assert replica.segments[0].begin == 0 and replica.segments[-1].end == record.seconds
            for one, after in zip(replica.segments, replica.segments[1:], strict=False):
                assert one.end == after.begin and one.phase != after.phase


def test_of_spans_within_each_other_the_innermost_counts(run: Run) -> None:
    run.span("scatter", 0, 1)
    run.line.call((1, 1))
    with run.line.span("backward", 1):
        # At the very moment at which backward begins.
        for begin in (1, 3, 6):
            run.span("reduce local", begin, begin + 1, 1)
        run.now = 9
    run.span("reduce local", 9, 12)
    (record,) = run.finish()
    assert milliseconds(record, 1) == {"scatter": 1, "backward": 5, "reduce local": 6}


def test_only_what_comes_before_a_backward_is_a_loss(run: Run) -> None:
    run.forward(0, 2, 1, 1)
    run.span("backward", 4, 6)
    run.span("backward", 9, 10)
    (record,) = run.finish()
    expected = {"scatter": 1, "forward": 1, "loss": 2, "backward": 3, "idle": 3}
    assert milliseconds(record) == expected


def test_the_loss_of_all_ends_where_the_first_backward_begins(run: Run) -> None:
    """The first backward may be anybody's: the replicas' backwards may take turns."""
    run.forward(0, 2, 1, 1)
    run.span("backward", 4, 6, 1)
    run.span("backward", 6, 9, 0)
    (record,) = run.finish()
    common = {"scatter": 1, "forward": 1}
    assert milliseconds(record) == {**common, "loss": 2, "backward": 3, "idle": 2}
    assert milliseconds(record, 1) == {**common, "backward": 2, "idle": 5}


def test_a_span_that_failed_is_left_out(run: Run) -> None:
    run.step(0)
    run.span("scatter", 45, 50)
    run.line.call((3, 2))
    with pytest.raises(ValueError, match="no"), run.line.span("forward", 0):
        run.now = 55
        raise ValueError("no")
    run.step(60)
    _, record = run.finish()
    assert milliseconds(record)["forward"] == 8


# --- where steps end -------------------------------------------------------------------------


def accumulating(run: Run) -> None:
    run.step(0)
    run.step(40, optimizer=False)
    run.step(80)


def without_optimizer(run: Run) -> None:
    run.step(0, optimizer=False)
    run.step(40, optimizer=False)


def with_inference(run: Run) -> None:
    run.step(0)
    for begin in (40, 50):
        run.forward(begin, begin + 6, 4, 4, trains=False)
    run.step(60)


def with_evaluation(run: Run) -> None:
    """Compute gradients that nobody uses."""
    run.step(0)
    for i in range(20):
        run.span("scatter", 40 + i, 40.5 + i)
        run.line.call((4, 4))
        run.span("forward", 40.5 + i, 41 + i)
    run.step(60)


def told_by_the_user(run: Run) -> None:
    """Two optimizers take turns; what came before the first word was told by the optimizer."""
    for begin in (0, 40, 80, 120):
        run.step(begin)
        run.now = begin + 40
        if begin in (40, 120):
            run.assembler.end_step()


TRAIN = ("train", 0.04, 5, 1)


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        (accumulating, [TRAIN, ("train", 0.08, 10, 2)]),
        (without_optimizer, [("train", 0.035, 5, 1), TRAIN]),
        (
            with_inference,
            [
                *(TRAIN, ("inference", 0.006, 8, 1)),
                *(("inference", 0.01, 8, 1), ("train", 0.044, 5, 1)),
            ],
        ),
        (
            with_evaluation,
            [TRAIN, *[("inference", 0.008, 64, 8)] * 2, ("train", 0.044, 37, 5)],
        ),
        (told_by_the_user, [TRAIN, TRAIN, ("train", 0.08, 10, 2)]),
    ],
)
def test_where_a_step_ends(run: Run, play: Any, expected: list[tuple[Any, ...]]) -> None:
    play(run)
    records = run.finish()
    assert [(r.kind, round(r.seconds, 6), r.samples, r.calls) for r in records] == expected
    assert [r.number for r in records] == list(range(1, len(records) + 1))
    if play is accumulating:
        # The criterion is computed twice, and nothing of the backward in between is taken for it.
        assert milliseconds(records[1])["loss"] == 10


# --- who gets records ------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "seen"), [(1, [0, 1, 2, 3, 4]), (3, [0, 0, 0, 3, 3])])
def test_records_are_told_as_steps_end(
    monkeypatch: pytest.MonkeyPatch, every: int, seen: list[int]
) -> None:
    got: list[int] = []
    told = Run(monkeypatch, on_step=lambda record: got.append(record.number), every=every)
    counts = []
    for i in range(5):
        told.step(40 * i)
        counts.append(len(got))
    assert told.finish() == []
    assert counts == seen and got == [1, 2, 3, 4, 5]


# --- events ----------------------------------------------------------------------------------


class Event:
    """An event that happens at a given time of a device's clock."""

    def __init__(self, at: float, *, happened: bool = True) -> None:
        self.at = at
        self.happened = happened

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        # It keeps up; it is behind; it begins late, and keeps up later.
        ([0, 1, 1, 2, 2, 3, 3, 4], [(1, 1), (1, 1)]),
        ([0, 10, 10, 30, 30, 40, 40, 50], [(10, 20), (10, 10)]),
        ([7, 8, 8, 9, 9, 9.5, 9.5, 10], [(1, 1), (1, 1)]),
    ],
)
def test_a_step_ends_when_its_device_is_done_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, device: list[float], expected: list[tuple[float, float]]
) -> None:
    run = Run(monkeypatch, 1)
    events = [Event(at, happened=False) for at in device]
    recorded = iter(events)

    def record(replicas: Sequence[int]) -> tuple[Event, ...]:
        return (next(recorded),)

    run.line.has_events = True
    monkeypatch.setattr(run.line, "events", record)
    for begin in (0, 2):
        run.span("scatter", begin, begin + 1)
        run.line.call((4,))
        run.span("optimizer", begin + 1, begin + 2)
    assert run.assembler.drain() == []
    for event in events:
        event.happened = True
    records = [*run.assembler.drain(), *run.finish()]
    # The host took 2 ms for each step.
    assert [(record.number, record.seconds) for record in records] == [(1, 0.002), (2, 0.002)]
    times = [milliseconds(record) for record in records]
    assert [(one["scatter"], one["optimizer"]) for one in times] == expected


# --- records ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"new": 1}, "this is no record of a step"),
        ({"replicas": [{"index": 0, "segments": []}]}, "'device'"),
        (
            {"replicas": [{"index": 0, "device": "", "samples": 1, "segments": [{"phase": "x"}]}]},
            "'phase': unexpected 'x'; .*newer version",
        ),
    ],
)
def test_a_record_survives_json_and_what_is_none_is_refused(
    run: Run, change: dict[str, Any], said: str | None
) -> None:
    run.step(0)
    (record,) = run.finish()
    data = {**json.loads(json.dumps(dataclasses.asdict(record))), **change}
    if said is None:
        assert record_of(StepRecord, data, "record of a step") == record
    else:
        with pytest.raises(ValueError, match=said):
            record_of(StepRecord, data, "record of a step")


# --- what is recorded --------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_are_recorded_with_all_their_phases(wrapper: Any) -> None:
    """They add up to the time that the caller measures, and change no gradient."""
    (model, optimizer), (bare, bare_optimizer) = make(wrapper), make(wrapper)
    train(model, optimizer, 2)
    train(bare, bare_optimizer, 7)
    monitor = StepMonitor(model, publish=False)
    begin = time.perf_counter()
    # The input of the first step is due from here on.
    with monitor:
        for _ in range(5):
            time.sleep(0.004)
            train(model, optimizer)
        measured = time.perf_counter() - begin
    assert [(step.number, step.kind, step.samples) for step in monitor.steps] == [
        (number, "train", 5) for number in (1, 2, 3, 4, 5)
    ]
    expected = {"input", "scatter", "forward", "gather", "loss", "backward", "optimizer"}
    if wrapper is DistributedDataParallel:
        expected |= {"reduce local"}
    for step in monitor.steps:
        assert [replica.samples for replica in step.replicas] == [3, 2]
        assert expected <= set(step.replicas[0].seconds) <= expected | {"idle"}
        assert not {"loss", "optimizer"} & set(step.replicas[1].seconds)
    for replica in range(2):
        told = sum(sum(step.replicas[replica].seconds.values()) for step in monitor.steps)
        # Nothing counts twice, and the waits for input count. A busy machine may stop the thread
        # between two phases for as long as it likes.
        assert 5 * 0.004 <= told <= measured
    waited = sum(step.replicas[0].seconds["input"] for step in monitor.steps)
    assert 0.02 <= waited < measured
    assert (monitor.summary().num_steps, monitor.summary().num_left_out) == (4, 1)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_other_optimizers_are_no_business_of_this_model() -> None:
    model, ours = make()
    other = nn.Linear(2, 2)
    theirs = SGD(other.parameters(), 0.01)
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(2):
            model(X).sum().backward()
            other(torch.ones(1, 2)).sum().backward()
            theirs.step()
            ours.step()
    spans = [s for step in monitor.steps for s in step.replicas[0].segments]
    assert [segment.phase for segment in spans].count("optimizer") == 2


def test_what_comes_before_the_next_batch_is_input_since_the_optimizer_is_done() -> None:
    model, optimizer = make()
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer)
        for _ in range(20):
            loss = model(X).sum()
        computing = monitor.state().now
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        between, waited = monitor.state().now, time.perf_counter() - before
    assert [phase for phase, _ in between] == ["input", "input"]
    # Not since the forward.
    assert all(0 < since < waited for _, since in between)
    assert [phase for phase, _ in computing] == ["idle", "idle"]
    assert [phase for phase, _ in monitor.state().now] == ["idle", "idle"]


@pytest.mark.parametrize(
    ("make_optimizer", "option"),
    [
        (functools.partial(SGD, lr=0.01), "fused"),
        (functools.partial(SGD, lr=0.01, fused=True), ""),
        (torch.optim.Adadelta, "foreach"),
        (torch.optim.LBFGS, ""),
    ],
)
def test_an_optimizer_is_advised_what_it_can_do(make_optimizer: Any, option: str) -> None:
    model = net()
    with StepMonitor(model, publish=False) as monitor:
        optimizer = make_optimizer(model.parameters())
        loss = model(X).sum()
        loss.backward()
        optimizer.step(lambda: loss)
    assert monitor.state().info.faster_option == option


def test_what_fails_does_not_end_a_step_and_is_not_under_way_for_ever() -> None:
    model, optimizer = make()
    with StepMonitor(model, publish=False) as monitor:
        train(model, optimizer)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(4, 7))
        model(X).sum().backward()
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="division"):
                optimizer.step(lambda: 1 / 0)
        time.sleep(0.05)
        optimizer.step()
        train(model, optimizer)
        model(X)
        assert now(model) == IDLE
    # The forward that failed belongs to the step after it.
    assert [step.samples for step in monitor.steps] == [5, 4 + 5, 5, 5]
    assert monitor.steps[1].replicas[0].seconds["optimizer"] < 0.05


def test_nothing_stays_behind_and_two_can_watch_at_once() -> None:
    model, optimizer = make(DistributedDataParallel)
    hooks: Any = optimizer_module._global_optimizer_pre_hooks
    before = len(hooks)
    one, two = StepMonitor(model, publish=False), StepMonitor(model, publish=False)
    with one:
        assert len(hooks) == before + 1
        train(model, optimizer)
        with two:
            train(model, optimizer)
        with pytest.raises(RuntimeError, match="is watching already"):
            one.__enter__()
    assert len(hooks) == before and not model.timeline.listeners
    train(model, optimizer)
    with one:
        train(model, optimizer)
    assert (len(one.steps), len(two.steps)) == (3, 1)
    assert one.steps[-1].replicas[0].seconds.keys() >= {"optimizer", "backward"}
    gone = weakref.ref(two)
    del two
    gc.collect()
    assert gone() is None


def test_a_listener_that_fails_does_not_keep_the_monitor_open() -> None:
    def refuse(step: Any) -> None:
        seen.append(step.number)
        if step.number == 2:
            raise ValueError("no room for a record")

    seen: list[int] = []
    model, optimizer = make()
    monitor = StepMonitor(model, on_step=refuse)
    monitor.__exit__(None, None, None)
    with pytest.raises(ValueError, match="no room for a record"), monitor:
        train(model, optimizer, 2)
    assert not model.timeline.listeners and os.getpid() not in runs()
    with monitor:
        train(model, optimizer, 2)
    assert seen == [1, 2, 3, 4] and [step.number for step in monitor.steps] == [1, 2, 3, 4]


def test_only_the_last_steps_are_kept() -> None:
    """In the totals, those that nobody has asked for in time count like the others."""
    model, optimizer = make()
    with StepMonitor(model, publish=False, keep=3) as monitor:
        for rounds in range(1, 3):
            train(model, optimizer, 10)
            numbers = [step.number for step in monitor.steps]
            assert numbers == [10 * rounds - 3, 10 * rounds - 2, 10 * rounds - 1]
            for step in monitor.steps:
                for replica in step.replicas:
                    assert sum(replica.seconds.values()) == pytest.approx(step.seconds)
            if rounds == 1:
                kept = [step.replicas[1].seconds["forward"] for step in monitor.steps]
                total = monitor.state().main.seconds[1]["forward"]
                assert total == pytest.approx(9 / 3 * sum(kept))


class Lightning:
    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))


class Wandb(Lightning):
    log = Lightning.log_metrics
    log_metrics = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Lightning, Wandb])
def test_metrics_are_logged_every_so_many_steps(kind: type[Lightning]) -> None:
    model, optimizer = make()
    log = kind()
    with StepMonitor(model, publish=False, log_to=log, log_every=4) as monitor:
        train(model, optimizer, 6)
        assert len(monitor.steps) == 5
        train(model, optimizer, 4)
    assert [step for step, _ in log.calls] == [4, 8, 10]
    assert all(metrics["dataparallel/step_seconds"] > 0 for _, metrics in log.calls)
    # Each step once; the first one warms up.
    assert [metrics["dataparallel/num_steps"] for _, metrics in log.calls] == [3, 4, 2]
    model.drop_replica(1)
    with monitor:
        train(model, optimizer, 4)
    assert [step for step, _ in log.calls][3:] == [4]


def test_tensorboard_gets_numbers(tmp_path: Path) -> None:
    # It needs grpcio, which has no wheels for a free-threaded Python.
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = make()
    with SummaryWriter(tmp_path) as writer, StepMonitor(model, publish=False, log_to=writer):
        train(model, optimizer, 3)
    found = accumulators.EventAccumulator(str(tmp_path))
    found.Reload()
    (event,) = found.Scalars("dataparallel/samples_per_second")
    assert event.step == 3 and event.value > 0


def test_what_watching_takes_is_measured() -> None:
    model, optimizer = make(DistributedDataParallel)
    taken = []
    for publish in (False, True):
        with StepMonitor(model, publish=publish) as monitor:
            assert monitor.state().monitor_seconds == 0
            train(model, optimizer, 20)
            assert bool(publish and ask(os.getpid()).states) == publish
            taken.append(monitor.state().monitor_seconds)
    state = monitor.state()
    assert 0 < state.monitor_share < 0.5 and min(taken) > 0
    assert state.monitor_seconds == monitor.state().monitor_seconds
    assert f"{100 * state.monitor_share:.2g} % of a processor" in str(monitor.summary())
    assert monitor.summary().as_metrics()["monitor_share"] == state.monitor_share


def test_the_state_is_published_as_json() -> None:
    model, optimizer = make(DistributedDataParallel)
    with StepMonitor(model, publish=False) as monitor:
        assert monitor.state().last is None
        train(model, optimizer, 3)
        state = monitor.state()
    assert (state.main.steps, state.main.samples) == (2, 10)
    assert (state.info.model, state.info.wrapper) == ("Sequential", "DistributedDataParallel")
    assert state.info.devices == ("cpu", "cpu") and state.info.num_buckets == 1
    assert state.info.num_parameters == state.info.bucket_bytes // 4 == 83
    for replica in range(2):
        total = sum(state.main.seconds[replica].values())
        assert total == pytest.approx(sum(step.seconds for step in monitor.steps[:2]))
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"or a torch.optim.Optimizer, but got function"):
        StepMonitor(net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="but got list, which has none of add_scalar"):
        StepMonitor(net(), log_to=[])
    with pytest.raises(TypeError, match="but got RootLogger, which has none of"):
        StepMonitor(net(), log_to=logging.getLogger())
    with pytest.raises(ValueError, match="log_every is a number of steps, at least 1, but got 0"):
        StepMonitor(net(), log_to=Wandb(), log_every=0)
    with pytest.raises(ValueError, match=r"number of steps to keep, at least 1, but got 0"):
        StepMonitor(make()[0], keep=0)
    with pytest.raises(ValueError, match="this is no state of a run"):
        RunState.from_json({"pid": 1})


# --- the timeline as a file -------------------------------------------------------------------


def events_in(path: Path) -> list[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def row(events: list[dict[str, Any]], tid: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


def test_the_timeline_has_a_thread_per_replica(tmp_path: Path) -> None:
    steps = [
        dataclasses.replace(one, time=1e9 + 2 * i)
        for i, one in enumerate(make_steps(2, [BUSY, SLOW], [3, 2]))
    ]
    events = events_in(write_timeline(steps, make_info(), tmp_path / "new/all.json", rank=3))
    assert {event["pid"] for event in events} == {3}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "replica 0 (virtual:0)", 1: "replica 1 (virtual:1)", 2: "steps"}
    (process,) = [e["args"] for e in events if e["name"] == "process_name"]
    assert process == {"name": "rank 3: DistributedDataParallel of Net"}
    for index, replica in enumerate(steps[0].replicas):
        shown = row(events, index)
        assert [e["name"] for e in shown] == [one.phase for one in replica.segments] * 2
        assert shown[-1]["args"] == {"step": 3, "samples": replica.samples}
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"samples": 2.5}] * 2
    assert row(events, 2)[0]["name"] == "train step 2"
    for tid in range(3):
        # Each begins where the one before ended, after rounding too.
        own = row(events, tid)
        assert [e["ts"] + e["dur"] for e in own[:-1]] == [e["ts"] for e in own[1:]]
        assert sum(e["dur"] for e in own) == 4_000_000


def test_a_replica_behind_the_host_keeps_its_own_times(tmp_path: Path) -> None:
    """Its steps take 1.5 s each while the host begins one each second."""
    slow = ReplicaStep(0, "cpu:0", 3, (Segment("forward", 0.0, 1.5),))
    steps = [
        dataclasses.replace(make_step([BUSY], number=n), time=1e9 + n, replicas=(slow,))
        for n in range(1, 4)
    ]
    first = (10**9 + 1) * 1_000_000
    for chosen, expected in (
        (steps, [0, 1_500_000, 3_000_000]),
        # If steps are missing there is nothing to go by but the host.
        (steps[::2], [0, 2_000_000]),
    ):
        events = events_in(write_timeline(chosen, make_info(1), tmp_path / "all.json", rank=0))
        assert [e["ts"] - first for e in row(events, 0)] == expected


def test_a_monitor_exports_what_it_has_seen(tmp_path: Path) -> None:
    model, optimizer = make()
    path = tmp_path / "timeline.json.gz"
    with StepMonitor(model, publish=False) as monitor:
        with pytest.raises(ValueError, match="no steps to write; a step is recorded when"):
            monitor.export_chrome_trace(path)
        train(model, optimizer, 3)
    shown = events_in(monitor.export_chrome_trace(path))
    for replica in (0, 1):
        assert {"scatter", "forward", "backward"} <= {e["name"] for e in row(shown, replica)}


# --- across processes and on devices ---------------------------------------------------------


def two_processes(rank: int, world_size: int) -> tuple[list[float], int]:
    model, optimizer = make(DistributedDataParallel)
    # In the first steps processes wait for each other before collectives, to compare them.
    train(model, optimizer, 4)
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(3):
            time.sleep(0.03 * rank)
            train(model, optimizer)
    waits = [step.replicas[0].seconds["reduce across processes"] for step in monitor.steps]
    return waits, monitor.state().info.world_size


def test_waiting_for_other_processes_is_a_phase(cluster: Cluster) -> None:
    (fast, two), (slow, _) = cluster.run(two_processes, 2)
    # The second process is late for each step, and the first one waits for it.
    assert two == 2 and min(fast) > 0.01 and sum(slow) < sum(fast)


def on_virtual_devices(rank: int, world_size: int) -> list[dict[Phase, float]]:
    """Per replica the least seconds of each phase: a busy machine may stop any of them."""
    devices = ["virtual:0", "virtual:1"]
    model = DistributedDataParallel(net(256).to(devices[0]), devices)
    optimizer = SGD(model.parameters(), 0.01)
    x = torch.ones(4096, 6, device=devices[0])
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(monitor.steps) == 4
    replicas = zip(*(step.replicas for step in monitor.steps), strict=True)
    return [
        {phase: min(one.seconds.get(phase, 0.0) for one in steps) for phase in steps[-1].seconds}
        for steps in replicas
    ]


def test_on_devices_phases_are_measured_by_their_clocks(cluster: Cluster) -> None:
    ((first, second),) = cluster.run(on_virtual_devices, 1, virtual=True, init_group=False)
    # The host only queues the work; the devices do it, and it takes them longer.
    for replica in (first, second):
        assert replica["forward"] > 0 and replica["backward"] > replica["gather"]
    assert "optimizer" in first and "optimizer" not in second
