"""The buckets of a reducer: which parameters, in which memory, on which replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.comm.bucket_plan import BucketPlan, plan_buckets
from dataparallel.comm.sums import add_arriving, add_into, can_add
from dataparallel.graph.gradient_home import GradientHome
from dataparallel.graph.original_hooks import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.debug import describe_names, log_plan
from dataparallel.reducer.gradients import StolenGradients, ViewedGradients
from dataparallel.reducer.local_sum import MaybeTensor
from dataparallel.reducer.options import ReducerOptions
from dataparallel.reducer.original_views import OriginalViews
from dataparallel.reducer.storage import BucketStorage

T = TypeVar("T")


class Buckets:
    """The buckets of one plan.

    Args:
        originals: The parameters that the optimizer has.
        names: Their names.
        leaves: Per replica, what it computes with in their place.
        options: See :class:`ReducerOptions`.
        flat: Whether gradients are put together in flat tensors, to be sent.
        expect_sparse: Per parameter, whether its gradient will be sparse.
        order: The order in which gradients arrive. Default: not known.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        names: Sequence[str],
        leaves: Sequence[Sequence[nn.Parameter]],
        options: ReducerOptions,
        *,
        flat: bool,
        expect_sparse: Sequence[bool],
        order: Sequence[int] | None,
    ) -> None:
        self._originals = originals
        self.ordered = order is not None
        self.plan = make_plan(originals, options, expect_sparse, order)
        log_plan(
            self.plan,
            names,
            "before the first backward" if order is None else "in the order of arrival",
        )
        members = [[originals[i] for i in bucket] for bucket in self.plan.buckets]
        self.homes = [bucket[0].device for bucket in members]
        #: What error messages call each bucket.
        self.describe = [_describe(n, b, names) for n, b in enumerate(self.plan.buckets)]
        composed = [n for n, o in zip(names, originals, strict=True) if _holds_tensors(o)]
        if flat and composed:
            raise ValueError(
                f"the parameters {describe_names(composed)} are of a subclass that holds tensors, "
                "whose gradients cannot be put into a flat bucket and sent to other processes; use "
                "one process, or leave them out with _ddp_params_and_buffers_to_ignore"
            )
        self._viewed = [
            options.gradient_as_bucket_view
            and not expect_sparse[bucket[0]]
            and not any(_holds_tensors(originals[index]) for index in bucket)
            and all(leaf.dtype == original.dtype for leaf, original in _pairs(leaves, originals))
            for bucket in self.plan.buckets
        ]
        #: The flat tensor of each bucket; None for sparse gradients and where none is needed.
        self.storages = [
            BucketStorage(bucket, None if viewed else options.reduce_dtype)
            if (flat or viewed) and not expect_sparse[indices[0]]
            else None
            for bucket, indices, viewed in zip(
                members, self.plan.buckets, self._viewed, strict=True
            )
        ]
        #: Per replica and bucket, where the gradients are.
        self.gradients = [
            [self._gradients_of(replica, leaves, number) for number in range(len(self.plan))]
            for replica, leaves in enumerate(leaves)
        ]
        self._views = [
            OriginalViews(bucket, indices, storage) if viewed and storage is not None else None
            for bucket, indices, storage, viewed in zip(
                members, self.plan.buckets, self.storages, self._viewed, strict=True
            )
        ]
        # To bring a bucket from another device without new memory in each round.
        self._arrivals: dict[int, torch.Tensor] = {}

    def _gradients_of(
        self, replica: int, leaves: Sequence[nn.Parameter], number: int
    ) -> StolenGradients:
        members = [leaves[index] for index in self.plan.buckets[number]]
        storage = self.storages[number]
        if not self._viewed[number] or storage is None:
            return StolenGradients(members)
        return ViewedGradients(members, storage if replica == 0 else BucketStorage(members))

    def arranged(self, values: Sequence[T]) -> list[list[T]]:
        """One value for each parameter, bucket by bucket."""
        return [[values[index] for index in bucket] for bucket in self.plan.buckets]

    def sentinels(self, leaves: Sequence[nn.Parameter]) -> list[int]:
        """Which leaves tell of their gradients: all that are trained while no order is known, then
        the last of each bucket."""
        trained = [[i for i in bucket if leaves[i].requires_grad] for bucket in self.plan.buckets]
        return [index for bucket in trained for index in bucket[-1 if self.ordered else 0 :]]

    def views(self, number: int) -> Sequence[torch.Tensor]:
        """The gradients in the flat tensor of a bucket."""
        storage = self.storages[number]
        assert storage is not None
        return storage.views

    @property
    def any_viewed(self) -> bool:
        """Whether some gradients are views of a flat tensor."""
        return any(self._viewed)

    def is_viewed(self, number: int) -> bool:
        """Whether the gradients of a bucket are views of its flat tensor."""
        return self._viewed[number]

    def attach(
        self, accumulated: Accumulated, hooked: Collection[int] = (), *, reduces: bool
    ) -> None:
        """Make everything ready for a round.

        Args:
            accumulated: The gradients that the originals have.
            hooked: Parameters for which :meth:`complete_views` runs hooks.
            reduces: Whether the round reduces over processes.
        """
        storages = {s.flat.untyped_storage().data_ptr() for s in self.storages if s is not None}
        for views in self._views:
            if views is not None:
                views.keep(storages, accumulated.home)
        for number, views in enumerate(self._views):
            if views is not None:
                views.attach(accumulated if reduces else None, hooked)
            for replica, gradients in enumerate(row[number] for row in self.gradients):
                if isinstance(gradients, ViewedGradients) and replica > 0:
                    gradients.storage.flat.zero_()
                gradients.attach()

    def sum_views(self, number: int) -> None:
        """Add the flat tensors of a bucket of all replicas into that of replica 0, in order."""
        if len(self.gradients) == 1:
            return
        total = self._flat(number)
        terms = [total, *(self._flat_of(gradients[number]) for gradients in self.gradients[1:])]
        if can_add(terms, total.device):
            add_into(total, terms)
        else:
            arriving = (self._arrived(number, term) for term in terms[1:])
            add_arriving(total, arriving, len(terms))

    def _arrived(self, number: int, term: torch.Tensor) -> torch.Tensor:
        total = self._flat(number)
        if term.device == total.device:
            return term
        if number not in self._arrivals:
            self._arrivals[number] = torch.empty_like(total)
        return self._arrivals[number].copy_(term)

    def complete_views(
        self,
        number: int,
        used: Sequence[bool],
        user_hooks: OriginalHooks,
        through: Collection[int] = (),
    ) -> None:
        """Run hooks on the sum of a viewed bucket, and add what ``.grad`` held before."""
        views = self._views[number]
        assert views is not None
        views.complete(used, user_hooks, through)

    def sendable(self, number: int, sums: Sequence[MaybeTensor]) -> list[MaybeTensor]:
        """Gradients in the layout that the bucket expects: dense, or sparse."""
        if self.storages[number] is None:
            return [self.as_sparse(sums[0], self._originals[self.plan.buckets[number][0]])]
        return [g.to_dense() if g is not None and g.is_sparse else g for g in sums]

    def show(self, number: int, flat: torch.Tensor) -> None:
        """Let the flat tensor of a viewed bucket hold what was received."""
        own = self._flat(number)
        if flat.data_ptr() != own.data_ptr():
            own.copy_(flat)

    def add_to_views(self, number: int, extra: dict[int, torch.Tensor]) -> None:
        """Add further gradients, by the index of the parameter, to the views of a bucket."""
        storage = self.storages[number]
        assert storage is not None
        for index, view in zip(self.plan.buckets[number], storage.views, strict=True):
            if index in extra:
                view.add_(extra[index])

    def publish(self, number: int, used: Sequence[int]) -> None:
        """Set the gradients of the originals of a viewed bucket."""
        views = self._views[number]
        assert views is not None
        views.publish(used)

    def release(self, number: int) -> None:
        """End a round of a viewed bucket whose gradients were used up."""
        views = self._views[number]
        assert views is not None
        views.release()

    def forget_views(self, home: GradientHome) -> None:
        """Leave no gradient that is a part of a bucket whose content is not known."""
        for views in self._views:
            if views is not None:
                views.forget(home)

    def received(
        self, number: int, flat: torch.Tensor, sums: Sequence[MaybeTensor], used: Sequence[int]
    ) -> list[MaybeTensor]:
        """The gradients in a received flat tensor, one per parameter.

        Args:
            number: Number of the bucket.
            flat: The flat tensor, or a sparse gradient.
            sums: What this process had sent, whose memory is used again.
            used: Per parameter of the module, whether any process has a gradient.

        Returns:
            Tensors in the dtype of the originals, in ``sums`` where that is possible, else new;
            None where no process has a gradient.
        """
        bucket = self.plan.buckets[number]
        storage = self.storages[number]
        if storage is None:
            return [flat if used[bucket[0]] else None]
        views = storage.layout.views_of(flat)
        result: list[MaybeTensor] = [None] * len(bucket)
        into: list[MaybeTensor] = [None] * len(bucket)
        for position, (index, view) in enumerate(zip(bucket, views, strict=True)):
            if not used[index]:
                continue
            original, own = self._originals[index], sums[position]
            if own is not None and own.dtype == original.dtype and _is_dense(own):
                # Memory that is nobody else's can become ``.grad``; a view must be copied.
                result[position] = into[position] = own
            else:
                result[position] = view.to(original.dtype, copy=True)
        kernels.unflatten(flat, into, views=storage.layout)
        return result

    def as_sparse(self, grad: MaybeTensor, original: nn.Parameter) -> torch.Tensor:
        """A gradient of a parameter that is expected to have sparse ones."""
        if grad is None:
            return empty_sparse(original)
        return grad if grad.is_sparse else grad.to_sparse(1)

    @staticmethod
    def _flat_of(gradients: StolenGradients) -> torch.Tensor:
        assert isinstance(gradients, ViewedGradients)
        return gradients.storage.flat

    def _flat(self, number: int) -> torch.Tensor:
        storage = self.storages[number]
        assert storage is not None
        return storage.flat


def make_plan(
    originals: Sequence[nn.Parameter],
    options: ReducerOptions,
    expect_sparse: Sequence[bool],
    order: Sequence[int] | None,
) -> BucketPlan:
    """The plan of all buckets; those of delayed parameters come after all others."""
    return plan_buckets(
        originals,
        first_bytes=options.first_bucket_bytes,
        cap_bytes=options.bucket_bytes,
        expect_sparse=expect_sparse,
        order=order,
        parts=[set(range(len(originals))) - options.delayed, options.delayed],
    )


def empty_sparse(like: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries, as of an embedding that was not used."""
    # Whoever makes one of indices and values is warned by torch 2.11.
    row = torch.zeros((1, *like.shape[1:]), dtype=like.dtype, device=like.device).to_sparse(1)
    return row.sparse_resize_(like.shape, 1, like.dim() - 1)


def _describe(number: int, bucket: Sequence[int], names: Sequence[str]) -> str:
    first, last = names[bucket[0]], names[bucket[-1]]
    return f"bucket {number} ({first if first == last else f'{first} .. {last}'})"


def _holds_tensors(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a subclass around other tensors, with no memory of its own."""
    return hasattr(type(parameter), "__tensor_flatten__")


def _is_dense(tensor: torch.Tensor) -> bool:
    return not tensor.is_sparse and tensor.layout == torch.strided


def _pairs(
    leaves: Sequence[Sequence[nn.Parameter]], originals: Sequence[nn.Parameter]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(leaves[0], originals, strict=True))
