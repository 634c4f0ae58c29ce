"""What the replicas have in place of the tensors of a module: these themselves, or copies.

Note [What counts as a change]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy is stale when the original was replaced (another object, another memory address), written in
place (version counter), converted or frozen (dtype, shape, ``requires_grad``), or stepped by an
optimizer; an optimizer may write through ``.data``, which bumps no counter, so its step always
counts. All other writes through ``.data`` are found by comparing checksums of the values, where
nothing else has called for a copy. Slots that share the original's memory cannot be stale.

To read a checksum the host waits for the device. It does so for the first few, and when the module
was put from training into evaluation or back, where averaged weights are swapped in. Otherwise the
device compares, and the host reads the answer when it has arrived, at a later forward. A write that
it then learns of was missed by the forwards in between, and a warning says so. Originals on the CPU
are compared at once.

Note [Leaves of the replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where gradients are reduced, each replica has its own leaf for each parameter of the module, with
its own ``.grad``. On the device of the original a leaf shares the original's memory and version
counter, so an optimizer step serves all such replicas at once, and one between forward and backward
raises the error that the bare module raises. Elsewhere, and where the replicas compute in another
dtype, leaves have memory of their own that is written in place when the originals have changed;
that counts as a write to them, too.

Replica 0 has leaves of its own as well. The originals' ``.grad`` is then touched by nothing but the
reduced gradient, and hooks on the originals see that, once.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dataparallel import comm, devices, torch_internals
from dataparallel.comm.checksum import checksum

#: Which slots use the same memory. ``"device"``: all slots on one device, those on the originals'
#: device the originals themselves. ``"first"``: only the first slot on the originals' device uses
#: them, every other slot has memory of its own. ``"none"``: every slot has memory of its own.
Sharing: TypeAlias = Literal["device", "first", "none"]

#: Whether to compare values: not at all, as the device gets to it, or at once.
Looks: TypeAlias = Literal["no", "later", "now"]

# How many comparisons of one list of tensors the host waits for.
_LOOKS_AT_ONCE = 8

_kind = attrgetter("dtype", "shape", "requires_grad")


class Steps:
    """When optimizers have last stepped some tensors; every optimizer tells every such object."""

    _numbers = itertools.count(1)
    _lock = threading.Lock()
    _alive: ClassVar[weakref.WeakSet[Steps]] = weakref.WeakSet()
    #: Optimizers that are taking a step, and the threads that do.
    _under_way: ClassVar[weakref.WeakKeyDictionary[torch.optim.Optimizer, int]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        #: By the id of a tensor, a number that changes with each of its steps.
        self.last: dict[int, int] = {}
        with self._lock:
            self._alive.add(self)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the steps of these tensors, which the caller keeps alive, and of no others."""
        with self._lock:
            self.last = {id(tensor): self.last.get(id(tensor), 0) for tensor in tensors}

    def is_elsewhere(self, tensor: torch.Tensor | None = None) -> bool:
        """Whether another thread is in the middle of a step, of ``tensor`` or of whatever."""
        with self._lock:
            busy = list(self._under_way.items())
        return any(
            tensor is None
            or any(tensor is p for group in one.param_groups for p in group["params"])
            for one, thread in busy
            if thread != threading.get_ident()
        )

    @classmethod
    def begin(cls, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step: what another thread copies in the middle of it is then a change, too."""
        with cls._lock:
            cls._under_way[optimizer] = threading.get_ident()
        cls._count(optimizer)

    @classmethod
    def end(cls, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After a step."""
        cls._count(optimizer)
        with cls._lock:
            cls._under_way.pop(optimizer, None)

    @classmethod
    def _count(cls, optimizer: torch.optim.Optimizer) -> None:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        with cls._lock:
            number = next(cls._numbers)
            for steps in cls._alive:
                steps.last.update(dict.fromkeys(steps.last.keys() & ids, number))


register_optimizer_step_pre_hook(Steps.begin)
register_optimizer_step_post_hook(Steps.end)


class _Place:
    """The copies in one memory, and what the originals were when they were made."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.copies: list[Any] = [None] * count
        self.traces: list[Any] = [None] * count
        self.versions: list[int] = [0] * count

    def stale(self, traces: Sequence[Any]) -> set[int]:
        """Which copies are of other originals than those with these traces."""
        pairs = zip(traces, self.traces, strict=True)
        return {i for i, (now, before) in enumerate(pairs) if before != now}

    def written(self) -> set[int]:
        """Which copies somebody wrote, as batch norm does with the buffers of its replica."""
        pairs = zip(self.copies, self.versions, strict=True)
        return {i for i, (copy, v) in enumerate(pairs) if copy is not None and copy._version != v}

    def drop(self) -> None:
        """Let go of all copies."""
        self.copies = [None] * len(self.copies)
        self.traces = [None] * len(self.traces)

    def keep(self, index: int, copy: torch.Tensor, trace: Any) -> None:
        """A copy that was made or written just now."""
        self.copies[index] = copy
        self.traces[index] = trace
        self.versions[index] = copy._version


class Values:
    """A changing list of tensors on fixed device slots, copied again only where one has changed.

    Args:
        devices: One device per slot.
        sharing: Which slots use the same memory.
        dtype: What floating-point tensors are converted to. Default: as the originals are.
        in_place: Whether copies stay the same objects. Otherwise a new one is made for each
            change, because an earlier graph may still need the old values.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        sharing: Sharing = "device",
        *,
        dtype: torch.dtype | None = None,
        in_place: bool = False,
    ) -> None:
        self._devices = tuple(devices)
        self._sharing = sharing
        self._dtype = dtype
        self._in_place = in_place
        self._originals: list[torch.Tensor] = []
        self._steps = Steps()
        self._places: dict[int, _Place] = {}
        # By the number of slots: by the first in each memory with copies, all slots that use it.
        self._copied: dict[int, dict[int, list[int]]] = {}
        self._marked: tuple[list[int], dict[int, int]] = ([], {})
        # What the last comparison was with: which tensors, and the checksum of their copies.
        self._compared: list[int] = []
        self._reference: torch.Tensor | None = None
        self._looks = 0
        # Answers on their way from the device: which tensors were compared, whether they differ.
        self._answers: deque[tuple[list[int], torch.Tensor, torch.Event]] = deque()

    def update(
        self,
        tensors: Sequence[torch.Tensor],
        num_slots: int,
        *,
        looks: Looks = "later",
        always: bool = False,
    ) -> list[list[torch.Tensor]]:
        """The values of ``tensors``, all on one device, for the first slots.

        Args:
            tensors: The originals.
            num_slots: How many slots take part in this call.
            looks: Whether to look for writes that left no other trace than the values.
            always: Whether to copy even where no change is known.

        Returns:
            Per slot, one tensor for each original, without gradient history: the original itself
            or a copy. See Note [What counts as a change].
        """
        result = list(map(list, [tensors] * num_slots))
        if len(tensors) != len(self._originals) or not all(map(is_, tensors, self._originals)):
            self._originals = list(tensors)
            self._steps.follow(tensors)
            self._places = {}
            self._copied = {}
            self._answers.clear()
        if num_slots not in self._copied:
            self._copied[num_slots] = self._copied_slots(num_slots)
        if copied := self._copied[num_slots]:
            for slot in copied:
                if slot not in self._places:
                    self._places[slot] = self._make_place(self._devices[slot])
            self._fill([self._places[slot] for slot in copied], looks=looks, always=always)
            for slot, users in copied.items():
                for user in users:
                    result[user] = list(self._places[slot].copies)
        return result

    def forget(self) -> None:
        """Copy everything next time; somebody may have written copies without a trace."""
        for place in self._places.values():
            place.traces = [None] * len(place.traces)

    def mark(self) -> None:
        """Begin to look for writes, by whichever slot."""
        self._marked = (self._versions(), dict(self._steps.last))

    def written(self) -> list[torch.Tensor]:
        """The originals that were written since :meth:`mark`, or a copy of which was.

        Not by an optimizer: then another thread trains the module, which is its own affair.
        """
        before, steps = self._marked
        now = self._versions()
        # Another thread may have begun a forward of other parameters meanwhile.
        if now == before or len(now) != len(before):
            return []
        differ = [number for number, version in enumerate(before) if version != now[number]]
        count = len(self._originals)
        originals = [self._originals[i] for i in sorted({number % count for number in differ})]
        return [
            original
            for original in originals
            if self._steps.last.get(id(original)) == steps.get(id(original))
            and not self._steps.is_elsewhere(original)
        ]

    def _versions(self) -> list[int]:
        tensors = list(self._originals)
        for place in self._places.values():
            tensors += place.copies
        return versions(tensors)

    # --- copying ---------------------------------------------------------------------------------

    def _copied_slots(self, num_slots: int) -> dict[int, list[int]]:
        # A single replica may be on several devices itself.
        alone = self._in_place and len(self._devices) == 1 and self._dtype is None
        if alone or not self._originals:
            return {}
        source = self._originals[0].device
        copied: dict[int, list[int]] = {}
        seen: dict[torch.device, int] = {}
        for slot, device in enumerate(self._devices[:num_slots]):
            first = seen.setdefault(device, slot)
            own = device == source and self._sharing != "none" and self._dtype is None
            if own and (first == slot or self._sharing == "device"):
                continue
            copied.setdefault(first if self._sharing == "device" else slot, []).append(slot)
        return copied

    def _make_place(self, device: torch.device) -> _Place:
        place = _Place(device, len(self._originals))
        if self._in_place:
            there = None if len(self._devices) == 1 else device
            with torch.inference_mode(False), torch.no_grad():
                place.copies = [
                    torch.empty_like(original, dtype=self.dtype_of(original), device=there)
                    for original in self._originals
                ]
        return place

    def dtype_of(self, original: torch.Tensor) -> torch.dtype:
        """The dtype of the values of ``original``."""
        converts = self._dtype is not None and original.is_floating_point()
        return self._dtype if converts and self._dtype else original.dtype

    def _fill(self, places: Sequence[_Place], *, looks: Looks, always: bool) -> None:
        everything = set(range(len(self._originals)))
        traces = self._traces()
        if looks != "no":
            self._read_answers()
        stale = [everything if always else place.stale(traces) for place in places]
        if looks != "no":
            stale = [s.union(place.written()) for place, s in zip(places, stale, strict=True)]
            same = sorted(everything.difference(*stale))
            if same and self._differ(places, same, traces, now=looks == "now"):
                stale = [everything for _ in places]
        due = [place for place, indices in zip(places, stale, strict=True) if indices]
        if due:
            self._reference = None
            # Made in inference mode a copy could never take part in training afterwards.
            with torch.inference_mode(False), torch.no_grad():
                self._copy(due, sorted(set().union(*stale)), traces)

    def _traces(self) -> list[Any]:
        steps = self._steps.last
        return [_trace(original, steps[id(original)]) for original in self._originals]

    def _copy(self, places: Sequence[_Place], indices: list[int], traces: Sequence[Any]) -> None:
        originals = [self._originals[i] for i in indices]
        if self._in_place:
            for place in places:
                copies = [place.copies[i] for i in indices]
                torch_internals.foreach_copy_(copies, [o.detach() for o in originals])
                for i, copy in zip(indices, copies, strict=True):
                    place.keep(i, copy, traces[i])
            return
        made = _copies(originals, [place.device for place in places])
        for place, copies in zip(places, made, strict=True):
            for i, copy in zip(indices, copies, strict=True):
                place.keep(i, copy, traces[i])

    # --- writes that leave no trace --------------------------------------------------------------

    def _differ(
        self, places: Sequence[_Place], indices: list[int], traces: Sequence[Any], *, now: bool
    ) -> bool:
        """Whether copies have to be made anew; also where there is no memory to compare them."""
        try:
            return self._look(places[0], indices, traces, now=now)
        except torch.OutOfMemoryError:
            if not self._in_place:
                for place in places:
                    place.drop()
            return True

    def _look(self, place: _Place, indices: list[int], traces: Sequence[Any], *, now: bool) -> bool:
        """Whether originals were written through ``.data`` since ``place`` was filled, if known."""
        originals = [self._originals[i].detach() for i in indices]
        ours, theirs = _comparable(originals), _comparable([place.copies[i] for i in indices])
        home = originals[0].device
        if self._reference is None or indices != self._compared:
            self._compared = indices
            self._reference = checksum(theirs, ours).to(home, non_blocking=True)
        if self._dtype is not None:
            ours = [o.to(copy.dtype) for o, copy in zip(ours, theirs, strict=True)]
        differs = (checksum(ours, theirs) != self._reference).any()
        self._looks += 1
        if now or self._looks <= _LOOKS_AT_ONCE or not devices.is_accelerator(home):
            return bool(differs)
        # What another thread's optimizer writes meanwhile leaves a trace: it is no news.
        is_quiet = not self._steps.is_elsewhere()
        if is_quiet and self._traces() == traces:
            self._answers.append((indices, *devices.to_host_later(differs)))
        return False

    def _read_answers(self) -> None:
        """Forget copies of tensors of which an earlier comparison says that they were written."""
        written: set[int] = set()
        while self._answers and self._answers[0][2].query():
            indices, differs, _ = self._answers.popleft()
            if differs:
                written.update(indices)
        if written:
            self._answers.clear()
            for place in self._places.values():
                place.traces = [None if i in written else t for i, t in enumerate(place.traces)]
            warnings.warn(
                "a parameter or buffer of the wrapped module was written through .data, which "
                "leaves no trace: replicas on other devices computed with the values before in "
                "one forward or more, and have the new ones from now on. Write under "
                "torch.no_grad() without .data, or in module.eval() before module.train(), where "
                "the replicas look at once",
                UserWarning,
                stacklevel=2,
            )


class ReplicaParameters:
    """The leaves of all replicas. See Note [Leaves of the replicas].

    Args:
        originals: Parameters of the module, all on ``devices[0]``.
        devices: One device per replica.
        dtype: What floating-point leaves are converted to. Default: as the originals are.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        devices: Sequence[torch.device],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._originals = list(originals)
        self._dtype = dtype
        self._state = self._state_of_originals()
        #: What the leaves are filled with.
        self.values = Values(devices, dtype=dtype, in_place=True)
        #: Per replica its leaves, in the order of the originals.
        self.rows: list[list[nn.Parameter]] = [
            [_dressed(v.detach(), o) for v, o in zip(replica, self._originals, strict=True)]
            for replica in self.values.update(self._originals, len(devices))
        ]

    def on(self, devices: Sequence[torch.device]) -> ReplicaParameters:
        """Other leaves for the same parameters, on these devices, the first as before."""
        return ReplicaParameters(self._originals, devices, self._dtype)

    def follow(self) -> bool:
        """Let the leaves be what the originals are now: frozen or not, and in the same memory.

        Returns:
            Whether they can be; not if an original has another dtype, shape or device.
        """
        before, now = self._state, self._state_of_originals()
        if now == before:
            return True
        if not all(map(self._can_follow, self.rows[0], self._originals)):
            return False
        values = self.values.update(self._originals, len(self.rows))
        self._state = now
        for leaves, replica in zip(self.rows, values, strict=True):
            for index, original in enumerate(self._originals):
                leaf, value = leaves[index], replica[index]
                if leaf.requires_grad != original.requires_grad:
                    leaf.requires_grad_(original.requires_grad)
                if leaf.data_ptr() != value.data_ptr():
                    # Keeps its version counter, which is the original's.
                    leaf.data = value.data
                given, taken = before[-1].get(index, {}), now[-1].get(index, {})
                for name in given.keys() - taken.keys() & vars(leaf).keys():
                    delattr(leaf, name)
                if given != taken:
                    _take_attributes(leaf, original)
        return True

    def stands_for(self, originals: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters for which the leaves were made."""
        return len(originals) == len(self._originals) and all(map(is_, originals, self._originals))

    def carry(self) -> None:
        """Bring the leaves up to date after changes that have left a trace, and no others."""
        self.values.update(self._originals, len(self.rows), looks="no")

    def _state_of_originals(self) -> tuple[Any, ...]:
        """What changes when an original does, other than its values."""
        originals = self._originals
        return (
            list(map(_kind, originals)),
            list(map(torch.Tensor.data_ptr, originals)),
            list(map(torch.Tensor.stride, originals)),
            {i: _attributes(original) for i, original in enumerate(originals) if vars(original)},
        )

    def _can_follow(self, leaf: torch.Tensor, original: torch.Tensor) -> bool:
        return (
            original.device == leaf.device
            and leaf.dtype == self.values.dtype_of(original)
            and leaf.shape == original.shape
            and leaf.stride() == original.stride()
        )


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written; -1 for those that have no counter."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def mark_as_parameters(aliases: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Make aliases look like what they stand for: parameters, with the attributes of those."""
    marked = []
    for alias, value in zip(aliases, values, strict=True):
        if isinstance(value, nn.Parameter):
            if type(value) is not nn.Parameter:
                alias.__class__ = type(value)
            marked.append(alias)
        for name, attribute in vars(value).items():
            setattr(alias, name, attribute)
    torch_internals.mark_as_parameters(marked)


def _trace(tensor: torch.Tensor, step: int) -> Any:
    """What is equal as long as nothing has left a trace of changing a tensor."""
    # Sparse tensors have no address, and those made in inference mode have no version.
    where = (tensor.data_ptr(), tensor.stride()) if tensor.layout == torch.strided else None
    return (where, versions([tensor]), _kind(tensor), step, _attributes(tensor))


def _attributes(tensor: torch.Tensor) -> dict[str, _Identity]:
    """Attributes of a parameter, such as the scale of a quantized one: they are copied too."""
    return {name: _Identity(value) for name, value in vars(tensor).items()}


class _Identity:
    """Equal to the identity of the same object in the same version; holds the object."""

    __slots__ = ("_value", "_version")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = versions([value]) if isinstance(value, torch.Tensor) else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self._value is other._value
            and self._version == other._version
        )

    __hash__ = None  # type: ignore[assignment]


def _comparable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The strided tensors among some, or in them: those that have a checksum."""
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.layout == torch.sparse_coo:
            parts += [torch_internals.sparse_indices(tensor), torch_internals.sparse_values(tensor)]
        elif tensor.layout == torch.strided and not tensor.is_quantized:
            parts.append(tensor)
    return parts


def _copies(
    originals: Sequence[torch.Tensor], targets: Sequence[torch.device]
) -> list[list[torch.Tensor]]:
    """Copies on each device, of each original's own class and with its attributes."""
    source = originals[0].device
    values = [original.detach() for original in originals]
    others = [device for device in targets if device != source]
    sent = iter(comm.broadcast_coalesced(values, others)) if others else iter(())
    made = [[v.clone() for v in values] if to == source else next(sent) for to in targets]
    return [[_dressed(c, o) for c, o in zip(copies, originals, strict=True)] for copies in made]


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
