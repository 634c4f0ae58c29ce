"""The buckets of a reducer: which parameters, in which memory, on which replicas.

Either the engine leaves its own tensors in ``.grad`` of the leaves and they are taken from there:
these are in a :class:`Bucket`. Or ``.grad`` is a view of the bucket's flat memory to which the
engine adds in place: a :class:`ViewedBucket`.

Note [Gradient layout contract]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A bucket view has the strides of its parameter if that is dense and does not overlap itself, else it
is contiguous. This is what the autograd engine makes of a gradient that it accumulates, so adding
one to the other is a pass over memory in order, and an optimizer's fused step finds both alike.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import nn

from dataparallel import kernels
from dataparallel.comm.bucket_plan import BucketPlan, plan_buckets
from dataparallel.comm.local import sums_of
from dataparallel.errors import debug_level, describe_names
from dataparallel.graph.gradient_home import IN_GRAD, GradientHome
from dataparallel.kernels import BucketLayout
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.options import FIRST_BUCKET_BYTES, ReducerOptions, TrainedParameters

_log = logging.getLogger("dataparallel")

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
    """Parameters whose gradients are reduced together; they are tensors of the engine.

    Attributes:
        number: Its place in the order of launching.
        indices, originals, names: Its parameters.
        leaves: Per replica, what that computes with in their place.
        storage: What is sent; None for a sparse gradient, and where nothing is.
        reduces: Whether it is reduced over processes.
    """

    number: int
    indices: Sequence[int]
    originals: Sequence[nn.Parameter]
    names: Sequence[str]
    leaves: Sequence[Sequence[nn.Parameter]]
    storage: BucketStorage | None
    reduces: bool
    is_viewed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.home = self.originals[0].device
        first, last = self.names[0], self.names[-1]
        self.name = f"bucket {self.number} ({first if first == last else f'{first} .. {last}'})"

    # --- the gradients of one replica ------------------------------------------------------------

    def present(self, replica: int) -> bool:
        """Whether each leaf that is trained has a gradient."""
        leaves = self.leaves[replica]
        return all([leaf.grad is not None or not leaf.requires_grad for leaf in leaves])

    def take(self, replica: int) -> Gradients:
        """The gradients of one replica; what comes afterwards is apart from them."""
        grads = []
        for leaf in self.leaves[replica]:
            grads.append(leaf.grad)
            leaf.grad = None
        return grads

    def take_late(self) -> list[Gradients] | None:
        """Per replica, what has come since the gradients were taken; None if nothing has."""
        for leaves in self.leaves:
            for leaf in leaves:
                if leaf.grad is not None:
                    return self.drop()
        return None

    def drop(self) -> list[Gradients]:
        """Take the gradients of all replicas away, whatever they are a part of."""
        return [Bucket.take(self, replica) for replica in range(len(self.leaves))]

    # --- their sum -------------------------------------------------------------------------------

    def add_up(self, rows: Sequence[Gradients]) -> Gradients:
        """The sums of the replicas' gradients, in replica order."""
        return local_sum(rows, self.home)

    @torch.no_grad()
    def complete(self, sums: Gradients, accumulated: Accumulated) -> Gradients:
        """The sums, with what ``.grad`` held before and is to be reduced with them."""
        if not self.reduces:
            return sums
        pairs = zip(self.indices, sums, strict=True)
        return [add(grad, accumulated.unreduced(index)) for index, grad in pairs]

    def clear(self, index: int) -> None:
        """Hold nothing for a parameter, whose sum has gone another way."""

    def add_outside(self, index: int, sums: Gradients, grad: torch.Tensor) -> None:
        """Add a gradient to a sum that was not sent yet."""
        position = self.indices.index(index)
        sums[position] = add(sums[position], grad)

    # --- to the other processes and back ---------------------------------------------------------

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
        pack(self.storage, [_as_dense(grad) for grad in sums], scale)
        return self.storage.flat

    def deliver(
        self,
        flat: MaybeTensor,
        sums: Gradients,
        used: Sequence[int],
        extra: dict[int, torch.Tensor],
    ) -> Gradients:
        """The gradients of the originals, as far as they are not in ``.grad`` already.

        ``flat`` is what the processes have reduced, if they have a part in it; the memory of
        ``sums`` is used again. ``used`` tells of each parameter whether any process has a gradient,
        and ``extra`` has what came late, by the index of the parameter.
        """
        grads = sums if flat is None else self._received(flat, sums, used)
        if extra:
            grads = [add(grad, extra.get(i)) for grad, i in zip(grads, self.indices, strict=True)]
        pairs = zip(grads, self.originals, strict=True)
        return [None if grad is None else grad.to(original.dtype) for grad, original in pairs]

    def release(self) -> None:
        """End a round in which the gradients were used up."""

    def _received(self, flat: torch.Tensor, sums: Gradients, used: Sequence[int]) -> Gradients:
        if self.storage is None:
            return [flat if used[self.indices[0]] else None]
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


class ViewedBucket(Bucket):
    """A bucket whose gradients are views of its memory, of the leaves and of the originals."""

    is_viewed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.storage is not None
        self._of_replicas = [self.storage, *map(BucketStorage, self.leaves[1:])]
        # Apart from the storages' own views: these have a version counter each, which tells whether
        # the engine has added to this one.
        self._views = [[_with_own_version(v) for v in s.views] for s in self._of_replicas]
        self._versions = [[0] * len(self.indices) for _ in self.leaves]
        self._home = IN_GRAD
        #: What the originals' gradients were when the round began; copies or versions of those that
        #: are not views of this bucket.
        self._grads: Gradients = []
        self._sources: dict[int, torch.Tensor] = {}
        self._foreign: dict[int, int] = {}
        #: What must not be reduced again, and what the user's hooks must not see.
        self._aside: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}

    # --- what the originals have -----------------------------------------------------------------

    def keep(self, storages: Collection[int], home: GradientHome) -> None:
        """Note what gradients there are; before any bucket is written."""
        self._home = home
        home.make_way(self.originals, storages)
        self._grads = home.read(self.originals)
        self._foreign, self._sources = {}, {}
        for index, grad, view in zip(self.indices, self._grads, self._own, strict=True):
            if grad is None or grad.data_ptr() == view.data_ptr():
                continue
            # The user's own tensor, or a view of what was the bucket before, or another's view.
            if not grad.is_sparse and grad.untyped_storage().data_ptr() in storages:
                self._sources[index] = grad.detach().clone()
            else:
                self._sources[index] = grad.detach()
                self._foreign[index] = grad._version

    @torch.no_grad()
    def attach(self, accumulated: Accumulated | None, hooked: Collection[int]) -> None:
        """Hold what the originals' ``.grad`` held, or zeros, and be ``.grad`` of the leaves."""
        self._aside, self._before = {}, {}
        if all([grad is None for grad in self._grads]):
            self._of_replicas[0].flat.zero_()
        else:
            for index, grad, view in zip(self.indices, self._grads, self._own, strict=True):
                if grad is None:
                    view.zero_()
                    continue
                if index in self._sources:
                    view.copy_(self._sources[index])
                aside = None if accumulated is None else accumulated.set_aside(index, view)
                if aside is not None:
                    view.sub_(aside)
                    self._aside[index] = aside
                if index in hooked:
                    self._before[index] = view.clone()
                    view.zero_()
        self._sources = {}
        for storage in self._of_replicas[1:]:
            storage.flat.zero_()
        for leaves, views in zip(self.leaves, self._views, strict=True):
            for leaf, view in zip(leaves, views, strict=True):
                leaf.grad = view
        self._versions = [[view._version for view in views] for views in self._views]

    @property
    def _own(self) -> list[torch.Tensor]:
        return self._of_replicas[0].views

    def _publish(self, used: Sequence[int]) -> None:
        """Show each parameter that has a gradient, or had one before, its view as that."""
        now = self._home.read(self.originals)
        members = zip(self.indices, self.originals, self._grads, now, self._own, strict=True)
        for index, original, before, grad, view in members:
            if index in self._aside:
                with torch.no_grad():
                    view.add_(self._aside[index])
            version = self._foreign.get(index)
            written = before is not None and version not in (None, before._version)
            if grad is not None and (grad is not before or written):
                self._add_meanwhile(grad, before, view)
            if used[index] or grad is not None:
                self._home.show(original, view)
        self.release()

    @torch.no_grad()
    def _add_meanwhile(self, grad: torch.Tensor, before: MaybeTensor, view: torch.Tensor) -> None:
        """Keep what something else has put into the gradient since the round began."""
        if before is not None:
            raise RuntimeError(
                "the gradient of a parameter was changed during the backward that computes it, by "
                "a hook or another wrapper of the module; with gradient_as_bucket_view=True "
                "gradients are added up in one place, so leave it at False"
            )
        view.add_(grad)

    def release(self) -> None:
        """End a round; nothing is shown that is not shown already."""
        self._aside = {}
        self._grads = []
        self._home = IN_GRAD

    def forget(self, home: GradientHome) -> None:
        """Show no views any more, since their content is not known."""
        self._home, self._grads = IN_GRAD, []
        home.take_back(self.originals, self._own)

    # --- as in the other kind of bucket ----------------------------------------------------------

    def _written(self, replica: int) -> list[bool]:
        pairs = zip(self._views[replica], self._versions[replica], strict=True)
        return [view._version != version for view, version in pairs]

    def present(self, replica: int) -> bool:
        """Whether something was added to the view of each leaf that is trained."""
        pairs = zip(self._written(replica), self.leaves[replica], strict=True)
        return all([written or not leaf.requires_grad for written, leaf in pairs])

    def take(self, replica: int) -> Gradients:
        """The views, None for those to which nothing was added."""
        Bucket.take(self, replica)
        pairs = zip(self._of_replicas[replica].views, self._written(replica), strict=True)
        return [view if written else None for view, written in pairs]

    def add_up(self, rows: Sequence[Gradients]) -> Gradients:
        """The views, with what all replicas have added to theirs."""
        if len(rows) > 1:
            sums_of([[s.flat for s in self._of_replicas]], self.home, in_place=True)
        used = [any(grad is not None for grad in column) for column in zip(*rows, strict=True)]
        return [view if use else None for view, use in zip(self._own, used, strict=True)]

    @torch.no_grad()
    def complete(self, sums: Gradients, accumulated: Accumulated) -> Gradients:
        """Hold the sums, and what ``.grad`` held before."""
        for index, view, grad in zip(self.indices, self._own, sums, strict=True):
            if grad is not None and grad is not view:
                view.copy_(grad)
            if index in self._before:
                view.add_(self._before[index])
        self._before = {}
        return [None if grad is None else view for grad, view in zip(sums, self._own, strict=True)]

    def clear(self, index: int) -> None:
        """Hold nothing for a parameter, whose gradient has gone another way."""
        self._own[self.indices.index(index)].zero_()

    def add_outside(self, index: int, sums: Gradients, grad: torch.Tensor) -> None:
        """Add a gradient to a view that was not sent yet."""
        self._own[self.indices.index(index)].add_(grad)

    def load(self, sums: Gradients, scale: float) -> torch.Tensor:
        """The flat tensor, scaled."""
        flat = self._of_replicas[0].flat
        if scale == 0:
            return flat.zero_()
        return flat if scale == 1 else flat.mul_(scale)

    def deliver(
        self,
        flat: MaybeTensor,
        sums: Gradients,
        used: Sequence[int],
        extra: dict[int, torch.Tensor],
    ) -> Gradients:
        """None for all: the originals are shown the views of what has come."""
        own = self._of_replicas[0].flat
        if flat is not None and flat.data_ptr() != own.data_ptr():
            own.copy_(flat)
        for index, view in zip(self.indices, self._own, strict=True):
            if index in extra:
                view.add_(extra[index])
        self._publish(used)
        return [None] * len(self.indices)


class Buckets:
    """The buckets of one plan, in its order."""

    def __init__(
        self,
        trained: TrainedParameters,
        leaves: Sequence[Sequence[nn.Parameter]],
        options: ReducerOptions,
        *,
        sends: bool,
        order: Sequence[int] | None,
    ) -> None:
        self.ordered = order is not None
        self.plan = make_plan(trained, options, order, sends=sends)
        originals, names, expect_sparse = trained.parameters, trained.names, trained.sparse
        when = "before the first backward" if order is None else "in the order of arrival"
        _log_plan(self.plan, names, when)
        reduced = trained.num_reduced if sends else 0
        composed = [names[i] for i in range(reduced) if _holds_tensors(originals[i])]
        if composed:
            raise ValueError(
                f"the parameters {describe_names(composed)} are of a subclass that holds tensors, "
                "whose gradients cannot be put into a flat bucket and sent to other processes; use "
                "one process, or leave them out with _ddp_params_and_buffers_to_ignore"
            )
        same = all([leaf.dtype == o.dtype for leaf, o in zip(leaves[0], originals, strict=True)])
        views = options.gradient_as_bucket_view and same
        self.all: list[Bucket] = []
        for number, indices in enumerate(self.plan.buckets):
            members = [originals[i] for i in indices]
            reduces, sparse = indices[0] < reduced, expect_sparse[indices[0]]
            viewed = views and not sparse and not any(map(_holds_tensors, members))
            storage = None
            if viewed:
                storage = BucketStorage(members)
            elif reduces and not sparse:
                storage = BucketStorage(members, options.reduce_dtype)
            make = ViewedBucket if viewed else Bucket
            held = [[replica[i] for i in indices] for replica in leaves]
            named = [names[i] for i in indices]
            self.all.append(make(number, indices, members, named, held, storage, reduces))
        #: How many parameters, from the first on, are reduced over processes.
        self.num_reduced = reduced
        self.on_one_device = len({bucket.home for bucket in self.all}) == 1
        self._viewed = [bucket for bucket in self.all if isinstance(bucket, ViewedBucket)]
        #: Whether some gradients are views of a flat tensor.
        self.any_viewed = bool(self._viewed)
        storages = [bucket.storage for bucket in self.all if bucket.storage is not None]
        self._memory = {storage.flat.untyped_storage().data_ptr() for storage in storages}

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

    def attach(
        self, accumulated: Accumulated, hooked: Collection[int] = (), *, reduces: bool
    ) -> None:
        """Make everything ready for a round."""
        for bucket in self._viewed:
            bucket.keep(self._memory, accumulated.home)
        for bucket in self._viewed:
            bucket.attach(accumulated if reduces and bucket.reduces else None, hooked)

    def forget_views(self, home: GradientHome) -> None:
        """Leave no gradient that is a part of a bucket whose content is not known."""
        for bucket in self._viewed:
            bucket.forget(home)


def make_plan(
    trained: TrainedParameters,
    options: ReducerOptions,
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


def _log_plan(plan: BucketPlan, names: Sequence[str], why: str) -> None:
    """Log the buckets, one line each, if ``TORCH_DISTRIBUTED_DEBUG`` asks for more than errors."""
    if debug_level() == "OFF" or not _log.isEnabledFor(logging.INFO):
        return
    count, size = sum(map(len, plan.buckets)), sum(plan.bytes) / 1024
    _log.info("%d parameters, %.1f KiB, in %d buckets %s", count, size, len(plan), why)
    for number, (bucket, num_bytes) in enumerate(zip(plan.buckets, plan.bytes, strict=True)):
        shown = describe_names(f"{index} ({names[index]})" for index in bucket)
        _log.info("bucket %d, %.1f KiB: %s", number, num_bytes / 1024, shown)


def pack(storage: BucketStorage, sums: Sequence[MaybeTensor], scale: float) -> None:
    """Copy gradients into a bucket, scaled; zeros where there is none."""
    kernels.flatten(sums, storage.flat, scale, views=storage.layout)


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


def _as_dense(grad: MaybeTensor) -> MaybeTensor:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _with_own_version(view: torch.Tensor) -> torch.Tensor:
    alone = torch.empty(0, dtype=view.dtype, device=view.device)
    return alone.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())


def _holds_tensors(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a subclass around other tensors, with no memory of its own."""
    return hasattr(type(parameter), "__tensor_flatten__")
