"""What a communication hook gets: the gradients of one bucket, with torch's methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradBucket:
    """One bucket of gradients, as a communication hook sees it.

    Has the methods of ``torch.distributed.GradBucket``, so hooks written for torch run unmodified.
    With several replicas in the process, the bucket holds their sum.

    Example::

        def hook(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer().mul_(0.5))
            return future

    Args:
        index: Number of the bucket; buckets are launched in the order of their numbers, from 0.
        buffer: The flat tensor of the bucket, shape ``(numel,)``; or, for a gradient that is
            sparse, that gradient.
        views: One per parameter: the part of ``buffer`` that is its gradient, in the parameter's
            shape and layout. ``[buffer]`` where that is sparse.
        parameters: The parameters of the bucket, in the order of ``views``.
        names: Their names, in the same order.
        is_last: Whether no bucket of this backward comes after this one.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_first",
        "_index",
        "_is_last",
        "_names",
        "_parameters",
        "_views",
        "in_memory_order",
    )

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        views: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        is_last: bool,
    ) -> None:
        assert len(views) == len(parameters) == len(names)
        self._index = index
        # A hook may resize what it gets. Another tensor over the same storage keeps the owner's
        # own one in shape, and the views remain valid: they look the memory up in the storage.
        self._buffer = buffer if buffer.is_sparse else buffer.view(buffer.shape)
        self._first = self._buffer
        self._views = tuple(views)
        self._parameters = tuple(parameters)
        self._names = tuple(names)
        self._is_last = is_last
        #: Whether :meth:`gradients` gives contiguous tensors in any case. Their entries are then
        #: in the order of memory, not in that of the parameter, if the parameter is not contiguous.
        self.in_memory_order = False

    def index(self) -> int:
        """Number of the bucket, from 0 in the order of launching."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket of this backward comes after this one."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The flat tensor of all gradients, shape ``(numel,)``; no copy.

        For a sparse gradient it is that gradient.
        """
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of the flat one, for example of another dtype.

        Args:
            tensor: What :meth:`buffer` returns from now on, and what :meth:`gradients` are views
                of.

        Raises:
            TypeError: It is not a tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"bucket {self._index} cannot have a buffer of type {type(tensor).__name__}; "
                f"pass a tensor with {self._first.numel()} elements"
            )
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """One view of the buffer per parameter, in the parameter's shape and layout.

        Raises:
            ValueError: The buffer was replaced by one from which they cannot be cut.
        """
        if self._first.is_sparse:
            return [self._buffer]
        if self._buffer is self._first and not self.in_memory_order:
            return list(self._views)
        self._check_replaced()
        start = self._buffer.storage_offset() - self._first.storage_offset()
        return [
            self._buffer.as_strided(view.shape, self._strides(view), start + view.storage_offset())
            for view in self._views
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the bucket, in the order of :meth:`gradients`: the originals."""
        return list(self._parameters)

    def names(self) -> list[str]:
        """The names of the parameters, in the order of :meth:`parameters`."""
        return list(self._names)

    def _strides(self, view: torch.Tensor) -> Sequence[int]:
        if self.in_memory_order and not view.is_contiguous():
            return torch.empty(view.shape, device="meta").stride()
        return view.stride()

    def _check_replaced(self) -> None:
        """Refuse a buffer that is not flat, or too small for the views."""
        given = self._buffer
        needed = sum(view.numel() for view in self._views)
        if given.layout != torch.strided or given.dim() != 1 or given.numel() < needed:
            raise ValueError(
                f"the buffer of bucket {self._index} was replaced by one of shape "
                f"{tuple(given.shape)}, but its gradients have {needed} elements; pass a tensor "
                f"of shape ({needed},) to set_buffer before asking for gradients"
            )
        if not given.is_contiguous():
            raise ValueError(
                f"the buffer of bucket {self._index} was replaced by one with stride "
                f"{given.stride()[0]}, but gradients are cut from contiguous memory; pass "
                "tensor.contiguous() to set_buffer"
            )

    def __repr__(self) -> str:
        return (
            f"GradBucket(index={self._index}, numel={self._first.numel()}, "
            f"dtype={self._buffer.dtype}, names={list(self._names)})"
        )
