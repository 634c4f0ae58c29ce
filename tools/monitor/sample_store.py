"""The samples of the last while, ready to be sent."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import psutil

from dataparallel.monitor.findings import ReplicaScore
from dataparallel.monitor.run import RunState
from dataparallel.monitor.sample import Sample, json_text
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History, RunHistory, users_of
from dataparallel.tools.monitor.ranks import run_name, speed_of_ranks

#: Metrics of devices that are kept for each sample; all others for the latest one only.
CHARTED = ("utilization", "memory_used", "power")


class RunReading(NamedTuple):
    """A run that is watched, as it was last."""

    state: RunState
    is_up: bool
    #: The speed of its replicas of late.
    scores: Sequence[ReplicaScore]


class SampleStore:
    """A store for the charts of the last samples, and for the latest one as a whole.

    Each sample becomes text once, however many readers there are. There is room for half an hour of
    one per second. Commands of other users' processes are kept if it ``shows_commands``.

    Attributes:
        latest: The latest sample; None if there is none yet.
        runs: The runs that are watched, as they were last.
    """

    def __init__(self, keep: int = 1800, *, shows_commands: bool = False) -> None:
        self._shows_commands = shows_commands
        self._user = psutil.Process().username()
        self.latest: Sample | None = None
        self.runs: Sequence[RunReading] = ()
        self._history = History()
        self._lock = threading.Lock()
        self._points: deque[tuple[float, str]] = deque(maxlen=keep)
        self._text = "null"
        self._is_finished = False

    def add(self, sample: Sample) -> None:
        """Keep one more sample; by one thread only."""
        if not self._shows_commands:
            shown = (
                one if one.user == self._user else replace(one, command=None)
                for one in sample.processes
            )
            sample = replace(sample, processes=tuple(shown))
        history = self._history
        history.add(sample)
        known = history.runs
        states = [run.state for run in known]
        more = {
            "alerts": [asdict(alert) for alert in find_alerts(history)],
            "advice": None if history.advice is None else str(history.advice),
            "runs": [_run(run, run_name(run.state, states)) for run in known],
            "users": {device.device: users_of(device, known) for device in sample.devices},
            # By job the rank for which the others wait.
            "slow": {
                job: one.numbers["rank"]
                for job, each in history.changes.items()
                for one in each
                if one.kind == "slow rank"
            },
        }
        text = json_text({**sample.to_json(), **more})
        point: dict[str, Any] = {
            "time": sample.time,
            "devices": {
                device.identity: [_short(device.value(metric)) for metric in CHARTED]
                for device in sample.devices
            },
            "jobs": {job: _course(known, job) for job in history.changes},
        }
        with self._lock:
            self._points.append((sample.time, json_text(point)))
            self._text = text
            self.latest = sample
            self.runs = [RunReading(one.state, one.gone_for is None, one.scores) for one in known]

    def feed(self, samples: Iterable[Sample]) -> None:
        """Keep samples until there are no more, which readers are told."""
        for sample in samples:
            self.add(sample)
        self._is_finished = True

    def after(self, time: float) -> str:
        """JSON: points newer than a time, the latest sample, and whether it is the last."""
        with self._lock:
            points = ",".join(text for when, text in self._points if when > time)
            finished = json_text(self._is_finished)
            return f'{{"finished":{finished},"points":[{points}],"sample":{self._text}}}'


def _run(run: RunHistory, name: str) -> dict[str, Any]:
    """Return a run for the page: its last state, and its late history."""
    state = run.state
    return {
        "name": name,
        "steps": state.main.steps,
        # The last state that a run has told stays when it is gone.
        "state": state.to_json(),
        "gone": run.gone_for,
        "shares": [one.shares for one in run.scores],
        "scores": [one.relative for one in run.scores],
    }


def _course(runs: Sequence[RunHistory], job: str) -> list[float | None]:
    """Return, for a job's ranks, the samples per second together, and the longest last step."""
    there = [run for run in runs if run.state.job == job and run.gone_for is None]
    speed = speed_of_ranks((run.state.rank, run.samples_per_second) for run in there)
    steps = [run.state.last.seconds for run in there if run.state.last is not None]
    return [_short(speed), _short(max(steps, default=None))]


def _short(value: float | None) -> float | None:
    """Six digits: more than a chart can show."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
