"""The buckets of a reducer: which parameters, in which memory, on which replicas.

Note [Gradient layout contract]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A bucket view has the strides of its parameter if that is dense and does not overlap itself, else it
is contiguous. The autograd engine does the same with a gradient that it accumulates. So adding one
to the other is a pass over memory in order, and an optimizer's fused step finds both alike.

Note [Bucket views]
~~~~~~~~~~~~~~~~~~~
With ``gradient_as_bucket_view`` the originals' ``.grad`` become views of the flat tensor that was
reduced, which saves the copy out of it. If they are still there when the next round begins, the
bucket takes new memory. So the old content of ``.grad`` is there when the round reads it, and after
a round that has failed. The result is then copied into the views, which stay in ``.grad``. A
reference that somebody keeps shows later gradients, too, and the next round needs no new memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import TypeAlias

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.comm.bucket_plan import FIRST_BUCKET_BYTES, LOCAL_BUCKET_BYTES, plan_buckets
from dataparallel.comm.local import Packed, Packing, sums_of, sums_of_packed, unshared
from dataparallel.comm.routes import Reads, SumPlan, has_links, local_bucket_bytes
from dataparallel.errors import describe_names
from dataparallel.kernels import BucketLayout
from dataparallel.reducer.options import Options
from dataparallel.reducer.parameters import TrainedParameters

_grad_of, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")

MaybeTensor: TypeAlias = torch.Tensor | None
#: One gradient for each of several parameters; None for one without.
Gradients: TypeAlias = list[MaybeTensor]
#: The gradients of one replica for a bucket, as they came or put together.
Row: TypeAlias = Gradients | Packed


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


class Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(
        self,
        number: int,
        indices: Sequence[int],
        trained: TrainedParameters,
        leaves: Sequence[Sequence[nn.Parameter]],
        options: Options,
        *,
        reduces: bool,
    ) -> None:
        #: Its place in the order of launching; its parameters; whether they go to other processes.
        self.number, self.indices, self.reduces = number, indices, reduces
        self.originals = [trained.parameters[i] for i in indices]
        self.names = [trained.names[i] for i in indices]
        self.leaves = [[replica[i] for i in indices] for replica in leaves]
        self.home = self.originals[0].device
        #: The memory that is sent; None for a sparse gradient, and if nothing is sent.
        self.storage: BucketStorage | None = None
        #: True if the received values become ``.grad``. See Note [Bucket views].
        self.is_viewed = False
        if reduces and not trained.sparse[indices[0]]:
            self.storage = BucketStorage(self.originals, options.mixed_precision.reduce_dtype)
            is_same = self.storage.flat.dtype == self.originals[0].dtype
            self.is_viewed = options.gradient_as_bucket_view and is_same
        first, last = self.names[0], self.names[-1]
        self.name = f"bucket {number} ({first if first == last else f'{first} .. {last}'})"

    # --- the gradients of one replica ------------------------------------------------------------

    def take(self, replica: int, *, whole: bool = False) -> Gradients:
        """Take the gradients of one replica; nothing where some are to come and all are wanted."""
        leaves = self.leaves[replica]
        grads: Gradients = list(map(_grad_of, leaves))
        if whole:
            missing = itertools.compress(leaves, map(is_, grads, itertools.repeat(None)))
            if any(map(_requires_grad, missing)):
                return []
        for leaf in leaves:
            leaf.grad = None
        return grads

    # --- to the other processes and back ---------------------------------------------------------

    def renew(self) -> None:
        """Leave the memory to gradients that are still there. See Note [Bucket views]."""
        if self.is_viewed and self.storage is not None:
            own = self.storage.flat.untyped_storage().data_ptr()
            grads = [o.grad for o in self.originals if o.grad is not None and not o.grad.is_sparse]
            if any(grad.untyped_storage().data_ptr() == own for grad in grads):
                self.storage = BucketStorage(self.originals)

    def load(self, sums: Gradients, scale: float) -> torch.Tensor:
        """Return the tensor to send: flat or a sparse gradient, scaled, with zeros for None."""
        # A weight of 0 gives zeros: the gradient of a mean over nothing may be NaN.
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
        """Return the gradients of the originals that any process has; this reuses ``sums``."""
        if self.storage is None:
            return [flat if used[self.indices[0]] else None]
        views = self.storage.views
        result: Gradients = list(views)
        for i, (original, own) in enumerate(zip(self.originals, sums, strict=True)):
            fits = own is not None and own.dtype == original.dtype and not own.is_sparse
            if not used[self.indices[i]]:
                result[i] = None
            elif not as_views:
                # Memory that is nobody else's can become ``.grad``.
                result[i] = own if fits else torch.empty_like(views[i], dtype=original.dtype)
        if not as_views:
            kernels.unflatten(flat, result, views=self.storage.layout)
        elif flat.data_ptr() != self.storage.flat.data_ptr():
            self.storage.flat.copy_(flat)
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
        self._leaves = list(itertools.chain(*leaves))
        #: The devices of the replicas and of the originals.
        self.places = {x.device for x in (*self._leaves, *trained.parameters)}
        local = None if sends else local_bucket_bytes(trained.parameters, self.places)
        #: The bytes with which a bucket behind the first one is full, or those of each.
        self.limit = options.bucket_bytes(local)
        self.plan = make_plan(trained, options, order, self.limit, sends=sends)
        self.originals, self.names = originals, names = trained.parameters, trained.names
        reduced = trained.num_reduced if sends else 0
        # They are around other tensors, with no memory of their own.
        kinds = enumerate(map(type, originals[:reduced]))
        composed = [names[i] for i, kind in kinds if hasattr(kind, "__tensor_flatten__")]
        if composed:
            raise ValueError(
                f"the parameters {describe_names(composed)} are of a subclass that holds tensors, "
                "whose gradients cannot be put into a flat bucket and sent to other processes; use "
                "one process, or leave them out with _ddp_params_and_buffers_to_ignore"
            )
        self.all = [
            Bucket(number, indices, trained, leaves, options, reduces=indices[0] < reduced)
            for number, indices in enumerate(self.plan)
        ]
        #: By parameter, the number of its bucket.
        self.number_of = {i: bucket.number for bucket in self.all for i in bucket.indices}
        #: The number of parameters, from the first on, that are reduced over processes.
        self.num_reduced = reduced
        #: The devices of the originals.
        self.homes = list(dict.fromkeys(bucket.home for bucket in self.all))
        #: True if each replica is on one device.
        self.on_one_device = all(len({leaf.device for leaf in row}) == 1 for row in leaves)
        #: True if the sums over replicas go over links between accelerators.
        self.over_links = self.on_one_device and has_links(self.homes[0], self.places)
        num_bytes = sum(original.nbytes for original in originals)
        #: How they go there.
        self.sum_plan = SumPlan(num_bytes, self.homes, self.places)
        #: By bucket, the way in which its gradients are put together for them.
        self.packings = [
            Packing(bucket.leaves[0], self.sum_plan.piece_bytes)
            for bucket in self.all
            if self.over_links
        ]
        #: The bytes of gradients of a replica that may be on their way to several homes.
        self.room = num_bytes // 16
        #: The number of buckets that one replica may be ahead of the others, if they stay together.
        self.num_ahead = max(2, len(self.homes) // 2)
        several = len({row[0].device for row in leaves}) == len(leaves)
        self.keeps_together = several and self.sum_plan.is_direct

    def sentinels(self, leaves: Sequence[nn.Parameter]) -> list[int]:
        """Return leaves that tell of gradients: all trained ones, then the last of each bucket."""
        trained = [[i for i in bucket if leaves[i].requires_grad] for bucket in self.plan]
        return [index for bucket in trained for index in bucket[-1 if self.ordered else 0 :]]

    def take_late(self) -> list[tuple[Bucket, list[Gradients]]]:
        """Take the gradients that came late, by bucket and replica, if there are any."""
        if {type(None)}.issuperset(map(type, map(_grad_of, self._leaves))):
            return []
        replicas = range(len(self.all[0].leaves))
        return [(bucket, list(map(bucket.take, replicas))) for bucket in self.all]

    def refuse_astray(self) -> None:
        """Drop gradients that came although no round is under way; an error if there are any."""
        found: list[str] = []
        for bucket, rows in self.take_late():
            for pairs in (zip(bucket.names, grads, strict=True) for grads in rows):
                found += [name for name, grad in pairs if grad is not None]
        if found:
            raise RuntimeError(
                f"the parameter {found[0]!r} of a replica got a gradient outside of the wrapper's "
                "backward, so it would not be reduced. Outputs are probably kept in objects of a "
                "type in which tensors cannot be found; return tensors, containers or dataclasses, "
                "or register the type with torch.utils._pytree"
            )


def make_plan(
    trained: TrainedParameters,
    options: Options,
    order: Sequence[int] | None,
    limit: int | tuple[int, ...],
    *,
    sends: bool,
) -> list[list[int]]:
    """Return the plan of all buckets: delayed parameters come late, and local ones last."""
    local = set(range(trained.num_reduced, len(trained.names)))
    late = {i for i, name in enumerate(trained.names) if name in options.delayed} - local
    prompt = set(range(trained.num_reduced)) - late
    return plan_buckets(
        trained.parameters,
        # If nothing is sent, nothing begins early: a thread that adds up and frees gradients takes
        # the interpreter's lock from the others at each.
        first_bytes=FIRST_BUCKET_BYTES if sends else LOCAL_BUCKET_BYTES,
        cap_bytes=limit,
        expect_sparse=trained.sparse,
        order=order,
        parts=[prompt, late, local],
    )


def _empty_sparse(like: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient without entries, as of an embedding that was not used."""
    # Whoever makes one of indices and values is warned by torch 2.11.
    row = torch.zeros((1, *like.shape[1:]), dtype=like.dtype, device=like.device).to_sparse(1)
    return row.sparse_resize_(like.shape, 1, like.dim() - 1).coalesce()


def add(first: MaybeTensor, second: MaybeTensor) -> MaybeTensor:
    """Return the sum of the gradients that are there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


# --- the sum over replicas -----------------------------------------------------------------------


def packed_alike(rows: Sequence[Row]) -> list[Packed]:
    """Return the rows of one bucket if all are put together in one way; else nothing."""
    packed = [row for row in rows if isinstance(row, Packed)]
    alike = len(packed) == len(rows) and all(map(packed[0].lies_like, packed[1:]))
    return packed if alike else []


def local_sum(
    rows: Sequence[Row], home: torch.device, plan: SumPlan, reads: Reads | None = None
) -> Gradients:
    """Add up what the replicas computed for the parameters of one bucket, over their terms."""
    if packed := packed_alike(rows):
        return list(sums_of_packed(packed, home, plan, in_place=True, reads=reads))
    given: list[Gradients] = [
        [*row.unpacked(row.flats)] if isinstance(row, Packed) else row for row in rows
    ]
    first, *others = unshared(given[0]), *given[1:]
    if not others:
        return first
    if any([grad is None for grad in first]):
        others = list(map(unshared, others))
    return sums_of([first, *others], home, in_place=True)
