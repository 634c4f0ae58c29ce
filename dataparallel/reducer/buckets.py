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
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from dataparallel import comm, kernels
from dataparallel.comm.bucket_plan import BucketPlan, plan_buckets
from dataparallel.comm.sums import add_arriving, add_columns, add_into, can_add
from dataparallel.errors import debug_level, describe_names
from dataparallel.graph.gradient_home import IN_GRAD, GradientHome
from dataparallel.kernels import BucketLayout
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.options import ReducerOptions

_log = logging.getLogger("dataparallel")

T = TypeVar("T")
MaybeTensor: TypeAlias = torch.Tensor | None
#: Of several parameters, one gradient each; None where there is none.
Gradients: TypeAlias = list[MaybeTensor]


class BucketStorage:
    """A flat tensor and views of it, one per parameter."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        first = parameters[0]
        size = sum(like.numel() for like in parameters)
        with torch.inference_mode(False), torch.no_grad():
            self.flat = torch.zeros(size, dtype=dtype or first.dtype, device=first.device)
            self.views = _make_views(self.flat, parameters)
        #: The places of the views, for the kernels.
        self.layout = BucketLayout(self.flat, self.views)


def _make_views(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See Note [Gradient layout contract]."""
    views = []
    offset = 0
    for like in likes:
        part = flat[offset : offset + like.numel()]
        # This is what decides whether torch keeps strides in new tensors.
        if torch.empty_like(like, device="meta").stride() == like.stride():
            views.append(part.as_strided(like.size(), like.stride(), part.storage_offset()))
        else:
            views.append(part.view(like.shape))
        offset += like.numel()
    return views


class Bucket:
    """Parameters whose gradients are reduced together; they are tensors of the engine."""

    is_viewed = False

    def __init__(
        self,
        number: int,
        indices: Sequence[int],
        originals: list[nn.Parameter],
        leaves: list[list[nn.Parameter]],
        name: str,
        storage: BucketStorage | None,
        *,
        reduces: bool,
    ) -> None:
        self.number = number
        self.indices = indices
        self.originals = originals
        self.leaves = leaves
        self.name = name
        self.storage = storage
        self.reduces = reduces
        self.home = originals[0].device

    # --- the gradients of one replica ------------------------------------------------------------

    def present(self, replica: int) -> bool:
        """Whether each leaf that is trained has a gradient."""
        leaves = self.leaves[replica]
        return all([leaf.grad is not None or not leaf.requires_grad for leaf in leaves])

    def take(self, replica: int) -> Gradients:
        """The gradients of one replica; what comes afterwards is apart from them."""
        grads = [leaf.grad for leaf in self.leaves[replica]]
        self._detach(replica)
        return grads

    def take_late(self) -> list[Gradients] | None:
        """Per replica, what has come since the gradients were taken; None if nothing has."""
        if not any([leaf.grad is not None for leaves in self.leaves for leaf in leaves]):
            return None
        return [Bucket.take(self, replica) for replica in range(len(self.leaves))]

    def drop(self) -> None:
        """Forget the gradients of all replicas."""
        for replica in range(len(self.leaves)):
            self._detach(replica)

    def _detach(self, replica: int) -> None:
        for leaf in self.leaves[replica]:
            leaf.grad = None

    # --- their sum -------------------------------------------------------------------------------

    def add_up(self, rows: Sequence[Gradients]) -> Gradients:
        """The sums of the replicas' gradients, in replica order."""
        return local_sum(rows, self.home)

    @torch.no_grad()
    def complete(self, sums: Gradients, accumulated: Accumulated, *, in_place: bool) -> Gradients:
        """The sums, with what ``.grad`` held before and is to be reduced with them."""
        if not self.reduces:
            return sums
        before = [accumulated.unreduced(index) for index in self.indices]
        total = list(sums)
        columns: dict[int, list[torch.Tensor]] = {}
        for position, (held, grad) in enumerate(zip(before, sums, strict=True)):
            if held is None or grad is None or not _are_alike(held, grad):
                total[position] = add(held, grad)
            else:
                columns[position] = [grad, held]
        added = add_columns(list(columns.values()), in_place=in_place)
        for position, grad in zip(columns, added, strict=True):
            total[position] = grad
        return total

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
                return self.load_nothing()
            return (grad if grad.is_sparse else grad.to_sparse(1)).mul(scale).coalesce()
        if scale == 0:
            return self.load_nothing()
        pack(self.storage, [_as_dense(grad) for grad in sums], scale)
        return self.storage.flat

    def load_nothing(self) -> torch.Tensor:
        """What is sent so that no other process waits for it: zeros."""
        if self.storage is None:
            return empty_sparse(self.originals[0]).coalesce()
        return self.storage.flat.zero_()

    def deliver(
        self,
        flat: MaybeTensor,
        sums: Gradients,
        used: Sequence[int],
        extra: dict[int, torch.Tensor],
    ) -> Gradients:
        """The gradients of the originals, as far as they are not in ``.grad`` already.

        Args:
            flat: What the processes have sent, reduced; None if they have no part in it.
            sums: What this process has computed, whose memory is used again.
            used: Per parameter of the module, whether any process has a gradient.
            extra: Gradients that came late, by the index of the parameter.
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

    def __init__(
        self,
        number: int,
        indices: Sequence[int],
        originals: list[nn.Parameter],
        leaves: list[list[nn.Parameter]],
        name: str,
        storage: BucketStorage,
        *,
        reduces: bool,
    ) -> None:
        super().__init__(number, indices, originals, leaves, name, storage, reduces=reduces)
        self._of_replicas = [storage, *(BucketStorage(replica) for replica in leaves[1:])]
        # Apart from the storages' own views: these have a version counter each, which tells whether
        # the engine has added to this one.
        self._views = [[_with_own_version(v) for v in s.views] for s in self._of_replicas]
        self._versions = [[0] * len(indices) for _ in leaves]
        # To bring the memory of another device without new memory in each round.
        self._arrival: MaybeTensor = None
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
        self._detach(replica)
        pairs = zip(self._of_replicas[replica].views, self._written(replica), strict=True)
        return [view if written else None for view, written in pairs]

    def add_up(self, rows: Sequence[Gradients]) -> Gradients:
        """The views, with what all replicas have added to theirs."""
        if len(rows) > 1:
            total, *others = [storage.flat for storage in self._of_replicas]
            if can_add([total, *others], total.device):
                add_into(total, [total, *others])
            else:
                add_arriving(total, map(self._arrived, others), len(rows))
        used = [any(grad is not None for grad in column) for column in zip(*rows, strict=True)]
        return [view if use else None for view, use in zip(self._own, used, strict=True)]

    def _arrived(self, term: torch.Tensor) -> torch.Tensor:
        total = self._of_replicas[0].flat
        if term.device == total.device:
            return term
        if self._arrival is None:
            self._arrival = torch.empty_like(total)
        return self._arrival.copy_(term)

    @torch.no_grad()
    def complete(self, sums: Gradients, accumulated: Accumulated, *, in_place: bool) -> Gradients:
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
        originals: Sequence[nn.Parameter],
        names: Sequence[str],
        leaves: Sequence[Sequence[nn.Parameter]],
        options: ReducerOptions,
        *,
        sends: bool,
        expect_sparse: Sequence[bool],
        order: Sequence[int] | None,
    ) -> None:
        self.ordered = order is not None
        self.plan = make_plan(originals, options, expect_sparse, order)
        when = "before the first backward" if order is None else "in the order of arrival"
        _log_plan(self.plan, names, when)
        reduced = len(originals) - options.num_local if sends else 0
        composed = [
            n for n, o in zip(names[:reduced], originals, strict=False) if _holds_tensors(o)
        ]
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
            arguments = (
                number,
                indices,
                members,
                [[replica[i] for i in indices] for replica in leaves],
                _describe(number, indices, names),
            )
            bucket: Bucket
            if viewed:
                bucket = ViewedBucket(*arguments, BucketStorage(members), reduces=reduces)
            else:
                flat = reduces and not sparse
                storage = BucketStorage(members, options.reduce_dtype) if flat else None
                bucket = Bucket(*arguments, storage, reduces=reduces)
            self.all.append(bucket)
        #: How many parameters, from the first on, are reduced over processes.
        self.num_reduced = reduced
        self.on_one_device = len({bucket.home for bucket in self.all}) == 1
        self._viewed = [bucket for bucket in self.all if isinstance(bucket, ViewedBucket)]
        storages = [bucket.storage for bucket in self.all if bucket.storage is not None]
        self._memory = {storage.flat.untyped_storage().data_ptr() for storage in storages}

    @property
    def any_viewed(self) -> bool:
        """Whether some gradients are views of a flat tensor."""
        return bool(self._viewed)

    def of(self, index: int) -> Bucket:
        """The bucket of a parameter."""
        return self.all[self.plan.bucket_of(index)]

    def arranged(self, values: Sequence[T]) -> list[list[T]]:
        """One value for each parameter, bucket by bucket."""
        return [[values[index] for index in bucket] for bucket in self.plan.buckets]

    def sentinels(self, leaves: Sequence[nn.Parameter]) -> list[int]:
        """Which leaves tell of their gradients: all that are trained while no order is known, then
        the last of each bucket."""
        trained = [[i for i in bucket if leaves[i].requires_grad] for bucket in self.plan.buckets]
        return [index for bucket in trained for index in bucket[-1 if self.ordered else 0 :]]

    def astray(self) -> list[int]:
        """Parameters of which a leaf has a gradient although no round is under way."""
        return [
            index
            for bucket in self.all
            for leaves in bucket.leaves
            for index, leaf in zip(bucket.indices, leaves, strict=True)
            if leaf.grad is not None
        ]

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
    originals: Sequence[nn.Parameter],
    options: ReducerOptions,
    expect_sparse: Sequence[bool],
    order: Sequence[int] | None,
) -> BucketPlan:
    """The plan of all buckets: delayed parameters come late, and what stays local comes last."""
    local = set(range(len(originals) - options.num_local, len(originals)))
    prompt = set(range(len(originals))) - options.delayed - local
    return plan_buckets(
        originals,
        first_bytes=options.first_bucket_bytes,
        cap_bytes=options.bucket_bytes,
        expect_sparse=expect_sparse,
        order=order,
        parts=[prompt, options.delayed - local, local],
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


def empty_sparse(like: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries, as of an embedding that was not used."""
    # Whoever makes one of indices and values is warned by torch 2.11.
    row = torch.zeros((1, *like.shape[1:]), dtype=like.dtype, device=like.device).to_sparse(1)
    return row.sparse_resize_(like.shape, 1, like.dim() - 1)


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
    every = [grad for row in rows for grad in row if grad is not None]
    here = all([grad.device == home and not grad.is_sparse for grad in every])
    if here and len(every) == len(rows) * len(rows[0]):
        return list(
            add_columns([list(column) for column in zip(*rows, strict=True)], in_place=True)
        )
    sums: Gradients = [None] * len(rows[0])
    columns: dict[int, list[torch.Tensor]] = {}
    # What the same replicas have is brought together from other devices.
    together: dict[tuple[int, ...], dict[int, list[torch.Tensor]]] = {}
    for position, column in enumerate(zip(*rows, strict=True)):
        terms = [grad for grad in column if grad is not None]
        if len(terms) < 2 and all(term.device == home for term in terms):
            sums[position] = terms[0] if terms else None
        elif any(term.is_sparse for term in terms):
            # They have no common shape to be packed together.
            (sums[position],) = comm.reduce_add_coalesced([[term] for term in terms], home)
        elif all(term.device == home for term in terms):
            columns[position] = terms
        else:
            givers = tuple(i for i, grad in enumerate(column) if grad is not None)
            together.setdefault(givers, {})[position] = terms
    totals = dict(zip(columns, add_columns(list(columns.values()), in_place=True), strict=True))
    for members in together.values():
        parts = [list(row) for row in zip(*members.values(), strict=True)]
        totals.update(zip(members, comm.reduce_add_coalesced(parts, home), strict=True))
    for position, total in totals.items():
        sums[position] = total
    return sums


def _are_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two gradients may be added up together with those of other parameters."""
    dense = first.layout == second.layout == torch.strided
    return dense and first.dtype == second.dtype and first.device == second.device


def _as_dense(grad: MaybeTensor) -> MaybeTensor:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _with_own_version(view: torch.Tensor) -> torch.Tensor:
    alone = torch.empty(0, dtype=view.dtype, device=view.device)
    return alone.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())


def _describe(number: int, bucket: Sequence[int], names: Sequence[str]) -> str:
    first, last = names[bucket[0]], names[bucket[-1]]
    return f"bucket {number} ({first if first == last else f'{first} .. {last}'})"


def _holds_tensors(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a subclass around other tensors, with no memory of its own."""
    return hasattr(type(parameter), "__tensor_flatten__")
