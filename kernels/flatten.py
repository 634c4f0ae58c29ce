"""Many tensors to one bucket and back, in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.backend import Backend, backend_of
from dataparallel.kernels.bucket_layout import BucketLayout, check_bucket, in_turn
from dataparallel.kernels.flatten_plans import MOST_TENSORS, Plan, Signature, plan_of
from dataparallel.kernels.memory import PLAIN_TYPES, lie_whole, mark_written
from dataparallel.kernels.tables import hold


class _Parameters(ctypes.Structure):
    """`Flatten` of flatten.cu."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * MOST_TENSORS),
        ("bucket", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
        ("scale", ctypes.c_double),
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

    A value is scaled in float32, or in float64 where the tensor or the bucket is float64, and then
    rounded (to 16 bits from float64: by way of float32). Without a scale, values of the bucket's
    dtype are copied bit by bit.

    Example::

        bucket = torch.empty(10)
        flatten([torch.ones(2, 3), torch.ones(4)], bucket, 0.5)

    Args:
        tensors: Tensors of any strides and dtypes. With ``views``, None stands for zeros.
        bucket: A contiguous tensor of one dimension. No tensor may overlap it.
        scale: A factor; 1 if a dtype is integral. Default: 1.
        views: Dense views of the bucket that do not overlap, one for each tensor and of its shape.
            Each element goes to its place in the view. A :class:`BucketLayout` saves the check of
            the views in each call. Default: the tensors lie in the bucket one after another, each
            in row-major order.

    Returns:
        The bucket.

    Raises:
        ValueError: Bucket, views and tensors do not fit; ``scale`` is not 1 for integers; or a
            tensor is None without ``views``.
    """
    layout = _layout_of(tensors, bucket, scale, views)
    if _copy("flatten", tensors, bucket, scale, layout):
        mark_written([bucket])
    else:
        _check_dtypes(tensors, bucket, scale)
        fills = layout is None or layout.fills
        views_of_bucket = _views_of(tensors, bucket, layout)
        reference.flatten(tensors, scale, views_of_bucket, bucket if fills else None)
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
        ValueError: As for :func:`flatten`; or elements of a tensor share memory.
    """
    layout = _layout_of(tensors, bucket, scale, views)
    if _copy("unflatten", tensors, bucket, scale, layout):
        mark_written([tensor for tensor in tensors if tensor is not None])
    else:
        _check_dtypes(tensors, bucket, scale)
        views_of_bucket = _views_of(tensors, bucket, layout)
        try:
            reference.unflatten(tensors, scale, views_of_bucket)
        except RuntimeError:
            _check_writable(tensors)
            raise


def _copy(
    direction: str,
    tensors: Sequence[torch.Tensor | None],
    bucket: torch.Tensor,
    scale: float,
    layout: BucketLayout | None,
) -> bool:
    """Whether a kernel has copied them."""
    present = [tensor for tensor in tensors if tensor is not None]
    shapes = [tensor.shape for tensor in present]
    if layout is not None:
        _check_shapes(tensors, shapes, layout)
    backend = backend_of(bucket.device)
    if backend is None or not _have_memory(present, bucket) or bucket.is_inference():
        return False
    try:
        strides = list(map(torch.Tensor.stride, present))
        addresses: list[Any] = list(map(torch.Tensor.data_ptr, present))
    except RuntimeError:
        # Sparse tensors and those of other libraries have none.
        return False
    signature = Signature(shapes, strides, [tensor.dtype for tensor in present])
    if not lie_whole(addresses, signature.dtypes) or not lie_whole(
        [bucket.data_ptr()], [bucket.dtype]
    ):
        return False
    _check_apart(addresses, bucket)
    plan = plan_of(tensors, signature, bucket, layout)
    kernel = plan.kernel(scale)
    if kernel is None:
        return False
    if direction == "unflatten" and plan.has_shared_elements:
        _check_writable(tensors)
    if len(present) < len(tensors):
        left = iter(addresses)
        addresses = [None if tensor is None else next(left) for tensor in tensors]
    _launch(backend, f"{direction}_{kernel}", plan, addresses, bucket, scale)
    return True


def _check_apart(addresses: Sequence[int], bucket: torch.Tensor) -> None:
    begin = bucket.data_ptr()
    end = begin + bucket.nbytes
    if not addresses or max(addresses) < begin or min(addresses) >= end:
        return
    inside = [i for i, address in enumerate(addresses) if begin <= address < end]
    if inside:
        raise ValueError(
            f"tensor {inside[0]} of those that are there begins within the memory of the bucket, "
            f"which has {bucket.nbytes} bytes: it would be read and written at once; give a copy"
        )


def _launch(
    backend: Backend,
    kernel: str,
    plan: Plan,
    addresses: Sequence[int | None],
    bucket: torch.Tensor,
    scale: float,
) -> None:
    for begin, end, records, chunks in plan.launches:
        parameters = _Parameters(
            bucket=bucket.data_ptr(),
            records=records.data_ptr(),
            chunks=chunks.pairs.data_ptr(),
            scale=scale,
        )
        parameters.tensors[: end - begin] = addresses[begin:end]
        backend.launch(bucket.device, "flatten", kernel, chunks.blocks, parameters)
        hold(bucket.device, records, chunks.pairs)


def _have_memory(tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> bool:
    """Whether all are what their addresses show: strided memory on the device of the bucket."""
    return (
        PLAIN_TYPES.issuperset(map(type, tensors))
        and type(bucket) in PLAIN_TYPES
        and {bucket.device}.issuperset([tensor.device for tensor in tensors])
        and not any(map(torch.Tensor.is_neg, tensors))
        and not bucket.is_neg()
        and not (bucket.is_complex() and any(map(torch.Tensor.is_conj, (bucket, *tensors))))
    )


def _layout_of(
    tensors: Sequence[torch.Tensor | None],
    bucket: torch.Tensor,
    scale: float,
    views: Sequence[torch.Tensor] | BucketLayout | None,
) -> BucketLayout | None:
    check_bucket(bucket)
    if scale != 1 and not (bucket.is_floating_point() or bucket.is_complex()):
        raise ValueError(
            f"a bucket of {bucket.dtype} cannot be scaled by {scale}, since its values would have "
            "to be rounded; leave out scale, or use a floating-point bucket"
        )
    if views is None:
        if any(tensor is None for tensor in tensors):
            raise ValueError(
                "a tensor is None, so that nothing says how large its part of the bucket is; give "
                "views"
            )
        return None
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
    return layout


def _check_shapes(
    tensors: Sequence[torch.Tensor | None], shapes: list[torch.Size], layout: BucketLayout
) -> None:
    if shapes == layout.shapes:
        return
    for i, (tensor, shape) in enumerate(zip(tensors, layout.shapes, strict=True)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"tensor {i} is {list(tensor.shape)}, but its view of the bucket is "
                f"{list(shape)}; give both one shape"
            )


def _check_dtypes(
    tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, scale: float
) -> None:
    for dtype in {tensor.dtype for tensor in tensors if tensor is not None}:
        if dtype.is_complex != bucket.is_complex():
            raise ValueError(
                f"the bucket is {bucket.dtype} and a tensor is {dtype}: complex numbers and real "
                "ones cannot be in one bucket; give torch.view_as_real of the complex ones"
            )
        if scale != 1 and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"a tensor of {dtype} cannot be scaled by {scale}, since it would have to be "
                "rounded; leave out scale, or use a floating-point dtype"
            )


def _check_writable(tensors: Sequence[torch.Tensor | None]) -> None:
    for i, tensor in enumerate(tensors):
        if tensor is None or tensor.layout != torch.strided or 0 not in tensor.stride():
            continue
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        if any(step == 0 and size > 1 for step, size in dims):
            raise ValueError(
                f"tensor {i} is {list(tensor.shape)} with the strides {list(tensor.stride())}: "
                "several of its elements share memory, and cannot be written; give a tensor that "
                "was not expanded"
            )


def _views_of(
    tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor, layout: BucketLayout | None
) -> list[torch.Tensor]:
    if layout is not None:
        return layout.views_of(bucket)
    places = in_turn([tensor.shape for tensor in tensors if tensor is not None], bucket.numel())
    return [
        bucket.narrow(0, place.offset, place.shape.numel()).view(place.shape) for place in places
    ]
