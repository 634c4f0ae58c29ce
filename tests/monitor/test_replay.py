"""A recording that is played back is what was recorded, at its pace."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.sources.replay import Replay
from tests.monitor.made_up_samples import record, run_state, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_it_is_what_was_recorded(path: Path) -> None:
    samples = [sample(3), sample(5, run_state()), sample(6)]
    record(path, *samples)
    with Replay(path, speed=math.inf) as replay:
        assert list(replay.samples()) == samples
        # It has ended, and stays at the last.
        assert list(replay.samples()) == []
        assert replay.sample() == samples[-1]
        assert replay.num_samples == 3
        assert replay.mean_cost == 0.001
        assert replay.interval == 1.0


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, [2.0, 1.0]), (4.0, [0.5, 0.25])])
def test_it_has_the_pace_of_the_recording(path: Path, speed: float, seconds: list[float]) -> None:
    record(path, *map(sample, (3, 5, 6)))
    now = [0.0]
    slept: list[float] = []

    def sleep(duration: float) -> None:
        slept.append(duration)
        now[0] += duration

    replay = Replay(path, speed=speed, clock=lambda: now[0], sleep=sleep)
    assert len(list(replay.samples())) == 3
    assert slept == seconds


def test_one_sample_is_shown_and_then_it_ends(path: Path) -> None:
    record(path, sample(3))
    assert list(Replay(path).samples()) == [sample(3)]


def test_samples_one_by_one(path: Path) -> None:
    record(path, *map(sample, range(3)))
    replay = Replay(path)
    assert [replay.sample().elapsed for _ in range(4)] == [0.0, 1.0, 2.0, 2.0]


def test_another_thread_ends_it(path: Path) -> None:
    record(path, sample(0), sample(3600))
    begun, found = threading.Event(), list[Sample]()

    def use(samples: Iterable[Sample]) -> None:
        for one in samples:
            found.append(one)
            begun.set()

    with BackgroundSampler(Replay(path), use) as background:
        assert begun.wait(10)
    assert background.has_ended
    assert found == [sample(0)]


def test_what_is_damaged_is_told_from_there_on(path: Path) -> None:
    record(path, *map(sample, range(3)))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], *["torn\n"] * 5, *lines[2:], '{"time"']))
    told = [one.notes[len(sample(0).notes) :] for one in Replay(path, speed=math.inf).samples()]
    assert [len(notes) for notes in told] == [4, 4, 4]
    assert "run:3: this is no sample, it is left out" in told[0][0]
    assert [notes[-1].split(" more; ")[0] for notes in told] == ["and 2", "and 2", "and 3"]
    path.write_text("".join([*lines, '{"time"']))
    last = list(Replay(path, speed=math.inf).samples())[-1]
    assert last.notes[-1].endswith("run:5: the last line is cut off; it is left out")


def test_what_cannot_be_played_back(path: Path) -> None:
    record(path)
    with pytest.raises(ValueError, match="holds no sample to play back"):
        Replay(path)
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="is not a recording"):
        Replay(path)
    with pytest.raises(ValueError, match="the speed of a replay must be more than 0, but got -1"):
        Replay(path, speed=-1)
