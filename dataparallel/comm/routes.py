"""Broadcast and sum flat tensors between the accelerators of this process, over all their links.

Note [Hubs]
~~~~~~~~~~~
One of N devices is the home. If it received P bytes from each of the others and sent as many, a
step would take as long as its link needs for (N - 1) P. Links between the others would idle. So a
flat tensor is cut into pieces, and each piece of a sum has a hub among the other devices. Its terms
go straight to the hub, which adds them and sends the sum home.

Per sum the home receives P, and each other device sends and receives P or a little less. The home
is no hub, since it has to receive everything in any case. A piece is copied N times, since its hub
has its own term.

Where the sums are wanted on several devices, each of these adds its own, and all links are busy.
Those that are larger than a piece are cut, too: one at a time would keep only one port busy.

The hub of a piece is the device through which the least has gone until then, so that small tensors
are spread, too. A sum does not depend on it: terms are added in the order of the replicas wherever
they are (see Note [Order of a sum] in ``comm/local.py``).

Note [Chains]
~~~~~~~~~~~~~
In a broadcast the home sends each piece to the next device, which sends it on to the one after it.
So every device receives P and sends P, but the last one. The last has all of it N - 2 pieces after
the second. Each port has one copy to receive and one to send at a time. So no two copies share a
port, and pieces arrive in the order in which they were sent. With hubs they arrive in any order,
and, simulated on the machine file ``pcie4`` with eight devices, they take a quarter longer.

Note [Streams of a route]
~~~~~~~~~~~~~~~~~~~~~~~~~
A route is an ordered pair of devices. It has a stream on either of them, so it waits for no other
route, and computation on either device does not wait for it. torch lets a copy run on the source's
current stream, behind the destination's current stream, which then waits for the copy.

A hub receives the terms of a piece on a stream, one after another, as it has one port, and adds
them there. It takes two such lanes in turn, since a source may be late. Hubs begin with different
sources.

Note [Memory of sums]
~~~~~~~~~~~~~~~~~~~~~
Memory that is recorded on another stream is free again when the device has come so far. A host that
is a step ahead would need the memory of two steps. So nothing is recorded here. The caller keeps
the terms until their streams wait for the sums (:meth:`SumPlan.settle`). A lane has the memory of
its staging and its sums. It writes a later piece there when the earlier one has been sent home.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from dataparallel import devices as _devices
from dataparallel.comm.bucket_plan import LOCAL_BUCKET_BYTES
from dataparallel.kernels.memory import wide

#: A smaller piece costs more than it saves: a copy has a fixed cost on the host and on the link.
MIN_PIECE_BYTES = 2**20
#: A larger piece would leave links idle while it is on its first.
MAX_PIECE_BYTES = 32 * 2**20
#: The staging memory of a hub holds a bucket, but for its own term.
MAX_BUCKET_BYTES = 100 * 2**20
#: With so many pieces each hub of sums moves about as much as the others.
_PIECES_PER_HUB = 4
#: With so many pieces the last device of a chain is done soon after the first one.
_PIECES_OF_CHAIN = 24
#: Pieces begin at multiples of it, as memory of the allocators does.
_ALIGNMENT = 256

#: By device, events.
Reads: TypeAlias = dict[torch.device, list[torch.Event]]
#: A function that makes a stream current on its device.
_Switch: TypeAlias = Callable[[torch.Stream], None]

#: By the devices that may be hubs of a sum: the bytes that have gone through each of them so far.
_gone_through: defaultdict[tuple[torch.device, ...], Counter[torch.device]] = defaultdict(Counter)


class _Route:
    """The streams of an ordered pair of devices. See Note [Streams of a route]."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self.leaving, self.entering = torch.Stream(source), torch.Stream(destination)
        # The last events for which they wait: pieces of one tensor share them.
        self._ready: torch.Event | None = None
        self._free: torch.Event | None = None

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        ready: torch.Event,
        switch: _Switch,
        *,
        free: torch.Event | None = None,
        onto: torch.Stream | None = None,
    ) -> None:
        """Copy when the source is ready and the target is free.

        Reads of the target wait for ``onto``, or without it for ``entering``. The source stays
        until ``leaving`` has passed.
        """
        if self._ready is not ready:
            self.leaving.wait_event(ready)
            self._ready = ready
        if free is not None and self._free is not free:
            self.entering.wait_event(free)
            self._free = free
        switch(self.leaving)
        switch(onto or self.entering)
        target.copy_(source, non_blocking=True)


_routes: dict[tuple[torch.device, torch.device], _Route] = {}


def _route(source: torch.device, destination: torch.device) -> _Route:
    key = source, destination
    if key not in _routes:
        # If several threads come here at once, one of them wins.
        _routes.setdefault(key, _Route(source, destination))
    return _routes[key]


def has_links(home: torch.device, others: Collection[torch.device]) -> bool:
    """True if these are several accelerators of one type."""
    places = {home, *others}
    return len(places) > 1 and len({d.type for d in places}) == 1 and _devices.is_accelerator(home)


def has_idle_links(home: torch.device, others: Collection[torch.device]) -> bool:
    """True if a star around ``home`` would leave links idle between accelerators of one type."""
    return has_links(home, others) and len({home, *others}) > 2


def local_bucket_bytes(originals: Sequence[torch.Tensor], places: Collection[torch.device]) -> int:
    """Return the bytes of gradients to sum at a time over replicas on some devices.

    Over links, larger buckets need fewer copies; the last one is not to be a large part of all,
    since nothing hides it. With originals on several devices a bucket of each fills at a time, and
    all of them are to be a small part of all gradients.
    """
    if not originals or not has_links(originals[0].device, places):
        return LOCAL_BUCKET_BYTES
    num_bytes = sum(original.nbytes for original in originals)
    num_homes = len({original.device for original in originals})
    if num_homes > 1:
        # Half a piece, so that a bucket is hardly ever cut.
        most = MAX_BUCKET_BYTES // max(len(set(places)) - 1, 1)
        return min(max(num_bytes // (32 * num_homes), MIN_PIECE_BYTES // 2), most // 2)
    return min(max(num_bytes // 16, LOCAL_BUCKET_BYTES), MAX_BUCKET_BYTES)


class SumPlan:
    """The way of sums over links: how large their pieces are, and who adds them. See Note [Hubs].

    Args:
        num_bytes: The size of all sums.
        homes: The devices of the sums.
        places: The devices of the terms, and of the sums.
        at_once: True if they are made in one call, so that each hub gets a piece of all.
    """

    def __init__(
        self,
        num_bytes: int,
        homes: Collection[torch.device],
        places: Collection[torch.device],
        *,
        at_once: bool = False,
    ) -> None:
        self._places = {*homes, *places}
        #: True if each home adds its sums itself, but for large ones.
        self.is_direct = len(set(homes)) > 1
        num_others = max(len(self._places) - 1, 1)
        self._most = MAX_BUCKET_BYTES // num_others
        fine = max(num_bytes // (_PIECES_PER_HUB * num_others), MIN_PIECE_BYTES)
        part = max(-(-num_bytes // num_others), MIN_PIECE_BYTES)
        #: The size of the pieces in which hubs add.
        self.piece_bytes = part if at_once else min(fine, self._most)

    def hubs_to(self, home: torch.device) -> list[torch.device]:
        """Return the devices that may add up what is to be on ``home``."""
        if not self.is_direct:
            return _hubs(home, self._places)
        # With one other device there is nothing to share.
        return [home, *(self._places - {home})] if len(self._places) > 2 else [home]

    def pieces(
        self, total: torch.Tensor, home: torch.device
    ) -> Iterator[tuple[slice, torch.device]]:
        """Yield the pieces of a sum, each with its hub."""
        hubs = self.hubs_to(home)
        limit = self.piece_bytes if len(hubs) > 1 else self._most
        if self.is_direct and total.nbytes <= limit:
            hubs = [home]
        loads = _gone_through[tuple(hubs)]
        for piece in _cut(total, -(-total.nbytes // max(limit, MIN_PIECE_BYTES)) or 1):
            hub = min(hubs, key=loads.__getitem__)
            loads[hub] += total[piece].nbytes
            yield piece, hub

    def settle(self, streams: Iterable[torch.Stream], home: torch.device) -> None:
        """Let streams of some devices wait until sums have read and written what is there."""
        _settle(streams, home, self.hubs_to(home))


class _Lane:
    """A stream on which a hub receives terms and adds them. See Note [Memory of sums]."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        # Sums on their way home, and when they have left.
        self._sent: deque[tuple[torch.Tensor, torch.Event]] = deque()

    def keep(self, part: torch.Tensor, left: torch.Event) -> None:
        """Keep a sum until it has left; what comes may be written over the one before it."""
        self._sent.append((part, left))
        self.release(1)

    def release(self, number: int = 0) -> None:
        """Let the lane wait for all sums but the last ones, and give their memory back."""
        # Several threads may be here.
        with contextlib.suppress(IndexError):
            while len(self._sent) > number:
                part, left = self._sent.popleft()
                self.stream.wait_event(left)
                del part


class _Lanes:
    """The lanes of a hub, which takes them in turn."""

    def __init__(self, device: torch.device) -> None:
        self.all = [_Lane(device), _Lane(device)]
        self._turns = itertools.count()

    def take(self) -> _Lane:
        """Return that of the next piece."""
        return self.all[next(self._turns) % len(self.all)]


_lanes: dict[torch.device, _Lanes] = {}


def _lanes_of(hub: torch.device) -> _Lanes:
    if hub not in _lanes:
        _lanes.setdefault(hub, _Lanes(hub))
    return _lanes[hub]


def _cut(flat: torch.Tensor, count: int) -> list[slice]:
    """Cut a flat tensor into at most ``count`` pieces of nearly equal size."""
    size, unit = flat.numel(), max(1, _ALIGNMENT // flat.element_size())
    length = max(1, -(-size // (count * unit))) * unit
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


def _copy_stream(device: torch.device) -> torch.Stream:
    stream = _devices.copy_stream(device)
    assert stream is not None
    return stream


def _current_streams(places: Iterable[torch.device]) -> dict[torch.device, torch.Stream]:
    return {stream.device: stream for stream in _devices.current_streams(set(places))}


# --- broadcast -----------------------------------------------------------------------------------


class FlatBroadcast:
    """Flat tensors of one device on their way to several others. See Note [Chains].

    Args:
        home: Where they are.
        places: Where they go; distinct devices of the home's type.
        num_bytes: The size of all together, which tells how finely they are cut.
    """

    def __init__(self, home: torch.device, places: Sequence[torch.device], num_bytes: int) -> None:
        self._home, self._places = home, list(places)
        self._current = _current_streams((home, *places))
        # Copies wait for the work that was queued on the current streams before the first.
        self._free: dict[torch.device, torch.Event] = {}
        # Nobody waits for a piece if there is nobody to send it on.
        # Each device costs the host another copy.
        fine = max(num_bytes // _PIECES_OF_CHAIN, 4 * MIN_PIECE_BYTES)
        self._piece_bytes = min(fine, MAX_PIECE_BYTES) if len(places) > 1 else num_bytes
        #: True if memory leaves home to which others may write afterwards.
        self._is_exposed = False

    def send(
        self, flat: torch.Tensor, targets: Sequence[torch.Tensor], *, is_packed: bool
    ) -> dict[torch.device, torch.Event]:
        """Copy into one tensor per place, behind what was queued there before the first one.

        With ``is_packed`` nobody else has the tensor. Returns for each place the event after which
        it has everything that was sent until now.
        """
        if not self._free:
            self._free = {p: _devices.record_event(self._current[p]) for p in self._places}
        return self._send(flat, targets, self._free, is_packed)

    def copies(self, flat: torch.Tensor, *, is_packed: bool) -> list[torch.Tensor]:
        """Return copies, one per place, which do not wait for computation there."""
        made, free = [], {}
        with _devices.restored_streams(self._current.values()) as switch:
            for place in self._places:
                stream = _copy_stream(place)
                switch(stream)
                made.append(torch.empty_like(flat, device=place))
                free[place] = _devices.record_event(stream)
        try:
            self._send(flat, made, free, is_packed)
        except BaseException:
            # Copies under way read and write memory that nobody will have.
            for source, place in self._routes():
                _copy_stream(place).wait_stream(_route(source, place).entering)
                _copy_stream(source).wait_stream(_route(source, place).leaving)
            raise
        for place, copy in zip(self._places, made, strict=True):
            copy.record_stream(self._current[place])
        return made

    def _send(
        self,
        flat: torch.Tensor,
        targets: Sequence[torch.Tensor],
        free: Mapping[torch.device, torch.Event],
        is_packed: bool,
    ) -> dict[torch.device, torch.Event]:
        """Copy when targets are free; returns for each place the event after which it has all."""
        # A copy of a lazy conjugate would make a tensor on the way, on streams of several devices.
        flat = flat.resolve_conj().resolve_neg()
        self._is_exposed |= not is_packed
        ready = _devices.record_event(self._current[self._home])
        has_come: dict[torch.device, torch.Event] = {}
        with _devices.restored_streams(self._current.values()) as switch:
            for piece in _cut(flat, -(-flat.nbytes // self._piece_bytes) or 1):
                here, event = flat[piece], ready
                for (source, place), target in zip(self._routes(), targets, strict=True):
                    way, there = _route(source, place), target[piece]
                    way.copy(here, there, event, switch, free=free[place])
                    if source == self._home:
                        here.record_stream(way.leaving)
                    # It stays until the end, for which its device waits.
                    here, event = there, _devices.record_event(way.entering)
                    has_come[place] = event
        return has_come

    def _routes(self) -> Iterable[tuple[torch.device, torch.device]]:
        return itertools.pairwise((self._home, *self._places))

    def end(self) -> None:
        """Let what is queued from now on wait: it may read copies, and write what was copied."""
        for source, place in self._routes():
            self._current[place].wait_stream(_route(source, place).entering)
            if source != self._home or self._is_exposed:
                self._current[source].wait_stream(_route(source, place).leaving)


# --- sum -----------------------------------------------------------------------------------------


def _hubs(home: torch.device, places: Iterable[torch.device]) -> list[torch.device]:
    others = [place for place in dict.fromkeys(places) if place != home]
    return others if has_idle_links(home, others) else [home]


def sum_flats(
    rows: Sequence[Sequence[torch.Tensor]],
    home: torch.device,
    *,
    ready: Sequence[torch.Event] = (),
    into: Sequence[torch.Tensor] = (),
    plan: SumPlan | None = None,
    reads: Reads | None = None,
) -> list[torch.Tensor]:
    """Sum flat tensors over several devices in replica order, on ``home``. See Note [Hubs].

    A row for each replica has one tensor per sum, which the events in ``ready`` follow, and the
    caller keeps it until :meth:`SumPlan.settle`. Default: they follow what is queued on the current
    streams, which wait until all was read. ``into`` are terms of ``home`` over which the sums are
    written. Default: new memory. ``plan`` is for sums in many calls; default: all are made here.
    ``reads`` gets by device the events after which its terms were used. The sums are in order with
    the current stream of ``home``.
    """
    rows = [[flat.resolve_conj().resolve_neg() for flat in row] for row in rows]
    places, waits = [row[0].device for row in rows], not ready
    if plan is None:
        num_bytes = sum(flat.nbytes for flat in rows[0])
        plan = SumPlan(num_bytes, [home], places, at_once=True)
    hubs, current = plan.hubs_to(home), _current_streams((home, *places))
    totals = list(into) or [torch.empty_like(flat, device=home) for flat in rows[0]]
    now = {place: _devices.record_event(current[place]) for place in current if waits or not into}
    ready, free = ready or [now[place] for place in places], now.get(home)
    # By device the streams that use its terms.
    used: defaultdict[torch.device, set[torch.Stream]] = defaultdict(set)
    try:
        with _devices.restored_streams(current.values()) as switch:
            for total, *column in zip(totals, *rows, strict=True):
                for piece, hub in plan.pieces(total, home):
                    target, lane = total[piece], _lanes_of(hub).take()
                    parts = [flat[piece] for flat in column]
                    used[hub].add(lane.stream)
                    if hub == home:
                        if free is not None:
                            lane.stream.wait_event(free)
                        _sum_of_parts(parts, lane.stream, ready, switch, target)
                        continue
                    part, back = _sum_of_parts(parts, lane.stream, ready, switch), _route(hub, home)
                    back.copy(part, target, _devices.record_event(lane.stream), switch, free=free)
                    lane.keep(part, _devices.record_event(back.leaving))
    except BaseException:
        # Memory that copies are still to read or write is not to be used again before.
        _settle(current.values(), home, hubs)
        raise
    if reads is not None:
        _note_reads(reads, used, home, places)
    if waits:
        _settle(current.values(), home, hubs)
    else:
        _wait_for_arrival(current[home], hubs)
    return totals


def _note_reads(
    reads: Reads,
    used: Mapping[torch.device, set[torch.Stream]],
    home: torch.device,
    places: Collection[torch.device],
) -> None:
    """Add events of the streams that use terms: lanes of hubs, and routes to and from hubs."""
    streams = {place: set(used.get(place, ())) for place in places}
    for hub in used:
        for place in streams.keys() - {hub}:
            streams[place].add(_route(place, hub).leaving)
        if hub != home:
            streams.setdefault(home, set()).add(_route(hub, home).entering)
    for place, some in streams.items():
        reads.setdefault(place, []).extend(map(_devices.record_event, some))


def _settle(
    streams: Iterable[torch.Stream], home: torch.device, hubs: Collection[torch.device]
) -> None:
    """Let streams of some devices wait until sums have read and written what is there."""
    for stream in streams:
        place = stream.device
        for hub in hubs:
            if hub != place:
                stream.wait_stream(_route(place, hub).leaving)
        if place in hubs:
            for lane in _lanes_of(place).all:
                lane.release()
                stream.wait_stream(lane.stream)
        if place == home:
            _wait_for_arrival(stream, hubs)


def _wait_for_arrival(stream: torch.Stream, hubs: Collection[torch.device]) -> None:
    """Let a stream of the home wait for sums."""
    for hub in hubs:
        if hub != stream.device:
            stream.wait_stream(_route(hub, stream.device).entering)
            continue
        for lane in _lanes_of(hub).all:
            stream.wait_stream(lane.stream)


def _sum_of_parts(
    parts: Sequence[torch.Tensor],
    lane: torch.Stream,
    ready: Sequence[torch.Event],
    switch: _Switch,
    target: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum tensors on the device of a lane, in its order; into ``target`` if there is one."""
    hub, terms = lane.device, list(parts)
    away = [i for i, part in enumerate(parts) if part.device != hub]
    switch(lane)
    staging = torch.empty((len(away), len(parts[0])), dtype=parts[0].dtype, device=hub)
    # Hubs that begin at the same time receive from different devices.
    first = next((k for k, i in enumerate(away) if parts[i].device.index > hub.index), 0)
    for k in (*range(first, len(away)), *range(first)):
        i = away[k]
        _route(parts[i].device, hub).copy(parts[i], staging[k], ready[i], switch, onto=lane)
        terms[i] = staging[k]
    for i, part in enumerate(parts):
        if part.device == hub:
            lane.wait_event(ready[i])
    if target is not None:
        # Terms over which the sum is written, but not at first.
        over = [i for i in range(2, len(terms)) if terms[i].data_ptr() == target.data_ptr()]
        terms = [term.clone() if i in over else term for i, term in enumerate(terms)]
    dtype = terms[0].dtype
    wider = type_of_sum(terms[0], len(terms))
    # In memory of its own, since that of the terms is to serve a later piece meanwhile.
    out = target if wider == dtype else None
    total = torch.add(terms[0].to(wider), terms[1], out=out)
    for term in terms[2:]:
        total.add_(term)
    if target is None or total is target:
        return total.to(dtype)
    return target.copy_(total)


def type_of_sum(term: torch.Tensor, count: int) -> torch.dtype:
    """Return the type in which a sum of ``count`` terms is kept."""
    # A sum of two is rounded once in any case.
    return wide(term.dtype) if count > 2 and term.layout == torch.strided else term.dtype
