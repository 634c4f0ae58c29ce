"""From spans to steps, with spans whose times are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dataparallel.monitor.assembler import StepAssembler
from dataparallel.monitor.record import StepRecord
from dataparallel.threads.timeline import Phase, Timeline

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
        """A span that has been from ``begin`` to ``end``."""
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
        """A step of 40 ms whose first 5 ms are input."""
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


# --- phases ----------------------------------------------------------------------------------


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
    """It computes gradients that nobody uses."""
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


def test_only_so_many_steps_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, keep=3)
    for i in range(10):
        run.step(40 * i)
    records = run.finish()
    assert [record.number for record in records] == [8, 9, 10]
    assert (run.assembler.num_steps, run.assembler.num_samples) == (10, 50)
    assert [sum(milliseconds(record).values()) for record in records] == [40, 40, 40]


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
        ({"replicas": None}, "this is no record of a step"),
        ({"number": {}}, "this is no record of a step"),
        ({"replicas": [{"index": 0}]}, "KeyError.'device'"),
        (
            {"replicas": [{"index": 0, "device": "", "samples": 1, "segments": [{"phase": "x"}]}]},
            "'x' is no phase of a replica; .*newer version",
        ),
    ],
)
def test_a_record_survives_json_and_what_is_none_is_refused(
    run: Run, change: dict[str, Any], said: str | None
) -> None:
    run.step(0)
    (record,) = run.finish()
    data = {**json.loads(json.dumps(record.to_json())), **change}
    if said is None:
        assert StepRecord.from_json(data) == record
    else:
        with pytest.raises(ValueError, match=said):
            StepRecord.from_json(data)
