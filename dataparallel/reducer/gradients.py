"""Where the leaves of one replica keep the gradients of one bucket until they are reduced.

Either the engine leaves its own tensors in ``.grad`` and they are taken from there, or ``.grad`` is
set to a view of the bucket beforehand and the engine adds to it in place. Both answer the same two
questions: has everything come, and what is it?
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.reducer.local_sum import MaybeTensor
from dataparallel.reducer.storage import BucketStorage


class StolenGradients:
    """Gradients are tensors of the engine, which are the taker's own.

    Args:
        leaves: The leaves of one replica in one bucket.
    """

    def __init__(self, leaves: Sequence[torch.nn.Parameter]) -> None:
        self.leaves = list(leaves)

    def attach(self) -> None:
        """Make the leaves ready for a backward."""

    def present(self) -> bool:
        """Whether each leaf that is trained has a gradient."""
        return all([leaf.grad is not None or not leaf.requires_grad for leaf in self.leaves])

    def take(self) -> list[MaybeTensor]:
        """The gradients; what comes afterwards is apart from them."""
        grads = [leaf.grad for leaf in self.leaves]
        self.drop()
        return grads

    def drop(self) -> None:
        """Forget everything."""
        for leaf in self.leaves:
            leaf.grad = None


class ViewedGradients(StolenGradients):
    """Gradients are added to views of a bucket, in place.

    Args:
        leaves: The leaves of one replica in one bucket.
        storage: The memory of the bucket on this replica.
    """

    def __init__(self, leaves: Sequence[torch.nn.Parameter], storage: BucketStorage) -> None:
        super().__init__(leaves)
        self.storage = storage
        # Apart from the storage's own views: these have a version counter each, which tells
        # whether the engine has added to this one.
        self._views = [_with_own_version(view) for view in storage.views]
        self._versions = [0] * len(self._views)

    def attach(self) -> None:
        """Set ``.grad`` of each leaf to its view, whatever that holds."""
        for leaf, view in zip(self.leaves, self._views, strict=True):
            leaf.grad = view
        self._versions = [view._version for view in self._views]

    def _written(self) -> list[bool]:
        pairs = zip(self._views, self._versions, strict=True)
        return [view._version != version for view, version in pairs]

    def present(self) -> bool:
        """Whether something was added to the view of each leaf that is trained."""
        pairs = zip(self._written(), self.leaves, strict=True)
        return all([written or not leaf.requires_grad for written, leaf in pairs])

    def take(self) -> list[MaybeTensor]:
        """The views, None for those to which nothing was added."""
        self.drop()
        pairs = zip(self.storage.views, self._written(), strict=True)
        return [view if written else None for view, written in pairs]


def _with_own_version(view: torch.Tensor) -> torch.Tensor:
    alone = torch.empty(0, dtype=view.dtype, device=view.device)
    return alone.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
