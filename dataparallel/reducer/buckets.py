"""The buckets of a reducer: which parameters, in which memory, on which replicas.

Note [Gradient layout contract]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A bucket view has the strides of its parameter if that is dense and does not overlap itself, else it
is contiguous. This is what the autograd engine makes of a gradient that it accumulates, so adding
one to the other is a pass over memory in order, and an optimizer's fused step finds both alike.

Note [Bucket views]
~~~~~~~~~~~~~~~~~~~
With ``gradient_as_bucket_view`` the originals' ``.grad`` become views of the flat tensor that was
reduced, which saves the copy out of it. Where they are still there when the next round begins, the
bucket takes new memory: so what ``.grad`` held is there when the round reads it, and after a round
that has failed. The result is then copied into the views, which stay what ``.grad`` is: a reference
that somebody keeps shows later gradients, too, and the next round needs no new memory again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from dataparallel import kernels, torch_internals
from dataparallel.comm.bucket_plan import BucketPlan, plan_buckets
from dataparallel.comm.local import sums_of
from dataparallel.devices import is_accelerator
from dataparallel.errors import describe_names
from dataparallel.kernels import BucketLayout
from dataparallel.reducer.options import FIRST_BUCKET_BYTES, Options, TrainedParameters

MaybeTensor: TypeAlias = torch.Tensor | None
#: Of several parameters, one gradient each; None where there is none.
Gradients: TypeAlias = list[MaybeTensor]


class BucketStorage:
    """A flat tensor and views of it, one per parameter. See Note [Gradient layout contract]."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        first = parameters[0]
        size = sum(like.numel() for like in parameters)
        self.views = []
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.zeros(size, dtype=dtype or first.dtype, device=first.device)
            offset = 0
            for like in parameters:
                part = self.flat[offset : offset + like.numel()]
                offset += like.numel()
                # This is what decides whether torch keeps strides in new tensors.
                dense = torch.empty_like(like, device="meta").stride() == like.stride()
                strides = like.stride() if dense else part.view(like.shape).stride()
                self.views.append(part.as_strided(like.size(), strides))
        #: The places of the views, for the kernels.
        self.layout = BucketLayout(self.flat, self.views)


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        number: Its place in the order of launching.
        indices, originals, names: Its parameters.
        leaves: Per replica, what that computes with in their place.
        storage: What is sent; None for a sparse gradient, and where nothing is.
        reduces: Whether it is reduced over processes.
        is_viewed: Whether what was received becomes ``.grad``. See Note [Bucket views].
    """

    number: int
    indices: Sequence[int]
    originals: Sequence[nn.Parameter]
    names: Sequence[str]
    leaves: Sequence[Sequence[nn.Parameter]]
    storage: BucketStorage | None
    reduces: bool
    is_viewed: bool = False

    def __post_init__(self) -> None:
        self.home = self.originals[0].device
        # Memory that the bucket has left to gradients that are there still.
        self._left: set[int] = set()
        first, last = self.names[0], self.names[-1]
        self.name = f"bucket {self.number} ({first if first == last else f'{first} .. {last}'})"

    # --- the gradients of one replica ------------------------------------------------------------

    def present(self, replica: int) -> bool:
        """Whether each leaf that is trained has a gradient."""
        leaves = self.leaves[replica]
        return all([leaf.grad is not None or not leaf.requires_grad for leaf in leaves])

    def take(self, replica: int, arriving: int = -1) -> Gradients:
        """The gradients of one replica; what comes afterwards is apart from them.

        They may be written: memory that somebody else has is copied. The engine itself still has
        the gradient of the parameter ``arriving``, whose hook calls.
        """
        uses_of, address_of = torch_internals.uses_of_storage, torch_internals.address_of_storage
        grads: Gradients = []
        for index, leaf in zip(self.indices, self.leaves[replica], strict=True):
            grad = leaf.grad
            leaf.grad = None
            # The engine gives parameters of which views are added one gradient, and no copy.
            if type(grad) is torch.Tensor and grad.layout == torch.strided:
                uses = uses_of(address_of(grad.untyped_storage()))
                grad = grad.clone() if uses > 2 + (index == arriving) else grad
            grads.append(grad)
        return grads

    def take_late(self) -> list[Gradients] | None:
        """Per replica, what has come since the gradients were taken; None if nothing has."""
        for leaves in self.leaves:
            for leaf in leaves:
                if leaf.grad is not None:
                    return [self.take(replica) for replica in range(len(self.leaves))]
        return None

    # --- to the other processes and back ---------------------------------------------------------

    def renew(self) -> None:
        """Leave the memory to gradients that are still there. See Note [Bucket views]."""
        if not self.is_viewed or self.storage is None:
            return
        grads = [o.grad for o in self.originals if o.grad is not None and not o.grad.is_sparse]
        held = {grad.untyped_storage().data_ptr() for grad in grads}
        own = self.storage.flat.untyped_storage().data_ptr()
        self._left = held & {*self._left, own}
        if own in held:
            self.storage = BucketStorage(self.originals)

    def stays(self, grad: torch.Tensor) -> bool:
        """Whether a gradient is a view that was there before the round. See Note [Bucket views]."""
        return not grad.is_sparse and grad.untyped_storage().data_ptr() in self._left

    def load(self, sums: Gradients, scale: float) -> torch.Tensor:
        """What is sent: the flat tensor or a sparse gradient, scaled, with zeros for None."""
        # What weighs nothing is nothing: the gradient of a mean over nothing may be NaN.
        if self.storage is None:
            grad = sums[0] if scale else None
            if grad is None:
                return _empty_sparse(self.originals[0])
            return (grad if grad.is_sparse else grad.to_sparse(1)).mul(scale).coalesce()
        if scale == 0:
            return self.storage.flat.zero_()
        dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in sums]
        kernels.flatten(dense, self.storage.flat, scale, views=self.storage.layout)
        return self.storage.flat

    def received(
        self, flat: torch.Tensor, sums: Gradients, used: Sequence[int], *, as_views: bool
    ) -> Gradients:
        """The gradients of the originals that any process has; the memory of ``sums`` is reused."""
        if self.storage is None:
            return [flat if used[self.indices[0]] else None]
        if as_views:
            if flat.data_ptr() != self.storage.flat.data_ptr():
                self.storage.flat.copy_(flat)
            pairs = zip(self.indices, self.storage.views, strict=True)
            return [view if used[index] else None for index, view in pairs]
        views = self.storage.layout.views_of(flat)
        result: Gradients = [None] * len(self.indices)
        into: Gradients = [None] * len(self.indices)
        for position, (index, view) in enumerate(zip(self.indices, views, strict=True)):
            if not used[index]:
                continue
            dtype, own = self.originals[position].dtype, sums[position]
            if own is not None and own.dtype == dtype and own.layout == torch.strided:
                # Memory that is nobody else's can become ``.grad``; a view must be copied.
                result[position] = into[position] = own
            else:
                result[position] = view.to(dtype, copy=True)
        kernels.unflatten(flat, into, views=self.storage.layout)
        return result

    def with_late(self, grads: Gradients, late: Mapping[int, torch.Tensor]) -> Gradients:
        """Gradients and what came late, by the index of the parameter, in the originals' dtypes."""
        result: Gradients = []
        for index, original, grad in zip(self.indices, self.originals, grads, strict=True):
            if index in late:
                if grad is not None and self.is_viewed:
                    # It stays a view.
                    grad.add_(late[index])
                else:
                    grad = add(grad, late[index])
            result.append(None if grad is None else grad.to(original.dtype))
        return result


class Buckets:
    """The buckets of one plan, in its order."""

    def __init__(
        self,
        trained: TrainedParameters,
        leaves: Sequence[Sequence[nn.Parameter]],
        options: Options,
        *,
        sends: bool,
        order: Sequence[int] | None,
    ) -> None:
        self.ordered = order is not None
        self.plan = make_plan(trained, options, order, sends=sends)
        self.originals, self.names = originals, names = trained.parameters, trained.names
        reduced = trained.num_reduced if sends else 0
        composed = [names[i] for i in range(reduced) if _holds_tensors(originals[i])]
        if composed:
            raise ValueError(
                f"the parameters {describe_names(composed)} are of a subclass that holds tensors, "
                "whose gradients cannot be put into a flat bucket and sent to other processes; use "
                "one process, or leave them out with _ddp_params_and_buffers_to_ignore"
            )
        self.all: list[Bucket] = []
        for number, indices in enumerate(self.plan.buckets):
            members = [originals[i] for i in indices]
            reduces = indices[0] < reduced
            storage = None
            if reduces and not trained.sparse[indices[0]]:
                storage = BucketStorage(members, options.mixed_precision.reduce_dtype)
            self.all.append(
                Bucket(
                    number,
                    indices,
                    members,
                    [names[i] for i in indices],
                    [[replica[i] for i in indices] for replica in leaves],
                    storage,
                    reduces,
                    is_viewed=options.gradient_as_bucket_view
                    and storage is not None
                    and storage.flat.dtype == members[0].dtype,
                )
            )
        #: How many parameters, from the first on, are reduced over processes.
        self.num_reduced = reduced
        self.on_one_device = len({bucket.home for bucket in self.all}) == 1
        #: Whether gradients come on streams of accelerators.
        self.have_streams = any(is_accelerator(leaf.device) for row in leaves for leaf in row)

    def of(self, index: int) -> Bucket:
        """The bucket of a parameter."""
        return self.all[self.plan.bucket_of(index)]

    def sentinels(self, leaves: Sequence[nn.Parameter]) -> list[int]:
        """Which leaves tell of their gradients: all that are trained while no order is known, then
        the last of each bucket."""
        trained = [[i for i in bucket if leaves[i].requires_grad] for bucket in self.plan.buckets]
        return [index for bucket in trained for index in bucket[-1 if self.ordered else 0 :]]

    def take_astray(self) -> list[int]:
        """Drop gradients that came although no round is under way; of which parameters."""
        found = []
        for bucket in self.all:
            for grads in bucket.take_late() or ():
                found += [i for i, g in zip(bucket.indices, grads, strict=True) if g is not None]
        return found


def make_plan(
    trained: TrainedParameters,
    options: Options,
    order: Sequence[int] | None,
    *,
    sends: bool,
) -> BucketPlan:
    """The plan of all buckets: delayed parameters come late, and what stays local comes last."""
    local = set(range(trained.num_reduced, len(trained.names)))
    late = {i for i, name in enumerate(trained.names) if name in options.delayed} - local
    prompt = set(range(trained.num_reduced)) - late
    return plan_buckets(
        trained.parameters,
        first_bytes=FIRST_BUCKET_BYTES,
        cap_bytes=options.bucket_bytes(sends=sends),
        expect_sparse=trained.sparse,
        order=order,
        parts=[prompt, late, local],
    )


def _empty_sparse(like: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries, as of an embedding that was not used."""
    # Whoever makes one of indices and values is warned by torch 2.11.
    row = torch.zeros((1, *like.shape[1:]), dtype=like.dtype, device=like.device).to_sparse(1)
    return row.sparse_resize_(like.shape, 1, like.dim() - 1).coalesce()


def add(first: MaybeTensor, second: MaybeTensor) -> MaybeTensor:
    """The sum of what is there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


# --- the sum over replicas -----------------------------------------------------------------------


def local_sum(rows: Sequence[Gradients], home: torch.device) -> Gradients:
    """Add up what the replicas computed for the parameters of one bucket."""
    if len(rows) == 1:
        return list(rows[0])
    return sums_of(list(zip(*rows, strict=True)), home, in_place=True)


def _holds_tensors(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a subclass around other tensors, with no memory of its own."""
    return hasattr(type(parameter), "__tensor_flatten__")
