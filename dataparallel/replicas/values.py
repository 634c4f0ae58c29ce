"""The tensors of replicas in place of those of a module: these themselves, or copies.

A copy is stale when the original was replaced (another object, another memory address) or written
in place (version counter). So it is when that was converted or frozen (dtype, shape,
``requires_grad``), or stepped by an optimizer. An optimizer may write through ``.data``, which
bumps no counter, so its step always counts. All other writes through ``.data`` are found by
comparing checksums of the values, where nothing else has called for a copy. Slots that share the
original's memory cannot be stale.

To read a checksum the host waits for the device. It does so for the first few, and when the module
was put from training into evaluation or back, where averaged weights are swapped in. Otherwise the
device compares, and the host reads the answer at a later forward, when it has arrived. A write that
it then learns of was missed by the forwards in between, and a warning says so. Originals on the CPU
are compared at once.

Where the host does not wait, a forward compares one part, a sixteenth of a large model, and the
next forward the next part. A GPU with 3 TB/s would need 5 ms to read a frozen model of 14 GB.

Note [Leaves of the replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
If gradients are reduced, each replica has its own leaf for each parameter of the module, with its
own ``.grad``. On the device of the original a leaf shares the original's memory and version
counter, so an optimizer step serves all such replicas at once. A step between forward and backward
raises the error that the bare module raises. Elsewhere, and if the replicas compute in another
dtype, leaves have memory of their own. It is written in place when the originals have changed,
which counts as a write to them, too.

Replica 0 has leaves of its own as well. The originals' ``.grad`` is then touched by nothing but the
reduced gradient, and hooks on the originals see that, once.

Note [Copies on several streams]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The threads of a server call a wrapper one after another, each on streams of its own. Copies are in
order with the streams of the thread that made them. So the next thread's streams wait for those of
the thread before, and copies are recorded on each stream that is new to them.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import threading
import types
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from operator import attrgetter, eq, is_, itemgetter, ne
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dataparallel import devices, torch_internals
from dataparallel.comm.checksum import checksum
from dataparallel.comm.local import copies_of, pack
from dataparallel.comm.routes import MAX_PIECE_BYTES, FlatBroadcast, has_links
from dataparallel.kernels.memory import is_dense
from dataparallel.threads.exclusive import run_once

#: Slots that share memory. ``"device"``: all slots on one device, those on the originals' device
#: the originals themselves. ``"first"``: only the first slot on the originals' device uses them,
#: every other slot has memory of its own. ``"none"``: every slot has memory of its own.
Sharing: TypeAlias = Literal["device", "first", "none"]

# The number of comparisons of one list of tensors for which the host waits.
_LOOKS_AT_ONCE = 8
# Copies that are written in place lie together in order, in at most so many pieces of memory and
# those of large tensors: a forward waits for a piece when it comes to it.
_NUM_STAGES = 32
# The number of parts that are compared in turn, and the bytes from which there is more than one.
_NUM_PARTS, _PART_BYTES = 16, 16 * 2**20

_kind = attrgetter("dtype", "shape", "requires_grad")
_version = attrgetter("_version")
_entries = attrgetter("entries")
_params = itemgetter("params")


#: By the id of a tensor: a number that changes with each step of an optimizer, and the thread that
#: is inside a step, or 0. A tensor that is no more may leave an entry, which does no harm: entries
#: are compared only as long as the tensor lives.
_steps: dict[int, tuple[int, int]] = {}
_numbers = itertools.count(1)


def steps_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor, what changes with each step that an optimizer takes."""
    _watch_optimizers()
    return list(map(_steps.get, map(id, tensors), itertools.repeat((0, 0))))


def _note_step(optimizer: torch.optim.Optimizer, *_: Any, begins: bool = False) -> None:
    # A value that another thread copies in the middle of the step is to be changed after it.
    step = next(_numbers), threading.get_ident() if begins else 0
    parameters = itertools.chain.from_iterable(map(_params, optimizer.param_groups))
    _steps.update(dict.fromkeys(map(id, parameters), step))


@run_once
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(functools.partial(_note_step, begins=True))
    register_optimizer_step_post_hook(_note_step)


#: The originals' past in three columns: themselves, their versions, steps of optimizers.
_Traces: TypeAlias = tuple[list[Any], list[int], list[tuple[int, int]]]


class _Place:
    """The copies in one memory, and what the originals were when they were made."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device, self.copies = device, [None] * count  # type: torch.device, list[Any]
        self._versions: list[int] = []
        # The stream of the last forward that used them, and of all that have.
        self._stream: torch.Stream | None = None
        self._recorded: list[torch.Stream | None] = []
        #: The numbers of those that lie in one piece of memory, in this order, and that piece.
        self.flats: list[tuple[list[int], torch.Tensor]] = []
        self.forget()

    def use(self) -> None:
        """Use copies on the current stream. See Note [Copies on several streams]."""
        stream, before = devices.current_stream(self.device), self._stream
        self._stream = stream
        if before is None or before == stream:
            return
        devices.wait_stream(stream, before)
        if stream not in self._recorded:
            self._recorded.append(stream)
            # Tensors around others have no memory of their own.
            dense = (copy for copy in self.copies if copy.layout == torch.strided)
            there = [copy for copy in dense if not torch_internals.is_wrapper(copy)]
            for copy in {copy.untyped_storage().data_ptr(): copy for copy in there}.values():
                devices.record_stream(copy, stream)

    def forget(self) -> None:
        """Let all copies be stale."""
        self._traces: Any = tuple([None] * len(self.copies) for _ in range(3))

    def stale(self, traces: _Traces) -> set[int]:
        """Return the copies that are of other originals than those with these traces."""
        return set().union(*map(_different, traces, self._traces))

    def written(self) -> set[int]:
        """Return the copies that somebody wrote, as batch norm does with its buffers."""
        now = list(map(_version, self.copies)) if self._versions else []
        return set(_different(now, self._versions))

    def is_laid_out_as(self, traces: _Traces) -> bool:
        """True if its flats have room for originals with these traces, in their order."""
        return bool(self.flats) and traces[0] == self._traces[0]

    def keep(self, indices: list[int], copies: list[Any], traces: _Traces) -> None:
        """Copies that were made or written just now."""
        self._recorded = [self._stream]
        if len(indices) == len(self.copies):
            self.copies, self._traces = copies, tuple(map(list, traces))
            self._versions = list(map(_version, copies))
            return
        for i, copy in zip(indices, copies, strict=True):
            self.copies[i], self._versions[i] = copy, copy._version
            for column, now in enumerate(traces):
                self._traces[column][i] = now[i]

    def find_flats(self) -> None:
        """Find out which copies lie in one piece of memory, now that all are made for good."""
        found: dict[int, list[int]] = {}
        for i, copy in enumerate(self.copies):
            if copy.layout == torch.strided and not copy.is_quantized and is_dense(copy):
                found.setdefault(copy.untyped_storage().data_ptr(), []).append(i)
        for members in found.values():
            plain = {type(self.copies[i].detach()) for i in members} == {torch.Tensor}
            size = sum(self.copies[i].numel() for i in members)
            whole = self.copies[members[0]].untyped_storage().nbytes()
            if plain and size * self.copies[members[0]].element_size() == whole:
                flat = self.copies[members[0]].detach().as_strided((size,), (1,), 0)
                self.flats.append((members, flat))


#: By the first number in a flat, the events after which devices have it and those before.
Arrived: TypeAlias = dict[int, dict[torch.device, torch.Event]]


class _Sending(NamedTuple):
    """New values that are on their way to all copies that lie in flat memory."""

    broadcast: FlatBroadcast
    arrivals: Arrived


class Values:
    """A changing list of tensors on fixed device slots, copied again only if one has changed.

    Args:
        devices: One device per slot.
        sharing: The slots that share memory.
        dtype: The dtype of the copies of floating-point tensors. Default: as the originals are.
        in_place: True if copies stay the same objects. Otherwise a new one is made for each change,
            because an earlier graph may still need the old values.
        states: Those of the tensors, where somebody else takes them before each update. Default:
            the update does.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        sharing: Sharing = "device",
        *,
        dtype: torch.dtype | None = None,
        in_place: bool = False,
        states: States | None = None,
    ) -> None:
        self._devices, self._sharing = tuple(devices), sharing
        self._dtype, self._in_place = dtype, in_place
        self._given = states
        self._originals: list[torch.Tensor] = []
        self._states = States([])
        # Per slot its copies, None if it uses the originals.
        self._places: list[_Place | None] = [None] * len(devices)
        self._used: list[_Place] = []
        # Those of the last update, and the originals then: versions, and steps of optimizers.
        self._current: list[_Place] = []
        self._found: tuple[list[int], list[tuple[int, int]]] = ([], [])
        # The last comparison: the tensors, their parts, and the checksum of the copies of each.
        self._compared: list[int] = []
        self._parts: list[list[int]] = []
        self._references: dict[int, torch.Tensor] = {}
        self._looks = 0
        # On its way from the device: whether what was compared differs.
        self._answer: tuple[torch.Tensor, torch.Event] | None = None
        # The values for which no stream waits yet; see :meth:`settle`.
        self._sending: _Sending | None = None

    def update(
        self,
        tensors: Sequence[torch.Tensor],
        num_slots: int,
        *,
        now: bool = False,
        defers: bool = False,
    ) -> list[list[torch.Tensor]]:
        """Return the values of ``tensors``, all on one device, for the first slots.

        With ``defers`` they may still be on their way until :meth:`settle`.
        """
        for _ in self.updating(tensors, num_slots, now=now):
            # There is nobody else to send something.
            continue
        if self._sending is not None and not defers:
            self.settle()
        return self.given(num_slots)

    def given(self, num_slots: int) -> list[list[torch.Tensor]]:
        """Return the values of the last update for the first slots."""
        slots = self._places[:num_slots]
        return [list(self._originals if place is None else place.copies) for place in slots]

    def updating(
        self, tensors: Sequence[torch.Tensor], num_slots: int, *, now: bool = False
    ) -> Generator[int, None, None]:
        """Update step by step; yields the first number of each flat before that is sent."""
        if self._sending is not None:
            self.settle()
        if not _are_same(tensors, self._originals):
            self._originals = list(tensors)
            self._places = self._make_places() if tensors else [None] * len(self._devices)
            self._used = list(filter(None, dict.fromkeys(self._places)))
            self._states = self._given or States(self._originals if self._used else [])
            self._answer = None
        slots = self._places[:num_slots]
        self._current = places = list(filter(None, dict.fromkeys(slots)))
        for place in places:
            place.use()
        if places:
            self._read_answer()
            traces = self._traces()
            stale = [place.stale(traces) | place.written() for place in places]
            everything = set(range(len(tensors)))
            # That of a slot which an earlier forward did not use is stale altogether.
            latest = min(range(len(places)), key=lambda number: len(stale[number]))
            same = sorted(everything - stale[latest])
            # Quantized tensors have no checksum.
            same = [i for i in same if not tensors[i].is_quantized]
            if same and self._differ(places[latest], same, traces, now=now):
                for place in {*self._used} - {*places}:
                    place.forget()
                stale = [everything] * len(places)
            yield from self._copying(places, stale, traces)
            self._found = traces[1:]
        else:
            self._found = versions(self._originals), steps_of(self._originals)

    def carry(self) -> None:
        """Copy again what changes that have left a trace have made stale, and nothing else."""
        places, traces = self._used, self._traces()
        for _ in self._copying(places, [place.stale(traces) for place in places], traces):
            continue
        self.settle()

    def settle(self) -> None:
        """Let the streams that were current then wait for values that are on their way."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.broadcast.end()

    @property
    def arrivals(self) -> Arrived | None:
        """Return the events of values that are on their way; None if nothing is."""
        return None if self._sending is None else self._sending.arrivals

    def flats_of(self, slot: int) -> list[tuple[list[int], torch.Tensor]]:
        """Return the pieces of memory of a slot that travel whole, each with whose it is."""
        place = self._places[slot]
        return [] if place is None else place.flats

    def forget(self) -> None:
        """Copy everything next time; somebody may have written copies without a trace."""
        for place in self._used:
            place.forget()

    def written(self) -> list[torch.Tensor]:
        """Return the originals that were written since the last update, or a copy of which was."""
        before, steps = self._found
        now = versions(self._originals)
        # Another thread may have begun a forward of other parameters meanwhile.
        if len(now) != len(before):
            return []
        differ = set[int]().union(*map(_Place.written, self._current))
        if now != before:
            differ.update(i for i, version in enumerate(before) if version != now[i])
        if not differ:
            return []
        latest = steps_of(self._originals)
        return [
            self._originals[i]
            for i in sorted(differ)
            # Not what an optimizer wrote, nor what it writes in another thread.
            if latest[i] == steps[i] and not _is_elsewhere(latest[i])
        ]

    # --- copying ---------------------------------------------------------------------------------

    def _make_places(self) -> list[_Place | None]:
        home, slots = self._originals[0].device, self._devices
        uses_originals = self._sharing != "none" and self._dtype is None
        # A single replica may be on several devices itself.
        alone = len(slots) == 1
        places: list[_Place | None] = []
        for i, device in enumerate(slots):
            first = slots.index(device)
            if first < i and self._sharing == "device":
                places.append(places[first])
            elif uses_originals and (alone or (device == home and first == i)):
                places.append(None)
            else:
                places.append(_Place(home if alone else device, len(self._originals)))
        return places

    def _traces(self) -> _Traces:
        """Return the traces of each tensor, which are equal until a change leaves one."""
        originals, states = self._originals, self._states
        entries = states.now() if self._given is None else states.entries
        return entries, versions(originals), steps_of(originals)

    def _copying(
        self, places: Sequence[_Place], stale: Sequence[set[int]], traces: _Traces
    ) -> Iterator[int]:
        indices = sorted(set().union(*stale))
        if not indices:
            return
        if not set(indices).isdisjoint(self._compared):
            self._references.clear()
        due = [place for place, some in zip(places, stale, strict=True) if some]
        originals = [self._originals[i] for i in indices]
        is_there = self._in_place and due[0].copies[indices[0]] is not None
        if is_there:
            made = [[place.copies[i] for i in indices] for place in due]
            left = dict(zip(indices, originals, strict=True))
            ring = list(dict.fromkeys(self._devices))
            self._sending = yield from _writing(due, left, traces, ring)
        else:
            targets = [place.device for place in due]
            # Made in inference mode a copy could never take part in training afterwards.
            with torch.inference_mode(False), torch.no_grad():
                made = _copies(originals, targets, self._dtype, in_order=self._in_place)
        for place, copies in zip(due, made, strict=True):
            place.keep(indices, copies, traces)
            if self._in_place and not is_there and place.device != originals[0].device:
                place.find_flats()

    # --- writes that leave no trace --------------------------------------------------------------

    def _differ(self, place: _Place, indices: list[int], traces: _Traces, *, now: bool) -> bool:
        """True if originals were written through ``.data`` since ``place`` was filled, if known."""
        if self._answer is not None and not now:
            return False
        if indices != self._compared:
            self._compared, self._parts = indices, self._divide(indices)
            self._references.clear()
        home, self._looks = self._originals[0].device, self._looks + 1
        if now or self._looks <= _LOOKS_AT_ONCE or not devices.is_accelerator(home):
            found = [self._part_differs(place, number) for number in range(len(self._parts))]
            return bool(torch.stack(found).any())
        differs = self._part_differs(place, self._looks % len(self._parts))
        # A write by another thread's optimizer leaves a trace: it is no news.
        busy = any(map(_is_elsewhere, steps_of(self._originals)))
        if not busy and self._traces() == traces:
            self._answer = devices.to_host_later(differs)
        return False

    def _divide(self, indices: list[int]) -> list[list[int]]:
        """Divide tensors into parts of about as many bytes, in their order."""
        sizes = [self._originals[i].nbytes for i in indices]
        parts = _divide(sizes, max(_PART_BYTES, -(-sum(sizes) // _NUM_PARTS)))
        return [[indices[k] for k in part] for part in parts]

    def _part_differs(self, place: _Place, number: int) -> torch.Tensor:
        """Return a tensor that is true if originals in a part are not what ``place`` has."""
        part = self._parts[number]
        originals = [self._originals[i].detach() for i in part]
        copies, home = [place.copies[i] for i in part], originals[0].device
        if number not in self._references:
            # The host reads it at once if that is where the originals are.
            later = devices.is_accelerator(home)
            self._references[number] = checksum(copies, originals).to(home, non_blocking=later)
        if self._dtype is not None:
            originals = [o.to(copy.dtype) for o, copy in zip(originals, copies, strict=True)]
        return (checksum(originals, copies) != self._references[number]).any()

    def _read_answer(self) -> None:
        """Forget the copies if an earlier comparison says that an original was written."""
        if self._answer is None or not self._answer[1].query():
            return
        (differs, _), self._answer = self._answer, None
        if differs:
            self.forget()
            warnings.warn(
                "a parameter or buffer of the wrapped module was written through .data, which "
                "leaves no trace: replicas on other devices computed with the values before in "
                "one forward or more, and have the new ones from now on. Write under "
                "torch.no_grad() without .data, or in module.eval() before module.train(), where "
                "the replicas look at once",
                UserWarning,
                stacklevel=2,
            )


class ValuesByHome:
    """The values of tensors that are on several devices, those of each device by themselves.

    Args:
        homes: For each device the numbers of its tensors, and their values.
    """

    def __init__(self, homes: Sequence[tuple[Sequence[int], Values]]) -> None:
        self._homes = homes

    @property
    def arrivals(self) -> Arrived | None:
        """See :attr:`Values.arrivals`."""
        found: Arrived = {}
        for indices, values in self._homes:
            found.update({indices[i]: events for i, events in (values.arrivals or {}).items()})
        return found or None

    def update(
        self,
        tensors: Sequence[torch.Tensor],
        num_slots: int,
        *,
        now: bool = False,
        defers: bool = False,
    ) -> list[list[torch.Tensor]]:
        """Return the values of ``tensors`` for the first slots, as :meth:`Values.update` does.

        They leave the devices in the order of the tensors.
        """
        each = [
            values.updating([tensors[i] for i in indices], num_slots, now=now)
            for indices, values in self._homes
        ]
        numbers = [
            map(some.__getitem__, one) for (some, _), one in zip(self._homes, each, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            for one in each:
                stack.callback(one.close)
            for _ in heapq.merge(*numbers):
                continue
        if not defers:
            self.settle()
        rows: list[list[Any]] = [[None] * len(tensors) for _ in range(num_slots)]
        for indices, values in self._homes:
            for row, own in zip(rows, values.given(num_slots), strict=True):
                for i, value in zip(indices, own, strict=True):
                    row[i] = value
        return rows

    def settle(self) -> None:
        """See :meth:`Values.settle`."""
        for _, values in self._homes:
            values.settle()

    def flats_of(self, slot: int) -> list[tuple[list[int], torch.Tensor]]:
        """See :meth:`Values.flats_of`; in the order of the tensors."""
        found = [
            ([indices[i] for i in members], memory)
            for indices, values in self._homes
            for members, memory in values.flats_of(slot)
        ]
        return sorted(found, key=_first)

    def carry(self) -> None:
        """See :meth:`Values.carry`."""
        for _, values in self._homes:
            values.carry()

    def written(self) -> list[torch.Tensor]:
        """See :meth:`Values.written`."""
        return [tensor for _, values in self._homes for tensor in values.written()]


def _first(flat: tuple[list[int], torch.Tensor]) -> int:
    return flat[0][0]


class ReplicaParameters:
    """The leaves of all replicas. See Note [Leaves of the replicas].

    Args:
        originals: Parameters of the module, on some of the devices.
        devices: One device per replica.
        dtype: The dtype of floating-point leaves. Default: as the originals are.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        devices: Sequence[torch.device],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._originals, self._layouts = list(originals), list(map(_layout, originals))
        #: The number of times that an original was frozen, or came to other memory.
        self.num_changes = 0
        # False while an original is other than its leaves.
        self._is_current = True
        members: dict[torch.device, list[int]] = {}
        for index, original in enumerate(originals):
            members.setdefault(original.device, []).append(index)
        self._states = [States([originals[i] for i in some]) for some in members.values()]
        homes = [
            (some, Values(devices, dtype=dtype, in_place=True, states=states))
            for some, states in zip(members.values(), self._states, strict=True)
        ]
        #: The values that fill the leaves.
        self.values = homes[0][1] if len(homes) == 1 else ValuesByHome(homes)
        #: Per replica its leaves, in the order of the originals.
        self.rows: list[list[nn.Parameter]] = [
            [_dressed(v.detach(), o) for v, o in zip(replica, self._originals, strict=True)]
            for replica in self.values.update(self._originals, len(devices))
        ]

    def stands_for(self, originals: Sequence[torch.Tensor]) -> bool:
        """True if these are the parameters for which the leaves were made."""
        return _are_same(originals, self._originals)

    def follow(self) -> bool:
        """Let the leaves be what the originals are now: frozen or not, and in the same memory."""
        before = list(map(_entries, self._states))
        self._is_current &= list(map(States.now, self._states)) == before
        if self._is_current:
            return True
        if list(map(_layout, self._originals)) != self._layouts:
            return False
        values = self.values.update(self._originals, len(self.rows))
        self.num_changes += 1
        for leaves, replica in zip(self.rows, values, strict=True):
            for leaf, value, original in zip(leaves, replica, self._originals, strict=True):
                leaf.requires_grad_(original.requires_grad)
                if leaf.data_ptr() != value.data_ptr():
                    # Keeps its version counter, which is the original's.
                    leaf.data = value.data
                vars(leaf).clear()
                _take_attributes(leaf, original)
        self._is_current = True
        return True


def _is_elsewhere(step: tuple[int, int]) -> bool:
    """True if another thread is in the middle of a step."""
    return step[1] not in (0, threading.get_ident())


def _different(some: Iterable[Any], others: Iterable[Any]) -> Iterator[int]:
    """Return the indices at which two sequences differ."""
    return itertools.compress(itertools.count(), map(ne, some, others))


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of writes to each tensor; -1 for those that have no counter."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class States:
    """Properties of tensors other than their values; C alone finds out if one has changed."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._take()

    def _take(self) -> None:
        tensors = self._tensors
        try:
            self._addresses: list[Any] = list(map(torch.Tensor.data_ptr, tensors))
            self._strides: list[Any] = list(map(torch.Tensor.stride, tensors))
        except RuntimeError:
            # A sparse tensor has no address, and no checksum: it counts as changed each time.
            dense = [tensor.layout == torch.strided for tensor in tensors]
            pairs = list(zip(tensors, dense, strict=True))
            self._addresses = [t.data_ptr() if is_dense else object() for t, is_dense in pairs]
            self._strides = [t.stride() if is_dense else () for t, is_dense in pairs]
        self._kinds, self._attributes = list(map(_kind, tensors)), any(map(vars, tensors))
        attributes = map(_attributes, tensors) if self._attributes else itertools.repeat(None)
        #: Per tensor what is equal as long as it has not changed.
        self.entries = list(
            zip(self._kinds, self._addresses, self._strides, attributes, strict=False)
        )

    def now(self) -> list[Any]:
        """Return the entries of now; the same list if nothing has changed."""
        tensors = self._tensors
        try:
            # One object at a time: hundreds that live side by side would call the collector.
            is_same = (
                not self._attributes
                and not any(map(vars, tensors))
                and list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
                and all(map(eq, map(torch.Tensor.stride, tensors), self._strides))
                and all(map(eq, map(_kind, tensors), self._kinds))
            )
        except RuntimeError:
            is_same = False
        if not is_same:
            self._take()
        return self.entries


def mark_as_parameters(aliases: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Make aliases look like what they stand for: parameters, with the attributes of those."""
    marked = []
    for alias, value in zip(aliases, values, strict=True):
        if isinstance(value, nn.Parameter):
            if type(value) is not nn.Parameter:
                alias.__class__ = type(value)
            marked.append(alias)
        if attributes := vars(value):
            vars(alias).update(attributes)
    torch_internals.mark_as_parameters(marked)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes of a parameter, such as the scale of a quantized one: they are copied too."""
    return {
        # Equal if it is bound to the same object, whatever that object takes for equal.
        name: (types.MethodType(id, value), isinstance(value, torch.Tensor) and versions([value]))
        for name, value in vars(tensor).items()
    }


def _writing(
    places: Sequence[_Place],
    left: dict[int, torch.Tensor],
    traces: _Traces,
    ring: Sequence[torch.device],
) -> Generator[int, None, _Sending | None]:
    """Write copies anew: those that lie in one piece together, if all of them are due.

    Yields the first number of each piece before that is sent, and returns what is on its way
    between accelerators. Each home sends around the same ring.
    """
    home = next(iter(left.values())).device
    behind = {device: (i - ring.index(home)) % len(ring) for i, device in enumerate(ring)}
    away = [place for place in places if place.is_laid_out_as(traces)]
    away.sort(key=lambda place: behind[place.device])
    sending = None
    if has_links(home, [place.device for place in away]):
        num_bytes = sum(original.nbytes for original in left.values())
        sending = _Sending(FlatBroadcast(home, [place.device for place in away], num_bytes), {})
    rest = dict(left)
    try:
        for number, (members, like) in enumerate(away[0].flats if away else ()):
            if not left.keys() >= set(members):
                continue
            yield members[0]
            with torch.inference_mode(False), torch.no_grad():
                flat = pack([rest.pop(i).detach() for i in members]).to(like.dtype)
                targets = [place.flats[number][1] for place in away]
                if sending is not None:
                    packed = len(members) > 1
                    arrived = sending.broadcast.send(flat, targets, is_packed=packed)
                    sending.arrivals[members[0]] = arrived
                else:
                    for target in targets:
                        target.copy_(flat, non_blocking=True)
            torch.autograd.graph.increment_version([p.copies[i] for p in away for i in members])
        with torch.inference_mode(False), torch.no_grad():
            for place in places:
                some = rest if place in away else left
                if some:
                    copies = [place.copies[i] for i in some]
                    torch_internals.foreach_copy_(copies, [o.detach() for o in some.values()])
    except BaseException:
        if sending is not None:
            sending.broadcast.end()
        raise
    return sending


def _copies(
    originals: Sequence[torch.Tensor],
    targets: Sequence[torch.device],
    dtype: torch.dtype | None,
    *,
    in_order: bool,
) -> list[list[torch.Tensor]]:
    """Copies on each device, of each original's own class and with its attributes.

    With ``in_order`` small ones lie together with those next to them, otherwise with any.
    """
    source = originals[0].device
    others = [device for device in targets if device != source]
    made: list[list[Any]] = [[None] * len(originals) for _ in targets]
    # Trained tensors lie together, since they change together.
    for trained in (True, False):
        indices = [i for i, o in enumerate(originals) if o.requires_grad is trained]
        values = [originals[i] for i in indices]
        if dtype is not None:
            values = [v.to(dtype) if v.is_floating_point() else v for v in values]
        for stage in _stages(values) if in_order else [range(len(values))]:
            some = [values[k] for k in stage]
            sent = iter(copies_of(some, others) if others else ())
            for row, to in zip(made, targets, strict=True):
                copies = [v.detach().clone() for v in some] if to == source else next(sent)
                for k, copy in zip(stage, copies, strict=True):
                    row[indices[k]] = _dressed(copy, originals[indices[k]])
    return made


def _stages(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Divide tensors into stages of about as many bytes, in their order; returns their numbers."""
    limit = max(MAX_PIECE_BYTES, sum(tensor.nbytes for tensor in tensors) // _NUM_STAGES)
    return _divide([tensor.nbytes for tensor in tensors], limit)


def _divide(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide a sequence into parts of about as many bytes; returns the numbers in each."""
    parts: dict[int, list[int]] = {}
    for i, end in enumerate(itertools.accumulate(sizes)):
        parts.setdefault(max(end - 1, 0) // limit, []).append(i)
    return list(parts.values())


def _dressed(value: torch.Tensor, original: torch.Tensor) -> Any:
    """``value`` as ``original`` is: a parameter if that is one, with its attributes."""
    if isinstance(original, nn.Parameter):
        value = torch_internals.make_subclass(type(original), value, original.requires_grad)
    _take_attributes(value, original)
    return value


def _take_attributes(value: torch.Tensor, original: torch.Tensor) -> None:
    for name, attribute in vars(original).items():
        moves = isinstance(attribute, torch.Tensor)
        setattr(value, name, attribute.to(value.device) if moves else attribute)
