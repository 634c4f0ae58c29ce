"""What the replicas of this process have computed in one round, added up and ready to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Buckets
from dataparallel.reducer.delivery import add
from dataparallel.reducer.guard import Guard
from dataparallel.reducer.local_sum import MaybeTensor, local_sum
from dataparallel.reducer.original_hooks import OriginalHooks
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
        has_processes: Whether there are other processes.
        reduces: Whether the round reduces over them.
    """

    buckets: Buckets
    accumulated: Accumulated
    usage: Usage
    user_hooks: OriginalHooks
    guard: Guard | None
    has_processes: bool
    reduces: bool

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
            self.buckets.complete_views(number, used, self.user_hooks)
            self._look_after_hooks(bucket, self.buckets.views(number))
            if self.accumulated.any:
                pairs = zip(bucket, used, strict=True)
                used = [use or self.accumulated.has_unreduced(i) for i, use in pairs]
        else:
            sums = local_sum(rows, self.buckets.homes[number])
            sums = self._hooked(bucket, sums, early=self.has_processes)
            if self.reduces and self.accumulated.any:
                terms = zip(bucket, sums, strict=True)
                sums = [add(self.accumulated.unreduced(index), grad) for index, grad in terms]
            used = [grad is not None for grad in sums]
        for index, has_gradient in zip(bucket, used, strict=True):
            self.usage.used[index] |= has_gradient
        return sums

    def late(self, round_: Round) -> dict[int, torch.Tensor]:
        """The sums of what came after its bucket was taken, by the index of the parameter."""
        extra: dict[int, torch.Tensor] = {}
        for number, rows in round_.late().items():
            bucket = self.buckets.plan.buckets[number]
            sums = local_sum(rows, self.buckets.homes[number])
            early = self.has_processes or self.buckets.is_viewed(number)
            for index, grad in zip(bucket, self._hooked(bucket, sums, early=early), strict=True):
                if grad is not None:
                    extra[index] = grad
        self.usage.check_late(extra)
        return extra

    def _hooked(
        self, bucket: Sequence[int], sums: list[MaybeTensor], *, early: bool
    ) -> list[MaybeTensor]:
        """What hooks make of sums, if they run before the engine would run them."""
        if not early and self.guard is None:
            return sums
        sums = self.user_hooks.run_all(bucket, sums)
        self._look_after_hooks(bucket, sums)
        return sums

    def _look_after_hooks(self, bucket: Sequence[int], sums: Sequence[MaybeTensor]) -> None:
        if self.guard is None or not self.user_hooks.with_gradient_hooks:
            return
        for index, grad in zip(bucket, sums, strict=True):
            if grad is not None and index in self.user_hooks.with_gradient_hooks:
                self.guard.look_after_hook(index, grad)
