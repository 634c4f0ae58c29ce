"""What is known about a list of tensors and their bucket from the last time they were copied.

Note [Plans of copies]
~~~~~~~~~~~~~~~~~~~~~~
To copy hundreds of tensors in one launch, a kernel needs to know how each lies. This is worked out
once, and kept on the device: the steady state of a training loop uploads nothing. Whether a plan
still holds, is seen from the shapes, strides and dtypes of the tensors, which are compared as
lists, since a call of a Python function for each tensor would cost more than the kernel. Addresses
belong to no plan, nor does which tensors are missing: a plan holds if it does for those there are.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dataparallel.kernels.bucket_layout import BucketLayout, Place, in_turn
from dataparallel.kernels.chunks import ChunkTable, chunk_table
from dataparallel.kernels.copy_plans import Copy, plan_copy, record
from dataparallel.kernels.dtypes import SUFFIXES
from dataparallel.kernels.tables import upload

#: The most tensors of a launch: `MAX_TENSORS` of flatten.cu.
MOST_TENSORS = 480

# Plans for lists that begin alike, and all plans. A program could go through any number of lists.
_MOST_ALIKE = 64
_MOST_PLANS = 2048

# `Type` of flatten.cu.
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Signature(NamedTuple):
    """What decides how tensors are copied, one entry for each tensor."""

    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]


class Launch(NamedTuple):
    """Some of the tensors of a plan.

    Attributes:
        begin: The first of them.
        end: The one after the last.
        records: On the device, a row for each: `Record` of flatten.cu.
        chunks: Which block does what.
    """

    begin: int
    end: int
    records: torch.Tensor
    chunks: ChunkTable


class Plan:
    """How a list of tensors is copied to or from a bucket.

    Args:
        signature: Of all tensors; of one that is missing, that of its place.
        bucket: The bucket.
        places: Where each is in it.
    """

    def __init__(self, signature: Signature, bucket: torch.Tensor, places: Sequence[Place]) -> None:
        self.signature = signature
        #: Per tensor, None where the kernel does not serve it.
        self.copies = [
            plan_copy(place.shape, place.stride, stride)
            for place, stride in zip(places, signature.strides, strict=True)
        ]
        #: Whether a tensor may have elements that share memory.
        self.has_shared_elements = any(0 in stride for stride in signature.strides)
        self._dtype = bucket.dtype
        self._is_uniform = all(dtype == bucket.dtype for dtype in signature.dtypes)
        self._is_mixed = bucket.dtype in _TYPES and all(d in _TYPES for d in signature.dtypes)
        served = [copy for copy in self.copies if copy is not None]
        self._is_planned = len(served) == len(self.copies)
        #: The launches that copy all tensors.
        self.launches: list[Launch] = []
        if self._is_planned and (self._is_uniform or self._is_mixed):
            self.launches = _launches(served, signature, places, bucket.device)

    def kernel(self, scale: float) -> str | None:
        """The kernel, without its direction; None if there is none for this."""
        if not self._is_planned:
            return None
        if scale == 1 and self._is_uniform and self._dtype.itemsize in (2, 4, 8):
            return f"bits_{self._dtype.itemsize}"
        if self._is_mixed or (self._is_uniform and self._dtype == torch.float64):
            return SUFFIXES[self._dtype]
        return None

    def holds(self, tensors: Sequence[torch.Tensor | None], present: Signature) -> bool:
        """Whether the plan is for these tensors.

        Args:
            tensors: All of them.
            present: The signature of those that are not None.
        """
        if len(present.shapes) == len(tensors):
            return self.signature == present
        mask = [tensor is not None for tensor in tensors]
        own = Signature(
            list(itertools.compress(self.signature.shapes, mask)),
            list(itertools.compress(self.signature.strides, mask)),
            list(itertools.compress(self.signature.dtypes, mask)),
        )
        return own == present


def _launches(
    copies: Sequence[Copy], signature: Signature, places: Sequence[Place], device: torch.device
) -> list[Launch]:
    launches = []
    for begin in range(0, len(copies), MOST_TENSORS):
        end = min(begin + MOST_TENSORS, len(copies))
        rows = [
            record(copies[i], places[i].offset, _TYPES.get(signature.dtypes[i], 0))
            for i in range(begin, end)
        ]
        records = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        chunks = chunk_table([copy.chunks for copy in copies[begin:end]], 1, device)
        launches.append(Launch(begin, end, records, chunks))
    return launches


class _Known(NamedTuple):
    """A plan, and the layout for which it was made, which a plan must not keep alive."""

    layout: weakref.ref[BucketLayout] | None
    places: Sequence[Place] | None
    plan: Plan

    def is_for(self, layout: BucketLayout | None) -> bool:
        if layout is None or self.layout is None:
            return layout is None and self.layout is None
        return self.layout() is layout or self.places == layout.places


_plans: dict[tuple[object, ...], list[_Known]] = {}
_lock = threading.Lock()


def plan_of(
    tensors: Sequence[torch.Tensor | None],
    present: Signature,
    bucket: torch.Tensor,
    layout: BucketLayout | None,
) -> Plan:
    """The plan for these tensors. See Note [Plans of copies].

    Args:
        tensors: All of them, of the shapes of their places.
        present: The signature of those that are not None.
        bucket: The bucket.
        layout: Its places. Default: the tensors lie in it in turn, and none is missing.
    """
    key = (len(tensors), bucket.numel(), bucket.dtype, bucket.device)
    for known in _plans.get(key, ()):
        if known.is_for(layout) and known.plan.holds(tensors, present):
            return known.plan
    places = in_turn(present.shapes, bucket.numel()) if layout is None else layout.places
    plan = Plan(_completed(tensors, present, bucket, places), bucket, places)
    known = _Known(
        None if layout is None else weakref.ref(layout), None if layout is None else places, plan
    )
    with _lock:
        _make_room()
        _plans[key] = [known, *_plans.get(key, ())][:_MOST_ALIKE]
    return plan


def _make_room() -> None:
    if sum(map(len, _plans.values())) >= _MOST_PLANS:
        _plans.clear()


def _completed(
    tensors: Sequence[torch.Tensor | None],
    present: Signature,
    bucket: torch.Tensor,
    places: Sequence[Place],
) -> Signature:
    """A signature of all tensors: those that are missing are taken to lie like their places."""
    rows = iter(zip(*present, strict=True))
    whole = [
        (place.shape, place.stride, bucket.dtype) if tensor is None else next(rows)
        for tensor, place in zip(tensors, places, strict=True)
    ]
    return Signature(
        [shape for shape, _, _ in whole],
        [stride for _, stride, _ in whole],
        [dtype for _, _, dtype in whole],
    )
