"""Many tensors to one bucket and back, in one launch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.copy_plans import MOST_TENSORS, Place, Plan
from dataparallel.kernels.memory import addresses_of, is_dense, mark_written
from dataparallel.kernels.tables import hold

# The plans of one layout: strides and dtypes seldom change.
_MOST_PLANS = 64


class _Parameters(ctypes.Structure):
    """`Flatten` of flatten.cu."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * MOST_TENSORS),
        ("bucket", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
        ("scale", ctypes.c_double),
    )


class BucketLayout:
    """The places of tensors in a bucket. Make it once and use it for all buckets of that size.

    Example::

        bucket = torch.zeros(6)
        layout = BucketLayout(bucket, [bucket[:4].view(2, 2).t(), bucket[4:]])
        flatten([torch.ones(2, 2), None], bucket, views=layout)

    Args:
        bucket: A contiguous tensor of one dimension.
        views: Dense views of the bucket that do not overlap.

    Raises:
        ValueError: The bucket is not contiguous, or ``views`` are not such views.
    """

    def __init__(self, bucket: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        _check_bucket(bucket)
        #: The number of elements of the bucket.
        self.size = bucket.numel()
        #: One for each view.
        self.places = [
            Place(int(view.storage_offset() - bucket.storage_offset()), view.shape, view.stride())
            for view in views
        ]
        #: The shape of each view.
        self.shapes = [place.shape for place in self.places]
        #: True if each element of the bucket belongs to a view.
        self.fills = sum(shape.numel() for shape in self.shapes) == self.size
        self._bucket = bucket
        self._views = list(views)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        for i, view in enumerate(views):
            self._check_view(i, view)
        self._check_disjoint()

    def views_of(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of a bucket of this layout, of any dtype and device."""
        first = self._bucket
        if bucket.data_ptr() == first.data_ptr() and bucket.dtype == first.dtype:
            return self._views
        base = bucket.storage_offset()
        return [
            bucket.as_strided(place.shape, place.stride, base + place.offset)
            for place in self.places
        ]

    def plan_of(self, tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor) -> Plan:
        """Return the plan for tensors of the shapes of the views. See Note [Plans of copies]."""
        # Without a call of Python for each tensor: that would cost more than the kernel.
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) == len(self.places):
            strides = list(map(torch.Tensor.stride, present))
            dtypes = [tensor.dtype for tensor in present]
        else:
            pairs = list(zip(tensors, self.places, strict=True))
            strides = [place.stride if each is None else each.stride() for each, place in pairs]
            dtypes = [bucket.dtype if each is None else each.dtype for each in tensors]
        key = (tuple(strides), tuple(dtypes), bucket.dtype, bucket.device)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan(self.places, *key)
        return plan

    def _check_view(self, i: int, view: torch.Tensor) -> None:
        bucket, place = self._bucket, self.places[i]
        inside = place.offset >= 0 and place.offset + view.numel() <= self.size
        same = view.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
        if view.dtype != bucket.dtype or not same or not inside:
            raise ValueError(
                f"view {i} ({view.dtype} {list(view.shape)}) is not a part of the bucket "
                f"({bucket.dtype} {list(bucket.shape)}); make it with bucket.view or as_strided"
            )
        if not is_dense(view):
            raise ValueError(
                f"view {i} has the shape {list(place.shape)} and the strides "
                f"{list(place.stride)}, which leave gaps or overlap; give it dense strides"
            )

    def _check_disjoint(self) -> None:
        spans = sorted(
            (place.offset, place.offset + place.shape.numel(), i)
            for i, place in enumerate(self.places)
            if place.shape.numel()
        )
        for (_, end, i), (begin, _, j) in itertools.pairwise(spans):
            if begin < end:
                raise ValueError(
                    f"views {i} and {j} overlap in the bucket: one ends at element {end}, and the "
                    f"other begins at {begin}; give each a part of its own"
                )


@torch.no_grad()
def flatten(
    tensors: Sequence[torch.Tensor | None],
    bucket: torch.Tensor,
    scale: float = 1.0,
    *,
    views: Sequence[torch.Tensor] | BucketLayout | None = None,
) -> torch.Tensor:
    """Copy tensors into one bucket, scaled and cast to its dtype.

    A value is scaled in float32, or in float64 if the tensor or the bucket is float64. Then it is
    rounded (to 16 bits from float64: by way of float32). Without a scale, values of the bucket's
    dtype are copied bit by bit.

    Example::

        bucket = torch.empty(10)
        flatten([torch.ones(2, 3), torch.ones(4)], bucket, 0.5)

    Args:
        tensors: Tensors of any strides and dtypes. With ``views``, None stands for zeros.
        bucket: A contiguous tensor of one dimension. No tensor may overlap it.
        scale: A factor; 1 if the result is integral. Default: 1.
        views: Dense views of the bucket that do not overlap, one for each tensor and of its shape.
            Each element goes to its place in the view. A :class:`BucketLayout` saves, in each
            call, the check of the views and a copy to the device. Default: the tensors lie in the
            bucket one after another, each in row-major order.

    Returns:
        The bucket.

    Raises:
        ValueError: Bucket, views and tensors do not fit, or a tensor is None without ``views``.
        RuntimeError: Integers cannot be scaled.
    """
    layout = _layout_of(tensors, bucket, views)
    if _copy("flatten", tensors, bucket, scale, layout):
        mark_written([bucket])
    else:
        _check_complex(tensors, bucket)
        views_of_bucket = layout.views_of(bucket)
        reference.flatten(tensors, scale, views_of_bucket, bucket if layout.fills else None)
    return bucket


@torch.no_grad()
def unflatten(
    bucket: torch.Tensor,
    tensors: Sequence[torch.Tensor | None],
    scale: float = 1.0,
    *,
    views: Sequence[torch.Tensor] | BucketLayout | None = None,
) -> None:
    """Copy the parts of a bucket to tensors, scaled and cast to their dtypes.

    Example::

        first, second = torch.empty(2, 3), torch.empty(4)
        unflatten(torch.arange(10.0), [first, second])

    Args:
        bucket: As for :func:`flatten`.
        tensors: The tensors for the results, of any strides and dtypes. With ``views``, None
            leaves out a part.
        scale: As for :func:`flatten`.
        views: As for :func:`flatten`.

    Raises:
        ValueError: As for :func:`flatten`.
        RuntimeError: Elements of a tensor share memory, or integers cannot be scaled.
    """
    layout = _layout_of(tensors, bucket, views)
    if _copy("unflatten", tensors, bucket, scale, layout):
        mark_written([tensor for tensor in tensors if tensor is not None])
    else:
        _check_complex(tensors, bucket)
        reference.unflatten(tensors, scale, layout.views_of(bucket))


def _copy(
    direction: str,
    tensors: Sequence[torch.Tensor | None],
    bucket: torch.Tensor,
    scale: float,
    layout: BucketLayout,
) -> bool:
    """True if a kernel has copied them."""
    backend = backend_of(bucket.device)
    if backend is None:
        return False
    present = [tensor for tensor in tensors if tensor is not None]
    devices = [tensor.device for tensor in present]
    # Torch has the errors for what is written to a tensor of inference.
    if bucket.is_inference() or {*devices} - {bucket.device}:
        return False
    addresses = addresses_of([bucket, *present])
    if addresses is None:
        return False
    plan = layout.plan_of(tensors, bucket)
    kernel = plan.kernel(scale)
    if kernel is None or (direction == "unflatten" and plan.has_shared_elements):
        return False
    begin, *others = addresses
    inside = [i for i, address in enumerate(others) if begin <= address < begin + bucket.nbytes]
    if inside:
        raise ValueError(
            f"tensor {inside[0]} of those that are there begins within the memory of the bucket, "
            f"which has {bucket.nbytes} bytes: it would be read and written at once; give a copy"
        )
    left = iter(others)
    pointers = [None if tensor is None else next(left) for tensor in tensors]
    for launch in plan.launches or ():
        parameters = _Parameters(
            bucket=begin,
            records=launch.records.data_ptr(),
            chunks=launch.chunks.pairs.data_ptr(),
            scale=scale,
        )
        parameters.tensors[: launch.end - launch.begin] = pointers[launch.begin : launch.end]
        name, blocks = f"{direction}_{kernel}", launch.chunks.blocks
        backend.launch(bucket.device, "flatten", name, blocks, parameters)
        hold(bucket.device, launch.records, launch.chunks.pairs)
    return True


def _layout_of(
    tensors: Sequence[torch.Tensor | None],
    bucket: torch.Tensor,
    views: Sequence[torch.Tensor] | BucketLayout | None,
) -> BucketLayout:
    _check_bucket(bucket)
    if views is None:
        views = _in_turn([None if tensor is None else tensor.shape for tensor in tensors], bucket)
    layout = views if isinstance(views, BucketLayout) else BucketLayout(bucket, views)
    if len(tensors) != len(layout.places):
        raise ValueError(
            f"there are {len(tensors)} tensors, but {len(layout.places)} views of the bucket; give "
            "one for each, or None in the place of a tensor"
        )
    if layout.size != bucket.numel():
        raise ValueError(
            f"the layout is of buckets of {layout.size} elements, but this one has "
            f"{bucket.numel()}; make another layout"
        )
    if [tensor.shape for tensor in tensors if tensor is not None] != layout.shapes:
        for i, (tensor, shape) in enumerate(zip(tensors, layout.shapes, strict=True)):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"tensor {i} is {list(tensor.shape)}, but its view of the bucket is "
                    f"{list(shape)}; give both one shape"
                )
    return layout


def _check_complex(tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor) -> None:
    for dtype in {tensor.dtype for tensor in tensors if tensor is not None}:
        if dtype.is_complex != bucket.is_complex():
            raise ValueError(
                f"the bucket is {bucket.dtype} and a tensor is {dtype}: complex numbers and real "
                "ones cannot be in one bucket; give torch.view_as_real of the complex ones"
            )


def _in_turn(shapes: Sequence[torch.Size | None], bucket: torch.Tensor) -> list[torch.Tensor]:
    """Return the views of a bucket in which tensors lie one after another."""
    given = [shape for shape in shapes if shape is not None]
    if len(given) < len(shapes):
        raise ValueError(
            "a tensor is None, so that nothing says how large its part of the bucket is; give views"
        )
    sizes = [shape.numel() for shape in given]
    if sum(sizes) != bucket.numel():
        raise ValueError(
            f"the tensors have {sum(sizes)} elements, but the bucket has {bucket.numel()}; give a "
            "bucket of that size, or views of it"
        )
    parts = torch.split(bucket, sizes) if sizes else ()
    return [part.view(shape) for part, shape in zip(parts, given, strict=True)]


def _check_bucket(bucket: torch.Tensor) -> None:
    if bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            "a bucket must be a contiguous tensor of one dimension, but got the shape "
            f"{list(bucket.shape)} with the strides {list(bucket.stride())}; use .view(-1)"
        )
