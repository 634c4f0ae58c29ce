"""Clipping of gradients, with norms that are known from the guard against non-finite ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.reduction import Reduction


class GradientClipping:
    """The part of a wrapper that clips gradients and counts skipped steps."""

    module: Any
    _reduction: Reduction
    _nonfinite: NonFinitePolicy

    @property
    def num_skipped(self) -> int:
        """How many backwards were skipped with ``nonfinite="skip"``, the same in all processes."""
        return self._nonfinite.num_skipped

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of all parameters of the module together, in place.

        The result is that of ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)``. Nothing
        is sent: after a synchronised backward gradients are the same in all processes. Where one
        replica of one process has all, and ``nonfinite`` is not ``"ignore"``, their norms are known
        already unless somebody has changed them since.

        Example::

            model = DistributedDataParallel(nn.Linear(3, 1), ["cpu"], nonfinite="skip")
            model(torch.ones(2, 3)).sum().backward()
            total = model.clip_grad_norm(1.0)

        Args:
            max_norm: The largest norm that gradients may have together.
            norm_type: The order of the norm; infinity for the largest element. Default: 2.
            error_if_nonfinite: Whether a norm that is not finite is an error. Default: False.
            foreach: Whether torch takes all gradients at once. Default: where it has kernels for
                that.

        Returns:
            The norm that all gradients had together, 0-d, on the device of the first of them.

        Raises:
            RuntimeError: The norm is not finite, and ``error_if_nonfinite`` was passed.
        """
        grads = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        known = None
        if norm_type == 2.0:
            # From now on they are kept.
            self._nonfinite.wants_norms = True
            known = self._known_norms(grads)
        if known is None:
            clipped: Tensor = torch.nn.utils.clip_grad_norm_(
                self.module.parameters(), max_norm, norm_type, error_if_nonfinite, foreach
            )
            return clipped
        first = next(iter(grads.values()))
        norms = torch.stack([norm.to(first.device, first.dtype) for norm in known])
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients is {float(total)}, so they cannot "
                "be clipped; pass error_if_nonfinite=False to scale them by it anyway"
            )
        torch.nn.utils.clip_grads_with_norm_(list(grads), max_norm, total, foreach)
        return total

    clip_grad_norm_ = clip_grad_norm

    def _known_norms(self, grads: Mapping[Any, Tensor]) -> list[Tensor] | None:
        """The norm of each gradient, if the guard knows all of them and they have one dtype."""
        guard = self._reduction.reducer.guard
        if guard is None or not grads or len({grad.dtype for grad in grads.values()}) > 1:
            return None
        return guard.known_norms(grads)
