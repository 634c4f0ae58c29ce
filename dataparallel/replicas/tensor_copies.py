"""Copies of tensors on the device slots, made anew only when an original has changed.

Note [What counts as a change]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy is stale when the original was replaced (another object, another memory address), written in
place (version counter), converted or frozen (dtype, shape, ``requires_grad``), or stepped by an
optimizer; an optimizer may write through ``.data``, which bumps no counter, so its step always
counts. All other writes through ``.data`` are found by comparing checksums of the values. That
reads every original once, so it is done only for slots on other devices than the originals, and
only when nothing else has called for a copy. Slots on the originals' device share the memory and
cannot be stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dataparallel import comm, torch_internals
from dataparallel.comm.checksum import checksum
from dataparallel.graph.edges import plan_buckets

#: Which slots use the same memory. ``"device"``: all slots on one device, those on the originals'
#: device the originals themselves. ``"first"``: only the first slot on the originals' device uses
#: them, every other slot has memory of its own. ``"none"``: every slot has memory of its own.
Sharing: TypeAlias = Literal["device", "first", "none"]

_Signature: TypeAlias = tuple[Any, ...]

_steps = itertools.count(1)
_steps_taken = 0
_last_step_of: dict[int, int] = {}
# Parameters that an optimizer is writing just now, in some thread.
_being_stepped: set[int] = set()


def _begin_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        _being_stepped.update(map(id, group["params"]))
    _count_step(optimizer)


def _end_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _count_step(optimizer)
    for group in optimizer.param_groups:
        _being_stepped.difference_update(map(id, group["params"]))


def _count_step(optimizer: torch.optim.Optimizer) -> None:
    global _steps_taken
    # Several threads may count at the same time, and no number may come twice.
    _steps_taken = number = next(_steps)
    for group in optimizer.param_groups:
        _last_step_of.update(dict.fromkeys(map(id, group["params"]), number))


# Before, too: what another thread copies in the middle of a step is then a change after it.
register_optimizer_step_pre_hook(_begin_step)
register_optimizer_step_post_hook(_end_step)


def steps_taken() -> int:
    """A number that changes with each step of any optimizer."""
    return _steps_taken


def is_being_stepped(tensor: torch.Tensor) -> bool:
    """Whether an optimizer step that has ``tensor`` among its parameters has begun and not ended.

    After a step that raised it stays so until the next one ends.
    """
    return id(tensor) in _being_stepped


def last_step_of(tensor: torch.Tensor) -> int | None:
    """A number that changes with each optimizer step that has ``tensor`` among its parameters."""
    return _last_step_of.get(id(tensor))


class _Bucket:
    """Some originals that are copied together, and the copies that were made of them."""

    def __init__(self, originals: list[torch.Tensor], signature: _Signature, places: int) -> None:
        # Held so that no other tensor can come to have the identity of one of them.
        self.originals = originals
        self.signature = signature
        self.copies: list[list[torch.Tensor] | None] = [None] * places
        # Versions of the copies after copying; None where the copy is the original itself.
        self.versions: list[list[int] | None] = [None] * places
        # Taken from a copy the first time that it is needed, not from the original at copying
        # time: training then never pays for it, since each forward follows an optimizer step.
        self.checksum: torch.Tensor | None = None


class TensorCopies:
    """Copies of a changing list of tensors on fixed device slots.

    Example::

        copies = TensorCopies(devices)
        per_slot = copies.update(list(module.parameters()), num_slots=2)

    Args:
        devices: One device per slot.
        sharing: Which slots use the same memory. Default: those on one device.
    """

    def __init__(self, devices: Sequence[torch.device], sharing: Sharing = "device") -> None:
        self._devices = tuple(devices)
        self._sharing = sharing
        self._buckets: dict[tuple[int, ...], _Bucket] = {}

    def update(self, tensors: Sequence[torch.Tensor], num_slots: int) -> list[list[torch.Tensor]]:
        """Copies of ``tensors`` for the first ``num_slots`` slots.

        Args:
            tensors: The originals, all on one device.
            num_slots: How many slots take part in this call.

        Returns:
            Per slot, one tensor for each original, without gradient history: the original itself
            on its own device (see ``sharing``), else a copy. The tensors are the same objects as
            last time if nothing has changed. See Note [What counts as a change].
        """
        result: list[list[torch.Tensor]] = [list(tensors) for _ in range(num_slots)]
        if not tensors:
            return result
        places = _places(self._devices[:num_slots], tensors[0].device, self._sharing)
        if len(places) == 1 and places[0][0] is None:
            return result
        known, self._buckets = self._buckets, {}
        for indices in plan_buckets(tensors):
            originals = [tensors[index] for index in indices]
            key = tuple(id(original) for original in originals)
            bucket = self._current(known.pop(key, None), originals, len(self._devices))
            self._buckets[key] = bucket
            self._fill(bucket, originals, places)
            for place, (device, slots) in enumerate(places):
                if device is not None:
                    made = bucket.copies[place]
                    assert made is not None
                    for slot in slots:
                        for index, copy in zip(indices, made, strict=True):
                            result[slot][index] = copy
        return result

    def forget(self) -> None:
        """Make new copies next time; somebody may have written some without a trace."""
        self._buckets = {}

    def _current(
        self, bucket: _Bucket | None, originals: list[torch.Tensor], places: int
    ) -> _Bucket:
        """The bucket as it was if its copies still hold, else an empty one."""
        now = tuple(signature(original) for original in originals)
        if bucket is None or bucket.signature != now or _written(bucket):
            return _Bucket(originals, now, places)
        held = next((copies for copies in bucket.copies if copies is not None), None)
        if held is not None:
            ours, theirs = _comparable(originals), _comparable(held)
            if bucket.checksum is None:
                bucket.checksum = checksum(theirs, ours).cpu()
            if not torch.equal(checksum(ours, theirs).cpu(), bucket.checksum):
                return _Bucket(originals, now, places)
        return bucket

    def _fill(
        self,
        bucket: _Bucket,
        originals: list[torch.Tensor],
        places: Sequence[tuple[torch.device | None, Sequence[int]]],
    ) -> None:
        missing = [
            (place, device)
            for place, (device, _) in enumerate(places)
            if device is not None and bucket.copies[place] is None
        ]
        if not missing:
            return
        # Made in inference mode a copy could never take part in training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            made = _copy_to([device for _, device in missing], originals)
        for (place, _), copies in zip(missing, made, strict=True):
            bucket.copies[place] = copies
            bucket.versions[place] = [copy._version for copy in copies]


def _places(
    devices: Sequence[torch.device], source: torch.device, sharing: Sharing
) -> list[tuple[torch.device | None, list[int]]]:
    """Memory locations and the slots that use each; the device is None where originals serve."""
    places: list[tuple[torch.device | None, list[int]]] = []
    seen: dict[torch.device, int] = {}
    for slot, device in enumerate(devices):
        if device in seen and sharing == "device":
            places[seen[device]][1].append(slot)
            continue
        uses_originals = device == source and device not in seen and sharing != "none"
        seen.setdefault(device, len(places))
        places.append((None if uses_originals else device, [slot]))
    return places


def signature(tensor: torch.Tensor) -> _Signature:
    """What is equal as long as nothing has left a trace of changing ``tensor``.

    See Note [What counts as a change].
    """
    return (
        tensor.data_ptr() if tensor.layout == torch.strided else None,
        None if tensor.is_inference() else tensor._version,
        tensor.dtype,
        tensor.shape,
        tensor.stride() if tensor.layout == torch.strided else None,
        tensor.requires_grad,
        last_step_of(tensor),
        # Attributes of a parameter, such as the scale of a quantized one, are copied with it.
        tuple((name, _Identity(value)) for name, value in vars(tensor).items()),
    )


class _Identity:
    """Equal to the identity of the same object in the same version; holds the object."""

    __slots__ = ("_value", "_version")

    def __init__(self, value: Any) -> None:
        self._value = value
        counted = isinstance(value, torch.Tensor) and not value.is_inference()
        self._version = value._version if counted else None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self._value is other._value
            and self._version == other._version
        )

    __hash__ = None  # type: ignore[assignment]


def _written(bucket: _Bucket) -> bool:
    """Whether somebody wrote a copy, as batch norm does with the buffers of its replica."""
    return any(
        copy._version != version
        for copies, versions in zip(bucket.copies, bucket.versions, strict=True)
        if copies is not None and versions is not None
        for copy, version in zip(copies, versions, strict=True)
    )


def _comparable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The strided tensors among some, or in them: those that have a checksum."""
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.layout == torch.sparse_coo:
            parts += [torch_internals.sparse_indices(tensor), torch_internals.sparse_values(tensor)]
        elif tensor.layout == torch.strided and not tensor.is_quantized:
            parts.append(tensor)
    return parts


def _copy_to(
    devices: Sequence[torch.device], originals: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Copies on each device, of each original's own class and with its attributes."""
    source = originals[0].device
    values = [original.detach() for original in originals]
    others = [device for device in devices if device != source]
    sent = iter(comm.broadcast_coalesced(values, others)) if others else iter(())
    result: list[list[torch.Tensor]] = []
    for device in devices:
        copies = [value.clone() for value in values] if device == source else list(next(sent))
        result.append(
            [_dressed(copy, like, device) for copy, like in zip(copies, originals, strict=True)]
        )
    return result


def _dressed(copy: torch.Tensor, original: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        kind = type(original)
        copy = torch_internals.make_subclass(kind, copy, original.requires_grad)
    for name, value in vars(original).items():
        on_device = value.to(device) if isinstance(value, torch.Tensor) else value
        setattr(copy, name, on_device)
    return copy
