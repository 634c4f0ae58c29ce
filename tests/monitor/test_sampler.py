"""Samples at regular times, whatever the sources and the clocks do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import pytest

from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.sources.source import SourceReading
from tests.monitor.made_up_samples import run_state


class Clock:
    """A clock that moves when somebody sleeps, or reads for so many seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Slow:
    """A source that takes its time, and fails when it is told to."""

    name = "slow"

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock = clock
        self.seconds = itertools.chain(seconds, itertools.repeat(0.0))
        self.error: Exception | None = None
        self.closed = 0

    def read(self) -> SourceReading:
        self.clock.now += next(self.seconds)
        if self.error is not None:
            raise self.error
        return SourceReading((DeviceReading("cpu", "a CPU", self.name),), notes=("a note",))

    def close(self) -> None:
        self.closed += 1


def test_samples_come_at_multiples_of_the_interval() -> None:
    clock = Clock()
    sampler = Sampler([Slow(clock, 0.5, 0.25)], interval=2.0, clock=clock, sleep=clock.sleep)
    samples = list(itertools.islice(sampler.samples(), 4))
    assert [one.elapsed for one in samples] == [0.0, 2.0, 4.0, 6.0]
    assert clock.slept == [1.5, 1.75, 2.0]


def test_a_time_that_was_missed_is_left_out() -> None:
    clock = Clock()
    sampler = Sampler([Slow(clock, 0.0, 5.5)], interval=2.0, clock=clock, sleep=clock.sleep)
    samples = list(itertools.islice(sampler.samples(), 4))
    # The second takes from 2 to 7.5: those of 4 and 6 are left out, not made up for.
    assert [one.elapsed for one in samples] == [0.0, 2.0, 8.0, 10.0]


def test_the_cost_of_a_sample_is_measured() -> None:
    clock = Clock()
    sampler = Sampler([Slow(clock, 0.25, 0.75)], clock=clock, sleep=clock.sleep)
    assert [sampler.sample().cost for _ in range(2)] == [0.25, 0.75]


def test_a_wall_clock_that_goes_backwards_changes_no_interval() -> None:
    clock = Clock()
    wall = iter([1000.0, 400.0, 1002.0])
    sampler = Sampler([], clock=clock, sleep=clock.sleep, wall=lambda: next(wall))
    samples = list(itertools.islice(sampler.samples(), 3))
    assert [one.time for one in samples] == [1000.0, 400.0, 1002.0]
    assert [one.elapsed for one in samples] == [0.0, 1.0, 2.0]


def test_a_source_that_fails_takes_nothing_from_the_others() -> None:
    clock = Clock()
    bad, good = Slow(clock), Slow(clock)
    bad.error = OSError("the bus is gone")
    sampler = Sampler([bad, good], clock=clock, run=run_state)
    for _ in range(2):
        sample = sampler.sample()
        assert len(sample.devices) == 1
        assert sample.run == run_state()
        assert sample.notes == (
            "a note",
            "the source 'slow' could not be read: OSError: the bus is gone",
        )
    bad.error = None
    recovered = sampler.sample()
    assert len(recovered.devices) == 2
    assert recovered.notes == ("a note",)


def test_a_host_and_a_run_that_fail_are_told() -> None:
    def fail() -> None:
        raise TimeoutError("no answer")

    def stumble() -> None:
        raise KeyError("a b")

    sample = Sampler([], run=fail, host=stumble).sample()
    assert (sample.run, sample.host) == (None, None)
    assert sample.notes == (
        "the run that is watched could not be read: no answer",
        "the host could not be read: KeyError: 'a b'",
    )


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_interval_is_positive_and_finite(interval: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds and at most a day, but got"):
        Sampler([], interval=interval)


def test_closing_closes_the_sources_once_and_ends_the_samples() -> None:
    clock = Clock()
    source = Slow(clock)
    with Sampler([source], clock=clock, sleep=clock.sleep) as sampler:
        samples = sampler.samples()
        next(samples)
    sampler.close()
    assert source.closed == 1
    assert list(samples) == []


def test_another_thread_ends_the_wait_for_the_next_sample() -> None:
    sampler = Sampler([], interval=3600.0)
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        for _ in sampler.samples():
            begun.set()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert begun.wait(10)
    sampler.close()
    assert ended.wait(10)


# --- in the background -----------------------------------------------------------------------


def test_a_background_sampler_hands_on_what_comes_and_ends() -> None:
    source = Slow(Clock())
    enough, times = threading.Event(), list[float]()

    def use(samples: Iterable[Sample]) -> None:
        for sample in samples:
            times.append(sample.elapsed)
            if len(times) == 5:
                enough.set()

    with BackgroundSampler(Sampler([source], interval=0.001), use) as background:
        assert enough.wait(10)
        assert not background.has_ended
    assert background.has_ended
    assert times == sorted(times)
    assert source.closed == 1
    number = len(times)
    background.close()
    assert len(times) == number


def test_an_error_of_sampling_is_told_to_who_asks() -> None:
    class Broken(Sampler):
        def sample(self) -> None:  # type: ignore[override]
            raise ZeroDivisionError("of nobody's making")

    with BackgroundSampler(Broken([]), list) as background:
        with pytest.raises(RuntimeError, match="sampling has failed: ZeroDivisionError"):
            background.wait_for_failure()
        with pytest.raises(RuntimeError, match="sampling has failed: ZeroDivisionError"):
            _ = background.has_ended
