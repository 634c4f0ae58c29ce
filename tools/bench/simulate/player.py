"""The player: what a program has queued, on a machine whose time is simulated.

Note [How a machine plays]
~~~~~~~~~~~~~~~~~~~~~~~~~~
- A stream does one thing after the other, none before the host has launched it. A wait is over when
  its event is reached.
- Kernels of different streams on one device share it: of n, each runs at an n-th of its speed.
- A copy between devices takes a copy engine of its source and one of its destination, in the order
  in which copies become ready. Its bytes leave through the port of the source, and enter through
  that of the destination; between switches they take the uplinks, too. Copies share ports fairly:
  no copy could be faster without making a slower one still slower (max-min).
- A collective operation of NCCL takes its time on a stream, and no time of the device.
- The host launches in the order of the trace. The interpreter's lock lets one thread at a time
  launch, except for kernels in a backward, which threads of autograd's engine launch on their own.
  Nothing is launched to a stream before what the trace has there before it.
- Memory that is freed counts until the streams that use it have passed that moment.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from dataparallel.tools.bench.simulate.machine import SimulatedMachine

#: A device and the number of a stream of it.
_Place: TypeAlias = tuple[int, int]


class Instruction(NamedTuple):
    """One thing for the machine or for its host.

    Attributes:
        kind: As the kind of an entry of a trace; or ``"collective"``.
        name: Its name, for people.
        device: The device that it is queued on.
        stream: The number of the stream.
        seconds: How long a kernel or collective takes if it is alone; for the host, see ``host``.
        bytes: Those of a copy, or of a block of memory; of a collective, those that it gives.
        moved: The bytes that a member of a ring sends, and receives.
        source: The device that a copy comes from; -1 for the host.
        destination: The device that it goes to.
        id: The number of an event or of a block.
        host: The time that launching it takes.
        thread: The thread that launches it.
    """

    kind: str
    name: str = ""
    device: int = -1
    stream: int = 0
    seconds: float = 0.0
    bytes: int = 0
    source: int = -1
    destination: int = -1
    id: int = 0
    host: float = 0.0
    thread: int = 0
    moved: int = 0


class PlayedSpan(NamedTuple):
    """A kernel, a copy or a collective, and when it ran; ``phase`` is the mark before it."""

    task: Instruction
    begin: float
    end: float
    phase: str


class Mark(NamedTuple):
    """A mark: when the host came to it, and when all was done that was launched before."""

    name: str
    host: float
    done: float


class BlockLife(NamedTuple):
    """A block of memory: when it was taken, and when it was free again.

    Staging is memory of streams for copies that is free again in the phase in which it was taken.
    Its time is minus infinity for what was there before the trace, and infinity for what stays.
    """

    device: int
    bytes: int
    begin: float
    end: float
    is_staging: bool = False


@dataclass
class Played:
    """The spans, the marks, and the blocks of memory."""

    spans: list[PlayedSpan]
    marks: list[Mark]
    memory: list[BlockLife]


@dataclass(eq=False)
class _Queued:
    task: Instruction
    issued: float
    phase: str
    number: int


@dataclass(eq=False)
class _Ending:
    """The end of a block: where it was taken, the streams that have yet to pass, the time."""

    taken: _Queued | None
    users: int
    time: float

    def passed(self, now: float) -> bool:
        """Note that a stream has passed; return whether all have."""
        self.users, self.time = self.users - 1, max(self.time, now)
        return not self.users


@dataclass(eq=False)
class _Stream:
    items: deque[_Queued] = field(default_factory=deque)


@dataclass(eq=False)
class _Running:
    """An activity with what is left of it: seconds of a kernel, or bytes of a copy."""

    item: _Queued
    stream: _Stream
    left: float
    begin: float
    updated: float
    ports: tuple[object, ...] = ()
    rate: float = 0.0
    version: int = 0

    def change(self, rate: float, now: float) -> float:
        """Go on at another rate; return the time of the end."""
        self.left -= self.rate * (now - self.updated)
        self.rate, self.updated, self.version = rate, now, self.version + 1
        return now + max(0.0, self.left) / rate


class Player:
    """See Note [How a machine plays]."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._streams: dict[_Place, _Stream] = defaultdict(_Stream)
        self._reached: dict[int, float] = {}
        self._waiting: dict[int, list[_Stream]] = defaultdict(list)
        self._kernels: dict[int, list[_Running]] = defaultdict(list)
        self._flows: list[_Running] = []
        self._busy: set[_Stream] = set()
        self._ready: list[tuple[_Stream, _Queued]] = []
        self._out: dict[int, int] = defaultdict(int)
        self._in: dict[int, int] = defaultdict(int)
        self._ends: dict[int, float] = {}
        self._users: dict[int, set[_Place]] = defaultdict(set)
        self._blocks: dict[int, _Queued] = {}
        self._endings: dict[int, _Ending] = {}
        self._played = Played([], [], [])

    def play(self, tasks: Sequence[Instruction]) -> Played:
        """Play tasks in the order in which a host launches them."""
        host = _Host(self)
        marks = []
        recorded = {task.id for task in tasks if task.kind == "record"}
        # An event from before the trace has happened.
        self._reached = {
            task.id: 0.0 for task in tasks if task.kind == "wait" and task.id not in recorded
        }
        for number, task in enumerate(tasks):
            if task.kind == "mark":
                host.begin(task.name)
                marks.append((task.name, host.clock, number))
            elif task.kind == "host_wait":
                host.wait_until(self._run_until_idle(task))
            else:
                self._take(host.launch(task, number))
        self._run(lambda: False)
        assert not any(stream.items for stream in self._streams.values()), "a circle of waits"
        ends = sorted(self._ends.items())
        latest, position = 0.0, 0
        for name, clock, number in marks:
            while position < len(ends) and ends[position][0] < number:
                latest = max(latest, ends[position][1])
                position += 1
            self._played.marks.append(Mark(name, clock, max(latest, clock)))
        for item in self._blocks.values():
            stays = BlockLife(item.task.device, item.task.bytes, item.issued, math.inf)
            self._played.memory.append(stays)
        return self._played

    def stream(self, place: _Place) -> _Stream:
        """Return the stream of a place."""
        return self._streams[place]

    # --- memory --------------------------------------------------------------------------------

    def _take(self, item: _Queued) -> None:
        task = item.task
        place = task.device, task.stream
        if task.kind == "allocate":
            self._blocks[task.id] = item
            self._users[task.id].clear()
        elif task.kind == "use":
            self._users[task.id].add(place)
        elif task.kind == "free":
            users = self._users.pop(task.id, set())
            # Another block may get the number before the last user has passed.
            ending = _Ending(self._blocks.pop(task.id, None), len(users), item.issued)
            self._endings[item.number] = ending
            # Work of the stream that owns it comes before whatever gets the memory next.
            for user in users:
                self._push(self._streams[user], item)
            if not users:
                self._keep(ending, item)
        else:
            self._push(self._streams[place], item)

    def _passed(self, item: _Queued) -> None:
        """Let a stream have passed the end of a block that it uses."""
        ending = self._endings[item.number]
        if ending.passed(self._now):
            self._keep(ending, item)

    def _keep(self, ending: _Ending, item: _Queued) -> None:
        """Note the life of a block."""
        taken, task = ending.taken, item.task
        is_staging = taken is not None and taken.phase == item.phase and task.stream != 0
        begin = taken.issued if taken else -math.inf
        life = BlockLife(task.device, task.bytes, begin, ending.time, is_staging)
        self._played.memory.append(life)

    # --- time ----------------------------------------------------------------------------------

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def _run(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough() and self._events:
            self._now, _, action = heapq.heappop(self._events)
            action()

    def _run_until_idle(self, task: Instruction) -> float:
        """Run until the host's wait is over, and return that time."""
        stream = self._streams[task.device, task.stream]
        if task.id:
            self._run(lambda: task.id in self._reached)
            return self._reached.get(task.id, self._now)
        self._run(lambda: not stream.items and stream not in self._busy)
        return self._now

    # --- streams -------------------------------------------------------------------------------

    def _push(self, stream: _Stream, item: _Queued) -> None:
        stream.items.append(item)
        if len(stream.items) == 1 and stream not in self._busy:
            self._at(max(item.issued, self._now), lambda: self._advance(stream))

    def _advance(self, stream: _Stream) -> None:
        """Begin what is first in a stream, if that can be."""
        while stream.items and stream not in self._busy:
            item = stream.items[0]
            task = item.task
            if item.issued > self._now:
                self._at(item.issued, lambda: self._advance(stream))
                return
            if task.kind == "wait" and task.id not in self._reached:
                self._waiting[task.id].append(stream)
                return
            stream.items.popleft()
            if task.kind == "record":
                self._reached[task.id] = self._now
                for other in self._waiting.pop(task.id, ()):
                    self._at(self._now, lambda other=other: self._advance(other))  # type: ignore[misc]
            elif task.kind == "free":
                self._passed(item)
            elif task.kind in ("kernel", "copy", "collective"):
                self._busy.add(stream)
                self._begin(stream, item)

    def _begin(self, stream: _Stream, item: _Queued) -> None:
        task = item.task
        if task.kind == "copy":
            self._ready.append((stream, item))
            self._start_copies()
        else:
            running = _Running(item, stream, task.seconds, self._now, self._now)
            if task.kind == "kernel":
                self._kernels[task.device].append(running)
                self._share_device(task.device)
            else:
                self._change_rate(running, 1.0)

    def _end(self, running: _Running, version: int) -> None:
        if running.version != version:
            return
        task = running.item.task
        self._played.spans.append(PlayedSpan(task, running.begin, self._now, running.item.phase))
        self._ends[running.item.number] = self._now
        self._busy.remove(running.stream)
        if task.kind == "kernel":
            self._kernels[task.device].remove(running)
            self._share_device(task.device)
        elif task.kind == "copy":
            self._flows.remove(running)
            self._out[task.source] -= 1
            self._in[task.destination] -= 1
            self._share_ports()
            self._start_copies()
        self._advance(running.stream)

    def _change_rate(self, running: _Running, rate: float) -> None:
        if running.rate == rate and running.version:
            return
        ends = running.change(rate, self._now)
        self._at(ends, functools.partial(self._end, running, running.version))

    def _share_device(self, device: int) -> None:
        running = self._kernels[device]
        for each in running:
            self._change_rate(each, 1.0 / len(running))

    # --- copies --------------------------------------------------------------------------------

    def _start_copies(self) -> None:
        """Start the copies that have engines, in the order in which they became ready."""
        waiting, most = [], self._machine.engines
        for stream, item in self._ready:
            task = item.task
            is_free = (task.source < 0 or self._out[task.source] < most) and (
                task.destination < 0 or self._in[task.destination] < most
            )
            if not is_free:
                waiting.append((stream, item))
                continue
            self._out[task.source] += 1
            self._in[task.destination] += 1
            flow = functools.partial(self._flow, item, stream, self._now)
            self._at(self._now + self._machine.copy, flow)
        self._ready = waiting

    def _flow(self, item: _Queued, stream: _Stream, begin: float) -> None:
        left, ports = float(item.task.bytes), self._ports(item.task)
        self._flows.append(_Running(item, stream, left, begin, self._now, ports))
        self._share_ports()

    def _ports(self, task: Instruction) -> tuple[object, ...]:
        if task.source < 0 or task.destination < 0:
            return (("host", task.source, task.destination),)
        ports: list[object] = [("out", task.source), ("in", task.destination)]
        ends = self._machine.switch_of(task.source), self._machine.switch_of(task.destination)
        if ends[0] != ends[1]:
            ports += [("up", ends[0]), ("down", ends[1])]
        return tuple(ports)

    def _share_ports(self) -> None:
        """Divide the ports fairly: those that are most in demand are divided first."""
        users: dict[object, list[_Running]] = defaultdict(list)
        for flow in self._flows:
            for port in flow.ports:
                users[port].append(flow)
        left = {port: self._capacity(port) for port in users}
        rates: dict[int, float] = {}
        while users:
            port = min(users, key=lambda each: left[each] / len(users[each]))
            share = left[port] / len(users[port])
            for flow in users[port]:
                rates[id(flow)] = share
            fixed = users.pop(port)
            for flow in fixed:
                for other in flow.ports:
                    if other in users:
                        users[other].remove(flow)
                        left[other] -= share
                        if not users[other]:
                            del users[other]
        for flow in self._flows:
            self._change_rate(flow, rates[id(flow)])

    def _capacity(self, port: object) -> float:
        kind = port[0] if isinstance(port, tuple) else port
        machine = self._machine
        rates = {"host": machine.host_port, "up": machine.uplink, "down": machine.uplink}
        return rates.get(str(kind), machine.port)


class _Host:
    """The threads that launch, and the interpreter's lock. See Note [How a machine plays]."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._threads: dict[int, float] = {}
        self._last_issue: defaultdict[_Stream, float] = defaultdict(float)
        self._lock = 0.0
        # When all threads began together.
        self._began = 0.0
        self._phase = ""

    @property
    def clock(self) -> float:
        """The time at which all threads have come so far."""
        return max([self._lock, *self._threads.values()])

    def begin(self, phase: str) -> None:
        """Begin a phase, in which all threads begin together."""
        self._lock, self._phase = self.clock, phase
        self._threads.clear()
        self._began = self._lock

    def wait_until(self, time: float) -> None:
        """Let all threads wait until then."""
        self._lock = max(self.clock, time)
        self._threads.clear()
        self._began = self._lock

    def launch(self, task: Instruction, number: int) -> _Queued:
        """Spend the time that it takes to launch something."""
        stream = self._player.stream((task.device, task.stream))
        if self._phase == "backward":
            begin = self._threads.get(task.thread, self._began)
            if task.kind in ("copy", "record", "wait"):
                begin = max(begin, self._lock, self._last_issue[stream])
                self._lock = begin + task.host
            issued = self._threads[task.thread] = max(begin, self._last_issue[stream]) + task.host
        else:
            issued = self._lock = self._lock + task.host
        if task.kind not in ("allocate", "use", "free"):
            self._last_issue[stream] = issued
        return _Queued(task, issued, self._phase, number)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that meet; they come out in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def without(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return what of some intervals lies in none of others; both are unions."""
    left, position = [], 0
    for begin, end in intervals:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        at = position
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def within(
    intervals: Iterable[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Return the parts of intervals between two times."""
    cut = ((max(begin, one), min(end, other)) for one, other in intervals)
    return [(one, other) for one, other in cut if one < other]
