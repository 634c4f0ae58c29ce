"""The samples of the last while, ready to be sent."""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

from dataparallel.monitor.findings import ReplicaScore
from dataparallel.threads.timeline import PHASES
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.reading import Sample, json_text

#: Metrics of devices that are kept for each sample; all others for the latest one only.
CHARTED = ("utilization", "memory_used", "power")

#: What comes of taking samples: it goes on, there are no more, or it has broken.
Progress: TypeAlias = Literal["running", "finished", "failed"]


class SampleStore:
    """Keeps what charts need of many samples, and the latest one as a whole.

    Each sample becomes text once, however many readers there are.

    Example::

        store = SampleStore(keep=600)
        store.add(sample)
        store.after(0)                   # JSON: all points, and the sample
        store.after(1)                   # JSON: no points, and the sample

    Args:
        keep: How many samples are kept; older ones are forgotten. Default: 1800, half an hour of
            one per second.

    Attributes:
        identity: Tells readers whether this is still the store that they know.
        latest: The latest sample; None if there is none yet.
        scores: How fast the replicas of the run are lately; empty without a run.
    """

    def __init__(self, keep: int = 1800) -> None:
        self.identity = secrets.token_hex(8)
        self.latest: Sample | None = None
        self.scores: tuple[ReplicaScore, ...] = ()
        self._history = History()
        self._lock = threading.Lock()
        self._points: deque[str] = deque(maxlen=keep)
        self._last = 0
        self._text = "null"
        self._progress: Progress = "running"
        self._error: str | None = None

    def add(self, sample: Sample) -> None:
        """Keep one more sample; by one thread only."""
        self._history.add(sample)
        run = self._history.run
        totals = run.totals
        scores = () if totals is None else totals.replicas
        more = {
            "alerts": [asdict(alert) for alert in find_alerts(self._history)],
            "scores": [score.relative for score in scores],
            # Of a run that is gone, the last that it told.
            "run": None if run.state is None else run.state.to_json(),
            "gone": run.gone_for,
        }
        text = json_text({**sample.to_json(), **more})
        point = json_text({"n": self._last + 1, **_point(sample)})
        with self._lock:
            self._last += 1
            self._points.append(point)
            self._text = text
            self.latest, self.scores = sample, scores

    def feed(self, samples: Iterable[Sample]) -> None:
        """Keep samples until there are no more, and tell readers how it ended.

        Raises:
            Exception: What taking a sample raises.
        """
        try:
            for sample in samples:
                self.add(sample)
        except Exception as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            raise
        self._end("finished")

    def after(self, number: int) -> str:
        """What has come since a reader looked the last time.

        Args:
            number: The last number that the reader has seen, 0 for none.

        Returns:
            JSON: ``history`` (the store's identity), ``last`` (the number to ask with the next
            time), ``points``, ``sample`` (the latest), ``progress`` and ``error``.
        """
        with self._lock:
            new = min(max(0, self._last - number), len(self._points))
            points = list(self._points)[len(self._points) - new :]
            head = {
                "history": self.identity,
                "last": self._last,
                "progress": self._progress,
                "error": self._error,
            }
            text = self._text
        return f'{json_text(head)[:-1]},"points":[{",".join(points)}],"sample":{text}}}'

    def _end(self, progress: Progress, error: str | None = None) -> None:
        with self._lock:
            self._progress, self._error = progress, error


def _point(sample: Sample) -> dict[str, Any]:
    """What charts need of a sample."""
    point: dict[str, Any] = {
        "time": round(sample.time, 3),
        "elapsed": round(sample.elapsed, 3),
        "devices": {
            device.device: [_short(device.value(metric)) for metric in CHARTED]
            for device in sample.devices
        },
    }
    if sample.host is not None:
        point["host"] = [_short(sample.host.utilization), _short(sample.host.memory_used)]
    run = sample.run
    if run is not None:
        last = run.last
        point["run"] = {
            "started": run.started,
            "steps": run.num_steps,
            "samples": run.num_samples,
            "seconds": None if last is None else _short(last.seconds),
            "totals": [[_short(one.get(phase, 0.0)) for phase in PHASES] for one in run.totals],
        }
    return point


def _short(value: float | None) -> float | None:
    """Six digits: more than a chart can show."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) else short
