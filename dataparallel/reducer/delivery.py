"""How reduced gradients reach the originals: by the engine, in a bucket view, or in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import nn

from dataparallel.graph.gradient_home import GradientHome
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Buckets
from dataparallel.reducer.local_sum import MaybeTensor

#: Called with parameters whose gradients are in ``.grad``, to take an optimizer's step with them.
StepBucket = Callable[[Sequence[nn.Parameter]], None]


class Delivery:
    """Takes the results of one round to the originals.

    Args:
        originals: The parameters that the optimizer has.
        buckets: The buckets of the round.
        accumulated: What ``.grad`` held before it.
        step: Takes an optimizer's step in backward. Default: none is taken.

    Attributes:
        result: Per parameter, the gradient that the engine is to add to ``.grad``.
        in_place: Parameters whose ``.grad`` has it already.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        buckets: Buckets,
        accumulated: Accumulated,
        step: StepBucket | None,
    ) -> None:
        self.originals = originals
        self._buckets = buckets
        self._accumulated = accumulated
        self._step = step
        self.result: list[MaybeTensor] = [None] * len(originals)
        self.in_place: set[int] = set()
        #: Parameters that got no gradient in this round, in any process.
        self.without_gradient: set[int] = set()

    @property
    def home(self) -> GradientHome:
        """Where the gradients are."""
        return self._accumulated.home

    def keep(
        self,
        number: int,
        sums: Sequence[MaybeTensor],
        used: Sequence[int],
        extra: dict[int, torch.Tensor],
    ) -> None:
        """Deliver a bucket that no other process has a part in.

        Args:
            number: Number of the bucket.
            sums: The sums over the replicas; empty if a step was taken with them.
            used: Per parameter of the module, whether it has a gradient.
            extra: Gradients that came late, by the index of the parameter.
        """
        if self._buckets.is_viewed(number):
            if self._step is None:
                self._publish(number, used, extra)
            else:
                # The step has freed the gradients.
                self._buckets.release(number)
            return
        bucket = self._buckets.plan.buckets[number]
        for index, grad in zip(bucket, sums or [None] * len(bucket), strict=True):
            self.result[index] = grad if not extra else add(grad, extra.get(index))
        first = next((grad for grad in sums if grad is not None), None)
        if first is not None and first.dtype != self.originals[bucket[0]].dtype:
            for index in bucket:
                self.result[index] = self._converted(index, self.result[index])

    def receive(
        self,
        number: int,
        flat: torch.Tensor,
        sums: Sequence[MaybeTensor],
        used: Sequence[int],
        extra: dict[int, torch.Tensor],
    ) -> None:
        """Deliver a bucket that was reduced over processes.

        Args:
            number: Number of the bucket.
            flat: Its flat tensor, reduced; or a sparse gradient.
            sums: What this process had sent.
            used: Per parameter of the module, whether any process has a gradient.
            extra: Gradients that came late in some process, reduced, by the index.
        """
        if self._buckets.is_viewed(number):
            self._buckets.show(number, flat)
            self._publish(number, used, extra)
        else:
            grads = self._buckets.received(number, flat, sums, used)
            sends = self._accumulated.sends
            for index, grad in zip(self._buckets.plan.buckets[number], grads, strict=True):
                grad = grad if not extra else add(grad, extra.get(index))
                if grad is None:
                    continue
                if sends and self._accumulated.unreduced(index) is not None:
                    self._accumulated.replace(index, grad)
                    self.in_place.add(index)
                else:
                    self.result[index] = grad
        if self._step is not None:
            bucket = self._buckets.plan.buckets[number]
            self.step(number, [self.result[index] for index in bucket])
            for index in bucket:
                self.result[index] = None

    @torch.no_grad()
    def write(self) -> None:
        """Add the results to ``.grad``, as the engine would."""
        home = self._accumulated.home
        before = home.read(self.originals)
        for index, grad in enumerate(self.result):
            if grad is None:
                continue
            held = before[index]
            if held is None:
                held = grad
            elif held.is_sparse and not grad.is_sparse:
                held = grad + held
            else:
                held = held.add_(grad)
            home.write(self.originals[index], held)
            self.in_place.add(index)
        self.result = [None] * len(self.result)

    def _publish(self, number: int, used: Sequence[int], extra: dict[int, torch.Tensor]) -> None:
        self._buckets.add_to_views(number, extra)
        self._buckets.publish(number, used)
        bucket = self._buckets.plan.buckets[number]
        self.in_place.update(index for index in bucket if used[index])

    def withdraw(self) -> None:
        """Deliver nothing after all, and let there be no gradients from before the round either."""
        home = self._accumulated.home
        self._buckets.forget_views(home)
        # What they were before the round is of no use any more.
        home.settle()
        for original in self.originals:
            home.write(original, None)
        self._accumulated.after_synchronized()
        self.result = [None] * len(self.result)
        self.in_place.clear()

    def step(self, number: int, grads: Sequence[MaybeTensor]) -> None:
        """Put the gradients of a bucket into ``.grad``, and take the optimizer's step."""
        assert self._step is not None
        bucket = [self.originals[index] for index in self._buckets.plan.buckets[number]]
        with torch.no_grad():
            for original, grad in zip(bucket, grads, strict=True):
                if grad is not None:
                    grad = grad.to(original.dtype)
                    original.grad = grad if original.grad is None else original.grad + grad
            self._step(bucket)

    def _converted(self, index: int, grad: MaybeTensor) -> MaybeTensor:
        return None if grad is None else grad.to(self.originals[index].dtype)


@overload
def add(first: MaybeTensor, second: torch.Tensor) -> torch.Tensor: ...


@overload
def add(first: MaybeTensor, second: MaybeTensor) -> MaybeTensor: ...


def add(first: MaybeTensor, second: MaybeTensor) -> MaybeTensor:
    """The sum of what is there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
