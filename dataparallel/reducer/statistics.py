"""Times of forward, backward and communication, under the names of torch's logging data.

Note [What is measured]
~~~~~~~~~~~~~~~~~~~~~~~
The first ten iterations are sampled, and then one in ``sample_rate``. An iteration begins with a
forward; of several backwards that follow it, the first one counts. The measurements are spans of
the timeline, see Note [Phases of a replica], from the first begin to the last end:

    |- forward -|   (loss)   |--------- backward ---------|
                                      |- reduce local -| ... |- reduce across processes -|
                                      '- overlap ---------'
                                      '- communication ----------------------------------'

Torch takes the loss for a part of backward compute, since its reducer doesn't see where backward
begins. If spans have events of accelerators, these tell the time, and the slowest device counts;
only :meth:`Statistics.read` waits for them.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from dataparallel.threads.timeline import Listener, Span, Timeline

_ALWAYS_SAMPLED = 10
# Means are over so many iterations, the last that were sampled.
_KEPT = 100


class Statistics:
    """A measurement of some iterations of one reducer. See Note [What is measured]."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._sample_rate = 100
        #: True if spans are recorded, until the round ends here.
        self.measures = False
        # The numbers of the current iteration and of the last that was sampled.
        self._number = self._sampled = 0
        #: The iteration, in torch's words: the last that was sampled before the current one.
        self.reported = 0
        self._num_sampled = 0
        self._spans: list[Span] = []
        self._samples: deque[list[Span]] = deque(maxlen=_KEPT)

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sample one in so many iterations, from the next one on and after the first ten."""
        if sample_rate < 1:
            raise ValueError(f"one in 1 iterations is sampled, or in more, but got {sample_rate}")
        self._sample_rate = sample_rate

    def begin(self) -> None:
        """Begin an iteration."""
        if self.measures:
            # There was no backward: what is known of the forward counts.
            self.end()
        self._number += 1
        self.reported = self._sampled
        if self._number <= _ALWAYS_SAMPLED or self._number % self._sample_rate == 0:
            self._sampled, self.measures, self._spans = self._number, True, []
            self._timeline.subscribe(Listener(self._spans.append))

    def end(self) -> None:
        """End the round; nothing more is measured in this iteration."""
        self._num_sampled += 1
        self._samples.append(self._spans)
        self.abandon()

    def abandon(self) -> None:
        """Forget the current iteration, which has failed."""
        self.measures = False
        self._timeline.unsubscribe(Listener(self._spans.append))

    def read(self) -> dict[str, int]:
        """Return the measured times, in nanoseconds, once the accelerators have come that far."""
        latest: dict[str, int] = {}
        lengths: defaultdict[str, list[int]] = defaultdict(list)
        for spans in self._samples:
            latest = _measures(spans)
            for name, value in latest.items():
                if name.endswith("_time"):
                    lengths[f"avg_{name}"].append(value)
        means = {name: sum(values) // len(values) for name, values in lengths.items()}
        return {**latest, **means, "num_sampled": self._num_sampled}


def _measures(spans: Sequence[Span]) -> dict[str, int]:
    """Return the lengths of an iteration's phases, and their times since 1970, in nanoseconds."""
    phases: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        phases[span.phase].append(span)
    backward = phases["backward"]
    local, across = phases["reduce local"], phases["reduce across processes"]
    # The first bucket is sent when it was summed up; the last is waited for at the end.
    communication = [*local[:1], *across] if across else local
    named = {
        "forward_compute": phases["forward"],
        "backward_compute": backward,
        "backward_comm": communication,
    }
    since = time.time_ns() - time.perf_counter_ns()
    found = {}
    for name, part in named.items():
        if part:
            found[f"{name}_time"] = _length(part, part)
            found[f"{name}_time_start"] = since + part[0].begin
            found[f"{name}_time_end"] = since + max(span.end for span in part)
    if backward and communication:
        overlap = max(_length(communication[:1], backward), 0)
        found["backward_compute_comm_overlap_time"] = min(overlap, found["backward_comm_time"])
    return found


def _length(begins: Sequence[Span], ends: Sequence[Span]) -> int:
    """Nanoseconds from the first begin to the last end, on the device where these are longest."""
    firsts = {span.replicas: span for span in reversed(begins)}
    lasts = {span.replicas: span for span in ends}
    on_devices = []
    for first, last in itertools.product(firsts.values(), lasts.values()):
        events = dict(zip(last.replicas, last.end_events, strict=False))
        for replica, begin in zip(first.replicas, first.begin_events, strict=False):
            end = events.get(replica)
            if begin is not None and end is not None:
                begin.synchronize()
                end.synchronize()
                # Events tell milliseconds.
                on_devices.append(int(begin.elapsed_time(end) * 1e6))
    return max(on_devices, default=max(span.end for span in ends) - begins[0].begin)
