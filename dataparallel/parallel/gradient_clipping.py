"""Clipping of gradients, and how many steps were skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataparallel.reducer.nonfinite import NonFinitePolicy


class GradientClipping:
    """The part of a wrapper that clips gradients and counts skipped steps."""

    module: Any
    _nonfinite: NonFinitePolicy

    @property
    def num_skipped(self) -> int:
        """How many backwards were skipped with ``nonfinite="skip"``, the same in all processes.

        An optimizer does not tell whether it has changed anything. A learning rate schedule that
        is not to go on with a skipped step compares this number.

        Example::

            model = DistributedDataParallel(nn.Linear(3, 1), ["cpu"], nonfinite="skip")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            skipped = model.num_skipped
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if model.num_skipped == skipped:
                scheduler.step()
        """
        return self._nonfinite.num_skipped

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients of all parameters of the module together, in place.

        The same as ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)``. Nothing is sent:
        after a synchronized backward gradients are the same in all processes.

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
        total: Tensor = torch.nn.utils.clip_grad_norm_(
            self.module.parameters(), max_norm, norm_type, error_if_nonfinite, foreach
        )
        return total

    clip_grad_norm_ = clip_grad_norm
