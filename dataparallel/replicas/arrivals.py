"""The waits of a forward for new values of parameters, which are on their way to the replicas.

Note [Waits at the first use]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After a step of an optimizer the values travel to the other devices in the order of the parameters,
a flat at a time. A clone keeps its leaves in a :class:`LeafTable`. Whoever looks up a leaf there
has the current stream wait for its flat. So a replica computes with the first layers while values
of the last ones are on their way. When the replicas have run, the streams of the forward wait for
everything.

This is right only if nobody gets at a leaf in another way. So the references to each leaf are
counted before a forward, weak ones and those of C++, too, and the tensors in the memory of each
flat. Only the holders that the package knows may be there. Others have kept a leaf or a view of it:
``nn.LSTM`` keeps a list, a function its closure. For such a flat the forward waits at its start.

A module's own stream may wait for that of the forward before a leaf is looked up, and use it after
that. So the first forward of each kind is watched: in training or not, with gradients or without.
If a leaf was used or looked up on another stream, every later forward waits at its start. So it
does once something was compiled, since compilers read tables in their own way.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import eq
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from dataparallel import devices, torch_internals
from dataparallel.replicas.values import Arrived, ReplicaParameters


class Gate:
    """The waits of one replica. See Note [Waits at the first use].

    Args:
        device: Where it is.
        row: Its leaves, which no module has had yet.
        flats: The numbers of the leaves in each flat, and its memory.
    """

    def __init__(
        self,
        device: torch.device,
        row: Sequence[nn.Parameter],
        flats: Sequence[tuple[Sequence[int], torch.Tensor]],
    ) -> None:
        self._device, self._current = device, devices.stream_reader(device)
        self._indices = [i for members, _ in flats for i in members]
        self._leaves, self._sizes = [row[i] for i in self._indices], [len(m) for m, _ in flats]
        self._firsts = [members[0] for members, _ in flats]
        address = torch_internals.address_of_storage
        #: By flat, the address of its storage.
        self.addresses = [address(memory.untyped_storage()) for _, memory in flats]
        #: By the id of a leaf, the place of its flat in the order in which flats arrive.
        self.due: dict[int, int] = {}
        #: True if a leaf was looked up on another stream than the forward's.
        self.has_been_passed_aside = False
        trained = (x for x in self._leaves if x.requires_grad and not x.is_inference())
        # They are there while a forward has gradients, and refer to leaves, too.
        with torch.inference_mode(False):
            nodes = [get_gradient_edge(leaf).node for leaf in trained]
        self._own = self._expected = self._count()
        del nodes

    def _count(self) -> tuple[list[int], ...]:
        """Count references to leaves: of Python, weak ones, of C++; and those to their memory."""
        leaves = self._leaves
        return (
            list(map(sys.getrefcount, leaves)),
            list(map(weakref.getweakrefcount, leaves)),
            list(map(torch_internals.uses_of_tensor, leaves)),
            list(map(torch_internals.uses_of_storage, self.addresses)),
        )

    def expect(self, held: Sequence[int]) -> None:
        """Expect so many references of clones to the leaf of each parameter."""
        own = [count + held[i] for count, i in zip(self._own[0], self._indices, strict=True)]
        self._expected = own, *self._own[1:]

    def _are_ours(self) -> list[bool]:
        """For each flat, true if nobody but the package refers to its leaves or their memory."""
        found = self._count()
        if found == self._expected:
            return [True] * len(self._sizes)
        pairs = zip(found, self._expected, strict=True)
        *by_leaf, memory = (list(map(eq, *pair)) for pair in pairs)
        each = iter(map(all, zip(*by_leaf, strict=True)))
        alone = [all(list(itertools.islice(each, size))) for size in self._sizes]
        return [one and other for one, other in zip(alone, memory, strict=True)]

    def table(self, leaves: Any) -> LeafTable:
        """Return a table of the parameters of a module, which waits here."""
        return LeafTable(leaves, self)

    def close(self, arrivals: Arrived) -> None:
        """Have those who look up leaves wait; the current stream is that of the forward."""
        self._stream, self._events = self._current(), list[torch.Event]()
        # The forward's stream waits for the flats before this place, and some others for all.
        self._next, self._others = 0, list[torch.Stream]()
        due, leaves = dict[int, int](), map(id, self._leaves)
        flats = zip(self._firsts, self._sizes, self._are_ours(), strict=True)
        for first, size, is_ours in flats:
            some = list(itertools.islice(leaves, size))
            event = arrivals.get(first, {}).get(self._device)
            if event is None:
                continue
            if is_ours:
                due.update(dict.fromkeys(some, len(self._events)))
            else:
                self._stream.wait_event(event)
            self._events.append(event)
        self.due = due

    def open(self) -> None:
        """Let everybody pass."""
        self.due = {}

    def admit(self, leaf: Any) -> None:
        """Have the current stream wait for the values of a leaf."""
        place = self.due.get(id(leaf))
        if place is None:
            return
        stream = self._current()
        if stream != self._stream:
            self.has_been_passed_aside = True
            if stream not in self._others:
                stream.wait_event(self._events[-1])
                self._others.append(stream)
        if place >= self._next:
            self._stream.wait_event(self._events[place])
            # Not before: another thread may come for the same leaf.
            self._next = place + 1


def _waiting(name: str, *, of_copy: bool = True) -> Any:
    """Return a method of :class:`dict` that waits for all values first."""

    def method(table: LeafTable, *args: Any) -> Any:
        plain = table.copy()
        return getattr(dict, name)(plain if of_copy else table, *args)

    return method


class LeafTable(dict[str, Any]):
    """The parameters of a module of a clone; a stream waits for those that are looked up on it.

    Functions of :class:`dict` itself, as ``dict.values(table)``, wait for nothing.
    """

    def __init__(self, leaves: Any, gate: Gate) -> None:
        super().__init__(leaves)
        self._gate = gate

    def __getitem__(self, name: str) -> Any:
        leaf = dict.__getitem__(self, name)
        if self._gate.due:
            self._gate.admit(leaf)
        return leaf

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def __iter__(self) -> Iterator[str]:
        # C copies the values of a dict without an iterator of its own, and here looks them up.
        return dict.__iter__(self)

    def copy(self) -> dict[str, Any]:
        for leaf in dict.values(self):
            self._gate.admit(leaf)
        return dict.copy(self)

    # Not views of this one, which somebody may keep.
    values, items = _waiting("values"), _waiting("items")
    __eq__, __ne__, __repr__ = _waiting("__eq__"), _waiting("__ne__"), _waiting("__repr__")
    pop, popitem = _waiting("pop", of_copy=False), _waiting("popitem", of_copy=False)
    setdefault = _waiting("setdefault", of_copy=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class Arrivals:
    """The waits of all replicas. See Note [Waits at the first use].

    Args:
        leaves: The parameters of the replicas, which no module has had yet.
        slots: The device of each replica.
    """

    def __init__(self, leaves: ReplicaParameters, slots: Sequence[torch.device]) -> None:
        self._values = leaves.values
        #: By replica its gate, where values come in flats.
        self.gates = {
            replica: Gate(device, leaves.rows[replica], flats)
            for replica, device in enumerate(slots)
            if (flats := self._values.flats_of(replica))
        }
        self._places = {slots[replica] for replica in self.gates}
        self._kinds: set[Hashable] = set()
        self._is_aside = False

    def begin(self, kind: Hashable) -> None:
        """Have streams wait for values that are on their way: now, or where a leaf is looked up."""
        arrivals, gates = self._values.arrivals, self.gates.values()
        self._is_aside |= any(gate.has_been_passed_aside for gate in gates)
        if self._is_aside or kind not in self._kinds:
            self._values.settle()
        elif arrivals is not None:
            for gate in gates:
                gate.close(arrivals)

    def end(self) -> None:
        """Have the streams of the forward wait for everything that is on its way."""
        self._values.settle()
        for gate in self.gates.values():
            gate.open()

    def watching(self, kind: Hashable) -> AbstractContextManager[None]:
        """Return a context in which replicas run: it watches the first forward of a kind."""
        if not self.gates or self._is_aside or kind in self._kinds:
            return contextlib.nullcontext()
        return self._watching(kind)

    @contextlib.contextmanager
    def _watching(self, kind: Hashable) -> Iterator[None]:
        addresses = itertools.chain(*(gate.addresses for gate in self.gates.values()))
        watch = _Watch(self._places, set(addresses))
        with torch_internals.dispatch_mode(watch):
            yield
        self._is_aside |= watch.has_seen
        self._kinds.add(kind)


class _Watch:
    """A dispatch mode that sees whether leaves are used on other streams than the current ones."""

    supports_higher_order_operators = True

    def __init__(self, places: set[torch.device], addresses: set[int]) -> None:
        readers = list(map(devices.stream_reader, places))
        self._streams, self._addresses = [(read, read()) for read in readers], addresses
        self.has_seen = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(read() != stream for read, stream in self._streams):
            given = torch_internals.tree_leaves((args, kwargs))
            self.has_seen |= any(map(self._is_leaf, given))
        return function(*args, **(kwargs or {}))

    def _is_leaf(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        try:
            address = torch_internals.address_of_storage(value.untyped_storage())
        except (NotImplementedError, RuntimeError):
            # It has no memory of its own, and may stand for anything.
            return True
        return address in self._addresses
