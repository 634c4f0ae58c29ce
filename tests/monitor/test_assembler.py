"""From spans to steps, with spans whose times are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dataparallel.monitor.assembler import StepAssembler
from dataparallel.monitor.clock import DeviceClock
from dataparallel.monitor.record import StepRecord
from dataparallel.threads.timeline import Listener, Phase, Span, Timeline

CPU = torch.device("cpu")
MS = 1_000_000


class Run:
    """A run whose clock is set by hand, in milliseconds since it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_replicas: int = 2) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter_ns", lambda: int(self.now * MS))
        self.line = Timeline([CPU] * num_replicas)
        self.assembler = StepAssembler(self.line)
        self.assembler.start()

    def span(self, phase: Phase, begin: float, end: float, replica: int | None = None) -> None:
        """A span that has been from ``begin`` to ``end``."""
        self.now = begin
        with self.line.span(phase, replica):
            self.now = end

    def call(self, *sizes: int, trains: bool = True) -> None:
        with torch.set_grad_enabled(trains):
            self.line.call(sizes)

    def step(self, begin: float, *, optimizer: bool = True) -> None:
        """A step of 40 ms whose first 5 ms are input."""
        self.span("scatter", begin + 5, begin + 10)
        self.call(3, 2)
        self.span("forward", begin + 10, begin + 18, 0)
        self.span("forward", begin + 10, begin + 14, 1)
        self.span("gather", begin + 18, begin + 20)
        self.span("backward", begin + 25, begin + 35)
        if optimizer:
            self.span("optimizer", begin + 35, begin + 40, 0)

    def records(self) -> list[StepRecord]:
        return self.assembler.drain()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def milliseconds(seconds: dict[Phase, float]) -> dict[str, float]:
    return {phase: round(value * 1e3, 6) for phase, value in seconds.items()}


def test_what_lies_between_the_spans_has_a_name(run: Run) -> None:
    run.step(0)
    run.step(40)
    run.assembler.finish()
    for record in run.records():
        assert (record.seconds, record.samples, record.kind) == (0.04, 5, "train")
        first, second = record.replicas
        assert (first.samples, second.samples, first.device) == (3, 2, "cpu")
        assert milliseconds(first.seconds) == {
            "input": 5,
            "scatter": 5,
            "forward": 8,
            "gather": 2,
            "loss": 5,
            "backward": 10,
            "optimizer": 5,
        }
        assert milliseconds(second.seconds) == {
            "input": 5,
            "scatter": 5,
            "forward": 4,
            "gather": 2,
            "backward": 10,
            "idle": 14,
        }


def test_segments_follow_each_other_without_gaps(run: Run) -> None:
    run.step(0)
    run.assembler.finish()
    (record,) = run.records()
    for replica in record.replicas:
        assert replica.segments[0].begin == 0 and replica.segments[-1].end == record.seconds
        for one, after in zip(replica.segments, replica.segments[1:], strict=False):
            assert one.end == after.begin and one.phase != after.phase


def test_of_spans_within_each_other_the_innermost_counts(run: Run) -> None:
    run.span("scatter", 0, 1)
    run.call(1, 1)
    with run.line.span("backward", 1):
        # At the very moment at which backward begins.
        run.span("reduce local", 1, 2, 1)
        run.span("reduce local", 3, 4, 1)
        run.span("reduce local", 6, 7, 1)
        run.now = 9
    run.span("reduce local", 9, 12)
    run.now = 9
    run.assembler.finish()
    (record,) = run.records()
    assert milliseconds(record.replicas[1].seconds) == {
        "scatter": 1,
        "backward": 5,
        "reduce local": 6,
    }


def test_only_what_comes_before_a_backward_is_a_loss(run: Run) -> None:
    run.span("scatter", 0, 1)
    run.call(1, 1)
    run.span("forward", 1, 2)
    run.span("backward", 4, 6)
    run.span("backward", 9, 10)
    run.assembler.finish()
    (record,) = run.records()
    assert milliseconds(record.replicas[0].seconds) == {
        "scatter": 1,
        "forward": 1,
        "loss": 2,
        "backward": 3,
        "idle": 3,
    }


def test_a_step_that_accumulates_gradients_has_several_forwards(run: Run) -> None:
    run.step(0)
    run.step(40, optimizer=False)
    run.step(80)
    run.assembler.finish()
    records = run.records()
    assert [(r.number, r.samples, r.calls) for r in records] == [(1, 5, 1), (2, 10, 2)]
    assert records[1].seconds == 0.08
    # The criterion is computed twice, and nothing of the backward in between is taken for it.
    assert milliseconds(records[1].replicas[0].seconds)["loss"] == 10


def test_without_an_optimizer_a_step_ends_with_its_backward(run: Run) -> None:
    run.step(0, optimizer=False)
    run.step(40, optimizer=False)
    run.assembler.finish()
    assert [record.seconds for record in run.records()] == [0.035, 0.04]


def test_a_forward_without_gradients_is_a_step_of_its_own(run: Run) -> None:
    run.step(0)
    for begin in (40, 50):
        run.span("scatter", begin, begin + 1)
        run.call(4, 4, trains=False)
        run.span("forward", begin + 1, begin + 6)
    run.step(60)
    run.assembler.finish()
    records = run.records()
    assert [record.kind for record in records] == ["train", "inference", "inference", "train"]
    assert [record.samples for record in records] == [5, 8, 8, 5]


def test_steps_end_where_the_user_says(run: Run) -> None:
    # Two optimizers take turns in what is one step.
    run.step(0)
    run.step(40)
    run.now = 80
    run.assembler.end_step()
    run.step(80)
    run.step(120)
    run.now = 160
    run.assembler.end_step()
    records = run.records()
    # What came before the first word of the user was told by the optimizer.
    assert [round(record.seconds, 3) for record in records] == [0.04, 0.04, 0.08]


def test_an_evaluation_that_computes_gradients_does_not_go_on_for_ever(run: Run) -> None:
    run.step(0)
    for i in range(20):
        run.span("scatter", 40 + i, 40.5 + i)
        run.call(4, 4)
        run.span("forward", 40.5 + i, 41 + i)
    run.step(60)
    run.assembler.finish()
    records = run.records()
    assert [(record.kind, record.calls) for record in records] == [
        ("train", 1),
        ("inference", 8),
        ("inference", 8),
        ("train", 5),
    ]


def test_records_can_be_told_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    got: list[int] = []
    told = StepAssembler(run.line, lambda record: got.append(record.number), every=3)
    told.start()
    seen = []
    for i in range(5):
        run.step(40 * i)
        seen.append(len(got))
    told.finish()
    assert seen == [0, 0, 0, 3, 3] and got == [1, 2, 3, 4, 5]


def test_a_span_that_failed_is_left_out(run: Run) -> None:
    run.step(0)
    run.span("scatter", 45, 50)
    run.call(3, 2)
    run.now = 50
    with pytest.raises(ValueError, match="no"), run.line.span("forward", 0):
        run.now = 55
        raise ValueError("no")
    run.step(60)
    run.assembler.finish()
    records = run.records()
    assert [record.number for record in records] == [1, 2]
    assert milliseconds(records[1].replicas[0].seconds)["forward"] == 8


def test_only_so_many_steps_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.assembler = StepAssembler(run.line, keep=3)
    run.assembler.start()
    for i in range(10):
        run.step(40 * i)
    run.assembler.finish()
    assert [record.number for record in run.records()] == [8, 9, 10]
    assert (run.assembler.num_steps, run.assembler.num_samples) == (10, 50)


def test_who_wants_records_at_once_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    got: list[int] = []
    told = StepAssembler(run.line, lambda record: got.append(record.number))
    told.start()
    run.step(0)
    assert got == []
    run.step(40)
    assert got == [1]
    told.finish()
    assert got == [1, 2]
    assert told.drain() == []


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


def times(pairs: Sequence[tuple[float, float]]) -> list[float]:
    clock = DeviceClock()
    events: Any = [(Event(at), recorded) for at, recorded in pairs]
    return [clock.host_time(event, int(recorded * MS)) / MS for event, recorded in events]


def test_a_device_that_keeps_up_happens_when_it_is_recorded() -> None:
    assert times([(500, 10), (503, 13), (510, 20)]) == [10, 13, 20]


def test_a_device_that_is_behind_happens_later() -> None:
    # Recorded 1 ms apart, but the device takes 5 ms from one to the next.
    assert times([(0, 10), (5, 11), (10, 12), (15, 13)]) == [10, 15, 20, 25]


def test_the_clock_is_set_by_the_event_that_waited_least() -> None:
    # The first event came 7 ms late; the third was not late at all.
    assert times([(7, 0), (8, 1), (20, 20), (21, 21)]) == [0, 1, 20, 21]


def test_a_step_ends_when_its_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 1)
    moments = iter([0, 10, 10, 30, 30, 40, 40, 50])
    run.line.has_events = True
    monkeypatch.setattr(run.line, "events", lambda replicas: (Event(next(moments)),))
    for begin in (0, 2):
        run.span("scatter", begin, begin + 0.5)
        run.call(4)
        run.span("optimizer", begin + 1, begin + 2)
    run.assembler.finish()
    first, second = run.records()
    # The host took 2 ms for each step, the device 30 and 20.
    assert (first.seconds, second.seconds) == (0.002, 0.002)
    assert milliseconds(first.replicas[0].seconds) == {"scatter": 10, "optimizer": 20}
    assert milliseconds(second.replicas[0].seconds) == {"scatter": 10, "optimizer": 10}


def test_nobody_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, 1)
    made: list[Event] = []

    def events(replicas: Sequence[int]) -> tuple[Event, ...]:
        made.append(Event(run.now, happened=False))
        return (made[-1],)

    run.line.has_events = True
    monkeypatch.setattr(run.line, "events", events)
    for begin in (0, 40):
        run.span("scatter", begin, begin + 1)
        run.call(4)
        run.span("optimizer", begin + 1, begin + 2)
    assert run.records() == []
    for event in made:
        event.happened = True
    assert [record.number for record in run.records()] == [1]


# --- records ---------------------------------------------------------------------------------


def test_a_record_survives_json(run: Run) -> None:
    import json

    run.step(0)
    run.assembler.finish()
    (record,) = run.records()
    assert StepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replicas": None}, "this is no record of a step"),
        ({"number": {}}, "this is no record of a step"),
        ({"replicas": [{"index": 0}]}, "KeyError.'device'"),
    ],
)
def test_what_is_no_record_is_refused(run: Run, change: dict[str, Any], said: str) -> None:
    run.step(0)
    run.assembler.finish()
    (record,) = run.records()
    with pytest.raises(ValueError, match=said):
        StepRecord.from_json({**record.to_json(), **change})


def test_a_phase_that_is_not_known_is_named(run: Run) -> None:
    run.step(0)
    run.assembler.finish()
    data = run.records()[0].to_json()
    data["replicas"][0]["segments"][0]["phase"] = "lunch"
    with pytest.raises(ValueError, match=r"'lunch' is no phase; there are input, .*newer version"):
        StepRecord.from_json(data)


def test_a_span_can_be_told_by_hand() -> None:
    line = Timeline([CPU])
    found: list[Span] = []
    line.subscribe(Listener(found.append))
    with line.span("input"):
        pass
    assert found[0].replicas == (0,) and not found[0].failed
