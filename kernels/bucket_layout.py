"""Where tensors lie in a bucket: in one flat tensor for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dataparallel.kernels.memory import is_dense


class Place(NamedTuple):
    """The part of a bucket that belongs to one tensor.

    Attributes:
        offset: Of its first element, in elements.
        shape: That of the tensor.
        stride: Dense: the elements fill the part without gaps, in any order of dimensions.
    """

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


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
        check_bucket(bucket)
        #: The number of elements of the bucket.
        self.size = bucket.numel()
        #: One for each view.
        self.places = [
            Place(int(view.storage_offset() - bucket.storage_offset()), view.shape, view.stride())
            for view in views
        ]
        #: The shape of each view.
        self.shapes = [place.shape for place in self.places]
        #: Whether each element of the bucket belongs to a view.
        self.fills = sum(shape.numel() for shape in self.shapes) == self.size
        self._bucket = bucket
        self._views = list(views)
        for i, view in enumerate(views):
            self._check_view(i, view)
        self._check_disjoint()

    def views_of(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """The views of a bucket of this layout.

        Args:
            bucket: Of the size that the first one had; any dtype and device.
        """
        first = self._bucket
        if bucket.data_ptr() == first.data_ptr() and bucket.dtype == first.dtype:
            return self._views
        base = bucket.storage_offset()
        return [
            bucket.as_strided(place.shape, place.stride, base + place.offset)
            for place in self.places
        ]

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


def check_bucket(bucket: torch.Tensor) -> None:
    """Raise a ValueError unless a tensor can be a bucket."""
    if bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            "a bucket must be a contiguous tensor of one dimension, but got the shape "
            f"{list(bucket.shape)} with the strides {list(bucket.stride())}; use .view(-1)"
        )


def in_turn(shapes: Sequence[torch.Size], size: int) -> list[Place]:
    """The places of contiguous tensors that lie one after another.

    Args:
        shapes: Of the tensors.
        size: The number of elements of the bucket, which has to be that of all tensors.
    """
    places = []
    offset = 0
    for shape in shapes:
        strides = []
        step = 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        places.append(Place(offset, shape, tuple(reversed(strides))))
        offset += shape.numel()
    if offset != size:
        raise ValueError(
            f"the tensors have {offset} elements, but the bucket has {size}; give a bucket of that "
            "size, or views of it"
        )
    return places
