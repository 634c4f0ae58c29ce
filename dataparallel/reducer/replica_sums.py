"""What the replicas of this process have computed in one round, added up and ready to be sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from dataparallel.comm.sums import add_columns
from dataparallel.graph.original_hooks import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Buckets
from dataparallel.reducer.delivery import add
from dataparallel.reducer.guard import Guard
from dataparallel.reducer.local_sum import MaybeTensor, local_sum
from dataparallel.reducer.round import Round
from dataparallel.reducer.usage import Usage


@dataclass
class ReplicaSums:
    """Adds up the gradients of the replicas, bucket by bucket.

    Attributes:
        buckets: The buckets of the round.
        accumulated: What ``.grad`` held before it.
        usage: Is told which parameters have a gradient.
        user_hooks: Hooks of the user on the originals.
        guard: Looks at gradients; None where nobody does.
        reduces: Whether the round reduces over processes.
        through: Parameters whose sums go through the engine, for hooks, before they are sent; see
            Note [Gradients from outside of the wrapper].
        passed: The sums of these, until they are handed to the engine.
    """

    buckets: Buckets
    accumulated: Accumulated
    usage: Usage
    user_hooks: OriginalHooks
    guard: Guard | None
    reduces: bool
    through: Collection[int] = ()
    passed: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, number: int, rows: list[list[MaybeTensor]]) -> list[MaybeTensor]:
        """The sums of a bucket.

        Args:
            number: Number of the bucket.
            rows: Per replica one gradient per parameter, None where there is none.
        """
        bucket = self.buckets.plan.buckets[number]
        if self.buckets.is_viewed(number):
            self.buckets.sum_views(number)
            sums = list(rows[0])
            used = [any(grad is not None for grad in column) for column in zip(*rows, strict=True)]
            if self.through:
                views = self.buckets.views(number)
                pairs = zip(views, used, strict=True)
                self._pass(bucket, [view if use else None for view, use in pairs])
            self.buckets.complete_views(number, used, self.user_hooks, self.through)
            self._look_after_hooks(bucket, self.buckets.views(number))
        else:
            sums = local_sum(rows, self.buckets.homes[number])
            sums = self._hooked(bucket, sums, early=self.reduces)
            used = [grad is not None for grad in sums]
            sums = self._pass(bucket, sums)
            if self.reduces:
                sums = self._with_unreduced(bucket, sums)
        for index, has_gradient in zip(bucket, used, strict=True):
            self.usage.used[index] |= has_gradient or self.accumulated.has_unreduced(index)
        return sums

    def _pass(self, bucket: Sequence[int], sums: list[MaybeTensor]) -> list[MaybeTensor]:
        """The sums without those that go through the engine first."""
        left = list(sums)
        for position, index in enumerate(bucket):
            grad = left[position]
            if grad is not None and index in self.through:
                # A view is written to with its bucket.
                self.passed[index] = add(self.passed.get(index), grad.clone())
                left[position] = None
        return left

    @torch.no_grad()
    def _with_unreduced(self, bucket: Sequence[int], sums: list[MaybeTensor]) -> list[MaybeTensor]:
        """The sums and what the gradients from before the round add to them."""
        before = [self.accumulated.unreduced(index) for index in bucket]
        total = list(sums)
        columns: dict[int, list[torch.Tensor]] = {}
        for position, (held, grad) in enumerate(zip(before, sums, strict=True)):
            if held is None or grad is None or not _are_alike(held, grad):
                total[position] = add(held, grad)
            else:
                columns[position] = [grad, held]
        # What a hook has returned may be the user's own tensor.
        in_place = not self.user_hooks.with_gradient_hooks
        added = add_columns(list(columns.values()), in_place=in_place)
        for position, grad in zip(columns, added, strict=True):
            total[position] = grad
        return total

    def late(self, round_: Round) -> dict[int, torch.Tensor]:
        """The sums of what came after its bucket was taken, by the index of the parameter."""
        extra: dict[int, torch.Tensor] = {}
        for number, rows in round_.late().items():
            bucket = self.buckets.plan.buckets[number]
            sums = local_sum(rows, self.buckets.homes[number])
            early = self.reduces or self.buckets.is_viewed(number)
            sums = self._hooked(bucket, sums, early=early)
            extra.update((i, g) for i, g in zip(bucket, sums, strict=True) if g is not None)
        self.usage.check_late(extra)
        for index in extra.keys() & set(self.through):
            self._pass([index], [extra.pop(index)])
        return extra

    def _hooked(
        self, bucket: Sequence[int], sums: list[MaybeTensor], *, early: bool
    ) -> list[MaybeTensor]:
        """What hooks make of sums, if they run before the engine would run them."""
        if (not early and self.guard is None) or self.through:
            return sums
        sums = self.user_hooks.run_all(bucket, sums)
        self._look_after_hooks(bucket, sums)
        return sums

    def _look_after_hooks(self, bucket: Sequence[int], sums: Sequence[MaybeTensor]) -> None:
        if self.guard is None or not self.user_hooks.with_gradient_hooks or self.through:
            return
        for index, grad in zip(bucket, sums, strict=True):
            if grad is not None and index in self.user_hooks.with_gradient_hooks:
                self.guard.look_after_hook(index, grad)


def _are_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two gradients may be added up together with those of other parameters."""
    dense = first.layout == second.layout == torch.strided
    return dense and first.dtype == second.dtype and first.device == second.device
