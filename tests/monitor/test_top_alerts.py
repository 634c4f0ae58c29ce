"""What `monitor top` warns of, and when it does not."""

from __future__ import annotations

from typing import Any

import pytest

from dataparallel.monitor.run import RunState
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.reading import DeviceReading
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.run_history import RunHistory
from tests.monitor.made_up_machine import GIB, make_device, make_run, make_sample, make_step
from tests.monitor.recording_cases import BEGIN, FakeRun, device, info_of, sample
from tests.monitor.step_cases import BUSY, SLOW, Seconds


def texts(*devices: DeviceReading, seconds: tuple[float, ...] = (0.0,)) -> list[str]:
    history = History()
    alerts: list[str] = []
    for elapsed in seconds:
        history.add(make_sample(devices=devices, run=None, elapsed=elapsed))
        alerts = [alert.text for alert in find_alerts(history)]
    return alerts


def run_texts(*states: RunState | None) -> list[str]:
    history = History()
    for elapsed, state in enumerate(states):
        history.add(make_sample(devices=(), run=state, elapsed=float(elapsed)))
    return [alert.text for alert in find_alerts(history)]


def even_run(steps: int = 100, slow: float = 1.0, **changes: Any) -> RunState:
    """A run whose replicas compute ``slow`` times as fast as the first one."""
    names = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    last = make_step(steps, names, slow=slow)
    totals = tuple({p: s * steps for p, s in r.seconds.items()} for r in last.replicas)
    return make_run(steps, last=last, totals=totals, **changes)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"temperature": 84.0}, None),
        ({"temperature": 85.0}, "cuda:0 is hot (85 C)"),
        ({"memory_used": 75 * GIB}, None),
        ({"memory_used": 77 * GIB}, "the memory of cuda:0 is nearly full (96 %)"),
        ({"ecc_uncorrected": 0.0}, None),
        ({"ecc_uncorrected": None}, None),
        ({"ecc_uncorrected": 1.0}, "cuda:0 has 1 memory errors that were not corrected"),
    ],
)
def test_limits_of_devices(values: dict[str, float | None], told: str | None) -> None:
    found = texts(make_device(0, values=values))
    assert [text.startswith(told) for text in found] == [True] if told else found == []


def test_a_device_that_is_slowed_down_is_told_with_the_reasons() -> None:
    (text,) = texts(make_device(0, throttle=("power cap", "HW slowdown")))
    assert text.startswith("cuda:0 is slowed down (power cap, HW slowdown): look at its cooling")
    assert "balance" not in text
    history = History()
    history.add(make_sample(devices=(make_device(0, throttle=("power cap",)),), run=even_run()))
    (alert,) = find_alerts(history)
    assert "balance" in alert.text


def test_a_lost_device_comes_first_and_nothing_else_is_told_of_it() -> None:
    lost = make_device(1, values={"temperature": 99.0}, error="GPU is lost")
    found = texts(make_device(0, values={"temperature": 90.0}), lost)
    assert found[0] == "cuda:1 cannot be read: GPU is lost" and len(found) == 2


def test_busy_with_little_power_for_long_is_a_wait() -> None:
    waits = make_device(0, values={"utilization": 1.0, "power": 130.0})
    assert texts(waits, seconds=(0.0, 9.0)) == []
    (text,) = texts(waits, seconds=(0.0, 5.0, 12.0))
    assert text.startswith("cuda:0 is 100 % busy at 130/700 W for 12 s")
    works = make_device(0, values={"utilization": 1.0, "power": 500.0})
    assert texts(works, seconds=(0.0, 60.0)) == []


def test_a_break_begins_the_time_anew() -> None:
    history = History()
    for elapsed, power in ((0.0, 130.0), (8.0, 600.0), (12.0, 130.0), (15.0, 130.0)):
        device = make_device(0, values={"utilization": 1.0, "power": power})
        history.add(make_sample(devices=(device,), run=None, elapsed=elapsed))
        assert find_alerts(history) == []


# --- the run -------------------------------------------------------------------------------------


def test_an_even_run_is_no_reason_to_warn() -> None:
    assert run_texts(even_run()) == []
    assert run_texts(None) == []


@pytest.mark.parametrize(
    ("turns", "samples", "throttle", "kind", "is_shown"),
    [
        ([[BUSY, SLOW]], [8, 8], "", "slow replica", True),
        ([[BUSY, SLOW], [SLOW, BUSY]], [8, 8], "", "moving straggler", True),
        ([[BUSY, SLOW]], [8, 16], "", "uneven split", True),
        ([[BUSY, SLOW]], [8, 8], "power cap", "slowed device", True),
        ([[BUSY, {"forward": 0.5, "backward": 0.8}]], [8, 8], "", "slow replica", False),
        ([[{**BUSY, "input": 1.0}] * 2], [8, 8], "", "input", True),
        ([[{**BUSY, "optimizer": 2.0}, BUSY]], [8, 8], "", "optimizer", True),
        ([[BUSY, BUSY]], [8, 8], "", "nothing", False),
    ],
)
def test_what_costs_much_is_told_as_the_report_tells_it(
    turns: list[list[Seconds]], samples: list[int], throttle: str, kind: str, is_shown: bool
) -> None:
    run, history, seen = FakeRun(info_of(2)), History(), []
    for i in range(10):
        run.steps(3, turns[i % len(turns)], samples)
        readings = [device(d, throttle=[throttle] if throttle and d else []) for d in range(2)]
        seen.append(sample(0.5 * i, readings, run.state(BEGIN + 0.5 * i)))
        history.add(seen[-1])
    report = make_report(seen)
    assert report.advice.kind == kind
    told = [(one.kind, one.gain) for one in find_alerts(history) if one.gain]
    assert told == ([(kind, report.advice.gain)] if is_shown else [])


def test_only_what_happened_lately_counts() -> None:
    slow = even_run(100, slow=2.0, time=1e9)
    even = even_run(50, time=0.0)
    later = make_run(
        150,
        time=1e9 + 30,
        last=even.last,
        totals=tuple(
            {p: old.get(p, 0.0) + new.get(p, 0.0) for p in (*old, *new)}
            for old, new in zip(slow.totals, even.totals, strict=True)
        ),
    )
    assert run_texts(slow, later) == []
    assert len(run_texts(later)) == 1


def test_a_phase_that_does_not_end_is_told() -> None:
    now = (("reduce across processes", 14.2), ("reduce across processes", 14.2))
    (text,) = run_texts(even_run(now=(*now, ("forward", 0.1), ("idle", 9.0))))
    assert text == (
        "replicas 0, 1 have been in 'reduce across processes' for 14 s: another process is late "
        "or gone; look at what that one does"
    )
    (text,) = run_texts(even_run(now=(("forward", 0.1),) * 3 + (("idle", 75.0),)))
    assert text.startswith("replica 3 has been in 'idle' for 1 min 15 s: no step is under way")


def test_a_run_that_is_gone_is_the_only_thing_told_of_it() -> None:
    (text,) = run_texts(even_run(slow=2.0), None, None)
    assert "is gone since 2.00 s" in text
    # Another one takes its place.
    assert run_texts(even_run(slow=2.0), None, even_run(3, pid=77)) == []


# --- lately --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("looks", "rate", "seconds"),
    [
        # What is older than the window is forgotten.
        ([(0.0, 0, 1), (5.0, 500, 1), (16.0, 511, 1), (17.0, 512, 1)], 1.0, 12.0),
        # A run that stands still gets slower, and keeps its last step.
        ([(0.0, 9, 1), (1.0, 10, 1), (20.0, 10, 1), (40.0, 10, 1)], 1 / 40, 40.0),
        # Another run begins anew, and so does a recording that is played again.
        ([(0.0, 5, 1), (1.0, 900, 2)], None, 0.0),
        ([(100.0, 5, 1), (101.0, 6, 1), (0.0, 7, 1)], None, 0.0),
    ],
)
def test_what_lately_is(
    looks: list[tuple[float, int, int]], rate: float | None, seconds: float
) -> None:
    history = RunHistory(window=10.0)
    for elapsed, steps, pid in looks:
        history.add(even_run(steps, pid=pid, time=1e9 + elapsed), elapsed)
    assert (history.steps_per_second, history.seconds) == (rate, seconds)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_rate(jump: float) -> None:
    history = RunHistory(window=10.0)
    for second in range(200):
        time = 1e9 + second + (jump if second >= 30 else 0.0)
        history.add(even_run(100 * (second + 1), time=time), float(second))
        if second:
            assert history.steps_per_second == pytest.approx(100.0)
            assert history.seconds == min(second, 10)
    assert history.totals is not None and history.totals.num_steps == 1000
    assert history.period is not None and len(history.period.states) == 11


def test_many_samples_in_the_window_are_bounded() -> None:
    history = RunHistory(window=10.0)
    for i in range(1500):
        history.add(even_run(i + 1), i * 1e-3)
    assert history.period is not None and len(history.period.states) == 1000
