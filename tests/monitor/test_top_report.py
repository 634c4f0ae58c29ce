"""`monitor top` and `monitor report` say the same of the same samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.report import make_report

from .recording_cases import BEGIN, FakeRun, device, info_of, sample
from .step_cases import BUSY, Seconds

SLOW: Seconds = {"forward": 0.8, "backward": 1.2}
#: Most of it is spent in spreading and collecting, so that both are idle for long.
SMALL: Seconds = {"scatter": 0.3, "forward": 0.3, "backward": 0.1, "gather": 0.1, "idle": 1.2}
SMALL_SLOW: Seconds = {**SMALL, "forward": 0.4, "idle": 1.1}


def watched(
    turns: Sequence[Sequence[Seconds]],
    *,
    shared: bool = False,
    samples: Sequence[int] = (8, 8),
    throttle: str = "",
) -> list[Sample]:
    """Ten samples, with the next of some steps before each."""
    info = info_of(2)
    if shared:
        info = dataclasses.replace(info, devices=("cpu", "cpu"), uuids=(None, None))
    run = FakeRun(info)
    found = []
    for i in range(10):
        run.steps(3, turns[i % len(turns)], samples)
        readings = [device(d, throttle=[throttle] if throttle and d else []) for d in range(2)]
        found.append(sample(0.5 * i, readings, run.state(BEGIN + 0.5 * i)))
    return found


def alerts_of(samples: Sequence[Sample]) -> list[str]:
    history = History()
    for one in samples:
        history.add(one)
    return [alert.text for alert in find_alerts(history) if "is slowed down (" not in alert.text]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("turns", "kind", "words"),
    [
        ([[BUSY, SLOW]], "slow replica", "replica 1 on {} holds up the others: replica 0 waits 50"),
        ([[BUSY, SLOW], [SLOW, BUSY]], "moving straggler", "each time another one"),
        # The other one is idle for 60 % of the time, but hardly because of this one.
        ([[SMALL, SMALL_SLOW]], "overhead", None),
        ([[BUSY, BUSY]], "nothing", None),
    ],
)
def test_both_tell_the_same(
    turns: list[list[Seconds]], kind: str, words: str | None, shared: bool
) -> None:
    samples = watched(turns, shared=shared)
    assert make_report(samples).advice.kind == kind
    texts = alerts_of(samples)
    if words is None:
        assert texts == []
    else:
        (text,) = texts
        assert words.format("cpu" if shared else "cuda:1") in text
        assert ("balance" in text) == (kind == "slow replica")


def test_a_larger_chunk_is_told_as_such_by_both() -> None:
    samples = watched([[BUSY, SLOW]], samples=[8, 16])
    assert make_report(samples).advice.kind == "uneven split"
    (text,) = alerts_of(samples)
    assert "it gets more samples" in text and "balance" not in text


def test_a_device_that_is_slowed_down_is_told_as_such_by_both() -> None:
    samples = watched([[BUSY, SLOW]], throttle="power cap")
    assert make_report(samples).advice.kind == "slowed device"
    (text,) = alerts_of(samples)
    assert "replica 1 on cuda:1 holds up the others" in text and "is slowed down; remove" in text


def test_on_one_device_a_replica_that_is_late_now_and_then_is_no_straggler() -> None:
    turns = [[BUSY, SLOW], [BUSY, BUSY], [SLOW, BUSY], [BUSY, SLOW]]
    # In the totals replica 1 takes the more; on two devices that is what counts.
    assert make_report(watched(turns)).advice.kind == "moving straggler"
    turns = [[BUSY, SLOW], [BUSY, SLOW], [{"forward": 0.5, "backward": 0.6}, BUSY]]
    assert make_report(watched(turns)).advice.kind == "slow replica"
    samples = watched(turns, shared=True)
    assert make_report(samples).advice.kind == "moving straggler"
    assert not any("balance" in text for text in alerts_of(samples))


def test_waiting_for_the_optimizer_is_not_put_on_a_straggler() -> None:
    first: Seconds = {"forward": 0.5, "backward": 0.6, "optimizer": 2.0}
    slow: Seconds = {"forward": 0.6, "backward": 0.8, "idle": 1.7}
    samples = watched([[first, slow]])
    assert make_report(samples).advice.kind == "optimizer"
    assert alerts_of(samples) == []
