"""Seconds of calls on a device and on the host, with caches and launches kept out of them.

Note [Time of a kernel]
~~~~~~~~~~~~~~~~~~~~~~~
On an accelerator a call only queues work. A turn queues copies of large buffers first, long enough
for the host to have queued all calls of the turn before the first of them starts: the time between
the events around them is then the device's alone, and the time that the host needed is that of
launches, Python included. Whether the device was still busy with the copies is looked at, and the
turn repeated with more of them where it was not.

Each contestant goes round several sets of buffers, which together are larger than the caches of
today's devices, as far as the number of sets is not limited: small calls find their data in the
cache, all contestants alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dataparallel import devices

Call = Callable[[], object]

#: Bytes that the sets of buffers of a case occupy together; more than any level-2 cache has.
FOOTPRINT = 256 * 2**20
_FEWEST_SETS, _MOST_SETS = 2, 64
#: Seconds that a turn should last, and the limits of its calls. The device's queue is limited too:
#: calls that launch ten kernels each must fit.
_TURN = 0.005
_FEWEST_CALLS, _MOST_CALLS = 3, 50
#: Slow references on the CPU are not called for every set of buffers beforehand.
_WARM_UP = 0.5
#: Bytes that a copy in front of a turn reads.
_FILLER = 256 * 2**20
#: How many there are: twice as many each time the device was not busy long enough.
_FEWEST_FILLERS, _MOST_FILLERS = 8, 128


@dataclass(frozen=True)
class Turn:
    """What one turn of a contestant gave.

    Attributes:
        seconds: Of a call: on an accelerator the device's mean, else the median.
        launch: Seconds of the host per call; None where the host itself computes.
        behind: Whether the device was still busy when all was queued; None on the host.
    """

    seconds: float
    launch: float | None = None
    behind: bool | None = None


def num_sets(size: int, footprint: int = FOOTPRINT) -> int:
    """How many sets of buffers a contestant goes round.

    Args:
        size: Bytes of one set.
        footprint: Of all together, if the number of sets allows.
    """
    return min(_MOST_SETS, max(_FEWEST_SETS, math.ceil(footprint / size)))


def num_calls(seconds: float) -> int:
    """How many calls make a turn long enough to be measured.

    Args:
        seconds: Of one.
    """
    return min(_MOST_CALLS, max(_FEWEST_CALLS, math.ceil(_TURN / max(seconds, 1e-9))))


class Contestant:
    """Calls that do the same on different buffers.

    Args:
        calls: One per set of buffers.

    Attributes:
        num_fillers: Copies in front of a turn.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.num_fillers = _FEWEST_FILLERS
        self._calls = calls
        self._rotation: Iterator[Call] = itertools.cycle(calls)

    def warm_up(self, enough: float = math.inf) -> None:
        """Call each once: to compile, allocate, and make what is kept from then on.

        Args:
            enough: Seconds after which those that are left are not called. Default: none.
        """
        begin = time.perf_counter()
        for call in self._calls:
            call()
            if time.perf_counter() - begin > enough:
                return

    def fill_more(self) -> None:
        """Put twice as many copies in front of the next turn."""
        self.num_fillers *= 2

    def take(self, times: int) -> list[Call]:
        """The next calls, each on the set that was not used for the longest time."""
        return list(itertools.islice(self._rotation, times))


class Stopwatch:
    """Times turns on a device. See Note [Time of a kernel].

    Args:
        device: Where the calls work.
        filler: Bytes that a copy in front of a turn reads.
    """

    def __init__(self, device: torch.device, filler: int = _FILLER) -> None:
        self._device = device
        self._queued = devices.is_accelerator(device)
        if self._queued:
            self._from = torch.zeros(filler, dtype=torch.uint8, device=device)
            self._to = torch.empty_like(self._from)

    def warm_up(self, contestant: Contestant) -> None:
        """Make a contestant ready: on an accelerator all of its calls."""
        contestant.warm_up(math.inf if self._queued else _WARM_UP)

    def turn(self, contestant: Contestant, times: int) -> Turn:
        """Let a contestant make some calls.

        Args:
            contestant: Who was warmed up.
            times: Number of calls.
        """
        calls = contestant.take(times)
        if not self._queued:
            return Turn(statistics.median(map(_seconds_of, calls)))
        turn = self._queue(calls, contestant.num_fillers)
        while not turn.behind and contestant.num_fillers < _MOST_FILLERS:
            contestant.fill_more()
            turn = self._queue(calls, contestant.num_fillers)
        return turn

    def _queue(self, calls: Sequence[Call], num_fillers: int) -> Turn:
        for _ in range(num_fillers):
            self._to.copy_(self._from)
        started = devices.timing_event(self._device)
        begin = time.perf_counter()
        for call in calls:
            call()
        launch = time.perf_counter() - begin
        ended = devices.timing_event(self._device)
        assert started is not None and ended is not None
        behind = not started.query()
        devices.synchronize(self._device)
        seconds = started.elapsed_time(ended) * 1e-3
        return Turn(seconds / len(calls), launch / len(calls), behind)


def _seconds_of(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_turns(
    contestants: dict[str, Contestant],
    stopwatch: Stopwatch,
    rounds: int,
    times: int | None = None,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[Turn]]:
    """Measure contestants interleaved: A B C A B C ...

    Args:
        contestants: By name.
        stopwatch: Of their device.
        rounds: Number of turns of each.
        times: Calls per turn. Default: as many as take some milliseconds.
        on_round: Told the number of each round before it starts.

    Returns:
        The turns by name, in the order of the rounds.
    """
    calls = {}
    for name, contestant in contestants.items():
        stopwatch.warm_up(contestant)
        first = stopwatch.turn(contestant, _FEWEST_CALLS)
        calls[name] = times or num_calls(max(first.seconds, first.launch or 0.0))
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(rounds):
        on_round(number)
        for name, contestant in contestants.items():
            turns[name].append(stopwatch.turn(contestant, calls[name]))
    return turns
