"""Broadcast and sum flat tensors between the accelerators of this process, over all their links.

Note [Hubs]
~~~~~~~~~~~
One of N devices is the home. If it sent P bytes to each of the others and received as many, a step
would take as long as its link needs for (N - 1) P. Links between the others would idle. So a flat
tensor is cut into pieces, and each piece has a hub among the other devices:

- In a sum, the terms of a piece go straight to its hub, which adds them and sends the sum home.
- In a broadcast, the home sends a piece to its hub, which sends it on to all others.

Per sum and per broadcast, the home sends and receives P, and so does each other device, or a little
less: 2 P per direction of each link in a step of training. The home is no hub, since it has to
send or receive everything in any case. A piece is copied N times for a sum (its hub has its own
term) and N - 1 times for a broadcast.

Hubs take turns, so that pieces of small tensors go to different devices, too. A sum does not
depend on them: terms are added in the order of the replicas wherever they are (see Note [Order of
a sum] in ``comm/local.py``).

Note [Streams of a route]
~~~~~~~~~~~~~~~~~~~~~~~~~
A route is an ordered pair of devices. It has a stream on either of them, so it waits for no other
route, and computation on either device does not wait for it. torch lets a copy run on the source's
current stream, behind the destination's current stream, which then waits for the copy.

The memory of terms and sums belongs to the copy stream of their device, on which the hub adds. So
a term that is freed serves the next bucket in the order of this stream. The memory that is used
does not grow with how far the host is ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from dataparallel import devices as _devices
from dataparallel.comm.bucket_plan import LOCAL_BUCKET_BYTES
from dataparallel.kernels.memory import wide

#: A smaller piece costs more than it saves: a copy has a fixed cost on the host and on the link.
MIN_PIECE_BYTES = 2**20
#: A larger piece would leave links idle while it is on its first.
MAX_PIECE_BYTES = 25 * 2**20
#: With so many pieces of a broadcast each hub sends about as much as the others.
_PIECES_PER_HUB = 4
#: Pieces begin at multiples of it, as memory of the allocators does.
_ALIGNMENT = 256

#: A function that makes a stream current on its device.
_Switch: TypeAlias = Callable[[torch.Stream], None]

#: The numbers of pieces, which tell their hubs.
_turns = itertools.count()


class _Route:
    """The streams of an ordered pair of devices. See Note [Streams of a route]."""

    def __init__(self, source: torch.device, destination: torch.device) -> None:
        self.leaving, self.entering = torch.Stream(source), torch.Stream(destination)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        ready: torch.Event,
        free: torch.Event,
        switch: _Switch,
    ) -> None:
        """Copy when the source is ready and the target is free.

        Reads of the target wait for ``entering``.
        """
        self.leaving.wait_event(ready)
        self.entering.wait_event(free)
        switch(self.leaving)
        switch(self.entering)
        target.copy_(source, non_blocking=True)
        source.record_stream(self.leaving)


_routes: dict[tuple[torch.device, torch.device], _Route] = {}


def _route(source: torch.device, destination: torch.device) -> _Route:
    key = source, destination
    if key not in _routes:
        # If several threads come here at once, one of them wins.
        _routes.setdefault(key, _Route(source, destination))
    return _routes[key]


def has_idle_links(home: torch.device, others: Collection[torch.device]) -> bool:
    """True if a star around ``home`` would leave links idle between accelerators of one type."""
    places = {home, *others}
    return len(places) > 2 and len({d.type for d in places}) == 1 and _devices.is_accelerator(home)


def local_bucket_bytes(originals: Sequence[torch.Tensor], places: Collection[torch.device]) -> int:
    """Return the bytes of gradients to sum at a time over replicas on some devices.

    Where a bucket is cut into pieces, larger ones need fewer copies; the last one is not to be a
    large part of all, since nothing hides it.
    """
    if not originals or not has_idle_links(originals[0].device, places):
        return LOCAL_BUCKET_BYTES
    sixteenth = sum(original.nbytes for original in originals) // 16
    return min(max(sixteenth, LOCAL_BUCKET_BYTES), 4 * MAX_PIECE_BYTES)


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
    """Flat tensors of one device on their way to several others. See Note [Hubs].

    Args:
        home: Where they are.
        places: Where they go; distinct devices of the home's type.
        num_bytes: The size of all together, which tells how finely they are cut.
    """

    def __init__(self, home: torch.device, places: Sequence[torch.device], num_bytes: int) -> None:
        self._home, self._places = home, list(places)
        self._current = _current_streams((home, *places))
        fine = num_bytes // (_PIECES_PER_HUB * len(places))
        self._piece_bytes = min(max(fine, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        # By hub the bytes that it sends on.
        self._loads = dict.fromkeys(self._places, 0)
        self._used: set[tuple[torch.device, torch.device]] = set()
        # Those over which memory leaves to which others may write afterwards.
        self._exposed: set[tuple[torch.device, torch.device]] = set()

    def send(self, flat: torch.Tensor, targets: Sequence[torch.Tensor], *, is_packed: bool) -> None:
        """Copy into one tensor per place, behind what is queued on the current streams there.

        With ``is_packed`` nobody else has the tensor.
        """
        free = {place: self._current[place].record_event() for place in self._places}
        self._send(flat, targets, free, is_packed)

    def copies(self, flat: torch.Tensor, *, is_packed: bool) -> list[torch.Tensor]:
        """Return copies, one per place, which do not wait for computation there."""
        made, free = [], {}
        with _devices.restored_streams(self._current.values()) as switch:
            for place in self._places:
                stream = _copy_stream(place)
                switch(stream)
                made.append(torch.empty_like(flat, device=place))
                free[place] = stream.record_event()
        self._send(flat, made, free, is_packed)
        for place, copy in zip(self._places, made, strict=True):
            copy.record_stream(self._current[place])
        return made

    def _send(
        self,
        flat: torch.Tensor,
        targets: Sequence[torch.Tensor],
        free: Mapping[torch.device, torch.Event],
        is_packed: bool,
    ) -> None:
        # A copy of a lazy conjugate would make a tensor on the way, on streams of several devices.
        flat = flat.resolve_conj().resolve_neg()
        ready = self._current[self._home].record_event()
        on = dict(zip(self._places, targets, strict=True))
        with _devices.restored_streams(self._current.values()) as switch:
            for piece in _cut(flat, -(-flat.nbytes // self._piece_bytes) or 1):
                hub = min(self._loads, key=self._loads.__getitem__)
                if not is_packed:
                    self._exposed.add((self._home, hub))
                here, there = flat[piece], on[hub][piece]
                self._loads[hub] += here.nbytes
                first = self._through(self._home, hub)
                first.copy(here, there, ready, free[hub], switch)
                has_come = first.entering.record_event()
                for other in self._places:
                    if other != hub:
                        self._exposed.add((hub, other))
                        way = self._through(hub, other)
                        way.copy(there, on[other][piece], has_come, free[other], switch)

    def _through(self, source: torch.device, destination: torch.device) -> _Route:
        self._used.add((source, destination))
        return _route(source, destination)

    def end(self) -> None:
        """Let what is queued from now on wait: it may read copies, and write what was copied."""
        for source, place in self._used:
            self._current[place].wait_stream(_route(source, place).entering)
        for source, place in self._exposed:
            self._current[source].wait_stream(_route(source, place).leaving)


# --- sum -----------------------------------------------------------------------------------------


def sum_flats(flats: Sequence[torch.Tensor], home: torch.device, *, given: bool) -> torch.Tensor:
    """Sum flat tensors of several devices in their order, in new memory on ``home``.

    They are in order with the current streams of their devices, and so is the sum. With ``given``
    nobody else has them any more. See Note [Hubs].
    """
    flats = [flat.resolve_conj().resolve_neg() for flat in flats]
    places = list(dict.fromkeys(flat.device for flat in flats))
    hubs = [place for place in places if place != home]
    current = _current_streams((home, *places))
    now = {device: stream.record_event() for device, stream in current.items()}
    entering = _copy_stream(home)
    with _devices.restored_streams(current.values()) as switch:
        switch(entering)
        total = torch.empty_like(flats[0], device=home)
        free = entering.record_event()
        count = min(len(hubs), max(1, total.nbytes // MIN_PIECE_BYTES))
        pieces = [(hubs[next(_turns) % len(hubs)], piece) for piece in _cut(total, count)]
        for hub, piece in pieces:
            part = _sum_of_piece(flats, piece, hub, now, switch)
            added = _copy_stream(hub).record_event()
            _route(hub, home).copy(part, total[piece], added, free, switch)
    for hub in dict.fromkeys(hub for hub, _ in pieces):
        current[home].wait_stream(_route(hub, home).entering)
        if not given:
            # Somebody may write to the terms, now that they were read.
            for place in places:
                own = place == hub
                reading = _copy_stream(hub) if own else _route(place, hub).leaving
                current[place].wait_stream(reading)
    total.record_stream(current[home])
    return total


def _sum_of_piece(
    flats: Sequence[torch.Tensor],
    piece: slice,
    hub: torch.device,
    ready: Mapping[torch.device, torch.Event],
    switch: _Switch,
) -> torch.Tensor:
    """Sum a piece of each flat tensor on its hub, in the order of the hub's copy stream."""
    adding, parts = _copy_stream(hub), [flat[piece] for flat in flats]
    away = [part for part in parts if part.device != hub]
    switch(adding)
    staging = iter(torch.empty((len(away), len(parts[0])), dtype=parts[0].dtype, device=hub))
    free, terms = adding.record_event(), []
    for part in parts:
        if part.device == hub:
            part.record_stream(adding)
            terms.append(part)
        else:
            terms.append(next(staging))
            _route(part.device, hub).copy(part, terms[-1], ready[part.device], free, switch)
    adding.wait_event(ready[hub])
    for source in {part.device for part in away}:
        adding.wait_stream(_route(source, hub).entering)
    switch(adding)
    first, second, *others = terms
    # In memory of its own, since that of the terms is to serve the next bucket meanwhile.
    total = first.to(type_of_sum(first, len(terms))).add(second)
    for term in others:
        total.add_(term)
    return total.to(first.dtype)


def type_of_sum(term: torch.Tensor, count: int) -> torch.dtype:
    """Return the type in which a sum of ``count`` terms is kept."""
    # A sum of two is rounded once in any case.
    return wide(term.dtype) if count > 2 and term.layout == torch.strided else term.dtype
