"""Gradients of the originals as views of the buckets (``gradient_as_bucket_view``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from dataparallel.graph.gradient_home import IN_GRAD, GradientHome
from dataparallel.graph.original_hooks import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.storage import BucketStorage


class OriginalViews:
    """Prepares the buckets of replica 0 for a round, and shows their views as ``.grad`` after it.

    Args:
        originals: The parameters of one bucket.
        indices: Their indices among all parameters.
        storage: The memory of the bucket.
    """

    def __init__(
        self,
        originals: Sequence[torch.nn.Parameter],
        indices: Sequence[int],
        storage: BucketStorage,
    ) -> None:
        self._originals = list(originals)
        self._indices = list(indices)
        self._storage = storage
        self._aside: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._home = IN_GRAD
        self._grads: list[torch.Tensor | None] = []
        self._versions: dict[int, int] = {}
        self._sources: dict[int, torch.Tensor] = {}

    def keep(self, storages: Collection[int], home: GradientHome) -> None:
        """Note what gradients there are; before any bucket is written.

        Args:
            storages: Addresses of the memory of all buckets.
            home: Where the gradients are.
        """
        self._home = home
        home.make_way(self._originals, storages)
        self._grads = home.read(self._originals)
        self._versions = {}
        self._sources = {}
        members = zip(self._indices, self._grads, self._storage.views, strict=True)
        for index, grad, view in members:
            if grad is None or grad.data_ptr() == view.data_ptr():
                continue
            # The user's own tensor, or a view of what was the bucket before, or another's view.
            if not grad.is_sparse and grad.untyped_storage().data_ptr() in storages:
                self._sources[index] = grad.detach().clone()
            else:
                self._sources[index] = grad.detach()
                self._versions[index] = grad._version

    def attach(self, accumulated: Accumulated | None, hooked: Collection[int] = ()) -> None:
        """Let the bucket hold what ``.grad`` holds, zeros for None; :meth:`keep` comes before.

        Args:
            accumulated: Tells what of that must not be reduced again; None if nothing is reduced.
            hooked: Parameters with hooks, whose new gradient must be apart until :meth:`complete`.
        """
        self._aside = {}
        self._before = {}
        with torch.no_grad():
            if all([grad is None for grad in self._grads]):
                self._storage.flat.zero_()
                return
            members = zip(self._indices, self._grads, self._storage.views, strict=True)
            for index, grad, view in members:
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

    def complete(
        self, used: Sequence[bool], user_hooks: OriginalHooks, through: Collection[int] = ()
    ) -> None:
        """Run hooks on the sum over the replicas, and add what ``.grad`` held before.

        Args:
            used: Per parameter of the bucket, whether it has a gradient.
            user_hooks: The hooks.
            through: Parameters whose sum is not in the bucket, but on its way through the engine.
        """
        if not (self._before or user_hooks.with_gradient_hooks):
            return
        with torch.no_grad():
            members = zip(self._indices, self._storage.views, used, strict=True)
            for index, view, use in members:
                if use and index in through:
                    view.zero_()
                elif use and index in user_hooks.with_gradient_hooks:
                    view.copy_(user_hooks.run(index, view.clone()))
                if index in self._before:
                    view.add_(self._before[index])
        self._before = {}

    def publish(self, used: Sequence[int]) -> None:
        """Show each parameter that has a gradient, or had one before, its view as that.

        Args:
            used: Per parameter of the module, whether it has a gradient.
        """
        now = self._home.read(self._originals)
        members = zip(
            self._indices, self._originals, self._grads, now, self._storage.views, strict=True
        )
        for index, original, before, grad, view in members:
            if index in self._aside:
                with torch.no_grad():
                    view.add_(self._aside[index])
            version = self._versions.get(index)
            if grad is not before or (
                before is not None and version not in (None, before._version)
            ):
                self._add_meanwhile(grad, before, view)
            if used[index] or grad is not None:
                self._home.show(original, view)
        self.release()

    def release(self) -> None:
        """End a round; nothing is shown that is not shown already."""
        self._aside = {}
        self._grads = []
        self._home = IN_GRAD

    def forget(self, home: GradientHome) -> None:
        """Show no views any more; a round has failed that was writing to them."""
        self._home, self._grads = IN_GRAD, []
        home.take_back(self._originals, self._storage.views)

    def _add_meanwhile(
        self, grad: torch.Tensor | None, before: torch.Tensor | None, view: torch.Tensor
    ) -> None:
        """Keep what something else has put into the gradient since the round began."""
        if grad is None:
            return
        if before is not None:
            raise RuntimeError(
                "the gradient of a parameter was changed during the backward that computes it, by "
                "a hook or another wrapper of the module; with gradient_as_bucket_view=True "
                "gradients are added up in one place, so leave it at False"
            )
        with torch.no_grad():
            view.add_(grad)
